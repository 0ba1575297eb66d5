"""Blocks of rows of `C^-1 z` from few rows of memory, as TensorFlow arithmetic.

A stream that makes one row at a time reads its whole memory for every row and is bound by memory
bandwidth. Noise does not depend on data, so s future rows can be made at once. With T the s x s
diagonal block of C, W the coefficients on what came before and H the memory,

    X = T^-1 (z - W H) = [T^-1, -T^-1 W] [z; H],        C = |        |
                                                            |  W  T  |   rows t .. t + s - 1
which reads the memory once for s rows, as matrix              ^  ^
products. The coefficients are solved in float64.         past H  this block

A recurrence says what the memory is, how a finished block enters it, and what W and T are:

* banded: H holds at least the last `num_bands - 1` rows, in chunks;
* tree: H holds the block sums S_l of `trees.py`, one for each level above the block;
* BLT: H holds the buffers S_i of `buffered.py`;
* banded inverse: H holds the last rows of z, in chunks.

The memory is a list of tensors, and a chunk that does not change is handed on, never copied. The
row of a BLT that is made alone enters its buffers at once and is not kept; as a sum, so that they
can grow in place.

Nothing in this file holds a tensor: coefficients are NumPy arrays that become constants wherever
the arithmetic is traced, so it can be serialised (TFF) and traced any number of times.
"""

from __future__ import annotations

import abc
import functools
import math

import numpy as np
import scipy.linalg
import tensorflow as tf

from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.trees import TreeStrategy

Memory = list[tf.Tensor]

# Beyond this many rows a longer block gains nothing: the products are bound by arithmetic.
MAX_BLOCK_LENGTH = 64

# Products with few buffers are cheap; beyond this those inside the block cost more than they save.
_LONGEST_BUFFERED_BLOCK = 16

# Rows of a BLT of this size are made alone: a block would take more memory than the buffers.
_LARGE_ROW_BYTES = 1 << 24

# A block needs about this many of its own sizes: the rows it keeps ready, and, while they are made,
# white noise, their sum and one product.
_BLOCK_COPIES = 4

# Constants of a graph; protocol buffers end at 2 GiB.
_MAX_TABLE_BYTES = 1 << 30


