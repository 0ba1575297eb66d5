"""Standard Gaussian rows and the seeds they come from.

Row i of z is a pure function of (seed, i): the same whether it is drawn alone or in a block, before
or after a restart. Bits come from TensorFlow's counter-based Philox generator, and every row owns
its own stretch of counters:

    counter     (high 64 bits)  second half of the seed
                (low 64 bits)   i * counters_per_row + position in the row
    key         (64 bits)       first half of the seed

The bits become Gaussians by Box and Muller's transform. We do it ourselves because
`tf.random.normal` cuts every value off at 5.68 standard deviations, in float64 too (its uniform
numbers never fall below 1e-7). A coordinate that a single record shifts by one standard deviation
would then leave the range of the noise with probability 1e-6, which is more than the delta of most
guarantees. Here the radius is drawn from 55 (float32) or 64 (float64) bits and reaches 8.7 and 9.4
standard deviations. It is also faster, since TensorFlow vectorises the elementwise operations.

What is not promised: Philox is a statistical generator and not a cryptographic one, and Gaussians
are rounded to floating point, of which an adversary can make use (docs/limitations.md). Both are
limits of every TensorFlow mechanism, ours included.
"""

from __future__ import annotations

import hashlib
import math
import secrets

import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError

# Rows are padded to this many values: each then uses whole Philox counters (four 32-bit words),
# and starts on a 64-byte boundary, so that TensorFlow can slice it without a copy.
WIDTH_MULTIPLE = 16

# Half of it: parts of a row begin at whole counters too.
PAIRS_MULTIPLE = WIDTH_MULTIPLE // 2

_PHILOX = 1
_WORDS_PER_COUNTER = 4

# The transform needs several times the memory of its output: longer stretches come in parts.
_VALUES_AT_ONCE = 1 << 21

_ENTROPY_FILE = "/dev/urandom"
_ENTROPY_LINES = 32  # 8 KiB on average, never less than the 32 bytes asserted below in practice.
_MIN_ENTROPY_BYTES = 32


