"""Clipped gradient sums by formulas for known layers: one pass for the whole batch.

For most layers the gradient of one example follows from what went into the layer and from the
gradient of the loss at its output: for a dense layer with input a and gradient e behind it, the
kernel's gradient is the outer product a e^T with norm |a| |e|. So one forward and one backward pass
of the whole batch, without gradients of variables, give the norms of all examples, and the sum of
their clipped gradients is a matrix product with scaled e. This is "ghost clipping" (Goodfellow
2015) with the second backward pass saved (Bu et al. 2022). It needs a fraction of the time and
memory of `clipping.py` and gives the same sums.

It is private only if examples do not interact in the model. `clipping.py` has that by construction,
here it must be known: every layer, activation and loss has to be one of a list, of exactly that
class and with its own methods. Anything else goes the general way. `separation.py` tries it out on
the first batch.

A formula is a function of a layer, what went in and the gradient behind it, both with the examples
as first axis. It returns *terms*, which for each example sum up to the gradients of the variables:

* `(variable, gradients)`: the gradients themselves, `[examples, ...]`, as long as the variable.
* `(variable, left, right)`: rows `[examples, positions, n]` and `[examples, positions, m]`; the
  gradient is the sum over positions of outer products of a row on the left with one on the right,
  n m numbers. Integers `[examples, positions]` on the left are rows of the variable.

Terms of one variable add up, wherever they come from: a layer that is called twice, an embedding
that is also the last matrix. Their norm is bounded, rounding included, by one of three parts:
gradients are measured as they are (`clipping.DensePart`, and `SparsePart` for rows of a table), and
products are multiplied out or measured by `outer_products.ProductPart`, which has the proof for the
one form that never sees what it sums. What computed the terms needs no proof: whatever rounding did
to them, in bfloat16 too, it is their sum, in float32, that is measured and added up.

`matrix_layers`, `convolution_layers` and `recurrent_layers` hold the formulas of Keras's layers;
`register_formula` adds one, and `check_formula` compares any with gradients taken one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras import (
    _compat,
    clipping,
    convolution_layers,
    hub_layers,
    matrix_layers,
    outer_products,
    recurrent_layers,
)
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.clipping import ClippedSum
from bandmf_tf.keras.matrix_layers import Term

layers = tf.keras.layers
_words = str.split

# Layers without trainable variables of their own in which an example never meets another one. Some
# hold other layers, which are looked at by themselves. Each Keras has some of them.
_SEPARATE_LAYERS = frozenset(
    kind
    for name in _words(
        "Activation Add AlphaDropout Average AveragePooling1D AveragePooling2D AveragePooling3D "
        "BatchNormalization Bidirectional Concatenate Cropping1D Cropping2D Cropping3D Dropout ELU "
        "Flatten GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D "
        "GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D "
        "GroupedQueryAttention Identity InputLayer LeakyReLU Masking MaxPooling1D MaxPooling2D "
        "MaxPooling3D Maximum Minimum MultiHeadAttention Multiply Permute ReLU RepeatVector "
        "Rescaling Reshape Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D StringLookup "
        "Subtract TextVectorization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D "
        "ZeroPadding2D ZeroPadding3D"
    )
    if (kind := getattr(layers, name, None)) is not None
)

_SEPARATE_ACTIVATIONS = frozenset(
    function
    for name in _words(
        "elu exponential gelu hard_sigmoid leaky_relu linear mish relu relu6 selu sigmoid silu "
        "softmax softplus softsign swish tanh"
    )
    for module in (tf.keras.activations, getattr(tf.keras, "ops", None))
    if (function := getattr(module, name, None)) is not None
)

# What a step computes of a chunk is used again soon after, from a cache if it is small. Of fewer
# examples than this, products of matrices would lose more.
_CACHE_BYTES = 8 << 20
_FEWEST_IN_CACHE = 40

FormulaFunction = Callable[[Any, Any, Any], Sequence[Term]]


class FormulaError(BandMFError):
    """A formula does not give the gradients of its layer."""


@tf.autograph.experimental.do_not_convert
def layerwise_clipped_sum(
    model: tf.keras.Model,
    losses: Callable[[Any, Any, Any], tf.Tensor],
    x: Any,
    y: Any,
    sample_weight: tf.Tensor | None,
    l2_norm_clip: float | clipping.AdaptiveNorm,
    *,
    mask: tf.Tensor | None = None,
    chunk_size: int | None = None,
) -> ClippedSum:
    """Returns what `clipping.clipped_gradient_sum` returns for the same batch.

    Args:
      model: A sequential or functional model.
      losses: From labels, outputs and weights of some examples to one loss for each. It is for the
        caller to know that the loss of an example depends on nothing of another one.
      x: Inputs.
      y: Labels.
      sample_weight: Weights of examples, or of their losses; None: no weights.
      l2_norm_clip: Bound on the norm of one example's contribution.
      mask: Which rows are not padding; None: all.
      chunk_size: Examples differentiated at once. None: as many as fit a memory budget, on a CPU
        no more than stay in its cache.

    Raises:
      Unsupported: The general way has to be taken.
    """
    check_layers(model)
    first = tf.nest.flatten(x)[0]
    if mask is None:
        mask = tf.ones(tf.shape(first)[:1], tf.bool)
    mask = tf.ensure_shape(mask, first.shape[:1])
    batch: tuple[Any, ...] = (x, y) if sample_weight is None else (x, y, sample_weight)

    def sum_chunk(chunk: tuple[Any, ...], mask: tf.Tensor) -> ClippedSum:
        return _sum_chunk(model, losses, chunk, mask, l2_norm_clip)

    def output_specs() -> Any:
        return tf.nest.map_structure(
            lambda output: tf.TensorSpec(output.shape[1:], output.dtype), _compat.outputs(model)
        )

    if chunk_size is None:
        chunk_size = _default_chunk_size(model, x)
    return clipping.sum_in_chunks(
        sum_chunk, batch, mask, chunk_size, model.trainable_variables, output_specs
    )


def _sum_chunk(
    model: tf.keras.Model,
    losses: Callable[[Any, Any, Any], tf.Tensor],
    chunk: tuple[Any, ...],
    is_real: tf.Tensor,
    l2_norm_clip: float | clipping.AdaptiveNorm,
) -> ClippedSum:
    x, y, weight = chunk if len(chunk) == 3 else (*chunk, None)
    uses, y_pred, _ = _forward_and_backward(model, losses, x, y, weight)
    parts = _parts(uses, model.trainable_variables)
    return clipping.clip_and_sum(parts, is_real, l2_norm_clip, y_pred)


def _forward_and_backward(
    model: tf.keras.Model, losses: Callable[[Any, Any, Any], tf.Tensor], x: Any, y: Any, weight: Any
) -> tuple[list[_Use], Any, tf.Tensor]:
    """Returns all uses of variables, the outputs and the losses of a batch."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        with _recording(model, tape) as uses:
            y_pred = model(x, training=True)
        if any(map(_compat.has_mask, tf.nest.flatten(y_pred))):
            raise Unsupported("a mask that reaches the loss")
        values = losses(y, y_pred, weight)
        total = tf.reduce_sum(values)
    _differentiate(tape, total, uses)
    return uses, y_pred, values


