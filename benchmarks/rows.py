"""What a benchmark found, as a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any


def write_rows(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows, which need not have the same columns, to a CSV file if there is a path."""
    if not path:
        return
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
