"""Both forms of the aggregator give the mechanism's noise, inside whatever TFF builds with them."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import stat
import threading
import weakref

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tree

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import strategies
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.federated import aggregators, runtime
from bandmf_tf.federated.aggregators import BandMFFactory, NoiseSupply, TffBaselineFactory
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import Basis
from cases import make_mechanism

NUM_ROUNDS = 6
CLIENTS_PER_ROUND = 4
VALUE_TYPE = tff.types.to_type([tff.TensorType(np.float32, (3,)), tff.TensorType(np.float32)])
SPECS = aggregators.value_specs(VALUE_TYPE)
UPDATES = [[np.float32([0.1, 0.2, -0.3]), np.float32(0.5)], [np.float32([9, 0, 0]), np.float32(0)]]

EVENT = "<module_name=str,class_name=str,noise_multiplier=float64>"
METRICS = (
    "<dp_query_metrics=<step=int64,l2_norm_clip=float32,fraction_clipped=float32,"
    "non_finite_records=int64>,dp=<>>"
)


def _mechanism(strategy=None, **changes) -> Mechanism:
    toeplitz = strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.25]), NUM_ROUNDS)
    return make_mechanism(strategy or toeplitz.to_banded(), MinSeparation(3), **changes)


@pytest.fixture(autouse=True, scope="module")
def _local_context():
    runtime.set_local_context()
    yield
    runtime.end_workers()


def _run(process, values, num_rounds=NUM_ROUNDS, supply=None):
    """Aggregates the same values in every round; returns the results as vectors."""
    state, results = process.initialize(), []
    for _ in range(num_rounds):
        state = state if supply is None else supply.supply(state)
        output = process.next(state, values)
        state = output.state
        results.append(np.concatenate([np.ravel(part) for part in output.result]))
    return np.stack(results), output


def _both_forms(mechanism, values, **kwargs):
    fed = BandMFFactory.from_stream(mechanism, clients_per_round=CLIENTS_PER_ROUND)
    supply = NoiseSupply(mechanism, SPECS, pinned_seed=5, **kwargs)
    alone = BandMFFactory.in_state(
        mechanism, clients_per_round=CLIENTS_PER_ROUND, pinned_seed=5, **kwargs
    )
    first, output = _run(fed.create(VALUE_TYPE), values, supply=supply)
    second, _ = _run(alone.create(VALUE_TYPE), values)
    return first, second, output


def test_both_forms_give_the_same_results_and_the_noise_of_the_mechanism():
    mechanism = _mechanism()
    first, second, output = _both_forms(mechanism, UPDATES, block_length=2)
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
    # The second update is clipped to norm 1; the sum is divided by the planned number of clients.
    total = np.array([0.1 + 1.0, 0.2, -0.3, 0.5])
    noise = first * CLIENTS_PER_ROUND - total
    stream = NoiseSupply(mechanism, SPECS, pinned_seed=5, block_length=2).stream
    rows = [np.concatenate([np.ravel(t) for t in stream.next()]) for _ in range(NUM_ROUNDS)]
    np.testing.assert_allclose(noise, rows, atol=1e-5)
    metrics = output.measurements["dp_query_metrics"]
    assert (metrics["step"], metrics["fraction_clipped"]) == (NUM_ROUNDS, 0.5)


def test_the_type_signatures_are_exactly_these():
    fed = BandMFFactory.from_stream(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    numerator = "<step=int64,row=float32[?],row_step=int64,fingerprint=int64,"
    numerator += "participation_enforced=bool,counts=float32[3]>"
    _assert_signature(fed, numerator)
    alone = BandMFFactory.in_state(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    numerator = (
        "<step=int64,seed=int64[2],ready_rows=float32[1,16],memory_000=float32[1,16],"
        "memory_001=float32[1,16],fingerprint=int64,participation_enforced=bool,counts=float32[3]>"
    )
    _assert_signature(alone, numerator)


def _assert_signature(process, numerator):
    state = (
        f"<query_state=<numerator_state={numerator},denominator=float32>,agg_state=<>,"
        f"dp_event={EVENT},is_init_state=bool>@SERVER"
    )
    assert str(process.initialize.type_signature) == f"( -> {state})"
    assert str(process.next.type_signature) == (
        f"(<state={state},value={{<float32[3],float32>}}@CLIENTS> -> "
        f"<state={state},result=<float32[3],float32>@SERVER,measurements={METRICS}@SERVER>)"
    )


@pytest.mark.parametrize(
    "value_type",
    [
        tff.TensorType(np.float32, (2, 2)),
        tff.types.to_type(collections.OrderedDict(a=np.float32, b=[np.float32, np.float32])),
    ],
)
def test_any_structure_of_tensors_can_be_aggregated(value_type):
    mechanism = _mechanism()
    process = BandMFFactory.from_stream(mechanism, clients_per_round=2).create(value_type)
    assert process.next.type_signature.result.result.member.is_equivalent_to(value_type)
    supply = NoiseSupply(mechanism, aggregators.value_specs(value_type), pinned_seed=1)
    zeros = tf.nest.map_structure(
        lambda spec: np.zeros(spec.shape, np.float32), aggregators.value_specs(value_type)
    )
    result = process.next(supply.supply(process.initialize()), [zeros]).result
    assert all(np.all(np.isfinite(part)) for part in tf.nest.flatten(result))


def test_the_denominator_is_the_planned_number_of_clients():
    mechanism = _mechanism(noise_multiplier=0.1)
    process = BandMFFactory.in_state(mechanism, clients_per_round=10).create(VALUE_TYPE)
    for num_clients in (1, 3, 10):
        result = process.next(process.initialize(), UPDATES[:1] * num_clients).result
        np.testing.assert_allclose(result[1], 0.5 * num_clients / 10, atol=0.05)


def test_a_round_without_its_row_fails():
    process = BandMFFactory.from_stream(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    with pytest.raises(Exception, match="needs the row of noise that belongs to it"):
        process.next(process.initialize(), UPDATES)


def test_a_round_cannot_use_a_row_twice():
    process = BandMFFactory.from_stream(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    supply = NoiseSupply(_mechanism(), SPECS)
    state = process.next(supply.supply(process.initialize()), UPDATES).state
    with pytest.raises(Exception, match="needs the row of noise that belongs to it"):
        process.next(state, UPDATES)


def test_a_stream_that_is_ahead_is_refused():
    process = BandMFFactory.from_stream(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    supply = NoiseSupply(_mechanism(), SPECS)
    state = process.initialize()
    supply.supply(state)
    with pytest.raises(ValueError, match="stream is at round 1 and the state at round 0"):
        supply.supply(state)


def test_two_threads_do_not_get_two_rows_for_one_round(monkeypatch):
    process = BandMFFactory.from_stream(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    supply, state = NoiseSupply(_mechanism(), SPECS), process.initialize()
    both, draw = threading.Barrier(2), supply.stream.next_in_graph

    def draw_when_both_are_here():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)
        return draw()

    monkeypatch.setattr(supply.stream, "next_in_graph", draw_when_both_are_here)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        errors = [f.exception() for f in [pool.submit(supply.supply, state) for _ in range(2)]]
    assert sorted(map(str, errors))[1].startswith("The noise stream is at round 1 and the state")
    assert None in errors


@pytest.mark.parametrize(
    "wrap",
    [
        lambda factory: factory,
        lambda factory: tff.aggregators.zeroing_factory(10.0, factory),
        tff.aggregators.UnweightedMeanFactory,
    ],
)
@pytest.mark.parametrize("make", [BandMFFactory.from_stream, BandMFFactory.in_state])
def test_whatever_is_around_the_aggregator_no_noise_goes_to_where_clients_are(make, wrap):
    """States of TFF's own aggregators are tuples, like the data of clients."""
    mechanism = _mechanism(l2_norm_clip=100.0)
    process = wrap(make(mechanism, clients_per_round=2)).create(VALUE_TYPE)
    state = process.initialize()
    if make == BandMFFactory.from_stream:
        state = NoiseSupply(mechanism, SPECS).supply(state)
    else:
        state = process.next(state, UPDATES).state
    seen = []

    class Workers(tff.framework.AsyncContext):
        async def invoke(self, comp, arg):
            seen.append(arg)

    split = runtime._SplitContext(Workers(), None, weakref.WeakSet([process.next]))
    argument = tff.structure.Struct([("state", state), ("value", UPDATES)])
    asyncio.run(split.invoke(process.next, argument))
    secrets = {
        at: leaf
        for at, leaf in tree.flatten_with_path(state)
        if at[-1] in ("row", "seed", "ready_rows") or str(at[-1]).startswith("memory_")
    }
    sent = dict(tree.flatten_with_path(seen[0].state))
    assert secrets
    assert seen[0].value is UPDATES
    for at, leaf in secrets.items():
        assert not set(np.ravel(leaf)[np.ravel(leaf) != 0]) & set(np.ravel(sent[at]))


