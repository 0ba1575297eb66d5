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
class and with its own methods. Anything else, and any variable that is used twice, goes the general
way. `separation.py` tries it out on the first batch.

For a layer that uses its kernel at P positions (convolutions, dense layers on sequences), A holds
the inputs of the positions and E the gradients behind them, and the gradient is A^T E. Its norm is
taken from that matrix or from |A^T E|^2 = <A A^T, E E^T>, whichever costs less; `_MatrixUse` says
why rounding cannot make it too small.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf._numbers import ceil_div
from bandmf_tf.keras import _compat, clipping
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.clipping import ClippedSum

layers = tf.keras.layers

# Layers without trainable variables in which an example never meets another one.
_SEPARATE_LAYERS = frozenset(
    {
        layers.Activation,
        layers.Add,
        layers.Average,
        layers.AveragePooling1D,
        layers.AveragePooling2D,
        layers.Concatenate,
        layers.Cropping1D,
        layers.Cropping2D,
        layers.Dropout,
        layers.ELU,
        layers.Flatten,
        layers.GaussianNoise,
        layers.GlobalAveragePooling1D,
        layers.GlobalAveragePooling2D,
        layers.GlobalMaxPooling1D,
        layers.GlobalMaxPooling2D,
        layers.InputLayer,
        layers.LeakyReLU,
        layers.MaxPooling1D,
        layers.MaxPooling2D,
        layers.Maximum,
        layers.Minimum,
        layers.Multiply,
        layers.Permute,
        layers.ReLU,
        layers.RepeatVector,
        layers.Rescaling,
        layers.Reshape,
        layers.SpatialDropout1D,
        layers.SpatialDropout2D,
        layers.StringLookup,
        layers.Subtract,
        layers.TextVectorization,
        layers.UpSampling1D,
        layers.UpSampling2D,
        layers.ZeroPadding1D,
        layers.ZeroPadding2D,
    }
)

_SEPARATE_ACTIVATIONS = frozenset(
    {
        tf.keras.activations.elu,
        tf.keras.activations.exponential,
        tf.keras.activations.gelu,
        tf.keras.activations.hard_sigmoid,
        tf.keras.activations.linear,
        tf.keras.activations.relu,
        tf.keras.activations.selu,
        tf.keras.activations.sigmoid,
        tf.keras.activations.softmax,
        tf.keras.activations.softplus,
        tf.keras.activations.softsign,
        tf.keras.activations.swish,
        tf.keras.activations.tanh,
    }
)

# Matrix layers drop examples whose inputs are longer; see `_MatrixUse`.
_LONGEST_INPUT = 2.0**80

# Patches of images with few channels are cut out by a convolution, others by gathering pixels.
_FEW_CHANNELS = 4

_Pair = tuple[int, int]


