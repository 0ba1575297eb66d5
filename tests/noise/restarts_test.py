"""A stream goes on from its files, with noise that nobody has seen, and never a part of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import _files
from bandmf_tf.errors import BandMFError
from bandmf_tf.noise import stream as noise_stream
from noise_cases import (
    NUM_ROUNDS,
    PIN,
    STDDEV,
    STRATEGIES,
    covariance_pvalue,
    fixed_entropy,  # noqa: F401 (a fixture of every test)
    flat,
    make_stream,
    restored,
    take,
    take_functional,
    take_in_graph,
    tiled,  # noqa: F401 (a fixture)
)

# Checkpoints.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pinned_stream_continues_bit_for_bit(strategy, tmp_path):
    straight = take(make_stream(strategy=strategy), NUM_ROUNDS)
    stream = make_stream(strategy=strategy)
    for steps in (0, 3, 8, 18):
        take(stream, steps - int(stream.round))
        resumed = restored(stream, tmp_path, strategy=strategy)
        np.testing.assert_array_equal(take(resumed, NUM_ROUNDS - steps), straight[steps:])


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
    stream = make_stream(None, strategy=strategy, dimension=400)
    past = take(stream, steps)
    resumed = restored(stream, tmp_path, pinned_seed=None, strategy=strategy, dimension=400)
    stream.next, resumed.next = wrap(stream.next), wrap(resumed.next)
    futures = [take(s, NUM_ROUNDS - steps) for s in (stream, resumed)]
    # Undo the correlation: both continue the same past, with z that have nothing in common.
    C = STRATEGIES[strategy].materialize()
    straight, restarted = (C @ np.concatenate([past, f]) / STDDEV for f in futures)
    np.testing.assert_array_equal(straight[:steps], restarted[:steps])
    both = np.concatenate([straight, restarted[steps:]])
    assert covariance_pvalue(both, np.eye(len(both))) > 1e-4
    repeated = np.concatenate([straight, straight[steps:]])
    assert covariance_pvalue(repeated, np.eye(len(both))) < 1e-6


@pytest.mark.usefixtures("tiled")
def test_going_back_within_a_process_never_repeats_noise(tmp_path):
    stream = make_stream(None, dimension=400)
    checkpoint = tf.train.Checkpoint(noise=stream)
    past = take(stream, 6)
    prefix = checkpoint.write(str(tmp_path / "checkpoint"))
    C, seen = STRATEGIES["banded"].materialize(), []
    for steps in (1, 5, 1, 15, 15):
        rows = np.concatenate([past, take(stream, steps)])
        seen.append((C[: len(rows), : len(rows)] @ rows)[6:] / STDDEV)
        checkpoint.read(prefix).assert_consumed()
    z = np.concatenate(seen)
    assert covariance_pvalue(z, np.eye(len(z))) > 1e-4


def test_saving_and_restoring_without_a_step_in_between_changes_nothing(tmp_path):
    stream = make_stream(None)
    checkpoint = tf.train.Checkpoint(noise=stream)
    take(stream, 5)
    ready = stream._ready.numpy()
    checkpoint.read(checkpoint.write(str(tmp_path / "checkpoint")))
    np.testing.assert_array_equal(take(stream, 3), ready[1:, :40])


def test_rows_left_ready_by_a_pinned_stream_are_drawn_anew(tmp_path):
    stream = make_stream(PIN)
    take(stream, 5)
    ready = stream._ready.numpy()[1:, :40]
    resumed = restored(stream, tmp_path, pinned_seed=None)
    assert not np.any(take(resumed, 3) == ready)


@pytest.mark.parametrize("dimension", [40, 150])
@pytest.mark.usefixtures("tiled")
def test_a_row_of_a_blt_that_is_made_alone_is_in_its_buffers_and_nowhere_else(dimension, tmp_path):
    """Their checkpoints hold no block, and one that does, as of earlier versions, is refused."""
    kwargs = {"strategy": "blt", "block_length": 1, "dimension": dimension}
    stream, strategy = make_stream(**kwargs), STRATEGIES["blt"]
    rows = take_in_graph(stream, 9)
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
        restored(stream, tmp_path, **kwargs)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    stream = make_stream()
    with pytest.raises(ValueError, match="shape"):
        restored(stream, tmp_path, block_length=8)


@pytest.mark.parametrize("block_length", [1, 4])
def test_a_checkpoint_of_other_tiles_is_refused_and_changes_nothing(
    block_length, tmp_path, monkeypatch
):
    kwargs = {"strategy": "blt", "block_length": block_length, "dimension": 600}
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**8)
    stream = make_stream(**kwargs)
    take(stream, 6)
    prefix = tf.train.Checkpoint(noise=stream).write(str(tmp_path / "checkpoint"))
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**11)
    other = make_stream(**kwargs)
    assert len(other.chunks()) != len(stream.chunks())
    with pytest.raises(ValueError, match="shape"):
        tf.train.Checkpoint(noise=other).read(prefix)
    np.testing.assert_array_equal(take(other, 3), take(make_stream(**kwargs), 3))


# Chunks, which are saved apart.


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("block_length", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_with_one_key_are_equal(strategy, block_length):
    """What is saved under a key must be what is in memory, or a restart continues other noise."""
    stream = make_stream(None, strategy=strategy, block_length=block_length)
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
    stream, other = make_stream(PIN), make_stream(PIN)
    take(stream, 6)
    saved = [(chunk.read().copy(), chunk) for chunk in stream.chunks()]
    for (rows, _), chunk in zip(saved, other.chunks(), strict=True):
        for wrong in (rows[:-1], rows[:, :-1], rows.astype(np.float64)):
            with pytest.raises(BandMFError, match="The rows must be float32"):
                chunk.restore(wrong)
        chunk.restore(rows)
    other._step.assign(stream._step)
    assert all(v.shape.is_fully_defined() for v in other.variables)
    np.testing.assert_array_equal(take(other, 10), take(stream, 10))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(
    ("strategy", "block_length"),
    [("banded", 4), ("dense", 1), ("blt", 4), ("blt", 1), ("banded inverse", 4)],
)
def test_rows_are_the_same_with_all_chunks_in_files(strategy, block_length, tmp_path):
    kwargs = {"strategy": strategy, "block_length": block_length, "dimension": 150}
    expected = take(make_stream(**kwargs), NUM_ROUNDS)
    stream, files, rows = make_stream(**kwargs), itertools.count(), []
    for _ in range(NUM_ROUNDS):
        rows.append(flat(stream.next_in_graph()))
        for chunk in stream.chunks():
            path = tmp_path / str(next(files))
            chunk.read().tofile(path)
            chunk.restore(np.memmap(path, np.float32, "c", shape=tuple(chunk.variable.shape)))
            path.unlink()  # A mapped file stays until it is not.
    np.testing.assert_array_equal(rows, expected)


def test_a_chunk_in_a_file_is_not_copied(tmp_path):
    """Nobody may change such a file; here it shows that the stream has no rows of its own."""
    stream, path = make_stream(), tmp_path / "chunk"
    take(stream, 9)
    chunk = next(c for c in stream.chunks() if c.variable is stream._memory[-1])
    before = chunk.read()
    before.tofile(path)
    chunk.restore(np.memmap(path, np.float32, "c", shape=before.shape))
    np.testing.assert_array_equal(chunk.read(), before)
    with path.open("r+b") as file:
        file.write(np.float32(77).tobytes())
    assert chunk.read()[0, 0] == 77
    assert stream._memory[-1].numpy()[0, 0] == 77


# States.


@pytest.mark.parametrize("steps", [0, 3, 8, 21])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refreshed_state_keeps_the_past_and_draws_the_future_anew(strategy, steps):
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES[strategy], STDDEV, tf.TensorSpec([400]), block_length=4
    )
    past, state = take_functional(stream, stream.initial_state(), steps)
    future, _ = take_functional(stream, state, NUM_ROUNDS - steps)
    refreshed = stream.refresh(state)
    assert set(refreshed["seed"].numpy()).isdisjoint(state["seed"].numpy())
    new_future, _ = take_functional(stream, refreshed, NUM_ROUNDS - steps)
    C = STRATEGIES[strategy].materialize() / STDDEV
    old, new = (
        C @ np.concatenate([past.reshape(-1, 400), rows.reshape(-1, 400)])
        for rows in (future, new_future)
    )
    np.testing.assert_array_equal(old[:steps], new[:steps])
    both = np.concatenate([old, new[steps:]])
    assert covariance_pvalue(both, np.eye(len(both))) > 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_other_blocks_is_refused(strategy):
    """A BLT's memory does not tell them apart: rows that were ready would be kept as they are."""
    ours, other = (
        noise_stream.FunctionalNoiseStream(
            STRATEGIES[strategy], STDDEV, tf.TensorSpec([9]), block_length=block_length
        )
        for block_length in (4, 1)
    )
    _, state = take_functional(ours, ours.initial_state(), 2)
    for call in (other.refresh, other.next):
        with pytest.raises(BandMFError, match=r"block_length that it was made with"):
            call(state)


