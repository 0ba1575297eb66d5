"""Norms and weighted sums of gradients that are sums of outer products.

A layer that uses its kernel at P positions has, for one example, the gradient G = A^T E: row p of A
is what went into the kernel at position p, row p of E the gradient behind it. A table of which rows
are looked up is such a kernel, too, whose rows of A have a single one; they are given as numbers.

There are two forms. *Direct*: G is computed for every example. Whatever rounding does to G, it is
*this* G whose norm is taken and which is summed, so nothing has to be proven. *Gram*: the norm is
taken from |G|^2 = <A A^T, E E^T>, the weighted sum from one product of all examples' A with the
scaled E, and no G is ever seen. `is_direct` chooses what costs less; `ProductPart` is the second
form and proves that rounding cannot make its norms too small.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from bandmf_tf.keras import clipping

# Examples whose inputs are longer are dropped; see `ProductPart`.
_LONGEST_INPUT = 2.0**80


def is_direct(positions: int, inputs: int, outputs: int) -> bool:
    """Whether A^T E is cheaper than A A^T and E E^T, in float64 at half the speed.

    Where it is not, there are at most min(inputs, outputs) / 2 positions, so that the memory of the
    Gram form is bounded by that of G as well.
    """
    return positions > 1 and 2 * positions * (inputs + outputs) >= inputs * outputs


def numbers(positions: int, inputs: int, outputs: int) -> int:
    """Returns how many numbers the cheaper form keeps in memory for one example."""
    if is_direct(positions, inputs, outputs):
        return positions * (inputs + outputs) + inputs * outputs
    return 3 * positions * (inputs + outputs) + 4 * positions**2


@dataclasses.dataclass(frozen=True)
class ProductPart:
    """The gradients of one variable in the Gram form.

    With m = sum_p |a_p| |e_p| the entries of the two matrices, their products and the sum are, in
    float64, together off by at most (inputs + outputs + positions^2 + 2) 2^-53 m^2, and twice that
    is added to the square of the norm: its terms cancel, without bound if rows repeat.

    The weighted sum computes f G from products in float32. Each term is rounded when e is scaled,
    when it is multiplied and in at most P additions within its example, so this is off by at most
    1.01 (P + 2) u f m for P < 100,000. Adding 1.01 (P + 2) u m to the norm therefore bounds what is
    really summed. It takes 3e-5 from a clipped gradient of 64 positions in random directions. On a
    GPU that rounds factors to 11 bits (TensorFloat-32) 2^-10 m comes on top.

    Numbers below 2^-126 may count as zero in one place and not in another. The norm allows for it,
    and examples whose A is so long (2^80) that it would matter in the product with f E are dropped.

    Attributes:
      blocks: Pairs of A, `[examples, positions, inputs]` or indices `[examples, positions]`, and E,
        `[examples, positions, outputs]`. The positions of all blocks count together.
      variable: What is differentiated, of `inputs * outputs` numbers.
    """

    blocks: tuple[tuple[tf.Tensor, tf.Tensor], ...]
    variable: tf.Variable

    def squared_norms(self) -> tf.Tensor:
        """Returns upper bounds on squared norms, `[examples]`, in float64."""
        lefts = [_in_float64(left) for left, _ in self.blocks]
        rights = [_in_float64(right) for _, right in self.blocks]
        outputs, positions = rights[0].shape[2], sum(right.shape[1] for right in rights)
        inputs = math.prod(self.variable.shape) // outputs
        right = tf.concat(rights, axis=1)
        a, e = _inner_products(lefts), tf.matmul(right, right, transpose_b=True)
        rounding = (inputs + outputs + positions**2 + 2) * 2.0**-52
        sum_rounding = 1.01 * (positions + 2) * clipping.UNIT_ROUNDOFF + clipping.factor_roundoff()
        lost_a, lost_e = (clipping.SMALLEST * math.sqrt(positions * n) for n in (inputs, outputs))
        if positions == 1:
            # The same bound, |G| = |a| |e|, as (|a| + lost)^2 <= (1 + r) (|a|^2 + lost^2 / r).
            square_a, square_e = (
                tf.reshape(square, [-1]) + lost**2 / rounding
                for square, lost in ((a, lost_a), (e, lost_e))
            )
            squares = (1.0 + 2.0 * rounding + sum_rounding) ** 2 * square_a * square_e
            return tf.where(square_a < _LONGEST_INPUT**2, squares, np.inf)
        squares_a, squares_e = tf.linalg.diag_part(a), tf.linalg.diag_part(e)
        magnitudes = tf.reduce_sum(tf.sqrt(squares_a * squares_e), axis=1)
        squares = tf.maximum(tf.reduce_sum(a * e, [1, 2]), 0.0) + rounding * tf.square(magnitudes)
        norms = tf.sqrt(squares) + sum_rounding * magnitudes
        length_a = tf.sqrt(tf.reduce_sum(squares_a, axis=1))
        length_e = tf.sqrt(tf.reduce_sum(squares_e, axis=1))
        norms += lost_a * length_e + lost_e * length_a + lost_a * lost_e
        return tf.where(length_a < _LONGEST_INPUT, tf.square(norms), np.inf)

    def only(self, keep: tf.Tensor) -> ProductPart:
        """Replaces all of the other examples by zeros."""
        blocks = tuple(
            (_selected(left, keep), _selected(right, keep)) for left, right in self.blocks
        )
        return dataclasses.replace(self, blocks=blocks)

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the gradients times factors."""
        return tf.add_n([self._weighted(*block, factors) for block in self.blocks])

    def _weighted(self, left: tf.Tensor, right: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
        outputs = right.shape[2]
        inputs = math.prod(self.variable.shape) // outputs
        right = tf.reshape(right * tf.cast(factors, right.dtype)[:, None, None], [-1, outputs])
        if left.dtype.is_integer:
            total = tf.math.unsorted_segment_sum(right, tf.reshape(left, [-1]), inputs)
        else:
            total = tf.matmul(tf.reshape(left, [-1, inputs]), right, transpose_a=True)
        return tf.reshape(total, self.variable.shape)


def _inner_products(blocks: list[tf.Tensor]) -> tf.Tensor:
    """Returns A A^T, `[examples, positions, positions]`, of rows some of which are numbers."""
    return tf.concat(
        [tf.concat([_inner_product(one, other) for other in blocks], axis=2) for one in blocks],
        axis=1,
    )


def _inner_product(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    if one.dtype.is_integer and other.dtype.is_integer:
        return tf.cast(tf.equal(one[:, :, None], other[:, None, :]), tf.float64)
    if one.dtype.is_integer:
        return tf.linalg.matrix_transpose(_inner_product(other, one))
    if other.dtype.is_integer:
        return tf.gather(one, other, axis=2, batch_dims=1)
    return tf.matmul(one, other, transpose_b=True)


def _in_float64(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.dtype.is_integer else tf.cast(tensor, tf.float64)


def _selected(tensor: tf.Tensor, select: tf.Tensor) -> tf.Tensor:
    condition = tf.reshape(select, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(condition, tensor, tf.zeros_like(tensor))
