"""Formulas for layers that multiply by a matrix, look rows up in one, or scale channels.

Every formula takes a layer, what went into it and the gradient behind it, and returns terms as
`layer_formulas` defines them. LoRA adapters of Keras 3 replace a kernel by K + s a b with K frozen:
the terms of K become those of a and b, so that the cost is that of their rank.
"""

from __future__ import annotations

import string
from typing import Any

import tensorflow as tf

from bandmf_tf.keras._compat import Unsupported

# A variable with its gradients for each example, or with rows whose outer products sum up to them.
Term = tuple[Any, tf.Tensor] | tuple[Any, tf.Tensor, tf.Tensor]


def rows(tensor: tf.Tensor, num_last: int = 1) -> tf.Tensor:
    """Returns `[examples, positions, numbers]`, the last axes of each example taken as numbers."""
    last = tensor.shape.rank - num_last
    positions, size = tensor.shape[1:last].num_elements(), tensor.shape[last:].num_elements()
    if positions is None or size is None:
        raise Unsupported("inputs of unknown size")
    return tf.reshape(tensor, [tf.shape(tensor)[0], positions, size])


def check_matrix(layer: Any) -> None:
    """Raises `Unsupported` for layers with numbers that are not floats."""
    if getattr(layer, "quantization_mode", None) is not None:
        raise Unsupported(f"the quantised layer {layer.name}")


def check_embedding(layer: Any) -> None:
    """Raises `Unsupported` for sparse lookups, capped outputs and what `check_matrix` refuses."""
    check_matrix(layer)
    if getattr(layer, "sparse", False) or getattr(layer, "logit_soft_cap", None) is not None:
        raise Unsupported(f"sparse lookups or the cap of {layer.name}")


def call_embedding(
    layer: Any, call: Any, watch: Any, inputs: Any, reverse: bool = False, **kwargs: Any
) -> tf.Tensor:
    """Calls a table, and notes numbers if it is looked up, vectors if it is multiplied with."""
    if reverse:
        return watch(tf.cast(inputs, layer.compute_dtype), call(inputs, reverse=True, **kwargs))
    return watch(tf.cast(inputs, tf.int64), call(inputs, **kwargs))


