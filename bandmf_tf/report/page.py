"""One self-contained HTML page of a privacy report: figures, pictures and the whole statement.

The pictures are embedded, nothing is loaded from elsewhere, and the page is one column: readable on
a phone, and printable.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2

from bandmf_tf.report import figures
from bandmf_tf.report.analysis import PrivacyAnalysis, round_up
from bandmf_tf.report.statement import formal_statement, headline_figures, sections

_PICTURE = re.compile(r"base64,[A-Za-z0-9+/=]+")

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy report</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1.2rem 1rem 3rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
p, li { overflow-wrap: anywhere; }
.lead { color: #444; }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; margin: 1.2rem 0;
  padding: 0; list-style: none; }
.cards li { border: 1px solid #d5dade; border-radius: .5rem; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.35rem; color: #0072B2; }
.cards span { font-size: .82rem; color: #555; }
.caution { border-left: 4px solid #E69F00; background: #fdf6e7; padding: .5rem .8rem;
  margin: .6rem 0; }
.kept { border-left: 4px solid #009E73; background: #eef8f4; padding: .5rem .8rem;
  margin: .6rem 0; }
figure { margin: 1rem 0 1.4rem; break-inside: avoid; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; color: #555; margin-top: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid #e3e6e9;
  vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr { break-inside: avoid; }
footer { margin-top: 2.5rem; font-size: .82rem; color: #666; overflow-wrap: anywhere; }
@media (max-width: 32rem) { .cards { grid-template-columns: repeat(2, 1fr); } }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } h2 { break-after: avoid; } }
</style>
</head>
<body>
<header>
<h1>Privacy report</h1>
<p class="lead">The run is {{ formal }}.</p>
</header>
<ul class="cards">
{% for value, label in cards %}<li><b>{{ value }}</b><span>{{ label }}</span></li>
{% endfor %}</ul>
{% set style = 'kept' if plan_was_kept else 'caution' %}
{% for finding in findings %}<p class="{{ style }}">{{ finding }}</p>
{% endfor %}
{% for caution in cautions %}<p class="caution">{{ caution }}</p>
{% endfor %}
<h2>Planned against observed</h2>
<div class="scroll">
<table>
<thead><tr><th></th><th class="number">planned</th><th class="number">observed</th>
<th>known how</th></tr></thead>
<tbody>
{% for name, planned, observed, basis in rows %}<tr><th scope="row">{{ name }}</th>
<td class="number">{{ planned }}</td><td class="number">{{ observed }}</td><td>{{ basis }}</td></tr>
{% endfor %}</tbody>
</table>
</div>
{% for picture in pictures %}<figure>
<img src="data:image/png;base64,{{ picture.data }}" alt="{{ picture.alt }}">
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}
{% for section in sections %}<h2>{{ loop.index }}. {{ section.title }}</h2>
{% for title, paragraphs in section.items %}<h3>{{ title }}</h3>
<p>{{ paragraphs[0] }}</p>
{% if paragraphs | length > 1 %}<ul>
{% for paragraph in paragraphs[1:] %}<li>{{ paragraph }}</li>
{% endfor %}</ul>
{% endif %}{% endfor %}{% endfor %}
<footer>Made by bandmf_tf {{ version }} at {{ created }}. Checksum of the mechanism:
 {{ checksum }}.</footer>
</body>
</html>
"""


def render(document: dict[str, Any], analysis: PrivacyAnalysis | None) -> str:
    """Returns the page of a report as HTML; without an analysis, the page without its pictures."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        formal=formal_statement(document),
        cards=headline_figures(document),
        findings=document["findings"],
        plan_was_kept=document["plan_was_kept"],
        cautions=document["cautions"],
        rows=_rows(document),
        pictures=[
            {
                "data": "" if analysis is None else _encoded(picture.draw(document, analysis)),
                "alt": picture.alt,
                "caption": picture.caption,
            }
            for picture in _pictures(document)
        ],
        sections=sections(document),
        version=document["library_version"],
        created=document["created"],
        checksum=document["mechanism"]["checksum"],
    )


def without_pictures(page: str) -> str:
    """Returns a page with its pictures taken out: they differ where drawing libraries do."""
    return _PICTURE.sub("base64,", page)


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode("ascii")


def _rows(document: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    planned = document["planned"]

    def whole(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    def up(value: float) -> str:
        return f"{round_up(value):g}"

    return [
        (
            "rounds",
            whole(planned["num_rounds"]),
            whole(document["rounds_completed"]),
            document["rounds_completed_basis"],
        ),
        (
            "smallest separation, in rounds",
            whole(planned["min_separation"]),
            whole(document["min_separation"]),
            document["min_separation_basis"],
        ),
        (
            "largest number of participations",
            whole(planned["max_participations"]),
            whole(document["max_participations"]),
            document["max_participations_basis"],
        ),
        (
            "noise multiplier",
            f"{planned['noise_multiplier']:.5g}",
            f"{document['noise_multiplier']:.5g}",
            "",
        ),
        ("sensitivity", up(planned["sensitivity"]), up(document["sensitivity"]), ""),
        ("ρ (zCDP)", up(planned["rho"]), up(document["rho"]), ""),
        (f"ε at δ = {document['delta']!r}", up(planned["epsilon"]), up(document["epsilon"]), ""),
    ]


class _Picture(NamedTuple):
    """A picture of the page, how it is drawn and what is said about it."""

    draw: Callable[[dict[str, Any], PrivacyAnalysis], bytes]
    alt: str
    caption: str


def _pictures(document: dict[str, Any]) -> list[_Picture]:
    pictures = [
        _Picture(
            lambda document, _: figures.planned_picture(document),
            "Bar chart of epsilon: planned, observed, and of tree aggregation.",
            "Epsilon as planned, as observed, and of tree aggregation (online) at the same error.",
        ),
        _Picture(
            lambda document, _: figures.curve_picture(document),
            "Line chart of epsilon against delta.",
            "The guarantee holds at every delta of the curve, for the same run.",
        ),
    ]
    if document["observed"]["separations"]:
        pictures.append(
            _Picture(
                lambda document, _: figures.separation_picture(document),
                "Histogram of the rounds between successive participations of a unit.",
                "How many rounds lie between successive participations of one unit.",
            )
        )
    if document["observed"]["contributions_by_round"]:
        pictures.append(
            _Picture(
                lambda document, _: figures.rounds_picture(document),
                "Number of contributions to each round.",
                "Participation over time; closest participations are marked.",
            )
        )
    pictures.append(
        _Picture(
            lambda _, analysis: figures.strategy_picture(analysis),
            "Heat map of the strategy matrix C.",
            "The strategy C of the completed rounds, which shaped the noise.",
        )
    )
    return pictures
