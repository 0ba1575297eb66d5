from __future__ import annotations

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity
from bandmf_tf.keras import batches as sampling
from bandmf_tf.keras.batches import SamplingError, check_sampling, cyclic_scheme, make_batches
from bandmf_tf.mechanisms.mechanism import Mechanism

NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE = 60, 4, 10, 103
PART_SIZE = DATASET_SIZE // NUM_PARTS

X = np.arange(DATASET_SIZE, dtype=np.float32)[:, None] + 1.0
Y = np.arange(DATASET_SIZE)

SCHEMES = {
    "poisson": PoissonSampling.from_sizes(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE),
    "fixed size": FixedSizeSampling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE),
    "reshuffled": Shuffling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE, reshuffled=True),
    "one order": Shuffling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE, reshuffled=False),
}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def _rounds(batches, *arguments, **options):
    """Returns the examples of every element without their padding."""
    return [
        y[mask > 0] for _, y, mask in batches.dataset(*arguments, **options).as_numpy_iterator()
    ]


def _mechanism(strategy, participation, sampling=None):
    return Mechanism.create(
        strategy,
        workloads.prefix_sum(strategy.num_rounds),
        participation,
        noise_multiplier=2.0,
        l2_norm_clip=1.0,
        delta=1e-5,
        sampling=sampling,
    )


@each_scheme
def test_round_i_uses_part_i_modulo_the_number_of_parts(scheme):
    rounds = _rounds(make_batches((X, Y), scheme, pinned_seed=1))
    assert len(rounds) == NUM_ROUNDS
    parts = [set(np.concatenate(rounds[j::NUM_PARTS])) for j in range(NUM_PARTS)]
    assert all(0 < len(part) <= PART_SIZE for part in parts)
    assert len(set.union(*parts)) == sum(map(len, parts))  # No example is in two parts.


@each_scheme
def test_no_example_is_twice_in_a_batch(scheme):
    for batch in _rounds(make_batches((X, Y), scheme, pinned_seed=2)):
        assert len(set(batch)) == len(batch)


@each_scheme
def test_examples_take_part_as_seldom_as_the_scheme_says(scheme):
    rounds = _rounds(make_batches((X, Y), scheme, pinned_seed=3))
    for example in range(DATASET_SIZE):
        times = np.flatnonzero([example in batch for batch in rounds])
        assert len(times) <= scheme.max_participations
        assert np.all(np.diff(times) >= NUM_PARTS)


@each_scheme
def test_padding_is_zero_and_masked(scheme):
    batches = make_batches((X, Y), scheme, pinned_seed=4)
    for x, y, mask in batches.dataset().as_numpy_iterator():
        assert len(x) == len(y) == len(mask) == batches.padded_batch_size
        np.testing.assert_array_equal(x[:, 0], np.where(mask > 0, y + 1, 0))
        assert set(np.unique(mask)) <= {0.0, 1.0}


