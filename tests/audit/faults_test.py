"""Twelve faults, each planted into the library by a small patch, are all found."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.audit import noise_paths, statistics
from bandmf_tf.audit.attack import SIGNIFICANCE, Canaries, Target, attack
from bandmf_tf.audit.paths import audit
from bandmf_tf.factorization import sensitivity
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras import batches as pipelines
from bandmf_tf.keras import trials
from bandmf_tf.noise import recurrence, source
from bandmf_tf.noise.query import CorrelatedNoiseSumQuery, SuppliedNoiseSumQuery
from bandmf_tf.noise.stream import NoiseStream, RowLayout
from bandmf_tf.runs.audit_record import CONSISTENT, VIOLATES
from cases import make_mechanism
from noise_cases import pin_entropy

ROUNDS, SEPARATION = 12, 4
STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5, 0.25, 0.2]), ROUNDS).to_banded()
NOISE = {"noise_multiplier": 1.2, "l2_norm_clip": 0.7}


def _mechanism(**changes):
    return make_mechanism(STRATEGY, MinSeparation(SEPARATION), **{**NOISE, **changes})


def _sampled_mechanism():
    sampling = PoissonSampling(ROUNDS, SEPARATION, 0.5)
    return make_mechanism(STRATEGY, sampling=sampling, **NOISE)


TARGET = Target(_mechanism(), ROUNDS)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch):
    pin_entropy(monkeypatch)


def _verdict(path, coordinates=2_048, mechanism=None, seed=1):
    """Returns the verdict of an audit of one path, with its p-value."""
    record, _ = audit(
        mechanism or TARGET.mechanism, paths=[path], coordinates=coordinates, seed=seed
    )
    assert (record.p_value <= SIGNIFICANCE) == (record.verdict == VIOLATES)
    return record


def _fitted_verdict(mechanism):
    return _verdict("keras", 512, mechanism).verdict


def _batches_verdict():
    return _verdict("batches", 400, _sampled_mechanism()).verdict


class TestNoise:
    def test_1_noise_that_is_a_tenth_too_small(self, monkeypatch):
        drawn = source.normal_rows
        monkeypatch.setattr(source, "normal_rows", lambda *args: 0.9 * drawn(*args))
        record = _verdict("stream", coordinates=65_536)
        assert record.verdict == VIOLATES
        # Not only another noise than was claimed: less privacy than was claimed.
        tests = {test.name: test.p_value for test in record.paths[0].tests}
        assert tests["bound"] < 1e-3
        assert record.paths[0].mu_lower > record.claimed_mu

    def test_2_one_row_that_is_repeated(self, monkeypatch):
        drawn = source.normal_rows

        def repeating(seed, first_row, *args):
            rows = drawn(seed, first_row, *args)
            again = tf.concat([rows[:1], rows[:1], rows[2:]], axis=0)
            return tf.where(tf.equal(first_row, 0), again, rows)

        monkeypatch.setattr(source, "normal_rows", repeating)
        record = _verdict("stream")
        assert record.verdict == VIOLATES
        assert "row" in record.paths[0].worst.found

    def test_2_a_released_row_that_is_repeated_gives_the_canary_away(self, monkeypatch):
        released = NoiseStream.next_in_graph
        rows = []

        def repeating(stream):
            row = released(stream)
            rows.append(rows[-1] if len(rows) % ROUNDS == SEPARATION else row)
            return rows[-1]

        monkeypatch.setattr(NoiseStream, "next_in_graph", repeating)
        record = _verdict("stream")
        assert record.verdict == VIOLATES
        # The difference of two releases has no noise, and the adapted attack finds that.
        assert record.paths[0].mu_lower > 2 * record.claimed_mu

    def test_3_a_band_that_is_dropped(self, monkeypatch):
        made = recurrence.make_recurrence

        def dropping(strategy, *args):
            fewer = ToeplitzStrategy(strategy.materialize()[:3, 0], ROUNDS).to_banded()
            return made(fewer, *args)

        monkeypatch.setattr(recurrence, "make_recurrence", dropping)
        assert _verdict("stream").verdict == VIOLATES
        assert _verdict("query").verdict == VIOLATES

    def test_4_a_restored_stream_that_repeats_rows(self, monkeypatch):
        pinned = functools.partial(NoiseStream, pinned_seed=7)
        monkeypatch.setattr(noise_paths, "NoiseStream", pinned)
        assert _verdict("stream_restored").verdict == VIOLATES

    def test_4_a_seed_that_all_runs_share(self, monkeypatch):
        monkeypatch.setattr(source, "fresh_seed", lambda: np.array([1, 2], np.int64))
        assert _verdict("stream").verdict == VIOLATES
        assert _verdict("stream_restored").verdict == VIOLATES

    @pytest.mark.parametrize("offset", [-1, 1])
    def test_9_a_supply_that_is_off_by_one(self, monkeypatch, offset):
        last = {}

        def shifting(query, stream, state):
            """Supplies the row of the round after, or of the round before."""
            row = stream.next_in_graph()
            if offset > 0 and state["step"] == 0:
                row = stream.next_in_graph()
            row, last[id(stream)] = row if offset > 0 else last.get(id(stream), row), row
            return query.supply_row(state, row, int(state["step"]))

        longer = ToeplitzStrategy(STRATEGY.materialize()[:4, 0], ROUNDS + 1)
        mechanism = make_mechanism(longer.to_banded(), MinSeparation(SEPARATION), **NOISE)
        monkeypatch.setattr(SuppliedNoiseSumQuery, "supply_from", shifting)
        record, _ = audit(mechanism, paths=["query_supplied"], rounds=ROUNDS, coordinates=4_096)
        assert record.verdict == VIOLATES

    @pytest.mark.parametrize(("path", "last"), [("query", "bias"), ("query_adaptive", "vote")])
    def test_10_a_bias_or_a_vote_without_noise(self, monkeypatch, path, last):
        unpack = RowLayout.unpack

        def forgetting(layout, row):
            *tensors, last = tf.nest.flatten(unpack(layout, row))
            return tf.nest.pack_sequence_as(layout.specs, [*tensors, tf.zeros_like(last)])

        monkeypatch.setattr(RowLayout, "unpack", forgetting)
        record = _verdict(path, coordinates=512)
        assert record.verdict == VIOLATES
        assert record.paths[0].worst.name.endswith(f"of {last}")

    def test_a_record_that_is_as_long_as_the_clip_norm_has_grown(self, monkeypatch):
        clipped = CorrelatedNoiseSumQuery.preprocess_record

        def growing(query, params, record):
            sample = clipped(query, params, record)
            sample["sum"] = [tensor * params / query.l2_norm_clip for tensor in sample["sum"]]
            return sample

        monkeypatch.setattr(CorrelatedNoiseSumQuery, "preprocess_record", growing)
        record = _verdict("query_adaptive", coordinates=4_096)
        assert record.verdict == VIOLATES
        assert record.paths[0].worst.name == "signal in kernel"

    def test_12_a_sensitivity_that_is_wrong(self, monkeypatch):
        with monkeypatch.context() as patched:
            once = lambda self, strategy: sensitivity.single_participation(strategy)  # noqa: E731
            patched.setattr(MinSeparation, "sensitivity", once)
            mechanism = _mechanism()
        record = _verdict("stream", mechanism=mechanism)
        assert record.verdict == VIOLATES
        assert record.paths[0].worst.name == "signal in kernel"
        assert record.paths[0].mu_lower > record.claimed_mu


class TestTraining:
    def test_5_a_clip_that_one_layer_ignores(self, monkeypatch):
        clipped = trials.layerwise_clipped_sum

        def ignoring(*args, **kwargs):
            found = clipped(*args, **kwargs)
            gradients = list(found.gradients)
            gradients[2] *= 2.0  # The second kernel's, as if clipped to twice the norm.
            return dataclasses.replace(found, gradients=gradients)

        monkeypatch.setattr(trials, "layerwise_clipped_sum", ignoring)
        assert _fitted_verdict(TARGET.mechanism) == VIOLATES

    def test_6_padding_that_is_counted(self, monkeypatch):
        clipped = trials.layerwise_clipped_sum

        def counting(*args, mask, **kwargs):
            return clipped(*args, mask=tf.ones_like(mask), **kwargs)

        monkeypatch.setattr(trials, "layerwise_clipped_sum", counting)
        assert _fitted_verdict(_sampled_mechanism()) == VIOLATES


class TestBatches:
    def test_batches_as_they_are_violate_nothing(self):
        assert _batches_verdict() == CONSISTENT

    def test_7_a_part_that_is_used_again(self, monkeypatch):
        def reused(self, parts, i):
            return parts[(i // 2) % self.scheme.num_parts]

        monkeypatch.setattr(pipelines.Batches, "_part", reused)
        assert _batches_verdict() == VIOLATES

    def test_8_a_sampling_seed_that_is_always_the_same(self, monkeypatch):
        monkeypatch.setattr(pipelines.secrets, "token_bytes", lambda count: bytes(range(count)))
        assert _batches_verdict() == VIOLATES

    def test_8_a_draw_that_every_visit_repeats(self, monkeypatch):
        derived = pipelines._derived

        def constant(seed, *data):
            is_draw = isinstance(data[0], int) and data[0] == pipelines._DRAW
            return derived(seed, *(data[:1] if is_draw else data))

        monkeypatch.setattr(pipelines, "_derived", constant)
        assert _batches_verdict() == VIOLATES

    def test_11_an_example_that_takes_part_twice(self, monkeypatch):
        drawn = pipelines.PoissonBatches._draw

        def twice(self, parts, i):
            indices, is_example = drawn(self, parts, i)
            first = tf.boolean_mask(indices, is_example)[0]
            is_first = tf.equal(tf.cumsum(tf.cast(is_example, tf.int32)), 2) & is_example
            return tf.where(is_first, first, indices), is_example

        monkeypatch.setattr(pipelines.PoissonBatches, "_draw", twice)
        assert _batches_verdict() == VIOLATES


def test_a_hundred_independent_runs_violate_nothing():
    """Coordinates are independent, so blocks of one wide stream are runs of many narrow ones."""
    width, count = 512, 100
    rows = noise_paths._rows(noise_paths._stream(TARGET, [count * width]), ROUNDS)
    smallest = 1.0
    for number, noise in enumerate(np.split(rows, count, axis=1)):
        canaries = Canaries.draw(TARGET, width, np.random.default_rng(number))
        found = attack(TARGET, [canaries.observed(canaries.sums() + noise)])
        p_value = statistics.all_of([test.p_value for test in found.tests])
        assert p_value > SIGNIFICANCE
        smallest = min(smallest, p_value)
    assert smallest < 0.5  # They do look at something.
