"""The words of a privacy report: the statement as text and Markdown, and a registry entry as YAML.

The statement has the sections of the paper's appendix "Reporting privacy guarantees", which follows
Ponomareva et al. 2023, Section 5.3. It is made from the document of a report and nothing else, so
it says what `report.json` says. Epsilon, rho and sensitivities are rounded up, never down.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml

from bandmf_tf.report.analysis import round_up

_WIDTH = 88

# What "a client's timer" promises of whom; the same words in the statement and in the registry.
_COVERED = {
    "device": "all well-behaved devices: those that follow the protocol, including its limits on "
    "participation. A device that does not weakens its own guarantee and nobody else's",
    "example": "every training example",
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
    "client": "Client-level: all contributions of whatever one value of the log's column client "
    "stands for, or of one participant of the stated limits. For a user with several clients see "
    "the guarantees for groups.",
}

_MISBEHAVIOUR = (
    "A unit that misbehaves and takes part more often, or closer together, than stated has a "
    "weaker guarantee than the one above; that of the other units does not change."
)


_REGISTRY_HEADER = """\
# Draft for the registry of DP deployments that OpenDP keeps. Answer the questions in <brackets>. In
# a record of the registry all this stands under `deployment`, beside `url_slug`, `status` (Draft)
# and `tier` (3).
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A numbered section of a statement: a title and items of (title, paragraphs)."""

    title: str
    items: tuple[tuple[str, tuple[str, ...]], ...]


def statement_text(document: dict[str, Any]) -> str:
    """Returns the statement as plain text, in the manner of TensorFlow Privacy's statements."""
    lines = [_fill(_opening(document)), ""]
    lines += [_fill(_setting(document)), ""]
    lines += [
        f"    {label + ':':<{_label_width(document)}}{value}" for label, value in _figures(document)
    ]
    for number, section in enumerate(sections(document), start=1):
        lines += ["", f"{number}. {section.title}"]
        for title, paragraphs in section.items:
            lines += ["", _fill(f"{title}: {paragraphs[0]}", "   ")]
            lines += [_fill(paragraph, "   - ", "     ") for paragraph in paragraphs[1:]]
    return "\n".join(lines) + "\n"