def padded_width(dimension: int) -> int:
    """Returns the width of a row that holds `dimension` values."""
    return ceil_div(dimension, WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def pinned_seed(number: int) -> np.ndarray:
    """Returns the seed that stands for a number, for tests and experiments only.

    Whoever knows the number can subtract the noise.
    """
    number = _checks.int_at_least("pinned_seed", number, 0)
    digest = hashlib.sha256(f"bandmf_tf noise seed {number}".encode()).digest()
    return np.frombuffer(digest[:16], dtype=np.int64)


def fresh_seed() -> np.ndarray:
    """Returns 128 bits from the operating system, drawn when Python runs.

    As a pair of int64: TFF and checkpoints carry int64 everywhere, uint64 only in places.
    """
    return np.frombuffer(secrets.token_bytes(16), dtype=np.int64)


def fresh_seed_tensor() -> tf.Tensor:
    """Returns 126 bits from the operating system, drawn when TensorFlow runs.

    A Python seed in a graph would be a constant: every run of the graph would repeat the noise, and
    the serialised graph would show it. TensorFlow's own non-deterministic operations start from 32
    bits, few enough to try them all. So this reads the kernel's generator through TensorFlow's file
    system (lines of random bytes, hashed) and fails where there is none.
    """
    lines = tf.data.TextLineDataset(_ENTROPY_FILE, buffer_size=4096).take(_ENTROPY_LINES)
    entropy = lines.reduce(tf.constant(""), lambda text, line: text + line)
    enough = tf.debugging.assert_greater_equal(
        tf.strings.length(entropy),
        _MIN_ENTROPY_BYTES,
        message=f"{_ENTROPY_FILE} did not give enough random bytes for a noise seed.",
    )
    with tf.control_dependencies([enough] if enough is not None else []):
        entropy = tf.identity(entropy)
    buckets = 2**63 - 1
    halves = [tf.strings.to_hash_bucket_strong(entropy, buckets, key) for key in ([0, 1], [2, 3])]
    return tf.stack(halves)


def normal_rows(
    seed: tf.Tensor,
    first_row: tf.Tensor,
    num_rows: int,
    width: int,
    dtype: tf.DType,
    part: tuple[tf.Tensor | int, int] | None = None,
) -> tf.Tensor:
    """Returns rows `first_row .. first_row + num_rows - 1` of z, shape `[num_rows, width]`.

    Args:
      seed: int64 tensor of shape `[2]`.
      first_row: int64 scalar, not negative.
      num_rows: Number of rows.
      width: Values in a row, a multiple of `WIDTH_MULTIPLE`.
      dtype: `tf.float32` or `tf.float64`.
      part: First pair, an int64 scalar, and number of pairs, multiples of `PAIRS_MULTIPLE`: only
        the columns of these, `first .. first + number - 1` and as many in the second half of the
        row, bit for bit, as `[num_rows, 2 * number]`.
    """
    if width % WIDTH_MULTIPLE:
        raise BandMFError(f"width must be a multiple of {WIDTH_MULTIPLE}. Found {width}.")
    first, pairs = part or (0, width // 2)
    if pairs % PAIRS_MULTIPLE:
        raise BandMFError(f"Pairs must be multiples of {PAIRS_MULTIPLE}. Found {pairs}.")
    # Whole rows follow each other in the generator's output, and several are drawn together.
    longest = max(_VALUES_AT_ONCE // width, 1) if pairs == width // 2 else 1
    at_once = math.gcd(num_rows, 1 << (longest.bit_length() - 1))

    def draw(start: tf.Tensor) -> tf.Tensor:
        return _normal_rows(seed, first_row + start, at_once, width, dtype, first, pairs)

    if at_once == num_rows:
        return draw(tf.zeros([], tf.int64))
    parts = tf.map_fn(
        draw,
        tf.range(0, num_rows, at_once, dtype=tf.int64),
        fn_output_signature=tf.TensorSpec([at_once, 2 * pairs], dtype),
        parallel_iterations=1,
    )
    return tf.reshape(parts, [num_rows, 2 * pairs])


def _normal_rows(
    seed: tf.Tensor,
    first_row: tf.Tensor,
    num_rows: int,
    width: int,
    dtype: tf.DType,
    first_pair: tf.Tensor | int,
    num_pairs: int,
) -> tf.Tensor:
    integers, planes = _integers_per_pair(dtype)
    per_counter = 4 * _WORDS_PER_COUNTER // integers.size
    seed = tf.bitcast(seed, tf.uint64)
    row = tf.cast(first_row, tf.uint64) * (planes * (width // 2) // per_counter)

    def draw(plane: int, shape: list[int]) -> tf.Tensor:
        before = tf.cast(first_pair, tf.uint64) + plane * (width // 2)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=shape,
            key=seed[:1],
            counter=tf.stack([row + before // per_counter, seed[1]]),
            alg=_PHILOX,
            dtype=integers,
        )

    if num_pairs == width // 2:
        bits = tf.unstack(draw(0, [num_rows, planes, num_pairs]), axis=1)
    else:
        bits = [draw(plane, [1, num_pairs]) for plane in range(planes)]
    return box_muller(bits, dtype)


def _integers_per_pair(dtype: tf.DType) -> tuple[tf.DType, int]:
    """Returns the integers, and how many of them, that make one pair of Gaussians."""
    if dtype == tf.float32:
        return tf.int32, 3
    if dtype == tf.float64:
        return tf.int64, 2
    raise BandMFError(f"dtype must be float32 or float64. Found {dtype!r}.")


def box_muller(bits: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Turns planes of uniform integers `[rows, pairs]` into Gaussians `[rows, 2 * pairs]`.

    float32 has three int32 planes: 31 bits of the radius, its next 24 bits, and the angle. The next
    bits matter only near 0, in the far tail, where float32 is fine enough to hold them.
    float64 has two int64 planes: the radius and the angle.
    """
    first, *next_bits, last = [tf.cast(plane, dtype) for plane in bits]
    magnitude = tf.abs(first)
    if dtype == tf.float32:
        # With `magnitude` 0 in [2^-24, 1]. Added in the order in which graphs add: TensorFlow's
        # optimizer puts numbers last, and another order rounds one value in 6,000 otherwise.
        uniform = (magnitude + next_bits[0] * 2.0**-32 + (0.5 + 2.0**-24)) * 2.0**-31
        angle = last * (math.pi * 2.0**-31)
    else:
        uniform = (magnitude + 0.5) * 2.0**-63
        angle = last * (math.pi * 2.0**-63)
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=1)