def _differentiate(tape: tf.GradientTape, total: tf.Tensor, uses: Sequence[_Use]) -> None:
    """Sets the gradients behind all uses; what does not reach the loss gets zeros."""
    zero = tf.UnconnectedGradients.ZERO
    behind = tape.gradient(total, [use.watched for use in uses], unconnected_gradients=zero)
    for use, gradient in zip(uses, behind, strict=True):
        use.behind = tf.nest.map_structure(tf.convert_to_tensor, gradient)


def stages(
    model: tf.keras.Model, losses: Callable[[Any, Any, Any], tf.Tensor], x: Any, y: Any, weight: Any
) -> list[tuple[str, tf.Tensor]]:
    """Returns all that the formulas use, `[examples, ...]`, in the order of computation, by name.

    Raises:
      Unsupported: The general way has to be taken.
    """
    check_layers(model)
    uses, y_pred, values = _forward_and_backward(model, losses, x, y, weight)

    def named(kind: str, attribute: str) -> list[tuple[str, tf.Tensor]]:
        return [
            (f"the {kind} the layer {use.layer.name}", tensor)
            for use in uses
            for tensor in tf.nest.flatten(getattr(use, attribute))
        ]

    return [
        *named("input of", "saved"),
        *(("an output of the model", output) for output in tf.nest.flatten(y_pred)),
        ("the loss", values),
        *named("gradient behind", "behind"),
    ]


