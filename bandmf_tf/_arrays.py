"""Named arrays in one deterministic file: an uncompressed zip archive of NumPy's `.npy` members.

That is NumPy's `.npz`, which `np.load` and any zip tool read, with everything fixed that NumPy and
zip leave open: order, dates, permissions, padding. Equal content gives equal bytes, on every
platform and under every version of NumPy, so a digest of the bytes is a digest of the content.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from bandmf_tf.errors import BandMFError, BandMFTypeError

_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # Zip has no earlier one.
_UNIX = 3

_T = TypeVar("_T")


def pack(members: Mapping[str, bytes], permissions: int = 0o644) -> bytes:
    """Returns an archive that depends on nothing but the arguments.

    Args:
      members: Content by name, in this order.
      permissions: Recorded for the members, for tools that unpack them.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, _FIRST_DATE)
            info.create_system, info.external_attr = _UNIX, permissions << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Returns the members of an archive; never reads more bytes out of it than it has."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if sum(info.file_size for info in infos) > len(data):
                raise BandMFError("its members are larger than the file.")
            return {info.filename: archive.read(info) for info in infos}
    except Exception as error:  # Damaged archives raise half a dozen types.
        raise BandMFError(f"it is not a whole zip archive ({error}).") from error


def npy(array: np.ndarray) -> bytes:
    """Returns an array of numbers or fixed strings in NumPy's format, in C order."""
    if array.dtype.hasobject:
        raise BandMFTypeError(f"Files hold numbers and fixed strings. Found {array.dtype}.")
    return _npy_header(array.dtype, array.shape) + array.tobytes()


def parse_npy(name: str, data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array that `npy` has written; `name` is for errors."""
    header = _npy_header(dtype, shape)
    if not data.startswith(header) or len(data) != len(header) + dtype.itemsize * math.prod(shape):
        raise BandMFError(f"the array {name} is not a {dtype} array of shape {shape}.")
    return np.frombuffer(data, dtype, offset=len(header)).reshape(shape)


def part(arrays: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Returns the arrays whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}".encode("ascii")
    preamble = 10  # Magic string, version and length.
    text += b" " * (-(preamble + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
