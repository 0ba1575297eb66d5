"""Mechanism files (`.bandmf`): one self-describing file that holds a whole `Mechanism`.

The file is a zip archive without compression, so that standard tools can open it:

    mechanism.json                what the mechanism is, its conventions in words
    strategy_bands.npy            C in band storage, shape (num_bands, num_rounds); or
    strategy_coefficients.npy     C as the coefficients of a Toeplitz matrix; or
    strategy_matrix.npy           C as a dense matrix; or
    strategy_decays.npy           C as a BLT, the decays of its buffers and, beside them,
    strategy_scales.npy           their weights; or
    strategy_inverse_coefficients.npy   C as the coefficients of a banded Toeplitz inverse; or, for
                                  tree aggregation, no array at all
    workload_learning_rates.npy   one learning rate a step, unless it is constant

Arrays are little-endian float64. `mechanism.json` holds the SHA-256 of every array and, over all
that, its own: the SHA-256 of `mechanism.json` without the entry "checksum". This *checksum* is the
identity of a mechanism in ledgers and reports. Timestamps, order and spacing are fixed, so equal
mechanisms give equal bytes, and `load_mechanism` accepts nothing but those bytes.

The checksum detects damage and accidental edits. It does not detect a forger, who can compute it
again for other numbers; then the numbers still have to agree with each other, see `Mechanism`.

Compatibility. Fields are only ever added and their meanings never change. An added field raises the
version: a reader refuses files of a newer version than it knows, and reads all older ones. A
mechanism is written in the lowest version that can express it, so its checksum never changes.

    1   epsilon on a grid of the width "discretization"
    2   "discretization" is null: epsilon by closed form, or on a grid that follows the losses
    3   strategies of the kinds "blt" and "inverse_banded"; "num_bands" is the number of rounds
    4   sampling of the kinds "bounded_poisson", "balls_in_bins", "secret_parts",
        "min_separation" and "once_per_epoch"; with the last four, "certificate" of a guarantee
        that rests on samples
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from bandmf_tf import _arrays, schemas
from bandmf_tf._files import write_atomically
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.gaussian import Adjacency, PrivacyGuarantee
from bandmf_tf.accounting.schemes import scheme_from_json
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import participation_from_json
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.factorization.strategies import Strategy, restored_strategy
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.mechanism import Mechanism, Provenance

SUFFIX = ".bandmf"
FORMAT = "bandmf_tf mechanism"
VERSION = 4

# As the schema has it.
MAX_NUM_ROUNDS = 2_000_000

_MANIFEST = "mechanism.json"
_MAX_FILE_BYTES = 2**30
_MAX_MANIFEST_BYTES = 2**20
_FLOAT64 = np.dtype("<f8")

# What constructors and parsers raise for bad content; nesting without end is bad content, too.
_REJECTIONS = (TypeError, ValueError, RecursionError)

# Part of every file of version 1 and of its checksum: never edit these sentences.
_CONVENTIONS = {
    "strategy": "C, a lower-triangular matrix of num_rounds rows, as it is used; the mechanism "
    "releases x + C^-1 z row by row, z with independent Gaussian rows",
    "band storage": "strategy_bands[d, j] = C[j + d, j], zero outside the matrix; num_bands counts "
    "the main diagonal",
    "tree": "C^T C = scale^2 times the number of complete dyadic blocks of steps that hold both "
    "steps; estimator is full (OptTreeAgg) or online",
    "workload": "A = S diag(learning_rates) M, S prefix sums, M[i, j] = momentum^(i - j)",
    "noise_multiplier": "standard deviation of the entries of z divided by l2_norm_clip",
    "sensitivity": "of the strategy as stored, for clip norm 1, zero-out neighbours and the "
    "participation stated",
    "min_separation": "b = r2 - r1 at the least, for steps r1 < r2 in which one unit takes part",
    "rho": "sensitivity^2 / (2 noise_multiplier^2), zero-concentrated differential privacy",
    "epsilon": "upper bound at delta, by a privacy loss distribution on a grid of width "
    "discretization; amplified if sampling is not null",
    "adjacency": "zero-out: the contributions of one unit become zeros wherever it takes part",
    "checksum": "SHA-256 of this file, canonically formatted, without the entry checksum",
}

# The same for files of version 2.
_CONVENTIONS_2 = {
    **_CONVENTIONS,
    "epsilon": "upper bound at delta; of one Gaussian release by its closed form, of sampled ones "
    "by a privacy loss distribution on a grid that follows the loss of one step; the smaller one "
    "if sampling is not null",
}

# The same for files of version 3.
_CONVENTIONS_3 = {
    **_CONVENTIONS_2,
    "epsilon": _CONVENTIONS_2["epsilon"]
    + "; on a grid of width discretization if that is a number",
    "blt": "C is scale times the Toeplitz matrix of 1 and then the sum over buffers of "
    "strategy_scales times strategy_decays to the power of 0, 1, ..",
    "inverse_banded": "C^-1 is the Toeplitz matrix of strategy_inverse_coefficients",
}
_KINDS_3 = ("blt", "inverse_banded")

# The same for files of version 4.
_CONVENTIONS_4 = {
    **_CONVENTIONS_3,
    "epsilon": _CONVENTIONS_3["epsilon"] + "; with certificate, estimated with the confidence "
    "1 - failure_probability, which is part of delta",
    "certificate": "order replicas of a participation pattern, drawn samples times from seed and "
    "attempt, bound delta at epsilon; samples 0 is a bound without them",
}
_SAMPLING_3 = ("poisson", "fixed_size", "shuffling")
_CONVENTIONS_OF = {
    1: _CONVENTIONS,
    2: _CONVENTIONS_2,
    3: _CONVENTIONS_3,
    4: _CONVENTIONS_4,
}


class MechanismFileError(BandMFError):
    """A file is not a valid mechanism file, or is not what this library would have written."""


def save_mechanism(mechanism: Mechanism, path: str | os.PathLike[str]) -> str:
    """Writes the mechanism to `path`, atomically and durably, and returns its checksum."""
    manifest, members = _sealed(mechanism)
    data = _arrays.pack(members)
    if len(data) > _MAX_FILE_BYTES:
        raise MechanismFileError(
            f"{os.fspath(path)} would have {len(data)} bytes, more than the {_MAX_FILE_BYTES} of a "
            "mechanism file; use a strategy with fewer bands, or a BLT."
        )
    write_atomically(path, data)
    return manifest["checksum"]


def load_mechanism(path: str | os.PathLike[str]) -> Mechanism:
    """Returns the mechanism in the file at `path` after verifying all of it.

    Verified are the container, the schema, every digest, and that sensitivity and rho follow from
    the strategy and its noise. Epsilon of a sampled mechanism takes up to seconds to compute again:
    private optimizers and reports do, others call `verify_epsilon()` on the result.

    Raises:
      MechanismFileError: The file is damaged, edited, foreign or of a newer version.
      OSError: The file cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    return decode_mechanism(data, os.fspath(path))


