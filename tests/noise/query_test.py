"""The queries clip, sum and add exactly the stream's row, in every framework, or fail."""

from __future__ import annotations

import collections
import functools
import sys

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import pld, rdp

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import buffered, strategies, trees
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.noise import _dp_query, clipped_sum, query
from bandmf_tf.noise import source as noise_source
from bandmf_tf.noise import stream as noise_stream
from cases import make_mechanism

NUM_ROUNDS = 9
CLIP = 2.0
MULTIPLIER = 0.5
PIN = 5
SPECS = {"kernel": tf.TensorSpec([2, 3]), "rest": (tf.TensorSpec([]), [tf.TensorSpec([4])])}
STRATEGIES = {
    "toeplitz": strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.375]), NUM_ROUNDS),
    "tree": trees.TreeStrategy(NUM_ROUNDS),
    "blt": buffered.BufferedStrategy(np.array([0.95, 0.5]), np.array([0.2, 0.4]), NUM_ROUNDS),
    "banded inverse": InverseBandedStrategy(np.array([1.2, -0.5, -0.2]), NUM_ROUNDS),
}


def _structure(value, specs=SPECS):
    return tf.nest.map_structure(lambda s: np.full(s.shape, value, s.dtype.as_numpy_dtype), specs)


def _flat(structure):
    return np.concatenate([np.ravel(tensor) for tensor in tf.nest.flatten(structure)])


def _query(strategy="toeplitz", specs=SPECS, **kwargs):
    return query.CorrelatedNoiseSumQuery.from_strategy(
        STRATEGIES[strategy], MULTIPLIER, CLIP, specs, **{"pinned_seed": PIN, **kwargs}
    )


def _supplied(specs=SPECS, **kwargs):
    event = dp_accounting.UnsupportedDpEvent()
    return query.SuppliedNoiseSumQuery(NUM_ROUNDS, CLIP, specs, event, 1, **kwargs)


def _stream(strategy="toeplitz", specs=SPECS, pinned_seed=PIN, **kwargs):
    return noise_stream.NoiseStream(
        STRATEGIES[strategy], MULTIPLIER * CLIP, specs, pinned_seed=pinned_seed, **kwargs
    )


def _noise(strategy="toeplitz", specs=SPECS):
    """All rows of noise, by the dense inverse."""
    layout = noise_stream.RowLayout(specs)
    z = noise_source.normal_rows(
        tf.constant(noise_source.pinned_seed(PIN)),
        tf.constant(0, tf.int64),
        NUM_ROUNDS,
        layout.width,
        layout.dtype,
    ).numpy()[:, : layout.dimension]
    return MULTIPLIER * CLIP * np.linalg.solve(STRATEGIES[strategy].materialize(), z)


def _sum_of(dp_query, records, state):
    params = dp_query.derive_sample_params(state)
    sample = dp_query.initial_sample_state(records[0])
    for record in records:
        sample = dp_query.accumulate_record(params, sample, record)
    return sample


def _run(dp_query, records, state=None):
    state = dp_query.initial_global_state() if state is None else state
    return dp_query.get_noised_result(_sum_of(dp_query, records, state), state)


def _mechanism(noise_multiplier=MULTIPLIER):
    strategy, participation = STRATEGIES["toeplitz"], MinSeparation(3)
    return make_mechanism(
        strategy, participation, noise_multiplier=noise_multiplier, l2_norm_clip=CLIP
    )


# Clipping and counting.


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -30.0, 1e18])
def test_records_are_clipped_over_the_whole_structure(value):
    record = _structure(value)
    dp_query = _query(count_records=False)
    clipped = dp_query.preprocess_record(tf.constant(CLIP), record)
    tf.nest.assert_same_structure(clipped, record)
    norm = np.linalg.norm(_flat(record).astype(np.float64))
    expected = _flat(record) * min(1.0, CLIP / norm if norm else 1.0)
    np.testing.assert_allclose(_flat(clipped), expected, rtol=1e-6)
    assert np.linalg.norm(_flat(clipped).astype(np.float64)) <= CLIP * (1 + 1e-6)


def test_a_large_record_is_clipped_to_the_norm_and_not_beyond():
    specs = [tf.TensorSpec([300_000])]
    record = [np.random.default_rng(0).normal(size=300_000).astype(np.float32)]
    clipped = _query(specs=specs, count_records=False).preprocess_record(tf.constant(CLIP), record)
    assert np.linalg.norm(clipped[0].numpy().astype(np.float64)) == pytest.approx(CLIP, rel=1e-6)


