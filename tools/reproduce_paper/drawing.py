"""Drawing shared by the pictures: files of them, and entries against the paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bandmf_tf import drawing
from tools.reproduce_paper.report import Table


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yields a figure in the look of all pictures and writes it to `path` afterwards."""
    with drawing.figure(width, height) as figure:
        yield figure
        path.write_bytes(drawing.png(figure))


def draw_differences(table: Table, folder: Path) -> Path:
    """Draws every difference in units of the last printed digit; half a unit is rounding."""
    path = folder / f"{table.name}.png"
    entries = table.compared
    labels = [f"{entry.row}, {entry.column}" for entry in entries]
    with picture(path, 9.0, 1.3 + 0.19 * len(entries)) as figure:
        axes = figure.add_subplot()
        axes.axvspan(-0.5, 0.5, color="#E8EEF3", label="rounding of the paper's last digit")
        for matches, colour, label in (
            (True, drawing.BLUE, "agrees in every digit"),
            (False, drawing.ORANGE, "differs"),
        ):
            chosen = [i for i, entry in enumerate(entries) if entry.matches == matches]
            if chosen:
                values = [entries[i].last_digits for i in chosen]
                axes.plot(values, chosen, "o", color=colour, markersize=4, label=label)
        axes.set_yticks(range(len(entries)), labels, fontsize=7)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        widest = max(1.0, *(1.1 * abs(entry.last_digits) for entry in entries))
        axes.set_xlim(-widest, widest)
        axes.set_xlabel("ours - paper, in units of the last printed digit")
        axes.set_title(f"{table.title}: {table.num_matches} of {len(entries)} match")
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=3)
    return path


def label_cells(axes: Axes, texts: np.ndarray, dark: np.ndarray, fontsize: float = 8.0) -> None:
    """Writes a text into every cell of an image, in white where the cell is dark."""
    for (i, j), text in np.ndenumerate(texts):
        colour = "white" if dark[i, j] else "black"
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=fontsize)
