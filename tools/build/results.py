"""Writes docs/results.md from the tables in benchmarks/results/ and the words in its page.toml.

    python -m tools.build.results

A table is a CSV file as a person reads it. Whoever measures again changes the file and runs this.
"""

from __future__ import annotations

import csv
import pathlib
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
_RESULTS = ROOT / "benchmarks" / "results"

_HEAD = """\
# Results

Every figure, with the command that measures it again. The machine had two x86_64 cores and no GPU.
On a busy machine only ratios within one table mean something. `python` is that of a checkout after
`make setup`. `python -m tools.build.results` writes this page from `benchmarks/results/`.
"""


def page() -> str:
    """Returns the page of results."""
    sections = tomllib.loads((_RESULTS / "page.toml").read_text())["section"]
    return "\n".join([_HEAD, *map(_section, sections)])


def _section(section: dict[str, Any]) -> str:
    parts = [f"## {section['title']}", section["text"].strip()]
    parts += [f"`{section['command']}`"] if "command" in section else []
    parts += [f"![{words}]({path})" for path, words in section.get("images", {}).items()]
    parts += [_table(name) for name in section.get("tables", [])]
    return "\n\n".join(parts) + "\n"


def _table(name: str) -> str:
    with (_RESULTS / f"{name}.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page())