@pytest.mark.parametrize("value", [1e-30, 1e-22, 1.0, 1e22, 3e38])
def test_squares_that_vanish_or_overflow_in_float32_do_not_matter(value):
    specs = [tf.TensorSpec([1000])]
    record = [np.full(1000, value, np.float32)]
    clipped = _query(specs=specs, count_records=False).preprocess_record(tf.constant(CLIP), record)
    norm = np.linalg.norm(clipped[0].numpy().astype(np.float64))
    expected = min(CLIP, np.linalg.norm(record[0].astype(np.float64)))
    assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_record_that_is_not_finite_contributes_zeros_and_is_counted(value):
    bad = _structure(0.25)
    bad["kernel"][1, 2] = value
    good = _structure(0.25)
    dp_query = _query()
    result, state, _ = _run(dp_query, [good, bad, good])
    np.testing.assert_allclose(_flat(result) - 2 * _flat(good), _noise()[0], atol=1e-5)
    metrics = dp_query.derive_metrics(state)
    assert metrics["non_finite_records"] == 1
    assert metrics["fraction_clipped"] == 0.0


def test_metrics_expose_counts_of_the_last_step_and_no_noise():
    dp_query = _query()
    _, state, _ = _run(dp_query, [_structure(v) for v in (0.1, 9.0, 0.2, -8.0)])
    metrics = dp_query.derive_metrics(state)
    assert list(metrics) == ["step", "l2_norm_clip", "fraction_clipped", "non_finite_records"]
    assert [float(value) for value in metrics.values()] == [1, CLIP, 0.5, 0]
    _, state, _ = _run(dp_query, [_structure(0.1)], state)
    assert [float(v) for v in dp_query.derive_metrics(state).values()] == [2, CLIP, 0, 0]


def test_without_counts_the_sample_is_the_plain_sum():
    dp_query = _query(count_records=False)
    state = dp_query.initial_global_state()
    tf.nest.assert_same_structure(dp_query.initial_sample_state(), SPECS)
    assert "counts" not in state
    result, state, _ = _run(dp_query, [_structure(0.1)])
    np.testing.assert_allclose(_flat(result) - 0.1, _noise()[0], atol=1e-5)
    assert list(dp_query.derive_metrics(state)) == ["step", "l2_norm_clip"]


@pytest.mark.parametrize(
    "record",
    [
        np.zeros((2, 3), np.float32),
        {"kernel": np.zeros((2, 3), np.float32)},
        {"kernel": np.zeros((2, 3), np.float32), "other": (0.0, [np.zeros(4, np.float32)])},
        {"kernel": np.zeros((2, 3), np.float32), "rest": (0.0, np.zeros(4, np.float32))},
        {"kernel": np.zeros((3, 2), np.float32), "rest": (0.0, [np.zeros(4, np.float32)])},
        {"kernel": np.zeros((2, 3), np.float64), "rest": (0.0, [np.zeros(4, np.float32)])},
        {"kernel": np.zeros((2, 3), np.float32), "rest": (0.0, [np.zeros(4, np.int32)])},
    ],
)
@pytest.mark.parametrize("make", [_query, _supplied])
def test_a_record_of_another_structure_is_an_error(make, record):
    dp_query = make()
    with pytest.raises(ValueError, match="A record must have"):
        dp_query.preprocess_record(tf.constant(CLIP), record)
    with pytest.raises(ValueError, match="A record must have"):
        dp_query.initial_sample_state(record)


