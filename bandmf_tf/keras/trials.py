"""What a private model makes of the examples of a batch, and the trial that they do not meet in it.

Each example goes through the model by itself, so any loss with any reduction will do: what it says
for a batch of one example is what is clipped. Where all layers are known, a faster way with the
same result is taken (`layer_formulas.py`). What no rule knows is tried out on a few examples before
the first step (`separation.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.batches import Batch
from bandmf_tf.keras.clipping import ClippedSum
from bandmf_tf.keras.layer_formulas import check_registered, layerwise_clipped_sum, stages
from bandmf_tf.keras.optimizer_state import PrivacyError
from bandmf_tf.keras.optimizers import ClippedGradients, PrivateOptimizer
from bandmf_tf.keras.saving import MarkedModel
from bandmf_tf.keras.separation import (
    NUM_EXAMPLES,
    Stages,
    check_separation,
    stages_one_by_one,
)

_LOGGER = logging.getLogger(__name__)

_FEW = 8  # Rows of arrays that are looked at before the first step.


class TriedModel(MarkedModel):
    """What a private model does with a batch, and before the first one.

    Attributes:
      use_layer_formulas: Whether to use the formulas of `layer_formulas.py` where they are known.
    """

    use_layer_formulas = True
    _examples_per_user: int | None = None  # Of the batches at hand, if a row is a user.
    _tried = ""  # For which variables examples were found to be separate.
    _explained = ""  # Why formulas were not used, as was said before.
    _compiled_with: Any = None  # A weak reference to the optimizer, which Keras does not track.
    _unit_loss: _compat.UnitLoss | None = None
    _clipping_function: Any = None

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
                "XLA must not compile a step as a whole, whose checks it would drop; give "
                "compile(..., jit_compile=True) by name, and it compiles what is slow."
            )
        if getattr(self, "enable_tune_steps_per_execution", False):  # Keras 2 alone has it.
            raise PrivacyError(
                "steps_per_execution must not change on the way, so that rounds are recorded "
                "before they are done; leave enable_tune_steps_per_execution=False."
            )
        return self.optimizer

    def check_examples(self, data: Any) -> None:
        """Tries out on a few examples that they do not meet in the model; see `separation.py`.

        `fit` and `train_on_batch` do so before their first step, and again after a change of what
        is trained; call it for training loops of your own.

        Args:
          data: A batch as `train_step` takes it.
        """
        x, y, sample_weight, mask, _, examples_per_user = self._taken(data)
        _refuse_composite((x, y, sample_weight))
        self._group_rows(examples_per_user)
        self._build_without_examples(x)
        batch = (x, y) if sample_weight is None else (x, y, sample_weight)
        _compat.build_metrics(self, batch)
        with _compat.as_compiled(self):
            _refuse_leaky_layers(self)
            self._build_optimizer()
            exact = self._private_optimizer().exact_variables
            check_separation(
                self, self._stages, batch, mask, self._beside, self._trace_update, exact
            )
            if self._may_use_formulas():
                check_registered(self, tf.nest.map_structure(lambda t: t[:NUM_EXAMPLES], x))
            if self._uses_xla:
                self._check_xla((x, y, sample_weight, mask))
        self._tried = self._to_try()
        self.train_function = self._clipping_function = None

    def _build_without_examples(self, x: Any) -> None:
        """Makes the variables: some layers take values from what they are called with first.

        Args:
          x: Inputs, or their specs, which are replaced by zeros, or traced if zeros do not do.
        """
        if self.built:
            return
        with self.distribute_strategy.scope():
            zeros = _zeros_like(x)
            try:
                self(zeros, training=False)
            except tf.errors.InvalidArgumentError:  # A vocabulary may have no entry for them.
                build = tf.function(lambda x: self(x, training=False), autograph=False)
                build.get_concrete_function(zeros)

    def _taken(self, data: Any) -> Taken:
        """Returns a batch with labels; a model whose layers add losses would do without."""
        batch = taken(data)
        if batch.y is not None:
            return batch
        with contextlib.suppress(Exception):  # Of several types, for zeros that a layer refuses.
            self._build_without_examples(batch.x)
            self(_zeros_like(batch.x), training=True)
        _refuse_losses_from_examples(self)
        raise PrivacyError(
            "The examples have no labels, without which there is no loss; give (x, y) or "
            "(x, y, sample_weight)."
        )

    def _check_xla(self, data: tuple[Any, ...]) -> None:
        """Refuses what XLA does not know, which would otherwise fail in the first step."""
        try:
            self._clipping_in_graph().experimental_get_compiler_ir(*data)(stage="hlo")
        except BandMFError:
            raise
        except Exception as error:  # Of several types.
            reason = str(error).strip().partition("\n")[0][:300]
            raise BandMFError(
                f"XLA cannot compile this model; leave out jit_compile=True. It says: {reason}"
            ) from error

    def _check_first_of(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Tries out the first batch of what `fit` is given, and returns it, still whole."""
        if self._tried == self._to_try():
            return x
        if isinstance(x, tf.data.Dataset):
            self.check_examples(x.take(1).get_single_element())  # Without a read ahead.
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
        """Returns all that a step makes of some examples, and reads what penalties read."""
        _penalty_gradients(self, self.trainable_variables)
        if self._may_use_formulas():
            with contextlib.suppress(Unsupported):
                x, y, weight = batch if len(batch) == 3 else (*batch, None)
                losses = _compat.UnitLoss(self, per_example=True, known=True)
                return stages(self, losses, x, y, weight)
        return stages_one_by_one(self._loss_and_output, batch, self.trainable_variables)

    def _trace_update(self) -> None:
        self._private_optimizer().trace_update(self.trainable_variables)

    def _beside(self, batch: tuple[Any, ...]) -> Stages:
        """Does what a step does beside the update, to one example."""
        x, y, weight = batch if len(batch) == 3 else (*batch, None)
        with _compat.with_control_flow():
            y_pred = self(x, training=True)
        self._update_metrics(Taken(x, y, weight, None, None), y_pred)
        return []

    def _may_use_formulas(self) -> bool:
        optimizer = self._private_optimizer()
        return (
            self.use_layer_formulas
            and optimizer.microbatch_size == 1
            and optimizer.l2_norm_clip is not None
            and self._examples_per_user is None
        )

    def _traced_clipped_gradients(self, batch: Taken) -> ClippedGradients:
        """Clips in a graph, in eager mode too, where every step would trace the model anew.

        XLA compiles this and no more of a step: it drops assertions, and the rest has some.
        """
        data = (batch.x, batch.y, batch.sample_weight, batch.mask)
        if not tf.executing_eagerly() and not self._uses_xla:
            clipped = self._clipped_sum(*data)
        else:
            clipped = ClippedSum(**self._clipping_in_graph()(*data))
        variables = self.trainable_variables
        penalties = _penalty_gradients(self, variables)
        is_enforced = batch.token is not None and self.optimizer.is_next(batch.token)
        clip = self.optimizer.clip
        return ClippedGradients(clipped, variables, clip, penalties, is_enforced)

    def _clipping_in_graph(self) -> Any:
        if self._clipping_function is None:
            self._clipping_function = tf.function(
                lambda *data: vars(self._clipped_sum(*data)),
                autograph=False,
                reduce_retracing=True,
                jit_compile=self._uses_xla or None,
            )
        return self._clipping_function

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
            vectorize=_compat.can_vectorize(self),
        )

    def _loss_and_output(self, unit: tuple[Any, ...]) -> tuple[tf.Tensor, Any]:
        """Returns loss and outputs of a microbatch, the general way."""
        x, y, weight = unit if len(unit) == 3 else (*unit, None)
        with _compat.with_control_flow():
            y_pred = self(x, training=True)
        _refuse_losses_from_examples(self)
        if self._unit_loss is None:
            several = (
                self._private_optimizer().microbatch_size > 1 or self._examples_per_user is not None
            )
            self._unit_loss = _compat.UnitLoss(self, per_example=several)
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
            optimizer.clip,
            mask=mask,
            chunk_size=optimizer.chunk_size,
        )

    def _update_metrics(self, batch: Taken, y_pred: Any) -> dict[str, Any]:
        data = (batch.x, batch.y, y_pred, batch.sample_weight)
        if batch.mask is not None:  # Padding counts in no metric.
            data = tf.nest.map_structure(
                lambda t: None if t is None else tf.boolean_mask(t, batch.mask), data
            )
        x, y, y_pred, sample_weight = data
        _compat.update_loss_metrics(self, y, y_pred, sample_weight)
        return self.compute_metrics(x, y, y_pred, sample_weight)


