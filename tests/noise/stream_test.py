"""The stream is `C^-1 z`, in every mode of TensorFlow, through every restart, and never twice."""

from __future__ import annotations

import collections
import copy
import itertools
import os
import pickle

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from bandmf_tf import _files, _memory
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import buffered, strategies, trees
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.noise import source as noise_source
from bandmf_tf.noise import stream as noise_stream

NUM_ROUNDS = 21
STDDEV = 1.5
PIN = 11


def _random_banded(num_bands):
    rng = np.random.default_rng(num_bands)
    bands = 0.3 * rng.normal(size=(num_bands, NUM_ROUNDS))
    bands[0] = 1.0 + rng.random(NUM_ROUNDS)
    return strategies.BandedStrategy(bands * strategies.inside_matrix(num_bands, NUM_ROUNDS))


def _random_dense():
    rng = np.random.default_rng(0)
    below = np.tril(0.2 * rng.normal(size=(NUM_ROUNDS, NUM_ROUNDS)), -1)
    return strategies.DenseStrategy(below + np.eye(NUM_ROUNDS))


STRATEGIES = {
    "identity": strategies.identity(NUM_ROUNDS),
    "banded": _random_banded(6),
    "toeplitz": strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.375, 0.3125]), NUM_ROUNDS),
    "dense": _random_dense(),
    "full tree": trees.TreeStrategy(NUM_ROUNDS, "full"),
    "online tree": trees.TreeStrategy(NUM_ROUNDS, "online", scale=2.0),
    "blt": buffered.BufferedStrategy(np.array([0.95, 0.5]), np.array([0.2, 0.4]), NUM_ROUNDS, 0.5),
    "banded inverse": InverseBandedStrategy(np.array([1.2, -0.5, -0.2, 0.1]), NUM_ROUNDS),
}
NESTINGS = {
    "scalar": tf.TensorSpec([]),
    "list": [tf.TensorSpec([16])],
    "mixed": {
        "kernel": tf.TensorSpec([3, 2]),
        "rest": (tf.TensorSpec([]), [tf.TensorSpec([17]), tf.TensorSpec([0, 4])]),
    },
    "double": [tf.TensorSpec([2], tf.float64), tf.TensorSpec([3, 1], tf.float32)],
}
BLOCKS = [1, 4, None]


@pytest.fixture(autouse=True)
def _fixed_entropy(monkeypatch):
    """Makes the operating system's entropy the same in every run of the tests."""
    numbers = itertools.count(1000)

    def seed():
        return noise_source.pinned_seed(next(numbers))

    monkeypatch.setattr(noise_source, "fresh_seed", seed)
    monkeypatch.setattr(noise_source, "fresh_seed_tensor", lambda: tf.constant(seed()))


def _z(layout, num_rows=NUM_ROUNDS, pin=PIN):
    """The rows of z under a pinned seed, without padding, in float64."""
    rows = noise_source.normal_rows(
        tf.constant(noise_source.pinned_seed(pin)),
        tf.constant(0, tf.int64),
        num_rows,
        layout.width,
        layout.dtype,
    )
    return rows.numpy()[:, : layout.dimension].astype(np.float64)


def _flat(row):
    return np.concatenate([np.ravel(tensor) for tensor in tf.nest.flatten(row)])


def _take(stream, count):
    return np.array([_flat(stream.next()) for _ in range(count)])


def _take_in_graph(stream, count):
    return np.array([_flat(stream.next_in_graph()) for _ in range(count)])


def _take_functional(stream, state, count, step=None):
    rows = []
    step = step or stream.next
    for _ in range(count):
        row, state = step(state)
        rows.append(_flat(row))
    return np.array(rows), state


def _banded_stream(pinned_seed=PIN, dimension=40, block_length=4, strategy="banded", **kwargs):
    spec = tf.TensorSpec([dimension])
    return noise_stream.NoiseStream(
        STRATEGIES[strategy],
        STDDEV,
        spec,
        block_length=block_length,
        pinned_seed=pinned_seed,
        **kwargs,
    )


@pytest.fixture(name="tiled")
def _tiled(monkeypatch):
    """Cuts the rows of streams with a block of four or more into several tiles."""
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**8)


# Equality with the dense inverse.


