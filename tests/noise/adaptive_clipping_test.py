"""A clip norm that adapts: no record is longer than planned, and nothing but releases decides."""

from __future__ import annotations

import itertools

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.noise import query
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping, QuantileNorm
from bandmf_tf.noise.stream import NoiseStream, RowLayout
from cases import make_mechanism

CLIP = 2.0
NUM_ROUNDS = 40
SPECS = {"kernel": tf.TensorSpec([2, 2]), "bias": [tf.TensorSpec([3])]}
DIMENSION = 7
TINY = 1e-6  # A noise multiplier that leaves sums as they are, for all that is compared.
PIN = 3


def _mechanism(noise_multiplier=TINY, l2_norm_clip=CLIP, num_rounds=NUM_ROUNDS):
    strategy = ToeplitzStrategy(np.array([1.0, 0.5, 0.375]), num_rounds)
    return make_mechanism(
        strategy, MinSeparation(3), noise_multiplier=noise_multiplier, l2_norm_clip=l2_norm_clip
    )


def _query(settings=None, expected=4, mechanism=None, specs=SPECS, **kwargs):
    return query.CorrelatedNoiseSumQuery.from_mechanism(
        mechanism or _mechanism(),
        specs,
        adaptive_clipping=settings or AdaptiveClipping(),
        expected_records=expected,
        **{"pinned_seed": PIN, **kwargs},
    )


def _record(norm, seed=0):
    vector = np.random.default_rng(seed).normal(size=DIMENSION)
    return _unflat((vector * norm / np.linalg.norm(vector)).astype(np.float32))


def _unflat(vector):
    return {"kernel": vector[3:].reshape(2, 2), "bias": [vector[:3]]}


def _flat(structure):
    return np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(structure)])


def _round(dp_query, state, records):
    params = dp_query.derive_sample_params(state)
    sample = dp_query.initial_sample_state(records[0])
    for record in records:
        sample = dp_query.accumulate_record(params, sample, record)
    result, state, event = dp_query.get_noised_result(sample, state)
    return _flat(result), state, event


@pytest.mark.parametrize(
    "value",
    [0.0, 1e-45, 1e-30, 1e-3, CLIP, 2.0000002, 1e19, 3e38, np.nan, np.inf],
)
@pytest.mark.parametrize("vote_weight", [0.1, 0.5])
def test_no_record_is_longer_than_the_clip_norm_whatever_it_is(value, vote_weight):
    dp_query = _query(AdaptiveClipping(vote_weight=vote_weight))
    norms = [CLIP, 1e-6, 3.7e5, 0.0, -1.0, 1e30, np.nan, np.inf]
    for norm, count in itertools.product(norms, (1, DIMENSION)):
        vector = np.zeros(DIMENSION, np.float32)
        vector[:count] = value
        sample = dp_query.preprocess_record(tf.constant(norm, tf.float32), _unflat(vector))
        summed = np.append(_flat(sample["sum"]), sample["votes"]).astype(np.float64)
        assert np.linalg.norm(summed) <= CLIP  # Not a rounding error more. NaN fails, too.
        if not np.isfinite(value):
            np.testing.assert_array_equal(summed, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_no_record_of_many_values_is_longer_than_the_clip_norm(seed):
    rng = np.random.default_rng(seed)
    specs = [tf.TensorSpec([5000])]
    record = [rng.normal(size=5000).astype(np.float32)]
    dp_query = _query(specs=specs, mechanism=_mechanism(l2_norm_clip=0.7))
    for norm in np.linalg.norm(record[0]) * np.exp(rng.normal(scale=1e-4, size=40)):
        sample = dp_query.preprocess_record(tf.constant(norm, tf.float32), record)
        summed = np.append(sample["sum"][0], sample["votes"]).astype(np.float64)
        assert 0.699 < np.linalg.norm(summed) <= 0.7


@pytest.mark.parametrize("seed", range(2))
def test_releases_are_those_of_the_mechanism_by_brute_force(seed):
    """All in float64 from the pinned noise: normalised records, one row, one update of S."""
    rng = np.random.default_rng(seed)
    mechanism = _mechanism(noise_multiplier=0.5)
    settings = AdaptiveClipping(target_quantile=0.3, learning_rate=0.4, vote_weight=0.2)
    dp_query = _query(settings, 5, mechanism)
    rows = NoiseStream(
        mechanism.strategy, mechanism.stddev, query.row_specs(SPECS, settings), pinned_seed=PIN
    )
    state, norm = dp_query.initial_global_state(), CLIP
    share = np.sqrt(1 - 0.2**2)
    for _ in range(12):
        records = [_record(10 ** rng.uniform(-1, 1.5), rng.integers(99)) for _ in range(4)]
        lengths = [np.linalg.norm(_flat(r).astype(float)) for r in records]
        release = _flat(rows.next()).astype(float)
        for record, length in zip(records, lengths, strict=True):
            vote = 0.2 if length <= norm else -0.2
            release += CLIP * np.append(share * _flat(record) / max(length, norm), vote)
        result, state, event = _round(dp_query, state, records)
        np.testing.assert_allclose(result, release[:-1] * norm / (share * CLIP), atol=2e-5)
        fraction = np.clip(0.5 + release[-1] / (2 * 0.2 * CLIP * 5), 0, 1)
        norm *= np.exp(-0.4 * (fraction - 0.3))
        np.testing.assert_allclose(state["l2_norm_clip"], norm, rtol=1e-5)
        assert isinstance(event, dp_accounting.GaussianDpEvent)
    fixed = query.CorrelatedNoiseSumQuery.from_mechanism(mechanism, SPECS)
    assert dp_query.run_event == fixed.run_event


def test_noise_has_the_standard_deviation_of_the_clip_norm_and_one_of_it_would_be_noticed():
    """Of results over S / a it is that of the mechanism; without votes being paid for it is not."""
    mechanism = _mechanism(noise_multiplier=1.5)
    specs = [tf.TensorSpec([20_000])]
    dp_query = _query(AdaptiveClipping(vote_weight=0.5), mechanism=mechanism, specs=specs)
    state = dp_query.initial_global_state()
    state["l2_norm_clip"] = tf.constant(8.0)
    result, _, _ = _round(dp_query, state, [[np.zeros(20_000, np.float32)]])
    expected = 1.5 * 8.0 / np.sqrt(0.75)
    assert np.std(result) == pytest.approx(expected, rel=0.02)
    assert np.std(result) != pytest.approx(1.5 * 8.0, rel=0.1)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.01, 50.0])
