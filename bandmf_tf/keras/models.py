"""Keras models whose `fit` clips example by example and takes a sampling pipeline.

    model = make_private(tf.keras.Sequential([...]))
    model.compile(SGD("plan.bandmf", learning_rate=0.5), loss="sparse_categorical_crossentropy")
    model.fit(make_batches((x, y), load_mechanism("plan.bandmf")))

A private model is the same Keras model with another `train_step`. Each example goes through the
model by itself, so any loss with any reduction will do: what it says for a batch of one example is
what is clipped. The predictions of that pass also serve the metrics. Where all layers are known, a
faster way with the same result is taken (`keras_layers.py`).

Sharp edges:

* What `fit` displays (loss, accuracy) is computed from the training data without noise. It is for
  whoever may see the data; the guarantee covers the weights after each step, nothing else.
* Files written by `model.save`, checkpoints and weights in Keras's format hold the state of the
  noise, and with it the means to subtract it. Publish `to_public(model)`, never those files. What
  the model itself writes, and the folder of `BackupAndRestore`, is closed to other users; put a
  `tf.train.Checkpoint` into a folder made by `make_secret_folder`.
* Layers that look at other examples (batch normalisation) or carry state from batch to batch are
  refused, and so are losses that layers add from their inputs. What no rule knows is tried out on
  a few examples before the first step (`separation.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import tensorflow as tf

from bandmf_tf._files import make_secret_folder, owner_only, owner_only_umask
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat, _config
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.batches import Batch, Batches, SamplingError
from bandmf_tf.keras.clipping import ClippedSum
from bandmf_tf.keras.layer_formulas import check_registered, layerwise_clipped_sum, stages
from bandmf_tf.keras.optimizers import (
    PACKAGE,
    ClippedGradients,
    PrivacyError,
    PrivateOptimizer,
    check_replicas,
    counter,
)
from bandmf_tf.keras.separation import (
    NUM_EXAMPLES,
    Stages,
    check_separation,
    stages_one_by_one,
)

_LOGGER = logging.getLogger(__name__)

if TYPE_CHECKING:
    _KerasModel = Any  # What the class is mixed with has no types.
else:
    _KerasModel = object

_FEW = 8  # Rows of arrays that are looked at before the first step.
_STEPS = "private_steps"  # Name of the marker in files.
_SEED = "private_sampling_seed"  # Name of what tells the partition of the data, in files.
_OWNER = "_private_marker_of_weights"  # Attribute of a variable: the marker of who trains it.


def _in_one_thread(train: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to train in two threads, whose steps would be given the same row of noise."""

    @functools.wraps(train)
    def train_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock = vars(self).setdefault("_training_lock", threading.RLock())
        if not lock.acquire(blocking=False):
            raise PrivacyError(
                "Another thread is training this model; wait for it, or both would take the same "
                "noise."
            )
        try:
            return train(self, *args, **kwargs)
        finally:
            lock.release()

    return train_alone


