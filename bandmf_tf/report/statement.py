"""The words of a privacy report: the statement as text and as Markdown.

The statement has the sections of the paper's appendix "Reporting privacy guarantees", which follows
Ponomareva et al. 2023, Section 5.3. It is made from the report and nothing else, so it says
what `report.json` says. Epsilon, rho and sensitivities are rounded up, never down.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import textwrap
import urllib.parse
from pathlib import Path

from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.evidence.participation import Occurrence
from bandmf_tf.report.analysis import GroupGuarantee, TreeComparison
from bandmf_tf.report.document import Compared, PrivacyReport, ReplaceOne, WellBehaved
from bandmf_tf.report.meaning import BY_MU
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

# The guarantees that stand side by side, in words.
_KINDS = {
    "enforced": "Enforced worst case",
    "observed": "For what was observed",
    "assumed": "If what is assumed holds",
    "planned": "As planned",
}

# What Markdown takes for markup, in words that are not ours.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&-])")

# Beyond this factor "so many times as likely" says nothing.
_LARGEST_FACTOR = 1e6

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
    "Noise is drawn and added in floating point, as a rule of 32 bits, and the guarantee is for "
    "real numbers: from the exact bits of released sums, or of models made of them, an adversary "
    "who knows all other contributions can tell with certainty whether a unit took part, which no "
    "epsilon here covers."
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A numbered section of a statement: a title and items of (title, paragraphs).

    With `quotes`, paragraphs hold words of the operator's, in which nothing is markup.
    """

    title: str
    items: tuple[tuple[str, tuple[str, ...]], ...]
    quotes: bool = False


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
            if section.quotes:
                paragraphs = tuple(_MARKUP.sub(r"\\\1", text) for text in paragraphs)
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
    confidence = f"confidence 1 - {round_up(report.failure_probability, 1):g}"
    return f"amplified by sampling, estimated with {confidence}"


def _parameters(
    figures: PrivacyReport | WellBehaved | GroupGuarantee | TreeComparison | ReplaceOne,
    delta: float,
) -> str:
    """Returns epsilon, at this delta, and rho among some figures."""
    return f"({round_up(figures.epsilon):g}, {delta!r})-DP and {round_up(figures.rho):g}-zCDP"


def headline_figures(report: PrivacyReport) -> list[tuple[str, str]]:
    """Returns the figures that a reader looks for first, as (value, what it is)."""
    separation = report.min_separation
    how = "" if not report.is_amplified else f", {_amplified(report)}"
    first = report.comparison[0] if report.comparison else None
    enforced = []
    if first is not None and first.epsilon not in (None, report.epsilon):
        words = f"epsilon at delta = {report.delta!r}, enforced worst case"
        enforced.append((f"{round_up(first.epsilon or 0.0):g}", words))
    return [
        *enforced,
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
        f"multiplier {round_down(report.noise_multiplier, 6):g} and "
        f"{'adaptive clip norm, starting at' if report.clip_norm_adapts else 'clip norm'} "
        f"{exactly(report.l2_norm_clip)}, is {formal_statement(report)}."
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
    figures = [
        (f"Epsilon, {_KINDS[entry.kind].lower()}", f"{round_up(entry.epsilon):g} {delta}")
        for entry in report.comparison
        if entry.epsilon is not None
    ]
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
    if report.replace_one is not None:
        figures.append(
            ("Epsilon, replace-one", f"{round_up(report.replace_one.epsilon):g} {delta}")
        )
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
                *((("In plain words", _meaning(report)),) if report.attacker is not None else ()),
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
                *((("Side by side", _comparison(report)),) if report.comparison else ()),
                ("Sensitivity", _sensitivity(report)),
                ("Plan and reality", ("Compared with the plan,", *report.findings)),
                ("Tree aggregation, for comparison", (_tree(report),)),
                ("Transparency and verifiability", _transparency(report)),
                *((("Audit", report.audit),) if report.audit else ()),
            ),
        ),
        Section("Caveats", (("Limits of this statement", _caveats(report)),)),
        Section("Who and what", _facts(report), quotes=True),
    )