def _default_chunk_size(model: tf.keras.Model, x: Any) -> int:
    numbers = _numbers_per_example(model, x)
    fitting = clipping.fitting_chunk_size(numbers)
    has_loop = any(type(layer) in recurrent_layers.LAYERS for layer in _compat.all_layers(model))
    if has_loop or _compat.has_gpu() or _compat.is_compiled_by_xla():
        return fitting  # A loop over positions takes as long for a few examples as for many.
    in_cache = max(_CACHE_BYTES // (4 * max(numbers, 1)), _FEWEST_IN_CACHE)
    length = tf.nest.flatten(x)[0].shape[0]
    if length is not None:  # As many chunks as come nearest.
        in_cache = ceil_div(length, max(round(length / in_cache), 1))
    return min(fitting, in_cache)


def _numbers_per_example(model: tf.keras.Model, x: Any) -> int:
    """Returns how many numbers the formulas keep in memory for one example."""
    found: list[int] = []

    def probe(x: Any) -> None:
        with tf.GradientTape() as tape, _recording(model, tape) as uses:
            model(x, training=True)
        trainable = {id(variable) for variable in model.trainable_variables}
        graph = tf.compat.v1.get_default_graph()
        total = 0
        for use in uses:
            use.behind = tf.nest.map_structure(tf.zeros_like, use.watched)
            start = len(graph.get_operations())
            terms = [term for term in use.terms() if id(term[0]) in trainable]
            made = [t for op in graph.get_operations()[start:] for t in op.outputs]
            total += max((t.shape.num_elements() or 0 for t in made), default=0)
            total += sum(map(_numbers, terms))
        found.append(total)

    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([1, *t.shape[1:]], t.dtype), x)
    tf.function(probe, autograph=False).get_concrete_function(spec)
    return found[0]


def _numbers(term: Term) -> int:
    variable, *sides = term
    if len(sides) == 1:
        return math.prod(variable.shape)
    left, right = sides
    if _is_lookup(left):
        return math.prod(right.shape[1:])
    return outer_products.numbers(left.shape[1], left.shape[2], right.shape[2])


def _is_lookup(left: tf.Tensor) -> bool:
    """Whether the left of a term are rows of a variable, and no integers to be multiplied."""
    return left.dtype.is_integer and left.shape.rank == 2


def check_layers(model: tf.keras.Model) -> None:
    """Raises `Unsupported` if a layer is not known to keep examples apart."""
    if not _compat.is_plain_model(model):
        raise Unsupported(f"the model {model.name}, which is not plainly sequential or functional")
    for layer in _compat.sublayers(model):
        if isinstance(layer, tf.keras.Model):
            check_layers(layer)
        else:
            _check_layer(layer)


def _check_layer(layer: tf.keras.layers.Layer) -> None:
    kind = type(layer)
    if hub_layers.is_of_hub(kind) and kind not in _KNOWN:
        _learn_hub()
    if _KNOWN.get(kind) != _methods(kind) or _compat.overridden_methods(layer):
        raise Unsupported(f"the layer {layer.name} of type {kind.__name__}")
    if getattr(layer, "activity_regularizer", None) is not None:
        raise Unsupported(f"the activity regularizer of the layer {layer.name}")
    if kind in _FORMULAS and kind in _REGISTERED:
        return
    if isinstance(layer, layers.BatchNormalization) and layer.trainable:
        raise Unsupported(f"the batch normalisation {layer.name}, which is trained")
    if not _keeps_axis(layer):
        raise Unsupported(f"the layer {layer.name} along the axis of the examples")
    if isinstance(layer, layers.TextVectorization) and not _reads_texts_alone(layer):
        raise Unsupported(f"the length or the functions of the layer {layer.name}")
    for name in ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        if activation is not None and activation not in _SEPARATE_ACTIVATIONS | _HUB_ACTIVATIONS:
            raise Unsupported(f"the activation of the layer {layer.name}")
    if kind in _FORMULAS:
        _FORMULAS[kind].check(layer)
    for inner in _compat.sublayers(layer):
        _check_layer(inner)