@tf.autograph.experimental.do_not_convert
def layerwise_clipped_sum(
    model: tf.keras.Model,
    losses: Callable[[Any, Any, Any], tf.Tensor],
    x: Any,
    y: Any,
    sample_weight: tf.Tensor | None,
    l2_norm_clip: float,
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
      sample_weight: Weights; None: no weights.
      l2_norm_clip: Bound on the norm of one example's contribution.
      mask: Which rows are not padding; None: all.
      chunk_size: Examples differentiated at once. None: as many as fit a memory budget.

    Raises:
      Unsupported: The general way has to be taken.
    """
    check_layers(model)
    first = tf.nest.flatten(x)[0]
    if mask is None:
        mask = tf.ones(tf.shape(first)[:1], tf.bool)
    mask = tf.ensure_shape(mask, first.shape[:1])
    batch: tuple[Any, ...] = (x, y) if sample_weight is None else (x, y, sample_weight)
    if sample_weight is not None and sample_weight.shape.rank != 1:
        raise Unsupported("weights of parts of an example")

    def sum_chunk(chunk: tuple[Any, ...], mask: tf.Tensor) -> ClippedSum:
        return _sum_chunk(model, losses, chunk, mask, l2_norm_clip)

    def output_specs() -> Any:
        return tf.nest.map_structure(
            lambda output: tf.TensorSpec(output.shape[1:], output.dtype), model.output
        )

    if chunk_size is None:
        chunk_size = clipping.fitting_chunk_size(_numbers_per_example(model, x))
    return clipping.sum_in_chunks(
        sum_chunk, batch, mask, chunk_size, model.trainable_variables, output_specs
    )


def _sum_chunk(
    model: tf.keras.Model,
    losses: Callable[[Any, Any, Any], tf.Tensor],
    chunk: tuple[Any, ...],
    is_real: tf.Tensor,
    l2_norm_clip: float,
) -> ClippedSum:
    x, y, weight = chunk if len(chunk) == 3 else (*chunk, None)
    variables = model.trainable_variables
    uses, y_pred, _ = _forward_and_backward(model, losses, x, y, weight)

    def weighted_sums(factors: tf.Tensor, select: tf.Tensor | None) -> list[tf.Tensor]:
        by_variable: dict[Any, tf.Tensor] = {}
        for use in uses:
            by_variable.update(use.weighted_sums(factors, select, l2_norm_clip))
        return [by_variable[variable.ref()] for variable in variables]

    squared_norms = tf.add_n([use.squared_norms() for use in uses])
    return clipping.scale_and_sum(squared_norms, weighted_sums, is_real, l2_norm_clip, y_pred)


def _forward_and_backward(
    model: tf.keras.Model, losses: Callable[[Any, Any, Any], tf.Tensor], x: Any, y: Any, weight: Any
) -> tuple[list[_Use], Any, tf.Tensor]:
    """Returns all uses of variables, the outputs and the losses of a batch."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        with _recording(model, tape) as uses:
            y_pred = model(x, training=True)
        values = losses(y, y_pred, weight)
        total = tf.reduce_sum(values)
    _check_uses(uses, model.trainable_variables)
    behind = tape.gradient(total, [use.output for use in uses])
    if any(gradient is None for gradient in behind):
        raise Unsupported("a layer that the loss does not use")
    for use, gradient in zip(uses, behind, strict=True):
        use.behind = tf.convert_to_tensor(gradient)
    return uses, y_pred, values


def stages(
    model: tf.keras.Model, losses: Callable[[Any, Any, Any], tf.Tensor], x: Any, y: Any, weight: Any
) -> list[tuple[str, tf.Tensor]]:
    """Returns all that the formulas use, `[examples, ...]`, in the order of computation, by name.

    Raises:
      Unsupported: The general way has to be taken.
    """
    check_layers(model)
    uses, y_pred, values = _forward_and_backward(model, losses, x, y, weight)
    return [
        *((f"the input of the layer {use.layer.name}", use.inputs) for use in uses),
        *(("an output of the model", output) for output in tf.nest.flatten(y_pred)),
        ("the loss", values),
        *((f"the gradient behind the layer {use.layer.name}", use.behind) for use in uses),
    ]


def _numbers_per_example(model: tf.keras.Model, x: Any) -> int:
    """Returns how many numbers the formulas keep in memory for one example."""
    found: list[int] = []

    def probe(x: Any) -> None:
        with tf.GradientTape() as tape, _recording(model, tape) as uses:
            model(x, training=True)
        found.append(sum(use.numbers() for use in uses))

    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([1, *t.shape[1:]], t.dtype), x)
    with tf.Graph().as_default():
        tf.function(probe, autograph=False).get_concrete_function(spec)
    return found[0]


def check_layers(model: tf.keras.Model) -> None:
    """Raises `Unsupported` if a layer is not known to keep examples apart."""
    if not _compat.is_plain_model(model):
        raise Unsupported(f"the model {model.name}, which is not plainly sequential or functional")
    for layer in _compat.all_layers(model):
        kind = type(layer)
        if isinstance(layer, tf.keras.Model):
            check_layers(layer)
            continue
        if kind not in _CALLS or _CALLS[kind] is not kind.call or _compat.overridden_methods(layer):
            raise Unsupported(f"the layer {layer.name} of type {kind.__name__}")
        if kind in _FORMULAS:
            _FORMULAS[kind].check(layer)
        if layer.compute_dtype != layer.variable_dtype:
            raise Unsupported(f"the mixed precision of the layer {layer.name}")
        if isinstance(layer, layers.TextVectorization) and not _reads_texts_alone(layer):
            raise Unsupported(f"the length or the functions of the layer {layer.name}")
        if isinstance(layer, layers.Concatenate) and not _joins_within_examples(layer):
            raise Unsupported(f"the layer {layer.name} along the axis of the examples")
        if getattr(layer, "activity_regularizer", None) is not None:
            raise Unsupported(f"the activity regularizer of the layer {layer.name}")
        activation = getattr(layer, "activation", None)
        if activation is not None and activation not in _SEPARATE_ACTIVATIONS:
            raise Unsupported(f"the activation of the layer {layer.name}")


