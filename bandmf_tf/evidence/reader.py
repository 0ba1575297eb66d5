"""What readers of evidence are asked, and what they answer.

There is one reader for each source of evidence: a module with a `KIND`, a `supports(path)` that
says whether a file is of that kind, and a `read(path, run)` that returns the `Evidence` in it. A
new source is one such module and one entry in the list of `gather.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bandmf_tf import _checks
from bandmf_tf._files import file_digest
from bandmf_tf._numbers import exactly
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence.participation import (
    ObservedParticipation,
    ParticipationError,
    with_stated_limits,
)
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import SYSTEM, Basis
from bandmf_tf.runs.ledger import Ledger

# What a unit of privacy is, by the kind of evidence.
UNIT_DEVICE = "device"
UNIT_EXAMPLE = "example"
UNIT_CLIENT = "client"
UNIT_USER = "user"

EDITIONS = ("public", "internal")
SMALL_COUNT = 20

# Whatever says what it is says it in so many bytes.
_SNIFFED = 1 << 24


class ReportError(BandMFError):
    """A report cannot be made or does not hold; the message says why in one sentence."""


class UnreadableError(ReportError):
    """A file of the evidence is not there or cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What a report is asked for. Either `run` or `mechanism` is given.

    Attributes:
      run: Folder of a training run.
      mechanism: A mechanism file.
      participation: A participation log or counts of one, a ledger, a run record, or a timeline of
        rounds. A folder, or a pattern of names, stands for the logs in it: shards of one log.
      further_participation: Further shards of the log.
      fold_clients: Whether spellings of one client in a log are folded, see `logs.py`.
      ledger_head: The last hash of the ledger, from a record that was kept elsewhere.
      edition: "public", without counts and places that single out a unit, or "internal".
      small_count: Counts below it do not stand in a public edition.
      timer_seconds: Period of the clients' timer.
      min_separation: A stated limit on participation; never improves on evidence.
      max_participations: A stated limit on participation; never improves on evidence.
      rounds_completed: Number of completed rounds, if no ledger says it.
      noise_multiplier: Noise over clip norm, if it was not the mechanism's.
      delta: Delta of the guarantee; None stands for the mechanism's.
      audit: The record of an audit of the mechanism (`audit.json`), which the report then carries.
      facts: What the evidence cannot tell, in a file of the operator's, see `report/facts.py`.
      replace_one: Whether the guarantee is stated for replace-one neighbours, too.
    """

    run: Path | None = None
    mechanism: Path | None = None
    participation: Path | None = None
    further_participation: tuple[Path, ...] = ()
    fold_clients: bool = False
    ledger_head: str | None = None
    edition: str = "internal"
    small_count: int = SMALL_COUNT
    timer_seconds: float | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    rounds_completed: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    audit: Path | None = None
    facts: Path | None = None
    replace_one: bool = False

    def __post_init__(self) -> None:
        if (self.run is None) == (self.mechanism is None):
            found = "neither" if self.run is None else "both"
            raise ReportError(
                "Exactly one of run (the folder of a run) and mechanism (a mechanism file) must be "
                f"given. Found {found}."
            )
        for path in self.paths:
            check_name(path)
        if self.ledger_head is not None and not re.fullmatch("[0-9a-f]{64}", self.ledger_head):
            raise ReportError(
                "ledger_head must be the 64 hexadecimal digits, 0 to f, at the end of a line of "
                f"the record. Found {self.ledger_head!r:.80}."
            )
        if self.edition not in EDITIONS:
            raise ReportError(f"edition must be one of {EDITIONS}. Found {self.edition!r}.")
        for name in ("min_separation", "max_participations", "rounds_completed", "small_count"):
            if getattr(self, name) is not None:
                _checks.positive_int(name, getattr(self, name))
        if self.edition == "public" and self.small_count < 2:
            raise ReportError(
                "small_count must be at least 2 in a public edition, where 1 leaves nothing out; "
                f"state edition=internal for all counts. Found {self.small_count}."
            )
        for name in ("timer_seconds", "noise_multiplier"):
            if getattr(self, name) is not None:
                _checks.positive_float(name, getattr(self, name))
        if self.delta is not None:
            _checks.probability("delta", self.delta)
        if self.run is not None and self.noise_multiplier is not None:
            raise ReportError(
                "noise_multiplier belongs to reports without a run folder; the ledger of a run "
                f"says which mechanism it used. Found {self.noise_multiplier}."
            )

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, folders and patterns that were given."""
        paths = (self.run, self.mechanism, self.participation, self.audit, self.facts)
        return tuple(path for path in (*paths, *self.further_participation) if path is not None)

    @property
    def smallest_count(self) -> int:
        """The smallest count of units that may be shown."""
        return self.small_count if self.edition == "public" else 1


def shown_count(count: int, smallest: int) -> str:
    """Returns a count in words that single out nobody."""
    return f"{count:,}" if count >= smallest else f"fewer than {smallest:,}"


def adaptive_clip_note(what: str, settings: Mapping[str, float], l2_norm_clip: float) -> str:
    """Returns in words how a clip norm followed a quantile of the norms of something."""
    return (
        f"The clip norm followed a quantile of the norms of {what} (target_quantile="
        f"{settings['target_quantile']}), from l2_norm_clip={exactly(l2_norm_clip)} on. It was "
        "estimated by one more coordinate of the same releases, in which no contribution is "
        "longer than the mechanism allows, so the guarantee covers it."
    )