def _reads_texts_alone(layer: tf.keras.layers.TextVectorization) -> bool:
    """Whether a text is cut to a length that is not that of the longest in its batch."""
    config = layer.get_config()
    has_length = config["output_sequence_length"] is not None or config["output_mode"] != "int"
    functions = (config["standardize"], config["split"])
    return has_length and not config["ragged"] and not any(callable(f) for f in functions)


def _keeps_axis(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer that works along axes leaves the first one alone."""
    if isinstance(layer, layers.Concatenate):
        return _joins_within_examples(layer)
    if isinstance(layer, layers.MultiHeadAttention):
        axes = layer.get_config()["attention_axes"] or [1]
    elif isinstance(layer, layers.Softmax):
        axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    else:
        return True
    return all(axis > 0 or axis == -1 for axis in tf.nest.flatten(axes))


def _joins_within_examples(layer: tf.keras.layers.Concatenate) -> bool:
    if layer.axis >= 0:
        return layer.axis > 0
    shapes = _compat.output_shapes(layer)
    return all(shape.rank is not None and -layer.axis < shape.rank for shape in shapes)


@dataclasses.dataclass
class _Use:
    """One call of a layer with trainable variables.

    Attributes:
      layer: The layer.
      formula: Its formula.
      saved: What the formula needs of what went in.
      watched: What the layer computed from its variables: as a rule its output, before its
        activation.
      behind: Gradient of the sum of all losses at `watched`; set after the backward pass.
    """

    layer: Any
    formula: _Formula
    saved: Any
    watched: Any
    behind: Any = None

    def terms(self) -> Sequence[Term]:
        """Returns the terms, of floats as exact as the variables."""
        shapes = [t.shape[1:] for t in tf.nest.flatten((self.saved, self.watched))]
        if not all(shape.is_fully_defined() for shape in shapes):
            raise Unsupported(f"the unknown shape of the input of {self.layer.name}")

        def exact(tensor: tf.Tensor) -> tf.Tensor:
            return (
                tf.cast(tensor, self.layer.variable_dtype) if tensor.dtype.is_floating else tensor
            )

        saved, behind = tf.nest.map_structure(exact, (self.saved, self.behind))
        return self.formula.terms(self.layer, saved, behind)


def _terms(uses: Sequence[_Use], variables: Sequence[Any]) -> dict[int, list[Term]]:
    """Returns the terms of each variable, by its `id`; those of frozen variables are left out."""
    found: dict[int, list[Term]] = {id(variable): [] for variable in variables}
    for use in uses:
        for term in use.terms():
            if id(term[0]) in found:
                found[id(term[0])].append(term)
    if not all(found.values()):
        raise Unsupported("a variable outside of the layers that are known")
    return found


def _parts(uses: Sequence[_Use], variables: Sequence[Any]) -> list[clipping.Part]:
    terms = _terms(uses, variables)
    return [_part(variable, terms[id(variable)]) for variable in variables]


def _part(variable: Any, terms: Sequence[Term]) -> clipping.Part:
    """Returns what measures and sums the gradients that some terms add up to."""
    size = math.prod(variable.shape)
    gradients = [tf.reshape(term[1], [-1, size]) for term in terms if len(term) == 2]
    products = [term[1:] for term in terms if len(term) == 3]
    lookups = [_valid(i, e, variable) for i, e in products if _is_lookup(i)]
    matrices = [(a, e) for a, e in products if not _is_lookup(a)]
    lookup, matrix = _joined(lookups), _joined(matrices)
    if lookup and not matrix and not gradients:
        rows = clipping.SparseRows(lookup[1], lookup[0])
        return clipping.SparsePart.from_rows(rows, variable, tf.shape(lookup[1])[0])
    if matrix and not lookup:
        a, e = matrix
        if gradients or outer_products.is_direct(a.shape[1], a.shape[2], e.shape[2]):
            product = tf.matmul(a, e, transpose_a=True)
            gradients.append(tf.reshape(product, [-1, size]))
    elif lookup and gradients:
        raise Unsupported("a table with two kinds of gradients")
    if gradients:
        return clipping.DensePart(tf.add_n(gradients), variable)
    return outer_products.ProductPart(tuple(b for b in (lookup, matrix) if b), variable)


def _joined(blocks: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, ...]:
    """Returns all positions of several blocks as one, or nothing if there is none."""
    if len(blocks) < 2:
        return tuple(blocks[0]) if blocks else ()
    return tuple(tf.concat(side, axis=1) for side in zip(*blocks, strict=True))


def _valid(indices: tf.Tensor, behind: tf.Tensor, variable: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Removes numbers outside of a table, which not every device refuses."""
    indices = tf.cast(indices, tf.int64)
    is_valid = (indices >= 0) & (indices < variable.shape[0])
    return tf.where(is_valid, indices, 0), tf.where(is_valid[:, :, None], behind, 0.0)


def _call_and_watch(
    layer: Any, call: Any, watch: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer and notes what went in and came out."""
    if args or any(tf.is_tensor(value) for value in kwargs.values()):
        raise Unsupported(f"several arguments of {layer.name}")
    return watch(inputs, call(inputs, *args, **kwargs))


def _watch_before_activation(
    layer: Any, call: Any, watch: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer and notes what went in and, before its activation, came out."""
    activation = layer.activation
    # Such layers multiply integers like floats; in a term, integers would be rows of a table.
    saved = inputs if inputs.dtype.is_floating else tf.cast(inputs, layer.variable_dtype)
    if activation is None:
        return watch(saved, call(inputs, *args, **kwargs))
    layer.activation = lambda output: activation(watch(saved, output))
    try:
        return call(inputs, *args, **kwargs)
    finally:
        layer.activation = activation


def _check_nothing(layer: Any) -> None:
    del layer


@dataclasses.dataclass(frozen=True)
class _Formula:
    """How the gradients of a class of layers follow from what is noted of a call.

    Attributes:
      terms: From the layer, what was saved and the gradient behind what was watched, to terms.
      check: Raises `Unsupported` for options of a layer that the formula does not cover.
      call: From the layer, its `call`, a function that notes what to save and what to watch and
        returns the second, and the arguments of the call, to its result.
    """

    terms: FormulaFunction
    check: Callable[[Any], None] = _check_nothing
    call: Callable[..., Any] = _call_and_watch


def _known_formulas() -> dict[type, _Formula]:
    matrix = matrix_layers.check_matrix, _watch_before_activation
    convolution = convolution_layers.check, _watch_before_activation
    transposed = convolution_layers.check_transposed, _watch_before_activation
    table = matrix_layers.check_embedding, matrix_layers.call_embedding
    scaling = matrix_layers.check_normalization, matrix_layers.call_normalization
    recurrent = recurrent_layers.check, recurrent_layers.call
    by_name: dict[str, tuple] = {
        "Conv1D Conv2D Conv3D": (convolution_layers.convolution, *convolution),
        "Conv1DTranspose Conv2DTranspose Conv3DTranspose": (
            convolution_layers.transposed_convolution,
            *transposed,
        ),
        "Dense": (matrix_layers.dense, *matrix),
        "DepthwiseConv1D DepthwiseConv2D": (
            convolution_layers.depthwise_convolution,
            *convolution,
        ),
        "EinsumDense": (matrix_layers.einsum_dense, *matrix),
        "Embedding": (matrix_layers.embedding, *table),
        "GRU LSTM SimpleRNN": (recurrent_layers.terms, *recurrent),
        "GroupNormalization": (matrix_layers.group_normalization, *scaling),
        "LayerNormalization": (matrix_layers.layer_normalization, *scaling),
        "RMSNormalization": (matrix_layers.rms_normalization, *scaling),
        "ReversibleEmbedding": (matrix_layers.reversible_embedding, *table),
        "SeparableConv1D SeparableConv2D": (
            convolution_layers.separable_convolution,
            *convolution,
        ),
    }
    return {
        kind: _Formula(*formula)
        for names, formula in by_name.items()
        for name in _words(names)
        if (kind := getattr(layers, name, None)) is not None
    }


def _methods(kind: type) -> dict[str, Any]:
    """Returns the methods of a class, to notice later that one was replaced."""
    bases = kind.__mro__[: kind.__mro__.index(layers.Layer)]
    own = {
        f"{base.__qualname__}.{name}": function
        for base in bases
        for name, function in vars(base).items()
        if inspect.isfunction(function)
    }
    return {**own, "__call__": layers.Layer.__call__}


_FORMULAS = _known_formulas()
_REGISTERED: set[type] = set()
_HUB_ACTIVATIONS: set[Any] = set()
_KNOWN = {kind: _methods(kind) for kind in (*_FORMULAS, *_SEPARATE_LAYERS, *recurrent_layers.CELLS)}


def _learn_hub() -> None:
    """Adds the layers of KerasHub, which is there if a model has one, to those that are known."""
    position = hub_layers.position_embedding, _check_nothing, hub_layers.call_position_embedding
    rms = (hub_layers.last_axis_rms,)
    formulas: dict[str, tuple[str, tuple]] = {
        "layers.modeling.position_embedding": ("PositionEmbedding", position),
        "layers.modeling.reversible_embedding": (
            "ReversibleEmbedding",
            dataclasses.astuple(_FORMULAS[layers.ReversibleEmbedding]),
        ),
        "layers.modeling.rms_normalization": ("RMSNormalization", rms),
        "models.gemma.rms_normalization": ("RMSNormalization", rms),
        "models.llama.llama_layernorm": ("LlamaLayerNorm", rms),
    }
    learnt = hub_layers.found(hub_layers.HOLDERS)
    for path, (name, formula) in formulas.items():
        for kind in hub_layers.found({path: name}):
            _FORMULAS[kind] = _Formula(*formula)
            learnt.append(kind)
    for kind in learnt:
        _KNOWN.setdefault(kind, _methods(kind))
        _REGISTERED.add(kind)
    _HUB_ACTIVATIONS.update(hub_layers.found(hub_layers.ACTIVATIONS))


def register_formula(kind: type, formula: FormulaFunction | None) -> None:
    """Lets private models with layers of a class of one's own use a formula for them.

    The class must compute each example from that example alone, and from one argument. A class that
    is derived from this one, or whose methods are replaced afterwards, has no formula. A wrong
    formula is not private: before its first step a private model tries out that examples do not
    meet, and compares its formulas with a few examples taken one by one. Call `check_formula` in a
    test, too, with inputs of more kinds.

    Args:
      kind: The class of layers.
      formula: From a layer, the first argument of its `call` and the gradient of the loss at the
        result, both with the examples as first axis and in float32, to terms of all trainable
        variables of the layer, as the module defines them. None: a layer without variables of its
        own; layers in it need formulas of their own.
    """
    if not (isinstance(kind, type) and issubclass(kind, layers.Layer)):
        raise FormulaError(f"kind must be a class of Keras layers. Found {kind!r}.")
    if kind in _KNOWN and kind not in _REGISTERED:
        raise FormulaError(
            f"{kind.__name__} of Keras has its formula; derive a class to change it."
        )
    _FORMULAS.pop(kind, None)
    if formula is not None:
        _FORMULAS[kind] = _Formula(formula)
    _REGISTERED.add(kind)
    _KNOWN[kind] = _methods(kind)


def check_formula(layer: tf.keras.layers.Layer, inputs: Any) -> None:
    """Raises `FormulaError` unless the formulas of a layer agree with gradients taken one by one.

    Compares the norms of gradients and a weighted sum, for a random loss of the outputs, without
    dropout.

    Args:
      layer: A layer, of Keras or registered, or one that holds such layers.
      inputs: What it is called with, a structure of arrays with a few examples as first axis.
    """
    x = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    layer(x)  # Builds it.
    try:
        _check_layer(layer)
        _compare_with_examples(layer, x)
    except Unsupported as reason:
        raise FormulaError(f"No formula is known for {reason}.") from None


def check_registered(model: tf.keras.Model, x: Any) -> None:
    """Does what `check_formula` does for a model with layers that somebody registered.

    Other layers may use the variables of registered ones, or these those of others, which is seen
    in the model as a whole only.
    """
    if any(type(layer) in _REGISTERED for layer in _compat.all_layers(model)):
        with contextlib.suppress(Unsupported):  # The general way is taken.
            check_layers(model)
            _compare_with_examples(model, x)


def _compare_with_examples(layer: Any, x: Any) -> None:
    """Raises `FormulaError` where formulas disagree with gradients of single examples."""
    outputs = tf.nest.flatten(layer(x))
    rng = np.random.default_rng(0)
    size, variables = len(tf.nest.flatten(x)[0]), layer.trainable_variables
    native = _compat.native(variables)
    candidates = [layer, *_compat.all_layers(layer)]
    factors = tf.constant(rng.uniform(0.1, 1.0, size), tf.float32)
    weights = [tf.constant(rng.normal(size=output.shape), output.dtype) for output in outputs]

    def loss(x: Any, weights: list[tf.Tensor]) -> tf.Tensor:
        products = zip(tf.nest.flatten(layer(x)), weights, strict=True)
        return tf.add_n([tf.reduce_sum(output * weight) for output, weight in products])

    def measured(x: Any, weights: list[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        with tf.GradientTape() as tape, _recording_layers(candidates, tape) as uses:
            total = loss(x, weights)
        _differentiate(tape, total, uses)
        parts = _parts(uses, variables)
        return [(tf.sqrt(part.squared_norms()), part.weighted_sum(factors)) for part in parts]

    def alone(i: int) -> list[tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(native)
            total = loss(*tf.nest.map_structure(lambda t: t[i : i + 1], (x, weights)))
        gradients = tape.gradient(total, native)
        return [tf.cast(tf.convert_to_tensor(g), tf.float64) for g in gradients]

    found = tf.function(measured, autograph=False)(x, weights)
    one_by_one = zip(*(alone(i) for i in range(size)), strict=True)
    all_expected = [tf.reshape(tf.stack(gradients), [size, -1]) for gradients in one_by_one]
    overall = max(_largest(expected) for expected in all_expected)
    is_mixed = any(part.compute_dtype != part.variable_dtype for part in candidates)
    tolerance = 0.05 if is_mixed else 1e-3
    for variable, (norms, total), expected in zip(variables, found, all_expected, strict=True):
        weighted = tf.linalg.matvec(expected, tf.cast(factors, tf.float64), transpose_a=True)
        for what, got, wanted in (
            ("norms", norms, tf.norm(expected, axis=1)),
            ("sums", tf.reshape(total, [-1]), weighted),
        ):
            error, scale = _largest(tf.cast(got, tf.float64) - wanted), _largest(wanted)
            # Gradients that are zero but for rounding (a bias before a softmax) are not compared.
            if not error <= tolerance * (scale + 1e-3 * overall):
                raise FormulaError(
                    f"The formula of {layer.name} gives {what} of gradients of {variable.name} "
                    f"that differ by {error:.2g} from those of examples taken one by one, the "
                    f"largest of which is {scale:.2g}; correct it before it is used."
                )


def _largest(tensor: tf.Tensor) -> float:
    return float(tf.reduce_max(tf.abs(tensor)))


@contextlib.contextmanager
def _recording(model: tf.keras.Model, tape: tf.GradientTape) -> Iterator[list[_Use]]:
    """Yields a list that collects the uses of all layers with variables while it is open."""
    with _recording_layers(_compat.all_layers(model), tape) as uses:
        yield uses


@contextlib.contextmanager
def _recording_layers(candidates: Any, tape: tf.GradientTape) -> Iterator[list[_Use]]:
    uses: list[_Use] = []
    recorded = {
        id(layer): layer
        for layer in candidates
        if type(layer) in _FORMULAS and layer.trainable_variables
    }
    with contextlib.ExitStack() as stack:
        for layer in recorded.values():
            stack.enter_context(_recorded(layer, tape, uses))
        yield uses


@contextlib.contextmanager
def _recorded(
    layer: tf.keras.layers.Layer, tape: tf.GradientTape, uses: list[_Use]
) -> Iterator[None]:
    """Makes a layer note what its formula needs whenever it is called."""
    call, formula = layer.call, _FORMULAS[type(layer)]

    def watch(saved: Any, watched: Any) -> Any:
        watched = tf.nest.map_structure(tf.convert_to_tensor, watched)
        tape.watch(watched)
        uses.append(_Use(layer, formula, saved, watched))
        return watched

    def recording_call(*args: Any, **kwargs: Any) -> Any:
        if _compat.infers_shapes():
            return call(*args, **kwargs)
        return formula.call(layer, call, watch, *args, **kwargs)

    layer.call = recording_call
    try:
        yield
    finally:
        del layer.call