def test_a_state_that_holds_noise_is_of_its_own_mechanism_only():
    """Noise of the same shape, but of another strategy or scale, would be taken back wrongly."""
    mechanism, other = _mechanism(), _mechanism(noise_multiplier=0.01)
    ours, theirs = (
        BandMFFactory.in_state(m, clients_per_round=4).create(VALUE_TYPE)
        for m in (mechanism, other)
    )
    state = theirs.next(theirs.initialize(), UPDATES).state
    with pytest.raises(Exception, match="belongs to another mechanism"):
        ours.next(state, UPDATES)
    with pytest.raises(tf.errors.InvalidArgumentError, match="belongs to another mechanism"):
        aggregators.refresh_noise(state, mechanism, SPECS)
    theirs.next(aggregators.refresh_noise(state, other, SPECS), UPDATES)
    leaves = tree.flatten(state)
    names = [at[-1] for at, _ in tree.flatten_with_path(state)]
    old = [leaf for leaf, name in zip(leaves, names, strict=True) if name != "fingerprint"]
    mended = aggregators.mended_leaves(theirs.initialize(), old)
    tree.map_structure(np.testing.assert_array_equal, mended, leaves)


def test_no_round_runs_past_the_plan():
    mechanism = _mechanism()
    process = BandMFFactory.in_state(mechanism, clients_per_round=4).create(VALUE_TYPE)
    state = process.initialize()
    for _ in range(NUM_ROUNDS):
        state = process.next(state, UPDATES).state
    with pytest.raises(Exception, match="planned for num_rounds=6"):
        process.next(state, UPDATES)


