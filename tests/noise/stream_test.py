"""The stream is `C^-1 z`, in every mode of TensorFlow, and never twice."""

from __future__ import annotations

import collections
import copy
import itertools
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import _memory
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import strategies
from bandmf_tf.noise import source as noise_source
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
    random_bands,
    restored,
    take,
    take_functional,
    take_in_graph,
    tiled,  # noqa: F401 (a fixture)
)

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


# Equality with the dense inverse.


@pytest.mark.parametrize("block_length", BLOCKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_equal_the_dense_inverse_and_both_forms_agree_bit_for_bit(strategy, block_length):
    arguments = STRATEGIES[strategy], STDDEV, NESTINGS["mixed"]
    functional = noise_stream.FunctionalNoiseStream(*arguments, block_length=block_length)
    rows, _ = take_functional(
        functional, functional.initial_state(PIN), NUM_ROUNDS, tf.function(functional.next)
    )
    expected = STDDEV * np.linalg.solve(arguments[0].materialize(), _z(functional.layout))
    np.testing.assert_allclose(rows, expected, atol=3e-6)
    variables = noise_stream.NoiseStream(*arguments, block_length=block_length, pinned_seed=PIN)
    variables.next = tf.function(variables.next)
    np.testing.assert_array_equal(take(variables, NUM_ROUNDS), rows)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_rows_have_the_structure_of_the_specs(nesting):
    specs = NESTINGS[nesting]
    stream = noise_stream.FunctionalNoiseStream(STRATEGIES["banded"], STDDEV, specs)
    row, _ = stream.next(stream.initial_state(PIN))
    tf.nest.assert_same_structure(row, specs)
    for tensor, spec in zip(tf.nest.flatten(row), tf.nest.flatten(specs), strict=True):
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
    rows, _ = take_functional(stream, stream.initial_state(PIN), NUM_ROUNDS)
    expected = STDDEV * STRATEGIES["banded"].inverse_matmul(_z(stream.layout))
    np.testing.assert_allclose(rows, expected, atol=3e-6)


def test_float64_rows_are_exact_to_float64():
    stream = noise_stream.FunctionalNoiseStream(
        STRATEGIES["dense"], STDDEV, tf.TensorSpec([5], tf.float64), block_length=4
    )
    rows, _ = take_functional(stream, stream.initial_state(PIN), NUM_ROUNDS)
    expected = STDDEV * STRATEGIES["dense"].inverse_matmul(_z(stream.layout))
    np.testing.assert_allclose(rows, expected, atol=1e-13)


@pytest.mark.parametrize(
    ("strategy", "block_length", "dtype"),
    [
        *((s, 4, tf.float32) for s in ("banded", "dense", "online tree", "banded inverse")),
        ("blt", 1, tf.float32),
        ("banded", 4, tf.float64),
    ],
)
def test_eager_mode_and_functions_agree_bit_for_bit(strategy, block_length, dtype):
    """In some 250,000 values: graphs may add in another order than the one that was written."""
    eager, traced = (
        noise_stream.NoiseStream(
            STRATEGIES[strategy],
            STDDEV,
            tf.TensorSpec([20_000], dtype),
            block_length=block_length,
            pinned_seed=PIN,
        )
        for _ in range(2)
    )
    traced.next = tf.function(traced.next)
    np.testing.assert_array_equal(take(eager, NUM_ROUNDS), take(traced, NUM_ROUNDS))


@pytest.mark.parametrize(
    ("strategy", "nesting", "block_length"),
    [
        *((s, "mixed", 4) for s in STRATEGIES),
        ("banded", "double", 4),
        *(("blt", nesting, 1) for nesting in ("mixed", "double")),
    ],
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
        rows[len(stream._variables())] = [flat(row), *take_in_graph(stream, NUM_ROUNDS - 1)]
    assert set(rows) > {1}
    np.testing.assert_array_equal(*rows.values())


def test_rows_that_block_lengths_share_agree_to_rounding():
    rows = [take(make_stream(block_length=s), NUM_ROUNDS) for s in (1, 2, 5, 16)]
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], atol=3e-6)