def statement_markdown(document: dict[str, Any]) -> str:
    """Returns the statement as Markdown."""
    lines = ["# Privacy statement", "", _opening(document), "", _setting(document), ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {label} | {value} |" for label, value in _figures(document)]
    for number, section in enumerate(sections(document), start=1):
        lines += ["", f"## {number}. {section.title}"]
        for title, paragraphs in section.items:
            lines += ["", f"**{title}.** {paragraphs[0]}"]
            if len(paragraphs) > 1:
                lines += ["", *(f"- {paragraph}" for paragraph in paragraphs[1:])]
    return "\n".join(lines) + "\n"


def registry_entry(document: dict[str, Any]) -> str:
    """Returns an entry for OpenDP's registry of DP deployments as YAML.

    These are the fields that the registry's records of 2026 have under `deployment`. What the
    evidence of a run cannot tell (who, where, what for) is left as a question in angle brackets, to
    be answered before the entry is submitted.
    """
    is_amplified = document["epsilon_amplified"] is not None
    unit = document["unit"]
    entry = {
        "basic": {
            "name": "<name of the product or model>",
            "data_curators": [
                {
                    "data_curator_name": "<organisation that holds the data>",
                    "data_curator_type": "<kind of organisation>",
                }
            ],
            "intended_use": "<what the model is used for>",
            "data_product_type": "Machine learning model",
            "data_product_region": "<region of the data>",
            "data_product_sector": "<sector, such as Technology>",
            "publication_date": document["created"][:10],
            "description": f"<what was trained, on what>. {_opening(document)}",
        },
        "dp_variant": {
            "variant_name": "Approximate DP" if is_amplified else "Zero-concentrated DP",
            "data_domain": f"<what the data of one {unit} are>",
            "unprotected_quantities": _unprotected(document),
        },
        "privacy_loss": {
            "privacy_unit": f"{unit.capitalize()}-level",
            "privacy_unit_details": f"{_UNITS[unit]} {_adjacency()}",
            "privacy_parameters": {
                "epsilon": round_up(document["epsilon"]),
                "delta": document["delta"],
                "rho": round_up(document["rho"]),
            },
            "privacy_parameters_details": _registry_parameters(document),
        },
        "deployment_model": {
            "model_name": "Central",
            "model_name_details": _dp_setting(),
            "actors": "<who sees the model, and who is trusted with what>",
            "release_type": "One release",
            "release_type_details": f"One training run of {document['rounds_completed']:,} rounds. "
            "<Will the same data be used again?>",
            "data_source_type": "<Static or Dynamic>",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "composition": "All rounds are one release with correlated noise, accounted as a "
            f"whole: {document['accounting']}. The guarantee holds if "
            f"{'; '.join(document['assumptions'])}.",
            "post_processing": _output(document),
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": _not_covered(),
            "mechanisms": f"Gaussian noise of multiplier {document['noise_multiplier']:.6g}, "
            f"correlated over rounds by {_mechanism(document)} (matrix factorization), checksum "
            f"{document['mechanism']['checksum']}. Libraries: bandmf_tf "
            f"{document['library_version']}, dp_accounting. {_floating_point()}",
            "justification": "<why these choices were made>",
        },
        "administrative": {
            "sources": "<link to the published statement and report.json>",
            "notes": " ".join([*document["findings"], *document["cautions"]]),
            "registry_authors": ["<author of this entry>"],
        },
    }
    return _REGISTRY_HEADER + yaml.safe_dump(
        entry, sort_keys=False, allow_unicode=True, width=_WIDTH
    )


def _unprotected(document: dict[str, Any]) -> str:
    participation = (
        "" if _batches_are_secret(document) else ", in which of them a unit takes part and when"
    )
    return (
        f"The number of rounds{participation}; the hyperparameters; metrics that were published "
        "without noise."
    )


def _registry_parameters(document: dict[str, Any]) -> str:
    epsilon = f"Epsilon: {document['accounting']}."
    if document["epsilon_amplified"] is None:
        return f"{epsilon} rho is of the same release."
    return (
        f"{epsilon} rho is of the same run without amplification, for which epsilon is "
        f"{round_up(document['epsilon_unamplified']):g}."
    )


def formal_statement(document: dict[str, Any]) -> str:
    """Returns the guarantee in one sentence."""
    text = (
        f"{_parameters(document, document)} for {document['adjacency']} neighbours, at the level "
        f"of one {document['unit']}"
    )
    if document["epsilon_amplified"] is None:
        return text
    without = round_up(document["epsilon_unamplified"])
    return f"{text}; epsilon is amplified by sampling, and {without:g} without"


def _parameters(figures: dict[str, Any], document: dict[str, Any]) -> str:
    """Returns epsilon and rho among some figures, at the delta of the report."""
    return (
        f"({round_up(figures['epsilon']):g}, {document['delta']!r})-DP and "
        f"{round_up(figures['rho']):g}-zCDP"
    )


def headline_figures(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures that a reader looks for first, as (value, what it is)."""
    separation = document["min_separation"]
    how = "" if document["epsilon_amplified"] is None else ", amplified by sampling"
    return [
        (f"{round_up(document['epsilon']):g}", f"epsilon at delta = {document['delta']!r}{how}"),
        (f"{round_up(document['rho']):g}", "rho (zCDP)"),
        (f"{document['rounds_completed']:,}", "rounds completed"),
        (
            "–" if separation is None else f"{separation:,}",
            f"rounds apart at least ({document['min_separation_basis']})",
        ),
        (
            f"{document['max_participations']:,}",
            f"participations at most ({document['max_participations_basis']})",
        ),
        (
            f"{round_up(document['sensitivity']):g}",
            f"sensitivity ({document['sensitivity_kind']})",
        ),
    ]


def _opening(document: dict[str, Any]) -> str:
    return (
        f"Training for {document['rounds_completed']:,} rounds with {_mechanism(document)}, noise "
        f"multiplier {document['noise_multiplier']:.6g} and clip norm "
        f"{document['l2_norm_clip']:g}, is {formal_statement(document)}."
    )


def _setting(document: dict[str, Any]) -> str:
    seen = bool(document["observed"]["participations"])
    return (
        f"The figures are for {document['adjacency']} neighbours and "
        f"{'hold for what happened:' if seen else 'hold provided that'} "
        f"{_participation(document)}."
    )


def _figures(document: dict[str, Any]) -> list[tuple[str, str]]:
    delta = f"at delta = {document['delta']!r}"
    figures = []
    if document["epsilon_amplified"] is not None:
        amplified = f"{round_up(document['epsilon_amplified']):g} {delta}"
        figures.append(("Epsilon, amplified by sampling (PLD)", amplified))
    figures += [
        (
            "Epsilon, no sampling assumed (PLD)",
            f"{round_up(document['epsilon_unamplified']):g} {delta}",
        ),
        ("Epsilon, converted from zCDP", f"{round_up(document['epsilon_zcdp']):g} {delta}"),
        ("rho (zCDP)", f"{round_up(document['rho']):g}"),
        ("mu (Gaussian DP)", f"{round_up(document['mu']):g}"),
    ]
    figures += [
        (
            f"Epsilon of {group['group_size']} {document['unit']}s together",
            f"{round_up(group['epsilon']):g} {delta}",
        )
        for group in document["groups"]
    ]
    return figures


def _label_width(document: dict[str, Any]) -> int:
    return max(len(label) for label, _ in _figures(document)) + 3


def sections(document: dict[str, Any]) -> tuple[Section, ...]:
    """Returns the sections of the statement, in the order of the paper's appendix."""
    unit = document["unit"]
    return (
        Section("DP setting", (("Trust", (_dp_setting(),)),)),
        Section(
            "Instantiating the DP definition",
            (
                ("Data accesses covered", (_data_accesses(document),)),
                ("Final mechanism output", (_output(document),)),
                ("Unit of privacy", (_UNITS[unit],)),
                ("Adjacency", (_adjacency(),)),
            ),
        ),
        Section(
            "Privacy accounting details",
            (
                ("Type of accounting", (_accounting(document),)),
                (
                    "Assumptions",
                    ("The guarantee holds if", *(f"{text}." for text in document["assumptions"])),
                ),
                ("Participation", _observed(document)),
                ("Formal statement", _formal(document)),
                ("Sensitivity", (_sensitivity(document),)),
                ("Plan and reality", ("Compared with the plan,", *document["findings"])),
                ("Tree aggregation, for comparison", (_tree(document),)),
                ("Transparency and verifiability", _transparency(document)),
            ),
        ),
        Section("Caveats", (("Limits of this statement", _caveats(document)),)),
    )


def _dp_setting() -> str:
    return (
        "Central DP: the service provider is trusted to clip, to sum, to add the noise and to keep "
        "the noise secret."
    )


def _data_accesses(document: dict[str, Any]) -> str:
    return (
        f"One training run of {document['rounds_completed']:,} rounds, for "
        f"{_COVERED[document['unit']]}. {_not_covered()}"
    )


def _not_covered() -> str:
    return (
        "Not covered: hyperparameter tuning on the same data, the selection of a checkpoint by "
        "metrics or A/B tests on private data, metrics of the training data that are published "
        "without noise, and other models trained on it. Pre-training on public data needs no "
        "guarantee; the evidence does not say whether there was any."
    )


def _output(document: dict[str, Any]) -> str:
    sent = "" if document["unit"] == "example" else ", those sent to clients included,"
    return (
        "The mechanism's output is the whole sequence of noisy sums. The final model and every "
        f"model before it{sent} are post-processing of it and have the same guarantee."
    )


def _adjacency() -> str:
    return (
        "Zero-out: in the neighbouring data set the contributions of one unit are zeros wherever "
        "it takes part, and everybody's participation stays the same."
    )


def _accounting(document: dict[str, Any]) -> str:
    return (
        f"zCDP for rho and privacy loss distributions (PLD) for epsilon: {document['accounting']}."
    )


def _formal(document: dict[str, Any]) -> tuple[str, ...]:
    paragraphs = [f"The run is {formal_statement(document)}."]
    others = document["well_behaved"]
    if others is not None:
        count = others["violators"]
        paragraphs.append(
            f"{count} {document['unit']}{'' if count == 1 else 's'} did not keep to the timer; the "
            "figures above include them. For all others the run is "
            f"{_parameters(others, document)}."
        )
    return (*paragraphs, *_groups(document))


def _groups(document: dict[str, Any]) -> list[str]:
    return [
        f"For {group['group_size']} {document['unit']}s together, without amplification: "
        f"{_parameters(group, document)}."
        for group in document["groups"]
    ]


def _sensitivity(document: dict[str, Any]) -> str:
    text = (
        f"{round_up(document['sensitivity'], 6):g} at clip norm 1 "
        f"({document['sensitivity_kind']}) by {document['sensitivity_theorem']}, for the strategy "
        f"as stored, its first {document['rounds_completed']:,} rounds and the participation above."
    )
    bound = document["theorem_3_bound"]
    if bound is None or bound <= document["sensitivity"] * (1 + 1e-9):
        return text
    return f"{text} The bound of Theorem 3, which is larger, is {round_up(bound, 6):g}."


def _tree(document: dict[str, Any]) -> str:
    tree = document["tree_aggregation"]
    return (
        f"Online tree aggregation of the same rounds and participation has sensitivity "
        f"{round_up(tree['sensitivity'], 6):g} ({tree['sensitivity_kind']}) and, with noise "
        f"multiplier {tree['noise_multiplier']:.6g} for the same root mean squared error, is "
        f"{_parameters(tree, document)}"
        f"{', which no sampling amplifies' if document['epsilon_amplified'] is not None else ''}."
    )


def _transparency(document: dict[str, Any]) -> tuple[str, ...]:
    files = [
        f"{file['kind']} {file['path']}: SHA-256 {file['sha256']}."
        for file in document["evidence"]["files"]
    ]
    opening = (
        "Every number here stands in report.json, and bandmf-report --verify=report.json computes "
        "it again from the evidence. The mechanism has the checksum "
        f"{document['mechanism']['checksum']}. The code, bandmf_tf, is open source. The evidence:"
    )
    return (
        opening,
        *files,
        *document["evidence"]["notes"],
    )


def _caveats(document: dict[str, Any]) -> tuple[str, ...]:
    caveats = ["What this statement does not promise:", _floating_point()]
    if _batches_are_secret(document):
        caveats.append(
            "Which examples were drawn in which round must stay secret: against whoever knows it, "
            "only the guarantee without amplification holds."
        )
    else:
        caveats.append(
            "Participation is data as well: the values stated here are published, and the "
            "guarantee treats them as public."
        )
    if document["unit"] != "example":
        caveats.append(_MISBEHAVIOUR)
    return (*caveats, *document["cautions"])


def _batches_are_secret(document: dict[str, Any]) -> bool:
    """Whether the guarantee needs that nobody knows who took part when."""
    return document["epsilon_amplified"] is not None


def _floating_point() -> str:
    return (
        "Noise is drawn and added in floating point; the guarantee is for real numbers, and "
        "attacks on the low-order bits of released values are outside of it."
    )


def _participation(document: dict[str, Any]) -> str:
    b, k = document["min_separation"], document["max_participations"]
    unit = document["unit"]
    if b is None or k == 1:
        text = (
            f"no {unit} took part in more than one round ({document['max_participations_basis']})"
        )
    else:
        text = (
            f"no {unit} took part in more than {k} rounds ({document['max_participations_basis']}) "
            f"or in two less than {b} rounds apart ({document['min_separation_basis']})"
        )
    if document["max_contributions_per_round"] > 1:
        text += f", up to {document['max_contributions_per_round']} times in one round"
    return f"{text}; known from {document['observed']['source']}"


def _observed(document: dict[str, Any]) -> tuple[str, ...]:
    """Returns what is known of participation: how, and where and when it was at its worst."""
    observed, unit = document["observed"], document["unit"]
    paragraphs = [f"Known from {observed['source']}."]
    completed, basis = document["rounds_completed"], document["rounds_completed_basis"]
    rounds = f"Rounds completed: {completed:,} ({basis})"
    if observed["num_units"] is not None:
        rounds += (
            f", with {observed['num_contributions']:,} contributions of "
            f"{observed['num_units']:,} {unit}s"
        )
    paragraphs.append(f"{rounds}.")
    separation = document["min_separation"]
    if separation is not None:
        text = f"Smallest separation: {separation:,} rounds ({document['min_separation_basis']})"
        paragraphs.append(f"{text}{_place(observed['closest'], 'pair')}.")
    text = (
        f"Largest number of participations: {document['max_participations']:,} "
        f"({document['max_participations_basis']})"
    )
    paragraphs.append(f"{text}{_place(observed['most_active'], unit)}.")
    return tuple(paragraphs)


def _place(place: dict[str, Any] | None, counted: str) -> str:
    """Returns where and when an extreme value occurred; nothing if that is unknown."""
    if place is None:
        return ""
    first, last = place["first_round"], place["last_round"]
    text = f", first in round {first:,}"
    if first != last:
        text = f", first from round {first:,} to round {last:,}"
    if place["first_time"] is not None:
        text += f" ({place['first_time'][:19]}Z to {place['last_time'][:19]}Z)"
    if place["count"] is not None:
        text += f", {place['count']:,} {counted}{'' if place['count'] == 1 else 's'} in all"
    return text


def _mechanism(document: dict[str, Any]) -> str:
    mechanism = document["mechanism"]
    if mechanism["strategy"] == "tree":
        return f"tree aggregation planned for {mechanism['num_rounds']:,} rounds"
    bands = mechanism["num_bands"]
    return (
        f"a {mechanism['strategy']} strategy of {bands:,} band{'' if bands == 1 else 's'} planned "
        f"for {mechanism['num_rounds']:,} rounds"
    )


def _fill(text: str, first: str = "", following: str | None = None) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if following is None else following,
        break_on_hyphens=False,
        break_long_words=False,
    )