def test_a_shape_known_only_when_the_graph_runs_is_checked_then():
    dp_query = _query(specs=[tf.TensorSpec([2, 3])], count_records=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def preprocess(tensor):
        return dp_query.preprocess_record(tf.constant(CLIP), [tensor])

    assert preprocess(tf.ones([2, 3]))[0].shape == [2, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible"):
        preprocess(tf.ones([1, 3]))  # Added to a sum it would be broadcast.


def test_lists_and_tuples_are_the_same_structure():
    record = {"kernel": np.zeros((2, 3), np.float32), "rest": [0.0, (np.zeros(4, np.float32),)]}
    result, _, _ = _run(_query(), [record])
    np.testing.assert_allclose(_flat(result), _noise()[0], atol=1e-5)


# The noise.


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_sums_plus_rows_of_the_mechanism_and_end_with_the_plan(strategy, wrap):
    dp_query = _query(strategy)
    step = wrap(lambda records, state: _run(dp_query, records, state)[:2])
    state, rows = dp_query.initial_global_state(), []
    for _ in range(NUM_ROUNDS):
        result, state = step([_structure(0.1), _structure(0.2)], state)
        rows.append(_flat(result) - 0.3)
    np.testing.assert_allclose(rows, _noise(strategy), atol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="all rounds are used"):
        step([_structure(0.1)], state)


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_get_noised_result_is_pure(wrap):
    dp_query = _query(pinned_seed=None, block_length=4)
    step = wrap(
        lambda state: dp_query.get_noised_result(dp_query.initial_sample_state(), state)[:2]
    )
    state = dp_query.initial_global_state()
    for _ in range(6):
        first, second = step(state), step(state)
        tf.nest.map_structure(np.testing.assert_array_equal, first, second)
        state = first[1]


def test_runs_with_seeds_of_their_own_differ_and_a_refreshed_one_too():
    dp_query = _query(pinned_seed=None)
    states = [dp_query.initial_global_state() for _ in range(2)]
    _, state, _ = _run(dp_query, [_structure(0.0)], states[0])
    results = [_flat(_run(dp_query, [_structure(0.0)], s)[0]) for s in states]
    results += [
        _flat(_run(dp_query, [_structure(0.0)], s)[0]) for s in (state, dp_query.refresh(state))
    ]
    assert np.unique(results).size == np.size(results)
    tf.nest.assert_same_structure(state, dp_query.refresh(state))


def test_state_is_flat_and_clients_learn_the_clip_norm_only():
    dp_query = _query()
    state = dp_query.initial_global_state()
    assert type(state) is collections.OrderedDict
    assert all(isinstance(value, tf.Tensor) for value in state.values())
    assert state["step"].dtype == tf.int64
    assert dp_query.derive_sample_params(state) == CLIP


@pytest.mark.parametrize("kind", [_dp_query.NormalizedQuery, _dp_query._NormalizedQuery])
def test_normalized_query_divides_sum_and_noise(kind):
    dp_query = kind(_query(), 4.0)
    result, state, _ = _run(dp_query, [_structure(0.1), _structure(0.3)])
    np.testing.assert_allclose(_flat(result), (0.4 + _noise()[0]) / 4.0, atol=1e-5)
    assert dp_query.derive_metrics(state)["step"] == 1


def test_a_query_is_one_of_tensorflow_privacy():
    import tensorflow_privacy

    assert isinstance(_query(), tensorflow_privacy.SumAggregationDPQuery)
    assert isinstance(_supplied(), tensorflow_privacy.SumAggregationDPQuery)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_base_class_sums_records_as_that_of_tensorflow_privacy_does(is_ours):
    if is_ours:
        base = _dp_query._SumAggregationDPQuery
    else:
        from tensorflow_privacy import SumAggregationDPQuery as base

    class Plain(base):
        def preprocess_record(self, params, record):
            return {"a": 2.0 * record["a"], "b": None}

        def get_noised_result(self, sample_state, global_state):
            return sample_state, global_state, None

    plain = Plain()
    template = {"a": tf.TensorSpec([2]), "b": np.float32(3.0)}
    start = plain.initial_sample_state(template)
    assert not start["a"].numpy().any()
    assert start["a"].shape == [2]
    assert start["b"].dtype == tf.float32
    one = plain.accumulate_record((), start, {"a": tf.constant([1.0, 2.0])})
    both = plain.merge_sample_states(one, one)
    np.testing.assert_array_equal(both["a"], [4.0, 8.0])
    assert plain.initial_global_state() == plain.derive_sample_params(()) == ()
    assert plain.derive_metrics(()) == collections.OrderedDict()
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_the_classes_that_tff_brings_itself_are_taken_first(tmp_path, monkeypatch):
    package = tmp_path / "tensorflow_federated"
    module = package.joinpath(*_dp_query._TFF_COPY.split(".")[1:]).with_suffix(".py")
    module.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    module.write_text("class SumAggregationDPQuery: ...\nclass NormalizedQuery: ...\n")
    for name in [name for name in sys.modules if name.startswith("tensorflow_federated")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert [kind.__module__ for kind in _dp_query._provided()] == [_dp_query._TFF_COPY] * 2
    finally:
        for name in [name for name in sys.modules if name.startswith("tensorflow_federated")]:
            del sys.modules[name]


def test_nested_query_clips_and_noises_each_part_by_its_own_query():
    import tensorflow_privacy

    specs = [tf.TensorSpec([3])]
    parts = {"a": _query(specs=specs, sensitivity=1.0), "b": _query(specs=specs, pinned_seed=6)}
    dp_query = tensorflow_privacy.NestedQuery(parts)
    record = {"a": [np.full(3, 10.0, np.float32)], "b": [np.zeros(3, np.float32)]}
    result, state, event = _run(dp_query, [record])
    clipped = np.full(3, CLIP / np.sqrt(3))
    np.testing.assert_allclose(result["a"][0] - clipped, _noise(specs=specs)[0], atol=1e-5)
    assert not np.any(np.isclose(result["b"][0], _noise(specs=specs)[0]))
    assert isinstance(event, dp_accounting.ComposedDpEvent)
    assert dp_query.derive_metrics(state)["a/fraction_clipped"] == 1.0


def test_a_query_survives_graph_serialisation():
    dp_query = _query(block_length=4)
    values = tf.nest.map_structure(np.array, dp_query.initial_global_state())
    with tf.Graph().as_default() as graph:
        record = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), SPECS
        )
        state = tf.nest.map_structure(
            lambda value: tf.compat.v1.placeholder(value.dtype, value.shape), values
        )
        result, after, _ = _run(dp_query, [record], state)
        names = tf.nest.map_structure(lambda tensor: tensor.name, (record, state, result, after))
    rows = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph.as_graph_def(), name="")
        for _ in range(NUM_ROUNDS):
            feed = dict(
                zip(
                    tf.nest.flatten(names[:2]),
                    tf.nest.flatten((_structure(0.1), values)),
                    strict=True,
                )
            )
            result, values = session.run(names[2:], feed)
            rows.append(_flat(result) - 0.1)
    np.testing.assert_allclose(rows, _noise(), atol=1e-5)