# Interruptions.


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
@pytest.mark.parametrize("steps", [4, 6])
def test_a_stream_that_was_interrupted_between_tiles_gives_no_row_until_it_is_restored(
    pinned_seed, steps, tmp_path, monkeypatch
):
    """Tiles of two blocks are not the noise of any plan."""
    stream, straight = make_stream(pinned_seed), take(make_stream(PIN), NUM_ROUNDS)
    take(stream, steps)
    checkpoint = tf.train.Checkpoint(noise=stream)
    prefix = checkpoint.write(str(tmp_path / "checkpoint"))
    if steps % 4 and pinned_seed is not None:
        take(stream, 2)  # Only a restored stream that has a seed of its own redraws a block.
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
    rows = take(stream, NUM_ROUNDS - steps)
    assert np.all(np.isfinite(rows))
    if pinned_seed is not None:
        np.testing.assert_array_equal(rows, straight[steps:])
    checkpoint.read(broken)
    with pytest.raises(tf.errors.InvalidArgumentError, match="interrupted"):
        stream.next()


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_a_blt_that_was_interrupted_between_tiles_gives_no_row(pinned_seed, tmp_path, monkeypatch):
    kwargs = {"strategy": "blt", "block_length": 1, "dimension": 150}
    stream = make_stream(pinned_seed, **kwargs)
    straight = take(make_stream(PIN, **kwargs), NUM_ROUNDS)
    past = take(stream, 5)
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
        rows.append(take(stream, 3))
    if pinned_seed is None:
        assert np.abs(rows[0] - rows[1]).min() > 0
        both = [np.concatenate([past, r]) for r in rows]
        z = [STRATEGIES["blt"].materialize()[:8, :8] @ b for b in both]
        assert np.abs(z[0][:5] - z[1][:5]).max() == 0
        assert 0.8 * STDDEV < np.std(z[0][5:] - z[1][5:]) / np.sqrt(2) < 1.2 * STDDEV
    else:
        np.testing.assert_array_equal(rows, [straight[5:8]] * 2)


# Secrets.


def test_a_checkpoint_does_not_hold_the_seed(tmp_path):
    stream = make_stream(None)
    take(stream, 5)
    prefix = tf.train.Checkpoint(noise=stream).write(str(tmp_path / "checkpoint"))
    seed = stream._secret.seed.numpy()
    files = _files.restrict_checkpoint(prefix)
    contents = b"".join(file.read_bytes() for file in files)
    assert stream._ready.numpy().tobytes() in contents
    assert not any(half.tobytes() in contents for half in seed)
    assert not any("seed" in name for name, _ in tf.train.list_variables(prefix))


def test_a_saved_model_carries_the_rows_and_not_the_seed(tmp_path):
    holder = tf.Module()
    holder.noise = make_stream(None)
    take(holder.noise, 5)
    tf.saved_model.save(holder, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert loaded.noise._step == 5
    np.testing.assert_array_equal(loaded.noise._ready, holder.noise._ready)
    assert not hasattr(loaded.noise, "_secret")
