from __future__ import annotations

import collections
import decimal
import functools
import itertools
import math
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from bandmf_tf.accounting import (
    BallsInBins,
    BoundedPoissonSampling,
    FixedSizeSampling,
    MinSeparationSampling,
    OncePerEpoch,
    PoissonSampling,
    SecretParts,
    Shuffling,
)
from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity
from bandmf_tf.keras import batches as sampling
from bandmf_tf.keras.batches import (
    SamplingError,
    check_sampling,
    cyclic_scheme,
    make_batches,
    wrap_dataset,
)
from cases import make_mechanism

NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE = 60, 4, 10, 103
PART_SIZE = DATASET_SIZE // NUM_PARTS

X = np.arange(DATASET_SIZE, dtype=np.float32)[:, None] + 1.0
Y = np.arange(DATASET_SIZE)

SCHEMES = {
    "poisson": PoissonSampling.from_sizes(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE),
    "bounded": BoundedPoissonSampling(NUM_ROUNDS, NUM_PARTS, 0.4, 11, DATASET_SIZE),
    "fixed size": FixedSizeSampling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE),
    "reshuffled": Shuffling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE, reshuffled=True),
    "one order": Shuffling(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE, reshuffled=False),
}
RANDOM = {
    "balls in bins": BallsInBins(NUM_ROUNDS, NUM_PARTS),
    "secret parts": SecretParts(NUM_ROUNDS, NUM_PARTS, 0.4),
    "b-min-sep": MinSeparationSampling(NUM_ROUNDS, NUM_PARTS, 0.2),
    "once an epoch": OncePerEpoch(NUM_ROUNDS, NUM_PARTS, 9),
}
each_cyclic_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
each_scheme = pytest.mark.parametrize("scheme", (SCHEMES | RANDOM).values(), ids=SCHEMES | RANDOM)


def _rounds(batches, *arguments, **options):
    """Returns the examples of every element without their padding."""
    return [
        batch.examples[1][batch.is_example]
        for batch in batches.dataset(*arguments, **options).as_numpy_iterator()
    ]


@functools.cache
def _pinned(scheme):
    """Returns a pipeline, all its batches, and the examples of each without their padding."""
    pipeline = make_batches((X, Y), scheme, pinned_seed=1)
    elements = list(pipeline.dataset().as_numpy_iterator())
    return pipeline, elements, [batch.examples[1][batch.is_example] for batch in elements]


@each_cyclic_scheme
def test_round_i_uses_part_i_modulo_the_number_of_parts(scheme):
    _, _, rounds = _pinned(scheme)
    assert len(rounds) == NUM_ROUNDS
    parts = [set(np.concatenate(rounds[j::NUM_PARTS])) for j in range(NUM_PARTS)]
    assert all(0 < len(part) <= PART_SIZE for part in parts)
    assert len(set.union(*parts)) == sum(map(len, parts))  # No example is in two parts.


@each_scheme
def test_examples_take_part_as_seldom_as_the_scheme_says(scheme):
    _, _, rounds = _pinned(scheme)
    assert all(len(set(batch)) == len(batch) for batch in rounds)  # Once in a batch.
    for example in range(DATASET_SIZE):
        times = np.flatnonzero([example in batch for batch in rounds])
        assert len(times) <= scheme.max_participations
        assert np.all(np.diff(times) >= NUM_PARTS)


@each_scheme
def test_padding_is_masked_and_zero_and_in_fit_the_same_examples_whoever_was_drawn(scheme):
    pipeline, elements, _ = _pinned(scheme)
    places = np.arange(pipeline.padded_batch_size) % DATASET_SIZE
    in_fit = pipeline._dataset_for_fit(0, 1, 0).as_numpy_iterator()
    for element, other in zip(elements, in_fit, strict=True):
        (x, y), is_example, *_ = element
        assert len(x) == len(y) == len(is_example) == len(places)
        assert not x[~is_example].any()
        assert not y[~is_example].any()
        np.testing.assert_array_equal(other.examples[1][~is_example], places[~is_example])
        np.testing.assert_array_equal(other.examples[0][:, 0], other.examples[1] + 1)
        np.testing.assert_array_equal(other.examples[1][is_example], y[is_example])


@each_scheme
def test_a_pipeline_resumes_at_any_round(scheme):
    pipeline, elements, _ = _pinned(scheme)
    position = tf.Variable(0, dtype=tf.int64)
    dataset = pipeline.dataset(position)
    position.assign(37)  # Read when iteration starts, not when the dataset was made.
    rest = list(dataset.as_numpy_iterator())
    for got, want in zip(rest, elements[37:], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, got, want)