def _reads_texts_alone(layer: tf.keras.layers.TextVectorization) -> bool:
    """Whether a text is cut to a length that is not that of the longest in its batch."""
    config = layer.get_config()
    has_length = config["output_sequence_length"] is not None or config["output_mode"] != "int"
    functions = (config["standardize"], config["split"])
    return has_length and not config["ragged"] and not any(callable(f) for f in functions)


def _joins_within_examples(layer: tf.keras.layers.Concatenate) -> bool:
    if layer.axis >= 0:
        return layer.axis > 0
    shapes = [
        output.shape for node in layer.inbound_nodes for output in tf.nest.flatten(node.outputs)
    ]
    return all(shape.rank is not None and -layer.axis < shape.rank for shape in shapes)


class _Use(abc.ABC):
    """One call of a layer with trainable variables: what went in, and what came out.

    Attributes:
      layer: The layer.
      inputs: What went in.
      output: What the layer computed from its variables, before its activation.
      behind: Gradient of the sum of all losses at `output`; set after the backward pass.
    """

    behind: tf.Tensor

    def __init__(self, layer: tf.keras.layers.Layer, inputs: tf.Tensor, output: tf.Tensor):
        self.layer = layer
        self.inputs = inputs
        self.output = output

    @classmethod
    def check(cls, layer: tf.keras.layers.Layer) -> None:
        """Raises `Unsupported` for options of the layer that the formula does not cover."""
        del layer

    @abc.abstractmethod
    def numbers(self) -> int:
        """Returns how many numbers the formula keeps in memory for one example."""

    @abc.abstractmethod
    def squared_norms(self) -> tf.Tensor:
        """Returns the squared norm of the gradient of all variables of the layer, `[examples]`.

        In float64, and as near to the truth as `clipping.scale_and_sum` needs it.
        """

    @abc.abstractmethod
    def weighted_sums(
        self, factors: tf.Tensor, select: tf.Tensor | None, l2_norm_clip: float
    ) -> dict[Any, tf.Tensor]:
        """Returns the sums of gradients times `factors`, by reference of the variable.

        Examples outside of `select` count as zeros, whatever they hold.
        """