def test_large_states_are_refused_and_streams_are_not():
    large = tff.types.to_type([tff.TensorType(np.float32, (2_400_000,))])
    mechanism = _mechanism(strategies.ToeplitzStrategy(np.linspace(1.0, 0.1, 16), 20))
    with pytest.raises(ValueError, match=r"MB of noise.*BandMFFactory.from_stream"):
        BandMFFactory.in_state(mechanism, clients_per_round=4).create(large)
    BandMFFactory.from_stream(mechanism, clients_per_round=4).create(large)


def test_a_state_without_our_aggregator_is_refused():
    supply = NoiseSupply(_mechanism(), SPECS)
    with pytest.raises(ValueError, match=r"one aggregator of BandMFFactory.from_stream. Found 0"):
        supply.supply({"weights": np.zeros(3)})


def test_a_refreshed_state_draws_new_noise_and_keeps_the_past():
    mechanism = _mechanism()
    process = BandMFFactory.in_state(mechanism, clients_per_round=4).create(VALUE_TYPE)
    state = process.next(process.initialize(), UPDATES).state
    fresh = aggregators.refresh_noise(state, mechanism, SPECS)
    old, new = state.query_state.numerator_state, fresh.query_state.numerator_state
    assert not np.array_equal(old["seed"], new["seed"])
    np.testing.assert_array_equal(old["ready_rows"], new["ready_rows"])
    expected, found = (process.next(s, UPDATES).result for s in (state, fresh))
    assert not np.allclose(expected[0], found[0])


