"""The look of all pictures: colours, fonts, figures without a display, and PNG.

Colours are the Okabe-Ito palette, which readers with any colour vision can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
AMBER = "#E69F00"
ORANGE = "#D55E00"
PINK = "#CC79A7"
GREY = "#B8BEC4"
DARK_GREY = "#666666"

_DPI = 150

# Matplotlib types the keys of its settings as literals.
_SETTINGS: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DARK_GREY,
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
}

# Points of a line in a picture, at most.
_POINTS = 1_000


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Yields a figure of so many inches, without touching the settings of the process."""
    with matplotlib.rc_context(_SETTINGS):
        drawn = Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn


def png(drawn: Figure) -> bytes:
    """Returns the figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # `savefig` would draw it twice, the first time for its layout alone.
    FigureCanvasAgg(drawn).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def shown_rounds(num_rounds: int) -> np.ndarray:
    """Returns the rounds at which a line is drawn: all, or so many that no reader sees a gap."""
    count = min(num_rounds, _POINTS)
    return np.unique(np.linspace(0, num_rounds - 1, count).round().astype(int))