def test_it_converges_to_the_quantile_of_the_norms(quantile, start):
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(size=64))
    tracker = QuantileNorm(AdaptiveClipping(quantile), start)
    norm = tf.constant(tracker.initial)
    for _ in range(200):
        clipped = tf.constant(np.sum(norms > float(norm)))
        votes = tracker.votes(tf.constant(64), clipped, tf.constant(0))
        _, norm = tracker.read([], votes, norm, 64)
    low, high = np.quantile(norms, [quantile - 0.05, quantile + 0.05])
    assert low <= float(norm) <= high


def test_the_norm_moves_as_that_of_tensorflow_privacy():
    tfp = pytest.importorskip("tensorflow_privacy")
    settings = AdaptiveClipping(target_quantile=0.7, learning_rate=0.3)
    theirs = tfp.QuantileAdaptiveClipSumQuery(CLIP, 0.0, 0.7, 0.3, 0.0, 3.0, True)
    ours = _query(settings, 3.0)
    rng = np.random.default_rng(1)
    state, their_state = ours.initial_global_state(), theirs.initial_global_state()
    for number in range(30):  # As many records as expected, more, and fewer.
        records = [_record(np.exp(rng.normal()), number) for _ in range(1 + number % 5)]
        result, state, _ = _round(ours, state, records)
        their_result, their_state, _ = _round(theirs, their_state, records)
        np.testing.assert_allclose(result, their_result, atol=1e-4)
        np.testing.assert_allclose(
            state["l2_norm_clip"], their_state.sum_state.l2_norm_clip, rtol=1e-5
        )


def test_both_forms_give_the_same_results_and_a_restored_state_goes_on_bit_for_bit():
    mechanism, settings = _mechanism(noise_multiplier=0.3), AdaptiveClipping()
    ours = _query(settings, 3, mechanism, block_length=1)
    supplied = query.SuppliedNoiseSumQuery.from_mechanism(
        mechanism, SPECS, adaptive_clipping=settings, expected_records=3
    )
    specs = query.row_specs(SPECS, settings)
    stream = NoiseStream(mechanism.strategy, mechanism.stddev, specs, pinned_seed=PIN)
    states = [ours.initial_global_state(), supplied.initial_global_state()]
    saved = None
    for number in range(8):
        records = [_record(number + 0.5 + i, number) for i in range(3)]
        states[1] = supplied.supply_from(stream, states[1])
        results = []
        for i, dp_query in enumerate((ours, supplied)):
            result, states[i], _ = _round(dp_query, states[i], records)
            results.append(result)
        np.testing.assert_allclose(*results, rtol=1e-5)
        assert float(states[0]["l2_norm_clip"]) == float(states[1]["l2_norm_clip"])
        if number == 3:
            saved = tf.nest.map_structure(lambda t: t.numpy(), states[0])
    for number in range(4, 8):
        records = [_record(number + 0.5 + i, number) for i in range(3)]
        again, saved, _ = _round(ours, saved, records)
    np.testing.assert_array_equal(again, results[0])
    refreshed = ours.refresh(states[0])
    assert list(refreshed) == list(states[0])
    assert float(refreshed["l2_norm_clip"]) == float(states[0]["l2_norm_clip"])


