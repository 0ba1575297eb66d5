"""Keras models whose `fit` clips example by example and takes a sampling pipeline.

    model = make_private(tf.keras.Sequential([...]))
    model.compile(SGD("plan.bandmf", learning_rate=0.5), loss="sparse_categorical_crossentropy")
    model.fit(make_batches((x, y), load_mechanism("plan.bandmf")))

A private model is the same Keras model with another `train_step`, which clips example by example
(`trials.py`). The predictions of that pass also serve the metrics.

Sharp edges:

* What `fit` displays (loss, accuracy) is computed from the training data without noise. It is for
  whoever may see the data; the guarantee covers the weights after each step, nothing else.
* Files written by `model.save`, checkpoints and weights in Keras's format hold the state of the
  noise, and with it the means to subtract it. Publish `to_public(model)` or, of a subclass,
  `to_public(model, plain)`, never those files. What the model itself writes, and the folder of
  `BackupAndRestore`, is closed to other users; put a `tf.train.Checkpoint` into a folder made by
  `make_secret_folder`.
* Layers that look at other examples (batch normalisation) or carry state from batch to batch are
  refused, and so are losses that layers add from their inputs. What no rule knows is tried out on
  a few examples before the first step (`separation.py`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from bandmf_tf._files import owner_only_umask
from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.keras import _compat, _config, advice
from bandmf_tf.keras.batches import Batch, Batches, SamplingError
from bandmf_tf.keras.guards import (
    RunGuard,
    all_callbacks,
    close_backups,
    in_one_thread,
    marker_guard,
    monitored,
    refuse_arguments_of_arrays,
    refuse_pipeline,
    split_rounds_into_epochs,
    warn,
)
from bandmf_tf.keras.optimizer_state import PrivacyError
from bandmf_tf.keras.optimizers import PACKAGE, PrivateOptimizer, check_replicas
from bandmf_tf.keras.trials import TriedModel, examples_per_user, taken


class PrivateModelMixin(TriedModel):
    """What `make_private_model_class` adds to a Keras model class; see the top of this file.

    Attributes:
      use_layer_formulas: Whether to use the formulas of `layer_formulas.py` where they are known.
    """

    _record_keepers: tuple[Any, ...] = ()  # The callbacks that write a record of this run.
    _shown_names: frozenset[str] = frozenset()  # What steps show of the training examples.
    _monitored: frozenset[str] = frozenset()  # What callbacks of the running `fit` act upon.
    _guard: RunGuard | None = None  # Of the last `fit`.

    def compile(self, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Compiles as Keras does, with a private optimizer only."""
        before = getattr(self, "optimizer", None)
        self._uses_xla = kwargs.get("jit_compile") is True  # Not "auto", Keras 3's on a GPU.
        super().compile(optimizer, *args, **{**kwargs, "jit_compile": False})
        if self.optimizer is not before:
            self._record_keepers = ()  # Their records are of another run.
            self._replaces_optimizer = isinstance(before, PrivateOptimizer)
        if "LossScaleOptimizer" in type(self.optimizer).__name__:
            raise PrivacyError(
                "A private model takes no loss scaling, which mixed_float16 brings; use "
                "tf.keras.mixed_precision.set_global_policy('mixed_bfloat16'), which needs none."
            )
        if not isinstance(self.optimizer, PrivateOptimizer):
            raise PrivacyError(
                "A private model needs a private optimizer, such as bandmf_tf.keras.SGD. Found "
                f"{type(self.optimizer).__name__}."
            )
        self._compiled_with = weakref.ref(self.optimizer)
        self._private_optimizer()
        self._shown_names = frozenset()
        _refuse_own_training(type(self), _compat.overridden_methods(self))
        self._tried = self._explained = ""
        self._unit_loss = self._clipping_function = None
        self._marker()
        self._note_owner()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that is being loaded; called by Keras."""
        self.compile(**tf.keras.utils.deserialize_keras_object(config))
        self._build_optimizer()

    @in_one_thread
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
        guard = self._guard_of(x if isinstance(x, Batches) else None)
        self._group_rows(x.examples_per_user if isinstance(x, Batches) else None)
        if isinstance(x, Batches):
            refuse_arguments_of_arrays({**kwargs, "y": y is not None})
            optimizer.declare_sampling(x)
            _compat.track(self, x, "private_batches")
            split_rounds_into_epochs(kwargs, x, optimizer)
            if not args:
                kwargs.setdefault("shuffle", False)  # Keras 3 warns that it cannot.
            with self.distribute_strategy.scope():
                x = guard.dataset(optimizer.accumulation_steps)
            self._build_for(x.element_spec)
        elif optimizer.sampling is None:
            raise SamplingError(
                "fit needs to know how batches are drawn, and the guarantee depends on it: give it "
                "a pipeline such as bandmf_tf.keras.make_batches((x, y), mechanism), or "
                "make the optimizer with sampling='unchecked' if you made sure of it yourself."
            )
        x = self._check_first_of(x, y, kwargs.get("sample_weight"))
        callbacks = kwargs.pop("callbacks", None)
        if not isinstance(callbacks, tf.keras.callbacks.CallbackList):
            callbacks = tf.nest.flatten(callbacks or [])
        given = all_callbacks(callbacks)
        close_backups(given)
        paths = [getattr(callback, "path", None) for callback in given]
        for callback in (*(k for k in self._record_keepers if k.path not in paths), guard):
            callback.set_model(self)
            callbacks.append(callback)
        try:
            self.__dict__["_running_batches"] = guard.batches  # `track` has tracked it.
            self._monitored = monitored(given)
            self._refuse_steering()
            with owner_only_umask():  # What is shown is not private, nor are checkpoints.
                return super().fit(x, y, *args, callbacks=callbacks, **kwargs)
        finally:
            warn(advice.on_clipping(optimizer))
            self._monitored = frozenset()
            self.__dict__["_running_batches"] = None
            optimizer.expect_batches(None)

    @in_one_thread
    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains as Keras does, on a batch of which nobody knows how it was drawn."""
        self._private_optimizer()
        self._build_optimizer()
        self._group_rows(examples_per_user(x))
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
        batch = self._taken(data)
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
        is_left_behind, assertions = marker_guard(marker, optimizer)
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

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as Keras does, on data; a pipeline, whose batches are samples, is refused."""
        refuse_pipeline("evaluate", x)
        return super().evaluate(x, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predicts as Keras does, for data; a pipeline, whose batches are samples, is refused."""
        refuse_pipeline("predict", x)
        return super().predict(x, *args, **kwargs)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates a batch, which spends no epsilon to display; called by Keras."""
        shown = super().test_step(data)
        shown.pop("epsilon", None)
        return shown

    def _guard_of(self, batches: Batches | None) -> RunGuard:
        """Returns what watches over a `fit`: the last one's, which has its dataset, if it can."""
        guard = self._guard
        if guard is None or guard.batches is not batches:
            guard = RunGuard(batches, PrivateModelMixin.train_step)
            self.__dict__["_guard"] = guard  # Keras would track what is set as an attribute.
        return guard

    def _build_for(self, spec: Batch) -> None:
        """Makes the variables of the model and its optimizer for the batches of a pipeline."""
        self._build_without_examples(taken(spec).x)
        self._build_optimizer()

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
    names = ("train_step", "make_train_function", "compute_loss")
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
"""`tf.keras.Model` that trains privately; see `make_private_model_class`."""
PrivateSequential = make_private_model_class(tf.keras.Sequential)
"""`tf.keras.Sequential` that trains privately; see `make_private_model_class`."""