@each_scheme
def test_pieces_make_up_the_batches(scheme):
    pipeline, _, whole = _pinned(scheme)
    pieces = _rounds(pipeline, 50, pieces=3, first_piece=1)
    assert len(pieces) == 3 * (NUM_ROUNDS - 50) - 1
    np.testing.assert_array_equal(np.concatenate(pieces[2:5]), whole[51])


@each_scheme
def test_seeds_are_fresh_unless_pinned(scheme):
    _, _, pinned = _pinned(scheme)
    again = _rounds(make_batches((X, Y), scheme, pinned_seed=1))
    first, second = (make_batches((X, Y), scheme) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(pinned, again, strict=True))
    drawn = [[pipeline.indices(i) for i in range(8)] for pipeline in (first, second)]
    assert not all(np.array_equal(a, b) for a, b in zip(*drawn, strict=True))


def test_a_checkpoint_brings_the_partition_back(tmp_path):
    scheme = SCHEMES["one order"]
    first, second = make_batches((X, Y), scheme), make_batches((X, Y), scheme)
    dataset = second.dataset()  # Made before the seed is restored.
    assert first.fingerprint() != second.fingerprint()
    path = tf.train.Checkpoint(batches=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(batches=second).read(path).assert_consumed()
    assert first.fingerprint() == second.fingerprint()
    for batch, want in zip(dataset, _rounds(first), strict=True):
        np.testing.assert_array_equal(batch.examples[1], want)


def test_where_an_example_stands_tells_nothing_of_who_else_was_drawn():
    """What a seed that everybody knows makes of a row must not depend on the other examples."""
    pipeline = make_batches(np.arange(40), PoissonSampling(600, 1, 0.5), pinned_seed=1)
    masks, first = [], []
    for batch in pipeline.dataset():
        mask = batch.is_example.numpy()
        masks.append(mask)
        first.append(np.flatnonzero(mask)[np.argmin(batch.examples.numpy()[mask])])
    rows = pipeline.padded_batch_size
    np.testing.assert_allclose(np.mean(masks, 0), np.mean(masks), atol=0.1)
    # The first of those that were drawn stands anywhere: 600 draws, 5 standard deviations.
    assert abs(np.mean(first) - (rows - 1) / 2) < 5 * rows / np.sqrt(12 * 600)


@each_scheme
def test_indices_tell_who_is_in_a_batch(scheme):
    pipeline, _, rounds = _pinned(scheme)
    for i, batch in enumerate(rounds[:8]):
        np.testing.assert_array_equal(pipeline.indices(i), batch)


@functools.cache
def _table(scheme):
    """Returns who is in which batch, `[rounds, examples]`."""
    batches = make_batches(np.arange(TestInclusion.SIZE), scheme, pinned_seed=9)
    table = np.zeros((scheme.num_rounds, TestInclusion.SIZE))
    for i, batch in enumerate(batches.dataset().as_numpy_iterator()):
        table[i, batch.examples[batch.is_example]] = 1
    return table


def _one(element):
    return tf.data.Dataset.from_tensors(element)


_GENERATOR = tf.random.Generator.from_seed(1)
_NOISE = tf.keras.layers.GaussianNoise(0.1)


def _drawn(x, rng=np.random.default_rng(0)):  # noqa: B008 (one for all calls)
    return x + rng.normal(size=2).astype(x.dtype)


def _stated(dataset, size):
    return dataset.apply(tf.data.experimental.assert_cardinality(size))


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


def _fit(counts: dict, law: dict) -> float:
    """The p-value of Pearson's test of counts against a law; 0 for what the law rules out."""
    if not counts.keys() <= law.keys():
        return 0.0
    total = sum(counts.values())
    expected = np.array([total * probability for probability in law.values()])
    found = np.array([counts.get(case, 0) for case in law])
    return float(scipy.stats.chi2.sf(np.sum((found - expected) ** 2 / expected), len(law) - 1))


class TestLargestSize:
    """A sample that is too large is drawn again, whatever the order of examples."""

    SIZE, MOST, Q, ROUNDS = 5, 2, 0.5, 6000

    def _law(self):
        """All batches with their probabilities."""
        law = {
            batch: self.Q**size * (1 - self.Q) ** (self.SIZE - size)
            for size in range(self.MOST + 1)
            for batch in itertools.combinations(range(self.SIZE), size)
        }
        return {batch: probability / sum(law.values()) for batch, probability in law.items()}

    def test_batches_have_the_law_of_the_scheme(self):
        scheme = BoundedPoissonSampling(self.ROUNDS, 1, self.Q, self.MOST, self.SIZE)
        pipeline = make_batches(np.arange(self.SIZE), scheme, pinned_seed=2)
        law = self._law()
        assert pipeline.padded_batch_size == self.MOST
        expected = sum(probability * len(batch) for batch, probability in law.items())
        assert pipeline.batch_size == pytest.approx(expected, rel=1e-11)
        rounds = [
            tuple(sorted(batch.examples[batch.is_example]))
            for batch in pipeline.dataset().as_numpy_iterator()
        ]
        assert rounds[7] == tuple(sorted(pipeline.indices(7)))
        assert _fit(collections.Counter(rounds), law) > 1e-3
        # Wrong laws are noticed: a random subset kept, and batches of one round for another.
        rng = np.random.default_rng(0)
        drawn = [rng.permutation(np.flatnonzero(rng.random(self.SIZE) < self.Q)) for _ in rounds]
        subset = collections.Counter(tuple(sorted(batch[: self.MOST])) for batch in drawn)
        assert _fit(subset, law) < 1e-6
        pairs = collections.Counter(itertools.pairwise(rounds))
        joint = {(a, b): law[a] * law[b] for a in law for b in law}
        assert _fit(pairs, joint) > 1e-3

    def test_rows_of_those_who_stay_tell_nothing_of_the_others(self):
        scheme = BoundedPoissonSampling(600, 1, 0.5, 14, 30)
        pipeline = make_batches(np.arange(30), scheme, pinned_seed=1)
        rows = [
            np.flatnonzero(batch.is_example)[np.argmin(batch.examples[batch.is_example])]
            for batch in pipeline.dataset().as_numpy_iterator()
        ]
        assert abs(np.mean(rows) - 6.5) < 5 * 14 / np.sqrt(12 * 600)


class TestRandomParticipation:
    """Every example draws its pattern of rounds by the law of the scheme, alone."""

    SIZE, ROUNDS = 6000, 5
    CASES = (
        (BallsInBins(ROUNDS, 3), BallsInBins(ROUNDS, 4)),
        (SecretParts(ROUNDS, 3, 0.4), SecretParts(ROUNDS, 3, 0.45)),
        (MinSeparationSampling(ROUNDS, 3, 0.3), MinSeparationSampling(ROUNDS, 3, 0.34)),
        (MinSeparationSampling(ROUNDS, 1, 0.3), MinSeparationSampling(ROUNDS, 2, 0.3)),
        (MinSeparationSampling(ROUNDS, 3, 1.0), SecretParts(ROUNDS, 3, 0.9)),
        (OncePerEpoch(ROUNDS, 2, 3), OncePerEpoch(ROUNDS, 1, 3)),
        (OncePerEpoch(ROUNDS, 3, 3), OncePerEpoch(ROUNDS, 2, 3)),
        (OncePerEpoch(ROUNDS, 1, 2), OncePerEpoch(ROUNDS, 1, 3)),
        (OncePerEpoch(ROUNDS, 2, 7), MinSeparationSampling.from_rate(ROUNDS, 2, 1 / 7)),
    )

    def _law(self, scheme, cold=False):
        """All patterns with their probabilities, by what the scheme says of an example."""
        n, b, law = self.ROUNDS, scheme.min_separation, collections.Counter()
        q = getattr(scheme, "sampling_probability", 1.0)
        if scheme.is_periodic:
            for part in range(b):
                turns = range(part, n, b)
                for taken in itertools.product((0, 1), repeat=len(turns)):
                    x = np.zeros(n, int)
                    x[list(turns)] = taken
                    law[tuple(x)] += q ** sum(taken) * (1 - q) ** (len(turns) - sum(taken)) / b
            return +law
        if isinstance(scheme, OncePerEpoch):
            return self._once(scheme, cold)
        starts = {0: 1.0} if cold else dict.fromkeys(range(1, b), scheme.rate)
        starts.setdefault(0, 1 - sum(starts.values()))
        for wait, start in starts.items():
            patterns = {(): (start, wait)}
            for _ in range(n):
                after = {}
                for x, (probability, wait) in patterns.items():
                    if wait:
                        after[*x, 0] = probability, wait - 1
                    else:
                        after[*x, 1] = probability * q, b - 1
                        after[*x, 0] = probability * (1 - q), 0
                patterns = after
            for x, (probability, _) in patterns.items():
                law[x] += probability
        return +law

    def _once(self, scheme, cold):
        """One round of every epoch, given that of the epoch before; `cold`: of the first alike."""
        n, b, epoch = self.ROUNDS, scheme.separation, scheme.epoch_rounds
        law = collections.Counter()
        runs = {(): 1.0}
        for j in range(-(-n // epoch)):
            after = {}
            for taken, probability in runs.items():
                left = probability
                for u in range(epoch):
                    if taken and j * epoch + u - taken[-1] < b:
                        continue
                    least = b - 1 if j or cold else 0
                    share = left / (epoch - max(u, least))
                    after[*taken, j * epoch + u] = share
                    left -= share
            runs = after
        for taken, probability in runs.items():
            law[tuple(int(t in taken) for t in range(n))] += probability
        return +law

    @staticmethod
    @functools.cache
    def _patterns(scheme):
        pipeline = make_batches(np.arange(TestRandomParticipation.SIZE), scheme, pinned_seed=6)
        table = np.zeros((pipeline.dataset_size, scheme.num_rounds), int)
        for i, batch in enumerate(pipeline.dataset().as_numpy_iterator()):
            table[batch.examples[batch.is_example], i] = 1
        return [tuple(map(int, x)) for x in table]

    @pytest.mark.parametrize(("scheme", "other"), CASES)
    def test_patterns_have_the_law_of_the_scheme_and_no_other(self, scheme, other):
        patterns = self._patterns(scheme)
        law, counts = self._law(scheme), collections.Counter(patterns)
        assert math.isclose(sum(law.values()), 1.0)
        assert _fit(counts, law) > 1e-3
        assert _fit(counts, self._law(other)) < 1e-6
        if not scheme.is_periodic and scheme.min_separation > 1:
            assert _fit(counts, self._law(scheme, cold=True)) < 1e-6

    @pytest.mark.parametrize("scheme", [case[0] for case in CASES])
    def test_examples_draw_independently_of_each_other(self, scheme):
        patterns = self._patterns(scheme)
        law = self._law(scheme)
        likely = [x for x in law if law[x] > 0.04]

        def p_value(pairs) -> float:
            """Of likely patterns, all others taken for one."""
            counts = collections.Counter(
                tuple(x if x in likely else None for x in pair) for pair in pairs
            )
            mass = {x: law[x] for x in likely}
            if (rest := 1 - sum(mass.values())) > 1e-9:
                mass[None] = rest
            return _fit(counts, {(x, y): mass[x] * mass[y] for x in mass for y in mass})

        assert p_value(zip(patterns[::2], patterns[1::2], strict=True)) > 1e-3
        assert p_value(zip(patterns[::2], patterns[::2], strict=True)) < 1e-6

    @pytest.mark.parametrize("scheme", RANDOM.values(), ids=RANDOM)
    def test_it_is_the_whole_seed_that_decides_about_later_rounds(self, scheme):
        """A run that goes on with another seed could draw an example again too soon."""
        first, second = (make_batches((X, Y), scheme) for _ in range(2))
        assert first.has_partition
        assert first.fingerprint() != second.fingerprint()

    def test_epochs_without_a_separation_need_the_seed_as_well(self):
        assert make_batches((X, Y), OncePerEpoch(NUM_ROUNDS, 1, 9)).has_partition
        assert not make_batches((X, Y), MinSeparationSampling(NUM_ROUNDS, 1, 0.2)).has_partition


def _rank_of_bits(seeds):
    """Returns in how many dimensions over the field of two elements the bits of seeds lie."""
    rows = [int.from_bytes(np.asarray(seed).tobytes(), "little") for seed in seeds]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            lowest = pivot & -pivot
            rows = [row ^ pivot if row & lowest else row for row in rows]
    return rank


class TestEntropy:
    """Nobody can go through all seeds: 128 bits reach the generator in every draw."""

    @each_scheme
    def test_every_bit_changes_the_draws_and_their_seeds_fill_128_dimensions(
        self, scheme, monkeypatch
    ):
        """Folded into 32 or 64 bits on the way they would fill as many."""
        reached = {}
        original = sampling._bits

        def bits(count, seed, *start):
            reached.setdefault(int(count), []).append(np.asarray(seed))
            return original(count, seed, *start)

        monkeypatch.setattr(sampling, "_bits", bits)
        batches = make_batches((X, Y), scheme)
        seed = batches.seed.numpy()
        one = np.array(1, np.int64)
        flips = [(one << np.int64(bit), 0) for bit in range(64)]
        flips += [(0, low) for low, _ in flips]
        others = np.random.default_rng(0).integers(-(2**63), 2**63, [31, 2])
        drawn = []
        for value in (seed, *(seed ^ np.array(flip, np.int64) for flip in flips), *others):
            batches.seed.assign(value)
            drawn.append(tuple(batches.indices(1)))
        assert len(set(drawn[:129])) == 129
        draws = {count: seeds for count, seeds in reached.items() if count > 2}
        assert DATASET_SIZE in draws  # The partition; then the draws from parts.
        if scheme in SCHEMES.values():
            assert (PART_SIZE in draws) == (scheme != SCHEMES["one order"])
        for seeds in draws.values():
            assert _rank_of_bits(seeds) == 128

    def test_a_seed_folded_on_the_way_would_be_noticed(self):
        rng = np.random.default_rng(0)
        narrow = [np.array([rng.integers(-(2**31), 2**31), 5]) for _ in range(160)]
        assert _rank_of_bits(narrow) < 64


def _tail(size, part_size, q):
    """Returns P(Binomial > size), summed in 60 digits."""
    with decimal.localcontext() as context:
        context.prec = 60
        odds = decimal.Decimal(q) / (1 - decimal.Decimal(q))
        first = size + 1
        term = decimal.Decimal(math.comb(part_size, first)) * decimal.Decimal(q) ** first
        term *= (1 - decimal.Decimal(q)) ** (part_size - first)
        total = decimal.Decimal(0)
        for k in range(first, part_size + 1):
            total += term
            if k > 2 * q * part_size + 10 and term < total * decimal.Decimal("1e-40"):
                break
            term *= odds * (part_size - k) / (k + 1)
        return total


class TestPoissonPadding:
    @pytest.mark.parametrize(
        ("num_rounds", "q", "part_size"),
        [
            (1, 0.1, 50),
            (10, 0.5, 30),
            (10, 0.1, 5_000),  # SciPy's isf gave the whole part from here on.
            (2_000, 0.1, 5_000),
            (2_000, 0.01, 50_000),
            (100_000, 1e-4, 100_000),
            (1_000_000, 0.999, 700),
        ],
    )
    def test_it_is_the_least_size_that_is_enough(self, num_rounds, q, part_size):
        padding = sampling.poisson_padding(part_size, q, num_rounds)
        limit = decimal.Decimal(sampling.OVERFLOW_PROBABILITY) / num_rounds
        slack = decimal.Decimal(1 + 1e-9)
        assert _tail(padding, part_size, q) <= limit * slack
        assert padding == 1 or _tail(padding - 1, part_size, q) > limit / slack

    def test_a_batch_of_500_is_computed_as_700_and_not_as_5000(self):
        batches = make_batches(np.zeros(5_000), PoissonSampling(2_000, 1, 0.1), pinned_seed=0)
        assert batches.batch_size == pytest.approx(500)
        assert 600 < batches.padded_batch_size < 750

    def test_a_draw_beyond_the_padding_raises_and_is_never_cut(self, monkeypatch):
        # As if the bound had been chosen far too small.
        monkeypatch.setattr(sampling, "poisson_padding", lambda *sizes: 5)
        for scheme in (SCHEMES["poisson"], *RANDOM.values()):
            batches = make_batches(X, scheme, pinned_seed=1)
            with pytest.raises(tf.errors.InvalidArgumentError, match="larger than its padding"):
                list(batches.dataset())

    def test_probability_one_takes_the_whole_part(self):
        scheme = PoissonSampling(8, 4, 1.0)
        batches = make_batches((X, Y), scheme, pinned_seed=1)
        assert batches.padded_batch_size == PART_SIZE
        assert [len(batch) for batch in _rounds(batches)] == [PART_SIZE] * 8

    @each_scheme
    def test_the_drawn_size_does_not_show_in_shapes(self, scheme):
        batches = make_batches((X, Y), scheme, pinned_seed=1)
        specs = tf.nest.flatten(batches.dataset().element_spec)
        assert all(spec.shape.is_fully_defined() for spec in specs)


class TestExamples:
    def test_a_function_can_fetch_them(self):
        def fetch(indices):
            return {"id": indices, "square": indices**2}

        batches = make_batches(
            fetch, SCHEMES["fixed size"], dataset_size=DATASET_SIZE, pinned_seed=1
        )
        examples, is_example, *_ = next(batches.dataset().as_numpy_iterator())
        np.testing.assert_array_equal(examples["square"], examples["id"] ** 2)
        assert is_example.shape == (BATCH_SIZE,)

    @pytest.mark.parametrize(
        "examples",
        [X, (X,), {"a": X, "b": Y}, (X, Y), ([X, X + 1], Y), ({"a": [X, X]}, Y), (X, Y, Y + 0.5)],
        ids=["x", "(x,)", "dict", "(x, y)", "lists", "nested", "weights"],
    )
    def test_what_they_are_made_of_is_kept_and_padding_stands_beside_it(self, examples):
        batches = make_batches(examples, SCHEMES["poisson"], pinned_seed=1)
        batch = next(batches.dataset().as_numpy_iterator())
        chosen = batches.indices(0)
        assert 0 < batch.is_example.sum() == len(chosen) < len(batch.is_example)
        arrays, found = tf.nest.flatten(examples), tf.nest.flatten(batch.examples)
        for array, part in zip(arrays, found, strict=True):
            np.testing.assert_array_equal(part[batch.is_example], array[chosen])
            assert not part[~batch.is_example].any()
        with pytest.raises(ValueError, match="Data is expected"):  # Keras takes it for nothing.
            tf.keras.utils.unpack_x_y_sample_weight(batch)

    @pytest.mark.parametrize(
        ("examples", "message"),
        [
            ([X, Y], "Found a list"),
            ((X, Y, Y, Y), "Found 4 entries"),
            ((), "Found 0 entries"),
            ((X, None), "Found NoneType"),
            (tf.ragged.constant([[1.0], [2.0, 3.0]]), "Found RaggedTensor"),
        ],
        ids=["list", "four", "none", "no labels", "ragged"],
    )
    def test_what_could_be_mistaken_is_refused(self, examples, message):
        with pytest.raises(TypeError, match=message):
            make_batches(examples, SCHEMES["poisson"])

    def test_a_function_that_returns_four_things_is_refused(self):
        batches = make_batches(lambda i: (i, i, i, i), SCHEMES["poisson"], dataset_size=103)
        with pytest.raises(Exception, match="Found 4 entries"):  # Of AutoGraph, around ours.
            batches.dataset()

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
        mechanism = make_mechanism(self.BANDED, sampling=scheme)
        batches = make_batches((X, Y), mechanism)
        assert batches.scheme == scheme
        check_sampling(mechanism, batches.scheme)

    def test_less_sampling_than_planned_is_allowed_and_more_is_not(self):
        scheme = SCHEMES["poisson"]
        mechanism = make_mechanism(self.BANDED, sampling=scheme)
        q = scheme.sampling_probability
        check_sampling(mechanism, PoissonSampling(NUM_ROUNDS, NUM_PARTS, q / 2))
        with pytest.raises(SamplingError, match="assumes PoissonSampling"):
            check_sampling(mechanism, PoissonSampling(NUM_ROUNDS, NUM_PARTS, q * 1.01))

    @pytest.mark.parametrize("other", ["fixed size", "reshuffled", "one order"])
    def test_other_batches_than_planned_are_refused(self, other):
        scheme = SCHEMES["poisson"]
        mechanism = make_mechanism(self.BANDED, sampling=scheme)
        with pytest.raises(SamplingError, match="assumes PoissonSampling"):
            check_sampling(mechanism, SCHEMES[other])

    def test_fixed_epochs_need_parts_of_the_right_length(self):
        scheme = cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, DATASET_SIZE)
        assert (scheme.num_parts, scheme.max_participations) == (10, 6)
        check_sampling(make_mechanism(self.BANDED, FixedEpochs(10, 6)), scheme)
        check_sampling(make_mechanism(self.BANDED, MinSeparation(8, 6)), scheme)
        with pytest.raises(SamplingError, match="12 apart"):
            check_sampling(make_mechanism(self.BANDED, FixedEpochs(12, 6)), scheme)
        with pytest.raises(SamplingError, match="at most 5 times"):
            check_sampling(make_mechanism(self.BANDED, MinSeparation(8, 5)), scheme)

    def test_batches_for_another_number_of_rounds_are_refused(self):
        mechanism = make_mechanism(self.BANDED, FixedEpochs(10, 6))
        with pytest.raises(SamplingError, match="60 rounds"):
            check_sampling(mechanism, cyclic_scheme(50, BATCH_SIZE, DATASET_SIZE))

    def test_a_mechanism_without_sampling_asks_for_a_scheme(self):
        mechanism = make_mechanism(identity(NUM_ROUNDS), MinSeparation(10))
        with pytest.raises(SamplingError, match="cyclic_scheme"):
            make_batches((X, Y), mechanism)

    def test_cyclic_passes_keep_participations_an_epoch_apart(self):
        scheme = cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, DATASET_SIZE)
        rounds = _rounds(make_batches((X, Y), scheme, pinned_seed=1))
        for first, second in zip(rounds, rounds[10:], strict=False):
            np.testing.assert_array_equal(first, second)
        assert len(set(np.concatenate(rounds[:10]))) == 100


class TestWrapDataset:
    SCHEME = PoissonSampling.from_sizes(4, 2, 3, 20)

    def test_batches_are_those_of_the_arrays(self):
        x, y = np.arange(20.0, dtype=np.float32)[:, None], np.arange(20)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (2 * x, y))
        wrapped = wrap_dataset(dataset.prefetch(2), self.SCHEME, pinned_seed=1)
        plain = make_batches((2 * x, y), self.SCHEME, pinned_seed=1)
        for one, other in zip(wrapped.dataset(), plain.dataset(), strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, one, other)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.repeat(), "without end"),
            (lambda d: d.repeat(2).map(lambda x, y: (x, y)), "leave out repeat."),
            (lambda d: d.shuffle(20).prefetch(1), "leave out shuffle."),
            (lambda d: d.concatenate(d.shuffle(9).repeat(2)), "leave out repeat and shuffle."),
            (lambda d: _stated(d.flat_map(lambda *e: _one(e).repeat(2)), 40), "leave out repeat."),
            (
                lambda d: _stated(
                    d.batch(5).interleave(
                        lambda *e: _one(0).flat_map(
                            lambda _: tf.data.Dataset.from_tensor_slices(e).shuffle(5)
                        )
                    ),
                    20,
                ),
                "leave out shuffle.",
            ),
            (
                lambda d: _stated(tf.data.Dataset.range(2).flat_map(lambda _: d), 40),
                "leave out datasets that functions capture.",
            ),
            (lambda d: tf.data.Dataset.sample_from_datasets([d, d]), "cardinality -2"),
            (
                lambda d: _stated(tf.data.Dataset.sample_from_datasets([d, d]), 40),
                "leave out random.",
            ),
            (
                lambda d: _stated(
                    tf.data.experimental.from_variant(
                        tf.data.experimental.to_variant(d.repeat(2)), d.element_spec
                    ),
                    40,
                ),
                "leave out variant.",
            ),
            (
                lambda d: d.apply(tf.data.experimental.shuffle_and_repeat(9, 2)),
                "leave out shuffleandrepeat.",
            ),
            (
                lambda d: _stated(
                    d.window(2, shift=1, drop_remainder=True).flat_map(
                        lambda *parts: tf.data.Dataset.zip(parts)
                    ),
                    38,
                ),
                "windows of a series can overlap",
            ),
            (
                lambda d: tf.keras.utils.timeseries_dataset_from_array(X[:, 0], Y, 5, batch_size=4),
                "windows of a series can overlap",
            ),
            (lambda d: d.filter(lambda x, y: y > 3), "cardinality -2"),
            (lambda d: d.take(0), "cardinality 0"),
            (lambda d: d.batch(5), "single examples"),
            (lambda d: d.take(10), "data set of 20"),
        ],
    )
    def test_what_cannot_be_drawn_from_by_index(self, change, message):
        x, y = np.zeros([20, 1], np.float32), np.arange(20)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        scheme = FixedSizeSampling(4, 2, 3, 20)
        with pytest.raises(SamplingError, match=message):
            wrap_dataset(change(dataset), scheme)

    def test_datasets_made_inside_of_functions_are_fine_if_they_have_every_example_once(self):
        x, y = np.zeros([20, 1], np.float32), np.arange(20)
        files = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
        dataset = _stated(
            files.interleave(lambda *e: tf.data.Dataset.from_tensor_slices(e).map(lambda *e: e)), 20
        )
        pipeline = wrap_dataset(dataset, FixedSizeSampling(2, 2, 10, 20))  # Both parts, whole.
        labels = [batch.examples[1] for batch in pipeline.dataset().as_numpy_iterator()]
        assert sorted(np.concatenate(labels)) == list(range(20))

    @pytest.mark.parametrize(
        ("change", "sign"),
        [
            (lambda x: x + tf.random.uniform([]), "RandomUniform"),
            (lambda x: tf.cond(x[0] > 0, lambda: tf.random.shuffle(x), lambda: x), "RandomShuffle"),
            (lambda x: x + _GENERATOR.normal([]), "RngReadAndSkip"),
            (lambda x: _NOISE(x, training=True), "Random|Assign"),
            (lambda x: tf.ensure_shape(tf.numpy_function(_drawn, [x], x.dtype), [2]), "read twice"),
        ],
        ids=["operation", "branch", "generator", "layer", "Python"],
    )
    @pytest.mark.parametrize("nested", [False, True])
    def test_what_would_be_drawn_once_for_all_rounds_is_refused(self, change, sign, nested):
        x, y = np.ones([20, 2], np.float32), np.arange(20)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))

        def augmented(dataset):
            return dataset.map(lambda x, y: (change(x), y)).prefetch(1)

        if nested:
            files = dataset.batch(5).interleave(
                lambda *e: augmented(tf.data.Dataset.from_tensor_slices(e))
            )
            dataset = _stated(files, 20)
        else:
            dataset = augmented(dataset)
        with pytest.raises(SamplingError, match=f"draws at random .*{sign}.*would be once for all"):
            wrap_dataset(dataset, self.SCHEME)

    def test_a_generator_that_draws_late_is_refused(self):
        def late():
            for i in range(20):
                yield (np.full([2], _drawn(np.float32(0)) if i == 19 else i, np.float32), i)

        specs = (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
        dataset = _stated(tf.data.Dataset.from_generator(late, output_signature=specs), 20)
        with pytest.raises(SamplingError, match=r"draws at random .*read twice, it is another one"):
            wrap_dataset(dataset, self.SCHEME)

    def test_and_a_function_that_fetches_draws_anew(self):
        def fetch(indices):
            return tf.cast(indices, tf.float32) + tf.random.uniform([tf.size(indices)]), indices

        drawn = collections.defaultdict(list)
        for batch in make_batches(fetch, self.SCHEME, dataset_size=20, pinned_seed=1).dataset():
            for value, index in zip(
                *(t[batch.is_example].numpy() for t in batch.examples), strict=True
            ):
                drawn[index].append(value)
        assert all(len(set(values)) == len(values) for values in drawn.values())
        assert max(map(len, drawn.values())) > 1

    def test_functions_that_give_an_example_one_value_are_fine(self):
        words = tf.keras.layers.StringLookup(vocabulary=["1", "2"])

        def change(x, y):
            x = tf.numpy_function(lambda x: 2 * x, [x], x.dtype)
            x = tf.ensure_shape(x, [2]) + tf.random.stateless_uniform([2], tf.stack([y, 1]))
            return tf.concat([x, [np.nan]], 0), words(tf.strings.as_string(y))

        x, y = np.ones([20, 2], np.float32), np.arange(20)
        wrapped = wrap_dataset(tf.data.Dataset.from_tensor_slices((x, y)).map(change), self.SCHEME)
        assert wrapped.dataset_size == 20

    def test_make_batches_sends_datasets_here(self):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y))
        with pytest.raises(BandMFTypeError, match=r"call wrap_dataset\(dataset, scheme\)"):
            make_batches(dataset, self.SCHEME)

    def test_a_stated_size_must_be_true(self):
        dataset = tf.data.Dataset.range(20).map(lambda i: (tf.cast(i, tf.float32)[None], i))
        wrong = dataset.filter(lambda *_: True).apply(tf.data.experimental.assert_cardinality(30))
        with pytest.raises(SamplingError, match="states 30 examples and has more or fewer"):
            wrap_dataset(wrong, PoissonSampling.from_sizes(4, 2, 3, 30))

    def test_arrays_are_for_make_batches(self):
        with pytest.raises(BandMFTypeError, match=r"make_batches takes arrays\. Found tuple"):
            wrap_dataset((np.zeros([20, 1]), np.arange(20)), self.SCHEME)