# Constructors and events.


def test_a_mechanism_and_its_parts_give_the_same_query():
    mechanism = _mechanism()
    queries = [
        query.CorrelatedNoiseSumQuery.from_mechanism(mechanism, SPECS, pinned_seed=PIN),
        _query(sensitivity=mechanism.sensitivity.value),
        query.SuppliedNoiseSumQuery.from_mechanism(mechanism, SPECS),
    ]
    assert {q.run_event for q in queries} == {queries[0].run_event}
    assert {q.l2_norm_clip for q in queries} == {CLIP}
    for dp_query in queries[:2]:
        result, _, _ = _run(dp_query, [_structure(0.1)])
        np.testing.assert_allclose(_flat(result) - 0.1, _noise()[0], atol=1e-5)


@pytest.mark.parametrize("accountant", [pld.PLDAccountant, rdp.RdpAccountant])
def test_events_of_all_steps_compose_to_the_event_of_the_run(accountant):
    mechanism = _mechanism(noise_multiplier=3.0)
    dp_query = query.CorrelatedNoiseSumQuery.from_mechanism(mechanism, SPECS, pinned_seed=PIN)
    state, stepwise = dp_query.initial_global_state(), accountant()
    for _ in range(4):
        _, state, event = _run(dp_query, [_structure(0.1)], state)
        stepwise.compose(event)
    whole = accountant().compose(dp_query.run_event)
    assert stepwise.get_epsilon(1e-6) == pytest.approx(whole.get_epsilon(1e-6), rel=1e-3)
    if accountant is pld.PLDAccountant:
        assert whole.get_epsilon(mechanism.delta) == pytest.approx(mechanism.epsilon, rel=1e-3)


def test_without_a_sensitivity_no_accountant_is_given_anything_to_count():
    _, _, event = _run(_query(), [_structure(0.1)])
    assert isinstance(event, dp_accounting.UnsupportedDpEvent)
    assert not pld.PLDAccountant().supports(event)


@pytest.mark.parametrize("name", ["noise_multiplier", "l2_norm_clip", "sensitivity"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_parameters_must_be_positive(name, value):
    arguments = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0, "sensitivity": 1.0, name: value}
    with pytest.raises(ValueError, match=name):
        query.CorrelatedNoiseSumQuery.from_strategy(
            STRATEGIES["toeplitz"], record_specs=SPECS, **arguments
        )


def test_a_clip_norm_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="scale the records up"):
        query.CorrelatedNoiseSumQuery.from_strategy(STRATEGIES["toeplitz"], 1.0, 1e-20, SPECS)