# Inside TFF's algorithms.


def _model():
    def keras_model():
        return tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))]
        )

    spec = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    return tff.learning.models.functional_model_from_keras(
        keras_model, tf.keras.losses.MeanSquaredError(), spec
    )


def _data():
    examples = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    return [tf.data.Dataset.from_tensor_slices(examples).batch(2)] * 2


def _algorithms(factory):
    sgd = tff.learning.optimizers.build_sgdm(0.1)
    weighted = tff.aggregators.as_weighted_aggregator(factory)
    algorithms = tff.learning.algorithms
    return {
        "unweighted": lambda: algorithms.build_unweighted_fed_avg(
            _model(), client_optimizer_fn=sgd, model_aggregator=factory
        ),
        "weighted": lambda: algorithms.build_weighted_fed_avg(
            _model(), client_optimizer_fn=sgd, model_aggregator=weighted
        ),
        "fed_sgd": lambda: algorithms.build_fed_sgd(_model(), model_aggregator=weighted),
    }


def _with_zeroing(factory):
    return tff.aggregators.zeroing_factory(10.0, factory, norm_order=np.inf)


def _weights_after(process, supply, num_rounds=2):
    state = process.initialize()
    for _ in range(num_rounds):
        state = state if supply is None else supply.supply(state)
        state = process.next(state, _data()).state
    return process.get_model_weights(state).trainable


@pytest.mark.parametrize(
    ("algorithm", "wrap"),
    [
        ("unweighted", lambda factory: factory),
        ("unweighted", _with_zeroing),
        ("weighted", _with_zeroing),
        ("fed_sgd", tff.learning.add_debug_measurements),
    ],
)
def test_both_forms_drop_into_tffs_algorithms(algorithm, wrap):
    mechanism = _mechanism()
    fed = wrap(BandMFFactory.from_stream(mechanism, clients_per_round=2))
    alone = wrap(BandMFFactory.in_state(mechanism, clients_per_round=2, pinned_seed=9))
    specs = [tf.TensorSpec([2, 1]), tf.TensorSpec([1])]
    supply = NoiseSupply(mechanism, specs, pinned_seed=9, block_length=1)
    first = _weights_after(_algorithms(fed)[algorithm](), supply)
    second = _weights_after(_algorithms(alone)[algorithm](), None)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert np.all(np.isfinite(ours))


def test_measurements_of_the_result_compose():
    factory = BandMFFactory.from_stream(_mechanism(), clients_per_round=2)
    measured = tff.aggregators.add_measurements(
        factory, server_measurement_fn=lambda result: collections.OrderedDict(first=result[1])
    )
    supply = NoiseSupply(_mechanism(), SPECS)
    process = measured.create(VALUE_TYPE)
    output = process.next(supply.supply(process.initialize()), UPDATES)
    assert output.measurements["first"] == output.result[1]