def dense(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A dense layer, on vectors or along the last axis of anything longer."""
    behind = rows(behind)
    if inputs.shape[-1] is None:
        inputs = tf.ensure_shape(inputs, [*inputs.shape[:-1], layer.kernel.shape[0]])
    return [
        *kernel_terms(layer, "kernel", rows(inputs), behind),
        (layer.bias, tf.reduce_sum(behind, axis=1)),
    ]


def einsum_dense(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A product along any axes of inputs with any axes of a kernel."""
    x, w, y = _labels(layer, inputs.shape.rank)
    example, last = x[0], y[1:]
    inner, outer = [k for k in w if k not in y], [k for k in w if k not in x]
    positions = [k for k in last if k in x and k not in w]
    is_matrix = len(inner) + len(outer) == len(w)  # No axis that all three have.
    if is_matrix and (w == inner + outer or (w == outer + inner and not _has_lora(layer))):
        left = rows(_permuted(inputs, x, [example, *positions, *inner]), len(inner))
        right = rows(_permuted(behind, y, [example, *positions, *outer]), len(outer))
        sides = (left, right) if w == inner + outer else (right, left)
        terms = kernel_terms(layer, "kernel", *sides)
    elif _has_lora(layer) and w[-1] in outer:
        terms = _adapter_terms(layer, inputs, behind, x, w, y)
    else:
        equation = f"{''.join(x)},{''.join(y)}->{example}{''.join(w)}"
        terms = kernel_terms(layer, "kernel", tf.einsum(equation, inputs, behind))
    return [*terms, (layer.bias, behind if layer.bias is None else _summed(behind, layer.bias))]


def _adapter_terms(
    layer: Any, inputs: tf.Tensor, behind: tf.Tensor, x: list[str], w: list[str], y: list[str]
) -> list[Term]:
    """Terms of the factors of a kernel whose last axis is one of outputs, without its gradient.

    With r the axis between the factors and z the last one of the kernel, the gradient of the first
    factor is that of the same product of inputs with the gradient behind it, r in the place of z.
    The second has outer products of what the first makes of the inputs with the gradient.
    """
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    scale, z = layer.lora_alpha / layer.lora_rank, w[-1]
    r = next(k for k in string.ascii_letters if k not in {*x, *w, *y})
    value_a, value_b = (scale * tf.cast(tf.convert_to_tensor(v), behind.dtype) for v in (a, b))
    positions = [k for k in y if k != z]

    def product(one: list[str], other: list[str], result: list[str], *tensors: Any) -> tf.Tensor:
        return tf.einsum(f"{''.join(one)},{''.join(other)}->{''.join(result)}", *tensors)

    through_b = product(y, [r, z], [*positions, r], behind, value_b)
    gradients_a = product(x, [*positions, r], [y[0], *w[:-1], r], inputs, through_b)
    through_a = product(x, [*w[:-1], r], [*positions, r], inputs, value_a)
    return [(a, gradients_a), (b, rows(through_a), rows(_permuted(behind, y, [*positions, z])))]


def _labels(layer: Any, rank: int) -> tuple[list[str], list[str], list[str]]:
    """Returns the labels of inputs, kernel and outputs, dots replaced by letters."""
    sides, output = layer.equation.replace(" ", "").split("->")
    x, w = sides.split(",")
    free = [k for k in string.ascii_letters if k not in layer.equation]
    dots = "".join(free[: rank - len(x.replace("...", ""))])
    x, w, y = (list(side.replace("...", dots)) for side in (x, w, output))
    if (
        any(len(set(side)) != len(side) for side in (x, w, y))
        or x[0] != y[0]
        or x[0] in w
        or not set(w) <= set(x) | set(y)
        or not set(x) | set(w) >= set(y)
    ):
        raise Unsupported(f"the equation {layer.equation} of {layer.name}")
    return x, w, y


def _permuted(tensor: tf.Tensor, labels: list[str], wanted: list[str]) -> tf.Tensor:
    """Returns a tensor with its axes in another order; axes that are not wanted are summed."""
    if labels == wanted:
        return tensor
    return tf.einsum(f"{''.join(labels)}->{''.join(wanted)}", tensor)


def embedding(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A table of which an example uses a few rows."""
    return kernel_terms(layer, "embeddings", rows(inputs, 0)[:, :, 0], rows(behind))


def reversible_embedding(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A table that is looked up, or a product with its transpose, as the inputs say."""
    if inputs.dtype.is_integer:
        return embedding(layer, inputs, behind)
    if layer.tie_weights:
        return kernel_terms(layer, "embeddings", rows(behind), rows(inputs))
    return [(layer.reverse_embeddings, rows(inputs), rows(behind))]


def kernel_terms(layer: Any, name: str, *sides: tf.Tensor) -> list[Term]:
    """Returns the terms of a kernel or, if it is adapted by LoRA, of its two factors.

    Args:
      layer: The layer.
      name: The attribute that is the kernel.
      *sides: What comes after the variable in a term; the last of it ends as the kernel does.
    """
    if not _has_lora(layer):
        return [(getattr(layer, name), *sides)]
    a, b = (getattr(layer, f"lora_{name}_{factor}") for factor in "ab")
    scale = layer.lora_alpha / layer.lora_rank
    rank, size = b.shape
    dtype = sides[-1].dtype
    value_a, value_b = (tf.cast(tf.convert_to_tensor(v), dtype) for v in (a, b))
    if len(sides) == 1:
        (gradient,) = sides
        flat = tf.reshape(gradient, [tf.shape(gradient)[0], -1, size])
        factor = tf.tile(tf.reshape(value_a, [1, -1, rank]), [tf.shape(flat)[0], 1, 1])
        return [
            (a, scale * tf.matmul(flat, value_b, transpose_b=True)),
            (b, scale * tf.matmul(factor, flat, transpose_a=True)),
        ]
    left, right = sides
    # Outputs beside the last axis of the kernel count as positions of the second factor.
    positions, beside = right.shape[1], right.shape[2] // size
    through_b = tf.matmul(tf.reshape(right, [-1, size]), scale * value_b, transpose_b=True)
    if left.dtype.is_integer:
        through_a = tf.gather(scale * value_a, left)
    else:
        through_a = tf.matmul(left, tf.reshape(scale * value_a, [left.shape[2], beside * rank]))
    return [
        (a, left, tf.reshape(through_b, [-1, positions, beside * rank])),
        (
            b,
            tf.reshape(through_a, [-1, positions * beside, rank]),
            tf.reshape(right, [-1, positions * beside, size]),
        ),
    ]


def _has_lora(layer: Any) -> bool:
    return bool(getattr(layer, "lora_enabled", False))


def _summed(gradient: tf.Tensor, bias: Any) -> tf.Tensor:
    """Returns for each example the gradient of a bias that was broadcast to an output."""
    shape = bias.shape
    missing = gradient.shape.rank - len(shape)
    if missing < 1:
        raise Unsupported("a bias for each example")
    summed = tf.reduce_sum(gradient, axis=list(range(1, missing)))
    ones = [i + 1 for i, size in enumerate(shape) if size == 1]
    return tf.reduce_sum(summed, axis=ones, keepdims=True) if ones else summed


def check_normalization(layer: Any) -> None:
    """Raises `Unsupported` for axes that may be those of the examples, and old options."""
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    if 0 in axes or getattr(layer, "rms_scaling", False):
        raise Unsupported(f"the axes or the scaling of {layer.name}")


def call_normalization(
    layer: Any, call: Any, watch: Any, inputs: Any, mask: Any = None, **kwargs: Any
) -> tf.Tensor:
    """Calls a normalisation, unless it looks at some positions only."""
    if mask is not None or not inputs.dtype.is_floating:
        raise Unsupported(f"the mask or the integers that {layer.name} takes")
    return watch(inputs, call(inputs, **kwargs))


def layer_normalization(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A normalisation along some axes, the channels among them."""
    axes = _axes(layer, inputs)
    mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
    normalized = (inputs - mean) * tf.math.rsqrt(variance + layer.epsilon)
    return _scaled(layer.gamma, layer.beta, normalized, behind, axes)


def rms_normalization(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A division by the root of the mean square along some axes."""
    axes = _axes(layer, inputs)
    squares = tf.reduce_mean(tf.square(inputs), axes, keepdims=True)
    normalized = inputs * tf.math.rsqrt(squares + layer.epsilon)
    return _scaled(layer.scale, None, normalized, behind, axes)


def group_normalization(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A normalisation of groups of channels, each along all positions."""
    (axis,) = _axes(layer, inputs)
    order = [i for i in range(inputs.shape.rank) if i != axis] + [axis]
    x, e = (rows(tf.transpose(t, order)) for t in (inputs, behind))
    size = x.shape[2] // layer.groups

    def means(values: tf.Tensor) -> tf.Tensor:
        """Returns means along positions and groups, `[examples, 1, channels]`."""
        by_group = tf.reshape(tf.reduce_mean(values, axis=1), [-1, 1, layer.groups, size])
        return tf.repeat(tf.reduce_mean(by_group, axis=3), size, axis=2)

    centered = x - means(x)
    normalized = centered * tf.math.rsqrt(means(tf.square(centered)) + layer.epsilon)
    return _scaled(layer.gamma, layer.beta, normalized, e, [2])


def _axes(layer: Any, inputs: tf.Tensor) -> list[int]:
    given = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    axes = sorted(axis % inputs.shape.rank for axis in given)
    if 0 in axes or not inputs.shape[1:].is_fully_defined():
        raise Unsupported(f"the axis of the examples, or an unknown size, in {layer.name}")
    return axes


def _scaled(
    scale: Any, shift: Any, normalized: tf.Tensor, behind: tf.Tensor, axes: list[int]
) -> list[Term]:
    others = [i for i in range(1, behind.shape.rank) if i not in axes]
    return [
        (scale, tf.reduce_sum(normalized * behind, others)),
        (shift, tf.reduce_sum(behind, others)),
    ]
