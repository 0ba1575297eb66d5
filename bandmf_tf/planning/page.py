"""One self-contained HTML page about a plan: what was planned, why, and how it compares.

The pictures are embedded, nothing is loaded from elsewhere, and the page is one column, readable on
a phone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import jinja2

from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.planning import figures
from bandmf_tf.planning.plan import Plan

# Models to give the memory of the noise for, in parameters.
_MODEL_SIZE = 1_000_000

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1.2rem 1rem 3rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0 .8rem; }
.lead { color: #444; }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; margin: 1.2rem 0;
  padding: 0; list-style: none; }
.cards li { border: 1px solid #d5dade; border-radius: .5rem; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.35rem; color: #0072B2; overflow-wrap: anywhere; }
.cards span { font-size: .82rem; color: #555; }
.caution { border-left: 4px solid #E69F00; background: #fdf6e7; padding: .5rem .8rem;
  margin: .6rem 0; }
figure { margin: 1rem 0 1.4rem; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; color: #555; margin-top: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
caption { text-align: left; font-size: .88rem; color: #555; padding-bottom: .4rem; }
th, td { text-align: left; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid #e3e6e9;
  vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
tr.plan td { font-weight: 600; color: #0072B2; }
table.facts th { width: 11rem; font-weight: 600; }
@media (max-width: 32rem) {
  .cards { grid-template-columns: repeat(2, 1fr); }
  table.facts th, table.facts td { display: block; width: auto; }
  table.facts th { border-bottom: 0; padding-bottom: 0; }
}
code { font-size: .85em; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; font-size: .82rem; color: #666; }
</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
</header>
<ul class="cards">
{% for value, label in cards %}<li><b>{{ value }}</b><span>{{ label }}</span></li>
{% endfor %}</ul>
{% for caution in cautions %}<p class="caution">{{ caution }}</p>
{% endfor %}
<h2>Compared at the same privacy</h2>
<figure>
<img src="data:image/png;base64,{{ pictures.comparison }}" alt="Bar chart of the error of the plan
 and its alternatives at the same privacy; the table below holds the numbers.">
</figure>
<div class="scroll">
<table>
<caption>Root mean squared error over all steps at {{ target }}, for clip norm 1.
 Without sampling: {{ comparison_participation }}.</caption>
<thead><tr><th>mechanism</th><th class="number">RMSE</th><th class="number">relative</th>
<th>privacy rests on</th></tr></thead>
<tbody>
{% for row in comparison %}<tr{% if row.is_plan %} class="plan"{% endif %}><td>{{ row.name }}</td>
<td class="number">{{ row.rmse }}</td><td class="number">{{ row.relative }}</td>
<td>{{ row.setting }}</td></tr>
{% endfor %}</tbody>
</table>
</div>
{% for sentence in left_out %}<p class="lead">Left out: {{ sentence }}</p>
{% endfor %}
<figure>
<img src="data:image/png;base64,{{ pictures.step_errors }}" alt="Line chart of the standard
 deviation of the error in every step of training, for the plan and its alternatives.">
<figcaption>How far a model parameter is from where noiseless training would have put it, step by
 step, in units of the clip norm (divide by the batch size where sums are averaged).</figcaption>
</figure>

<h2>The strategy</h2>
<figure>
<img src="data:image/png;base64,{{ pictures.strategy }}" alt="Heat map of the strategy matrix C.">
<figcaption>C, scaled to sensitivity 1, shapes the noise. Step i needs row i of it and
 {{ rows_in_memory }} earlier rows of noise in memory.</figcaption>
</figure>
<figure>
<img src="data:image/png;base64,{{ pictures.inverse }}" alt="Heat map of the inverse of C.">
<figcaption>Step i adds row i of C<sup>-1</sup> z to the sum of gradients, z independent Gaussian
 noise: negative entries (orange) take back noise of earlier steps.</figcaption>
</figure>

<h2>The guarantee</h2>
<div class="scroll">
<table class="facts"><tbody>
{% for name, value in guarantee %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table>
</div>
<p>It holds if</p>
<ul>
{% for assumption in assumptions %}<li>{{ assumption }}</li>
{% endfor %}</ul>

<h2>The plan</h2>
<div class="scroll">
<table class="facts"><tbody>
{% for name, value in facts %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table>
</div>
{% if tried %}
<h2>Numbers of bands that were tried</h2>
<div class="scroll">
<table>
<caption>More bands mean a better strategy and less amplification.</caption>
<thead><tr><th class="number">bands</th><th class="number">sampling probability</th>
<th class="number">compositions</th><th class="number">RMSE</th></tr></thead>
<tbody>
{% for row in tried %}<tr{% if row.is_plan %} class="plan"{% endif %}>
<td class="number">{{ row.num_bands }}</td><td class="number">{{ row.sampling_probability }}</td>
<td class="number">{{ row.compositions }}</td><td class="number">{{ row.rmse }}</td></tr>
{% endfor %}</tbody>
</table>
</div>
{% endif %}
<footer>Planned by bandmf_tf {{ version }} at {{ created }}. Checksum of the mechanism:
 <code>{{ checksum }}</code>.</footer>
</body>
</html>
"""


