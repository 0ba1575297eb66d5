"""Federated training with BandMF: the loop of the production program.

A round: the source of cohorts says who came, the noise stream gives its row of noise, TFF trains on
the clients and aggregates, the source counts who is in the sum, and `TrainingRun` commits the
result, then releases it. Everything that the next round needs (model, optimizer, aggregator, noise
stream, simulated population) is in the checkpoint, but who took part by a participation registry:
it knows a round before the sum does, the ledger after, so whichever moment the program is killed
at, the registry has charged everybody who is in a sum.

An attempt at a round that too few clients came to is discarded before anything is computed, and
repeated. A worker on another machine that is lost is left out, and the round computed anew by the
others, of the same clients with the same row: the lost attempt gave no result.

What leaves the run folder: the models, the ledger and the metrics. TFF's own state never does: it
holds the noise. Metrics of clients (loss and accuracy while they train) carry no noise and are not
covered by the guarantee; they are for those who operate the run, in files that only they can open.
Metrics on the test set come from the released model and cost no privacy.

A client whose data cannot be read or trained on fails a whole round in TFF. It is looked for, left
out, and counted in the ledger (`failed_clients`), and the round is computed again without it, with
the same row of noise: the failed attempt gave no result, so nobody knows anything of that row. The
ledger names those who are in the sum that is released. A client that was left out contributed
zero, whatever its data: it did not take part, and neighbours differ by no more than before. Its
timer runs all the same, so that it does not come back in the next round. That clients failed, and
how many, is recorded exactly, like who took part.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
import tree
from absl import logging

from bandmf_tf._arrays import part
from bandmf_tf._files import owner_only_umask
from bandmf_tf._memory import NotEnoughMemoryError
from bandmf_tf.accounting.releases import Release
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.federated import aggregators, runtime
from bandmf_tf.federated.cohorts import (
    CohortRule,
    CohortSource,
    DataSourceCohorts,
    RegisteredClients,
    Selection,
    TooFewClientsError,
)
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping
from bandmf_tf.noise.stream import require_memory
from bandmf_tf.runs import ledger
from bandmf_tf.runs.anchors import append_head
from bandmf_tf.runs.basis import PINNED, SYSTEM
from bandmf_tf.runs.folder import RunError, RunFolder
from bandmf_tf.runs.progress import Progress, log_progress
from bandmf_tf.runs.registry import ParticipationRegistry
from bandmf_tf.runs.training_run import OnPoint, PublishedRound, RoundResult, TrainingRun
from bandmf_tf.simulation.clients import SimulatedClients
from bandmf_tf.simulation.config import DATA_SOURCE, FIELDS, REGISTERED, ConfigError, RunConfig
from bandmf_tf.simulation.population import Population
from bandmf_tf.simulation.tasks import FederatedTask, make_task

_TFF, _POPULATION = "tff/", "population/"
_NOISE, _NOISE_COUNTERS = "noise_rows/", "noise_counters/"
_DATA = "task_data"

# What a run takes beside its noise, measured by `benchmarks/memory.py`: copies of the model in this
# program and in TFF's worker, and what both need for any model.
_MODEL_COPIES = 50
_RUNTIME_BYTES = 500_000_000

# How TFF's runtime says that what it computed has failed, and not the runtime.
_COMPUTATION_FAILED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def build_learning_process(
    task: FederatedTask, mechanism: Mechanism, config: RunConfig
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging with the mechanism's noise and SGD with momentum on the server.

    Clients are weighted equally, and the noised sum is divided by `clients_per_round`, whatever the
    number of clients was: only a number fixed in advance is private.
    """
    options: dict[str, Any] = {
        "clients_per_round": config.clients_per_round,
        "adaptive_clipping": _adaptive_clipping(config),
        # Of data sources without a timer nobody knows who takes part; otherwise the ledger says it.
        "participation_enforced": None
        if config.clients != DATA_SOURCE or config.timer_seconds
        else False,
    }
    if config.aggregator == "stream":
        factory: Any = aggregators.BandMFFactory.from_stream(mechanism, **options)
    else:
        factory = aggregators.BandMFFactory.in_state(
            mechanism, pinned_seed=config.noise_seed, **options
        )
    if config.zeroing:
        factory = tff.aggregators.zeroing_factory(
            zeroing_norm=config.zeroing_norm * mechanism.l2_norm_clip,
            inner_agg_factory=factory,
            norm_order=math.inf,
        )
    return tff.learning.algorithms.build_unweighted_fed_avg(
        task.model,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(config.local_learning_rate),
        server_optimizer_fn=_server_optimizer(config),
        model_aggregator=factory,
    )


