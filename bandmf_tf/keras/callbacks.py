"""A callback that shows epsilon while training and writes what happened when it ends."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from bandmf_tf import _provenance
from bandmf_tf._numbers import ceil_div, round_up
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat
from bandmf_tf.keras.models import EpsilonDisplay, PrivateModelMixin
from bandmf_tf.keras.optimizers import PrivateOptimizer
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.mechanisms.spending import EpsilonSpent
from bandmf_tf.runs.basis import PINNED, SYSTEM, UNKNOWN, Basis
from bandmf_tf.runs.run_record import (
    EXAMPLE,
    USER,
    RunRecord,
    RunRecordError,
    load_run_record,
    save_run_record,
)

_AGAIN = (
    "Steps that the record had told of were taken again, from an older state: if anybody saw "
    "weights of the first time, the privacy loss of both adds up; if not, say so to the callback "
    "by undone_steps_unseen=True."
)
_WRITES = 100  # Of a record in a run, beside those at the end of epochs.


_LARGEST_SHORT = 1000.0  # Of larger numbers float32 holds no four decimals.


def shown_epsilon(epsilon: float) -> float:
    """Returns epsilon rounded up to where neither Keras's four decimals nor float32 lower it."""
    if not 0.0 < epsilon < _LARGEST_SHORT:
        return float(math.ceil(epsilon)) if math.isfinite(epsilon) else epsilon
    return round_up(epsilon, max(1, 5 + math.floor(math.log10(epsilon))))


