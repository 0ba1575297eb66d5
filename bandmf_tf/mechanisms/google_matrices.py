"""Google's published matrices as strategies and mechanisms.

The repository google-research/federated factors a workload as A = W H and releases `W (H x + z)`: H
is the strategy C of this library and W its decoder `A C^-1`. A factorisation is a folder with one
file a matrix, each a float64 `tf.io.serialize_tensor`: `w_matrix_tensor_pb` and
`h_matrix_tensor_pb`, or `c_matrix_tensor_pb` where the paper's letter is used for H. Only H (or C)
is read here; W follows from it and the workload. TensorFlow is not needed: of such a file, a
protocol buffer, three fields are read.

A published matrix is dense in form. Its number of bands is recovered by looking for the last
subdiagonal that is not zero. Entries of absolute value up to `tolerance` times the diagonal entry
of their column, left over by an optimiser, count as zero outside the band and above the diagonal
and become exact zeros. This needs no error analysis: noise, sensitivity and guarantee of the
strategy that is returned are all computed from what is returned.

Beware of the convention: Google's notebooks count the rounds *between* two participations,
r2 - r1 - 1. The min-separation of a `Participation` is the paper's r2 - r1, one more.
"""

from __future__ import annotations

import hashlib
import io
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.strategies import BandedStrategy, DenseStrategy
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.mechanism import Mechanism

FILE_NAMES = ("c_matrix_tensor_pb", "h_matrix_tensor_pb")

# Tags of a TensorProto, of its shape and of a dimension of that; its types that have a name here.
_DTYPE, _SHAPE, _CONTENT = 1, 2, 4
_DIMENSION, _SIZE = 2, 1
_FLOAT64 = "float64"
_TYPES = {1: "float32", 2: _FLOAT64, 3: "int32", 7: "string", 9: "int64"}

# Wire types of protocol buffers.
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}

# Triangular solves and Cholesky factors in float64 leave about 1e-16 of the diagonal.
TOLERANCE = 1e-12


def load_google_matrix(
    path: str | os.PathLike[str], *, tolerance: float = TOLERANCE
) -> BandedStrategy | DenseStrategy:
    """Returns the strategy in a file of Google's, in band storage if it is banded.

    Args:
      path: The file, or the folder that holds exactly one of `FILE_NAMES`.
      tolerance: Entries up to this fraction of the diagonal entry of their column are numerically
        zero, see the top of this file; 0 counts exact zeros only.

    Raises:
      ValueError: The file does not hold a finite, square, lower-triangular float64 matrix with a
        non-zero diagonal.
    """
    path = _matrix_file(Path(path))
    return _to_strategy(_parse(path.read_bytes(), path), tolerance, path)


def import_google_mechanism(
    path: str | os.PathLike[str],
    participation: Participation,
    *,
    noise_multiplier: float,
    l2_norm_clip: float,
    delta: float,
    workload: Workload | None = None,
    sampling: SamplingScheme | None = None,
    tolerance: float = TOLERANCE,
) -> Mechanism:
    """Returns the mechanism of a matrix of Google's; its provenance names file and digest.

    Args:
      path: As in `load_google_matrix`.
      participation: In which rounds one unit may contribute; not part of the file.
      noise_multiplier: Standard deviation of z over the clip norm, for the matrix as published.
      l2_norm_clip: Clip norm.
      delta: Delta of the guarantee.
      workload: What the matrix was made for; None stands for prefix sums.
      sampling: How batches are drawn, if epsilon is amplified by it.
      tolerance: As in `load_google_matrix`.
    """
    path = _matrix_file(Path(path))
    data = path.read_bytes()
    strategy = _to_strategy(_parse(data, path), tolerance, path)
    notes: Mapping[str, str | int | float] = {
        "source": f"imported from {path.name}",
        "source_sha256": hashlib.sha256(data).hexdigest(),
        "tolerance": tolerance,
    }
    return Mechanism.create(
        strategy,
        workload or workloads.prefix_sum(strategy.num_rounds),
        participation,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
        delta=delta,
        sampling=sampling,
        notes=notes,
    )