def _adaptive_clipping(config: RunConfig) -> AdaptiveClipping | None:
    if not config.clip_quantile:
        return None
    return AdaptiveClipping(
        config.clip_quantile, config.clip_learning_rate, config.clip_vote_weight
    )


def _server_optimizer(config: RunConfig) -> tff.learning.optimizers.Optimizer:
    rates = config.server_learning_rate * workloads.warmup_cooldown_schedule(
        config.num_rounds, config.warmup_fraction, config.cooldown_fraction
    )

    def learning_rate(round_number: tf.Tensor) -> tf.Tensor:
        index = tf.minimum(tf.cast(round_number, tf.int64), len(rates) - 1)
        return tf.gather(tf.constant(rates, tf.float32), index)

    momentum = config.server_momentum or None
    return tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(float(rates[0]), momentum), learning_rate
    )


class FederatedTraining:
    """A federated training run that can be interrupted at any moment.

    Args:
      config: What to do.
      registry_database: The URL of a PostgreSQL database for registered clients; None for SQLite in
        the folder of the run.
      on_point: Called at every point of a round, see `runs/training_run.py`; for tests and drills.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        registry_database: str | None = None,
        on_point: OnPoint = lambda point, number: None,
    ):
        self.config = config
        self.mechanism = load_mechanism(config.mechanism)
        config.check_mechanism(self.mechanism)
        self.task = make_task(config)
        if config.aggregator == "stream":
            self._require_memory()
        folder = RunFolder(Path(config.output))
        self._begun = -1  # The last round that this object has begun.
        self._lost_workers = 0
        with contextlib.ExitStack() as opened:
            self.source = self._make_source(folder, registry_database, opened)
            self.run = TrainingRun.start(
                folder.path,
                self.mechanism,
                config.stored(),
                self._header(),
                config_defaults={name: field.default for name, field in FIELDS.items()},
                record_pseudonyms=config.participation_recording == ledger.RECORDING_PSEUDONYMOUS,
                publish_every=config.publish_every,
                publishers=[_TensorBoard(folder.tensorboard)],
                on_point=on_point,
            )
            opened.callback(self.run.close)
            self._prepare(config)
            self._opened = opened.pop_all()

    def _make_source(
        self, folder: RunFolder, database: str | None, opened: contextlib.ExitStack
    ) -> CohortSource:
        config, task = self.config, self.task
        timeout = config.report_timeout_seconds or None
        rule = CohortRule(
            over_selection=config.over_selection,
            minimum=config.minimum_clients,
            timeout_seconds=timeout,
        )
        if config.clients == DATA_SOURCE:
            if task.data_source is None:
                raise ConfigError(f"The task {config.task} has no data_source; give it one.")
            return DataSourceCohorts(task.data_source, rule.minimum, config.timer_seconds)
        if config.clients == REGISTERED:
            registry = opened.enter_context(self._start_registry(folder, database))
            names = task.client_ids
            numbers = {f"client {number}": number for number in range(config.num_clients)}
            return RegisteredClients(
                registry,
                list(numbers) if names is None else names,
                task.client_dataset
                if names is not None
                else lambda name: task.client_dataset(numbers[name]),
                _input_spec(task),
                rule,
            )
        participation = config.participation_rule(self.mechanism)
        population = Population(
            config.num_clients,
            participation,
            config.availability_model(),
            seed=config.population_seed,
            misbehaving_fraction=config.misbehaving_fraction,
            round_seconds=config.min_round_seconds,
            dropout_fraction=config.dropout_fraction,
        )
        return SimulatedClients(population, participation, task.client_dataset, rule)

    def _start_registry(self, folder: RunFolder, database: str | None) -> ParticipationRegistry:
        """Starts it before the run, beside its secrets, so that both have the same pseudonyms."""
        if folder.ledger.exists() and not folder.salt.exists():
            raise RunError(
                f"The run in {folder.path} began without a registry; continue it as it began, or "
                "use another folder."
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        return ParticipationRegistry.start(folder.secret, self.mechanism, database=database)

    def _prepare(self, config: RunConfig) -> None:
        self._check_data()
        # TFF takes seconds to build; whatever speaks against going on has been said by now.
        self._process = build_learning_process(self.task, self.mechanism, config)
        self._state = self._process.initialize()
        weights = self._state.global_model_weights
        self._specs = [tf.TensorSpec(np.shape(w), np.asarray(w).dtype) for w in weights.trainable]
        self._supply: aggregators.NoiseSupply | None = None
        if config.aggregator == "stream":
            self._supply = aggregators.NoiseSupply(
                self.mechanism,
                self._specs,
                on_disk=True,
                pinned_seed=config.noise_seed,
                adaptive_clipping=_adaptive_clipping(config),
            )
        if self.run.state is not None:
            self._restore(self.run.state)
            self.run.forget_state()

    def train(self, progress: Progress = log_progress, *, anchor: str | None = None) -> None:
        """Does all rounds that are left, and appends the ledger's last hash to the anchor."""
        self._append_head(anchor)  # A crash may have come between the commit and this.
        self.run.show_progress(progress)
        while not self.run.is_complete:
            self._round()
            self._append_head(anchor)

    def _append_head(self, anchor: str | None) -> None:
        if anchor is not None:
            append_head(anchor, self.run.hashes)

    def projected_epsilon(self) -> float:
        """Epsilon at the mechanism's delta if all goes on like so far.

        That is the mechanism's own epsilon unless clients came back sooner than it allows for.
        """
        observed = self.source.observed_min_separation
        planned = self.mechanism.participation.min_separation
        if planned is None or observed is None:
            return self.mechanism.epsilon
        return _epsilon(self.mechanism, min(observed, planned))

    def evaluate(self) -> dict[str, float]:
        """Returns loss and accuracy of the current model on the test set."""
        # Here and below, not by TFF's computations, for which all of the state is sent to and fro.
        weights = self._state.global_model_weights
        state = self._evaluation.initialize()._replace(global_model_weights=weights)
        output = self._evaluation.next(state, [self.task.test_dataset])
        metrics = output.metrics["client_work"]["eval"]["current_round_metrics"]
        return _scalars("test", metrics)

    def close(self) -> None:
        """Ends the use of the run's folder, and of its registry."""
        self._opened.close()

    def __enter__(self) -> FederatedTraining:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @functools.cached_property
    def _evaluation(self) -> tff.learning.templates.LearningProcess:
        """Built when it is first needed: it takes seconds, and many starts end before that."""
        return tff.learning.algorithms.build_fed_eval(self.task.model)

    def _round(self) -> PublishedRound:
        number = self.run.next_round
        if self._begun == number:
            raise RunError(
                f"Round {number} was interrupted after its clients had been chosen; start the run "
                "again, which goes back to its last checkpoint."
            )
        self._begun = number
        selection = self._select(number)
        self.run.begin_round(selection.start)
        if self._supply is not None:
            self._state = self._supply.supply(self._state)
        output, left_out = self._train_on(number, selection)
        self._state = output.state
        self.source.count([selection.clients[position] for position in left_out])
        return self.run.commit(self._result(selection, left_out, output.metrics))

    def _select(self, number: int) -> Selection:
        """Returns who came, after attempts at the round that too few have come to."""
        for attempt in range(1, self.config.round_attempts + 1):
            try:
                return self.source.select(number, self.config.clients_per_round)
            except TooFewClientsError as error:
                logging.warning("attempt %d: %s", attempt, error)
                found = str(error).partition(";")[0]
        raise RunError(
            f"{found}, in {attempt} attempts: of num_clients={self.config.num_clients} all others "
            "were away, had failed, or had taken part too recently or too often; start the same "
            "command again later, or use a larger population or fewer clients_per_round."
        )

    def _train_on(self, number: int, selection: Selection) -> tuple[Any, list[int]]:
        """Returns what TFF computed, and the positions of those who are not in its sum.

        That is nobody, if it can be computed of all.
        """
        data = selection.data
        self._lost_workers = 0

        def attempt(positions: Sequence[int]) -> Any:
            # Never without any client, for whom TFF has no sum at all.
            chosen = [data[position] for position in positions] or [_no_examples(self.task)]
            output = self._next(chosen)
            if aggregators.noised_rounds(output.state) != number + 1:
                raise RunError(
                    f"The result of round {number} has no noise of that round; it was not released."
                )
            return output

        everybody = list(range(len(data)))
        try:
            return attempt(everybody), []
        except Exception as error:
            self._check_without_clients(attempt, error, number)
            failing = sorted(_failing(attempt, everybody))
            # What clients' errors say may quote their data.
            logging.warning(
                "round %d: %d of %d clients failed (%s) and are left out",
                number,
                len(failing),
                len(data),
                type(error).__name__,
            )
        return attempt([p for p in everybody if p not in failing]), failing

    def _next(self, data: Sequence[Any]) -> Any:
        """Computes the round, without workers that are lost on the way."""
        while True:
            try:
                return self._process.next(self._state, list(data))
            except runtime.WorkerLostError as error:
                lost = runtime.leave_out_lost_workers()
                if not lost:
                    raise
                logging.warning("%s It is left out from now on.", error)
                self._lost_workers += lost

    def _check_without_clients(
        self, attempt: Callable[[Sequence[int]], Any], error: Exception, number: int
    ) -> None:
        """Raises if a round fails for a reason that is no client's: a worker is lost, or a bug."""
        try:
            if not _is_of_runtime(error):
                attempt(())
                return
        except Exception as found:
            error = found
        if not isinstance(error, grpc.RpcError):
            raise error
        details = getattr(error, "details", lambda: "")() or type(error).__name__
        raise RunError(
            f"TFF could not compute round {number}: {details.splitlines()[0]}; nothing of the "
            "round was released, start the same command again."
        ) from error

    def _metrics(
        self, number: int, participants: int, flags: Mapping[str, int], metrics: Any
    ) -> dict[str, float]:
        done, last = number + 1, self.config.num_rounds
        found = _scalars("train", metrics["client_work"]["train"])
        due = done % self.config.evaluate_every == 0 or done == last
        tested = self.evaluate() if due else {}
        if self.config.clip_quantile:  # Of the next round; it follows from what is released.
            found["l2_norm_clip"] = _clip_norm(metrics)
        return {
            **found,
            "test_loss": tested.get("test_loss", math.nan),
            "test_accuracy": tested.get("test_accuracy", math.nan),
            "num_participants": participants,
            "timer_violations": flags.get(ledger.FLAG_TIMER_VIOLATIONS, 0),
            "min_separation": self.source.observed_min_separation or math.nan,
            "epsilon": self.projected_epsilon(),
        }

    def _result(self, selection: Selection, left_out: Sequence[int], metrics: Any) -> RoundResult:
        counts = collections.Counter(selection.flags)
        counts[ledger.FLAG_FAILED_CLIENTS] += len(left_out)
        counts[ledger.FLAG_LOST_WORKERS] += self._lost_workers
        clients = [c for position, c in enumerate(selection.clients) if position not in left_out]
        chunks = {} if self._supply is None else self._supply.chunks()
        return RoundResult(
            state=self._saved(),
            model=_named(self._state.global_model_weights),
            metrics=self._metrics(self.run.next_round, len(clients), counts, metrics),
            start=selection.start,
            end=selection.end,
            client_ids=clients,
            flags={name: count for name, count in counts.items() if count},
            large_state={_NOISE + name: chunk for name, chunk in chunks.items()},
        )

    def _saved(self) -> dict[str, np.ndarray]:
        arrays = {f"{_TFF}{i:04d}": np.asarray(a) for i, a in enumerate(tree.flatten(self._state))}
        if self._supply is not None:
            for name, array in self._supply.counters().items():
                arrays[_NOISE_COUNTERS + name] = array
        for name, array in self.source.state().items():
            arrays[_POPULATION + name] = array
        arrays[_DATA] = np.array(self.task.data)
        return arrays

    def _require_memory(self) -> None:
        """Refuses a run that cannot fit before anything of it exists."""
        specs = _trainable_specs(self.task.model)
        model = sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)
        beside = _MODEL_COPIES * model + _RUNTIME_BYTES
        require_memory(self.mechanism.strategy, specs, on_disk=True, beside=beside)
        try:
            require_memory(self.mechanism.strategy, specs, beside=beside)
        except NotEnoughMemoryError as error:
            logging.warning(
                "%s Past noise stays on disk, and what has no room in memory is read again for "
                "every block of rounds.",
                str(error).partition(";")[0] + ".",
            )

    def _check_data(self) -> None:
        state = self.run.state
        if state is not None and (began_with := str(state[_DATA])) != self.task.data:
            raise RunError(
                f"The run began with other data ({began_with}) than there are now "
                f"({self.task.data}); make the data of the run available again."
            )

    def _restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        leaves = [array for _, array in sorted(part(arrays, _TFF).items())]
        # Strings of TFF's events come back as arrays of bytes, which TFF does not take.
        leaves = [array.item() if array.dtype.kind in "SU" else array for array in leaves]
        leaves = aggregators.mended_leaves(self._state, leaves)
        found, expected = (
            [np.shape(leaf) for leaf in s] for s in (leaves, tree.flatten(self._state))
        )
        if found != expected:  # Whatever goes on prints the state, with the noise in it.
            raise RunError(
                f"The checkpoint holds {len(found)} arrays of another model or aggregator than the "
                f"task has now, with {len(expected)}; continue the run with what it began with."
            )
        self._state = tree.unflatten_as(self._state, leaves)
        self.source.restore(part(arrays, _POPULATION))
        if self._supply is not None:
            chunks = part(self.run.large_state, _NOISE)
            self._supply.restore(part(arrays, _NOISE_COUNTERS), chunks)
        elif self.config.noise_seed is None:
            self._state = aggregators.refresh_noise(self._state, self.mechanism, self._specs)

    def _header(self) -> ledger.LedgerHeader:
        config, adaptive = self.config, _adaptive_clipping(self.config)
        return ledger.LedgerHeader.of_run(
            self.mechanism,
            Path(config.output).name or "run",
            config.clients_per_round,
            num_rounds=config.num_rounds,
            clock=self.source.clock,
            timer_seconds=self.source.timer_seconds,
            enforced_min_separation=self.source.min_separation,
            enforced_max_participations=self.source.max_participations,
            noise_source=SYSTEM if config.noise_seed is None else PINNED,
            adaptive_clipping=None if adaptive is None else dataclasses.asdict(adaptive),
        )