class PrivateModelMixin(_KerasModel):
    """What `make_private_model_class` adds to a Keras model class; see the top of this file.

    Attributes:
      use_layer_formulas: Whether to use the formulas of `keras_layers.py` where they are known.
    """

    use_layer_formulas = True
    _is_closing = False  # Whether files are being written for the owner alone.
    _record_keepers: tuple[Any, ...] = ()  # The callbacks that write a record of this run.
    _compiled_with: Any = None  # A weak reference to the optimizer, which Keras does not track.
    _shown_names: frozenset[str] = frozenset()  # What steps show of the training examples.
    _monitored: frozenset[str] = frozenset()  # What callbacks of the running `fit` act upon.
    _running_batches: Batches | None = None  # The pipeline of the running `fit`.
    _examples_per_user: int | None = None  # Of the batches at hand, if a row is a user.
    _tried = ""  # For which variables examples were found to be separate.
    _explained = ""  # Why formulas were not used, as was said before.

    def compile(self, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Compiles as Keras does, with a private optimizer only."""
        before = getattr(self, "optimizer", None)
        if kwargs.get("jit_compile", "auto") == "auto":  # Keras 3 would take XLA on a GPU.
            kwargs["jit_compile"] = False
        super().compile(optimizer, *args, **kwargs)
        if self.optimizer is not before:
            self._record_keepers = ()  # Their records are of another run.
        if not isinstance(self.optimizer, PrivateOptimizer):
            raise PrivacyError(
                "A private model needs a private optimizer, such as bandmf_tf.keras.SGD, and no "
                f"loss scaling around it. Found {type(self.optimizer).__name__}."
            )
        self._compiled_with = weakref.ref(self.optimizer)
        self._private_optimizer()
        self._shown_names = frozenset()
        _refuse_own_training(type(self), _compat.overridden_methods(self))
        self._tried = self._explained = ""
        self._unit_loss: _compat.UnitLoss | None = None
        self._clipping_function: Any = None
        self._marker()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that is being loaded; called by Keras."""
        self.compile(**tf.keras.utils.deserialize_keras_object(config))
        self._build_optimizer()

    @_in_one_thread
    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Keras does. `x` is a pipeline of `bandmf_tf.keras.batches`.

        The pipeline starts with the round that the optimizer has not done yet, so that `fit` can be
        called again and after a restore. `epochs` divides all planned rounds evenly, unless
        `steps_per_epoch` is given. Files that callbacks create meanwhile are for their owner only.

        Other data are refused unless the optimizer was made with `sampling`.
        """
        optimizer = self._private_optimizer()
        check_replicas(self.distribute_strategy)
        self._build_optimizer()
        guard = _RunGuard(x if isinstance(x, Batches) else None)
        self._group_rows(x.examples_per_user if isinstance(x, Batches) else None)
        if isinstance(x, Batches):
            _refuse_class_weight(kwargs)
            optimizer.declare_sampling(x)
            _compat.track(self, x, "private_batches")
            _split_rounds_into_epochs(kwargs, x, optimizer)
            x = x.dataset(
                guard.first_round,
                pieces=optimizer.accumulation_steps,
                first_piece=guard.first_piece,
            )
            self._build_for(x.element_spec)
        elif optimizer.sampling is None:
            raise SamplingError(
                "fit needs to know how batches are drawn, and the guarantee depends on it: give it "
                "a pipeline such as bandmf_tf.keras.make_batches((x, y), mechanism), or "
                "make the optimizer with sampling='unchecked' if you made sure of it yourself."
            )
        x = self._check_first_of(x, y, kwargs.get("sample_weight"))
        callbacks = kwargs.pop("callbacks", None)
        given = callbacks
        if isinstance(callbacks, tf.keras.callbacks.CallbackList):
            given = callbacks.callbacks
        else:
            callbacks = given = tf.nest.flatten(callbacks or [])
        _close_backups(given)
        paths = [getattr(callback, "path", None) for callback in given]
        for callback in (*(k for k in self._record_keepers if k.path not in paths), guard):
            callback.set_model(self)
            callbacks.append(callback)
        try:
            self.__dict__["_running_batches"] = guard.batches  # `track` has tracked it.
            self._monitored = _monitored(given)
            self._refuse_steering()
            with owner_only_umask():  # What is shown is not private, nor are checkpoints.
                return super().fit(x, y, *args, callbacks=callbacks, **kwargs)
        finally:
            _warn(optimizer.advice_on_clipping())
            self._monitored = frozenset()
            self.__dict__["_running_batches"] = None
            optimizer.expect_batches(None)

    @_in_one_thread
    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains as Keras does, on a batch of which nobody knows how it was drawn."""
        self._private_optimizer()
        self._build_optimizer()
        self._group_rows(_examples_per_user(x))
        self._check_first((x, y, sample_weight))
        self._claim_weights()
        self.optimizer.expect_batches(None)  # A `fit` that runs is unchecked from here on.
        for keeper in self._record_keepers:
            keeper.write(rounds_ahead=1)
        return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    def keep_record(self, keeper: Any) -> list[Any]:
        """Has a callback write its run record from now on; returns those that it replaces."""
        others = [k for k in self._record_keepers if k.path != keeper.path]
        replaced = [k for k in self._record_keepers if k.path == keeper.path]
        self._record_keepers = (*others, keeper)
        return replaced

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes one private step; called by Keras."""
        batch = _taken(data)
        self._group_rows(batch.examples_per_user)
        if self._tried != self._to_try():
            if not tf.executing_eagerly():
                raise PrivacyError(
                    "It has not been tried whether examples meet in this model: train it with fit "
                    "or train_on_batch, or call model.check_examples(batch) before the first step."
                )
            self.check_examples(data)
        marker = self._marker()
        optimizer = self._private_optimizer()
        if not self.built:
            self(batch.x, training=False)  # Makes the variables; its result is not used.
        is_left_behind, assertions = _marker_guard(marker, optimizer)
        with tf.control_dependencies(assertions):
            gradients = self._traced_clipped_gradients(batch)
        gradients.is_refused = is_left_behind
        shown = self._update_metrics(batch, gradients.outputs)
        displays_epsilon = getattr(self, "_epsilon_display", None) is not None
        self._shown_names = frozenset(shown) - ({"epsilon"} if displays_epsilon else set())
        self._refuse_steering()
        # The step is taken after all that can fail, and counts with its update.
        with tf.control_dependencies(tf.nest.flatten(shown)):
            optimizer.apply_gradients(gradients)
        marker.steps.assign(tf.convert_to_tensor(optimizer.iterations))
        return shown

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Makes the variables of metrics before the first step; called by Keras 3."""
        if iterator is not None and self._distribute_strategy is not None:
            _, _, batches = next(iter(iterator))
            first = next(iter(batches))
            data_batch = self.distribute_strategy.experimental_local_results(first)[0]
            if isinstance(data_batch, Batch):
                data_batch = data_batch.examples
        super()._maybe_symbolic_build(data_batch=data_batch)

    def check_examples(self, data: Any) -> None:
        """Tries out on a few examples that they do not meet in the model; see `separation.py`.

        `fit` and `train_on_batch` do so before their first step, and again after a change of what
        is trained; call it for training loops of your own.

        Args:
          data: A batch as `train_step` takes it.
        """
        x, y, sample_weight, mask, _, examples_per_user = _taken(data)
        _refuse_composite((x, y, sample_weight))
        self._group_rows(examples_per_user)
        if not self.built:
            with self.distribute_strategy.scope():
                self(x, training=False)  # Makes the variables; its result is not used.
        batch = (x, y) if sample_weight is None else (x, y, sample_weight)
        with _compat.as_compiled(self):
            _refuse_leaky_layers(self)
            check_separation(self, self._stages, batch, mask, self._beside)
            if self._may_use_formulas():
                check_registered(self, tf.nest.map_structure(lambda t: t[:NUM_EXAMPLES], x))
        self._tried = self._to_try()
        self.train_function = self._clipping_function = None

    def _check_first_of(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Tries out the first batch of what `fit` is given, and returns it, still whole."""
        if self._tried == self._to_try():
            return x
        if isinstance(x, tf.data.Dataset):
            self.check_examples(next(iter(x)))
        elif isinstance(x, tf.distribute.DistributedDataset):
            local = self.distribute_strategy.experimental_local_results(next(iter(x)))
            self.check_examples(local[0])
        elif isinstance(x, tf.keras.utils.Sequence):
            self.check_examples(x[0])
        elif hasattr(x, "__next__"):
            first = next(x)
            self.check_examples(tf.nest.map_structure(tf.convert_to_tensor, first))
            return _chained(first, x)
        else:
            self._check_first((x, y, sample_weight))
        return x

    def _check_first(self, data: Any) -> None:
        """Tries out the first examples of a batch of arrays, unless that was done before."""
        if self._tried != self._to_try():
            _refuse_composite(data)
            few = tf.nest.map_structure(
                lambda t: None if t is None else tf.convert_to_tensor(t[:_FEW]), data
            )
            self.check_examples(few)

    def _to_try(self) -> str:
        """Returns what the result of `check_examples` is good for."""
        with _compat.as_compiled(self):
            settings = (self.use_layer_formulas, self._examples_per_user is None)
            return repr([*settings, *(id(v) for v in self.trainable_variables)])

    def _group_rows(self, examples_per_user: int | None) -> None:
        """Takes so many examples in a row for those of one user from now on; None: for examples."""
        if examples_per_user != self._examples_per_user:
            self._examples_per_user = examples_per_user
            self._unit_loss = self._clipping_function = None

    def _stages(self, batch: tuple[Any, ...]) -> Stages:
        """Returns all that a step makes of some examples, and reads what its update reads."""
        _penalty_gradients(self, self.trainable_variables)
        _compat.scheduled_rate(self.optimizer)
        if self._may_use_formulas():
            with contextlib.suppress(Unsupported):
                x, y, weight = batch if len(batch) == 3 else (*batch, None)
                losses = _compat.UnitLoss(self, per_example=True, known=True)
                return stages(self, losses, x, y, weight)
        return stages_one_by_one(self._loss_and_output, batch, self.trainable_variables)

    def _beside(self, batch: tuple[Any, ...]) -> Stages:
        """Does what a step does beside the update, to one example."""
        x, y, weight = batch if len(batch) == 3 else (*batch, None)
        with _compat.with_control_flow():
            y_pred = self(x, training=True)
        self._update_metrics(_Taken(x, y, weight, None, None), y_pred)
        return []

    def _may_use_formulas(self) -> bool:
        optimizer = self._private_optimizer()
        return (
            self.use_layer_formulas
            and optimizer.microbatch_size == 1
            and optimizer.l2_norm_clip is not None
            and self._examples_per_user is None
        )

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as Keras does, on data; a pipeline, whose batches are samples, is refused."""
        _refuse_pipeline("evaluate", x)
        return super().evaluate(x, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predicts as Keras does, for data; a pipeline, whose batches are samples, is refused."""
        _refuse_pipeline("predict", x)
        return super().predict(x, *args, **kwargs)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates a batch, which spends no epsilon to display; called by Keras."""
        shown = super().test_step(data)
        shown.pop("epsilon", None)
        return shown

    def _traced_clipped_gradients(self, batch: _Taken) -> ClippedGradients:
        """Clips in a graph, in eager mode too, where every step would trace the model anew."""
        data = (batch.x, batch.y, batch.sample_weight, batch.mask)
        if not tf.executing_eagerly():
            clipped = self._clipped_sum(*data)
        else:
            if self._clipping_function is None:
                self._clipping_function = tf.function(
                    lambda *data: vars(self._clipped_sum(*data)),
                    autograph=False,
                    reduce_retracing=True,
                )
            clipped = ClippedSum(**self._clipping_function(*data))
        variables = self.trainable_variables
        penalties = _penalty_gradients(self, variables)
        is_enforced = batch.token is not None and self.optimizer.is_next(batch.token)
        clip = self.optimizer.clip
        return ClippedGradients(clipped, variables, clip, penalties, is_enforced)

    def _clipped_sum(self, x: Any, y: Any, sample_weight: Any, mask: Any) -> ClippedSum:
        optimizer = self._private_optimizer()
        _refuse_leaky_layers(self)
        if self._may_use_formulas():
            try:
                return self._layerwise_clipped_sum(x, y, sample_weight, mask)
            except Unsupported as reason:
                self._explain_general_way(str(reason))
        batch = (x, y) if sample_weight is None else (x, y, sample_weight)
        variables = self.trainable_variables
        return optimizer.clipped_sum(
            self._loss_and_output,
            batch,
            variables,
            mask,
            examples_per_user=self._examples_per_user,
        )

    def _loss_and_output(self, unit: tuple[Any, ...]) -> tuple[tf.Tensor, Any]:
        """Returns loss and outputs of a microbatch, the general way."""
        if self._unit_loss is None:
            several = (
                self._private_optimizer().microbatch_size > 1 or self._examples_per_user is not None
            )
            self._unit_loss = _compat.UnitLoss(self, per_example=several)
        x, y, weight = unit if len(unit) == 3 else (*unit, None)
        with _compat.with_control_flow():
            y_pred = self(x, training=True)
        if _compat.has_data_dependent_losses(self):
            raise PrivacyError(
                "A layer adds a loss that depends on examples (add_loss or an activity "
                "regularizer), which would bypass clipping; put it into the loss function."
            )
        return self._unit_loss(y, y_pred, weight), y_pred

    def _explain_general_way(self, reason: str) -> None:
        if reason != self._explained:
            _LOGGER.warning(
                "Gradients are computed example by example, which can take many times longer: no "
                "formula is known for %s. Layers of one's own bring theirs by register_formula.",
                reason,
            )
            self._explained = reason

    def _layerwise_clipped_sum(self, x: Any, y: Any, sample_weight: Any, mask: Any) -> ClippedSum:
        losses = _compat.UnitLoss(self, per_example=True, known=True)
        optimizer = self._private_optimizer()
        return layerwise_clipped_sum(
            self,
            losses,
            x,
            y,
            sample_weight,
            optimizer.l2_norm_clip,
            mask=mask,
            chunk_size=optimizer.chunk_size,
        )

    def _update_metrics(self, batch: _Taken, y_pred: Any) -> dict[str, Any]:
        data = (batch.x, batch.y, y_pred, batch.sample_weight)
        if batch.mask is not None:  # Padding counts in no metric.
            data = tf.nest.map_structure(
                lambda t: None if t is None else tf.boolean_mask(t, batch.mask), data
            )
        x, y, y_pred, sample_weight = data
        _compat.update_loss_metrics(self, y, y_pred, sample_weight)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def start_new_run(self) -> None:
        """Declares that a new private run begins with the present weights.

        Its privacy loss adds to that of the runs before, those of other private models with the
        same variables included; whoever calls this accounts for that, and the run record says so.
        """
        self._set_marker([0, sum(map(_steps_in, self._markers_of_weights()))])
        for variable in self._variables_as_compiled():
            setattr(variable, _OWNER, self._marker())

    @property
    def earlier_steps(self) -> int:
        """Private steps in the weights that were taken before `start_new_run`."""
        return int(self._marker().earlier.numpy())

    def _private_optimizer(self) -> PrivateOptimizer:
        if not isinstance(getattr(self, "optimizer", None), PrivateOptimizer):
            raise PrivacyError("Compile the model with a private optimizer first.")
        if self._compiled_with is None or self._compiled_with() is not self.optimizer:
            raise PrivacyError(
                "The model has another optimizer than it was compiled with, and would go on with "
                "that one; call model.compile(optimizer, ...) to change it."
            )
        if self.jit_compile:
            raise PrivacyError(
                "A private model is not compiled by XLA, which drops the checks of a step; leave "
                "out jit_compile=True."
            )
        if getattr(self, "enable_tune_steps_per_execution", False):  # Keras 2 alone has it.
            raise PrivacyError(
                "steps_per_execution must not change on the way, so that rounds are recorded "
                "before they are done; leave enable_tune_steps_per_execution=False."
            )
        return self.optimizer

    def _build_for(self, spec: Batch) -> None:
        """Makes the variables of the model and its optimizer for the batches of a pipeline."""
        x = _taken(spec).x
        if not self.built:
            zeros = tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape[1:]], s.dtype), x)
            with self.distribute_strategy.scope():
                self(zeros, training=False)
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        if self.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self._variables_as_compiled())

    def _variables_as_compiled(self) -> list[tf.Variable]:
        with _compat.as_compiled(self):
            return self.trainable_variables if self.built else []

    def _refuse_steering(self) -> None:
        """Refuses to let callbacks choose steps, rates or weights by metrics without noise."""
        for name in self._monitored:
            is_outside = name.startswith("val_") or name in ("epsilon", "lr")
            if not is_outside or name in self._shown_names:
                raise PrivacyError(
                    f"A callback on {name!r} lets the training examples choose the result without "
                    "noise; monitor a metric of other data (val_...), or epsilon."
                )

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The metrics of the model, with epsilon if a callback displays it."""
        display = getattr(self, "_epsilon_display", None)
        return [*super().metrics, *([] if display is None else [display])]

    def display_epsilon(self) -> EpsilonDisplay:
        """Returns a display in the progress bar and the logs of `fit`, for a callback to set."""
        if getattr(self, "_epsilon_display", None) is None:
            with self.distribute_strategy.scope():
                # Not set as an attribute is: Keras 3 would list it among the metrics, too.
                self.__dict__["_epsilon_display"] = EpsilonDisplay()
        return self._epsilon_display

    # The marker: how many private steps are in the weights. It travels with the weights in every
    # format, so that weights whose noise was left behind are noticed before training goes on.

    def _marker(self) -> Any:
        if getattr(self, "_private_marker", None) is None:
            marker = _compat.Holder()
            with tf.init_scope(), self.distribute_strategy.scope():
                marker.steps = counter(0, _STEPS)
                marker.earlier = counter(0, "earlier_private_steps")
            self._private_marker = marker
        return self._private_marker

    def _markers_of_weights(self) -> list[Any]:
        """Returns the model's own marker and those of others that trained its weights last."""
        own = self._marker()
        owners = [own, *(getattr(v, _OWNER, own) for v in self._variables_as_compiled())]
        return list({id(marker): marker for marker in owners}.values())

    def _claim_weights(self) -> None:
        """Refuses weights that another private model has trained, and notes whose they are now."""
        own = self._marker()
        others = sum(
            _steps_in(marker) for marker in self._markers_of_weights() if marker is not own
        )
        if others:
            raise PrivacyError(
                f"The weights hold {others} private steps of another private model with the same "
                "layers. To begin another run with them, whose privacy adds to that of the first, "
                "call model.start_new_run()."
            )
        for variable in self._variables_as_compiled():
            setattr(variable, _OWNER, own)

    def _marker_values(self) -> list[int]:
        marker = self._marker()
        return [int(marker.steps.numpy()), int(marker.earlier.numpy())]

    def _set_marker(self, values: Any) -> None:
        """Takes what `_marker_values` gave; files of version 0.1 hold the steps alone."""
        steps, earlier, *_ = [*np.ravel(values), 0]
        self._marker().steps.assign(steps)
        self._marker().earlier.assign(earlier)

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
        """Saves weights as Keras does, and the marker; files that hold noise are the owner's."""
        if not _is_old_hdf5(filepath):
            with self._closing(filepath):
                return super().save_weights(filepath, *args, **kwargs)
        result = super().save_weights(filepath, *args, **kwargs)
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
        self._is_closing = True
        try:
            with owner_only(filepath):
                yield
        finally:
            self._is_closing = False

    def _require_closing(self) -> None:
        if not self._is_closing and isinstance(getattr(self, "optimizer", None), PrivateOptimizer):
            raise PrivacyError(
                "The noise of a private model must not be written to files that others can read: "
                "save it with model.save, which closes them, or save to_public(model)."
            )

    def get_compile_config(self) -> Any:
        """Returns how the model was compiled, for the `.keras` format; called by Keras."""
        self._require_closing()
        return super().get_compile_config()

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