def _matrix_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / name for name in FILE_NAMES if (path / name).is_file()]
    if len(found) != 1:
        raise BandMFError(
            f"The folder {path} must hold exactly one of {FILE_NAMES}; name the file instead. "
            f"Found {[file.name for file in found]}."
        )
    return found[0]


def _parse(data: bytes, path: Path) -> np.ndarray:
    """Returns the square float64 matrix in a serialised TensorProto."""
    try:
        fields = _fields(data)
        (number,), (encoded,) = fields[_DTYPE], fields[_SHAPE]
        content = memoryview(fields.get(_CONTENT, [b""])[-1])
        dimensions = [_fields(each) for each in _fields(encoded).get(_DIMENSION, [])]
        shape = tuple(operator.index(fields.get(_SIZE, [0])[-1]) for fields in dimensions)
    except (EOFError, LookupError, TypeError, ValueError):  # One field is not as it should be.
        raise BandMFError(
            f"{path} is not a serialised TensorProto; `tf.io.serialize_tensor` writes one."
        ) from None
    dtype = _TYPES.get(number, f"type {number}")
    if dtype != _FLOAT64:
        raise BandMFError(f"{path} must hold a float64 matrix. Found {dtype}.")
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise BandMFError(f"{path} must hold a square matrix. Found shape {shape}.")
    # Comparing sizes first: a short proto may announce a matrix that no memory holds.
    if len(content) != 8 * math.prod(shape):
        raise BandMFError(
            f"{path} must hold {math.prod(shape)} float64 numbers for its shape {shape}; it is "
            f"truncated or not written by `tf.io.serialize_tensor`. Found {len(content)} bytes."
        )
    return np.frombuffer(content, dtype="<f8").reshape(shape)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Returns the values of a protocol buffer by their tags, each a number or bytes.

    Raises:
      EOFError: The buffer ends within a value, or a number does not end.
      LookupError: A value has an unknown wire type.
      TypeError: `data` is a number.
    """
    fields: dict[int, list[Any]] = {}
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        tag, wire_type = divmod(_varint(stream), 8)
        if wire_type == _VARINT:
            value: Any = _varint(stream)
        else:
            is_delimited = wire_type == _LENGTH_DELIMITED
            size = _varint(stream) if is_delimited else _FIXED_BYTES[wire_type]
            if size > len(data) - stream.tell():
                raise EOFError
            value = stream.read(size)
        fields.setdefault(tag, []).append(value)
    return fields


def _varint(stream: io.BytesIO) -> int:
    """Returns a number of seven bits a byte, the lowest first; all but its last have bit 8 set."""
    number = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            break
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number
    raise EOFError


def _to_strategy(
    matrix: np.ndarray, tolerance: float, path: Path
) -> BandedStrategy | DenseStrategy:
    if not 0.0 <= tolerance < 1.0:
        raise BandMFError(f"tolerance must be in [0, 1). Found {tolerance}.")
    if not np.all(np.isfinite(matrix)):
        raise BandMFError(f"{path} must hold finite numbers. Found NaN or infinity.")
    diagonal = np.abs(np.diagonal(matrix))
    if not np.all(diagonal):
        raise BandMFError(
            f"{path} must hold a matrix with a non-zero diagonal, or it has no inverse. Found 0 at "
            f"round {int(np.argmin(diagonal))}."
        )
    rows, columns = np.nonzero(np.abs(matrix) > tolerance * diagonal)
    if np.any(columns > rows):
        first = int(np.argmax(columns > rows))
        raise BandMFError(
            f"{path} must hold a lower-triangular matrix; factor H^T H with `lower_factor` to get "
            f"one of the same guarantee. Found {matrix[rows[first], columns[first]]:g} at row "
            f"{rows[first]}, column {columns[first]}."
        )
    n, num_bands = len(matrix), int(np.max(rows - columns)) + 1
    if num_bands == n > 1:
        return DenseStrategy(np.tril(matrix))
    bands = np.zeros((num_bands, n))
    for d in range(num_bands):
        bands[d, : n - d] = np.diagonal(matrix, -d)
    return BandedStrategy(bands)
