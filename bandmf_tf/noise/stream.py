"""The noise of a matrix mechanism as a stream: row i of `C^-1 z` at round i, in TensorFlow.

Two forms over the same arithmetic (`recurrence.py`) and the same source of randomness
(`source.py`):

* `FunctionalNoiseStream`: state in, state out. For a DPQuery and TFF. The state holds the seed.
* `NoiseStream`: state in variables. For Keras and server programs; it works in eager mode, in
  `tf.function`, under `tf.distribute.MirroredStrategy`, and `tf.train.Checkpoint` tracks it.

Rows have the structure of the tensors they are added to. Inside, all of a row is one vector; its
values are independent of each other, so noise of one tensor is independent of every other. Rows are
kept in float32, or in float64 where a tensor asks for it; never in less, because rounding the rows
that later rows are made from changes the noise that the privacy proof is about.

Coordinates are independent of each other, so `NoiseStream` keeps large rows in tiles, ranges of
coordinates with variables of their own, and makes a block one tile after the other. What it needs
beside its state is a part of one block and the row that it hands out. Rows are the same, bit for
bit, in tiles or whole, in eager mode or in a graph, wherever products of matrices round every
column alike, which is so on the CPUs we tried. (XLA rounds otherwise.)

After a restart
---------------
Noise that somebody may have seen must not be used again with other data: the difference of the two
results would be free of noise. A process that died may have released results after its last
checkpoint, so a restored stream must not repeat what the dead one would have drawn.

`NoiseStream` therefore never saves its seed. A checkpoint holds the rows that were made so far,
which later rows need, and the round; every process draws a seed of its own from the operating
system, and within the process rows of z are numbered by a counter that is not saved either and
never goes back. A stream that finds itself restored, in another process or to an earlier round in
the same one, draws its next rows anew. That includes the rows that a block had ready but had not
handed out: they may have been handed out after the checkpoint was written. It notices by its
lineage, a random name of the process with a count of its rounds, of which a checkpoint holds a
copy.

`FunctionalNoiseStream` is a pure function: the same state gives the same row. Whoever saves its
states calls `refresh` on a state that was restored.

With `pinned_seed`, for tests, noise depends on the round alone, and a restored stream goes on bit
for bit as if nothing had happened.

What no stream can do: take back a result. If a round's result is released and the round is then
repeated, its data was used twice, and no longer under the plan's guarantee; fresh noise only bounds
the harm. Commit the state, then release (see `production/`).

States and checkpoints are secrets. They hold rows of noise that results were protected with; see
`_files.py`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from bandmf_tf import _checks, _memory
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization import strategies
from bandmf_tf.noise import recurrence, source
from bandmf_tf.noise._tensorflow import unmirrored_variable

# Nested structure of tensors or of tf.TensorSpec.
Structure = Any
Part = tuple[tf.Tensor | int, int]  # First pair and number of pairs; see `source.normal_rows`.
State = collections.OrderedDict  # Of names to tensors; flat because TFF copies every level.

_STEP, _SEED, _READY, _MEMORY = "step", "seed", "ready_rows", "memory_{:03d}"
_TILE = "tile_{:02d}_"

# A block is made in tiles of about this size: larger ones take memory, smaller ones time. Every
# variable takes about 100 kB of a graph. Where no block is kept there may be more tiles: what is
# made of one is then below the 32 MiB from which the C library asks the kernel for every tensor.
_TILE_BYTES = 1 << 23
_LEAST_TILES, _MOST_TILES, _MOST_TENSORS = 8, 32, 256

# An operation of this name shows in XLA's error.
_NOT_COMPILED = "noise_in_tiles_must_stay_outside_of_jit_compile"

# The widest type of values.
_WIDEST = tf.complex128

# The lineage of a stream whose rows are being rewritten.
_UNFINISHED = (0, -1)


class RowLayout:
    """How a structure of tensors lies in one vector, of float64 if any tensor is, else of float32.

    Args:
      specs: Nested structure of `tf.TensorSpec`, or of anything with a static shape and dtype.
    """

    def __init__(self, specs: Structure):
        self.specs = tf.nest.map_structure(_spec, specs)
        flat = tf.nest.flatten(self.specs)
        if not flat:
            raise BandMFError("specs must hold at least one tensor. Found none.")
        self._sizes = [spec.shape.num_elements() for spec in flat]
        self.dimension = sum(self._sizes)
        if not self.dimension:
            raise BandMFError("specs must hold at least one value; all tensors are empty.")
        self.width = source.padded_width(self.dimension)
        any_double = any(spec.dtype == tf.float64 for spec in flat)
        self.dtype = tf.float64 if any_double else tf.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.size

    def unpack(self, row: tf.Tensor) -> Structure:
        """Returns the vector `[width]` as a structure of tensors."""
        return self._unpack([row], [self.width])

    def tiles(self, rows: list[int], num_devices: int = 1) -> list[int]:
        """Returns how many pairs of values the tiles have for a block and a memory of such rows.

        Small rows are one tile. The number of others is a power of two, so that any usual number of
        devices shares the same tiles evenly. All are of one size, but the last may be smaller.
        """
        most = _MOST_TENSORS // len(rows)
        if rows[0]:
            most = min(most, _MOST_TILES)
        wanted = min(most, max(rows[0], 1) * self.row_bytes // _TILE_BYTES)
        several = max(_LEAST_TILES, num_devices, 1 << (wanted - 1).bit_length())
        count = several if wanted > 1 else 1
        pairs, step = self.width // 2, source.WIDTH_MULTIPLE  # Halves of tiles are aligned.
        each = ceil_div(pairs, count * step) * step
        return [min(each, pairs - first) for first in range(0, pairs, each)]

    def unpack_tiles(self, rows: list[tf.Tensor]) -> Structure:
        """Returns the row whose tiles these are as a structure of tensors."""
        if len(rows) == 1:
            return self.unpack(rows[0])
        pairs = [row.shape[0] // 2 for row in rows]
        pieces = [row[:half] for row, half in zip(rows, pairs, strict=True)]
        pieces += [row[half:] for row, half in zip(rows, pairs, strict=True)]
        return self._unpack(pieces, 2 * pairs)

    def _unpack(self, pieces: list[tf.Tensor], sizes: list[int]) -> Structure:
        """Returns the vector whose pieces these are as a structure of tensors."""
        ends = np.cumsum(sizes)
        begins = ends - np.array(sizes)
        tensors, begin = [], 0
        for spec, size in zip(tf.nest.flatten(self.specs), self._sizes, strict=True):
            end = begin + size
            # Slices that are aligned are no copies.
            values = [
                piece[max(begin - b, 0) : min(end, e) - b]
                for piece, b, e in zip(pieces, begins, ends, strict=True)
                if b < end and begin < e
            ]
            value = tf.concat(values, axis=0) if values else tf.zeros([0], self.dtype)
            tensors.append(tf.cast(tf.reshape(value, spec.shape), spec.dtype))
            begin = end
        return tf.nest.pack_sequence_as(self.specs, tensors)

    def pack(self, tensors: Structure) -> tf.Tensor:
        """Returns a structure of tensors as the vector `[width]`, padded with NaN.

        Whoever reads it by another layout finds NaN, never a zero that passes for noise.
        """
        flat = [tf.reshape(tf.cast(t, self.dtype), [-1]) for t in tf.nest.flatten(tensors)]
        padding = tf.fill([self.width - self.dimension], tf.constant(float("nan"), self.dtype))
        return tf.concat([*flat, padding], axis=0)


class FunctionalNoiseStream:
    """A noise stream without variables: `next(state)` returns a row and the state after it.

    Memory is O(num_bands d) for banded strategies, O(num_buffers d) for BLTs, O(d log n) for trees,
    O(n d) for dense ones.

    The state is a flat `OrderedDict` of tensors: `step` (int64), `seed`, `ready_rows` (the current
    block) and `memory_000`, ... Tensors that a round does not change are handed on, not copied.

    Args:
      strategy: The strategy C.
      noise_stddev: Standard deviation of z: noise multiplier times clip norm.
      specs: Structure of the tensors that rows are added to.
      block_length: Rows made at once: any number, a power of two for trees. None chooses it.
    """

    def __init__(
        self,
        strategy: strategies.Strategy,
        noise_stddev: float,
        specs: Structure,
        *,
        block_length: int | None = None,
    ):
        noise_stddev = _checks.positive_float("noise_stddev", noise_stddev)
        self.layout = RowLayout(specs)
        block_length = _block_length(strategy, self.layout, block_length)
        self._recurrence = recurrence.make_recurrence(strategy, noise_stddev, block_length)
        _require_full_precision(self.layout.dtype)

    @property
    def num_rounds(self) -> int:
        """Number of rows that the strategy plans."""
        return self._recurrence.num_rounds

    @property
    def block_length(self) -> int:
        """Rows made at once."""
        return self._recurrence.block_length

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return sum(self.tensor_rows) * self.layout.row_bytes

    @property
    def tensor_rows(self) -> list[int]:
        """Rows that are kept of a block, and of every tensor of the memory."""
        return [self._recurrence.rows_of_block(self.block_length), *self._recurrence.memory_rows]

    def memory_contents(self, start: int) -> list[str]:
        """Returns what the tensors of the memory hold; see `recurrence.py`."""
        return self._recurrence.memory_contents(start)

    def initial_state(self, pinned_seed: int | None = None) -> State:
        """Returns the state before round 0.

        Args:
          pinned_seed: For tests only: makes the noise reproducible, by anybody. None draws a seed
            from the operating system whenever TensorFlow runs this, in a graph too.
        """
        if pinned_seed is None:
            seed = source.fresh_seed_tensor()
        else:
            seed = tf.constant(source.pinned_seed(pinned_seed))
        ready, *memory = self.zeros()
        return self._state(tf.zeros([], tf.int64), seed, memory, ready)

    @tf.autograph.experimental.do_not_convert
    def next(self, state: Mapping[str, Any]) -> tuple[Structure, State]:
        """Returns the row of round `state["step"]` and the state after it.

        Fails with `tf.errors.InvalidArgumentError` after the last planned round.
        """
        seed, ready, memory = self._parts(state)
        with tf.control_dependencies(self.assertions(state[_STEP])):
            number = tf.identity(state[_STEP])
        if not ready.shape[0]:
            white = self.white_block(seed, number)
            row, growth = self.next_row(memory, white, self.growth(number))
            memory = [memory[0] + growth]
            return self.layout.unpack(row), self._state(number + 1, seed, memory, ready)
        position = number % self.block_length
        ready, *memory = tf.cond(
            tf.equal(position, 0),
            lambda: self.next_block(memory, ready, number, seed, number),
            lambda: [*map(tf.identity, [ready, *memory])],
        )
        return self.layout.unpack(ready[position]), self._state(number + 1, seed, memory, ready)

    @tf.autograph.experimental.do_not_convert
    def refresh(self, state: Mapping[str, Any]) -> State:
        """Returns a restored state with a new seed, all rows not yet handed out drawn anew."""
        _, ready, memory = self._parts(state)
        number = tf.identity(state[_STEP])
        seed = source.fresh_seed_tensor()
        if self.block_length == 1:
            return self._state(number, seed, memory, ready)
        ready = tf.cond(
            tf.equal(number % self.block_length, 0),  # All rows of the block were handed out.
            lambda: tf.identity(ready),
            lambda: self.redraw_block(
                memory, ready, number, seed, number - number % self.block_length
            )[0],
        )
        return self._state(number, seed, memory, ready)

    # What both forms share.

    def zeros(self, num_pairs: int | None = None) -> list[tf.Tensor]:
        """Returns the ready rows and the memory before round 0, of a tile or whole."""
        width = self.layout.width if num_pairs is None else 2 * num_pairs
        zeros = {n: tf.zeros([n, width], self.layout.dtype) for n in {*self.tensor_rows}}
        return [zeros[n] for n in self.tensor_rows]

    def assertions(self, number: tf.Tensor) -> list[tf.Operation]:
        """Returns what must run before the row of round `number` is used; raises in eager mode."""
        n = self.num_rounds
        check = tf.debugging.assert_less(
            number,
            tf.constant(n, tf.int64),
            message=f"The mechanism was planned for num_rounds={n} and all rounds are used; "
            "plan a longer mechanism to go on.",
        )
        return [check] if check is not None else []

    def next_block(
        self,
        memory: recurrence.Memory,
        ready: tf.Tensor,
        start: tf.Tensor,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        part: Part | None = None,
    ) -> list[tf.Tensor]:
        """Returns the block at round `start`, made from row `first_row` of z on, and the memory."""
        memory = self._recurrence.absorb(memory, ready, start)
        none_known = tf.zeros([], tf.int64)
        block = self._recurrence.produce(
            memory, self.white_block(seed, first_row, part), start, none_known
        )
        return [block, *map(tf.identity, memory)]

    def growth(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the coefficients that `next_row` takes in round `number`."""
        assert isinstance(self._recurrence, recurrence.BufferedRecurrence)  # No other keeps no row.
        return tf.cast(self._recurrence.growth(number), self.layout.dtype)

    def next_row(
        self, memory: recurrence.Memory, white: tf.Tensor, growth: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a row that is not kept, and what the memory, of one tensor, grows by."""
        past, scale = growth[:, :-1], growth[0, -1]  # White noise enters all of them alike.
        # As a bias, so that the memory need not be copied beside it.
        rows = tf.nn.bias_add(tf.matmul(past, *memory), scale * white[0])
        return rows[0], rows[1:]

    def redraw_block(
        self,
        memory: recurrence.Memory,
        ready: tf.Tensor,
        number: tf.Tensor,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        part: Part | None = None,
    ) -> list[tf.Tensor]:
        """Returns the block around round `number`, made from new rows of z from there on."""
        known = number % self.block_length
        inputs = tf.concat([ready[:known], self.white_block(seed, first_row, part)[known:]], axis=0)
        inputs = tf.ensure_shape(inputs, ready.shape)
        return [self._recurrence.produce(memory, inputs, number - known, known)]

    def white_block(
        self, seed: tf.Tensor, first_row: tf.Tensor, part: Part | None = None
    ) -> tf.Tensor:
        """Returns the rows of z from `first_row` on that make a block."""
        layout = self.layout
        return source.normal_rows(
            seed, first_row, self.block_length, layout.width, layout.dtype, part
        )

    def _state(
        self,
        number: tf.Tensor,
        seed: tf.Tensor,
        memory: recurrence.Memory,
        ready: tf.Tensor,
    ) -> State:
        chunks = [(_MEMORY.format(k), chunk) for k, chunk in enumerate(memory)]
        return State([(_STEP, number), (_SEED, seed), (_READY, ready), *chunks])

    def _parts(self, state: Mapping[str, Any]) -> tuple[tf.Tensor, tf.Tensor, recurrence.Memory]:
        names = [_READY, *(_MEMORY.format(k) for k in range(len(self._recurrence.memory_rows)))]
        found = [state[name].shape[0] if name in state else 0 for name in names]
        if found != self.tensor_rows:
            raise BandMFError(
                f"The state holds {found} rows of a block and of memory, and this stream has "
                f"{self.tensor_rows}; use the strategy and the block_length that it was made with."
            )
        ready, *memory = [state[name] for name in names]
        return state[_SEED], ready, memory


class RowChunk(NamedTuple):
    """A piece of a `NoiseStream` that is saved and restored apart.

    Attributes:
      key: Names the content: chunks with the same key, now or later in this process, are equal.
        Chunks move on as rounds go by, and take their keys with them.
      variable: Holds the content; `restore` puts it back.
      changes_in_place: Whether every round changes it, where it is.
    """

    key: str
    variable: tf.Variable
    changes_in_place: bool = False

    def read(self) -> np.ndarray:
        """Returns the content without a copy; what is assigned later does not change it."""
        return np.asarray(memoryview(self.variable.read_value()))

    def restore(self, rows: np.ndarray) -> None:
        """Puts rows into the variable in place of what it holds, which is freed first.

        Otherwise both would be there at once, and TensorFlow keeps what it has allocated: a restart
        would need more memory than a fresh start. Rows that are mapped from a file stay there; the
        file must not change.
        """
        if (rows.shape, rows.dtype) != (self.variable.shape, self.variable.dtype.as_numpy_dtype):
            raise BandMFError(
                f"The rows must be {self.variable.dtype.name}{self.variable.shape.as_list()}; go "
                f"on with the strategy that they are of. Found {rows.dtype}{list(rows.shape)}."
            )
        if self.changes_in_place:
            rows = np.array(rows)  # Nobody else's.
        elif isinstance(rows, np.memmap):  # TensorFlow would make a copy of it.
            rows = tf.experimental.dlpack.from_dlpack(rows.__dlpack__())
        nothing = tf.zeros([0], self.variable.dtype)
        for value in (nothing, rows):
            tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=value)

    def replace(self, mapped: np.ndarray) -> None:
        """Has saved rows in their file from now on, unless every round changes them."""
        if not self.changes_in_place:
            self.restore(mapped)


class NoiseStream(tf.Module):
    """A noise stream that keeps its state in variables: each `next()` returns the next row.

    Tracked, and so saved: the round, the rows in memory, the lineage. Not saved: the seed. See the
    module's text for what happens after a restart.

    Call it in a `tf.function`, which is faster than eager mode, and from one thread at a time. A
    round that starts a block takes as long as all its rows. Under `jit_compile=True` there are no
    assertions: rows past the plan are NaN there instead of an error. A stream in tiles, with blocks
    of more than 16 MiB, cannot be compiled.

    Under `tf.distribute.MirroredStrategy` create it in the strategy's scope. Tiles are then divided
    among the devices of the replicas: each keeps and makes its coordinates of every row, and what
    small rows take is on all of them. Called in cross-replica context it gives one row. Called in
    replica context (`strategy.run`) every replica gets the same row: it must be added once to the
    sum over replicas, not once on every replica.

    Args:
      strategy: The strategy C.
      noise_stddev: Standard deviation of z: noise multiplier times clip norm.
      specs: Structure of the tensors that rows are added to.
      block_length: Rows made at once: any number, a power of two for trees. None chooses it.
      block_memory_bytes: Budget for the choice; see `recurrence.choose_block_length`.
      on_disk: Whether the caller keeps chunks in files and assigns them mapped (`RowChunk`), so
        that all but the newest block need not fit into memory; buffers of a BLT must.
      pinned_seed: For tests only: makes the noise reproducible, by anybody.
    """

    def __init__(
        self,
        strategy: strategies.Strategy,
        noise_stddev: float,
        specs: Structure,
        *,
        block_length: int | None = None,
        block_memory_bytes: int | None = None,
        on_disk: bool = False,
        pinned_seed: int | None = None,
    ):
        super().__init__(name="noise_stream")
        block_length = _block_length(strategy, RowLayout(specs), block_length, block_memory_bytes)
        require_memory(strategy, specs, block_length=block_length, on_disk=on_disk)
        self._functions = FunctionalNoiseStream(
            strategy, noise_stddev, specs, block_length=block_length
        )
        self._pinned = pinned_seed is not None
        with tf.init_scope():
            # Called as in checkpoints of version 0.1, as long as there is one tile.
            self._step = _variable(tf.zeros([], tf.int64), "step")
            devices = _replica_devices()
            tiles = self.layout.tiles(self._functions.tensor_rows, len(devices))
            self._is_divided = bool(devices) and len(tiles) > 1
            places: Iterator[str | None] = itertools.repeat(None)
            if self._is_divided:
                places = itertools.cycle(devices)
            zeros = self._zeros
            if self._functions.tensor_rows[0]:  # Variables share what they begin with.
                zeros = functools.cache(zeros)
            # Those that grow in place do not: in the first round TensorFlow would give each of them
            # the larger piece of memory in which the tile before was made.
            rows = [
                self._rows(k, zeros(pairs, device), device)
                for k, (pairs, device) in enumerate(zip(tiles, places, strict=False))
            ]
            self._ready, *self._more_ready = [ready for ready, *_ in rows]
            self._memory = [chunk for _, *memory in rows for chunk in memory]
            # A pinned stream has the lineage 0, which a stream with a seed of its own never takes
            # for its own: it draws anew what a test's checkpoint had ready.
            process = 0 if pinned_seed is not None else source.fresh_seed()[0]
            lineage = np.array([process, 0], np.int64)
            self._lineage = _variable(lineage, "lineage")
            if pinned_seed is not None:
                seed = tf.constant(source.pinned_seed(pinned_seed))
                self._secret = _Untracked(seed=seed)
            else:
                self._secret = _Untracked(
                    seed=_variable(source.fresh_seed(), "seed"),
                    lineage=_variable(lineage, "live_lineage"),
                )
            self._secret.restorations = _variable(tf.zeros([], tf.int64), "restorations")
            for name in ("white_block", "next_block", "redraw_block"):
                make = getattr(self._functions, name)
                if len(tiles) > 1:  # All of one size share a graph.
                    attributes = {"_noinline": True}
                    make = tf.function(make, autograph=False, experimental_attributes=attributes)
                setattr(self._secret, name, make)

    @property
    def num_rounds(self) -> int:
        """Number of rows that the strategy plans."""
        return self._functions.num_rounds

    @property
    def block_length(self) -> int:
        """Rows made at once."""
        return self._functions.block_length

    @property
    def state_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._functions.state_bytes

    @property
    def layout(self) -> RowLayout:
        """How rows are structured."""
        return self._functions.layout

    @property
    def round(self) -> tf.Tensor:
        """The round whose row `next` returns: the number of rows handed out."""
        return tf.identity(self._step)

    @tf.autograph.experimental.do_not_convert
    def next(self) -> Structure:
        """Returns the row of the current round and goes on to the next.

        Fails with `tf.errors.InvalidArgumentError` after the last planned round.
        """
        context = tf.distribute.get_replica_context()
        if self._is_divided and tf.distribute.has_strategy() and context is not None:
            row = context.merge_call(lambda strategy: self._next())  # One for all replicas.
            return tf.nest.map_structure(tf.identity, row)
        return self._next()

    def _next(self) -> Structure:
        self._secret.check_process()
        checks = [*self._functions.assertions(tf.identity(self._step)), *self._finished()]
        if self._more_ready:  # XLA of TensorFlow 2.14 crashes on them; it has no strings.
            checks.append(tf.strings.as_string(self._step, name=_NOT_COMPILED))
        with tf.control_dependencies(checks):
            number = tf.identity(self._step)
        if not self._ready.shape[0]:
            lineage, row = self._make_row(number, *self._claim(number)[1:])
            with tf.control_dependencies([lineage]):
                self._lineage.assign(lineage)
                self._step.assign(number + 1)
            return self.layout.unpack(row)
        position = number % self.block_length
        lineage = self._advance(number)
        with tf.control_dependencies([lineage]):
            rows = []
            for ready, *_ in self._variables():
                with self._on_device_of(ready):  # What goes to another device is one row.
                    rows.append(tf.convert_to_tensor(ready)[position])
            self._lineage.assign(lineage)
            self._step.assign(number + 1)
        return self.layout.unpack_tiles(rows)

    def next_in_graph(self) -> Structure:
        """Returns what `next` does, for eager callers: traced once, it takes less memory."""
        self._secret.check_process()
        if self._secret.next is None:
            self._secret.next = tf.function(self.next, autograph=False)
        return self._secret.next()

    def chunks(self) -> list[RowChunk]:
        """Returns what holds rows, which is nearly all that is saved, in pieces."""
        start = (int(self._step) - 1) // self.block_length * self.block_length
        contents = self._functions.memory_contents(start)
        contents.append(recurrence.rows_of_rounds(start, start + self.block_length))
        restorations = int(self._secret.restorations)
        chunks = {
            variable.ref(): f"{restorations}, tile {tile}, {variable.shape[0]} rows: {content}"
            for tile, (ready, *memory) in enumerate(self._variables())
            for content, variable in zip(contents, [*memory, ready], strict=True)
        }
        held = [v for v in self.variables if v.shape.rank == 2 and v.shape[0]]
        changes = not self._ready.shape[0]
        return [RowChunk(chunks[variable.ref()], variable, changes) for variable in held]

    def _zeros(self, num_pairs: int, device: str | None) -> list[tf.Tensor]:
        with _on(device):
            return self._functions.zeros(num_pairs)

    def _rows(self, tile: int, zeros: list[tf.Tensor], device: str | None) -> list[tf.Variable]:
        """Makes the variables of a tile, the ready rows and the memory; on one device, or all."""
        prefix = _TILE.format(tile) if tile else ""
        names = ["ready_rows", *map(_MEMORY.format, range(len(zeros) - 1))]
        with _on(device):
            return [
                _variable(value, prefix + name, is_mirrored=device is None)
                for name, value in zip(names, zeros, strict=True)
            ]

    def _variables(self) -> list[list[tf.Variable]]:
        """Returns the ready rows and the memory of every tile."""
        all_ready = [self._ready, *self._more_ready]
        each = len(self._memory) // len(all_ready)
        return [
            [ready, *self._memory[k * each : (k + 1) * each]] for k, ready in enumerate(all_ready)
        ]

    def _on_device_of(self, variable: tf.Variable) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope of what is done where a tile is, if tiles are divided."""
        return _on(variable.device if self._is_divided else None)

    def _claim(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Takes rows of z for round `number` that were never drawn.

        Returns:
          Whether the stream finds itself restored, the first of the rows, and the lineage after it.
        """
        if self._pinned:  # Noise depends on the round alone.
            return tf.constant(False), number, tf.zeros([2], tf.int64)
        lineage = tf.convert_to_tensor(self._secret.lineage)
        restored = tf.reduce_any(tf.not_equal(self._lineage, lineage))
        unused_row = lineage[1]  # Rows of z from here on were never drawn.
        starts_block = tf.equal(number % self.block_length, 0)
        # Every round counts, so that a return to any earlier round shows; a block counts its rows.
        used = tf.where(starts_block | restored, tf.constant(self.block_length, tf.int64), 1)
        lineage = tf.stack([lineage[0], unused_row + used])
        self._secret.lineage.assign(lineage)
        self._secret.restorations.assign(self._secret.restorations + tf.cast(restored, tf.int64))
        return restored, unused_row, lineage

    def _advance(self, number: tf.Tensor) -> tf.Tensor:
        """Makes the rows of round `number` ready; returns the lineage after it."""
        restored, first_row, lineage = self._claim(number)

        def rest_of_block() -> tf.Tensor:
            if self._pinned:
                return tf.identity(lineage)
            return tf.cond(
                restored,
                lambda: self._rewrite(self._secret.redraw_block, number, first_row, lineage),
                lambda: tf.identity(lineage),
            )

        return tf.cond(
            tf.equal(number % self.block_length, 0),
            lambda: self._rewrite(self._secret.next_block, number, first_row, lineage),
            rest_of_block,
        )

    def _make_row(
        self, number: tf.Tensor, white_row: tf.Tensor, lineage: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Makes the row of round `number`, which is not kept, as `_rewrite` makes a block.

        The memory grows in place and the row is written where it stays, so that none of what is
        large moves: what TensorFlow frees in between would not fit what it needs next.
        """
        seed, done = self._begin()
        width, dtype = self.layout.width, self.layout.dtype
        # TensorFlow writes to the row value by value, so they are as wide as possible; tiles are
        # whole numbers of them. XLA, which compiles single tiles, has no such view.
        wide = _WIDEST if self._more_ready else dtype
        each = wide.size // dtype.size
        # Not a constant: TensorFlow would keep it, and write to a copy.
        row = _widened(tf.fill([width], np.nan * tf.cast(number, dtype)), wide)
        growth = self._functions.growth(number)
        first, begin = tf.minimum(number, 0), 0
        for _, memory in self._variables():
            device, pairs = memory.device, memory.shape[1] // 2
            with self._on_device_of(memory), tf.control_dependencies(done[device]):
                white = self._secret.white_block(seed, white_row, (first, pairs))
                part, change = self._functions.next_row([memory], white, growth)
                memory.assign_add(change)
                done[device] = [tf.convert_to_tensor(memory)]
            for start, half in ((begin, part[:pairs]), (begin + width // 2, part[pairs:])):
                row = tf.raw_ops.TensorStridedSliceUpdate(
                    input=row,
                    begin=[start // each],
                    end=[(start + pairs) // each],
                    strides=[1],
                    value=_widened(half, wide),
                )
            done[device].append(row)
            first, begin = first + pairs, begin + pairs
        with tf.control_dependencies([tensor for tensors in done.values() for tensor in tensors]):
            return tf.identity(lineage), tf.reshape(tf.bitcast(row, dtype), [width])

    def _rewrite(
        self,
        make: Callable[..., list[tf.Tensor]],
        number: tf.Tensor,
        first_row: tf.Tensor,
        lineage: tf.Tensor,
    ) -> tf.Tensor:
        """Makes the block around round `number`, on every device one tile after the other.

        What is old of a tile is gone before the next one is made. A failure in between leaves tiles
        of different blocks, and the lineage says so.

        Args:
          make: Of `FunctionalNoiseStream`; what it does not return of a tile does not change.
          number: The round.
          first_row: The first row of z to make it from.
          lineage: Returned when all is done; the caller writes it.
        """
        seed, done = self._begin()
        # Not a constant: TensorFlow would make a graph for every tile, which takes memory too.
        first = tf.minimum(number, 0)
        for variables in self._variables():
            device, pairs = variables[0].device, variables[0].shape[1] // 2
            with self._on_device_of(variables[0]), tf.control_dependencies(done[device]):
                ready, *memory = [tf.convert_to_tensor(variable) for variable in variables]
                new = make(memory, ready, number, seed, first_row, (first, pairs))
                for variable, value in zip(variables, new, strict=False):
                    variable.assign(value)
                done[device] = [tf.convert_to_tensor(variable) for variable in variables]
            first = first + pairs
        with tf.control_dependencies([tensor for tensors in done.values() for tensor in tensors]):
            return tf.identity(lineage)

    def _begin(self) -> tuple[tf.Tensor, dict[str, list[tf.Tensor]]]:
        """Notes that rows are rewritten; returns the seed and, by device, what to wait for."""
        seed = tf.convert_to_tensor(self._secret.seed)
        self._lineage.assign(tf.constant(_UNFINISHED, tf.int64))
        begun = [tf.convert_to_tensor(self._lineage)]
        return seed, collections.defaultdict(lambda: begun)

    def _finished(self) -> list[tf.Operation]:
        """Returns what must run before rows are used; raises in eager mode."""
        check = tf.debugging.assert_none_equal(
            tf.identity(self._lineage),
            tf.constant(_UNFINISHED[1], tf.int64),
            message="Making noise was interrupted and the stream holds a part of it; restore it "
            "from its last checkpoint.",
        )
        return [check] if check is not None else []

    def __reduce__(self) -> NoReturn:
        raise BandMFTypeError(
            "A NoiseStream cannot be copied or pickled: two streams with one seed would protect "
            "different data with the same noise. Make a new one, or save this one with "
            "tf.train.Checkpoint."
        )


def require_memory(
    strategy: strategies.Strategy,
    specs: Structure,
    *,
    block_length: int | None = None,
    on_disk: bool = False,
    beside: int = 0,
) -> None:
    """Raises NotEnoughMemoryError if a `NoiseStream` of these arguments cannot fit into memory.

    Args:
      strategy: The strategy C.
      specs: Structure of the tensors that rows are added to.
      block_length: As for the stream.
      on_disk: As for the stream.
      beside: Bytes that the caller will need at the same time.
    """
    if tf.config.list_physical_devices("GPU"):
        return  # Rows are there, and TensorFlow says itself what does not fit.
    layout = RowLayout(specs)
    held = recurrence.tensor_rows(strategy, _block_length(strategy, layout, block_length))
    working = recurrence.working_rows(held, len(layout.tiles(held)))
    rows = (held[0] if on_disk and held[0] else sum(held)) + working
    _memory.require_bytes(
        rows * layout.row_bytes + beside,
        f"The noise of {layout.dimension:,} values with num_bands={strategy.num_bands}, up to "
        f"{rows} rows of {layout.row_bytes / 1e6:.3g} MB,",
        "plan fewer bands, train a smaller model, or give the program more memory",
    )


def _block_length(
    strategy: strategies.Strategy, layout: RowLayout, given: int | None, budget: int | None = None
) -> int:
    if given is None:
        return recurrence.choose_block_length(strategy, layout.row_bytes, budget)
    return _checks.positive_int("block_length", given)


class _Untracked:
    """Holds tensors that checkpoints, summaries and printouts must not find."""

    def __init__(self, seed: Any, lineage: Any = None):
        self.process = os.getpid()
        self.seed = seed
        self.lineage = lineage
        self.restorations: Any = None
        self.next: Any = None
        self.white_block: Any = None
        self.next_block: Any = None
        self.redraw_block: Any = None

    def check_process(self) -> None:
        """Raises in a fork. A graph of the caller's own cannot: TensorFlow hangs in it there."""
        if os.getpid() != self.process:
            raise BandMFError(
                "This process is a fork of the one that made the noise stream, and both would draw "
                "the same noise; make the stream where it is used."
            )

    def __repr__(self) -> str:
        return "<secret>"


def _widened(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the bits of a vector as one of a wider type, without a copy."""
    if dtype == values.dtype:
        return values
    return tf.bitcast(tf.reshape(values, [-1, dtype.size // values.dtype.size]), dtype)


def _spec(tensor: Any) -> tf.TensorSpec:
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    if not spec.shape.is_fully_defined():
        raise BandMFError(f"specs must have static shapes. Found {spec.shape}.")
    if spec.dtype not in (tf.float32, tf.float64):
        raise BandMFError(
            "Noise is added in float32 or float64; sum in one of them and cast the noised result. "
            f"Found a tensor of {spec.dtype.name}."
        )
    return spec


def _variable(value: Any, name: str, *, is_mirrored: bool = True) -> tf.Variable:
    # Every replica computes the same value from the same state, and keeps its own copy of it.
    if is_mirrored:
        return tf.Variable(value, trainable=False, name=name)
    return unmirrored_variable(value, name)


def _on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)


def _replica_devices() -> Sequence[str]:
    """Returns the devices that share the tiles of a stream that is made here."""
    strategy = tf.distribute.get_strategy()
    is_mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    return strategy.extended.worker_devices if is_mirrored else ()


def _require_full_precision(dtype: tf.DType) -> None:
    """Raises where TensorFlow rounds the factors of float32 products (TF32, bfloat16 modes)."""
    value = 1.0 + 2.0**-12
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # In a graph of TensorFlow 1 nothing can be tried.
        product = tf.matmul(tf.fill([64, 64], tf.constant(value, dtype)), tf.eye(64, dtype=dtype))
        exact = bool(tf.reduce_all(tf.equal(product, value)))
    if not exact:
        raise BandMFError(
            "Matrix products are rounded to less than float32 on this device, which would change "
            "the noise that the guarantee is about; call "
            "tf.config.experimental.enable_tensor_float_32_execution(False) first."
        )
