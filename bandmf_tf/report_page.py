"""One self-contained HTML page of a privacy report: figures, pictures and the whole statement.

The pictures are embedded, nothing is loaded from elsewhere, and the page is one column: readable on
a phone, and printable.
"""

from __future__ import annotations

import base64
from typing import Any

import jinja2

from bandmf_tf import report_figures
from bandmf_tf.privacy_analysis import PrivacyAnalysis
from bandmf_tf.privacy_statements import formal_statement, headline_figures, sections

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


def render(document: dict[str, Any], analysis: PrivacyAnalysis) -> str:
    """Returns the page of a report as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        formal=formal_statement(document),
        cards=headline_figures(document),
        findings=document["findings"],
        plan_was_kept=document["plan_was_kept"],
        cautions=document["cautions"],
        rows=_rows(document),
        pictures=_pictures(document, analysis),
        sections=sections(document),
        version=document["library_version"],
        created=document["created"],
        checksum=document["mechanism"]["checksum"],
    )


def _rows(document: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    planned = document["planned"]

    def whole(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

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
        ("sensitivity", f"{planned['sensitivity']:.5g}", f"{document['sensitivity']:.5g}", ""),
        ("ρ (zCDP)", f"{planned['rho']:.5g}", f"{document['rho']:.5g}", ""),
        (
            f"ε at δ = {document['delta']:g}",
            f"{planned['epsilon']:.5g}",
            f"{document['epsilon']:.5g}",
            "",
        ),
    ]


def _pictures(document: dict[str, Any], analysis: PrivacyAnalysis) -> list[dict[str, str]]:
    pictures = [
        (
            report_figures.planned_picture(document),
            "Bar chart of epsilon: planned, observed, and of tree aggregation.",
            "Epsilon as planned, as observed, and of tree aggregation (online) at the same error.",
        ),
        (
            report_figures.curve_picture(document),
            "Line chart of epsilon against delta.",
            "The guarantee holds at every delta of the curve, for the same run.",
        ),
    ]
    if document["observed"]["separations"]:
        pictures.append(
            (
                report_figures.separation_picture(document),
                "Histogram of the rounds between successive participations of a unit.",
                "How many rounds lie between successive participations of one unit.",
            )
        )
    if document["observed"]["contributions_by_round"]:
        pictures.append(
            (
                report_figures.rounds_picture(document),
                "Number of contributions to each round.",
                "Participation over time; closest participations are marked.",
            )
        )
    pictures.append(
        (
            report_figures.strategy_picture(analysis),
            "Heat map of the strategy matrix C.",
            "The strategy C of the completed rounds, which shaped the noise.",
        )
    )
    return [
        {"data": base64.b64encode(data).decode("ascii"), "alt": alt, "caption": caption}
        for data, alt, caption in pictures
    ]
