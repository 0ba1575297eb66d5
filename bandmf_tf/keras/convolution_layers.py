"""Formulas for convolutions: rows of inputs are the patches under the kernel.

In all of them the gradient of a kernel at one offset is the sum over positions of what lies under
that offset times the gradient behind. A transposed convolution is one from its output to its input,
so the two change places.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf._numbers import ceil_div
from bandmf_tf.keras import _compat
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.matrix_layers import Term, check_matrix, kernel_terms, rows
from bandmf_tf.keras.outer_products import is_direct

# Patches of images with few channels are cut out by a convolution, others by gathering pixels.
_FEW_CHANNELS = 4

# Numbers in a register of the CPUs that oneDNN is best on.
_REGISTER = 16

# Fewer products of numbers do not pay for a turn of a loop.
_MANY_PRODUCTS = 1 << 18


def check(layer: Any) -> None:
    """Raises `Unsupported` for options that no formula covers."""
    check_matrix(layer)
    if layer.data_format != "channels_last":
        raise Unsupported(f"channels_first in {layer.name}")


def check_transposed(layer: Any) -> None:
    """Raises `Unsupported` for options that no formula covers."""
    check(layer)
    if getattr(layer, "output_padding", None) is not None or max(layer.dilation_rate) > 1:
        raise Unsupported(f"dilation or padding of the output of {layer.name}")


def convolution(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A convolution in any number of dimensions, in groups or not."""
    bias = (layer.bias, _total(behind))
    if layer.groups > 1:
        return [*kernel_terms(layer, "kernel", _in_groups(layer, images, behind)), bias]
    outputs = behind.shape[-1]
    positions, inputs = math.prod(behind.shape[1:-1]), math.prod(layer.kernel.shape[:-1])
    is_adapted = getattr(layer, "lora_enabled", False)
    if is_direct(positions, inputs, outputs) and layer.rank <= 2 and not is_adapted:
        # Two dimensions, and no patches where these would only be multiplied once.
        if _has_operation(layer, images):
            if _compat.has_onednn() and 2 * positions >= inputs:
                return [(layer.kernel, _as_groups(layer, images, behind)), bias]
            if not _compat.has_onednn() and positions * inputs * outputs >= _MANY_PRODUCTS:
                return [(layer.kernel, _one_by_one(layer, images, behind)), bias]
        return [(layer.kernel, _products(layer, _padded(layer, images), rows(behind))), bias]
    patches = _patches(layer, _padded(layer, images))
    return [*kernel_terms(layer, "kernel", patches, rows(behind)), bias]