def encode_mechanism(mechanism: Mechanism) -> bytes:
    """Returns the bytes of the mechanism's file."""
    return _arrays.pack(_sealed(mechanism)[1])


def decode_mechanism(data: bytes, name: str = "It") -> Mechanism:
    """The inverse of `encode_mechanism`; verifies like `load_mechanism`.

    Args:
      data: The bytes of a mechanism file.
      name: What an error calls them.
    """
    try:
        return _parse(data)
    except _REJECTIONS as error:
        raise MechanismFileError(f"{name} is not a valid mechanism file: {error}") from error


def mechanism_checksum(mechanism: Mechanism) -> str:
    """Returns the checksum that identifies the mechanism, 64 hexadecimal digits."""
    return _sealed(mechanism)[0]["checksum"]


def _parse(data: bytes) -> Mechanism:
    if len(data) > _MAX_FILE_BYTES:
        raise BandMFError(f"it is longer than {_MAX_FILE_BYTES} bytes.")
    members = _arrays.unpack(data)
    if _MANIFEST not in members:
        raise BandMFError(f"it has no member {_MANIFEST}.")
    manifest = _parse_manifest(members.pop(_MANIFEST))
    arrays = _parse_arrays(manifest["arrays"], members)
    mechanism = _build(manifest, arrays)
    if encode_mechanism(mechanism) != data:
        raise BandMFError(
            "its bytes are not those that are written for its content; it was edited."
        )
    return mechanism


# Mechanism <-> manifest and arrays.