@pytest.mark.parametrize("block_length", BLOCKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_equal_the_dense_inverse_and_both_forms_agree_bit_for_bit(strategy, block_length):
    arguments = STRATEGIES[strategy], STDDEV, NESTINGS["mixed"]
    functional = noise_stream.FunctionalNoiseStream(*arguments, block_length=block_length)
    rows, _ = _take_functional(
        functional, functional.initial_state(PIN), NUM_ROUNDS, tf.function(functional.next)
    )
    expected = STDDEV * np.linalg.solve(arguments[0].materialize(), _z(functional.layout))
    np.testing.assert_allclose(rows, expected, atol=3e-6)
    variables = noise_stream.NoiseStream(*arguments, block_length=block_length, pinned_seed=PIN)
    variables.next = tf.function(variables.next)
    np.testing.assert_array_equal(_take(variables, NUM_ROUNDS), rows)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_rows_have_the_structure_of_the_specs(nesting):
    specs = NESTINGS[nesting]
    stream = noise_stream.FunctionalNoiseStream(STRATEGIES["banded"], STDDEV, specs)
    row, _ = stream.next(stream.initial_state(PIN))
    tf.nest.assert_same_structure(row, specs)
    for tensor, spec in zip(tf.nest.flatten(row), tf.nest.flatten(specs), strict=True):
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
    rows, _ = _take_functional(stream, stream.initial_state(PIN), NUM_ROUNDS)
    expected = STDDEV * STRATEGIES["banded"].inverse_matmul(_z(stream.layout))
    np.testing.assert_allclose(rows, expected, atol=3e-6)


def test_float64_rows_are_exact_to_float64():
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES["dense"], STDDEV, tf.TensorSpec([5], tf.float64), block_length=4
    )
    rows, _ = _take_functional(stream, stream.initial_state(PIN), NUM_ROUNDS)
    expected = STDDEV * STRATEGIES["dense"].inverse_matmul(_z(stream.layout))
    np.testing.assert_allclose(rows, expected, atol=1e-13)


def test_eager_mode_and_functions_agree_bit_for_bit():
    eager, traced = _banded_stream(), _banded_stream()
    traced.next = tf.function(traced.next)
    np.testing.assert_array_equal(_take(eager, NUM_ROUNDS), _take(traced, NUM_ROUNDS))


@pytest.mark.parametrize(
    ("strategy", "nesting", "block_length"),
    [*((s, "mixed", 4) for s in STRATEGIES), ("banded", "double", 4), ("blt", "mixed", 1)],
)
def test_rows_in_tiles_are_those_of_one_piece_bit_for_bit(
    strategy, nesting, block_length, monkeypatch
):
    specs = [NESTINGS[nesting], tf.TensorSpec([90])]
    rows = {}
    for tile_bytes in (2**8, 2**23):
        monkeypatch.setattr(noise_stream, "_TILE_BYTES", tile_bytes)
        stream = noise_stream.NoiseStream(
            STRATEGIES[strategy], STDDEV, specs, block_length=block_length, pinned_seed=PIN
        )
        row = stream.next_in_graph()
        tf.nest.assert_same_structure(row, specs)
        rows[len(stream._variables())] = [_flat(row), *_take_in_graph(stream, NUM_ROUNDS - 1)]
    assert set(rows) > {1}
    np.testing.assert_array_equal(*rows.values())


def test_rows_that_block_lengths_share_agree_to_rounding():
    rows = [_take(_banded_stream(block_length=s), NUM_ROUNDS) for s in (1, 2, 5, 16)]
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], atol=3e-6)


def test_a_loop_inside_a_function_takes_a_new_row_every_time():
    stream = _banded_stream()

    @tf.function
    def many():
        rows = tf.TensorArray(tf.float32, NUM_ROUNDS)
        for i in tf.range(NUM_ROUNDS):
            rows = rows.write(i, stream.next())
        return rows.stack()

    np.testing.assert_array_equal(many(), _take(_banded_stream(), NUM_ROUNDS))


@pytest.mark.parametrize("block_length", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functional_state_is_flat_and_serialises_as_a_graph(strategy, block_length):
    # As TFF does it. Tensors compare as Python objects there: == would silently be False.
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES[strategy], STDDEV, [tf.TensorSpec([3])], block_length=block_length
    )
    eager_state = stream.initial_state(PIN)
    assert all(isinstance(value, tf.Tensor) for value in eager_state.values())
    with tf.Graph().as_default() as graph:
        state = tf.nest.map_structure(
            lambda t: tf.compat.v1.placeholder(t.dtype, t.shape), eager_state
        )
        outputs = stream.next(state)
        names = tf.nest.map_structure(lambda t: t.name, (state, outputs))
    definition = graph.as_graph_def()
    assert "PyFunc" not in {node.op for node in definition.node}
    values, rows = tf.nest.map_structure(np.array, eager_state), []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(definition, name="")
        for _ in range(NUM_ROUNDS):
            feed = dict(zip(names[0].values(), values.values(), strict=True))
            row, values = session.run(names[1], feed)
            rows.append(_flat(row))
    expected, _ = _take_functional(stream, eager_state, NUM_ROUNDS)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


# The end of the plan.


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
@pytest.mark.parametrize("strategy", ["banded", "full tree", "blt", "banded inverse"])
def test_past_the_last_step_the_stream_raises_and_stays_where_it_is(wrap, strategy):
    stream = _banded_stream(strategy=strategy)
    step = wrap(stream.next)
    for _ in range(NUM_ROUNDS):
        step()
    for _ in range(2):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"num_rounds={NUM_ROUNDS} and all"
        ):
            step()
    assert stream.round == NUM_ROUNDS