def test_a_secure_sum_gives_what_a_plain_one_gives():
    """Nothing but the way of summing, and what it measures, changes."""
    mechanism = _mechanism()
    bounds = tff.aggregators.SecureSumFactory(1.0, -1.0)
    secure = BandMFFactory.from_stream(
        mechanism, clients_per_round=2, record_aggregation_factory=bounds
    ).create(VALUE_TYPE)
    plain = BandMFFactory.from_stream(mechanism, clients_per_round=2).create(VALUE_TYPE)
    assert str(secure.initialize.type_signature) == str(plain.initialize.type_signature)
    measured = "<secure_upper_clipped_count=int32,secure_lower_clipped_count=int32,"
    measured += "secure_upper_threshold=float32,secure_lower_threshold=float32>"
    expected = str(plain.next.type_signature).replace("dp=<>", f"dp={measured}")
    assert str(secure.next.type_signature) == expected
    supply = NoiseSupply(mechanism, SPECS)
    with pytest.raises(BandMFError, match="native runtime has no secure aggregation"):
        secure.next(supply.supply(secure.initialize()), UPDATES)
    runtime.end_workers()
    tff.backends.test.set_sync_test_cpp_execution_context()  # Has a stand-in for the protocol.
    try:
        found, expected = (
            _run(process, UPDATES, supply=NoiseSupply(mechanism, SPECS, pinned_seed=5))[0]
            for process in (secure, plain)
        )
    finally:
        # TFF asks its worker to end by SIGINT, which programs in the background may not hear.
        for child in psutil.Process().children():
            if child.name() == "worker_binary":
                child.kill()
        runtime.set_local_context()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_mean_of_tff_around_the_aggregator_divides_by_the_actual_number():
    """It composes, so what it does must be known: the number of clients shows in the scale."""
    mechanism = _mechanism(noise_multiplier=1e-3)
    factory = BandMFFactory.in_state(mechanism, clients_per_round=1)
    process = tff.aggregators.UnweightedMeanFactory(factory).create(VALUE_TYPE)
    for num_clients in (1, 4):
        result = process.next(process.initialize(), UPDATES[:1] * num_clients).result
        np.testing.assert_allclose(result[1], 0.5, atol=0.02)


# Baselines.


def test_tffs_gaussian_has_the_standard_deviation_of_the_mechanism():
    value_type = tff.types.to_type([tff.TensorType(np.float32, (20_000,))])
    zeros = [[np.zeros(20_000, np.float32)]]
    for scale in (1.0, 0.5):
        mechanism = _mechanism(strategies.identity(4).scaled(scale))
        theirs = TffBaselineFactory(mechanism, clients_per_round=5).create(value_type)
        ours = BandMFFactory.in_state(mechanism, clients_per_round=5).create(value_type)
        for process in (theirs, ours):
            noise, _ = _run(process, zeros, num_rounds=1)
            assert noise.std() == pytest.approx(2.0 / scale / 5, rel=0.03)


def test_tffs_tree_has_the_covariance_of_our_online_tree():
    dimension, rounds = 20_000, 5
    value_type = tff.types.to_type([tff.TensorType(np.float32, (dimension,))])
    mechanism = _mechanism(TreeStrategy(8, "online"))
    inverse = np.linalg.inv(mechanism.strategy.materialize())[:rounds, :rounds]
    expected = 4.0 * inverse @ inverse.T / 25
    theirs = TffBaselineFactory(mechanism, clients_per_round=5).create(value_type)
    ours = BandMFFactory.in_state(mechanism, clients_per_round=5).create(value_type)
    for process in (theirs, ours):
        rows, _ = _run(process, [[np.zeros(dimension, np.float32)]], num_rounds=rounds)
        np.testing.assert_allclose(rows @ rows.T / dimension, expected, atol=0.015)


@pytest.mark.parametrize("kind", ["opt_tree", "multi_epoch", "blt", "banded_inverse"])
def test_opt_tree_agg_multi_epoch_mf_and_blts_use_the_same_factory(kind):
    if kind == "opt_tree":
        strategy = TreeStrategy(NUM_ROUNDS, "full")
    elif kind == "blt":
        strategy = BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.5]), NUM_ROUNDS)
    elif kind == "banded_inverse":
        strategy = InverseBandedStrategy(np.array([1.2, -0.5, -0.2]), NUM_ROUNDS)
    else:
        strategy = optimize_dense(prefix_sum(NUM_ROUNDS), 3, equal_column_norms=True).strategy
    first, second, _ = _both_forms(_mechanism(strategy), UPDATES)
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="use BandMFFactory for others"):
        TffBaselineFactory(_mechanism(strategy), clients_per_round=5)


@pytest.mark.parametrize("clients", [0, -1])
def test_a_denominator_of_nothing_is_refused(clients):
    with pytest.raises(ValueError, match="clients_per_round"):
        BandMFFactory.from_stream(_mechanism(), clients_per_round=clients)


