"""Rounds of TFF with a clip norm that adapts: both factories, with the noise that was planned."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.federated import AdaptiveClipping, BandMFFactory, NoiseSupply, aggregators, runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.noise import query
from cases import make_mechanism

NUM_ROUNDS = 6
VALUE_TYPE = tff.types.to_type([tff.TensorType(np.float32, (3,)), tff.TensorType(np.float32)])
SPECS = aggregators.value_specs(VALUE_TYPE)
SETTINGS = AdaptiveClipping(target_quantile=0.4, learning_rate=0.5)
OPTIONS = {"clients_per_round": 3, "adaptive_clipping": SETTINGS}
UPDATES = [
    [np.float32([0.1, 0.2, -0.3]), np.float32(0.5)],
    [np.float32([9, 0, 0]), np.float32(0)],
    [np.float32([np.nan, 0, 0]), np.float32(0)],  # Of a client that lies, or fails.
]


@pytest.fixture(autouse=True, scope="module")
def _local_context():
    runtime.set_local_context()
    yield
    runtime.end_workers()


def _mechanism():
    strategy = ToeplitzStrategy(np.array([1.0, 0.5, 0.25]), NUM_ROUNDS)
    return make_mechanism(strategy.to_banded(), MinSeparation(3), noise_multiplier=0.2)


def _norm(state):
    return float(state.query_state.numerator_state["l2_norm_clip"])


def test_both_factories_do_what_the_query_does_and_the_plan_ends():
    mechanism = _mechanism()
    fed = BandMFFactory.from_stream(mechanism, **OPTIONS).create(VALUE_TYPE)
    alone = BandMFFactory.in_state(mechanism, **OPTIONS, pinned_seed=5).create(VALUE_TYPE)
    supply = NoiseSupply(
        mechanism, SPECS, block_length=1, pinned_seed=5, adaptive_clipping=SETTINGS
    )
    oracle = query.CorrelatedNoiseSumQuery.from_mechanism(
        mechanism,
        SPECS,
        block_length=1,
        pinned_seed=5,
        adaptive_clipping=SETTINGS,
        expected_records=3,
    )
    states = [fed.initialize(), alone.initialize()]
    expected_state = oracle.initial_global_state()
    for _ in range(NUM_ROUNDS):
        params = oracle.derive_sample_params(expected_state)
        sample = oracle.initial_sample_state()
        for update in UPDATES:
            sample = oracle.accumulate_record(params, sample, update)
        expected, expected_state, _ = oracle.get_noised_result(sample, expected_state)
        states[0] = supply.supply(states[0])
        aggregators.check_state(states[1])
        for i, process in enumerate((fed, alone)):
            output = process.next(states[i], UPDATES)
            states[i] = output.state
            for found, value in zip(output.result, expected, strict=True):
                np.testing.assert_allclose(found, value / 3.0, rtol=1e-4, atol=1e-5)
            assert _norm(output.state) == pytest.approx(float(expected_state["l2_norm_clip"]))
            metrics = output.measurements["dp_query_metrics"]
            assert float(metrics["l2_norm_clip"]) == _norm(output.state)
            assert metrics["non_finite_records"] == 1
    assert _norm(states[0]) != 1.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="all rounds are used"):
        supply.supply(states[0])
    with pytest.raises(Exception, match="all rounds are used"):
        alone.next(states[1], UPDATES)


def test_supplies_and_states_of_a_fixed_norm_do_not_pass_for_those_of_one_that_adapts():
    mechanism = _mechanism()
    adaptive = BandMFFactory.from_stream(mechanism, **OPTIONS).create(VALUE_TYPE)
    fixed = BandMFFactory.from_stream(mechanism, clients_per_round=3).create(VALUE_TYPE)
    with pytest.raises(BandMFError, match="adaptive_clipping of the aggregator"):
        NoiseSupply(mechanism, SPECS).supply(adaptive.initialize())
    with pytest.raises(BandMFError, match="adaptive_clipping of the aggregator"):
        NoiseSupply(mechanism, SPECS, adaptive_clipping=SETTINGS).supply(fixed.initialize())


def test_a_refreshed_state_draws_new_noise_and_keeps_its_norm():
    mechanism = _mechanism()
    process = BandMFFactory.in_state(mechanism, **OPTIONS).create(VALUE_TYPE)
    state = process.next(process.initialize(), UPDATES).state
    fresh = aggregators.refresh_noise(state, mechanism, SPECS)
    assert _norm(fresh) == _norm(state) != 1.0
    expected, found = (process.next(s, UPDATES).result for s in (state, fresh))
    assert not np.allclose(expected[0], found[0])


def test_it_drops_into_federated_averaging_and_secure_sums():
    def keras_model():
        return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])

    spec = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    model = tff.learning.models.functional_model_from_keras(
        keras_model, tf.keras.losses.MeanSquaredError(), spec
    )
    mechanism = _mechanism()
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model,
        tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=BandMFFactory.from_stream(mechanism, **OPTIONS),
    )
    specs = [tf.TensorSpec([2, 1]), tf.TensorSpec([1])]
    supply = NoiseSupply(mechanism, specs, adaptive_clipping=SETTINGS)
    examples = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    state, norms = process.initialize(), []
    for _ in range(2):
        clients = [tf.data.Dataset.from_tensor_slices(examples).batch(2)] * 3
        output = process.next(supply.supply(state), clients)
        state = output.state
        norms.append(_norm(state.aggregator))
    assert len({1.0, *norms}) == 3
    assert all(np.isfinite(w).all() for w in process.get_model_weights(state).trainable)
    secure = tff.aggregators.SecureSumFactory(1.0, -1.0)
    made = BandMFFactory.from_stream(mechanism, **OPTIONS, record_aggregation_factory=secure)
    plain = BandMFFactory.from_stream(mechanism, **OPTIONS)
    one, other = (f.create(VALUE_TYPE).initialize.type_signature for f in (made, plain))
    assert str(one) == str(other)