def test_past_the_last_step_a_graph_raises_whatever_is_fetched():
    stream = noise_stream.FunctionalNoiseStream(STRATEGIES["banded"], STDDEV, [tf.TensorSpec([3])])
    end = {**stream.initial_state(PIN), "step": tf.constant(NUM_ROUNDS, tf.int64)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned for"):
        stream.next(end)
    values = tf.nest.map_structure(np.array, end)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        state = {
            name: tf.compat.v1.placeholder(value.dtype, value.shape)
            for name, value in values.items()
        }
        feed = {state[name]: value for name, value in values.items()}
        row, after = stream.next(state)
        for fetch in (row[0], after["step"], after["ready_rows"], after["memory_000"]):
            with pytest.raises(tf.errors.InvalidArgumentError, match="planned for"):
                session.run(fetch, feed)


def test_past_the_last_step_noise_is_nan_if_assertions_are_stripped(monkeypatch):
    monkeypatch.setattr(noise_stream.FunctionalNoiseStream, "assertions", lambda self, step: [])
    for stream in (_banded_stream(), _banded_stream(block_length=1), _banded_stream(None)):
        _take(stream, NUM_ROUNDS)
        assert np.all(np.isnan(_take(stream, 10)))


@pytest.mark.parametrize("strategy", ["banded", "full tree", "blt", "banded inverse"])
def test_compiled_by_xla_rows_agree_and_past_the_plan_they_are_nan(strategy):
    stream = _banded_stream(strategy=strategy)
    stream.next = tf.function(stream.next, jit_compile=True)
    straight = _take(_banded_stream(strategy=strategy), NUM_ROUNDS)
    np.testing.assert_allclose(_take(stream, NUM_ROUNDS), straight, atol=3e-6)
    assert np.all(np.isnan(_take(stream, 6)))  # XLA drops assertions.


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_noise_in_tiles_is_refused_by_xla_and_has_not_moved(pinned_seed):
    stream = _banded_stream(pinned_seed)
    compiled = tf.function(stream.next, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must_stay_outside_of_jit_compile"):
        compiled()
    assert stream.round == 0


# Restarts.


def _restored(stream, path, **kwargs):
    prefix = tf.train.Checkpoint(noise=stream).write(str(path / "checkpoint"))
    other = _banded_stream(**kwargs)
    tf.train.Checkpoint(noise=other).read(prefix).assert_consumed()
    return other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pinned_stream_continues_bit_for_bit(strategy, tmp_path):
    straight = _take(_banded_stream(strategy=strategy), NUM_ROUNDS)
    stream = _banded_stream(strategy=strategy)
    for steps in (0, 3, 8, 18):
        _take(stream, steps - int(stream.round))
        resumed = _restored(stream, tmp_path, strategy=strategy)
        np.testing.assert_array_equal(_take(resumed, NUM_ROUNDS - steps), straight[steps:])


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("block_length", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_with_one_key_are_equal(strategy, block_length):
    """What is saved under a key must be what is in memory, or a restart continues other noise."""
    stream = _banded_stream(None, strategy=strategy, block_length=block_length)
    held = [v for v in stream.variables if v.shape.rank == 2 and v.shape[0]]
    names = [v.name for v in held]  # The order of version 0.1.
    contents, saved = {}, []
    for number in range(NUM_ROUNDS):
        if number == 7:  # Back to an earlier round: what comes now has other noise.
            for variable, value in zip(stream.variables, saved, strict=True):
                variable.assign(value)
        if number == 5:
            saved = [variable.numpy() for variable in stream.variables]
        stream.next_in_graph() if number % 2 else stream.next()
        chunks = stream.chunks()
        assert [chunk.variable.name for chunk in chunks] == names
        for chunk in chunks:
            known = contents.setdefault(chunk.key, chunk.variable.numpy())
            np.testing.assert_array_equal(chunk.read(), known)
            np.testing.assert_array_equal(chunk.variable.numpy(), known)


@pytest.mark.usefixtures("tiled")
def test_chunks_are_restored_as_they_were_and_of_their_shape_only():
    stream, other = _banded_stream(PIN), _banded_stream(PIN)
    _take(stream, 6)
    saved = [(chunk.read().copy(), chunk) for chunk in stream.chunks()]
    for (rows, _), chunk in zip(saved, other.chunks(), strict=True):
        for wrong in (rows[:-1], rows[:, :-1], rows.astype(np.float64)):
            with pytest.raises(BandMFError, match="The rows must be float32"):
                chunk.restore(wrong)
        chunk.restore(rows)
    other._step.assign(stream._step)
    assert all(v.shape.is_fully_defined() for v in other.variables)
    np.testing.assert_array_equal(_take(other, 10), _take(stream, 10))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(
    ("strategy", "block_length"),
    [("banded", 4), ("dense", 1), ("blt", 4), ("blt", 1), ("banded inverse", 4)],
)
def test_rows_are_the_same_with_all_chunks_in_files(strategy, block_length, tmp_path):
    kwargs = {"strategy": strategy, "block_length": block_length, "dimension": 150}
    expected = _take(_banded_stream(**kwargs), NUM_ROUNDS)
    stream, files, rows = _banded_stream(**kwargs), itertools.count(), []
    for _ in range(NUM_ROUNDS):
        rows.append(_flat(stream.next_in_graph()))
        for chunk in stream.chunks():
            path = tmp_path / str(next(files))
            chunk.read().tofile(path)
            chunk.restore(np.memmap(path, np.float32, "c", shape=tuple(chunk.variable.shape)))
            path.unlink()  # A mapped file stays until it is not.
    np.testing.assert_array_equal(rows, expected)


def test_a_chunk_in_a_file_is_not_copied(tmp_path):
    """Nobody may change such a file; here it shows that the stream has no rows of its own."""
    stream, path = _banded_stream(), tmp_path / "chunk"
    _take(stream, 9)
    chunk = next(c for c in stream.chunks() if c.variable is stream._memory[-1])
    before = chunk.read()
    before.tofile(path)
    chunk.restore(np.memmap(path, np.float32, "c", shape=before.shape))
    np.testing.assert_array_equal(chunk.read(), before)
    with path.open("r+b") as file:
        file.write(np.float32(77).tobytes())
    assert chunk.read()[0, 0] == 77
    assert stream._memory[-1].numpy()[0, 0] == 77


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("block_length", [1, 2, 8])
def test_the_estimate_of_memory_knows_all_that_a_stream_keeps(strategy, block_length, monkeypatch):
    needed = []
    monkeypatch.setattr(_memory, "require_bytes", lambda count, *texts: needed.append(count))
    stream = noise_stream.NoiseStream(
        strategy, STDDEV, tf.TensorSpec([10_000]), block_length=block_length
    )
    noise_stream.require_memory(
        strategy, tf.TensorSpec([10_000]), block_length=block_length, on_disk=True
    )
    held = sum(v.shape.num_elements() * v.dtype.size for v in stream.variables if v.shape.rank > 1)
    assert held == stream.state_bytes
    rest = needed[0] - held
    assert 3 * stream.layout.row_bytes <= rest
    kept = stream._ready.shape[0] * stream.layout.row_bytes  # Without a block, all is kept.
    assert needed[1] == rest + (kept or held)


def test_noise_that_cannot_fit_is_refused_with_the_number_before_it_is_made(monkeypatch):
    dense = strategies.DenseStrategy(np.eye(NUM_ROUNDS))
    monkeypatch.setattr(type(dense), "coefficient_rows", None)  # Not even the table is made.
    with pytest.raises(
        _memory.NotEnoughMemoryError,
        match=r"The noise of 1,000,000,000,000 values with num_bands=21, up to \d+ rows of 8e\+06 "
        r"MB, needs \d{6}.\d\d GB of memory and \d+.\d\d GB can be had .* plan fewer bands",
    ):
        noise_stream.NoiseStream(dense, 1.0, tf.TensorSpec([10**6, 10**6], tf.float64))


@pytest.mark.parametrize(
    ("strategy", "steps", "wrap"),
    [
        *itertools.product(STRATEGIES, [3, 8, 18], [lambda f: f]),
        *itertools.product(["banded", "full tree", "blt", "banded inverse"], [3], [tf.function]),
    ],
)
def test_an_unpinned_stream_draws_all_future_noise_anew_and_keeps_the_past(
    strategy, steps, wrap, tmp_path
):
    stream = _banded_stream(None, strategy=strategy, dimension=400)
    past = _take(stream, steps)
    resumed = _restored(stream, tmp_path, pinned_seed=None, strategy=strategy, dimension=400)
    stream.next, resumed.next = wrap(stream.next), wrap(resumed.next)
    futures = [_take(s, NUM_ROUNDS - steps) for s in (stream, resumed)]
    # Undo the correlation: both continue the same past, with z that have nothing in common.
    C = STRATEGIES[strategy].materialize()
    straight, restarted = (C @ np.concatenate([past, f]) / STDDEV for f in futures)
    np.testing.assert_array_equal(straight[:steps], restarted[:steps])
    both = np.concatenate([straight, restarted[steps:]])
    assert _covariance_pvalue(both, np.eye(len(both))) > 1e-4
    repeated = np.concatenate([straight, straight[steps:]])
    assert _covariance_pvalue(repeated, np.eye(len(both))) < 1e-6


@pytest.mark.usefixtures("tiled")
def test_going_back_within_a_process_never_repeats_noise(tmp_path):
    stream = _banded_stream(None, dimension=400)
    checkpoint = tf.train.Checkpoint(noise=stream)
    past = _take(stream, 6)
    prefix = checkpoint.write(str(tmp_path / "checkpoint"))
    C, seen = STRATEGIES["banded"].materialize(), []
    for steps in (1, 5, 1, 15, 15):
        rows = np.concatenate([past, _take(stream, steps)])
        seen.append((C[: len(rows), : len(rows)] @ rows)[6:] / STDDEV)
        checkpoint.read(prefix).assert_consumed()
    z = np.concatenate(seen)
    assert _covariance_pvalue(z, np.eye(len(z))) > 1e-4


def test_saving_and_restoring_without_a_step_in_between_changes_nothing(tmp_path):
    stream = _banded_stream(None)
    checkpoint = tf.train.Checkpoint(noise=stream)
    _take(stream, 5)
    ready = stream._ready.numpy()
    checkpoint.read(checkpoint.write(str(tmp_path / "checkpoint")))
    np.testing.assert_array_equal(_take(stream, 3), ready[1:, :40])


def test_rows_left_ready_by_a_pinned_stream_are_drawn_anew(tmp_path):
    stream = _banded_stream(PIN)
    _take(stream, 5)
    ready = stream._ready.numpy()[1:, :40]
    resumed = _restored(stream, tmp_path, pinned_seed=None)
    assert not np.any(_take(resumed, 3) == ready)


@pytest.mark.parametrize("steps", [0, 3, 8, 21])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refreshed_state_keeps_the_past_and_draws_the_future_anew(strategy, steps):
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES[strategy], STDDEV, tf.TensorSpec([400]), block_length=4
    )
    past, state = _take_functional(stream, stream.initial_state(), steps)
    future, _ = _take_functional(stream, state, NUM_ROUNDS - steps)
    refreshed = stream.refresh(state)
    assert set(refreshed["seed"].numpy()).isdisjoint(state["seed"].numpy())
    new_future, _ = _take_functional(stream, refreshed, NUM_ROUNDS - steps)
    C = STRATEGIES[strategy].materialize() / STDDEV
    old, new = (
        C @ np.concatenate([past.reshape(-1, 400), rows.reshape(-1, 400)])
        for rows in (future, new_future)
    )
    np.testing.assert_array_equal(old[:steps], new[:steps])
    both = np.concatenate([old, new[steps:]])
    assert _covariance_pvalue(both, np.eye(len(both))) > 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_other_blocks_is_refused(strategy):
    """A BLT's memory does not tell them apart: rows that were ready would be kept as they are."""
    ours, other = (
        noise_stream.FunctionalNoiseStream(
            STRATEGIES[strategy], STDDEV, tf.TensorSpec([9]), block_length=block_length
        )
        for block_length in (4, 1)
    )
    _, state = _take_functional(ours, ours.initial_state(), 2)
    for call in (other.refresh, other.next):
        with pytest.raises(BandMFError, match=r"block_length that it was made with"):
            call(state)


def test_unpinned_streams_differ_and_pinned_ones_agree():
    first, second = _take(_banded_stream(None), 4), _take(_banded_stream(None), 4)
    assert not np.any(first == second)
    np.testing.assert_array_equal(_take(_banded_stream(3), 4), _take(_banded_stream(3), 4))


def test_every_run_of_an_initial_graph_draws_another_seed(monkeypatch):
    monkeypatch.undo()  # Real entropy.
    stream = noise_stream.FunctionalNoiseStream(STRATEGIES["banded"], STDDEV, tf.TensorSpec([9]))
    initialize = tf.function(stream.initial_state)
    assert set(initialize()["seed"].numpy()).isdisjoint(initialize()["seed"].numpy())


def test_next_is_pure_in_the_functional_form():
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES["banded"], STDDEV, tf.TensorSpec([9]), block_length=4
    )
    state = stream.initial_state()
    for _ in range(6):
        row, after = stream.next(state)
        again, after_again = stream.next(state)
        np.testing.assert_array_equal(row, again)
        tf.nest.map_structure(np.testing.assert_array_equal, after, after_again)
        state = after


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
@pytest.mark.parametrize("steps", [4, 6])
def test_a_stream_that_was_interrupted_between_tiles_gives_no_row_until_it_is_restored(
    pinned_seed, steps, tmp_path, monkeypatch
):
    """Tiles of two blocks are not the noise of any plan."""
    stream, straight = _banded_stream(pinned_seed), _take(_banded_stream(PIN), NUM_ROUNDS)
    _take(stream, steps)
    checkpoint = tf.train.Checkpoint(noise=stream)
    prefix = checkpoint.write(str(tmp_path / "checkpoint"))
    if steps % 4 and pinned_seed is not None:
        _take(stream, 2)  # Only a restored stream that has a seed of its own redraws a block.
    elif steps % 4:
        checkpoint.read(checkpoint.write(str(tmp_path / "again")))
        stream.next()
        checkpoint.read(prefix).assert_consumed()
    name = "redraw_block" if steps % 4 and pinned_seed is None else "next_block"
    make, calls = getattr(stream._secret, name), itertools.count()

    def interrupted(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(stream._secret, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.next()
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="was interrupted"):
            stream.next()
    broken = checkpoint.write(str(tmp_path / "broken"))
    checkpoint.read(prefix).assert_consumed()
    rows = _take(stream, NUM_ROUNDS - steps)
    assert np.all(np.isfinite(rows))
    if pinned_seed is not None:
        np.testing.assert_array_equal(rows, straight[steps:])
    checkpoint.read(broken)
    with pytest.raises(tf.errors.InvalidArgumentError, match="interrupted"):
        stream.next()


@pytest.mark.parametrize("dimension", [40, 150])
@pytest.mark.usefixtures("tiled")
def test_a_row_of_a_blt_that_is_made_alone_is_in_its_buffers_and_nowhere_else(dimension, tmp_path):
    """Their checkpoints hold no block, and one that does, as of earlier versions, is refused."""
    kwargs = {"strategy": "blt", "block_length": 1, "dimension": dimension}
    stream, strategy = _banded_stream(**kwargs), STRATEGIES["blt"]
    rows = _take_in_graph(stream, 9)
    assert stream.state_bytes == strategy.num_buffers * stream.layout.row_bytes
    decayed = strategy.decays[:, None] ** np.arange(9)[::-1]
    held = [
        memory.numpy().reshape(strategy.num_buffers, 2, -1) for _, memory in stream._variables()
    ]
    buffers = np.concatenate(held, axis=2).reshape(strategy.num_buffers, -1)[:, :dimension]
    np.testing.assert_allclose(buffers, decayed @ rows, rtol=1e-5, atol=1e-5)
    before = stream._ready, stream._functions.tensor_rows
    stream._ready = tf.Variable(tf.zeros([1, before[0].shape[1]]))  # As it was.
    with pytest.raises(ValueError, match="shape"):
        _restored(stream, tmp_path, **kwargs)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_a_blt_that_was_interrupted_between_tiles_gives_no_row(pinned_seed, tmp_path, monkeypatch):
    kwargs = {"strategy": "blt", "block_length": 1, "dimension": 150}
    stream = _banded_stream(pinned_seed, **kwargs)
    straight = _take(_banded_stream(PIN, **kwargs), NUM_ROUNDS)
    past = _take(stream, 5)
    checkpoint = tf.train.Checkpoint(noise=stream)
    prefix = checkpoint.write(str(tmp_path / "checkpoint"))
    make, calls = stream._secret.white_block, itertools.count()

    def interrupted(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(stream._secret, "white_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.next()
    with pytest.raises(tf.errors.InvalidArgumentError, match="was interrupted"):
        stream.next()
    rows = []
    for _ in range(2):  # A return to a round draws it anew, of the same past.
        checkpoint.read(prefix).assert_consumed()
        rows.append(_take(stream, 3))
    if pinned_seed is None:
        assert np.abs(rows[0] - rows[1]).min() > 0
        both = [np.concatenate([past, r]) for r in rows]
        z = [STRATEGIES["blt"].materialize()[:8, :8] @ b for b in both]
        assert np.abs(z[0][:5] - z[1][:5]).max() == 0
        assert 0.8 * STDDEV < np.std(z[0][5:] - z[1][5:]) / np.sqrt(2) < 1.2 * STDDEV
    else:
        np.testing.assert_array_equal(rows, [straight[5:8]] * 2)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    stream = _banded_stream()
    with pytest.raises(ValueError, match="shape"):
        _restored(stream, tmp_path, block_length=8)


# Secrets.


def test_a_checkpoint_does_not_hold_the_seed(tmp_path):
    stream = _banded_stream(None)
    _take(stream, 5)
    prefix = tf.train.Checkpoint(noise=stream).write(str(tmp_path / "checkpoint"))
    seed = stream._secret.seed.numpy()
    files = _files.restrict_checkpoint(prefix)
    contents = b"".join(file.read_bytes() for file in files)
    assert stream._ready.numpy().tobytes() in contents
    assert not any(half.tobytes() in contents for half in seed)
    assert not any("seed" in name for name, _ in tf.train.list_variables(prefix))


def test_printing_a_stream_shows_no_seed():
    stream = _banded_stream(None)
    shown = f"{stream!r} {stream} {vars(stream)} {stream.variables}"
    assert not any(str(half) in shown for half in stream._secret.seed.numpy())


def test_a_stream_cannot_be_copied_or_pickled():
    stream = _banded_stream(None)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            duplicate(stream)


def test_a_fork_is_given_no_row(monkeypatch):
    stream = _banded_stream(None)
    _take(stream, 1)
    here = os.getpid()
    stream.next_in_graph()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    for call in (stream.next, stream.next_in_graph, tf.function(stream.next, autograph=False)):
        with pytest.raises(BandMFError, match="a fork"):
            call()


def test_a_saved_model_carries_the_rows_and_not_the_seed(tmp_path):
    holder = tf.Module()
    holder.noise = _banded_stream(None)
    _take(holder.noise, 5)
    tf.saved_model.save(holder, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert loaded.noise._step == 5
    np.testing.assert_array_equal(loaded.noise._ready, holder.noise._ready)
    assert not hasattr(loaded.noise, "_secret")


# Distribution.


def _mirrored():
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_every_replica_gets_the_same_row_and_the_stream_moves_once(pinned_seed):
    mirrored = _mirrored()
    with mirrored.scope():
        stream = _banded_stream(pinned_seed)
    step = tf.function(lambda: mirrored.run(stream.next))
    rows = [mirrored.experimental_local_results(step()) for _ in range(NUM_ROUNDS)]
    assert stream.round == NUM_ROUNDS
    first, second = np.array(rows).swapaxes(0, 1)
    np.testing.assert_array_equal(first, second)
    if pinned_seed is not None:
        np.testing.assert_array_equal(first, _take(_banded_stream(), NUM_ROUNDS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned for"):
        step()


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(("strategy", "block_length"), [("banded", 4), ("blt", 4), ("blt", 1)])
def test_replicas_divide_the_tiles_among_their_devices(
    strategy, block_length, tmp_path, monkeypatch
):
    kwargs = {"strategy": strategy, "dimension": 512 // block_length, "block_length": block_length}
    straight = _take_in_graph(_banded_stream(**kwargs), NUM_ROUNDS)
    with _mirrored().scope():
        stream = _banded_stream(**kwargs)
        bytes_on, made_on = collections.Counter(), []
        for variable in stream.variables:
            if variable.shape.rank == 2:
                bytes_on[variable.device[-5:]] += variable.shape.num_elements() * 4
        assert bytes_on == dict.fromkeys(["CPU:0", "CPU:1"], stream.state_bytes / 2)
        name = "next_block" if block_length > 1 else "white_block"
        make = getattr(stream._secret, name)

        def noted(*args):
            tensors = make(*args)
            made_on.append({tensor.device[-5:] for tensor in tf.nest.flatten(tensors)})
            return tensors

        monkeypatch.setattr(stream._secret, name, noted)
        rows = _take(stream, 6)
        monkeypatch.undo()
        assert made_on[: len(bytes_on)] == [{"CPU:0"}, {"CPU:1"}]
        assert made_on.count({"CPU:0"}) == made_on.count({"CPU:1"}) == len(made_on) / 2
        rows = [*rows, *_take_in_graph(stream, 4)]
    np.testing.assert_array_equal(rows, straight[:10])
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**8)
    undivided = _restored(stream, tmp_path, **kwargs)
    np.testing.assert_array_equal(_take_in_graph(undivided, 3), straight[10:13])
    with _mirrored().scope():
        divided = _restored(undivided, tmp_path, **kwargs)
        np.testing.assert_array_equal(_take_in_graph(divided, 8), straight[13:])


@pytest.mark.usefixtures("tiled")
def test_there_are_tiles_for_many_devices_and_small_rows_are_one():
    layout = noise_stream.RowLayout(tf.TensorSpec([10**6]))
    assert len(layout.tiles([4, 4])) == 32
    for devices in (2, 4, 8, 16, 32):
        assert layout.tiles([4, 4], devices) == layout.tiles([4, 4])
    assert len(layout.tiles([4, 4], 40)) == 40
    assert len(layout.tiles([2, *[2] * 100], 3)) == 8
    for pairs in (layout.tiles([4, 4], 40), layout.tiles([4, 4])):
        assert sum(pairs) == layout.width // 2
        assert len(set(pairs[:-1])) == 1
    assert noise_stream.RowLayout(tf.TensorSpec([100])).tiles([1, 4], 8) == [56]


def test_cross_replica_context_gives_one_row(tmp_path):
    mirrored = _mirrored()
    with mirrored.scope():
        stream = _banded_stream()
        next_row = tf.function(stream.next)
        rows = np.array([next_row() for _ in range(7)])
    straight = _take(_banded_stream(), NUM_ROUNDS)
    np.testing.assert_array_equal(rows, straight[:7])
    np.testing.assert_array_equal(_take(_restored(stream, tmp_path), 14), straight[7:])


# Statistics: the law of the rows, and what the tests would say to another law.


def _covariance_pvalue(rows, covariance):
    """p-value of `rows` having independent columns with this covariance.

    Whitened rows have a sample covariance of I with independent errors: variance 1 / d off the
    diagonal and 2 / d on it.
    """
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), rows)
    n, d = whitened.shape
    errors = whitened @ whitened.T / d - np.eye(n)
    on = np.sum(np.diagonal(errors) ** 2) * d / 2
    off = np.sum(np.tril(errors, -1) ** 2) * d
    return scipy.stats.chi2.sf(on + off, n * (n + 1) / 2)


def _target_covariance(strategy, stddev=STDDEV):
    inverse = np.linalg.inv(strategy.materialize())
    return stddev**2 * inverse @ inverse.T


@pytest.fixture(scope="module", params=STRATEGIES)
def emitted(request):
    """Rows of a stream whose seed is fixed but not what the equality tests used."""
    stream = noise_stream.NoiseStream(
        STRATEGIES[request.param], STDDEV, tf.TensorSpec([6000]), pinned_seed=2024
    )
    stream.next = tf.function(stream.next)
    return STRATEGIES[request.param], _take(stream, NUM_ROUNDS)


def test_rows_have_the_covariance_of_the_mechanism(emitted):
    strategy, rows = emitted
    assert _covariance_pvalue(rows, _target_covariance(strategy)) > 0.001


def test_a_wrong_scale_is_noticed(emitted):
    strategy, rows = emitted
    assert _covariance_pvalue(rows, _target_covariance(strategy, 1.03 * STDDEV)) < 1e-6
    assert _covariance_pvalue(rows, _target_covariance(strategy, 0.97 * STDDEV)) < 1e-6


def test_a_wrong_strategy_is_noticed(emitted):
    strategy, rows = emitted
    others = [other for other in STRATEGIES.values() if other is not strategy]
    for other in [*others, _random_banded(5)]:
        assert _covariance_pvalue(rows, _target_covariance(other)) < 1e-6


def test_a_repeated_row_is_noticed(emitted):
    strategy, rows = emitted
    repeated = rows.copy()
    repeated[8] = repeated[7]
    assert _covariance_pvalue(repeated, _target_covariance(strategy)) < 1e-6
    z = strategy.materialize() @ rows
    z[8] = z[7]
    repeated = np.linalg.solve(strategy.materialize(), z)
    assert _covariance_pvalue(repeated, _target_covariance(strategy)) < 1e-6


def test_coordinates_are_independent_within_and_across_tensors():
    n = 1500
    strategy = strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.375]), n)
    specs = {"a": tf.TensorSpec([3, 4]), "b": [tf.TensorSpec([]), tf.TensorSpec([7])]}
    stream = noise_stream.NoiseStream(strategy, STDDEV, specs, pinned_seed=7)
    stream.next = tf.function(stream.next)
    rows = _take(stream, n)
    z = strategy.matmul(rows) / STDDEV
    assert _covariance_pvalue(z.T, np.eye(20)) > 0.001
    shared = z.copy()
    shared[:, 12] = shared[:, 0]  # What the same seed for two tensors would give.
    assert _covariance_pvalue(shared.T, np.eye(20)) < 1e-6


# Arguments.


def test_less_than_float32_is_refused():
    for dtype in (tf.bfloat16, tf.float16, tf.int32):
        with pytest.raises(ValueError, match=dtype.name):
            noise_stream.RowLayout(tf.TensorSpec([2], dtype))


def test_products_of_reduced_precision_are_refused(monkeypatch):
    matmul = tf.matmul

    def rounded(a, b):
        a, b = (tf.cast(tf.cast(x, tf.bfloat16), x.dtype) for x in (a, b))
        return matmul(a, b)

    monkeypatch.setattr(tf, "matmul", rounded)
    with pytest.raises(BandMFError, match="rounded to less than float32"):
        _banded_stream()


@pytest.mark.parametrize("specs", [[], {}, tf.TensorSpec([0]), tf.TensorSpec([None, 2])])
def test_specs_need_values_and_static_shapes(specs):
    with pytest.raises(ValueError, match="specs must"):
        noise_stream.RowLayout(specs)


@pytest.mark.parametrize("stddev", [0.0, -1.0, np.nan, np.inf])
def test_noise_must_be_noise(stddev):
    with pytest.raises(ValueError, match="noise_stddev"):
        noise_stream.FunctionalNoiseStream(STRATEGIES["banded"], stddev, tf.TensorSpec([2]))


def test_layout_packs_what_it_unpacks():
    layout = noise_stream.RowLayout(NESTINGS["mixed"])
    values = itertools.count()
    structure = tf.nest.map_structure(
        lambda spec: np.full(spec.shape, next(values), np.float32), NESTINGS["mixed"]
    )
    unpacked = layout.unpack(layout.pack(structure))
    tf.nest.map_structure(np.testing.assert_array_equal, unpacked, structure)


def test_state_bytes_are_the_bytes_of_the_state():
    for strategy, block_length in itertools.product(STRATEGIES.values(), BLOCKS):
        stream = noise_stream.FunctionalNoiseStream(
            strategy, STDDEV, NESTINGS["mixed"], block_length=block_length
        )
        state = stream.initial_state(PIN)
        rows = sum(value.numpy().nbytes for name, value in state.items() if "_" in name)
        assert stream.state_bytes == rows