class EpsilonDisplay(tf.keras.metrics.Metric):
    """Shows a number that is set from outside; epochs do not reset it."""

    def __init__(self) -> None:
        super().__init__(name="epsilon", dtype=tf.float32)
        self._value = self.add_weight(name="value", initializer="zeros")

    def show(self, epsilon: float) -> None:
        """Sets the number."""
        self._value.assign(epsilon)

    def update_state(self, *_: Any, **__: Any) -> None:
        """Does nothing: no batch changes it."""

    def result(self) -> tf.Tensor:
        """Returns the number."""
        return tf.identity(self._value)

    def reset_state(self) -> None:
        """Does nothing: epsilon is never reset."""


def _refuse_own_training(kind: type, replaced: Sequence[str] = ()) -> None:
    names = ("train_step", "compute_loss")
    own = _compat.methods_of_users(kind, names, PrivateModelMixin)
    own += [name for name in names if name in replaced]
    if own:
        raise PrivacyError(
            f"{kind.__name__} has a {own[0]} of its own, which a private model does not call; put "
            "what it computes into the loss function, or write a training loop with "
            "optimizer.clipped_gradients."
        )


def make_private_model_class(base: type[tf.keras.Model]) -> type[tf.keras.Model]:
    """Returns the private version of a Keras model class."""
    _refuse_own_training(base)
    name = f"Private{base.__name__}"
    private = type(
        name,
        (PrivateModelMixin, base),
        {"__doc__": f"`{base.__name__}` with private training; see `bandmf_tf.keras.models`."},
    )
    private.__module__ = __name__
    tf.keras.utils.get_custom_objects()[name] = private  # Old formats know classes by bare names.
    return tf.keras.utils.register_keras_serializable(PACKAGE, name)(private)