class Recurrence(abc.ABC):
    """Produces the rows of `stddev * C^-1 z` in blocks that start at multiples of `block_length`.

    Args:
      strategy: C, of n rows.
      noise_stddev: Standard deviation of z.
      block_length: Rows in a block, s.
    """

    def __init__(self, strategy: Strategy, noise_stddev: float, block_length: int):
        self.num_rounds = strategy.num_rounds
        self.noise_stddev = noise_stddev
        self.block_length = block_length
        self.memory_rows = self.rows_of_memory(strategy, block_length)

    @staticmethod
    @abc.abstractmethod
    def longest_block(strategy: Strategy, row_bytes: int) -> int:
        """Returns beyond how many rows a longer block gains nothing."""

    @staticmethod
    @abc.abstractmethod
    def rows_of_memory(strategy: Strategy, block_length: int) -> list[int]:
        """Returns the rows of every tensor of the memory."""

    @staticmethod
    def rows_of_block(block_length: int) -> int:
        """Returns how many rows of a block are kept until the next one is made: all, or none."""
        return block_length

    @abc.abstractmethod
    def memory_contents(self, start: int) -> list[str]:
        """Returns what every tensor of the memory holds before the block at `start`, in words.

        Tensors of one shape, a block's rows (`rows_of_rounds`) included, with the same words are
        equal.
        """

    @abc.abstractmethod
    def absorb(self, memory: Memory, block: tf.Tensor, start: tf.Tensor) -> Memory:
        """Returns the memory after `block`, the block before the one that starts at `start`.

        Before the first block, memory and block are zero and stay so.
        """

    @abc.abstractmethod
    def _past_and_block(self, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns W `[s, sum(memory_rows)]` and T `[s, s]` in float64 for the block at `start`.

        Rows at or beyond `num_rounds` may hold anything that is finite with a non-zero diagonal.
        """

    def produce(
        self, memory: Memory, inputs: tf.Tensor, start: tf.Tensor, known: tf.Tensor
    ) -> tf.Tensor:
        """Returns the rows `start .. start + s - 1` as `[s, width]`.

        Rows beyond the plan come out as NaN: if an assertion is ever stripped from a graph, the
        noise poisons the result instead of repeating or vanishing.

        Args:
          memory: The memory before the block.
          inputs: `[s, width]`: the first `known` rows are rows of the block that were produced
            before and are kept; the others are rows of z.
          start: int64 scalar, a multiple of the block length.
          known: int64 scalar, how many leading rows are known.
        """
        past_weights, input_weights = self._solve(start, known)
        block = tf.matmul(tf.cast(input_weights, inputs.dtype), inputs)
        for weights, chunk in zip(past_weights, memory, strict=True):
            # One product at a time: all of them at once would be as large as the memory itself.
            with tf.control_dependencies([block]):
                block = block + tf.matmul(tf.cast(weights, inputs.dtype), chunk)
        return block

    def _solve(self, start: tf.Tensor, known: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns `-T^-1 W`, split as the memory is, and `T^-1 stddev`, in float64."""
        W, T = self._past_and_block(start)
        s = self.block_length
        identity = np.eye(s)
        is_known = tf.range(s, dtype=tf.int64)[:, None] < known
        # A known row satisfies the trivial equation x = x.
        W = tf.where(is_known, tf.zeros_like(W), W)
        T = tf.where(is_known, identity, T)
        scale = tf.where(is_known, identity, self.noise_stddev * identity)
        solution = tf.linalg.triangular_solve(T, tf.concat([-W, scale], axis=1), lower=True)
        planned = start + tf.range(s, dtype=tf.int64)[:, None] < self.num_rounds
        solution = tf.where(planned, solution, np.nan)
        *past, inputs = tf.split(solution, [*self.memory_rows, s], axis=1)
        return past, inputs

    def _rows_of_block(self, start: tf.Tensor) -> tf.Tensor:
        """Returns the indices of the block's rows, those beyond the plan replaced by the last."""
        rows = start + tf.range(self.block_length, dtype=tf.int64)
        return tf.minimum(rows, self.num_rounds - 1)


class BandedRecurrence(Recurrence):
    """The last `num_bands - 1` rows in chunks; for every strategy without a form of its own.

    Chunks are as long as a block, so that a finished block is a chunk and nothing is copied. Only
    very short blocks share a chunk, so that their number stays near sqrt(num_bands).
    """

    def __init__(self, strategy: Strategy, noise_stddev: float, block_length: int):
        super().__init__(strategy, noise_stddev, block_length)
        self._rows = strategy.coefficient_rows(_MAX_TABLE_BYTES)
        self._num_bands = strategy.num_bands
        self._num_chunks = len(self.memory_rows)
        self._chunk = max(self.memory_rows, default=block_length)

    @staticmethod
    def longest_block(strategy: Strategy, row_bytes: int) -> int:
        del row_bytes
        return strategy.rows_in_memory

    @staticmethod
    def rows_of_memory(strategy: Strategy, block_length: int) -> list[int]:
        past = strategy.num_bands - 1
        chunk = max(1, round(math.sqrt(past) / block_length)) * block_length
        # The youngest chunk holds at least one block of past rows, the others are full.
        older = ceil_div(max(past - block_length, 0), chunk)
        return [chunk] * (older + 1 if past else 0)

    def memory_contents(self, start: int) -> list[str]:
        youngest = (start - 1) // self._chunk * self._chunk
        firsts = [youngest - k * self._chunk for k in reversed(range(self._num_chunks))]
        return [rows_of_rounds(first, min(first + self._chunk, start)) for first in firsts]

    def absorb(self, memory: Memory, block: tf.Tensor, start: tf.Tensor) -> Memory:
        if not memory:
            return memory
        if self._chunk == self.block_length:
            return [*memory[1:], block]
        offset = tf.math.floormod(start - self.block_length, self._chunk)
        memory = tf.cond(
            tf.equal(offset, 0),
            lambda: [*map(tf.identity, memory[1:]), tf.zeros_like(memory[0])],
            lambda: [*map(tf.identity, memory)],
        )
        rows = offset + tf.range(self.block_length, dtype=tf.int64)
        youngest = tf.tensor_scatter_nd_update(memory[-1], rows[:, None], block)
        return [*memory[:-1], youngest]

    def _past_and_block(self, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = self._rows_of_block(start)
        if len(self._rows) == 1:
            coefficients = tf.repeat(tf.constant(self._rows), self.block_length, axis=0)
        else:
            coefficients = tf.gather(tf.constant(self._rows), rows)
        # Rounds held by the memory, oldest first. Unused places and rounds before 0 are zero rows.
        youngest = tf.math.floordiv(start - 1, self._chunk) * self._chunk
        oldest = youngest - (self._num_chunks - 1) * self._chunk
        held = oldest + tf.range(self._num_chunks * self._chunk, dtype=tf.int64)
        block = start + tf.range(self.block_length, dtype=tf.int64)
        W = tf.where(held < start, self._entries(coefficients, block, held), 0.0)
        return W, self._entries(coefficients, block, block)

    def _entries(self, coefficients: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        """Returns `C[rows, columns]`, where `coefficients[r, d] = C[rows[r], rows[r] - d]`."""
        distance = rows[:, None] - columns[None, :]
        inside = (distance >= 0) & (distance < self._num_bands)
        distance = tf.where(inside, distance, 0)
        return tf.where(inside, tf.gather(coefficients, distance, batch_dims=1), 0.0)


class TreeRecurrence(Recurrence):
    """The block sums of the levels above the block; for both estimators of `TreeStrategy`.

    A block of s = 2^p aligned rounds is a subtree: the p lowest levels stay inside it, where they
    are part of T, and the sums above do not change until it is complete.
    """

    def __init__(self, strategy: TreeStrategy, noise_stddev: float, block_length: int):
        super().__init__(strategy, noise_stddev, block_length)
        if block_length & (block_length - 1):
            raise BandMFError(
                "block_length must be a power of two for a tree, or blocks would cut its nodes. "
                f"Found {block_length}."
            )
        self._inner_levels = block_length.bit_length() - 1
        weights = strategy.block_weights
        levels = max(weights.shape[1], self._inner_levels)
        self._weights = np.pad(weights, [(0, 0), (0, levels - weights.shape[1])])
        self._diagonal = strategy.diagonal
        self._outer_levels = sum(self.memory_rows)

    @staticmethod
    def longest_block(strategy: Strategy, row_bytes: int) -> int:
        del row_bytes
        return strategy.num_rounds

    @staticmethod
    def rows_of_memory(strategy: Strategy, block_length: int) -> list[int]:
        outer_levels = strategy.rows_in_memory - (block_length.bit_length() - 1)
        return [outer_levels] if outer_levels > 0 else []

    def memory_contents(self, start: int) -> list[str]:
        return [f"sums before round {start}"] * len(self.memory_rows)

    def absorb(self, memory: Memory, block: tf.Tensor, start: tf.Tensor) -> Memory:
        if not memory:
            return memory
        (sums,) = memory
        # The finished block's index ends in as many ones as there are levels that it completes; it
        # and the sums of those levels become the sum of the level above them.
        finished = tf.maximum(start // self.block_length - 1, 0)
        levels = tf.range(self._outer_levels, dtype=tf.int64)
        ones = tf.bitwise.right_shift(finished, levels) % 2
        level = tf.reduce_sum(tf.math.cumprod(ones))
        # tf.equal: in the graphs of TFF, == compares Python objects and is silently False.
        is_level = tf.equal(levels[:, None], level)
        merged = is_level & (levels[None, :] < level)
        kept = (levels[:, None] > level) & tf.equal(levels[:, None], levels[None, :])
        total = tf.reduce_sum(block, axis=0, keepdims=True)
        enters = tf.cast(is_level, sums.dtype)
        return [tf.matmul(tf.cast(merged | kept, sums.dtype), sums) + enters * total]

    def _past_and_block(self, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = self._rows_of_block(start)
        weights = tf.gather(tf.constant(self._weights), rows)
        diagonal = tf.gather(tf.constant(self._diagonal), rows)
        inner, outer = tf.split(weights, [self._inner_levels, self._outer_levels], axis=1)
        # C[i, j] is the weight on the level of the highest bit in which i and j differ.
        r = np.arange(self.block_length)
        level = np.frexp((r[:, None] ^ r[None, :]).astype(np.float64))[1] - 1
        T = tf.linalg.diag(diagonal)
        if self._inner_levels:
            below = tf.gather(inner, np.maximum(level, 0), batch_dims=1)
            T = T + tf.where(np.tril(np.ones(level.shape, bool), -1), below, 0.0)
        return outer, T


class BufferedRecurrence(Recurrence):
    """The buffers of a BLT, which a finished block X enters by `S <- D^s S + E X`.

    A row r of the block finds the buffers decayed r times, `W[r, i] = c_0 scales_i decays_i^r`, and
    row r itself will have decayed s - 1 - r times at the end, `E[i, r] = decays_i^(s - 1 - r)`. All
    blocks have the same coefficients, and what enters a buffer decays, rounding errors too.
    """

    def __init__(self, strategy: BufferedStrategy, noise_stddev: float, block_length: int):
        super().__init__(strategy, noise_stddev, block_length)
        self._decayed = strategy.decays[:, None] ** np.arange(block_length + 1)
        self._scales = strategy.scale * strategy.scales
        self._coefficients = strategy.coefficients[:block_length]

    @staticmethod
    def longest_block(strategy: Strategy, row_bytes: int) -> int:
        longest = _LONGEST_BUFFERED_BLOCK if row_bytes < _LARGE_ROW_BYTES else 1
        return min(strategy.num_rounds, longest)

    @staticmethod
    def rows_of_memory(strategy: Strategy, block_length: int) -> list[int]:
        del block_length
        assert isinstance(strategy, BufferedStrategy)
        return [strategy.num_buffers]

    @staticmethod
    def rows_of_block(block_length: int) -> int:
        return block_length if block_length > 1 else 0

    def memory_contents(self, start: int) -> list[str]:
        return [f"buffers before round {start + 1 if self.block_length == 1 else start}"]

    def absorb(self, memory: Memory, block: tf.Tensor, start: tf.Tensor) -> Memory:
        del start
        (buffers,) = memory
        entering = tf.matmul(tf.constant(self._decayed[:, -2::-1], block.dtype), block)
        return [tf.constant(self._decayed[:, -1:], block.dtype) * buffers + entering]

    def growth(self, start: tf.Tensor) -> tf.Tensor:
        """Returns what makes the row of round `start`, of which nothing is kept, in float64.

        Times memory and row of z it is the row, and below it what the memory grows by.
        """
        past, white = self._solve(start, tf.zeros([], tf.int64))
        row = tf.concat([*past, white], axis=1)
        decay = np.pad(np.diag(self._decayed[:, 1] - 1.0), [(0, 0), (0, 1)])
        return tf.concat([row, decay + row], axis=0)

    def _past_and_block(self, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del start
        s = self.block_length
        column = np.zeros(s)
        column[: self._coefficients.size] = self._coefficients
        W = (self._scales[:, None] * self._decayed[:, :-1]).T
        return tf.constant(W), tf.constant(scipy.linalg.toeplitz(column, np.zeros(s)))


class InverseBandedRecurrence(Recurrence):
    """The last rows of z, in chunks as long as a block, where C^-1 is the Toeplitz matrix of q.

    `X = Q z + P H` for the blocks Q and P of C^-1, so T = Q^-1 and W = -Q^-1 P. The z of a finished
    block, known rows among its own, is what its rows say: z = T X + W H, with the standard
    deviation of the noise. Rounding errors pass through C, whose columns are about as long as the
    sensitivity.
    """

    def __init__(self, strategy: InverseBandedStrategy, noise_stddev: float, block_length: int):
        super().__init__(strategy, noise_stddev, block_length)
        s, q = block_length, strategy.inverse_coefficients
        self._num_chunks = len(self.memory_rows)
        held = self._num_chunks * s
        column = np.zeros(held + s)
        column[: q.size] = q[: column.size]
        inverse = scipy.linalg.toeplitz(column, np.zeros(column.size))[held:]
        identity = np.eye(s)
        self._block = scipy.linalg.solve_triangular(inverse[:, held:], identity, lower=True)
        self._past = -self._block @ inverse[:, :held]

    @staticmethod
    def longest_block(strategy: Strategy, row_bytes: int) -> int:
        del row_bytes
        return max(1, strategy.rows_in_memory)

    @staticmethod
    def rows_of_memory(strategy: Strategy, block_length: int) -> list[int]:
        return [block_length] * ceil_div(strategy.rows_in_memory, block_length)

    def memory_contents(self, start: int) -> list[str]:
        s = self.block_length
        firsts = [start - k * s for k in range(self._num_chunks, 0, -1)]
        return [f"z of {rows_of_rounds(first, first + s)}" for first in firsts]

    def absorb(self, memory: Memory, block: tf.Tensor, start: tf.Tensor) -> Memory:
        del start
        if not memory:
            return memory
        z = tf.matmul(tf.constant(self._block, block.dtype), block)
        parts = np.split(self._past, self._num_chunks, axis=1)
        for weights, chunk in zip(parts, memory, strict=True):
            with tf.control_dependencies([z]):
                z = z + tf.matmul(tf.constant(weights, block.dtype), chunk)
        return [*memory[1:], z]

    def _past_and_block(self, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del start
        return tf.constant(self._past), tf.constant(self._block)


@functools.singledispatch
def _recurrence_type(strategy: Strategy) -> type[Recurrence]:
    del strategy
    return BandedRecurrence


_recurrence_type.register(TreeStrategy, lambda strategy: TreeRecurrence)
_recurrence_type.register(BufferedStrategy, lambda strategy: BufferedRecurrence)
_recurrence_type.register(InverseBandedStrategy, lambda strategy: InverseBandedRecurrence)


def rows_of_rounds(first: int, end: int) -> str:
    """Returns the words for rows from round `first` to before `end`; before 0 they are zeros."""
    return f"rounds {first} to {end}" if end > 0 else "none yet"


def make_recurrence(strategy: Strategy, noise_stddev: float, block_length: int) -> Recurrence:
    """Returns the recurrence that streams a strategy in the least memory."""
    return _recurrence_type(strategy)(strategy, noise_stddev, block_length)


def tensor_rows(strategy: Strategy, block_length: int) -> list[int]:
    """Returns the rows that are kept of a block, and of every tensor of the memory."""
    kind = _recurrence_type(strategy)
    return [kind.rows_of_block(block_length), *kind.rows_of_memory(strategy, block_length)]


def working_rows(rows: list[int], num_tiles: int) -> int:
    """Returns how many rows there are at the same time, at most, beside those of `tensor_rows`.

    They are a tile of a block that is made, and the row that is handed out with one copy of it.
    """
    return 2 + ceil_div(_BLOCK_COPIES * max(rows), num_tiles)


def choose_block_length(strategy: Strategy, row_bytes: int, block_memory_bytes: int | None) -> int:
    """Returns the longest useful power of two whose block fits into the memory budget; at least 1.

    Args:
      strategy: The strategy.
      row_bytes: Bytes of one row.
      block_memory_bytes: What blocks may use beyond the memory that the strategy needs row by row.
        None means 1 GiB or half of that memory, whichever is more.
    """
    useful = min(MAX_BLOCK_LENGTH, _recurrence_type(strategy).longest_block(strategy, row_bytes))
    if block_memory_bytes is None:
        block_memory_bytes = max(1 << 30, strategy.rows_in_memory * row_bytes // 2)
    affordable = block_memory_bytes // (_BLOCK_COPIES * row_bytes)
    return 1 << (max(1, min(useful, affordable)).bit_length() - 1)