def test_a_loop_inside_a_function_takes_a_new_row_every_time():
    stream = make_stream()

    @tf.function
    def many():
        rows = tf.TensorArray(tf.float32, NUM_ROUNDS)
        for i in tf.range(NUM_ROUNDS):
            rows = rows.write(i, stream.next())
        return rows.stack()

    np.testing.assert_array_equal(many(), take(make_stream(), NUM_ROUNDS))


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
            rows.append(flat(row))
    expected, _ = take_functional(stream, eager_state, NUM_ROUNDS)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


# The end of the plan.


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
@pytest.mark.parametrize("strategy", ["banded", "full tree", "blt", "banded inverse"])
def test_past_the_last_step_the_stream_raises_and_stays_where_it_is(wrap, strategy):
    stream = make_stream(strategy=strategy)
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
    for stream in (make_stream(), make_stream(block_length=1), make_stream(None)):
        take(stream, NUM_ROUNDS)
        assert np.all(np.isnan(take(stream, 10)))


@pytest.mark.parametrize(
    ("strategy", "block_length"),
    [("banded", 4), ("full tree", 4), ("blt", 4), ("blt", 1), ("banded inverse", 4)],
)
def test_compiled_by_xla_rows_agree_and_past_the_plan_they_are_nan(strategy, block_length):
    stream, other = (make_stream(strategy=strategy, block_length=block_length) for _ in range(2))
    stream.next = tf.function(stream.next, jit_compile=True)
    straight = take(other, NUM_ROUNDS)
    np.testing.assert_allclose(take(stream, NUM_ROUNDS), straight, atol=3e-6)
    assert np.all(np.isnan(take(stream, 6)))  # XLA drops assertions.


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_noise_in_tiles_is_refused_by_xla_and_has_not_moved(pinned_seed):
    stream = make_stream(pinned_seed)
    compiled = tf.function(stream.next, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must_stay_outside_of_jit_compile"):
        compiled()
    assert stream.round == 0


# Memory.


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


# Seeds, which are secret.


def test_unpinned_streams_differ_and_pinned_ones_agree():
    first, second = take(make_stream(None), 4), take(make_stream(None), 4)
    assert not np.any(first == second)
    np.testing.assert_array_equal(take(make_stream(3), 4), take(make_stream(3), 4))


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


def test_printing_a_stream_shows_no_seed():
    stream = make_stream(None)
    shown = f"{stream!r} {stream} {vars(stream)} {stream.variables}"
    assert not any(str(half) in shown for half in stream._secret.seed.numpy())


def test_a_stream_cannot_be_copied_or_pickled():
    stream = make_stream(None)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            duplicate(stream)


def test_a_fork_is_given_no_row(monkeypatch):
    stream = make_stream(None)
    take(stream, 1)
    here = os.getpid()
    stream.next_in_graph()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    for call in (stream.next, stream.next_in_graph, tf.function(stream.next, autograph=False)):
        with pytest.raises(BandMFError, match="a fork"):
            call()


# Distribution.


def _mirrored():
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pinned_seed", [PIN, None])
def test_every_replica_gets_the_same_row_and_the_stream_moves_once(pinned_seed):
    mirrored = _mirrored()
    with mirrored.scope():
        stream = make_stream(pinned_seed)
    step = tf.function(lambda: mirrored.run(stream.next))
    rows = [mirrored.experimental_local_results(step()) for _ in range(NUM_ROUNDS)]
    assert stream.round == NUM_ROUNDS
    first, second = np.array(rows).swapaxes(0, 1)
    np.testing.assert_array_equal(first, second)
    if pinned_seed is not None:
        np.testing.assert_array_equal(first, take(make_stream(), NUM_ROUNDS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned for"):
        step()


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(("strategy", "block_length"), [("banded", 4), ("blt", 4), ("blt", 1)])
def test_replicas_divide_the_tiles_among_their_devices(
    strategy, block_length, tmp_path, monkeypatch
):
    kwargs = {"strategy": strategy, "dimension": 512 // block_length, "block_length": block_length}
    straight = take_in_graph(make_stream(**kwargs), NUM_ROUNDS)
    with _mirrored().scope():
        stream = make_stream(**kwargs)
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
        rows = take(stream, 6)
        monkeypatch.undo()
        assert made_on[: len(bytes_on)] == [{"CPU:0"}, {"CPU:1"}]
        assert made_on.count({"CPU:0"}) == made_on.count({"CPU:1"}) == len(made_on) / 2
        rows = [*rows, *take_in_graph(stream, 4)]
    np.testing.assert_array_equal(rows, straight[:10])
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**8)
    undivided = restored(stream, tmp_path, **kwargs)
    np.testing.assert_array_equal(take_in_graph(undivided, 3), straight[10:13])
    with _mirrored().scope():
        divided = restored(undivided, tmp_path, **kwargs)
        np.testing.assert_array_equal(take_in_graph(divided, 8), straight[13:])


@pytest.mark.usefixtures("tiled")
def test_there_are_tiles_for_many_devices_and_small_rows_are_one():
    layout = noise_stream.RowLayout(tf.TensorSpec([10**6]))
    assert len(layout.tiles([4, 4])) == 32
    for devices in (2, 4, 8, 16, 32):
        assert layout.tiles([4, 4], devices) == layout.tiles([4, 4])
    assert len(layout.tiles([4, 4], 40)) == 40
    assert len(layout.tiles([2, *[2] * 100], 3)) == 8
    assert len(layout.tiles([0, 4])) == 128  # No block is kept.
    for pairs in (layout.tiles([4, 4], 40), layout.tiles([4, 4])):
        assert sum(pairs) == layout.width // 2
        assert len(set(pairs[:-1])) == 1
    assert noise_stream.RowLayout(tf.TensorSpec([100])).tiles([1, 4], 8) == [56]


def test_cross_replica_context_gives_one_row(tmp_path):
    mirrored = _mirrored()
    with mirrored.scope():
        stream = make_stream()
        next_row = tf.function(stream.next)
        rows = np.array([next_row() for _ in range(7)])
    straight = take(make_stream(), NUM_ROUNDS)
    np.testing.assert_array_equal(rows, straight[:7])
    np.testing.assert_array_equal(take(restored(stream, tmp_path), 14), straight[7:])


# Statistics: the law of the rows, and what the tests would say to another law.


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
    return STRATEGIES[request.param], take(stream, NUM_ROUNDS)


def test_rows_have_the_covariance_of_the_mechanism(emitted):
    strategy, rows = emitted
    assert covariance_pvalue(rows, _target_covariance(strategy)) > 0.001


def test_a_wrong_scale_is_noticed(emitted):
    strategy, rows = emitted
    assert covariance_pvalue(rows, _target_covariance(strategy, 1.03 * STDDEV)) < 1e-6
    assert covariance_pvalue(rows, _target_covariance(strategy, 0.97 * STDDEV)) < 1e-6


def test_a_wrong_strategy_is_noticed(emitted):
    strategy, rows = emitted
    others = [other for other in STRATEGIES.values() if other is not strategy]
    for other in [*others, random_bands(5)]:
        assert covariance_pvalue(rows, _target_covariance(other)) < 1e-6


def test_a_repeated_row_is_noticed(emitted):
    strategy, rows = emitted
    repeated = rows.copy()
    repeated[8] = repeated[7]
    assert covariance_pvalue(repeated, _target_covariance(strategy)) < 1e-6
    z = strategy.materialize() @ rows
    z[8] = z[7]
    repeated = np.linalg.solve(strategy.materialize(), z)
    assert covariance_pvalue(repeated, _target_covariance(strategy)) < 1e-6


def test_coordinates_are_independent_within_and_across_tensors():
    n = 1500
    strategy = strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.375]), n)
    specs = {"a": tf.TensorSpec([3, 4]), "b": [tf.TensorSpec([]), tf.TensorSpec([7])]}
    stream = noise_stream.NoiseStream(strategy, STDDEV, specs, pinned_seed=7)
    stream.next = tf.function(stream.next)
    rows = take(stream, n)
    z = strategy.matmul(rows) / STDDEV
    assert covariance_pvalue(z.T, np.eye(20)) > 0.001
    shared = z.copy()
    shared[:, 12] = shared[:, 0]  # What the same seed for two tensors would give.
    assert covariance_pvalue(shared.T, np.eye(20)) < 1e-6


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
        make_stream()


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
