"""Private models in files: what they write is closed, and says how many private steps it holds.

The marker counts the private steps in the weights. It travels with the weights in every format, so
that weights whose noise was left behind are noticed before training goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import tensorflow as tf

from bandmf_tf._files import owner_only
from bandmf_tf.keras import _compat
from bandmf_tf.keras.batches import Batches
from bandmf_tf.keras.optimizer_state import PrivacyError, counter
from bandmf_tf.keras.optimizers import PrivateOptimizer

if TYPE_CHECKING:
    KerasModel = Any  # What the class is mixed with has no types.
else:
    KerasModel = object

_STEPS = "private_steps"  # Name of the marker in files.
_SEED = "private_sampling_seed"  # Name of what tells the partition of the data, in files.
_OWNER = "_private_marker_of_weights"  # Attribute of a variable: the marker of who trains it.


class MarkedModel(KerasModel):
    """What a private model does with its weights outside of training."""

    _is_closing = False  # Whether files are being written for the owner alone.
    _uses_xla = False  # Whether XLA compiles what clips.
    _replaces_optimizer = False  # Whether the run began with another optimizer.
    _running_batches: Batches | None = None  # The pipeline of the running `fit`.

    def start_new_run(self) -> None:
        """Declares that a new private run begins with the present weights.

        Its privacy loss adds to that of the runs before, those of other private models with the
        same variables included; whoever calls this accounts for that, and the run record says so.
        """
        others = self._markers_of_others(self.weights if self.built else [])
        self._replaces_optimizer = False
        self._set_marker([0, sum(map(_steps_in, [self._marker(), *others]))])
        for variable in self._variables_as_compiled():
            setattr(variable, _OWNER, self._marker())

    @property
    def earlier_steps(self) -> int:
        """Private steps in the weights that were taken before `start_new_run`."""
        return int(self._marker().earlier.numpy())

    def _build_optimizer(self) -> None:
        if self.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self._variables_as_compiled())
            self._note_owner()

    def _variables_as_compiled(self) -> list[tf.Variable]:
        with _compat.as_compiled(self):
            return self.trainable_variables if self.built else []

    def _marker(self) -> Any:
        if getattr(self, "_private_marker", None) is None:
            marker = _compat.Holder()
            with tf.init_scope(), self.distribute_strategy.scope():
                marker.steps = counter(0, _STEPS)
                marker.earlier = counter(0, "earlier_private_steps")
            self._private_marker = marker
        return self._private_marker

    def _note_owner(self) -> None:
        """Notes whose marker counts the steps in weights that no private model had before.

        Before anything is trained: a file that is loaded later changes the marker's values alone.
        """
        for variable in self._variables_as_compiled():
            if getattr(variable, _OWNER, None) is None:
                setattr(variable, _OWNER, self._marker())

    def _markers_of_others(self, variables: Sequence[tf.Variable]) -> list[Any]:
        """Returns the markers of other private models that trained variables last."""
        own = self._marker()
        owners = [getattr(variable, _OWNER, own) for variable in variables]
        return list({id(marker): marker for marker in owners if marker is not own}.values())

    def _claim_weights(self) -> None:
        """Refuses weights whose noise this optimizer has not made, and notes whose they are now."""
        own, trained = self._marker(), self._variables_as_compiled()
        others = sum(map(_steps_in, self._markers_of_others(trained)))
        in_all = sum(map(_steps_in, self._markers_of_others(self.weights if self.built else [])))
        # Layers that this model does not train stay the other's, which may go on with them.
        if others or in_all > int(own.earlier.numpy()):
            raise PrivacyError(
                f"The weights hold {in_all} private steps of another private model with the same "
                "layers. To begin another run with them, whose privacy adds to that of the first, "
                "call model.start_new_run()."
            )
        self._refuse_weights_ahead(int(own.steps.numpy()), self.optimizer.steps_done)
        for variable in trained:
            setattr(variable, _OWNER, own)

    def _refuse_weights_ahead(self, steps: int, done: int) -> None:
        if steps <= done:
            return
        cause = (
            "a restore has left the noise behind. Restore with tf.train.Checkpoint, load_model or "
            "BackupAndRestore, all of which bring it back."
        )
        if self._replaces_optimizer:
            cause = (
                "the model was compiled with another optimizer in the middle of a run. Go on with "
                "the first one: model.compile(optimizer, ...)."
            )
        raise PrivacyError(
            f"The weights hold {steps} private steps and the optimizer has done {done}: {cause} To "
            "begin another run with these weights, whose privacy adds to that of the first, call "
            "model.start_new_run()."
        )

    def _marker_values(self) -> list[int]:
        marker = self._marker()
        return [int(marker.steps.numpy()), int(marker.earlier.numpy())]

    def _set_marker(self, values: Any) -> None:
        """Takes what `_marker_values` gave; files of version 0.1 hold the steps alone."""
        steps, earlier, *_ = [*np.ravel(values), 0]
        self._marker().steps.assign(steps)
        self._marker().earlier.assign(earlier)
        self._note_owner()

    def save_own_variables(self, store: Any) -> None:
        """Saves the marker beside the model's own variables; called by Keras."""
        self._require_closing()
        super().save_own_variables(store)
        store[_STEPS] = np.array(self._marker_values())
        if self._running_batches is not None:  # `BackupAndRestore` of Keras 3 restores it in `fit`.
            store[_SEED] = self._running_batches.seed.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` has saved; called by Keras."""
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118 (no mapping)
        steps, seed = values.pop(_STEPS, None), values.pop(_SEED, None)
        super().load_own_variables(values)
        if seed is not None and self._running_batches is not None:
            self._running_batches.seed.assign(seed[()])
        if steps is not None:
            self._set_marker(steps[()])

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves as Keras does, for the owner's eyes only: the file holds the noise."""
        _compat.check_format(filepath)
        with self._closing(filepath):
            return super().save(filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves weights as Keras does, and the marker, for the owner's eyes only."""
        _compat.check_format(filepath)
        with self._closing(filepath):
            result = super().save_weights(filepath, *args, **kwargs)
        if _is_old_hdf5(filepath):
            with h5py.File(filepath, "a") as file:
                file.attrs[_STEPS] = self._marker_values()
        return result

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads weights as Keras does, and with them the number of private steps they hold."""
        self._build_optimizer_if_compiled()
        result = super().load_weights(filepath, *args, **kwargs)
        if _is_old_hdf5(filepath):
            with h5py.File(filepath, "r") as file:
                if _STEPS in file.attrs:
                    self._set_marker(file.attrs[_STEPS])
        return result

    # What Keras and TensorFlow ask a model for before they write it. Functions such as
    # `tf.keras.models.save_model`, `tf.saved_model.save` and `pickle.dumps` write files that
    # everybody may read, and only this tells us of them.

    @contextlib.contextmanager
    def _closing(self, filepath: Any) -> Iterator[None]:
        models = [
            each for each in (self, *_compat.all_layers(self)) if isinstance(each, MarkedModel)
        ]
        for model in models:  # A layer of a private model can be one.
            model._is_closing = True
        try:
            with owner_only(filepath):
                yield
        finally:
            for model in models:
                model._is_closing = False

    def _require_closing(self) -> None:
        if not self._is_closing and isinstance(getattr(self, "optimizer", None), PrivateOptimizer):
            raise PrivacyError(
                "The noise of a private model must not be written to files that others can read: "
                "save it with model.save, which closes them, or save to_public(model)."
            )

    def get_compile_config(self) -> Any:
        """Returns how the model was compiled, for the `.keras` format; called by Keras."""
        self._require_closing()
        config = {**super().get_compile_config(), "jit_compile": self._uses_xla}
        if getattr(self, "optimizer", None) is not None:  # Old HDF5 takes it out of the model's.
            config["optimizer"] = tf.keras.utils.serialize_keras_object(self.optimizer)
        return config

    def _get_compile_args(self, *args: Any, **kwargs: Any) -> Any:
        self._require_closing()
        return super()._get_compile_args(*args, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type != "checkpoint":
            self._require_closing()
        return super()._trackable_children(save_type, **kwargs)

    def _build_optimizer_if_compiled(self) -> None:
        if isinstance(getattr(self, "optimizer", None), PrivateOptimizer):
            self._build_optimizer()


def _steps_in(marker: Any) -> int:
    return int(marker.steps.numpy()) + int(marker.earlier.numpy())


def _is_new(filepath: Any) -> bool:
    return str(filepath).endswith(".weights.h5")


def _is_old_hdf5(filepath: Any) -> bool:
    """Whether a file, whatever its name, holds weights alone, as Keras 2 writes them."""
    return os.path.isfile(filepath) and h5py.is_hdf5(filepath) and not _is_new(filepath)