def test_a_round_without_its_row_gives_nan_and_does_not_move_the_norm():
    dp_query = query.SuppliedNoiseSumQuery.from_mechanism(
        _mechanism(), SPECS, adaptive_clipping=AdaptiveClipping(), expected_records=3
    )
    state = dp_query.initial_global_state()
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs the row of noise"):
        _round(dp_query, state, [_record(1.0)])

    @tf.function
    def nothing():
        return dp_query.get_noised_result(dp_query.initial_sample_state(), state)[:2]

    result, after = nothing()
    assert np.isnan(_flat(result)).all()
    assert (float(after["l2_norm_clip"]), int(after["step"])) == (CLIP, 0)


@pytest.mark.parametrize("edited", [np.nan, np.inf, -np.inf])
def test_an_edited_norm_that_is_no_number_gives_no_result(edited):
    dp_query = _query()
    state = dp_query.initial_global_state()
    state["l2_norm_clip"] = tf.constant(edited, tf.float32)
    result, state, _ = _round(dp_query, state, [_record(1.0)])
    assert np.isnan(result).all()
    assert np.isnan(_round(dp_query, state, [_record(1.0)])[0]).all()


@pytest.mark.parametrize(("edited", "used"), [(0.0, CLIP / 1e6), (-5.0, CLIP / 1e6), (9e30, 2e6)])
def test_an_edited_norm_far_away_is_brought_back_into_its_range(edited, used):
    dp_query = _query(AdaptiveClipping(learning_rate=1e-9))
    state = dp_query.initial_global_state()
    state["l2_norm_clip"] = tf.constant(edited, tf.float32)
    _, state, _ = _round(dp_query, state, [_record(1.0)])
    assert float(state["l2_norm_clip"]) == pytest.approx(used)


def test_one_record_moves_the_norm_by_its_share_at_most():
    """Also a liar: by exp(learning_rate / expected_records)."""
    ends = []
    for record in (_record(1e-3), _record(1e9), _unflat(np.full(DIMENSION, np.nan, np.float32))):
        dp_query = _query(expected=10)
        others = [_record(1.0 + i, i) for i in range(9)]
        _, state, _ = _round(dp_query, dp_query.initial_global_state(), [record, *others])
        ends.append(float(state["l2_norm_clip"]))
    assert max(ends) / min(ends) == pytest.approx(np.exp(0.2 / 10), rel=1e-4)


def test_compiled_by_xla_the_same_comes_out():
    dp_query = _query(mechanism=_mechanism(noise_multiplier=0.5))
    state = dp_query.initial_global_state()
    record = _record(9.0)

    def summed(params):
        return dp_query.preprocess_record(params, record)

    params = dp_query.derive_sample_params(state)
    compiled = tf.function(summed, jit_compile=True)(params)
    for one, other in zip(*map(tf.nest.flatten, (compiled, summed(params))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_metrics_show_the_norm_of_the_next_round_without_counts_too():
    dp_query = _query(count_records=False)
    _, state, _ = _round(dp_query, dp_query.initial_global_state(), [_record(1.0)])
    metrics = dp_query.derive_metrics(state)
    assert sorted(metrics) == ["l2_norm_clip", "step"]
    assert float(metrics["l2_norm_clip"]) == float(state["l2_norm_clip"]) != CLIP


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveClipping(target_quantile=1.0),
        lambda: AdaptiveClipping(learning_rate=0.0),
        lambda: AdaptiveClipping(learning_rate=3.0),
        lambda: AdaptiveClipping(vote_weight=0.6),
        lambda: AdaptiveClipping(vote_weight=0.0),
        lambda: _query(expected=None),
        lambda: _query(expected=0),
        lambda: _query(settings={"target_quantile": 0.5}),
        lambda: _query(mechanism=_mechanism(l2_norm_clip=1e13)),
        lambda: _query().sample_of_sum(_record(1.0), tf.ones([3])),
        lambda: query.CorrelatedNoiseSumQuery.from_mechanism(
            _mechanism(), SPECS, expected_records=4
        ),
    ],
)
def test_what_cannot_adapt_is_refused(make):
    with pytest.raises(BandMFError):
        make()


def test_a_row_has_one_coordinate_more():
    dp_query = _query()
    assert dp_query.stream.layout.dimension == RowLayout(SPECS).dimension + 1