class PrivacyCallback(tf.keras.callbacks.Callback):
    """Shows epsilon spent so far and writes a run record.

    Epsilon, at the mechanism's delta, appears as `epsilon` in the progress bar, the history and
    TensorBoard. It is computed at a few rounds and is never too small in between, and rounded up to
    the four decimals that Keras shows; the run record has it in full. With a plain Keras model it
    appears at the end of epochs only; put the callback before `TensorBoard`.

    Args:
      path: Where to write the run record (`run_record.py`); None: nowhere. It is written before
        the rounds that it counts, a hundredth of the plan at a time, and after every epoch, so that
        it never tells of fewer rounds than were done. A private model goes on to write it when it
        is trained without this callback.
      undone_steps_unseen: States that nobody has seen weights of steps which a restore undoes (or
        of an earlier run with the same record). Otherwise the record has a caution if steps that
        it may have told of before are taken again.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, undone_steps_unseen: bool = False
    ):
        super().__init__()
        self.path = None if path is None else Path(path).absolute()
        self._undone_steps_unseen = undone_steps_unseen
        self._written: RunRecord | None = None
        self._again = False  # Whether steps of the record are taken again.
        self._rounds_written = 0
        self._spent: EpsilonSpent | None = None
        self._display: EpsilonDisplay | None = None
        self._shown: float | None = None
        self._started = _provenance.now()

    def set_model(self, model: tf.keras.Model) -> None:
        """Attaches to a model with a private optimizer; called by Keras."""
        super().set_model(model)
        optimizer = model.optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            raise BandMFTypeError(
                "PrivacyCallback needs a model with a private optimizer. Found "
                f"{type(optimizer).__name__}."
            )
        if optimizer.mechanism is None:
            raise BandMFError(
                "No guarantee can be stated for a run whose noise is that of a "
                f"{type(optimizer.query).__name__}: it does not say which mechanism it is. Leave "
                "PrivacyCallback out, and account for optimizer.dp_event() if that is known."
            )
        if isinstance(optimizer.mechanism, Mechanism):
            self._spent = EpsilonSpent(optimizer.mechanism)
            if isinstance(model, PrivateModelMixin):
                self._display = model.display_epsilon()
        if isinstance(model, PrivateModelMixin) and self.path is not None:
            for keeper in model.keep_record(self):
                self._written, self._again = keeper._written, keeper._again

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes the time; called by Keras."""
        del logs
        self._started = _provenance.now()
        self._shown = None
        self._rounds_written = 0
        if self._display is not None:
            # Computed now, because Keras judges callbacks by how long the first few steps take.
            for step in range(1, 7):
                self._epsilon(self.model.optimizer.steps_done + step)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Shows epsilon as it will be after what comes now, and writes it; called by Keras."""
        del batch, logs
        optimizer = self.model.optimizer
        done = optimizer.steps_done
        pieces = int(optimizer.pieces_done) + _compat.steps_per_execution(self.model)
        ahead = pieces // optimizer.accumulation_steps
        is_said = self._written is not None and _AGAIN in self._written.cautions
        if done + ahead > self._rounds_written or self._takes_again() != is_said:
            self.write(max(ahead, ceil_div(optimizer.mechanism.num_rounds, _WRITES)))
        if self._display is None:
            return
        epsilon = self._epsilon(done + ahead)
        if epsilon != self._shown:  # Setting a variable takes longer than a small step.
            self._display.show(shown_epsilon(epsilon))
            self._shown = epsilon

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts epsilon into the logs of the epoch, and writes the record; called by Keras."""
        del epoch
        if logs is not None and self._spent is not None:
            logs["epsilon"] = shown_epsilon(self._epsilon(self.model.optimizer.steps_done))
        self.write()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the run record; called by Keras."""
        del logs
        self.write()

    def write(self, rounds_ahead: int = 0) -> None:
        """Writes the record of the rounds so far and of some that are about to be done."""
        if self.path is not None:
            self._read(self.path)
            record = self.record(rounds_ahead)
            save_run_record(record, self.path)
            self._written, self._rounds_written = record, record.rounds_completed

    def _read(self, path: Path) -> None:
        """Notes what a record of another process, or of an earlier run, told of before."""
        try:
            found = load_run_record(path)
        except (FileNotFoundError, RunRecordError):
            return
        optimizer = self.model.optimizer
        if found == self._written or found.mechanism_checksum != _checksum(optimizer):
            return
        done = max(optimizer.steps_done, optimizer.most_steps_done)
        is_ahead = found.rounds_completed > done and not self._undone_steps_unseen
        self._again |= is_ahead or _AGAIN in found.cautions

    def _takes_again(self) -> bool:
        repeats = self.model.optimizer.repeats_steps and not self._undone_steps_unseen
        return self._again or repeats

    def record(self, rounds_ahead: int = 0) -> RunRecord:
        """Returns what the run has done so far, or will have done after the next rounds."""
        optimizer = self.model.optimizer
        done = optimizer.steps_done
        rounds = min(done + rounds_ahead, optimizer.mechanism.num_rounds)
        mechanism = optimizer.mechanism
        is_planned = isinstance(mechanism, Mechanism)
        sampling = optimizer.sampling
        known = isinstance(sampling, SamplingScheme)
        enforced = known and (
            (optimizer.sampling_is_enforced or not done)
            and (optimizer.expects_batches or rounds == done > 0)
        )
        examples_per_user = optimizer.examples_per_user if enforced else None
        adaptive = optimizer.adaptive_clipping
        return RunRecord(
            mechanism_checksum=_checksum(optimizer),
            num_rounds=mechanism.num_rounds,
            rounds_completed=rounds,
            sampling=sampling if known else None,
            sampling_basis=(Basis.ENFORCED if enforced else Basis.ASSUMED).value,
            batch_size=optimizer.batch_size,
            batch_sizes_seen=optimizer.batch_sizes_seen(),
            noise_multiplier=mechanism.noise_multiplier,
            l2_norm_clip=mechanism.l2_norm_clip,
            microbatch_size=optimizer.microbatch_size,
            accumulation_steps=optimizer.accumulation_steps,
            epsilon=self._epsilon(rounds) if is_planned else None,
            delta=mechanism.delta if is_planned else None,
            adjacency=mechanism.guarantee.adjacency.value if is_planned else "zero-out",
            started=self._started,
            finished=_provenance.now(),
            noise_source=PINNED if optimizer.has_pinned_seed else SYSTEM,
            unit=_unit(enforced, examples_per_user),
            examples_per_user=examples_per_user,
            adaptive_clipping=adaptive and dataclasses.asdict(adaptive),
            cautions=_cautions(self.model, optimizer, enforced, self._takes_again()),
            versions={
                name: _provenance.version_of(name) for name in ("bandmf-tf", "tensorflow", "keras")
            },
        )

    def _epsilon(self, rounds_completed: int) -> float:
        assert self._spent is not None
        last = self.model.optimizer.mechanism.num_rounds
        return self._spent(min(rounds_completed, last))


def _unit(enforced: bool, examples_per_user: int | None) -> str:
    """Returns what a row of a batch was; nobody knows it of batches that `fit` did not draw."""
    if not enforced:
        return UNKNOWN
    return EXAMPLE if examples_per_user is None else USER


def _checksum(optimizer: PrivateOptimizer) -> str | None:
    mechanism = optimizer.mechanism
    return mechanism_checksum(mechanism) if isinstance(mechanism, Mechanism) else None


def _cautions(
    model: tf.keras.Model, optimizer: PrivateOptimizer, enforced: bool, again: bool
) -> tuple[str, ...]:
    cautions = [_AGAIN] if again else []
    if optimizer.has_pinned_seed:
        cautions.append("The seed of the noise was pinned: whoever knows it can subtract it.")
    if optimizer.has_pinned_sampling:
        cautions.append("The seed of the batches was pinned: there is no amplification by them.")
    if not isinstance(optimizer.mechanism, Mechanism):
        cautions.append("Noise was added without a mechanism, so nothing was planned or promised.")
    if not enforced:
        cautions.append(
            "Not all batches were drawn by a pipeline of this library; how is only assumed."
        )
    earlier = getattr(model, "earlier_steps", 0)
    if earlier:
        cautions.append(
            f"The run began with weights that hold {earlier} private steps of earlier runs, whose "
            "privacy loss adds to that of this one."
        )
    return tuple(cautions)