PrivateModel = make_private_model_class(tf.keras.Model)
PrivateSequential = make_private_model_class(tf.keras.Sequential)


def make_private(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a private model with the layers, and so the weights, of a Keras model.

    Of a class with a graph of layers, such as a task of KerasHub, it has the graph: what the class
    adds (preprocessing, generating text) stays with the original, which has the same weights.
    """
    if isinstance(model, PrivateModelMixin):
        return model
    if _compat.adds_losses(model):
        raise PrivacyError(
            f"The model {model.name} has a loss of its own (add_loss), which would not be clipped; "
            "put it into the loss function that the model is compiled with."
        )
    if type(model) is tf.keras.Sequential:
        return _built_like(model, PrivateSequential)
    if _compat.calls_graph(model):
        _refuse_own_training(type(model))
        return PrivateModel(_compat.inputs(model), _compat.outputs(model), name=model.name)
    raise BandMFTypeError(
        "make_private takes sequential and functional models; for a subclass of Model use "
        f"make_private_model_class({type(model).__name__})(...)."
    )


def _built_like(model: tf.keras.Sequential, kind: type[tf.keras.Sequential]) -> tf.keras.Model:
    """Returns a sequential model of a kind with the layers of another, and its input."""
    copy = kind([*_compat.input_layers(model), *model.layers], name=model.name)
    if model.built and not copy.built:
        copy.build(model.input_shape)
    return copy


def load_model(
    filepath: str | os.PathLike[str], *, query: Any = None, **kwargs: Any
) -> tf.keras.Model:
    """Loads as `tf.keras.models.load_model` does, and the optimizer of a SavedModel folder, too.

    Keras itself brings the optimizer back from `.keras` and `.h5` files. From the folder of a
    SavedModel it makes a new one, with which a private model refuses to go on.

    Args:
      filepath: What was saved.
      query: The DP query that the optimizer was made with, if it was: no file holds it.
      **kwargs: Of Keras's function.
    """
    with _config.query_at_hand(query):
        model = tf.keras.models.load_model(filepath, **kwargs)
    checkpoint = Path(filepath) / "variables" / "variables"
    if isinstance(model, PrivateModelMixin) and checkpoint.with_suffix(".index").exists():
        tf.train.Checkpoint(model).restore(str(checkpoint)).expect_partial()
    return model


def to_public(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a plain Keras model with the same layers and weights, and without any noise state.

    This is what may leave the machine: saved files of a private model hold its noise.
    """
    if isinstance(model, tf.keras.Sequential):
        return _built_like(model, tf.keras.Sequential)
    if _compat.is_graph_network(model):
        return tf.keras.Model(_compat.inputs(model), _compat.outputs(model), name=model.name)
    raise BandMFTypeError(
        "to_public takes sequential and functional models; of a subclass of Model save the weights "
        "with save_weights(path, save_format='h5'), which holds nothing else."
    )


class _RunGuard(tf.keras.callbacks.Callback):
    """Looks at the state after other callbacks have restored it, before the first step.

    It then says where the pipeline starts. The pipeline must not read that from the optimizer,
    whose counters a step may change before it has asked for its batch.
    """

    def __init__(self, batches: Batches | None):
        super().__init__()
        self.batches = batches
        with tf.init_scope():
            self.first_round = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.first_piece = tf.Variable(0, dtype=tf.int64, trainable=False)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self.model._build_optimizer()
        self.model._claim_weights()
        optimizer, marker = self.model._private_optimizer(), self.model._marker()
        steps = int(marker.steps.numpy())
        self.first_round.assign(optimizer.steps_done)
        self.first_piece.assign(optimizer.pieces_done)
        if steps > optimizer.steps_done:
            raise PrivacyError(
                f"The weights hold {steps} private steps and the optimizer has done "
                f"{optimizer.steps_done}: a restore has left the noise behind. Restore with "
                "tf.train.Checkpoint, load_model or BackupAndRestore, all of which bring it back. "
                "To begin another run with these weights, whose privacy adds to that of the first, "
                "call model.start_new_run()."
            )
        if optimizer.num_rounds is not None and optimizer.steps_done >= optimizer.num_rounds:
            raise PrivacyError(
                f"All {optimizer.num_rounds} steps of the mechanism are done; plan a "
                "longer one to go on."
            )
        _warn(optimizer.advice_on_learning_rate(self.model._variables_as_compiled()))
        optimizer.advice_on_clipping()  # Begins to count.
        if self.batches is not None:
            optimizer.expect_batches(self.batches)
        step = getattr(self.model.train_step, "__func__", None)
        is_own = self.batches is None or self.batches.is_own
        if step is not PrivateModelMixin.train_step or not is_own:
            optimizer.expect_batches(None)  # What they make of batches is not known.


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Returns a generator, of which Keras 3 knows what it is."""
    yield first
    yield from rest


def _warn(advice: str | None) -> None:
    if advice is not None:
        _LOGGER.warning("%s", advice)


def _refuse_class_weight(kwargs: dict[str, Any]) -> None:
    if kwargs.get("class_weight") is not None:
        raise BandMFError(
            "class_weight does not go with a pipeline; give the weights of the examples, "
            "make_batches((x, y, sample_weight), ...)."
        )


def _monitored(callbacks: list[Any]) -> frozenset[str]:
    """Returns by which metrics callbacks choose steps, rates or weights."""
    kinds = (
        tf.keras.callbacks.EarlyStopping,
        tf.keras.callbacks.ReduceLROnPlateau,
        tf.keras.callbacks.ModelCheckpoint,
    )
    found = set()
    for callback in callbacks:
        if isinstance(callback, tf.keras.callbacks.TerminateOnNaN):
            found.add("loss")
        if isinstance(callback, kinds) and getattr(callback, "save_best_only", True):
            found.add(str(callback.monitor))
    return frozenset(found)


def _close_backups(callbacks: list[Any]) -> None:
    """Closes the folders of backups, which hold the noise, before anything is written to them."""
    for callback in callbacks:
        folder: Any = getattr(callback, "backup_dir", None)
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore) and "://" not in str(folder):
            make_secret_folder(folder)


def _steps_in(marker: Any) -> int:
    return int(marker.steps.numpy()) + int(marker.earlier.numpy())


def _marker_guard(marker: Any, optimizer: PrivateOptimizer) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Returns whether the weights are ahead of the noise, and an assertion that they are not."""
    in_weights, done = tf.identity(marker.steps), tf.identity(optimizer.iterations)
    check = tf.debugging.assert_less_equal(
        in_weights,
        done,
        message="The weights hold more private steps than the optimizer has done: a restore has "
        "left the noise behind. See start_new_run.",
    )
    return in_weights > done, [check] if check is not None else []


def _split_rounds_into_epochs(
    kwargs: dict[str, Any], batches: Batches, optimizer: PrivateOptimizer
) -> None:
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


def _refuse_pipeline(method: str, data: Any) -> None:
    if isinstance(data, Batches):
        raise BandMFError(
            f"{method} takes data, not a pipeline, whose batches are random samples with padding; "
            f"call model.{method}(x, ...) with arrays or a tf.data.Dataset."
        )


def _refuse_composite(data: Any) -> None:
    """Raises for tensors whose examples cannot be taken one by one by their first axis."""
    for tensor in tf.nest.flatten(data):
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise BandMFTypeError(
                f"A private model takes dense tensors, and found a {type(tensor).__name__}; give "
                "tensor.to_tensor() of ragged ones, with a mask, or tf.sparse.to_dense of sparse."
            )


def _refuse_leaky_layers(model: tf.keras.Model) -> None:
    if _compat.adds_losses_of_users(model):
        raise PrivacyError(
            "A function that was given to add_loss is not clipped, and may hold examples; put it "
            "into the loss function, or give penalties of weights as regularizers."
        )
    for layer in _compat.all_layers(model):
        name = f"{type(layer).__name__} {layer.name!r}"
        if isinstance(layer, _compat.BatchNormalization) and layer.trainable:
            raise PrivacyError(
                f"{name} mixes the examples of a batch and keeps averages of them without noise; "
                "use GroupNormalization or LayerNormalization (replace_batch_norm(model) does), or "
                "set its trainable to False."
            )
        if getattr(layer, "stateful", False) and isinstance(layer, tf.keras.layers.RNN):
            raise PrivacyError(
                f"{name} carries state from one batch to the next without noise; make it with "
                "stateful=False."
            )


class _Taken(NamedTuple):
    """A batch as `train_step` takes it.

    Attributes:
      x: Inputs.
      y: Labels.
      sample_weight: Weights of the examples; None: no weights.
      mask: Which rows are not padding; None: all.
      token: What the batch of a pipeline says of itself; None: not the batch of a pipeline.
      examples_per_user: How many rows after each other are a user's; None: rows are examples.
    """

    x: Any
    y: Any
    sample_weight: Any
    mask: tf.Tensor | None
    token: Batch | None
    examples_per_user: int | None = None


def _taken(data: Any) -> _Taken:
    if isinstance(data, tuple) and data and isinstance(data[0], Batch):
        data, *rest = data  # As `train_on_batch` packs it.
        if any(part is not None for part in rest):
            raise BandMFError("A batch of a pipeline holds its labels and weights; give no others.")
    token = data if isinstance(data, Batch) else None
    examples = data if token is None else token.examples
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(examples)
    if y is None:
        raise PrivacyError(
            "The examples have no labels, without which there is no loss; give (x, y) or "
            "(x, y, sample_weight)."
        )
    if tf.nest.is_nested(sample_weight):
        raise BandMFError("sample_weight must be one tensor, the same for all outputs.")
    if token is not None and _examples_per_user(token) is not None:
        data = (x, y, sample_weight, token.is_example)
        x, y, sample_weight, mask = tf.nest.map_structure(
            lambda t: None if t is None else _without_users(t), data
        )
        return _Taken(x, y, sample_weight, mask, token, _examples_per_user(token))
    if token is not None:
        return _Taken(x, y, sample_weight, token.is_example, token)
    mask = None if sample_weight is None else _mask(sample_weight)
    return _Taken(x, y, sample_weight, mask, None)


def _examples_per_user(data: Any) -> int | None:
    """Returns how many examples a row has if rows are users, None if they are examples."""
    is_by_user = isinstance(data, Batch) and data.is_example.shape.rank == 2
    return data.is_example.shape[1] if is_by_user else None


def _without_users(tensor: Any) -> Any:
    """Returns `[users, examples, ...]` as `[users * examples, ...]`, of a spec too."""
    rows, examples, *rest = tensor.shape
    length = None if rows is None else rows * examples
    if isinstance(tensor, tf.TensorSpec):
        return tf.TensorSpec([length, *rest], tensor.dtype)
    return tf.ensure_shape(tf.reshape(tensor, [-1, *rest]), [length, *rest])


def _mask(sample_weight: tf.Tensor) -> tf.Tensor:
    """Returns which examples have any weight."""
    weights = tf.reshape(sample_weight, [tf.shape(sample_weight)[0], -1])
    mask = tf.reduce_any(tf.not_equal(weights, tf.zeros([], weights.dtype)), axis=1)
    return tf.ensure_shape(mask, sample_weight.shape[:1])


def _penalty_gradients(
    model: tf.keras.Model, variables: list[tf.Variable]
) -> list[tf.Tensor] | None:
    variables = _compat.native(variables)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        penalties = _compat.weight_penalties(model)
        if not penalties:
            return None
        total = tf.add_n([tf.cast(penalty, tf.float32) for penalty in penalties])
    gradients = tape.gradient(total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def _is_old_hdf5(filepath: Any) -> bool:
    name = str(filepath)
    return name.endswith((".h5", ".hdf5", ".keras")) and not name.endswith(
        (".weights.h5", ".keras")
    )