# Rows supplied by the server program.


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_supplied_rows_give_the_results_of_the_self_contained_query(wrap):
    own, other, stream = _query(), _supplied(), _stream()
    own_step = wrap(lambda state: _run(own, [_structure(0.1)], state)[:2])
    other_step = wrap(lambda state: _run(other, [_structure(0.1)], state)[:2])
    own_state, other_state = own.initial_global_state(), other.initial_global_state()
    for _ in range(NUM_ROUNDS):
        expected, own_state = own_step(own_state)
        result, other_state = other_step(other.supply_from(stream, other_state))
        np.testing.assert_array_equal(_flat(result), _flat(expected))
    end = other.supply_row(other_state, _structure(0.5), NUM_ROUNDS)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"num_rounds={NUM_ROUNDS} at most"):
        other_step(end)


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
@pytest.mark.parametrize("count_records", [True, False])
def test_a_step_without_its_row_is_an_error(wrap, count_records):
    dp_query = _supplied(count_records=count_records)
    step = wrap(lambda state: _run(dp_query, [_structure(0.1)], state)[:2])
    state = dp_query.initial_global_state()
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs the row"):
        step(state)
    _, state = step(dp_query.supply_from(_stream(), state))
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs the row"):
        step(state)  # The row was used; it is not used again.


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_a_row_of_another_step_is_an_error(wrap):
    dp_query = _supplied()
    step = wrap(lambda state: _run(dp_query, [_structure(0.1)], state)[:2])
    supplied = dp_query.supply_from(_stream(), dp_query.initial_global_state())
    for name in ("step", "row_step"):
        wrong = collections.OrderedDict(supplied, **{name: tf.constant(3, tf.int64)})
        with pytest.raises(tf.errors.InvalidArgumentError, match="needs the row"):
            step(wrong)
    with pytest.raises(ValueError, match="at round 0 and needs its row"):
        dp_query.supply_row(dp_query.initial_global_state(), _structure(0.1), 1)
    stream = _stream()
    stream.next()
    with pytest.raises(ValueError, match="stream is at round 1 and the state at round 0"):
        dp_query.supply_from(stream, dp_query.initial_global_state())
    assert stream.round == 1, "A refused row must not be taken from the stream."


def test_without_assertions_a_missing_row_still_poisons_the_result(monkeypatch):
    monkeypatch.setattr(tf.debugging, "Assert", lambda condition, data: None)
    dp_query = _supplied()
    supplied = dp_query.supply_from(_stream(), dp_query.initial_global_state())
    wrong = collections.OrderedDict(supplied, step=tf.constant(3, tf.int64))
    for state in (dp_query.initial_global_state(), wrong):
        result, after, _ = _run(dp_query, [_structure(0.1)], state)
        assert np.all(np.isnan(_flat(result)))
        assert after["step"] == state["step"]


def test_compiled_by_xla_a_missing_row_poisons_the_result():
    dp_query = _supplied()
    step = tf.function(lambda state: _run(dp_query, [_structure(0.1)], state)[:2], jit_compile=True)
    result, state = step(dp_query.initial_global_state())
    assert np.all(np.isnan(_flat(result)))  # XLA drops assertions.
    result, _ = step(dp_query.supply_from(_stream(), state))
    np.testing.assert_allclose(_flat(result) - 0.1, _noise()[0], atol=1e-5)


def test_zeros_without_a_row_are_nan_in_a_graph_and_an_error_in_eager_mode():
    dp_query = _supplied()

    def step(state):
        return dp_query.get_noised_result(dp_query.initial_sample_state(), state)[:2]

    result, state = tf.function(step)(dp_query.initial_global_state())
    assert np.all(np.isnan(_flat(result)))
    assert state["step"] == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs the row"):
        step(dp_query.initial_global_state())


def test_a_row_that_is_not_noise_is_refused():
    dp_query = _supplied()
    state = dp_query.initial_global_state()
    with pytest.raises(ValueError, match="must be finite"):
        dp_query.supply_row(state, _structure(np.nan), 0)
    with pytest.raises(ValueError, match="A record must have"):
        dp_query.supply_row(state, np.zeros(11, np.float32), 0)


# TFF.


@functools.cache
def _tff():
    from bandmf_tf.federated import runtime

    runtime.set_local_context()
    return runtime.tff


TFF_SPECS = collections.OrderedDict(
    kernel=tf.TensorSpec([2, 3]), rest=[tf.TensorSpec([]), tf.TensorSpec([4])]
)


def _tff_process(dp_query):
    tff = _tff()
    value_type = tff.to_type(
        collections.OrderedDict(kernel=(np.float32, [2, 3]), rest=[np.float32, (np.float32, [4])])
    )
    return tff.aggregators.DifferentiallyPrivateFactory(dp_query).create(value_type)


