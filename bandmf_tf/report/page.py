"""One self-contained HTML page of a privacy report: figures, pictures and the whole statement."""

from __future__ import annotations

import re

from bandmf_tf import pages
from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.report import figures
from bandmf_tf.report.analysis import PrivacyAnalysis
from bandmf_tf.report.document import PrivacyReport
from bandmf_tf.report.statement import headline_figures, lead, sections

_PICTURE = re.compile(r"base64,[A-Za-z0-9+/=]+")


def render(report: PrivacyReport, analysis: PrivacyAnalysis | None) -> str:
    """Returns the page of a report as HTML; without an analysis, the page without its pictures."""
    return pages.render(
        "report.html",
        report=report,
        lead=lead(report),
        cards=headline_figures(report),
        rows=_rows(report),
        pictures=_pictures(report, analysis),
        sections=sections(report),
    )


def without_pictures(page: str) -> str:
    """Returns a page with its pictures taken out: they differ where drawing libraries do."""
    return _PICTURE.sub("base64,", page)


def _rows(report: PrivacyReport) -> list[tuple[str, str, str, str, str]]:
    """Returns what was enforced, what happened and what was planned, figure by figure."""
    planned = report.planned
    enforced = next((entry for entry in report.comparison if entry.kind == "enforced"), None)
    b, k, rho, epsilon = (
        None if enforced is None else getattr(enforced, name)
        for name in ("min_separation", "max_participations", "rho", "epsilon")
    )

    def whole(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    def up(value: float | None) -> str:
        return "–" if value is None else f"{round_up(value):g}"

    return [
        (
            "rounds",
            "",
            whole(report.rounds_completed),
            whole(planned.num_rounds),
            report.rounds_completed_basis,
        ),
        (
            "smallest separation, in rounds",
            whole(b),
            whole(report.min_separation),
            whole(planned.min_separation),
            report.min_separation_basis,
        ),
        (
            "largest number of participations",
            whole(k),
            whole(report.max_participations),
            whole(planned.max_participations),
            report.max_participations_basis,
        ),
        (
            "noise multiplier",
            "",
            f"{round_down(report.noise_multiplier, 5):g}",
            f"{round_down(planned.noise_multiplier, 5):g}",
            report.noise_multiplier_basis or "",
        ),
        ("sensitivity", "", up(report.sensitivity), up(planned.sensitivity), ""),
        ("ρ (zCDP)", up(rho), up(report.rho), up(planned.rho), ""),
        (f"ε at δ = {report.delta!r}", up(epsilon), up(report.epsilon), up(planned.epsilon), ""),
    ]


def _pictures(report: PrivacyReport, analysis: PrivacyAnalysis | None) -> dict[str, bytes]:
    """Returns the pictures as PNG; without an analysis, nothing in their places."""
    if analysis is None:
        return dict.fromkeys(("planned", "curve", "separations", "rounds", "strategy"), b"")
    pictures = {
        "planned": figures.planned_picture(report),
        "curve": figures.curve_picture(report),
        "strategy": figures.strategy_picture(analysis),
    }
    if report.observed.separations or report.observed.separation_cells:
        pictures["separations"] = figures.separation_picture(report)
    if report.observed.contributions_by_round:
        pictures["rounds"] = figures.rounds_picture(report)
    return pictures