def render(plan: Plan) -> str:
    """Returns the page about `plan` as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    mechanism = plan.mechanism
    view = figures.matrix_view(mechanism.strategy)
    target = f"ε = {plan.request.epsilon or mechanism.epsilon:.4g}, δ = {mechanism.delta:g}"
    return environment.from_string(_TEMPLATE).render(
        title=f"{plan.name} for {plan.num_rounds:,} rounds",
        lead=f"{_sentence(mechanism.workload.describe())} {_participation_sentence(plan)}",
        target=target,
        cards=_cards(plan),
        cautions=plan.cautions(),
        pictures={
            "comparison": _base64(figures.comparison_picture(plan)),
            "step_errors": _base64(figures.step_error_picture(plan)),
            "strategy": _base64(figures.strategy_picture(view)),
            "inverse": _base64(figures.inverse_picture(view)),
        },
        comparison=_comparison_rows(plan),
        comparison_participation=plan.comparison.participation.describe(),
        left_out=plan.comparison.left_out,
        rows_in_memory=f"{plan.rows_in_memory:,}",
        guarantee=_guarantee_rows(plan),
        assumptions=mechanism.guarantee.assumptions,
        facts=_fact_rows(plan),
        tried=_tried_rows(plan),
        version=mechanism.provenance.library_version,
        created=mechanism.provenance.created,
        checksum=mechanism_checksum(mechanism),
    )


def _cards(plan: Plan) -> Iterable[tuple[str, str]]:
    mechanism = plan.mechanism
    yield f"{mechanism.epsilon:.4g}", f"ε at δ = {mechanism.delta:g}"
    yield f"{plan.calibrated_rmse:.4g}", "RMSE at this privacy, clip norm 1"
    yield f"{mechanism.noise_multiplier:.6g}", "noise multiplier"
    yield f"{plan.num_bands:,}", "band" if plan.num_bands == 1 else "bands"
    megabytes = plan.bytes_per_parameter * _MODEL_SIZE / 1e6
    yield f"{megabytes:,.0f} MB", "noise memory for a million parameters"
    yield plan.sensitivity.kind, f"sensitivity, by {plan.sensitivity.theorem}"


def _guarantee_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    guarantee, sensitivity = plan.mechanism.guarantee, plan.sensitivity
    yield "ε, δ", f"{guarantee.epsilon:.6g}, {guarantee.delta:g}"
    yield "neighbours", f"{guarantee.adjacency}: one unit's contributions become zeros"
    yield "ρ", f"{guarantee.rho:.6g} ({plan.rho_note})"
    yield "accounting", guarantee.accounting
    yield (
        "sensitivity",
        (
            f"{sensitivity.value:.6g}, {sensitivity.kind}: {sensitivity.theorem}; "
            f"{plan.sensitivity_note}"
        ),
    )


def _fact_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    mechanism = plan.mechanism
    yield "rounds", f"{plan.num_rounds:,}"
    yield "strategy", f"{plan.name} ({plan.request.strategy})"
    yield "bands", f"{plan.num_bands:,}: {plan.bands_reason}"
    yield "RMSE at sigma 1", f"{plan.rmse:.6g}, for the strategy of sensitivity 1"
    yield (
        "noise",
        (
            f"standard deviation {mechanism.stddev:.6g} = noise multiplier "
            f"{mechanism.noise_multiplier:.6g} x clip norm {mechanism.l2_norm_clip:g}"
        ),
    )
    yield "largest column norm", f"{plan.max_column_norm:.6g}"
    yield (
        "memory",
        (
            f"{plan.rows_in_memory:,} noise rows of the size of the model, "
            f"{plan.bytes_per_parameter:,} bytes a parameter in float32"
        ),
    )
    outcome = plan.optimization
    if outcome is not None:
        state = "converged" if outcome.converged else "stopped at its limit"
        yield (
            "optimiser",
            (
                f"{state} after {outcome.iterations} iterations, last relative change "
                f"{outcome.relative_change:.2g}, gradient norm {outcome.gradient_norm:.2g}"
            ),
        )
        yield "what it solved", outcome.guarantee


def _comparison_rows(plan: Plan) -> list[dict[str, object]]:
    entries = (plan.planned, *plan.comparison.alternatives)
    return [
        {
            "name": entry.name,
            "rmse": f"{entry.calibrated_rmse:.4g}",
            "relative": f"{entry.calibrated_rmse / plan.calibrated_rmse:.2f}",
            "setting": entry.setting,
            "is_plan": entry is plan.planned,
        }
        for entry in sorted(entries, key=lambda entry: entry.calibrated_rmse)
    ]


def _tried_rows(plan: Plan) -> list[dict[str, object]]:
    if plan.band_search is None:
        return []
    return [
        {
            "num_bands": f"{candidate.num_bands:,}",
            "sampling_probability": f"{candidate.sampling_probability:.4g}",
            "compositions": f"{candidate.compositions:,}",
            "rmse": f"{candidate.rmse:.5g}",
            "is_plan": candidate.num_bands == plan.num_bands,
        }
        for candidate in plan.band_search.tried
    ]


def _participation_sentence(plan: Plan) -> str:
    sentence = _sentence(plan.mechanism.participation.describe())
    if plan.mechanism.sampling is None:
        return sentence
    return f"Batches are sampled, which amplifies privacy; {sentence[0].lower()}{sentence[1:]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