class _TensorBoard:
    """Writes the metrics of committed rounds for TensorBoard."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: tf.summary.SummaryWriter | None = None

    def __call__(self, published: PublishedRound) -> None:
        with owner_only_umask():
            if self._writer is None:
                self._folder.mkdir(exist_ok=True)
                self._writer = tf.summary.create_file_writer(os.fspath(self._folder))
            with self._writer.as_default(step=published.round):
                for name, value in published.metrics.items():
                    if math.isfinite(value):
                        tf.summary.scalar(name, value)
            self._writer.flush()


def _no_examples(task: FederatedTask) -> tf.data.Dataset:
    """Returns the data of a client that has none: it contributes zero."""

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([size or 0 for size in spec.shape], spec.dtype)

    zero = tf.nest.map_structure(zeros, _input_spec(task))
    return tf.data.Dataset.from_tensors(zero).take(0)


def _input_spec(task: FederatedTask) -> Any:
    return (task.model() if callable(task.model) else task.model).input_spec


def _failing(attempt: Callable[[Sequence[int]], Any], clients: Sequence[int]) -> set[int]:
    """Returns who fails of clients that fail together: in f log n attempts for f of n."""
    if len(clients) == 1:
        return set(clients)
    found = set()
    for half in (clients[: len(clients) // 2], clients[len(clients) // 2 :]):
        try:
            attempt(half)
        except Exception as error:
            if _is_of_runtime(error):
                raise
            found |= _failing(attempt, half)
    return found


def _is_of_runtime(error: Exception) -> bool:
    """Whether TFF's runtime failed, and not what it computed."""
    return isinstance(error, grpc.RpcError) and error.code() not in _COMPUTATION_FAILED