def depthwise_convolution(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A convolution of every channel by itself."""
    kernel = _depthwise_kernel(layer)
    return [
        (kernel, _depthwise_gradient(layer, images, behind)),
        (layer.bias, _total(behind)),
    ]


def separable_convolution(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A convolution of every channel by itself, and a matrix product at every position."""
    depthwise, pointwise = (
        tf.convert_to_tensor(kernel)
        for kernel in (_depthwise_kernel(layer), layer.pointwise_kernel)
    )
    kernel = tf.reshape(tf.cast(depthwise, images.dtype), [math.prod(layer.kernel_size), -1])
    between = tf.reduce_sum(_patches_of_channels(layer, images, kernel.shape[1]) * kernel, axis=2)
    matrix = tf.reshape(tf.cast(pointwise, images.dtype), [kernel.shape[1], -1])
    behind_depthwise = tf.tensordot(behind, matrix, [[-1], [1]])
    return [
        (layer.pointwise_kernel, between, rows(behind)),
        (_depthwise_kernel(layer), _depthwise_gradient(layer, images, behind_depthwise)),
        (layer.bias, _total(behind)),
    ]


def transposed_convolution(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A convolution from outputs to inputs."""
    patches = _patches(layer, _padded(layer, behind))
    return [(layer.kernel, patches, rows(images)), (layer.bias, _total(behind))]


def _depthwise_kernel(layer: Any) -> Any:
    # Keras 3 has another name for it where there is no second kernel.
    return layer.depthwise_kernel if hasattr(layer, "depthwise_kernel") else layer.kernel


def _total(behind: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(behind, list(range(1, behind.shape.rank - 1)))


def _in_groups(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> tf.Tensor:
    """Returns gradients `[examples, offsets, channels of a group, outputs]`."""
    groups, outputs = layer.groups, behind.shape[-1]
    channels = images.shape[-1] // groups
    patches = rows(_patches(layer, _padded(layer, images)))
    patches = tf.reshape(
        patches, [-1, patches.shape[1], math.prod(layer.kernel_size), groups, channels]
    )
    e = tf.reshape(rows(behind), [-1, patches.shape[1], groups, outputs // groups])
    return tf.einsum("bpkgc,bpgo->bkcgo", patches, e)


def _depthwise_gradient(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> tf.Tensor:
    """Returns gradients `[examples, offsets, channels * multiplier]`."""
    patches = _patches_of_channels(layer, images, behind.shape[-1])
    return tf.reduce_sum(patches * rows(behind)[:, :, None], axis=1)


def _patches_of_channels(layer: Any, images: tf.Tensor, outputs: int) -> tf.Tensor:
    """Returns `[examples, positions, offsets, outputs]`, each channel once for each output."""
    multiplier = outputs // images.shape[-1]
    repeated = images if multiplier == 1 else tf.repeat(images, multiplier, axis=-1)
    patches = _patches(layer, _padded(layer, repeated))
    return tf.reshape(patches, [-1, patches.shape[1], math.prod(layer.kernel_size), outputs])


def _padded(layer: Any, images: tf.Tensor) -> tf.Tensor:
    """Returns images with what a convolution pads, as TensorFlow defines it."""
    if images.shape.rank != layer.rank + 2 or not images.shape[1:].is_fully_defined():
        raise Unsupported(f"the unknown size of the input of {layer.name}")
    *lengths, channels = images.shape[1:]
    paddings = []
    for length, (size, stride, dilation) in zip(lengths, _geometry(layer), strict=True):
        reach = (size - 1) * dilation
        total = max((ceil_div(length, stride) - 1) * stride + reach + 1 - length, 0)
        before = {"valid": 0, "causal": reach, "same": total // 2}[layer.padding]
        after = total - total // 2 if layer.padding == "same" else 0
        paddings.append((before, after))
    sizes = [sum(padding) + length for padding, length in zip(paddings, lengths, strict=True)]
    # Pixels of a row and their channels as one axis, which TensorFlow pads several times as fast.
    flat = tf.reshape(images, [-1, *lengths[:-1], lengths[-1] * channels])
    of_rows = tuple(pixels * channels for pixels in paddings[-1])
    padded = tf.pad(flat, [(0, 0), *paddings[:-1], of_rows])
    return tf.reshape(padded, [-1, *sizes, channels])


def _geometry(layer: Any) -> list[tuple[int, int, int]]:
    """Returns size, stride and dilation along each dimension."""
    return list(zip(layer.kernel_size, layer.strides, layer.dilation_rate, strict=True))


def _positions(length: int, size: int, stride: int, dilation: int) -> np.ndarray:
    """Returns which pixels lie under a kernel, `[positions, size]`, along one axis."""
    count = (length - (size - 1) * dilation - 1) // stride + 1
    return np.arange(count)[:, None] * stride + np.arange(size) * dilation


def _patches(layer: Any, padded: tf.Tensor) -> tf.Tensor:
    """Returns all patches, `[examples, positions, offsets * channels]`."""
    numbers = math.prod(layer.kernel_size) * padded.shape[-1]
    if _can_cut(layer, padded):
        return rows(_cut(_in_two_dimensions(padded), *_two(layer)))
    padded, geometry = _in_pieces(padded, _geometry(layer))
    lengths, channels = padded.shape[1:-1], padded.shape[-1]
    indices = np.zeros((1, 1), int)  # [positions, offsets], the last dimension fastest.
    for length, sizes in zip(lengths, geometry, strict=True):
        along = _positions(length, *sizes)
        indices = (indices[:, None, :, None] * length + along[None, :, None, :]).reshape(
            len(indices) * len(along), -1
        )
    flat = tf.reshape(padded, [-1, math.prod(lengths), channels])
    return tf.reshape(tf.gather(flat, indices.reshape(-1), axis=1), [-1, len(indices), numbers])


def _in_pieces(
    padded: tf.Tensor, geometry: list[tuple[int, int, int]]
) -> tuple[tf.Tensor, list[tuple[int, int, int]]]:
    """Returns images whose pixels are as many as always lie side by side under a kernel.

    Fewer and longer pieces are gathered in less time.
    """
    (*lengths, width, channels), (size, stride, dilation) = padded.shape[1:], geometry[-1]
    piece = math.gcd(size, stride) if dilation == 1 else 1
    if piece == 1:
        return padded, geometry
    used = width - width % piece
    pieces = tf.reshape(padded[..., :used, :], [-1, *lengths, used // piece, piece * channels])
    return pieces, [*geometry[:-1], (size // piece, stride // piece, 1)]


def _has_operation(layer: Any, images: tf.Tensor) -> bool:
    """Whether TensorFlow's own operation on the CPU can differentiate examples by themselves."""
    is_plain = layer.padding != "causal" and max(layer.dilation_rate) == 1
    on_cpu = not (_compat.is_compiled_by_xla() or _compat.has_gpu())
    return is_plain and on_cpu and images.dtype == tf.float32  # oneDNN knows no float64.


def _gradient(
    images: tf.Tensor, behind: tf.Tensor, sizes: list[Any], strides: tuple[int, ...], padding: str
) -> tf.Tensor:
    """Returns what TensorFlow's own operation makes of images, for a kernel of these sizes."""
    return tf.raw_ops.Conv2DBackpropFilter(
        input=images,
        filter_sizes=sizes,
        out_backprop=behind,
        strides=[1, *strides, 1],
        padding=padding.upper(),
    )


def _as_groups(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> tf.Tensor:
    """Returns gradients of all examples, laid side by side as groups of channels of one image.

    No group meets another, and oneDNN cuts and multiplies patches in a cache, with no call for each
    example. Where there are few positions it is slower than a product of all patches. It computes
    as many channels as a register holds, so where a group has few, the pixels that a stride passes
    over become channels of one, and the kernel as much smaller.
    """
    (height, width), strides, _ = _two(layer)
    (down, right), padding = strides, layer.padding
    behind = _in_two_dimensions(behind)
    examples, channels, outputs = tf.shape(images)[0], images.shape[-1], behind.shape[-1]
    if down * right * channels > _REGISTER:
        down = right = 1
    rows_of_blocks, blocks = ceil_div(height, down), ceil_div(width, right)
    if (down, right) == (1, 1):
        images = _in_two_dimensions(images)
    else:
        images = _of_size(
            _in_two_dimensions(_padded(layer, images)),
            (behind.shape[1] + rows_of_blocks - 1) * down,
            (behind.shape[2] + blocks - 1) * right,
        )
        strides, padding = (1, 1), "valid"

    def side_by_side(tensor: tf.Tensor, down: int, right: int) -> tf.Tensor:
        height, width, channels = tensor.shape[1:]
        shape = [examples, height // down, down, width // right, right * channels]
        numbers = examples * down * right * channels
        laid = tf.transpose(tf.reshape(tensor, shape), [1, 3, 0, 2, 4])
        return tf.reshape(laid, [1, height // down, width // right, numbers])

    gradients = _gradient(
        side_by_side(images, down, right),
        side_by_side(behind, 1, 1),
        [rows_of_blocks, blocks, down * right * channels, examples * outputs],
        strides,
        padding,
    )
    shape = [rows_of_blocks, blocks, down, right * channels, examples, outputs]
    gradients = tf.transpose(tf.reshape(gradients, shape), [4, 0, 2, 1, 3, 5])
    shape = [examples, rows_of_blocks * down, blocks * right, channels, outputs]
    return tf.reshape(gradients, shape)[:, :height, :width]


def _of_size(images: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Returns images without what is beyond a size, and with zeros up to it."""
    missing = [
        max(size - length, 0)
        for size, length in zip((height, width), images.shape[1:3], strict=True)
    ]
    padded = tf.pad(images, [(0, 0), (0, missing[0]), (0, missing[1]), (0, 0)])
    return padded[:, :height, :width]


def _one_by_one(layer: Any, images: tf.Tensor, behind: tf.Tensor) -> tf.Tensor:
    """Returns gradients of one example after the other.

    Eigen cuts out patches and multiplies them while they are in a cache. A batch of patches would
    be written to memory and read again, and its products of batches are slower than of matrices.
    """
    images, behind = _in_two_dimensions(images), _in_two_dimensions(behind)

    def gradient(i: tf.Tensor) -> tf.Tensor:
        example = images[i : i + 1], behind[i : i + 1]
        return _gradient(*example, shape, strides, layer.padding)

    sizes, strides, _ = _two(layer)
    shape = [*sizes, images.shape[-1], behind.shape[-1]]
    signature = tf.TensorSpec(shape, images.dtype)
    return tf.map_fn(gradient, tf.range(tf.shape(images)[0]), fn_output_signature=signature)


def _products(layer: Any, padded: tf.Tensor, behind: tf.Tensor) -> tf.Tensor:
    """Returns A^T E for patches A, for few channels without ever writing down A.

    The rows of a kernel are treated one by one: what lies under row k at all positions is a copy of
    whole rows of windows, of which there are far fewer than patches.
    """
    if not _can_cut(layer, padded):
        patches = _patches(layer, padded)
        if patches.shape[1] >= patches.shape[2] > behind.shape[2]:
            # Of many positions E^T A is faster, by a third, and as small a matrix to transpose.
            return tf.linalg.matrix_transpose(tf.matmul(behind, patches, transpose_a=True))
        return tf.matmul(patches, behind, transpose_a=True)
    sizes, strides, dilations = _two(layer)
    images = _in_two_dimensions(padded)
    windows = _cut(images, (1, sizes[1]), (1, strides[1]), (1, dilations[1]))
    height, width, numbers = windows.shape[1:]
    positions = _positions(height, sizes[0], strides[0], dilations[0])
    under = tf.gather(
        tf.reshape(windows, [-1, height, width * numbers]), positions.T.reshape(-1), axis=1
    )
    under = tf.reshape(under, [-1, sizes[0], len(positions) * width, numbers])
    products = tf.matmul(under, behind[:, None], transpose_a=True)
    return tf.reshape(products, [-1, sizes[0] * numbers, behind.shape[2]])


def _in_two_dimensions(images: tf.Tensor) -> tf.Tensor:
    return images[:, None] if images.shape.rank == 3 else images


def _two(layer: Any) -> list[tuple[int, int]]:
    """Returns sizes, strides and dilations of a layer in two dimensions."""
    return [
        (1,) * (2 - layer.rank) + tuple(numbers)
        for numbers in (layer.kernel_size, layer.strides, layer.dilation_rate)
    ]


def _can_cut(layer: Any, images: tf.Tensor) -> bool:
    few = layer.rank <= 2 and images.shape[-1] <= _FEW_CHANNELS
    return few and 1 in (max(layer.strides), max(layer.dilation_rate))


def _cut(
    images: tf.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> tf.Tensor:
    """Returns all patches, `[examples, rows, columns, numbers of a patch]`, by a convolution."""
    channels = images.shape[-1]
    numbers = sizes[0] * sizes[1] * channels
    kernel = np.eye(numbers, dtype=np.float32).reshape(*sizes, channels, numbers)
    return tf.nn.conv2d(images, tf.cast(kernel, images.dtype), strides, "VALID", None, dilations)