@each_scheme
def test_a_pipeline_resumes_at_any_round(scheme):
    batches = make_batches((X, Y), scheme, pinned_seed=5)
    position = tf.Variable(0, dtype=tf.int64)
    dataset = batches.dataset(position)
    whole = [tuple(t.numpy() for t in element) for element in dataset]
    position.assign(37)  # Read when iteration starts, not when the dataset was made.
    rest = [tuple(t.numpy() for t in element) for element in dataset]
    assert len(rest) == NUM_ROUNDS - 37
    for got, want in zip(rest, whole[37:], strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@each_scheme
def test_pieces_make_up_the_batches(scheme):
    batches = make_batches((X, Y), scheme, pinned_seed=6)
    whole = _rounds(batches)
    pieces = _rounds(batches, 1, pieces=3, first_piece=1)
    assert len(pieces) == 3 * (NUM_ROUNDS - 1) - 1
    np.testing.assert_array_equal(np.concatenate(pieces[2:5]), whole[2])


@each_scheme
def test_seeds_are_fresh_unless_pinned(scheme):
    pinned = [_rounds(make_batches((X, Y), scheme, pinned_seed=7)) for _ in range(2)]
    fresh = [_rounds(make_batches((X, Y), scheme)) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*pinned, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(*fresh, strict=True))


def test_a_checkpoint_brings_the_partition_back(tmp_path):
    scheme = SCHEMES["one order"]
    first, second = make_batches((X, Y), scheme), make_batches((X, Y), scheme)
    dataset = second.dataset()  # Made before the seed is restored.
    assert first.fingerprint() != second.fingerprint()
    path = tf.train.Checkpoint(batches=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(batches=second).read(path).assert_consumed()
    assert first.fingerprint() == second.fingerprint()
    for (_, got, _), want in zip(dataset, _rounds(first), strict=True):
        np.testing.assert_array_equal(got, want)


def test_indices_tell_who_is_in_a_batch():
    batches = make_batches((X, Y), SCHEMES["poisson"], pinned_seed=8)
    for i, batch in enumerate(_rounds(batches)[:8]):
        np.testing.assert_array_equal(batches.indices(i), batch)


@functools.cache
def _table(scheme):
    """Returns who is in which batch, `[rounds, examples]`."""
    batches = make_batches(np.arange(TestInclusion.SIZE), scheme, pinned_seed=9)
    table = np.zeros((scheme.num_rounds, TestInclusion.SIZE))
    for i, (y, mask) in enumerate(batches.dataset().as_numpy_iterator()):
        table[i, y[mask > 0]] = 1
    return table


class TestInclusion:
    """Each example of a part is in a batch with the stated probability, and not with another."""

    ROUNDS = 4000
    PROBABILITY = 0.3
    SIZE = 40

    def _p_value(self, table, probability):
        """Chi-squared over examples; exact enough at these counts."""
        rounds = len(table)
        deviation = (table.sum(0) - rounds * probability) / np.sqrt(
            rounds * probability * (1 - probability)
        )
        return scipy.stats.chi2.sf(np.sum(deviation**2), len(deviation))

    def test_poisson_samples_have_the_stated_probability(self):
        table = _table(PoissonSampling(self.ROUNDS, 1, self.PROBABILITY))
        assert self._p_value(table, self.PROBABILITY) > 1e-3
        assert self._p_value(table, self.PROBABILITY + 0.02) < 1e-6  # A wrong one is noticed.

    def test_poisson_samples_are_independent_across_examples(self):
        table = _table(PoissonSampling(self.ROUNDS, 1, self.PROBABILITY))
        variance = self.SIZE * self.PROBABILITY * (1 - self.PROBABILITY)

        def p_value(sizes):
            statistic = np.sum((sizes - self.SIZE * self.PROBABILITY) ** 2) / variance
            return 2 * min(
                scipy.stats.chi2.cdf(statistic, self.ROUNDS),
                scipy.stats.chi2.sf(statistic, self.ROUNDS),
            )

        assert p_value(table.sum(1)) > 1e-3
        # Batches of a fixed size have the right probabilities and the wrong variance.
        fixed = _table(FixedSizeSampling(self.ROUNDS, 1, 12, self.SIZE))
        assert p_value(fixed.sum(1)) < 1e-6

    def test_poisson_samples_are_independent_across_rounds(self):
        table = _table(PoissonSampling(self.ROUNDS, 1, self.PROBABILITY))
        centred = table - self.PROBABILITY
        score = np.sum(centred[1:] * centred[:-1]) / (
            self.PROBABILITY * (1 - self.PROBABILITY) * np.sqrt(centred[1:].size)
        )
        assert abs(score) < 4
        repeated = np.sum(centred * centred) / (
            self.PROBABILITY * (1 - self.PROBABILITY) * np.sqrt(centred.size)
        )
        assert repeated > 100  # The same batch in every round is noticed.

    def test_fixed_size_samples_include_every_example_alike(self):
        table = _table(FixedSizeSampling(self.ROUNDS, 1, 12, self.SIZE))
        assert np.all(table.sum(1) == 12)
        assert self._p_value(table, 0.3) > 1e-3
        assert self._p_value(table, 0.32) < 1e-6
        pairs = table.T @ table / self.ROUNDS
        joint = 12 * 11 / (self.SIZE * (self.SIZE - 1))  # Without replacement.
        off_diagonal = pairs[~np.eye(self.SIZE, dtype=bool)]
        deviation = (off_diagonal - joint) / np.sqrt(joint * (1 - joint) / self.ROUNDS)
        assert np.max(np.abs(deviation)) < 5
        assert np.mean(deviation**2) == pytest.approx(1.0, abs=0.25)

    def test_reshuffled_passes_visit_every_example_once_in_fresh_orders(self):
        scheme = Shuffling(400, 2, 5, 40, reshuffled=True)
        rounds = _rounds(make_batches((np.zeros(40), np.arange(40)), scheme, pinned_seed=10))
        passes = [np.concatenate(rounds[0::2][i : i + 4]) for i in range(0, 200, 4)]
        members = set(passes[0])
        assert len(members) == 20
        assert all(set(a_pass) == members for a_pass in passes)
        assert len({tuple(a_pass) for a_pass in passes}) == len(passes)

    def test_the_partition_is_uniform(self):
        scheme = Shuffling(4, 4, 5, 20, reshuffled=False)
        part_of = np.empty((100, 20))
        for seed in range(100):
            parts = make_batches(np.arange(20), scheme, pinned_seed=seed)._partition().numpy()
            part_of[seed, parts.ravel()] = np.repeat(np.arange(4), 5)
        counts = np.array([(part_of == j).sum(0) for j in range(4)])
        statistic = np.sum((counts - 25.0) ** 2 / 25.0)
        # 20 examples in 4 parts: the parts of an example have 3 degrees of freedom.
        assert 1e-4 < scipy.stats.chi2.sf(statistic, 60) < 1 - 1e-4


class TestPoissonPadding:
    def test_overflow_is_improbable_over_all_rounds(self):
        for num_rounds, q, size in [(2000, 0.1, 5000), (10, 0.5, 30), (100_000, 1e-4, 100_000)]:
            scheme = PoissonSampling(num_rounds, 1, q)
            batches = sampling.PoissonBatches(np.zeros(size), scheme, pinned_seed=0)
            tail = scipy.stats.binom.sf(batches.padded_batch_size, size, q)
            assert num_rounds * tail <= sampling.OVERFLOW_PROBABILITY
            assert batches.batch_size == pytest.approx(q * size)

    def test_a_draw_beyond_the_padding_raises_and_is_never_cut(self):
        batches = sampling.PoissonBatches(X, SCHEMES["poisson"], pinned_seed=1)
        batches._padded_batch_size = 5  # As if the bound had been chosen far too small.
        with pytest.raises(tf.errors.InvalidArgumentError, match="larger than the padded batch"):
            list(batches.dataset())

    def test_probability_one_takes_the_whole_part(self):
        scheme = PoissonSampling(8, 4, 1.0)
        batches = make_batches((X, Y), scheme, pinned_seed=1)
        assert batches.padded_batch_size == PART_SIZE
        assert [len(batch) for batch in _rounds(batches)] == [PART_SIZE] * 8

    def test_the_drawn_size_does_not_show_in_shapes(self):
        batches = make_batches((X, Y), SCHEMES["poisson"], pinned_seed=1)
        assert all(spec.shape.is_fully_defined() for spec in batches.dataset().element_spec)


class TestExamples:
    def test_a_function_can_fetch_them(self):
        def fetch(indices):
            return {"id": indices, "square": indices**2}

        batches = make_batches(
            fetch, SCHEMES["fixed size"], dataset_size=DATASET_SIZE, pinned_seed=1
        )
        examples, mask = next(batches.dataset().as_numpy_iterator())
        np.testing.assert_array_equal(examples["square"], examples["id"] ** 2)
        assert mask.shape == (BATCH_SIZE,)

    def test_sample_weights_are_multiplied_by_the_mask(self):
        batches = make_batches((X, Y, Y + 0.5), SCHEMES["poisson"], pinned_seed=1)
        x, y, weight = next(batches.dataset().as_numpy_iterator())
        np.testing.assert_allclose(weight, np.where(x[:, 0] > 0, y + 0.5, 0.0))

    def test_arrays_of_different_lengths_are_refused(self):
        with pytest.raises(ValueError, match="same first axis"):
            make_batches((X, Y[:-1]), SCHEMES["poisson"])

    def test_a_data_set_of_another_size_than_planned_is_refused(self):
        with pytest.raises(SamplingError, match="103 examples"):
            make_batches((X[:-1], Y[:-1]), SCHEMES["fixed size"])

    def test_the_wrong_scheme_is_refused(self):
        with pytest.raises(TypeError, match="PoissonSampling"):
            sampling.PoissonBatches(X, SCHEMES["fixed size"])


class TestAssumptions:
    BANDED = ToeplitzStrategy(np.array([1.0, 0.5, 0.3]), NUM_ROUNDS)

    def test_a_mechanism_gets_the_batches_it_assumes(self):
        scheme = SCHEMES["poisson"]
        mechanism = _mechanism(self.BANDED, scheme.participation, scheme)
        batches = make_batches((X, Y), mechanism)
        assert batches.scheme == scheme
        check_sampling(mechanism, batches.scheme)

    def test_less_sampling_than_planned_is_allowed_and_more_is_not(self):
        scheme = SCHEMES["poisson"]
        mechanism = _mechanism(self.BANDED, scheme.participation, scheme)
        q = scheme.sampling_probability
        check_sampling(mechanism, PoissonSampling(NUM_ROUNDS, NUM_PARTS, q / 2))
        with pytest.raises(SamplingError, match="assumes PoissonSampling"):
            check_sampling(mechanism, PoissonSampling(NUM_ROUNDS, NUM_PARTS, q * 1.01))

    @pytest.mark.parametrize("other", ["fixed size", "reshuffled", "one order"])
    def test_other_batches_than_planned_are_refused(self, other):
        scheme = SCHEMES["poisson"]
        mechanism = _mechanism(self.BANDED, scheme.participation, scheme)
        with pytest.raises(SamplingError, match="assumes PoissonSampling"):
            check_sampling(mechanism, SCHEMES[other])

    def test_fixed_epochs_need_parts_of_the_right_length(self):
        scheme = cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, DATASET_SIZE)
        assert (scheme.num_parts, scheme.max_participations) == (10, 6)
        check_sampling(_mechanism(self.BANDED, FixedEpochs(10, 6)), scheme)
        check_sampling(_mechanism(self.BANDED, MinSeparation(8, 6)), scheme)
        with pytest.raises(SamplingError, match="12 apart"):
            check_sampling(_mechanism(self.BANDED, FixedEpochs(12, 6)), scheme)
        with pytest.raises(SamplingError, match="at most 5 times"):
            check_sampling(_mechanism(self.BANDED, MinSeparation(8, 5)), scheme)

    def test_batches_for_another_number_of_rounds_are_refused(self):
        mechanism = _mechanism(self.BANDED, FixedEpochs(10, 6))
        with pytest.raises(SamplingError, match="60 rounds"):
            check_sampling(mechanism, cyclic_scheme(50, BATCH_SIZE, DATASET_SIZE))

    def test_a_mechanism_without_sampling_asks_for_a_scheme(self):
        mechanism = _mechanism(identity(NUM_ROUNDS), MinSeparation(10))
        with pytest.raises(SamplingError, match="cyclic_scheme"):
            make_batches((X, Y), mechanism)

    def test_cyclic_passes_keep_participations_an_epoch_apart(self):
        scheme = cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, DATASET_SIZE)
        rounds = _rounds(make_batches((X, Y), scheme, pinned_seed=1))
        for first, second in zip(rounds, rounds[10:], strict=False):
            np.testing.assert_array_equal(first, second)
        assert len(set(np.concatenate(rounds[:10]))) == 100