@functools.lru_cache(maxsize=64)
def _epsilon(mechanism: Mechanism, min_separation: int) -> float:
    planned = mechanism.participation
    if min_separation == planned.min_separation:
        return mechanism.epsilon
    found = MinSeparation(min_separation, planned.max_participations)
    return (
        Release(mechanism.strategy, found)
        .guarantee(
            mechanism.noise_multiplier, mechanism.delta, discretization=mechanism.discretization
        )
        .epsilon
    )


def _scalars(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are single numbers; what measures accuracy is called accuracy."""
    numbers = {name: np.asarray(value) for name, value in metrics.items()}
    found = {name: float(value) for name, value in numbers.items() if value.ndim == 0}
    if "accuracy" not in found:  # Keras names metrics for their class: sparse_categorical_accuracy.
        similar = [name for name in found if name.endswith("_accuracy")]
        found = {("accuracy" if name in similar[:1] else name): v for name, v in found.items()}
    return {f"{prefix}_{name}": value for name, value in found.items()}


def _clip_norm(metrics: Any) -> float:
    """Returns the clip norm that adapts, from the measurements of the aggregator."""
    leaves = tree.flatten_with_path(metrics)
    return next(float(leaf) for at, leaf in leaves if at and at[-1] == "l2_norm_clip")


def _named(weights: Any) -> dict[str, np.ndarray]:
    return {
        f"{kind}_{number:03d}": np.asarray(array)
        for kind in ("trainable", "non_trainable")
        for number, array in enumerate(getattr(weights, kind))
    }


def _trainable_specs(model: Any) -> list[tf.TensorSpec]:
    """Returns the specs of the trainable weights of a TFF model of either kind."""
    if callable(model):
        with tf.Graph().as_default():
            return [tf.TensorSpec(v.shape, v.dtype) for v in model().trainable_variables]
    trainable, _ = model.initial_weights
    return [tf.TensorSpec(np.shape(w), np.asarray(w).dtype) for w in trainable]


def prepare_runtime(
    max_concurrent_clients: int = 0,
    workers: Sequence[str] = (),
    tls_folder: str | None = None,
    *,
    allow_open_worker: bool = False,
) -> None:
    """Chooses where TFF runs: on `workers`, or on this machine in a worker that ends with us.

    Args:
      max_concurrent_clients: Clients that train at the same time on this machine; 0 for no limit.
      workers: Worker services, see `runtime.set_remote_context`.
      tls_folder: What `production/certificates.sh` has made for the program.
      allow_open_worker: Whether workers that anybody can reach are accepted.
    """
    if workers:
        tls = None
        if tls_folder:
            names = ("program.pem", "program.key", "ca.pem")
            tls = runtime.TlsFiles(*(str(Path(tls_folder) / name) for name in names))
        runtime.set_remote_context(workers, tls, allow_open_worker=allow_open_worker)
    else:
        runtime.set_local_context(max_concurrent_clients, allow_open_worker=allow_open_worker)