def _meaning(report: PrivacyReport) -> tuple[str, ...]:
    """Returns what epsilon and mu mean for one unit."""
    attacker, unit = report.attacker, report.unit
    assert attacker is not None
    if report.epsilon < math.log(_LARGEST_FACTOR):
        factor = f"{round_up(math.exp(round_up(report.epsilon))):g} times"
    else:
        factor = f"more than {_LARGEST_FACTOR:g} times, which limits nothing"
    epsilon = (
        f"Epsilon: with the contributions of one {unit}, whatever is concluded from the models can "
        "be more likely than without them, or less, by a factor of e to the power of epsilon at "
        f"most, {factor}, but for a probability of delta."
    )
    mu = (
        f"mu: to tell whether the contributions of one {unit} were used is no easier than to tell, "
        "from one draw of a normal distribution of standard deviation 1, whether its mean is 0 or "
        f"{round_up(report.mu):g}{', without amplification' if report.is_amplified else ''}."
    )
    found, chance = f"{_percent(attacker.success)} %", f"{100 * attacker.false_alarms:g} %"
    attack = (
        f"An attacker who knows all other contributions, and accuses wrongly in {chance} of all "
        f"cases, finds a {unit} that was used in at most {found} of all cases, by "
        f"{attacker.bound}{_which(report)}; by guessing it would be {chance}."
    )
    return (f"What the guarantee means for one {unit}:", epsilon, mu, attack)


def _which(report: PrivacyReport) -> str:
    assert report.attacker is not None
    if report.attacker.bound == BY_MU:
        exact = report.sensitivity_kind == "exact"
        return ", which the best attack on the worst contributions reaches" if exact else ""
    return " at the best delta of the curve"


def _percent(probability: float) -> str:
    return f"{min(round_up(100 * probability, 3), 100.0):g}"


def _comparison(report: PrivacyReport) -> tuple[str, ...]:
    """Returns the guarantees that were enforced, observed and planned."""
    return (
        "The same release by what is known of participation:",
        *map(_compared, report.comparison),
    )


def _compared(entry: Compared) -> str:
    if entry.epsilon is None or entry.rho is None:
        return f"{_KINDS[entry.kind]}: none; {entry.note}."
    most = entry.max_participations
    limits = f"at most {most:,} participation{'' if most == 1 else 's'}"
    if entry.min_separation is not None and most != 1:
        limits += f", at least {entry.min_separation:,} rounds apart"
    return (
        f"{_KINDS[entry.kind]}: epsilon {round_up(entry.epsilon):g}, rho {round_up(entry.rho):g}, "
        f"for {limits}."
    )


def _facts(report: PrivacyReport) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns what the operator states, and what nobody has said."""
    items = []
    if report.facts:
        told = [
            f"{fact.title}: {fact.value}"
            f" ({'stated' if fact.agrees_with is None else f'agrees with {fact.agrees_with}'})"
            for fact in report.facts
        ]
        opening = (
            "Stated by whoever made this report, and compared with the evidence where that tells:"
        )
        items.append(("Facts", (opening, *told)))
    if report.open_questions:
        items.append(("Open questions", ("Nobody has said", *report.open_questions)))
    else:
        items.append(("Open questions", ("None of those that a facts file answers.",)))
    return tuple(items)


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
    if report.replace_one is not None:
        found = _parameters(report.replace_one, report.delta)
        amplified = ", without amplification" if report.is_amplified else ""
        paragraphs.append(
            f"For replace-one neighbours, where the contributions of one {report.unit} become "
            f"others, the sensitivity is twice as large: {found}{amplified}."
        )
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


def _sensitivity(report: PrivacyReport) -> tuple[str, ...]:
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
    if bound is not None and bound > report.sensitivity * (1 + 1e-9):
        text += f" The bound of Theorem 3, which is larger, is {round_up(bound, 6):g}."
    return (text, *_by_hand(report))


def _by_hand(report: PrivacyReport) -> tuple[str, ...]:
    """Returns how to compute mu and rho again with a pocket calculator."""
    if report.min_column_norm is None or report.max_column_norm is None:
        return ()
    sensitivity, noise = round_up(report.sensitivity, 6), round_down(report.noise_multiplier, 6)
    smallest, largest = round_down(report.min_column_norm, 6), round_up(report.max_column_norm, 6)
    by_hand = (
        f"By hand: mu = sensitivity / noise multiplier = {sensitivity:g} / {noise:g} = "
        f"{round_up(sensitivity / noise, 5):g}, and rho = mu^2 / 2 = "
        f"{round_up((sensitivity / noise) ** 2 / 2, 5):g}; epsilon follows from mu and delta."
    )
    columns = f"Columns of the strategy have norms from {smallest:g} to {largest:g}"
    k, m = report.max_participations, report.max_contributions_per_round
    b = report.min_separation
    if m == 1 and (k == 1 or (b is not None and report.mechanism.num_bands <= b)):
        most = round_up(largest * math.sqrt(k), 6)
        bound = (
            f"and those of one {report.unit} are orthogonal: the sensitivity is at most "
            f"{largest:g} times the square root of {k}, which is {most:g}."
        )
    else:
        bound = f"and those of one {report.unit} may overlap."
    return (by_hand, f"{columns}, {bound}")


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
        "Every number here stands in report.json. bandmf-report --verify=report.json "
        "--evidence_root=FOLDER computes it again from the evidence in a folder. The mechanism has "
        "the checksum "
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
