"""Run records: what a Keras training run did, as JSON for the privacy report.

A record says which mechanism added noise (by checksum), how many of its rounds were completed, how
batches were drawn and how that is known, and what has to be said about it. It holds no noise, no
seed and no metric of the training data. The batch sizes in it depend on the draw of the batches,
not on the content of examples.

Compatibility. Fields are only ever added and their meanings never change; an added field raises the
version, and a reader refuses versions that it does not know. Version 2 added `noise_source`; of
records of version 1 it is "unknown", which a report refuses like a pinned one. Version 3 added
`unit` and `examples_per_user`; the unit of older records is "unknown", and a report says that it
assumes examples. Version 4 added `adaptive_clipping`; no older run had any.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from bandmf_tf import _checks, _json
from bandmf_tf._files import write_atomically
from bandmf_tf.accounting.schemes import SamplingScheme, scheme_from_json
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs.basis import NOISE_SOURCES, UNKNOWN, Basis, check_adaptive_clipping

FORMAT = "bandmf_tf run record"
VERSION = 4
EXAMPLE, USER = "example", "user"  # What was drawn and clipped; of old records it is UNKNOWN.

_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "mechanism_checksum": (str, type(None)),
    "num_rounds": (int,),
    "rounds_completed": (int,),
    "sampling": (dict, type(None)),
    "sampling_basis": (str,),
    "batch_size": _NUMBER,
    "batch_sizes_seen": (dict,),
    "noise_multiplier": _NUMBER,
    "l2_norm_clip": _NUMBER,
    "microbatch_size": (int,),
    "accumulation_steps": (int,),
    "epsilon": (*_NUMBER, type(None)),
    "delta": (*_NUMBER, type(None)),
    "adjacency": (str,),
    "started": (str,),
    "finished": (str,),
    "noise_source": (str,),
    "unit": (str,),
    "examples_per_user": (int, type(None)),
    "adaptive_clipping": (dict, type(None)),
    "cautions": (list,),
    "versions": (dict,),
}


class RunRecordError(BandMFError):
    """A file is not a valid run record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a training run did.

    Attributes:
      mechanism_checksum: Of the mechanism; None if noise was added without one.
      num_rounds: Rounds that the mechanism was planned for.
      rounds_completed: Rounds done, those before a restart included; in a record that is written
        while rounds are done, the largest number that may have been when the next one is written.
      sampling: How batches were drawn; None if that is not known.
      sampling_basis: "enforced" if the library drew all batches itself, "assumed" otherwise.
      batch_size: What sums of gradients were divided by.
      batch_sizes_seen: Smallest, largest and mean number of examples or users in a round; empty if
        none.
      noise_multiplier: Noise over clip norm.
      l2_norm_clip: Clip norm of one example's, or one user's, contribution to one round; if it
        adapts, the first one.
      microbatch_size: Examples averaged before clipping.
      accumulation_steps: Batches that made up one round.
      epsilon: Of the completed rounds at `delta`, if nothing in `cautions` speaks against it; None
        without a mechanism.
      delta: Delta of epsilon.
      adjacency: Neighbours of epsilon.
      started: Beginning of the last call of `fit`, UTC.
      finished: Its end, UTC.
      noise_source: "system", "pinned" or "unknown", of all rounds together.
      unit: What was drawn and clipped: "example", "user" or "unknown".
      examples_per_user: With how many examples at most a user took part in a round, the mean of
        whose gradients was clipped; None if the unit is no user.
      adaptive_clipping: How the clip norm adapted within the same releases: `target_quantile`,
        `learning_rate` and `vote_weight` by name; None if it did not.
      cautions: Why the guarantee does not hold as stated, in sentences; empty if it does.
      versions: Of the software.
    """

    mechanism_checksum: str | None
    num_rounds: int
    rounds_completed: int
    sampling: SamplingScheme | None
    sampling_basis: str
    batch_size: float
    batch_sizes_seen: dict[str, float]
    noise_multiplier: float
    l2_norm_clip: float
    microbatch_size: int
    accumulation_steps: int
    epsilon: float | None
    delta: float | None
    adjacency: str
    started: str
    finished: str
    noise_source: str
    unit: str = EXAMPLE
    examples_per_user: int | None = None
    adaptive_clipping: dict[str, float] | None = None
    cautions: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _checks.positive_int("num_rounds", self.num_rounds)
        _checks.int_at_least("rounds_completed", self.rounds_completed, 0)
        if self.rounds_completed > self.num_rounds:
            raise BandMFError(
                f"rounds_completed must be at most num_rounds={self.num_rounds}. Found "
                f"{self.rounds_completed}."
            )
        if self.sampling_basis not in (Basis.ENFORCED, Basis.ASSUMED):
            raise BandMFError(
                f"sampling_basis is enforced or assumed. Found {self.sampling_basis!r}."
            )
        if self.noise_source not in NOISE_SOURCES:
            raise BandMFError(f"noise_source must be known. Found {self.noise_source!r}.")
        if self.unit not in (EXAMPLE, USER, UNKNOWN):
            raise BandMFError(f"unit must be {EXAMPLE!r} or {USER!r}. Found {self.unit!r}.")
        if self.unit == USER:
            _checks.positive_int("examples_per_user", self.examples_per_user)
        elif self.examples_per_user is not None:
            raise BandMFError(
                f"examples_per_user is for users, and the unit is {self.unit!r}. Found "
                f"{self.examples_per_user}."
            )
        check_adaptive_clipping(self.adaptive_clipping)
        for name in ("batch_size", "noise_multiplier", "l2_norm_clip"):
            _checks.positive_float(name, getattr(self, name))

    def to_json(self) -> dict[str, Any]:
        """Returns the record as it is written."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "format": FORMAT,
            "version": VERSION,
            **fields,
            "sampling": None if self.sampling is None else self.sampling.to_json(),
            "cautions": list(self.cautions),
        }

    @classmethod
    def from_json(cls, value: Any) -> RunRecord:
        """Returns the record that `to_json` has described; raises `RunRecordError` otherwise."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise RunRecordError(f'Not an object of the format "{FORMAT}".')
        version = value.get("version")
        if isinstance(version, bool) or version not in range(1, VERSION + 1):
            raise RunRecordError(
                f"This library reads run records of versions 1 to {VERSION}. Found {version!r}."
            )
        fields = {name: entry for name, entry in value.items() if name not in ("format", "version")}
        assert version is not None
        if version < 4:
            fields = {"adaptive_clipping": None, **fields}
        if version < 3:
            fields = {"unit": UNKNOWN, "examples_per_user": None, **fields}
        if version < 2:
            fields = {"noise_source": UNKNOWN, **fields}
        if fields.keys() != _TYPES.keys():
            raise RunRecordError(
                f"A run record has the fields {sorted(_TYPES)}. Found {sorted(map(str, fields))}."
            )
        for name, types in _TYPES.items():
            if not isinstance(fields[name], types) or isinstance(fields[name], bool):
                raise RunRecordError(f"The field {name} is invalid. Found {fields[name]!r}.")
        try:
            if fields["sampling"] is not None:
                fields["sampling"] = scheme_from_json(fields["sampling"])
            fields["cautions"] = tuple(map(str, fields["cautions"]))
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise RunRecordError(f"A field of the run record is invalid: {error}") from error


def save_run_record(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Writes the record to `path`, atomically and durably."""
    text = json.dumps(record.to_json(), indent=2, sort_keys=True, allow_nan=False)
    write_atomically(path, f"{text}\n".encode("ascii"))


def load_run_record(path: str | os.PathLike[str]) -> RunRecord:
    """Returns the record in a file.

    Raises:
      RunRecordError: The file is not a valid run record.
      OSError: The file cannot be read.
    """
    return _json.load(path, RunRecord.from_json, RunRecordError)
