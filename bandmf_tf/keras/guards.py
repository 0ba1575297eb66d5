"""What a private model looks at around its steps, in Python, before anything is trained."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf._files import make_secret_folder
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras import advice
from bandmf_tf.keras.batches import Batches
from bandmf_tf.keras.optimizer_state import PrivacyError
from bandmf_tf.keras.optimizers import PrivateOptimizer

_LOGGER = logging.getLogger(__name__)


def in_one_thread(train: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to train in two threads, whose steps would be given the same row of noise.

    The noise is the optimizer's, which several models with the same layers can have.
    """

    @functools.wraps(train)
    def train_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._private_optimizer()
        lock = vars(optimizer).setdefault("_training_lock", threading.RLock())
        if not lock.acquire(blocking=False):
            raise PrivacyError(
                "Another thread is training with this optimizer; wait for it, or both would take "
                "the same noise."
            )
        try:
            return train(self, *args, **kwargs)
        finally:
            lock.release()

    return train_alone


class RunGuard(tf.keras.callbacks.Callback):
    """Looks at the state after other callbacks have restored it, before the first step.

    It then says where the pipeline starts. The pipeline must not read that from the optimizer,
    whose counters a step may change before it has asked for its batch.

    Args:
      batches: The pipeline that `fit` runs; None for other data.
      step: The `train_step` of private models; with another nobody knows what becomes of batches.
    """

    def __init__(self, batches: Batches | None, step: Callable[..., Any]):
        super().__init__()
        self.batches = batches
        self._step = step
        self._dataset: tf.data.Dataset | None = None
        self._drawn_by: tuple[int, int] | None = None
        with tf.init_scope():
            self._first_round = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._first_piece = tf.Variable(0, dtype=tf.int64, trainable=False)

    def dataset(self, pieces: int) -> tf.data.Dataset:
        """Returns the batches, in pieces, from where training is; kept, if nothing has changed."""
        assert self.batches is not None
        drawn_by = (pieces, self.batches.fingerprint()) if self.batches.is_own else None
        if self._dataset is None or drawn_by is None or drawn_by != self._drawn_by:
            batches, where = self.batches, (self._first_round, pieces, self._first_piece)
            if batches.is_own:
                self._dataset = batches._dataset_for_fit(*where)
            else:  # Of a class that may draw otherwise.
                self._dataset = batches.dataset(where[0], pieces=pieces, first_piece=where[2])
            self._drawn_by = drawn_by
        return self._dataset

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuses a state that is not whole; called by Keras."""
        del logs
        self.model._build_optimizer()
        self.model._claim_weights()
        optimizer = self.model._private_optimizer()
        self._first_round.assign(optimizer.steps_done)
        self._first_piece.assign(optimizer.pieces_done)
        if optimizer.num_rounds is not None and optimizer.steps_done >= optimizer.num_rounds:
            raise PrivacyError(
                f"All {optimizer.num_rounds} steps of the mechanism are done; plan a "
                "longer one to go on."
            )
        warn(advice.on_learning_rate(optimizer, self.model._variables_as_compiled()))
        optimizer.take_tally()  # Begins to count.
        if self.batches is not None:
            optimizer.expect_batches(self.batches)
        is_own_step = getattr(self.model.train_step, "__func__", None) is self._step
        is_own = self.batches is None or self.batches.is_own
        if not is_own_step or not is_own:
            optimizer.expect_batches(None)  # What they make of batches is not known.


def warn(sentence: str | None) -> None:
    """Logs advice, if there is any."""
    if sentence is not None:
        _LOGGER.warning("%s", sentence)


_OF_ARRAYS = {
    "y": "give make_batches((x, y), ...)",
    "class_weight": 'write weights = np.array([class_weight[label] for label in y], "float32") and '
    "make_batches((x, y, weights), ...)",
    "validation_split": "set examples apart before make_batches and give validation_data=(x, y)",
    "sample_weight": "give make_batches((x, y, sample_weight), ...)",
    "batch_size": "leave it out, because the scheme says how many are drawn",
}


def refuse_arguments_of_arrays(kwargs: dict[str, Any]) -> None:
    """Refuses what `fit` takes with arrays alone, and says what to write."""
    for name, way_out in _OF_ARRAYS.items():
        value = kwargs.get(name)
        if value is not None and np.any(value):
            raise BandMFError(f"{name} does not go with a pipeline; {way_out}.")


def all_callbacks(callbacks: Any) -> list[Any]:
    """Returns the callbacks in a structure, those of lists of Keras too, however deep."""
    found = []
    for callback in tf.nest.flatten(callbacks):
        inner = isinstance(callback, tf.keras.callbacks.CallbackList)
        found += all_callbacks(callback.callbacks) if inner else [callback]
    return found


def monitored(callbacks: list[Any]) -> frozenset[str]:
    """Returns by which metrics callbacks choose steps, rates or weights.

    Those of Keras, and others in their manner, call it what they monitor.
    """
    found = set()
    for callback in callbacks:
        if isinstance(callback, tf.keras.callbacks.TerminateOnNaN):
            found.add("loss")
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and getattr(callback, "save_best_only", True):
            found.add(monitor)
    return frozenset(found)


def close_backups(callbacks: list[Any]) -> None:
    """Closes the folders of backups, which hold the noise, before anything is written to them."""
    for callback in callbacks:
        folder: Any = getattr(callback, "backup_dir", None)
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore) and "://" not in str(folder):
            make_secret_folder(folder)


def marker_guard(marker: Any, optimizer: PrivateOptimizer) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Returns whether the weights are ahead of the noise, and an assertion that they are not."""
    in_weights, done = tf.identity(marker.steps), tf.identity(optimizer.iterations)
    check = tf.debugging.assert_less_equal(
        in_weights,
        done,
        message="The weights hold more private steps than the optimizer has done: a restore, or "
        "another optimizer, has left the noise behind. See start_new_run.",
    )
    return in_weights > done, [check] if check is not None else []


def split_rounds_into_epochs(
    kwargs: dict[str, Any], batches: Batches, optimizer: PrivateOptimizer
) -> None:
    """Gives `fit` the number of steps in an epoch, and says where they do not match the plan."""
    epochs = kwargs.get("epochs", 1)
    rounds = batches.scheme.num_rounds
    if kwargs.get("steps_per_epoch") is not None:
        calls = kwargs["steps_per_epoch"] * (epochs - kwargs.get("initial_epoch", 0))
        asked, left = calls // optimizer.accumulation_steps, rounds - optimizer.steps_done
        if asked > left:
            _LOGGER.warning(
                "steps_per_epoch x epochs is %d steps and %d of the plan are left: training will "
                "stop there.",
                asked,
                left,
            )
        elif asked < left == rounds:
            _LOGGER.warning(
                "steps_per_epoch x epochs is %d steps and the plan is for %d: unless others "
                "follow, plan for %d, which takes less noise.",
                asked,
                rounds,
                asked,
            )
        return
    if rounds % epochs:
        raise BandMFError(
            f"epochs must divide the {rounds} rounds of the plan, or give steps_per_epoch. Found "
            f"epochs={epochs}."
        )
    kwargs["steps_per_epoch"] = rounds // epochs * optimizer.accumulation_steps


def refuse_pipeline(method: str, data: Any) -> None:
    """Refuses to evaluate or predict batches that are random samples."""
    if isinstance(data, Batches):
        raise BandMFError(
            f"{method} takes data, not a pipeline, whose batches are random samples with padding; "
            f"call model.{method}(x, ...) with arrays or a tf.data.Dataset."
        )