def _sealed(mechanism: Mechanism) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the manifest with digests and checksum, and all members of the file."""
    manifest, arrays = _describe(mechanism)
    members = {
        name: _arrays.npy(np.asarray(array, _FLOAT64)) for name, array in sorted(arrays.items())
    }
    manifest["arrays"] = {
        name: {"shape": list(arrays[name].shape), "sha256": _sha256(member)}
        for name, member in members.items()
    }
    manifest["checksum"] = _sha256(_json(manifest))
    _validate(manifest)
    files = {f"{name}.npy": member for name, member in members.items()}
    return manifest, {_MANIFEST: _json(manifest), **files}


def _describe(mechanism: Mechanism) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    strategy, arrays = _describe_strategy(mechanism.strategy)
    workload = mechanism.workload
    rate: float | None = float(workload.learning_rates[0])
    if not workload.has_constant_learning_rate:
        rate, arrays["workload_learning_rates"] = None, workload.learning_rates
    guarantee = _fields(mechanism.guarantee)
    certificate = guarantee.pop("certificate")
    if certificate is not None:
        guarantee["certificate"] = _fields(certificate)
    version = 2 if mechanism.discretization is None else 1
    if strategy["kind"] in _KINDS_3:
        version = 3
    if mechanism.sampling is not None and mechanism.sampling.kind not in _SAMPLING_3:
        version = 4
    manifest = {
        "format": FORMAT,
        "version": version,
        "conventions": _CONVENTIONS_OF[version],
        "num_rounds": mechanism.num_rounds,
        "num_bands": mechanism.num_bands,
        "strategy": strategy,
        "workload": {"momentum": workload.momentum, "learning_rate": rate},
        "participation": mechanism.participation.to_json(),
        "sampling": None if mechanism.sampling is None else mechanism.sampling.to_json(),
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_norm_clip": mechanism.l2_norm_clip,
        "sensitivity": _fields(mechanism.sensitivity),
        "guarantee": {
            **guarantee,
            "adjacency": mechanism.guarantee.adjacency.value,
            "assumptions": list(mechanism.guarantee.assumptions),
            "discretization": mechanism.discretization,
        },
        "provenance": {
            **_fields(mechanism.provenance),
            "notes": dict(mechanism.provenance.notes),
        },
    }
    return manifest, arrays


def _build(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Mechanism:
    """The inverse of `_describe`; the constructors verify what they are given."""
    guarantee, sampling = dict(manifest["guarantee"]), manifest["sampling"]
    certificate = guarantee.pop("certificate", None)
    return Mechanism(
        strategy=_build_strategy(manifest, arrays),
        workload=_build_workload(manifest, arrays),
        participation=participation_from_json(manifest["participation"]),
        sampling=None if sampling is None else scheme_from_json(sampling),
        noise_multiplier=manifest["noise_multiplier"],
        l2_norm_clip=manifest["l2_norm_clip"],
        sensitivity=Sensitivity(**manifest["sensitivity"]),
        discretization=guarantee.pop("discretization"),
        guarantee=PrivacyGuarantee(
            **{
                **guarantee,
                "adjacency": Adjacency(guarantee["adjacency"]),
                "assumptions": tuple(guarantee["assumptions"]),
                "certificate": None if certificate is None else Certificate(**certificate),
            }
        ),
        provenance=Provenance(**manifest["provenance"]),
    )


def _describe_strategy(strategy: Strategy) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the strategy as files hold it; its number of rounds is the mechanism's."""
    stored, arrays = strategy.stored()
    stored.pop("num_rounds", None)
    return stored, {f"strategy_{name}": array for name, array in arrays.items()}


def _build_strategy(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Strategy:
    stored = {**manifest["strategy"], "num_rounds": manifest["num_rounds"]}
    prefix = "strategy_"
    own = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
    return restored_strategy(stored, own)


def _build_workload(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Workload:
    num_rounds, rate = manifest["num_rounds"], manifest["workload"]["learning_rate"]
    if rate is None:
        rates = _array(arrays, "workload_learning_rates")
    else:
        rates = np.full(num_rounds, rate, dtype=np.float64)
    return Workload(num_rounds, manifest["workload"]["momentum"], rates)


def _fields(instance: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, NumPy's scalars as Python's."""
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in fields.items()
    }


# Manifest and arrays <-> bytes.


def _json(manifest: dict[str, Any]) -> bytes:
    text = json.dumps(manifest, sort_keys=True, indent=2, allow_nan=False)
    return f"{text}\n".encode("ascii")


def _parse_manifest(data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_MANIFEST_BYTES:
        raise BandMFError(f"{_MANIFEST} must be at most {_MAX_MANIFEST_BYTES} bytes long.")
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BandMFError(f'{_MANIFEST} is not an object of the format "{FORMAT}".')
    version = manifest.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BandMFError(
            f"it has version {version} and this library reads up to {VERSION}; install a newer one."
        )
    _validate(manifest)
    unsealed = {name: value for name, value in manifest.items() if name != "checksum"}
    if _sha256(_json(unsealed)) != manifest["checksum"]:
        raise BandMFError(f"{_MANIFEST} does not match its checksum; it was edited or damaged.")
    return manifest


def _validate(manifest: dict[str, Any]) -> None:
    error = schemas.find_error(manifest, f"mechanism-v{VERSION}")
    if error is not None:
        raise BandMFError(f"{error.json_path} in {_MANIFEST} is invalid: {error.message[:200]}.")


def _parse_arrays(
    declared: dict[str, dict[str, Any]], members: dict[str, bytes]
) -> dict[str, np.ndarray]:
    expected = {f"{name}.npy" for name in declared}
    if members.keys() != expected:
        raise BandMFError(f"it must have the arrays {sorted(expected)}. Found {sorted(members)}.")
    arrays = {}
    for name, entry in declared.items():
        member, shape = members[f"{name}.npy"], tuple(entry["shape"])
        if _sha256(member) != entry["sha256"]:
            raise BandMFError(f"the array {name} does not match its SHA-256; it was damaged.")
        arrays[name] = _arrays.parse_npy(name, member, _FLOAT64, shape)
    return arrays


def _array(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise BandMFError(f"it lacks the array {name}.")
    return arrays[name]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
