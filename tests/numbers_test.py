"""Privacy figures are printed by one rule: never smaller than they are, noise never larger."""

from __future__ import annotations

import ast
import math
import pathlib
import re

import pytest

from bandmf_tf._numbers import exactly, round_down, round_up

_ROOT = pathlib.Path(__file__).parent.parent
_PROGRAMS = ("bandmf_tf", "tools", "production", "examples")
_FIGURE = re.compile(
    r"(?:^|_)(epsilons?|delta|rho|mu|noise_multiplier|sampling_probability|l2_norm_clip)"
    r"(?:_|$)",
    re.IGNORECASE,
)
_PRINTERS = ("round_up", "round_down", "exactly")


def _names(node: ast.expr) -> list[str]:
    """The names of a printed expression, but not of what `_PRINTERS` have rounded."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _PRINTERS:
        return []
    own = [getattr(node, "attr", getattr(node, "id", ""))]
    inner = [] if isinstance(node, ast.Attribute) else ast.iter_child_nodes(node)
    return own + [name for child in inner for name in _names(child)]


def _rounded_to_nearest(text: str) -> list[str]:
    """Every privacy figure that an f-string rounds by its format."""
    return [
        ast.unparse(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FormattedValue)
        and node.format_spec is not None
        and ast.unparse(node.format_spec)[-2] in "eEfFgGn%}"
        and any(map(_FIGURE.search, _names(node.value)))
    ]


@pytest.mark.parametrize("folder", _PROGRAMS)
def test_no_privacy_figure_is_rounded_to_the_nearest(folder):
    found = {
        f"{path.relative_to(_ROOT)}: {text}"
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for text in _rounded_to_nearest(path.read_text())
    }
    assert not found, "print them by round_up, round_down or exactly of bandmf_tf/_numbers.py"


@pytest.mark.parametrize(
    "text",
    [
        'f"{plan.delta:g}"',
        'f"{epsilon:.4g}"',
        'f"{2 * found.rho:.3f}"',
        'f"{max(self.noise_multiplier, 1):.6g}"',
        'f"{claimed_mu:.5g}"',
        'f"{self.sampling_probability:.6g}"',
        'f"{mechanism.l2_norm_clip:g}"',
    ],
)
def test_the_search_finds_what_rounds_to_the_nearest(text):
    assert _rounded_to_nearest(text)
    assert not _rounded_to_nearest(re.sub(r"\{(.*):", r"{round_up(\1):", text))


@pytest.mark.parametrize("digits", [1, 4, 6])
@pytest.mark.parametrize(
    "value",
    [1.0000004e-6, 1e-5, math.nextafter(1e-5, 1), 9.9999999, 0.1, 1 / 3, 5e-324, 1e300, 1e22],
)
def test_rounding_is_to_the_safe_side_and_by_less_than_a_digit(value, digits):
    up, down = round_up(value, digits), round_down(value, digits)
    assert down * (1 - 2**-49) <= value <= up * (1 + 2**-49)
    assert float(f"{up:.{digits}g}") == up
    assert float(f"{down:.{digits}g}") == down
    if value > 1e-300:
        assert up - down <= 10.0 ** (1 - digits) * up


def test_what_exceeds_a_short_decimal_by_more_than_arithmetic_is_rounded_to_the_next():
    assert (round_up(1.0000004e-6), round_down(6.9999996)) == (1.001e-6, 6.999)
    assert (round_up(1 + 1e-14), round_down(8 - 1e-14)) == (1.001, 7.999)
    assert (round_up(0.1 + 0.2), round_down(8 - 1e-15)) == (0.3, 8.0)


@pytest.mark.parametrize("value", [0.0, 1e-6, 0.25, 8.0, 1e22, math.inf])
def test_what_is_short_stays_as_it_is(value):
    assert round_up(value) == round_down(value) == value
    assert float(exactly(value)) == value