def make_private(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a private model with the layers, and so the weights, of a Keras model.

    Of a class with a graph of layers, such as a task of KerasHub, it has the graph: what the class
    adds (preprocessing, generating text) stays with the original, which has the same weights.
    """
    if isinstance(model, PrivateModelMixin):
        return model
    if not isinstance(model, tf.keras.Model):
        raise BandMFTypeError(
            f"make_private takes models of tf.keras, which is {tf.keras.Model.__module__} here; "
            f"make the model with it. Found a {type(model).__name__} of {type(model).__module__}."
        )
    refuse_own_losses(model)
    _refuse_own_training(type(model), _compat.overridden_methods(model))
    if type(model) is tf.keras.Sequential or _compat.calls_graph(model):
        return rebuilt(model, PrivateSequential, PrivateModel)
    raise BandMFTypeError(
        "make_private takes sequential and functional models; for a subclass of Model use "
        f"make_private_model_class({type(model).__name__})(...)."
    )


def refuse_own_losses(model: tf.keras.Model) -> None:
    """Refuses losses that a model has beside the one that it is compiled with."""
    if _compat.adds_losses(model):
        raise PrivacyError(
            f"The model {model.name} has a loss of its own (add_loss), which would not be clipped; "
            "put it into the loss function that the model is compiled with."
        )


def rebuilt(
    model: tf.keras.Model,
    sequential: type[tf.keras.Sequential],
    functional: type[tf.keras.Model],
    replace: Callable[[Any], Any] | None = None,
) -> tf.keras.Model:
    """Returns the graph of a model, with its layers or those that replace them, as another model.

    Args:
      model: A sequential or functional model.
      sequential: What a sequential model becomes.
      functional: What a functional one becomes.
      replace: From a layer to what takes its place; None: all layers stay.
    """
    if isinstance(model, tf.keras.Sequential):
        stack = model.layers if replace is None else map(replace, model.layers)
        copy = sequential([*_compat.input_layers(model), *stack], name=model.name)
        if model.built and not copy.built:
            copy.build(model.input_shape)
        return copy
    outputs = _compat.outputs(model) if replace is None else _compat.outputs_with(model, replace)
    return functional(_compat.inputs(model), outputs, name=model.name)


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


def to_public(model: tf.keras.Model, plain: tf.keras.Model | None = None) -> tf.keras.Model:
    """Returns a plain Keras model with the same weights, and without any noise state.

    This is what may leave the machine: saved files of a private model hold its noise.

    Args:
      model: A private model.
      plain: For a subclass of `Model`, one of the class that `make_private_model_class` was given,
        made in the same way and called once, so that it has weights, which it gets from `model`.
        None: a new model with the layers of `model`.
    """
    if plain is not None:
        return _with_weights_of(model, plain)
    if not isinstance(model, tf.keras.Sequential) and not _compat.is_graph_network(model):
        raise BandMFTypeError(
            "to_public takes sequential and functional models; of a subclass of Model make a plain "
            "one as well, call it on an example, and give both: to_public(model, plain)."
        )
    is_mixed = any(map(_holds_secrets, _compat.all_layers(model)))
    return rebuilt(model, tf.keras.Sequential, tf.keras.Model, _public if is_mixed else None)


def _public(layer: Any) -> Any:
    is_model = isinstance(layer, tf.keras.Model)
    return to_public(layer) if is_model and _holds_secrets(layer) else layer


def _holds_secrets(layer: Any) -> bool:
    """Whether files that Keras writes of a layer would tell more than weights."""
    found = [layer, *_compat.all_layers(layer)]
    return any(
        isinstance(each, PrivateModelMixin)
        or isinstance(getattr(each, "optimizer", None), PrivateOptimizer)
        for each in found
    )


def _with_weights_of(model: tf.keras.Model, plain: tf.keras.Model) -> tf.keras.Model:
    if _holds_secrets(plain):
        raise BandMFTypeError(
            "plain must be of the class that the private one was made from, and neither private "
            f"nor compiled with a private optimizer. Found {type(plain).__name__}."
        )
    values, found = ([*m.get_weights()] if m.built else [] for m in (model, plain))
    if not values or [v.shape for v in values] != [v.shape for v in found]:
        raise BandMFTypeError(
            f"plain must have the {len(values)} weights of the private model, in the same order "
            f"and shapes; make it with the same arguments and call it once. Found {len(found)}."
        )
    plain.set_weights(values)
    return plain