class Taken(NamedTuple):
    """A batch as `train_step` takes it.

    Attributes:
      x: Inputs.
      y: Labels.
      sample_weight: Weights of the examples, of each output or of all; None: no weights.
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


def taken(data: Any) -> Taken:
    """Returns what Keras hands to `train_step`, from a pipeline or not, with rows as examples."""
    if isinstance(data, tuple) and data and isinstance(data[0], Batch):
        data, *rest = data  # As `train_on_batch` packs it.
        if any(part is not None for part in rest):
            raise BandMFError("A batch of a pipeline holds its labels and weights; give no others.")
    token = data if isinstance(data, Batch) else None
    examples = data if token is None else token.examples
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(examples)
    if token is not None and examples_per_user(token) is not None:
        data = (x, y, sample_weight, token.is_example)
        x, y, sample_weight, mask = tf.nest.map_structure(
            lambda t: None if t is None else _without_users(t), data
        )
        return Taken(x, y, sample_weight, mask, token, examples_per_user(token))
    if token is not None:
        return Taken(x, y, sample_weight, token.is_example, token)
    return Taken(x, y, sample_weight, _mask(y, sample_weight), None)


def examples_per_user(data: Any) -> int | None:
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


def _mask(y: Any, sample_weight: Any) -> tf.Tensor | None:
    """Returns which examples have any weight, of any output; None: all do."""
    weights = [t for t in tf.nest.flatten(sample_weight) if t is not None]
    if not weights or (tf.nest.is_nested(sample_weight) and len(weights) < len(tf.nest.flatten(y))):
        return None  # What has no weights counts.
    rows = [tf.reshape(t, [tf.shape(t)[0], -1]) for t in weights]
    has_weight = [tf.reduce_any(tf.not_equal(t, tf.zeros([], t.dtype)), axis=1) for t in rows]
    return tf.ensure_shape(tf.reduce_any(has_weight, axis=0), weights[0].shape[:1])


def _refuse_composite(data: Any) -> None:
    """Raises for tensors whose examples cannot be taken one by one by their first axis."""
    for tensor in tf.nest.flatten(data):
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise BandMFTypeError(
                f"A private model takes dense tensors, and found a {type(tensor).__name__}; give "
                "tensor.to_tensor() of ragged ones, with a mask, or tf.sparse.to_dense of sparse."
            )


def _zeros_like(x: Any) -> Any:
    """Returns an example of zeros, from inputs or their specs."""
    return tf.nest.map_structure(lambda t: tf.zeros([1, *t.shape[1:]], t.dtype), x)


def _refuse_losses_from_examples(model: tf.keras.Model) -> None:
    if _compat.has_data_dependent_losses(model):
        raise PrivacyError(
            "A layer adds a loss that depends on examples (add_loss or an activity regularizer), "
            "which would bypass clipping; put it into the loss function."
        )


def mixes_examples(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer normalises by the examples of a batch: where it is trained alone."""
    return isinstance(layer, _compat.BatchNormalization) and layer.trainable


def _refuse_leaky_layers(model: tf.keras.Model) -> None:
    if _compat.adds_losses_of_users(model):
        raise PrivacyError(
            "A function that was given to add_loss is not clipped, and may hold examples; put it "
            "into the loss function, or give penalties of weights as regularizers."
        )
    for layer in _compat.all_layers(model):
        name = f"{type(layer).__name__} {layer.name!r}"
        if mixes_examples(layer):
            raise PrivacyError(
                f"{name} mixes the examples of a batch and keeps averages of them without noise; "
                "use GroupNormalization or LayerNormalization (replace_batch_norm(model) does) or, "
                "if it is trained already, set its trainable to False and compile again."
            )
        if getattr(layer, "stateful", False) and isinstance(layer, tf.keras.layers.RNN):
            raise PrivacyError(
                f"{name} carries state from one batch to the next without noise; make it with "
                "stateful=False."
            )


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


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Returns a generator, of which Keras 3 knows what it is."""
    yield first
    yield from rest