class _MatrixUse(_Use):
    """A layer with a kernel that is a matrix in disguise: the gradient is G = A^T E.

    Row p of A and E belongs to position p. Three ways lead to |G|:

    * One position: |G| = |A| |E|, without any cancellation.
    * Products: G itself, in float32. Whatever rounding did to G, it is *this* G whose norm is taken
      and which is summed.
    * Inner products: |G|^2 = <A A^T, E E^T>. Its terms cancel, without bound if rows repeat, and G
      is never seen, so this needs proof. With m = sum_p |a_p| |e_p| the entries of the two
      matrices, their products and the sum are, in float64, together off by at most
      (inputs + outputs + positions^2 + 2) 2^-53 m^2, and twice that is added. The weighted sum
      computes f G from products in float32, off by at most (positions + 1) u f m; where that is
      more than 2^-18 clip for any example, the whole sum is computed in float64.

    Numbers below 2^-126 may count as zero in one place and not in another; the last and the first
    way allow for it, and drop examples whose inputs are so long (2^80) that it would matter in the
    product of A with f E.
    """

    @abc.abstractmethod
    def _rows(self) -> tf.Tensor:
        """Returns A, `[examples, positions, inputs of the kernel]`."""

    def _gradients_behind(self) -> tf.Tensor:
        """Returns E, `[examples, positions, outputs of the kernel]`."""
        size = self.behind.shape[-1]
        return tf.reshape(self.behind, [tf.shape(self.behind)[0], -1, size])

    def numbers(self) -> int:
        rows = self._rows()
        positions, inputs, outputs = rows.shape[1], rows.shape[2], self.output.shape[-1]
        if self._is_direct(positions, inputs, outputs):
            return positions * (inputs + outputs) + inputs * outputs
        return 3 * positions * (inputs + outputs) + 4 * positions**2

    def squared_norms(self) -> tf.Tensor:
        self._a, self._e = self._rows(), self._gradients_behind()
        norms = self._kernel_norms()
        if self.layer.use_bias:
            self._bias_gradients = tf.reduce_sum(self._e, axis=1)
            norms += clipping.sums_of_squares(self._bias_gradients)
        return norms

    def _kernel_norms(self) -> tf.Tensor:
        (positions, inputs), outputs = self._a.shape[1:], self._e.shape[2]
        self._per_example = None
        if self._is_direct(positions, inputs, outputs):
            self._per_example = self._products()
            rows = tf.reshape(self._per_example, [-1, inputs * outputs])
            return clipping.sums_of_squares(rows)
        a, e = tf.cast(self._a, tf.float64), tf.cast(self._e, tf.float64)
        if positions == 1:
            length_a, length_e = tf.norm(a[:, 0], axis=1), tf.norm(e[:, 0], axis=1)
            norms = length_a * length_e
        else:
            a, e = tf.matmul(a, a, transpose_b=True), tf.matmul(e, e, transpose_b=True)
            squares_a, squares_e = tf.linalg.diag_part(a), tf.linalg.diag_part(e)
            self._magnitudes = tf.reduce_sum(tf.sqrt(squares_a * squares_e), axis=1)
            rounding = (inputs + outputs + positions**2 + 2) * 2.0**-52 * self._magnitudes**2
            norms = tf.sqrt(tf.maximum(tf.reduce_sum(a * e, [1, 2]), 0.0) + rounding)
            length_a = tf.sqrt(tf.reduce_sum(squares_a, axis=1))
            length_e = tf.sqrt(tf.reduce_sum(squares_e, axis=1))
        lost_a, lost_e = (clipping.SMALLEST * math.sqrt(positions * n) for n in (inputs, outputs))
        norms += lost_a * length_e + lost_e * length_a + lost_a * lost_e
        return tf.where(length_a < _LONGEST_INPUT, tf.square(norms), np.inf)

    def _products(self) -> tf.Tensor:
        """Returns A^T E, `[examples, inputs of the kernel, outputs of the kernel]`."""
        return tf.matmul(self._a, self._e, transpose_a=True)

    @staticmethod
    def _is_direct(positions: int, inputs: int, outputs: int) -> bool:
        """Whether A^T E is cheaper than A A^T and E E^T, in float64 at half the speed."""
        return positions > 1 and 2 * positions * (inputs + outputs) >= inputs * outputs

    def weighted_sums(
        self, factors: tf.Tensor, select: tf.Tensor | None, l2_norm_clip: float
    ) -> dict[Any, tf.Tensor]:
        kernel = self.layer.kernel
        if self._per_example is not None:
            rows = tf.reshape(self._per_example, [-1, math.prod(kernel.shape)])
            total = _weighted(_selected(rows, select), factors)
        else:
            total = self._summed_products(factors, select, l2_norm_clip)
        sums = {kernel.ref(): tf.reshape(total, kernel.shape)}
        if self.layer.use_bias:
            rows = _selected(self._bias_gradients, select)
            sums[self.layer.bias.ref()] = _weighted(rows, factors)
        return sums

    def _summed_products(
        self, factors: tf.Tensor, select: tf.Tensor | None, l2_norm_clip: float
    ) -> tf.Tensor:
        a, e = _selected(self._a, select), _selected(self._e, select)
        (positions, inputs), outputs = a.shape[1:], e.shape[2]

        def product(dtype: tf.DType) -> tf.Tensor:
            left, right = tf.cast(a, dtype), tf.cast(e, dtype)
            right *= tf.cast(factors, dtype)[:, None, None]
            left, right = tf.reshape(left, [-1, inputs]), tf.reshape(right, [-1, outputs])
            return tf.cast(tf.matmul(left, right, transpose_a=True), a.dtype)

        if positions == 1:
            return product(a.dtype)
        rounding = (positions + 1) * clipping.UNIT_ROUNDOFF
        scaled = tf.cast(factors, tf.float64) * _selected(self._magnitudes, select)
        cancels = tf.reduce_any(rounding * scaled > 2.0**-18 * l2_norm_clip)
        return tf.cond(cancels, lambda: product(tf.float64), lambda: product(a.dtype))


class _DenseUse(_MatrixUse):
    """A dense layer, on vectors or along the last axis of anything longer."""

    def _rows(self) -> tf.Tensor:
        positions = self.inputs.shape[1:-1].num_elements()
        if positions is None:
            raise Unsupported(f"the unknown length of the input of {self.layer.name}")
        width = self.layer.kernel.shape[0]
        return tf.reshape(self.inputs, [tf.shape(self.inputs)[0], positions, width])