def check_name(path: Path) -> None:
    """Raises unless the name can be written into a report."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        name = text.encode(errors="surrogatepass")
        raise ReportError(f"The name of a file must be text in UTF-8; rename {name!r}.") from None
    if "\0" in text:  # Of a report by a stranger.
        raise ReportError(f"No file has a name with a zero byte in it. Found {text!r}.")


@dataclasses.dataclass(frozen=True)
class EvidenceFile:
    """A file that a report rests on: what it is, where it is and its SHA-256."""

    kind: str
    path: Path
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The run that a report is about.

    Attributes:
      request: What was asked for.
      mechanism: The mechanism whose noise was added.
      checksum: Its identity.
      files: The files that were read.
    """

    request: ReportRequest
    mechanism: Mechanism
    checksum: str
    files: tuple[EvidenceFile, ...]

    @classmethod
    def of_mechanism(cls, request: ReportRequest, path: Path) -> Run:
        """Returns the run of the mechanism in a file, of which nothing else is known."""
        mechanism = load_mechanism(path)
        run = cls(request, mechanism, mechanism_checksum(mechanism), ())
        return run.with_file("mechanism", path)

    def with_file(self, kind: str, *paths: Path) -> Run:
        """Returns the run with further files that were read."""
        files = (EvidenceFile(kind, path, file_digest(path)) for path in paths)
        return dataclasses.replace(self, files=(*self.files, *files))

    def limited(
        self, observed: ObservedParticipation, *, cap_may_bind: bool = False
    ) -> ObservedParticipation:
        """Returns the weaker of what was observed and what the request states."""
        return with_stated_limits(
            observed,
            self.request.min_separation,
            self.request.max_participations,
            cap_may_bind=cap_may_bind,
        )

    def check_rounds(self, completed: int, source: str) -> None:
        """Raises if another number of rounds is stated than the source has."""
        if self.request.rounds_completed not in (None, completed):
            raise ReportError(
                f"The {source} has {completed} completed rounds. Found "
                f"rounds_completed={self.request.rounds_completed}."
            )

    def check_noise(self, known: float, source: str) -> None:
        """Raises if another noise is stated than the one the evidence is of."""
        stated = self.request.noise_multiplier
        if stated is not None and stated != known:
            raise ReportError(
                f"The {source} has noise_multiplier={exactly(known)}. Found "
                f"noise_multiplier={exactly(stated)}; leave it out."
            )

    def check_no_timer(self, source: str) -> None:
        """Raises if a timer is stated beside a source that says itself who took part when."""
        if self.request.timer_seconds is not None:
            raise ReportError(
                "timer_seconds belongs to a ledger or a timeline of rounds. Found "
                f"{self.request.timer_seconds} with a {source}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What is known of a run.

    Attributes:
      run: The run, with its mechanism and the files that all this was read from.
      observed: How units took part.
      enforced: How they could have taken part at most, by what was enforced, where `observed` is
        what they did.
      unit: What a unit is: "device", "example", "client" or "user".
      unit_basis: How that is known; None for what the evidence itself counts.
      examples_per_user: With how many examples at most a user took part in a round.
      clip_norm_adapts: Whether the clip norm followed a quantile of the norms.
      sampling: How batches were drawn, if it is known that units were sampled.
      sampling_basis: How that is known.
      noise_multiplier: The noise that was used, if the record of the run says it.
      ledger: The ledger, if there is one.
      timer_seconds: Period of the timer that clients are said to keep, if any.
      timer_seconds_basis: How it is known that they kept it.
      violators: Clients that cannot have kept to their timer, where that can be seen.
      well_behaved: How the other clients took part, if there are violators.
      notes: Further sentences about the evidence.
    """

    run: Run
    observed: ObservedParticipation
    enforced: ObservedParticipation | None = None
    unit: str = UNIT_CLIENT
    unit_basis: Basis | None = None
    examples_per_user: int | None = None
    clip_norm_adapts: bool = False
    sampling: SamplingScheme | None = None
    sampling_basis: Basis | None = None
    noise_multiplier: float | None = None
    ledger: Ledger | None = None
    timer_seconds: float | None = None
    timer_seconds_basis: Basis | None = None
    violators: int = 0
    well_behaved: ObservedParticipation | None = None
    notes: tuple[str, ...] = ()


class Reader(Protocol):
    """What a module that reads one source of evidence provides."""

    KIND: str

    def supports(self, path: Path) -> bool:
        """Whether the file is of this kind."""

    def read(self, path: Path, run: Run) -> Evidence:
        """Returns what the file says of the run; raises BandMFError if it says nothing."""


class LogReader(Reader, Protocol):
    """What a reader of logs provides, which may stand beside a ledger."""

    def observe(
        self, paths: Sequence[Path], run: Run, ledger: Ledger | None
    ) -> ObservedParticipation:
        """Returns what the log says, which must not contradict the ledger, if there is one."""


def check_noise_source(source: str, kind: str) -> None:
    """Raises unless the evidence says that nobody but the operating system knew the noise."""
    if source != SYSTEM:
        raise ParticipationError(
            f"the source of the noise is {source} by the {kind}, and noise that others may know "
            "protects nobody; train without a pinned seed, and with a version that records it."
        )


def stated_format(path: Path) -> object:
    """Returns what a JSON file, or the first line of JSON lines, says that it is, or None."""
    with path.open("rb") as file:
        data = file.read(_SNIFFED)
    for text in (data, data.partition(b"\n")[0]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return value.get("format") if isinstance(value, dict) else None
    return None
