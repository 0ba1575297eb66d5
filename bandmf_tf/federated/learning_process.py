"""A learning process of TFF that is private whoever runs it, TFF's programs or one's own loop.

    with private_learning_process(builder, mechanism, "noise", clients_per_round=100) as process:
        state = process.initialize()
        state = process.next(state, cohort).state

The state holds no noise and no seed before, between and after rounds, so state managers may store
it and release managers release it. Each call of `next` takes one row of the noise stream, which
lives in a folder of its owner, and takes it for good: that the row is taken is durable before it is
used. So no row is in two results, whatever a program does with states: it may discard a round and
repeat it from the same state, go back to an older state, run two branches, be killed at any moment.
Each of these costs a row, never privacy. Every result that leaves `next` is covered by the
mechanism, released or not, if its clients are as far apart as the mechanism says, in calls of
`next`: who was in a discarded round has taken part in it. Plan more rows than rounds if rounds may
be repeated; without rows there are no rounds.

With a participation registry this is enforced. Round r of the registry has row r: `next` takes the
row of the attempt that is open, once, and writes down which that was in the same file. So clients
are never closer in rows than in the registry's rounds, whatever was killed, repeated or put back. A
round of the registry without a call of `next` costs its row, too. A registry that was put back is
refused, and so is noise that was put back or copied, if the registry was not.

What is in metrics has no noise, so a process gives none unless it is asked to. What would not be
private is refused when the process is built (`check_state`): Mime, SCAFFOLD and the like keep
gradients of clients in a state of their own, and thresholds that adapt to clients.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tree

from bandmf_tf.errors import BandMFError
from bandmf_tf.federated import aggregators
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping
from bandmf_tf.noise.query import mechanism_fingerprint, row_specs
from bandmf_tf.runs.basis import PINNED, SYSTEM
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder
from bandmf_tf.runs.folder import FolderLock, RunError, RunFolder
from bandmf_tf.runs.progress import Progress, RunProgress
from bandmf_tf.runs.registry import Outcome, ParticipationRegistry

# Round of a registry and attempt at it.
Attempt = tuple[int, int]


def private_learning_process(
    process_builder: Callable[..., tff.learning.templates.LearningProcess],
    mechanism: Mechanism,
    noise_folder: str | os.PathLike[str],
    *,
    clients_per_round: int,
    registry: ParticipationRegistry | None = None,
    adaptive_clipping: AdaptiveClipping | None = None,
    with_client_metrics: bool = False,
    progress: Progress | None = None,
    pinned_seed: int | None = None,
) -> PrivateLearningProcess:
    """Returns a learning process whose every result has a row of noise of its own.

    Args:
      process_builder: Called with `model_aggregator`, makes the process: a builder of TFF with its
        other arguments (`functools.partial(tff.learning.algorithms.build_fed_sgd, model_fn)`), or a
        function of your own, which may put TFF's zeroing with a fixed threshold around the
        aggregator. Clients count equally, also where TFF would weight them.
      mechanism: The mechanism.
      noise_folder: Where the noise is kept, its owner's only; one program at a time. The same
        folder as long as a state of this process goes on, and another one for another run.
      clients_per_round: The fixed denominator of the mean.
      registry: Who admits the clients, by `RegisteredClients` or in a loop of your own; the same
        one as long as the folder is. With it a program that was put back goes on. None: nothing
        enforces how often and how far apart clients take part.
      adaptive_clipping: How the clip norm adapts, within the same guarantee; None: it does not.
      with_client_metrics: Whether `next` returns the metrics of clients. They are exact, and not
        covered by the guarantee: show them to nobody who may not see clients' data.
      progress: Called after every round with how many rows of noise are taken and a line about it,
        epsilon included; None logs it. The same is in `metrics.prom` in the folder of the noise.
      pinned_seed: For tests only: makes the noise reproducible, by anybody.

    Raises:
      BandMFError: The process would keep something of clients without noise.
      RunError: The folder is in use, or of another mechanism, model or registry.
    """
    checksum = mechanism_checksum(mechanism)
    if registry is not None and registry.mechanism_checksum != checksum:
        raise BandMFError(
            f"The registry is of the mechanism {registry.mechanism_checksum[:12]}.. and the "
            f"process of {checksum[:12]}..; start the registry with the mechanism of the process."
        )
    factory = aggregators.BandMFFactory.from_stream(
        mechanism,
        clients_per_round=clients_per_round,
        count_records=False,
        adaptive_clipping=adaptive_clipping,
        participation_enforced=registry is not None,
    )
    try:
        process = process_builder(model_aggregator=factory)
    except TypeError:  # Builders of weighted processes take weighted aggregators only.
        weighted = tff.aggregators.as_weighted_aggregator(factory)
        process = process_builder(model_aggregator=weighted)
    state_type = process.initialize.type_signature.result.member
    aggregators.check_state(_zeros(state_type))
    specs = aggregators.value_specs(state_type.global_model_weights.trainable)
    supply = functools.partial(
        aggregators.NoiseSupply,
        mechanism,
        specs,
        on_disk=True,
        pinned_seed=pinned_seed,
        adaptive_clipping=adaptive_clipping,
    )
    owner = {
        "mechanism_checksum": checksum,
        "fingerprint": str(mechanism_fingerprint(mechanism, row_specs(specs, adaptive_clipping))),
        "noise_source": SYSTEM if pinned_seed is None else PINNED,
    }
    noise = _NoiseFolder(noise_folder, mechanism.num_rounds, supply, owner, registry)
    prometheus = RunFolder(Path(noise_folder)).prometheus
    is_enforced = registry is not None
    told = RunProgress(prometheus, mechanism, clients_per_round, is_enforced, progress)
    return PrivateLearningProcess(process, noise, told, with_client_metrics)


class PrivateLearningProcess(tff.learning.templates.LearningProcess):
    """A learning process whose noise is outside of its state; see `private_learning_process`."""

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        noise: _NoiseFolder,
        progress: RunProgress,
        with_client_metrics: bool,
    ):
        super().__init__(
            process.initialize,
            process.next,
            process.get_model_weights,
            process.set_model_weights,
            get_hparams_fn=process.get_hparams,
            set_hparams_fn=process.set_hparams,
        )
        self._noise = noise
        self._private_next = _Next(process.next, noise, progress, with_client_metrics)

    @property
    def next(self) -> _Next:
        """Computes a round; a function of state and data as in TFF, but no `tff.Computation`."""
        return self._private_next

    @property
    def rows_taken(self) -> int:
        """How many rows of noise were taken, in rounds that went on or not."""
        return self._noise.rows_taken

    def close(self) -> None:
        """Lets other programs use the folder of the noise."""
        self._noise.close()

    def __enter__(self) -> PrivateLearningProcess:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class _Next:
    """`next` of a private learning process."""

    def __init__(
        self, inner: Any, noise: _NoiseFolder, progress: RunProgress, with_client_metrics: bool
    ):
        self._inner = inner
        self._noise = noise
        self._progress = progress
        self._with_client_metrics = with_client_metrics
        self.type_signature = inner.type_signature

    def __call__(self, state: Any, data: Any) -> tff.learning.templates.LearningProcessOutput:
        output = self._inner(self._noise.supply(state, len(data)), data)
        self._progress.tell(self._noise.rows_taken, {"num_participants": len(data)})
        if self._with_client_metrics:
            return output
        # Where TFF's programs look for metrics.
        metrics: dict[str, Any] = {"client_work": {"train": {}}}
        return tff.learning.templates.LearningProcessOutput(state=output.state, metrics=metrics)


class _NoiseFolder:
    """A noise stream in a folder, each row of which is taken once."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_rounds: int,
        make_supply: Callable[[], aggregators.NoiseSupply],
        owner: Mapping[str, str],
        registry: ParticipationRegistry | None,
    ):
        files = RunFolder(Path(folder))
        self._path, self._num_rounds, self._owner = files.path, num_rounds, owner
        self._registry = registry
        self._attempt: Attempt | None = None  # The last one of the registry that had a row.
        self._one_at_a_time = threading.Lock()
        self._lock = FolderLock(files)
        try:
            for leftover in files.leftovers():
                leftover.unlink()
            self._checkpoints = CheckpointFolder(files.secret)
            self._supply = make_supply()
            found = self._checkpoints.load_newest()
            if found is not None:
                self._check_owner(found)
                self._supply.restore(found.arrays, found.large_arrays)
            if registry is not None:
                registry.take_row(self._attempt)
                registry.row_taken = lambda *attempt: attempt == self._attempt
        except BaseException:
            self.close()
            raise

    @property
    def rows_taken(self) -> int:
        """How many rows were taken."""
        return int(self._supply.stream.round)

    def supply(self, state: Any, num_clients: int = 0) -> Any:
        """Returns the state with a row that nobody else gets; that it is taken is durable.

        Args:
          state: Of the process.
          num_clients: How many will be in the sum; at most as many as have arrived.
        """
        for leaf in tree.flatten(state):
            if not isinstance(leaf, np.ndarray | np.generic | bytes | str | int | float):
                raise BandMFError(
                    "`next` of a private learning process takes a state of arrays, and is no part "
                    "of another computation; await tff.program.materialize_value(state) first. "
                    f"Found a {type(leaf).__name__}."
                )
        with self._one_at_a_time:
            self._lock.check()
            attempt = self._open_attempt(num_clients)
            for _ in range(1 + self._rounds_without_row(attempt)):
                if self.rows_taken >= self._num_rounds:
                    raise RunError(
                        f"All {self.rows_taken} rows of noise in {self._path} are taken, by rounds "
                        "that went on or not; plan a mechanism with more rounds."
                    )
                supplied = self._supply.supply_next(state)
            metadata = {**self._owner, "registry": self._registry and self._registry.identity}
            self._checkpoints.save(
                Checkpoint(
                    self.rows_taken,
                    {**metadata, "attempt": attempt},
                    self._supply.counters(),
                    self._supply.chunks(),
                )
            )
            if self._registry is not None:
                self._registry.take_row(self._attempt, attempt)
            self._attempt = attempt
            self._checkpoints.remove_old()
        return supplied

    def _open_attempt(self, num_clients: int) -> Attempt | None:
        """Returns round and attempt of the clients that are in the sum; None without a registry."""
        if self._registry is None:
            return None
        found = self._registry.open_attempt
        if found is None:
            raise RunError(
                "No round of the registry is open, so nobody may be in the sum; select the clients "
                "of the round from it before `next`."
            )
        attempt = found.number, found.attempt
        if self._attempt is not None and attempt <= self._attempt:
            why = (
                "its clients took part" if attempt == self._attempt else "the registry was put back"
            )
            raise RunError(
                f"Round {attempt[0]} of the registry was open and noise was taken for round "
                f"{self._attempt[0]} already: {why}; select clients again, from its newest state."
            )
        arrived = self._registry.outcomes(found.number).get(Outcome.ARRIVED, 0)
        if num_clients > arrived:
            raise RunError(
                f"`next` got {num_clients} clients, and {arrived} have arrived in round "
                f"{found.number} of the registry; add those alone that `arrived` has returned."
            )
        return attempt

    def _rounds_without_row(self, attempt: Attempt | None) -> int:
        """Returns how many rounds of the registry, before this one, have taken no row of noise."""
        if attempt is None:
            return 0
        following = self.rows_taken if self._attempt is None else self._attempt[0] + 1
        return max(0, attempt[0] - following)

    def close(self) -> None:
        """Lets other programs in."""
        self._lock.close()

    def _check_owner(self, found: Checkpoint) -> None:
        for name, expected in self._owner.items():
            if found.metadata.get(name) != expected:
                raise RunError(
                    f"The noise in {self._path} has another {name} than this process; use the "
                    "folder that its run began with, or an empty one."
                )
        known, here = found.metadata.get("registry"), self._registry and self._registry.identity
        if known not in (None, here):
            raise RunError(
                f"The clients of the noise in {self._path} were admitted by the registry "
                f"{str(known)[:12]}..; give that one to private_learning_process."
            )
        if found.metadata.get("attempt") is not None:
            number, attempt = found.metadata["attempt"]
            self._attempt = number, attempt


def _zeros(type_spec: tff.Type) -> Any:
    """Returns a structure of arrays of a type, to look at."""

    def of(part: tff.Type) -> Any:
        if isinstance(part, tff.TensorType):
            return np.zeros([size or 0 for size in part.shape], part.dtype)
        return tff.structure.Struct(
            [(name, of(element)) for name, element in tff.structure.to_elements(part)]
        )

    return tff.types.type_to_py_container(of(type_spec), type_spec)
