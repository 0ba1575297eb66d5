"""One self-contained HTML page about a plan: what was planned, why, and how it compares."""

from __future__ import annotations

from collections.abc import Iterable

from bandmf_tf import pages
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.planning import figures
from bandmf_tf.planning.plan import Plan

# Models to give the memory of the noise for, in parameters.
_MODEL_SIZE = 1_000_000


def render(plan: Plan) -> str:
    """Returns the page about `plan` as HTML."""
    mechanism = plan.mechanism
    view = figures.matrix_view(mechanism.strategy)
    pictures = {
        "comparison": figures.comparison_picture(plan),
        "errors": figures.error_picture(plan),
        "strategy": figures.strategy_picture(view),
        "inverse": figures.inverse_picture(view),
    }
    if plan.frontier is not None:
        pictures["frontier"] = figures.frontier_picture(plan.frontier)
    target = (
        f"ε = {round_up(plan.request.epsilon or mechanism.epsilon):g}, δ = "
        f"{exactly(mechanism.delta)}"
    )
    return pages.render(
        "plan.html",
        title=f"{plan.name} for {plan.num_rounds:,} rounds",
        lead=f"{_sentence(mechanism.workload.describe())} {_participation_sentence(plan)}",
        target=target,
        cards=_cards(plan),
        cautions=plan.cautions(),
        hints=plan.hints(),
        pictures=pictures,
        explanation="" if plan.frontier is None else _sentence(plan.frontier.explain()),
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
    yield f"{round_up(mechanism.epsilon):g}", f"ε at δ = {exactly(mechanism.delta)}"
    yield f"{plan.calibrated_rmse:.4g}", "RMSE at this privacy, clip norm 1"
    yield f"{round_up(mechanism.noise_multiplier, 6):g}", "noise multiplier"
    count, noun = plan.size.split(maxsplit=1)
    yield count, noun
    megabytes = plan.bytes_per_parameter * _MODEL_SIZE / 1e6
    yield f"{megabytes:,.0f} MB", "noise memory for a million parameters"
    yield plan.sensitivity.kind, f"sensitivity, by {plan.sensitivity.theorem}"


def _guarantee_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    guarantee, sensitivity = plan.mechanism.guarantee, plan.sensitivity
    yield "ε, δ", f"{round_up(guarantee.epsilon, 6):g}, {exactly(guarantee.delta)}"
    yield "neighbours", f"{guarantee.adjacency}: one unit's contributions become zeros"
    yield "ρ", f"{round_up(guarantee.rho, 6):g} ({plan.rho_note})"
    yield "accounting", guarantee.accounting
    yield (
        "sensitivity",
        (
            f"{round_up(sensitivity.value, 6):g}, {sensitivity.kind}: {sensitivity.theorem}; "
            f"{plan.sensitivity_note}"
        ),
    )


def _fact_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    mechanism = plan.mechanism
    yield "rounds", f"{plan.num_rounds:,}"
    yield "strategy", f"{plan.name} ({plan.request.strategy})"
    yield "size", f"{plan.size}: {plan.size_reason}"
    yield "RMSE at sigma 1", f"{plan.rmse:.6g}, for the strategy of sensitivity 1"
    yield (
        "noise",
        (
            f"standard deviation {round_up(mechanism.stddev, 6):g} = noise multiplier "
            f"{round_up(mechanism.noise_multiplier, 6):g} x clip norm "
            f"{exactly(mechanism.l2_norm_clip)}; as it is known from DP-SGD, for columns of norm "
            f"1, {round_up(plan.unit_noise_multiplier, 6):g}"
        ),
    )
    yield "largest column norm", f"{round_up(plan.max_column_norm, 6):g}"
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
    for choice in plan.samplings:
        yield f"{choice.sampling} batches", choice.describe()


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
            "sampling_probability": f"{round_up(candidate.sampling_probability):g}",
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
