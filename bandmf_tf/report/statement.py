"""The words of a privacy report: the statement as text and as Markdown.

The statement has the sections of the paper's appendix "Reporting privacy guarantees", which follows
Ponomareva et al. 2023, Section 5.3. It is made from the report and nothing else, so it says
what `report.json` says. Epsilon, rho and sensitivities are rounded up, never down.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
import urllib.parse
from pathlib import Path

from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.evidence.participation import Occurrence
from bandmf_tf.report.analysis import GroupGuarantee, TreeComparison
from bandmf_tf.report.document import PrivacyReport, WellBehaved
from bandmf_tf.runs.basis import Basis

WIDTH = 88

# What "a client's timer" promises of whom; the same words in the statement and in the registry.
_COVERED = {
    "device": "all well-behaved devices: those that follow the protocol, including its limits on "
    "participation. A device that does not weakens its own guarantee and nobody else's",
    "example": "every training example",
    "user": "every user, with all examples that training was told are theirs",
    "client": "all well-behaved clients: those that follow the protocol, including its limits on "
    "participation. A client that does not weakens its own guarantee and nobody else's",
}
_UNITS = {
    "device": "Device-level: all contributions of one device, however many examples it holds. For "
    "a user with one device this is user-level privacy; for a device that several users share it "
    "is stronger; for a user with several devices it is weaker, see the guarantees for groups.",
    "example": "Example-level: all contributions of one training example, in every step in which "
    "it was drawn. A person with several examples is a group of that size, see the guarantees for "
    "groups.",
    "user": "User-level: all contributions of one user, in every step in which the user was drawn, "
    "as the training program was told whose every example is. A user took part in a step with at "
    "most {examples_per_user} of them, and the mean of their gradients was clipped as one "
    "contribution. Data sets that differ in one example of a user who has several are covered like "
    "those that differ in two users, see the guarantees for groups.",
    "client": "Client-level: all contributions of whatever one value of the log's column client "
    "stands for, or of one participant of the stated limits. For a user with several clients see "
    "the guarantees for groups.",
}

# What somebody's word is, of a unit: what a row of a batch was.
_ROWS = {
    "example": "every row of a batch was one example",
    "user": "every row of a batch was one user, as the run record alone says",
}

# Kinds of strategies that are not banded, in words.
_UNBANDED = {
    "tree": "tree aggregation",
    "blt": "a buffered linear Toeplitz (BLT) strategy",
    "inverse_banded": "a strategy with a banded inverse",
}

_MISBEHAVIOUR = (
    "A unit that misbehaves and takes part more often, or closer together, than stated has a "
    "weaker guarantee than the one above; that of the other units does not change."
)


DP_SETTING = (
    "Central DP: the service provider is trusted to clip, to sum, to add the noise and to keep "
    "the noise secret."
)

NOT_COVERED = (
    "Not covered: hyperparameter tuning on the same data, the selection of a checkpoint by "
    "metrics or A/B tests on private data, metrics of the training data that are published "
    "without noise, and other models trained on it. Pre-training on public data needs no "
    "guarantee; the evidence does not say whether there was any."
)

ADJACENCY = (
    "Zero-out: in the neighbouring data set the contributions of one unit are zeros wherever "
    "it takes part, and everybody's participation stays the same."
)

FLOATING_POINT = (
    "Noise is drawn and added in floating point; the guarantee is for real numbers, and "
    "attacks on the low-order bits of released values are outside of it."
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A numbered section of a statement: a title and items of (title, paragraphs)."""

    title: str
    items: tuple[tuple[str, tuple[str, ...]], ...]


def statement_text(report: PrivacyReport) -> str:
    """Returns the statement as plain text, in the manner of TensorFlow Privacy's statements."""
    lines = [_fill(opening(report)), ""]
    lines += [_fill(_setting(report)), ""]
    lines += [
        f"    {label + ':':<{_label_width(report)}}{value}" for label, value in _figures(report)
    ]
    for number, section in enumerate(sections(report), start=1):
        lines += ["", f"{number}. {section.title}"]
        for title, paragraphs in section.items:
            lines += ["", _fill(f"{title}: {paragraphs[0]}", "   ")]
            lines += [_fill(paragraph, "   - ", "     ") for paragraph in paragraphs[1:]]
    return "\n".join(lines) + "\n"


