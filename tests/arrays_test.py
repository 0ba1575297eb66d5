"""Equal arrays give equal bytes, today's and those of version 0.1, and NumPy reads them."""

from __future__ import annotations

import dataclasses
import hashlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from bandmf_tf import _arrays
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.participation import SingleParticipation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import decode_mechanism, encode_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism, Provenance
from bandmf_tf.runs.training_run import encode_model


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_released_models_have_the_bytes_of_version_0_1():
    model = {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
        "bias": 0.1 * np.ones(3),
        "count": np.array(7),
        "name": np.array(["a", "bc"]),
    }
    data = encode_model(model)
    assert _digest(data) == "8131fb33feb1cd2336731c3fdf8c46203be461a718fbea4c2e3d2ece3b08bd17"
    with np.load(io.BytesIO(data)) as found:
        assert list(found) == list(model)
        for name, array in model.items():
            np.testing.assert_array_equal(found[name], array)


def test_mechanism_files_have_the_bytes_of_version_0_1():
    made = Mechanism.create(
        ToeplitzStrategy(np.array([1.0, 0.5]), 4),
        prefix_sum(4),
        SingleParticipation(),
        noise_multiplier=3.0,
        l2_norm_clip=0.5,
        delta=1e-6,
    )
    # Words are content; those of 0.1 said step.
    words = tuple(words.replace("one round", "one step") for words in made.guarantee.assumptions)
    made = dataclasses.replace(
        made,
        guarantee=dataclasses.replace(made.guarantee, assumptions=words),
        provenance=Provenance("0.1.0", "2024-02-29T12:00:00Z", {"a": 1}),
    )
    data = encode_mechanism(made)
    assert _digest(data) == "c2a15c47c9745140104fa6fda219480403ab3bf98c38184bf7d1b9b0153872cc"
    assert encode_mechanism(decode_mechanism(data)) == data


@settings(deadline=None)
@given(
    st_numpy.arrays(
        st.sampled_from(["<f4", "<f8", ">f4", "<i8", "<u2", "|b1", "<U3", "|S2", "<c8"]),
        st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0),
    )
)
def test_arrays_are_written_as_numpy_writes_them(array):
    theirs = io.BytesIO()
    np.lib.format.write_array(theirs, array, version=(1, 0), allow_pickle=False)
    data = _arrays.npy(array)
    assert data == theirs.getvalue()
    found = _arrays.parse_npy("a", data, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_the_order_in_memory_does_not_change_the_bytes():
    array = np.arange(6.0).reshape(2, 3)
    assert _arrays.npy(np.asfortranarray(array)) == _arrays.npy(array)


def test_another_dtype_shape_or_length_is_refused():
    data = _arrays.npy(np.arange(6.0))
    for changed, dtype, shape in [
        (data, "<f4", (12,)),
        (data, "<f8", (2, 3)),
        (data + b"x", "<f8", (6,)),
    ]:
        with pytest.raises(BandMFError, match="the array a is not"):
            _arrays.parse_npy("a", changed, np.dtype(dtype), shape)


def test_python_objects_are_not_written():
    with pytest.raises(BandMFTypeError, match="numbers and fixed strings"):
        _arrays.npy(np.array([object()]))
