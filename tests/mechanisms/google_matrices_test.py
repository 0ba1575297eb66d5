"""Google's matrices come in with their bands recovered, or are refused with one sentence."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.factorization import strategies, workloads
from bandmf_tf.factorization.participation import MinSeparation, SingleParticipation
from bandmf_tf.mechanisms.files import load_mechanism, save_mechanism
from bandmf_tf.mechanisms.google_matrices import (
    FILE_NAMES,
    import_google_mechanism,
    load_google_matrix,
)

N = 9


def _matrix(num_bands: int, num_rounds: int = N, seed: int = 0) -> np.ndarray:
    C = np.random.default_rng(seed).normal(size=(num_rounds, num_rounds))
    np.fill_diagonal(C, np.abs(np.diagonal(C)) + 0.5)
    offsets = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    return np.where((offsets >= 0) & (offsets < num_bands), C, 0.0)


def _write(path, matrix) -> bytes:
    data = tf.io.serialize_tensor(matrix).numpy()
    path.write_bytes(data)
    return data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c_matrix_tensor_pb"


@pytest.mark.parametrize("num_bands", range(1, N))
def test_the_band_count_is_recovered_and_the_entries_are_untouched(path, num_bands):
    C = _matrix(num_bands)
    _write(path, C)
    strategy = load_google_matrix(path, tolerance=0.0)
    assert isinstance(strategy, strategies.BandedStrategy)
    assert strategy.num_bands == num_bands
    assert strategy.materialize().tobytes() == C.tobytes()


@pytest.mark.parametrize("n", [2, N])
def test_a_full_triangle_becomes_a_dense_strategy(path, n):
    C = _matrix(N)[:n, :n]
    _write(path, C)
    strategy = load_google_matrix(path)
    assert isinstance(strategy, strategies.DenseStrategy)
    np.testing.assert_array_equal(strategy.materialize(), C)


def test_one_round_is_one_band(path):
    _write(path, np.array([[2.0]]))
    assert load_google_matrix(path).num_bands == 1


def test_what_an_optimiser_left_outside_the_band_becomes_zero(path):
    C = _matrix(4)
    noise = 1e-14 * np.random.default_rng(1).uniform(-1, 1, size=C.shape) * np.diagonal(C)
    _write(path, C + np.where(C == 0.0, noise, 0.0))
    strategy = load_google_matrix(path)
    assert strategy.num_bands == 4
    np.testing.assert_array_equal(strategy.materialize(), C)
    with pytest.raises(ValueError, match="lower-triangular"):
        load_google_matrix(path, tolerance=0.0)


def test_small_entries_inside_the_band_stay(path):
    C = _matrix(4)
    C[2, 1] = 1e-15
    _write(path, C)
    np.testing.assert_array_equal(load_google_matrix(path).materialize(), C)


@settings(max_examples=30)
@given(
    num_rounds=st.integers(2, 12),
    scale=st.floats(1e-100, 1e100),
    above=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_tolerance_is_relative_to_the_diagonal_of_the_column(
    tmp_path_factory, num_rounds, scale, above, seed, data
):
    """An entry just above the tolerance is content, just below it is not; whatever the scale."""
    path = tmp_path_factory.getbasetemp() / "tolerance"
    C = scale * np.diag(np.random.default_rng(seed).uniform(1e-3, 1e3, num_rounds))
    column = data.draw(st.integers(0, num_rounds - 2))
    row = data.draw(st.integers(column + 1, num_rounds - 1))
    C[row, column] = (1.01e-12 if above else 0.99e-12) * C[column, column]
    _write(path, C)
    assert load_google_matrix(path).num_bands == (row - column + 1 if above else 1)


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_folder_with_one_strategy_stands_for_its_file(tmp_path, name):
    C = _matrix(3)
    _write(tmp_path / name, C)
    _write(tmp_path / "w_matrix_tensor_pb", np.eye(N))
    np.testing.assert_array_equal(load_google_matrix(tmp_path).materialize(), C)


def test_a_folder_with_no_or_two_strategies_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Found \[\]"):
        load_google_matrix(tmp_path)
    for name in FILE_NAMES:
        _write(tmp_path / name, _matrix(3))
    with pytest.raises(ValueError, match="exactly one"):
        load_google_matrix(tmp_path)


def _with(row: int, column: int, value: float) -> np.ndarray:
    C = _matrix(3)
    C[row, column] = value
    return C


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (_matrix(3).astype(np.float32), "float64 matrix. Found float32"),
        (np.eye(N, dtype=np.int64), "float64 matrix. Found int64"),
        (np.array("text"), "float64 matrix. Found string"),
        (np.ones(N), r"square matrix. Found shape \(9,\)"),
        (_matrix(3)[:-1], r"square matrix. Found shape \(8, 9\)"),
        (np.ones((2, 2, 2)), "square matrix"),
        (np.float64(1.0), "square matrix"),
        (np.zeros((0, 0)), "square matrix"),
        (_with(5, 4, np.nan), "finite"),
        (_with(5, 4, np.inf), "finite"),
        (_with(4, 4, 0.0), "non-zero diagonal.* Found 0 at round 4"),
        (_with(2, 5, 0.125), "lower-triangular.* Found 0.125 at row 2, column 5"),
        (_matrix(3).T, "lower-triangular"),
    ],
)
def test_anything_but_a_lower_triangular_float64_matrix_is_refused(path, matrix, words):
    _write(path, matrix)
    with pytest.raises(ValueError, match=words) as caught:
        load_google_matrix(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("tolerance", [-1e-3, 1.0, float("nan")])
def test_a_tolerance_outside_its_range_is_refused(path, tolerance):
    _write(path, _matrix(3))
    with pytest.raises(ValueError, match="tolerance"):
        load_google_matrix(path, tolerance=tolerance)


def test_a_truncated_file_is_refused_at_every_length(path):
    data = _write(path, _matrix(3, num_rounds=4))
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=str(path)):
            load_google_matrix(path)


@settings(max_examples=200)
@given(content=st.binary(max_size=100))
def test_foreign_bytes_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "foreign"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="foreign"):
        load_google_matrix(path)


SHAPE = bytes([18, 8, 18, 2, 8, 1, 18, 2, 8, 1])  # Field 2 of a TensorProto: 1 x 1.


@pytest.mark.parametrize(
    "content",
    [
        b"\x08\x02" + SHAPE + SHAPE + b"\x22\x08" + bytes(8),
        b"\x08\x02" + SHAPE + b"\x20\x08",
        b"\x08\x02\x10\x01\x22\x08" + bytes(8),
        b"\x08" + b"\xff" * 1_000,
    ],
    ids=["two shapes", "content is a number", "shape is a number", "a number does not end"],
)
def test_fields_that_no_tensor_has_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a serialised TensorProto"):
        load_google_matrix(path)


def test_a_short_file_that_announces_a_huge_matrix_is_refused(path):
    proto = tf.make_tensor_proto(1.0, dtype=tf.float64, shape=[2**20, 2**20])
    assert proto.ByteSize() < 100
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="Found 0 bytes"):
        load_google_matrix(path)


def test_an_imported_mechanism_is_that_of_its_matrix(path):
    data = _write(path, _matrix(3))
    participation = MinSeparation(3, 2)
    mechanism = import_google_mechanism(
        path, participation, noise_multiplier=7.0, l2_norm_clip=0.5, delta=1e-10
    )
    strategy = load_google_matrix(path)
    assert mechanism.sensitivity == participation.sensitivity(strategy)
    assert mechanism.stddev == 3.5
    assert mechanism.workload.is_prefix_sum
    assert mechanism.provenance.notes["source_sha256"] == hashlib.sha256(data).hexdigest()
    assert str(path.parent) not in mechanism.provenance.notes["source"]
    saved = path.with_suffix(".bandmf")
    save_mechanism(mechanism, saved)
    np.testing.assert_array_equal(load_mechanism(saved).strategy.bands, strategy.bands)


def test_an_imported_mechanism_takes_the_workload_it_was_made_for(path):
    _write(path, _matrix(3))
    mechanism = import_google_mechanism(
        path,
        SingleParticipation(),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        delta=1e-6,
        workload=workloads.sgd(N, 0.9),
    )
    assert mechanism.workload.momentum == 0.9