class _ConvolutionUse(_MatrixUse):
    """A convolution in one or two dimensions: A holds the patches under the kernel."""

    @classmethod
    def check(cls, layer: tf.keras.layers.Layer) -> None:
        if layer.groups != 1 or layer.data_format != "channels_last":
            raise Unsupported(f"groups or channels_first in {layer.name}")

    def _rows(self) -> tf.Tensor:
        return _patches(*self._padded())

    def _padded(self) -> tuple[tf.Tensor, _Pair, _Pair, _Pair]:
        """Returns padded images with sizes, strides and dilations in two dimensions."""
        layer, images = self.layer, self.inputs
        sizes, strides, dilations = layer.kernel_size, layer.strides, layer.dilation_rate
        if images.shape.rank != layer.rank + 2 or not images.shape[1:].is_fully_defined():
            raise Unsupported(f"the unknown size of the input of {layer.name}")
        if layer.rank == 1:
            images = images[:, None]
            sizes, strides, dilations = (1, *sizes), (1, *strides), (1, *dilations)
        images = tf.pad(images, [[0, 0], *_paddings(layer, images.shape[1:3]), [0, 0]])
        return images, sizes, strides, dilations

    def _products(self) -> tf.Tensor:
        """Returns A^T E, for few channels without ever writing down A.

        The rows of a kernel are treated one by one: what lies under row k at all positions is a
        copy of whole rows of windows, of which there are far fewer than patches.
        """
        images, sizes, strides, dilations = self._padded()
        if not _can_cut(images, strides, dilations):
            return super()._products()
        windows = _cut(images, (1, sizes[1]), (1, strides[1]), (1, dilations[1]))
        height, width, numbers = windows.shape[1:]
        positions = _positions(height, sizes[0], strides[0], dilations[0])
        rows = tf.gather(
            tf.reshape(windows, [-1, height, width * numbers]), positions.T.reshape(-1), axis=1
        )
        rows = tf.reshape(rows, [-1, sizes[0], len(positions) * width, numbers])
        products = tf.matmul(rows, self._e[:, None], transpose_a=True)
        return tf.reshape(products, [-1, sizes[0] * numbers, self._e.shape[2]])


class _EmbeddingUse(_Use):
    """A table of which an example uses a few rows."""

    @classmethod
    def check(cls, layer: tf.keras.layers.Layer) -> None:
        if getattr(layer, "sparse", False) or layer.mask_zero:
            raise Unsupported(f"sparse lookups or masks of {layer.name}")

    def numbers(self) -> int:
        return self.output.shape[1:].num_elements() or self.layer.embeddings.shape[1]

    def squared_norms(self) -> tf.Tensor:
        num_examples = tf.shape(self.behind)[0]
        width = self.layer.embeddings.shape[1]
        rows = clipping.SparseRows(
            tf.reshape(self.behind, [num_examples, -1, width]),
            tf.cast(tf.reshape(self.inputs, [num_examples, -1]), tf.int64),
        )
        self._part = clipping.SparsePart.from_rows(rows, self.layer.embeddings, num_examples)
        return self._part.squared_norms()

    def weighted_sums(
        self, factors: tf.Tensor, select: tf.Tensor | None, l2_norm_clip: float
    ) -> dict[Any, tf.Tensor]:
        del l2_norm_clip
        part = self._part if select is None else self._part.only(select)
        return {self.layer.embeddings.ref(): part.weighted_sum(factors)}


_FORMULAS: dict[type, type[_Use]] = {
    layers.Conv1D: _ConvolutionUse,
    layers.Conv2D: _ConvolutionUse,
    layers.Dense: _DenseUse,
    layers.Embedding: _EmbeddingUse,
}


# The methods as they were when this was loaded, so that replaced ones are noticed.
_CALLS = {kind: kind.call for kind in (*_FORMULAS, *_SEPARATE_LAYERS)}


@contextlib.contextmanager
def _recording(model: tf.keras.Model, tape: tf.GradientTape) -> Iterator[list[_Use]]:
    """Yields a list that collects the uses of all layers with variables while it is open."""
    uses: list[_Use] = []
    recorded = [
        layer
        for layer in _compat.all_layers(model)
        if type(layer) in _FORMULAS and layer.trainable_variables
    ]
    with contextlib.ExitStack() as stack:
        for layer in recorded:
            stack.enter_context(_recorded(layer, tape, uses))
        yield uses