def test_a_tff_aggregator_streams_a_tree():
    dp_query = _query("tree", specs=TFF_SPECS, block_length=1)
    process = _tff_process(dp_query)
    state, rows = process.initialize(), []
    for _ in range(NUM_ROUNDS):
        output = process.next(state, [_structure(0.1, TFF_SPECS)])
        state = output.state
        rows.append(_flat(output.result) - 0.1)
    np.testing.assert_allclose(rows, _noise("tree", TFF_SPECS), atol=1e-5)
    with pytest.raises(Exception, match="all rounds are used"):
        process.next(state, [_structure(0.1, TFF_SPECS)])


def test_a_tff_aggregator_adds_the_rows_of_the_mechanism():
    mechanism = _mechanism()
    dp_query = query.CorrelatedNoiseSumQuery.from_mechanism(mechanism, TFF_SPECS, pinned_seed=PIN)
    process = _tff_process(_dp_query.NormalizedQuery(dp_query, 2.0))
    state = process.initialize()
    for expected in _noise(specs=TFF_SPECS)[:3]:
        output = process.next(state, [_structure(v, TFF_SPECS) for v in (0.1, np.nan, 0.2)])
        state = output.state
        np.testing.assert_allclose(2.0 * _flat(output.result) - 0.3, expected, atol=1e-5)
    metrics = output.measurements["dp_query_metrics"]
    assert metrics["step"] == 3
    assert metrics["non_finite_records"] == 1


def test_tff_draws_a_seed_at_every_initialisation():
    process = _tff_process(_query(specs=TFF_SPECS, pinned_seed=None))
    seeds = [process.initialize().query_state["seed"] for _ in range(2)]
    assert np.unique(seeds).size == 4


def test_a_tff_aggregator_uses_supplied_rows_and_fails_without():
    dp_query, stream = _supplied(specs=TFF_SPECS), _stream(specs=TFF_SPECS)
    process = _tff_process(dp_query)
    state = process.initialize()
    records = [_structure(v, TFF_SPECS) for v in (0.1, 0.2)]
    for expected in _noise(specs=TFF_SPECS)[:2]:
        supplied = dp_query.supply_from(stream, state.query_state)
        output = process.next(_with_query_state(state, supplied), records)
        state = output.state
        np.testing.assert_allclose(_flat(output.result) - 0.3, expected, atol=1e-5)
    with pytest.raises(Exception, match="needs the row of noise"):
        process.next(state, records)


def _with_query_state(state, query_state):
    return type(state)(query_state, *list(state)[1:])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_clipped_sum_is_that_of_the_queries_and_counts_what_is_no_number(dtype):
    spec, clip = tf.TensorSpec([3], dtype), 0.5
    records = [[np.nan, 0, 0], [np.inf, 1, 1], [1e300, -1e300, 0], [3.0, 4.0, 0.0], [0.1, 0, 0]]
    records += [[np.nan] * 3, [0.0, 0.0, 0.0], [-np.inf, np.nan, 2.0], [1e-30, 0, 0]]
    found = clipped_sum([np.array(record) for record in records], clip, spec)
    np.testing.assert_allclose(found.total, [0.4, 0.4, 0.0], rtol=1e-6)
    assert found.total.dtype == "float64"
    assert (found.num_records, found.num_clipped, found.num_non_finite) == (9, 1, 5)
    assert np.linalg.norm(clipped_sum([[3.0, 4.0, 0.1]], clip, spec).total) <= clip
    nothing = clipped_sum([], clip, spec)
    assert (nothing.num_records, nothing.total.tolist()) == (0, [0.0] * 3)
    for wrong in ([1.0], np.ones([2, 3]), 1.0):
        with pytest.raises(BandMFError, match="must have the shape"):
            clipped_sum([wrong], clip, spec)
    with pytest.raises(BandMFError, match="l2_norm_clip"):
        clipped_sum([], float("nan"), spec)
    with pytest.raises(BandMFError, match="may vanish in float32"):
        clipped_sum([np.full(3, 1e-39)], 1e-42, spec)


@pytest.mark.parametrize(
    "wrong", [["1", "2", "x"], [1, [2, 3], 4], [{}, 1, 2], [10**400, 0, 0], [1j, 0, 0]]
)
def test_a_record_that_holds_no_numbers_gets_a_sentence(wrong):
    with pytest.raises(BandMFError, match="array of real numbers"):
        clipped_sum([wrong], 1.0, tf.TensorSpec([3], tf.float32))
