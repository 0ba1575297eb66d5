"""Comparisons with the paper: one entry, one table, one printer, one CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

# Called with the number of finished steps of a computation, their total, and what comes next.
Progress = Callable[[int, int, str], None]

_LINE = 100
_CSV_FIELDS = ("row", "column", "paper", "ours", "difference", "matches", "note")


def silent(done: int, total: int, what: str) -> None:
    """The `Progress` that shows nothing."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One number of the paper beside ours.

    Attributes:
      row: What the table calls the row.
      column: What the table calls the column.
      published: The printed digits; None where the paper has no number and ours is an addition.
      ours: Our number, unrounded.
      note: Why the two differ, or what else a reader should know.
    """

    row: str
    column: str
    published: Decimal | None
    ours: float
    note: str = ""

    @property
    def places(self) -> int:
        """Decimal places of the printed digits; four where nothing is printed."""
        if self.published is None:
            return 4
        exponent = self.published.as_tuple().exponent
        assert isinstance(exponent, int), "published digits are finite"
        return -exponent

    @property
    def difference(self) -> float:
        """Ours minus the printed digits."""
        if self.published is None:
            raise ValueError(f"{self.row}, {self.column}: the paper prints no number here.")
        return self.ours - float(self.published)

    @property
    def matches(self) -> bool:
        """Whether ours, rounded to the printed places, gives the printed digits."""
        return self.published is not None and f"{self.ours:.{self.places}f}" == str(self.published)

    @property
    def last_digits(self) -> float:
        """The difference in units of the last printed digit."""
        return self.difference * 10.0**self.places


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the paper beside ours.

    Attributes:
      name: Name of the files it is written to.
      title: What it is, in words.
      label: Its label in the paper's source.
      conventions: A sentence for each convention that had to be inferred.
      entries: The numbers.
      left_out: A sentence for each part that was not computed.
      counted: What the matching entries are, in words.
    """

    name: str
    title: str
    label: str
    conventions: tuple[str, ...]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...] = ()
    counted: str = "printed values match in every digit"

    @property
    def compared(self) -> tuple[Entry, ...]:
        """The entries for which the paper prints a number."""
        return tuple(entry for entry in self.entries if entry.published is not None)

    @property
    def num_matches(self) -> int:
        """How many of the compared entries agree in every printed digit."""
        return sum(entry.matches for entry in self.compared)

    def summary(self) -> str:
        """Returns the result in one line."""
        left_out = f" (left out: {'; '.join(self.left_out)})" if self.left_out else ""
        return (
            f"{self.name}: {self.num_matches} of {len(self.compared)} {self.counted} "
            f"[{self.label}]{left_out}"
        )


def format_table(table: Table) -> str:
    """Returns the table as text: the conventions, then paper, ours and the difference."""
    lines = [f"{table.title} [{table.label}]", ""]
    for sentence in table.conventions:
        lines += textwrap.wrap(sentence, _LINE, initial_indent="  - ", subsequent_indent="    ")
    row_width = max(len(entry.row) for entry in table.entries)
    column_width = max(len(entry.column) for entry in table.entries)
    lines += [
        "",
        f"  {'':{row_width}}  {'':{column_width}}  {'paper':>9}  {'ours':>11}  difference",
    ]
    for entry in table.entries:
        lines.append(
            f"  {entry.row:{row_width}}  {entry.column:{column_width}}  "
            f"{_printed(entry):>9}  {_ours(entry):>11}  {_verdict(entry)}".rstrip()
        )
    notes = dict.fromkeys(entry.note for entry in table.entries if entry.note)
    for note in notes:
        lines += textwrap.wrap(note, _LINE, initial_indent="  * ", subsequent_indent="    ")
    return "\n".join([*lines, ""])


def write_csv(table: Table, folder: Path) -> Path:
    """Writes every entry, unrounded, into `folder` and returns the file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_CSV_FIELDS)
    for entry in table.entries:
        known = entry.published is not None
        writer.writerow(
            (
                entry.row,
                entry.column,
                entry.published if known else "",
                repr(float(entry.ours)),
                f"{entry.difference:.3g}" if known else "",
                entry.matches if known else "",
                entry.note,
            )
        )
    path = folder / f"{table.name}.csv"
    path.write_text(buffer.getvalue(), encoding="utf-8")
    return path


def _printed(entry: Entry) -> str:
    return "-" if entry.published is None else str(entry.published)


def _ours(entry: Entry) -> str:
    # Two more places than the paper show how close a rounding was; whole numbers have none.
    return f"{entry.ours:.{entry.places + 2 if entry.places else 0}f}"


def _verdict(entry: Entry) -> str:
    if entry.published is None:
        return ""
    mark = "" if entry.matches else "   differs *" if entry.note else "   differs"
    return f"{entry.difference:+.{entry.places + 2 if entry.places else 0}f}{mark}"