@contextlib.contextmanager
def _recorded(
    layer: tf.keras.layers.Layer, tape: tf.GradientTape, uses: list[_Use]
) -> Iterator[None]:
    """Makes a layer note its input and, before its activation, its output."""
    call, activation = layer.call, getattr(layer, "activation", None)
    make = _FORMULAS[type(layer)]

    def recording_call(inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        def note(output: tf.Tensor) -> tf.Tensor:
            tape.watch(output)
            uses.append(make(layer, tf.convert_to_tensor(inputs), output))
            return output

        if activation is None:
            return note(call(inputs, *args, **kwargs))
        layer.activation = lambda output: activation(note(output))
        return call(inputs, *args, **kwargs)

    layer.call = recording_call
    try:
        yield
    finally:
        del layer.call
        if activation is not None:
            layer.activation = activation


def _check_uses(uses: Sequence[_Use], variables: Sequence[tf.Variable]) -> None:
    """Raises `Unsupported` unless each variable is used by exactly one call of one layer."""
    used = [variable.ref() for use in uses for variable in use.layer.trainable_variables]
    if len(set(used)) != len(used):
        raise Unsupported("a layer that is used twice")
    if set(used) != {variable.ref() for variable in variables}:
        raise Unsupported("a variable outside of the layers that are known")


def _weighted(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(rows, factors, transpose_a=True)


def _selected(tensor: tf.Tensor, select: tf.Tensor | None) -> tf.Tensor:
    if select is None:
        return tensor
    condition = tf.reshape(select, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def _paddings(layer: tf.keras.layers.Layer, size: tf.TensorShape) -> list[tuple[int, int]]:
    """Returns what a convolution pads, as TensorFlow defines it; one dimension comes second."""
    added = []
    for axis in range(2):
        index = axis - (2 - layer.rank)
        if index < 0 or layer.padding == "valid":
            added.append((0, 0))
            continue
        reach = (layer.kernel_size[index] - 1) * layer.dilation_rate[index]
        if layer.padding == "causal":
            added.append((reach, 0))
            continue
        stride = layer.strides[index]
        total = max((ceil_div(size[axis], stride) - 1) * stride + reach + 1 - size[axis], 0)
        added.append((total // 2, total - total // 2))
    return added


def _can_cut(images: tf.Tensor, strides: _Pair, dilations: _Pair) -> bool:
    few = images.shape[-1] <= _FEW_CHANNELS
    return few and max(strides) * max(dilations) == max(*strides, *dilations)


def _cut(images: tf.Tensor, sizes: _Pair, strides: _Pair, dilations: _Pair) -> tf.Tensor:
    """Returns all patches, `[examples, rows, columns, numbers of a patch]`, by a convolution."""
    channels = images.shape[-1]
    numbers = sizes[0] * sizes[1] * channels
    kernel = np.eye(numbers, dtype=np.float32).reshape(*sizes, channels, numbers)
    return tf.nn.conv2d(images, tf.cast(kernel, images.dtype), strides, "VALID", None, dilations)


def _positions(length: int, size: int, stride: int, dilation: int) -> np.ndarray:
    """Returns which pixels lie under a kernel, `[positions, size]`, along one axis."""
    count = (length - (size - 1) * dilation - 1) // stride + 1
    return np.arange(count)[:, None] * stride + np.arange(size) * dilation


def _patches(images: tf.Tensor, sizes: _Pair, strides: _Pair, dilations: _Pair) -> tf.Tensor:
    """Returns all patches, `[examples, positions, height * width * channels of a patch]`."""
    height, width, channels = images.shape[1:]
    numbers = sizes[0] * sizes[1] * channels
    if _can_cut(images, strides, dilations):
        patches = _cut(images, sizes, strides, dilations)
        return tf.reshape(patches, [tf.shape(images)[0], math.prod(patches.shape[1:3]), numbers])
    rows = _positions(height, sizes[0], strides[0], dilations[0])
    columns = _positions(width, sizes[1], strides[1], dilations[1])
    indices = rows[:, None, :, None] * width + columns[None, :, None, :]
    flat = tf.reshape(images, [-1, height * width, channels])
    patches = tf.gather(flat, indices.reshape(-1), axis=1)
    return tf.reshape(patches, [-1, len(rows) * len(columns), numbers])