def statement_markdown(report: PrivacyReport) -> str:
    """Returns the statement as Markdown."""
    lines = ["# Privacy statement", "", opening(report), "", _setting(report), ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {label} | {value} |" for label, value in _figures(report)]
    for number, section in enumerate(sections(report), start=1):
        lines += ["", f"## {number}. {section.title}"]
        for title, paragraphs in section.items:
            lines += ["", f"**{title}.** {paragraphs[0]}"]
            if len(paragraphs) > 1:
                lines += ["", *(f"- {paragraph}" for paragraph in paragraphs[1:])]
    return "\n".join(lines) + "\n"


def formal_statement(report: PrivacyReport) -> str:
    """Returns the guarantee in one sentence."""
    text = (
        f"{_parameters(report, report.delta)} for {report.adjacency} neighbours, at the level "
        f"of one {report.unit}"
    )
    if not report.is_amplified:
        return text
    without = round_up(report.epsilon_unamplified)
    return f"{text}; epsilon is {_amplified(report)}, and {without:g} without"


def _amplified(report: PrivacyReport) -> str:
    """Returns what sampling did to epsilon, and how sure that is."""
    if report.failure_probability is None:
        return "amplified by sampling"
    confidence = f"confidence 1 - {report.failure_probability:.1g}"
    return f"amplified by sampling, estimated with {confidence}"


def _parameters(
    figures: PrivacyReport | WellBehaved | GroupGuarantee | TreeComparison, delta: float
) -> str:
    """Returns epsilon, at this delta, and rho among some figures."""
    return f"({round_up(figures.epsilon):g}, {delta!r})-DP and {round_up(figures.rho):g}-zCDP"


def headline_figures(report: PrivacyReport) -> list[tuple[str, str]]:
    """Returns the figures that a reader looks for first, as (value, what it is)."""
    separation = report.min_separation
    how = "" if not report.is_amplified else f", {_amplified(report)}"
    return [
        (
            f"{round_up(report.epsilon):g}",
            f"epsilon at delta = {report.delta!r}{how}{_if_assumed(report)}",
        ),
        (f"{round_up(report.rho):g}", "rho (zCDP)"),
        (f"{report.rounds_completed:,}", "rounds completed"),
        (
            "–" if separation is None else f"{separation:,}",
            f"rounds apart at least ({report.min_separation_basis})",
        ),
        (
            f"{report.max_participations:,}",
            f"participations at most ({report.max_participations_basis})",
        ),
        (
            f"{round_up(report.sensitivity):g}",
            f"sensitivity ({report.sensitivity_kind})",
        ),
    ]


def _if_assumed(report: PrivacyReport) -> str:
    return ", if what is assumed holds" if report.assumed else ""


def opening(report: PrivacyReport) -> str:
    """Returns what was done and its guarantee in one sentence."""
    training = (
        f"raining for {report.rounds_completed:,} rounds with {mechanism_words(report)}, noise "
        f"multiplier {round_down(report.noise_multiplier, 6):g} and clip norm "
        f"{report.l2_norm_clip:g}, is {formal_statement(report)}."
    )
    return f"If {_assumed(report)}, t{training}" if report.assumed else f"T{training}"


def lead(report: PrivacyReport) -> str:
    """Returns the guarantee in a sentence of its own, with what it assumes."""
    if report.assumed:
        return f"If {_assumed(report)}, the run is {formal_statement(report)}."
    return f"The run is {formal_statement(report)}."


def _assumed(report: PrivacyReport) -> str:
    """Returns what is assumed, in words."""
    assumed = []
    if report.unit_basis == Basis.ASSUMED:
        assumed.append(_ROWS[report.unit])
    if Basis.ASSUMED in (report.min_separation_basis, report.max_participations_basis):
        assumed.append(_limits(report))
    if report.rounds_completed_basis == Basis.ASSUMED:
        assumed.append(f"training ended after {report.rounds_completed:,} rounds")
    if report.noise_multiplier_basis == Basis.ASSUMED:
        noise = round_down(report.noise_multiplier, 6)
        assumed.append(f"the noise of this mechanism was added, with noise multiplier {noise:g}")
    if report.is_amplified and report.sampling_basis == Basis.ASSUMED:
        assumed.append("batches were drawn as the run record says")
    return f"{' and '.join(assumed)}, which is assumed"


def _setting(report: PrivacyReport) -> str:
    observed = report.observed
    seen = bool(observed.participations or observed.participation_cells) and not report.assumed
    return (
        f"The figures are for {report.adjacency} neighbours and "
        f"{'hold for what happened:' if seen else 'hold provided that'} "
        f"{_participation(report)}."
    )


def _figures(report: PrivacyReport) -> list[tuple[str, str]]:
    delta = f"at delta = {report.delta!r}"
    figures = []
    if report.epsilon_amplified is not None:
        amplified = f"{round_up(report.epsilon_amplified):g} {delta}"
        by = " (PLD)" if report.failure_probability is None else ""
        figures.append((f"Epsilon, {_amplified(report)}{by}", amplified))
    figures += [
        (
            "Epsilon, no sampling assumed (PLD)",
            f"{round_up(report.epsilon_unamplified):g} {delta}",
        ),
        ("Epsilon, converted from zCDP", f"{round_up(report.epsilon_zcdp):g} {delta}"),
        ("rho (zCDP)", f"{round_up(report.rho):g}"),
        ("mu (Gaussian DP)", f"{round_up(report.mu):g}"),
    ]
    figures += [
        (
            f"Epsilon of {group.group_size} {report.unit}s together",
            f"{round_up(group.epsilon):g} {delta}",
        )
        for group in report.groups
    ]
    return figures


def _label_width(report: PrivacyReport) -> int:
    return max(len(label) for label, _ in _figures(report)) + 3


def sections(report: PrivacyReport) -> tuple[Section, ...]:
    """Returns the sections of the statement, in the order of the paper's appendix."""
    return (
        Section("DP setting", (("Trust", (DP_SETTING,)),)),
        Section(
            "Instantiating the DP definition",
            (
                ("Data accesses covered", (_data_accesses(report),)),
                ("Final mechanism output", (output(report),)),
                ("Unit of privacy", (unit_words(report),)),
                ("Adjacency", (ADJACENCY,)),
            ),
        ),
        Section(
            "Privacy accounting details",
            (
                ("Type of accounting", (_accounting(report),)),
                (
                    "Assumptions",
                    ("The guarantee holds if", *(f"{text}." for text in report.assumptions)),
                ),
                ("Participation", _observed(report)),
                ("Formal statement", _formal(report)),
                ("Sensitivity", (_sensitivity(report),)),
                ("Plan and reality", ("Compared with the plan,", *report.findings)),
                ("Tree aggregation, for comparison", (_tree(report),)),
                ("Transparency and verifiability", _transparency(report)),
                *((("Audit", report.audit),) if report.audit else ()),
            ),
        ),
        Section("Caveats", (("Limits of this statement", _caveats(report)),)),
    )


def unit_words(report: PrivacyReport) -> str:
    """Returns whose contributions the guarantee hides, and which of them there can have been."""
    return _UNITS[report.unit].format(examples_per_user=report.examples_per_user)


def _data_accesses(report: PrivacyReport) -> str:
    return (
        f"One training run of {report.rounds_completed:,} rounds, for "
        f"{_COVERED[report.unit]}. {NOT_COVERED}"
    )


def output(report: PrivacyReport) -> str:
    """Returns what the guarantee covers of what was released."""
    sent = "" if report.unit in _ROWS else ", those sent to clients included,"
    return (
        "The mechanism's output is the whole sequence of noisy sums. The final model and every "
        f"model before it{sent} are post-processing of it and have the same guarantee."
    )


def _accounting(report: PrivacyReport) -> str:
    return f"zCDP for rho and privacy loss distributions (PLD) for epsilon: {report.accounting}."


def _formal(report: PrivacyReport) -> tuple[str, ...]:
    paragraphs = [lead(report)]
    others = report.well_behaved
    if others is not None:
        count = others.violators
        number = f"Fewer than {report.request.small_count:,}" if count is None else f"{count:,}"
        seconds = report.request.timer_seconds
        stated = ""
        if seconds is not None:
            stated = f" of {exactly(seconds)} seconds, which is assumed as stated"
        paragraphs.append(
            f"{number} {report.unit}{'' if count == 1 else 's'} did not keep to the timer{stated}; "
            "the figures above include them. For all others the run is "
            f"{_parameters(others, report.delta)}."
        )
    return (*paragraphs, *_groups(report))


def _groups(report: PrivacyReport) -> list[str]:
    return [
        f"For {group.group_size} {report.unit}s together: {_parameters(group, report.delta)}."
        for group in report.groups
    ]


def _sensitivity(report: PrivacyReport) -> str:
    text = (
        f"{round_up(report.sensitivity, 6):g} at clip norm 1 "
        f"({report.sensitivity_kind}) by {report.sensitivity_theorem}, for the strategy "
        f"as stored, its first {report.rounds_completed:,} rounds and the participation above."
    )
    if report.max_column_norm is not None:
        unit = report.noise_multiplier / report.max_column_norm
        text += (
            f" The largest column norm of the strategy is {round_up(report.max_column_norm, 6):g}: "
            f"scaled to unit columns, its noise multiplier is {round_down(unit, 6):g}."
        )
    bound = report.theorem_3_bound
    if bound is None or bound <= report.sensitivity * (1 + 1e-9):
        return text
    return f"{text} The bound of Theorem 3, which is larger, is {round_up(bound, 6):g}."


def _tree(report: PrivacyReport) -> str:
    tree = report.tree_aggregation
    return (
        f"Online tree aggregation of the same rounds and participation has sensitivity "
        f"{round_up(tree.sensitivity, 6):g} ({tree.sensitivity_kind}) and, with noise "
        f"multiplier {round_down(tree.noise_multiplier, 6):g} for the same root mean squared "
        f"error, is "
        f"{_parameters(tree, report.delta)}"
        f"{', which no sampling amplifies' if report.is_amplified else ''}."
        f"{_sharper_tree(tree)}"
    )


def _sharper_tree(tree: TreeComparison) -> str:
    if tree.released_sensitivity is None or tree.released_epsilon is None:
        return ""
    return (
        " That is the classic figure, of its nodes; the matrix that it releases has sensitivity "
        f"{round_up(tree.released_sensitivity, 6):g}, and epsilon is "
        f"{round_up(tree.released_epsilon, 3):g} by that."
    )


def _transparency(report: PrivacyReport) -> tuple[str, ...]:
    files = [
        f"{file.kind} `{_name(file.path)}`: SHA-256 {file.sha256}."
        for file in report.evidence.files
    ]
    opening = (
        "Every number here stands in report.json, and bandmf-report --verify=report.json computes "
        "it again from the evidence. The mechanism has the checksum "
        f"{report.mechanism.checksum}. The code, bandmf_tf, is open source. The evidence:"
    )
    return (
        opening,
        *files,
        *report.evidence.notes,
    )


def _name(path: Path) -> str:
    """Returns a file name in which nothing is a line break, markup or a direction of writing."""
    return urllib.parse.quote(os.fspath(path), safe=" +,=@()")


def _caveats(report: PrivacyReport) -> tuple[str, ...]:
    caveats = ["What this statement does not promise:", FLOATING_POINT]
    if report.is_amplified:
        caveats.append(
            f"Which {report.unit}s were drawn in which round must stay secret: against whoever "
            "knows it, only the guarantee without amplification holds."
        )
    else:
        caveats.append(
            "Participation is data as well: the values stated here are published, and the "
            "guarantee treats them as public."
        )
    if report.unit not in _ROWS:
        caveats.append(_MISBEHAVIOUR)
    return (*caveats, *report.cautions)


def _participation(report: PrivacyReport) -> str:
    most, closest = (
        f" ({basis})" for basis in (report.max_participations_basis, report.min_separation_basis)
    )
    return f"{_limits(report, most, closest)}; known from {report.observed.source}"


def _limits(report: PrivacyReport, most: str = "", closest: str = "") -> str:
    """Returns how units took part, with a word behind either number."""
    b, k = report.min_separation, report.max_participations
    if b is None or k == 1:
        text = f"no {report.unit} took part in more than one round{most}"
    else:
        text = (
            f"no {report.unit} took part in more than {k} rounds{most} "
            f"or in two less than {b} rounds apart{closest}"
        )
    if report.max_contributions_per_round > 1:
        text += f", up to {report.max_contributions_per_round} times in one round"
    return text


def _observed(report: PrivacyReport) -> tuple[str, ...]:
    """Returns what is known of participation: how, and where and when it was at its worst."""
    observed, unit = report.observed, report.unit
    paragraphs = [f"Known from {observed.source}."]
    completed, basis = report.rounds_completed, report.rounds_completed_basis
    rounds = f"Rounds completed: {completed:,} ({basis})"
    if observed.num_units is not None and observed.num_contributions is not None:
        rounds += (
            f", with {observed.num_contributions:,} contributions of {observed.num_units:,} {unit}s"
        )
    paragraphs.append(f"{rounds}.")
    separation = report.min_separation
    if separation is not None:
        text = f"Smallest separation: {separation:,} rounds ({report.min_separation_basis})"
        paragraphs.append(f"{text}{_place(observed.closest, 'pair')}.")
    text = (
        f"Largest number of participations: {report.max_participations:,} "
        f"({report.max_participations_basis})"
    )
    paragraphs.append(f"{text}{_place(observed.most_active, unit)}.")
    return tuple(paragraphs)


def _place(place: Occurrence | None, counted: str) -> str:
    """Returns where and when an extreme value occurred; nothing if that is unknown."""
    if place is None:
        return ""
    first, last = place.first_round, place.last_round
    text = f", first in round {first:,}"
    if first != last:
        text = f", first from round {first:,} to round {last:,}"
    if place.first_time is not None and place.last_time is not None:
        text += f" ({place.first_time[:19]}Z to {place.last_time[:19]}Z)"
    if place.count is not None:
        text += f", {place.count:,} {counted}{'' if place.count == 1 else 's'} in all"
    return text


def mechanism_words(report: PrivacyReport) -> str:
    """Returns which strategy correlated the noise."""
    mechanism = report.mechanism
    bands = mechanism.num_bands
    banded = f"a {mechanism.strategy} strategy of {bands:,} band{'' if bands == 1 else 's'}"
    words = _UNBANDED.get(mechanism.strategy, banded)
    return f"{words} planned for {mechanism.num_rounds:,} rounds"


def _fill(text: str, first: str = "", following: str | None = None) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if following is None else following,
        break_on_hyphens=False,
        break_long_words=False,
    )