@pytest.mark.parametrize(
    ("other", "specs"),
    [
        ({}, SPECS[:1]),  # Leaves the bias to the padding.
        ({}, [tf.TensorSpec((2, 2), tf.float32)]),
        ({"noise_multiplier": 0.1}, SPECS),
        ({"strategy": identity(NUM_ROUNDS)}, SPECS),
    ],
    ids=["fewer_tensors", "other_shapes", "other_noise", "other_strategy"],
)
def test_rows_of_another_plan_or_layout_are_refused(other, specs):
    factory = BandMFFactory.from_stream(_mechanism(), clients_per_round=4)
    state = factory.create(VALUE_TYPE).initialize()
    with pytest.raises(BandMFError, match="another mechanism or to records of other shapes"):
        NoiseSupply(_mechanism(**other), specs).supply(state)


def test_a_row_smuggled_in_by_another_layout_has_no_zeros_for_noise():
    """Should somebody put a row into the state by hand, what it does not cover is NaN."""
    factory = BandMFFactory.from_stream(_mechanism(), clients_per_round=4)
    process = factory.create(VALUE_TYPE)
    mine, theirs = process.initialize(), factory.create(VALUE_TYPE[0]).initialize()
    theirs = NoiseSupply(_mechanism(), SPECS[0]).supply(theirs)
    paths = dict(tree.flatten_with_path(theirs))
    forged = tree.map_structure_with_path(
        lambda path, leaf: paths[path] if path[-1] in ("row", "row_step") else leaf, mine
    )
    result = process.next(forged, UPDATES).result
    assert np.isnan(result[1])
    assert np.isfinite(result[0]).all()


def test_sums_that_change_clipped_records_are_refused():
    coarse = tff.aggregators.EncodedSumFactory.quantize_above_threshold(quantization_bits=2)
    for make in (BandMFFactory.from_stream, BandMFFactory.in_state):
        with pytest.raises(BandMFError, match="after they were clipped"):
            make(_mechanism(), clients_per_round=2, record_aggregation_factory=coarse)


def _model_fn():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    loss = tf.keras.losses.MeanSquaredError()
    return tff.learning.models.from_keras_model(model, loss, input_spec=BATCHES.element_spec)


BATCHES = tf.data.Dataset.from_tensor_slices(
    collections.OrderedDict(x=np.ones((4, 2), np.float32), y=np.ones((4, 1), np.float32))
).batch(2)
MODEL_SPECS = [tf.TensorSpec((2, 1), tf.float32), tf.TensorSpec((1,), tf.float32)]


def test_mime_which_broadcasts_exact_gradients_is_refused_and_fed_avg_is_not():
    sgd = tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
    factory = BandMFFactory.from_stream(_mechanism(), clients_per_round=2)
    algorithms = tff.learning.algorithms
    mime = algorithms.build_unweighted_mime_lite(_model_fn, sgd, model_aggregator=factory)
    with pytest.raises(BandMFError, match="such as the gradients of Mime"):
        NoiseSupply(_mechanism(), MODEL_SPECS).supply(mime.initialize())
    fed_avg = algorithms.build_unweighted_fed_avg(_model_fn, sgd, model_aggregator=factory)
    state = fed_avg.initialize()
    fed_avg.next(NoiseSupply(_mechanism(), MODEL_SPECS).supply(state), [BATCHES])
    for held in (mime.initialize().client_work, [0.1] * 1000):
        with pytest.raises(BandMFError, match="such as the gradients of Mime"):
            aggregators.check_state(state._replace(client_work=held))


@pytest.mark.parametrize(
    "wrap", [tff.aggregators.zeroing_factory, tff.aggregators.clipping_factory]
)
def test_thresholds_that_adapt_to_clients_are_refused(wrap):
    """They come from exact counts of clients, and decide what clients send from then on."""
    adaptive = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 1.0)
    mechanism = _mechanism()
    for make in (BandMFFactory.from_stream, BandMFFactory.in_state):
        factory = make(mechanism, clients_per_round=2)
        state = wrap(adaptive, factory).create(VALUE_TYPE).initialize()
        with pytest.raises(BandMFError, match=r"adapts to clients.* use a fixed threshold"):
            aggregators.check_state(state)
        aggregators.check_state(wrap(1.0, factory).create(VALUE_TYPE).initialize())
    factory = wrap(adaptive, BandMFFactory.from_stream(mechanism, clients_per_round=2))
    fed_avg = _algorithms(factory)["unweighted"]()
    with pytest.raises(BandMFError, match=r"adapts to clients \(aggregator/"):
        NoiseSupply(mechanism, MODEL_SPECS).supply(fed_avg.initialize())


def test_secure_sums_whose_bounds_adapt_to_clients_are_refused():
    adaptive = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 1.0)
    secure = tff.aggregators.SecureSumFactory(adaptive)
    for make in (BandMFFactory.from_stream, BandMFFactory.in_state):
        factory = make(_mechanism(), clients_per_round=2, record_aggregation_factory=secure)
        with pytest.raises(BandMFError, match="give fixed bounds"):
            factory.create(VALUE_TYPE)


def test_tffs_own_state_manager_writes_noise_for_the_owner_only(tmp_path):
    before = os.umask(0o022)
    try:
        factory = BandMFFactory.in_state(_mechanism(), clients_per_round=2)
        process = factory.create(VALUE_TYPE)
        manager = tff.program.FileProgramStateManager(tmp_path / "states")
        asyncio.run(manager.save(process.initialize(), version=1))
    finally:
        os.umask(before)
    written = list(tmp_path.rglob("*"))
    assert any(path.is_file() for path in written)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in written)


def test_a_row_of_nan_that_version_01_saved_between_rounds_is_left_out():
    row = {"step": np.int64(3), "row": np.zeros(0, np.float32), "row_step": np.int64(-1)}
    state = {"aggregator": row, "model": np.ones(4)}
    saved = tree.flatten({**state, "aggregator": {**row, "row": np.full(16, np.nan)}})
    found = aggregators.mended_leaves(state, saved)
    assert [np.shape(leaf) for leaf in found] == [np.shape(leaf) for leaf in tree.flatten(state)]
    np.testing.assert_array_equal(found[-1], np.ones(4))
    assert (
        len(aggregators.mended_leaves(state, saved[:2])) == 2
    )  # Another state; refused elsewhere.


@pytest.mark.parametrize("make", [BandMFFactory.from_stream, BandMFFactory.in_state])
def test_what_nothing_enforces_is_said_once_and_stands_in_the_state(make, monkeypatch):
    said = []
    monkeypatch.setattr(aggregators.logging, "warning", lambda text, *a: said.append(text % a))
    process = make(_mechanism(), clients_per_round=4).create(VALUE_TYPE)
    state = process.initialize()
    (sentence,) = said
    planned = _mechanism().participation.describe()
    assert f"holds only if {planned}, and nothing here enforces it; admit clients" in sentence
    assert aggregators.participation_basis({"aggregator": state}) == Basis.ASSUMED
    if make == BandMFFactory.from_stream:
        state = NoiseSupply(_mechanism(), SPECS).supply(state)
    after = process.next(state, UPDATES).state
    assert aggregators.participation_basis(after) == Basis.ASSUMED
    kept = make(_mechanism(), clients_per_round=4, participation_enforced=True).create(VALUE_TYPE)
    state = kept.initialize()
    assert aggregators.participation_basis(state) == Basis.ENFORCED
    if make == BandMFFactory.in_state:
        state = aggregators.refresh_noise(state, _mechanism(), SPECS)
        assert aggregators.participation_basis(state) == Basis.ENFORCED
    assert len(said) == 1


@pytest.mark.parametrize("said", ["no", 0, 1, np.bool_(False)])
def test_only_a_bool_says_whether_participation_is_enforced(said):
    """A word is no falsehood to Python: the states of "no" would say that it is enforced."""
    with pytest.raises(BandMFError, match="participation_enforced must be a bool or None"):
        BandMFFactory.from_stream(_mechanism(), clients_per_round=4, participation_enforced=said)
