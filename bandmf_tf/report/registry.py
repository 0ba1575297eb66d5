"""An entry for OpenDP's registry of DP deployments, in the words of the statement."""

from __future__ import annotations

import re

import yaml

from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.report import statement
from bandmf_tf.report.document import PrivacyReport

_HEADER = """\
# A record for the registry of DP deployments that OpenDP keeps. Answer the questions in <brackets>,
# or in the facts file, and make it again.
"""


def registry_entry(report: PrivacyReport) -> str:
    """Returns a record for OpenDP's registry of DP deployments as YAML.

    These are the fields that the registry's records of 2026 have. What the evidence of a run cannot
    tell (who, where, what for) comes from the facts file, or is left as a question in angle
    brackets, to be answered before the record is submitted; where only certain words are valid,
    it is left out.
    """
    unit = report.unit
    facts = {fact.name: fact.value for fact in report.facts}
    chosen = {
        "data_product_sector": facts.get("sector"),
        "data_source_type": facts.get("data_source"),
    }
    known = {name: {name: value} if value else {} for name, value in chosen.items()}
    name = facts.get("model", "<name of the product or model>")
    entry = {
        "basic": {
            "name": name,
            "data_curators": [facts.get("owner", "<organisation that holds the data>")],
            "intended_use": facts.get("purpose", "<what the model is used for>"),
            "data_product_type": "Machine learning model",
            "data_product_region": facts.get("region", "<region of the data>"),
            **known["data_product_sector"],
            "publication_date": report.created[:10],
            "description": f"{facts.get('model', '<what was trained, on what>')}. "
            f"{statement.opening(report)}",
        },
        "dp_variant": {
            "variant_name": "Approximate DP" if report.is_amplified else "Zero-concentrated DP",
            "data_domain": facts.get("data", f"<what the data of one {unit} are>"),
            "unprotected_quantities": _unprotected(report),
        },
        "privacy_loss": {
            "privacy_unit": f"{unit.capitalize()}-level",
            "privacy_unit_details": f"{statement.unit_words(report)} {statement.ADJACENCY}",
            "privacy_parameters": {
                "epsilon": round_up(report.epsilon),
                "delta": report.delta,
                "rho": round_up(report.rho),
            },
            "privacy_parameters_details": _parameters(report),
        },
        "deployment_model": {
            "model_name": "Central",
            "model_name_details": statement.DP_SETTING,
            "actors": facts.get("actors", "<who sees the model, and who is trusted with what>"),
            "release_type": "One release",
            "release_type_details": f"One training run of {report.rounds_completed:,} rounds. "
            f"{facts.get('further_use', '<Will the same data be used again?>')}",
            **known["data_source_type"],
            "access_type": "Non-interactive",
        },
        "accounting": {
            "composition": "All rounds are one release with correlated noise, accounted as a "
            f"whole: {report.accounting}. The guarantee holds if "
            f"{'; '.join(report.assumptions)}.",
            "post_processing": statement.output(report),
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": _tuning(facts),
            "mechanisms": "Gaussian noise of multiplier "
            f"{round_down(report.noise_multiplier, 6):g}, "
            f"correlated over rounds by {statement.mechanism_words(report)} (matrix "
            f"factorization), checksum {report.mechanism.checksum}. Libraries: bandmf_tf "
            f"{report.library_version}, dp_accounting. {statement.FLOATING_POINT}",
            "justification": facts.get("justification", "<why these choices were made>"),
        },
        "administrative": {
            "sources": facts.get("published_at", "<link to the published statement>"),
            "notes": " ".join([*report.findings, *report.cautions, *report.open_questions]),
            "registry_authors": [facts.get("author", "<author of this entry>")],
        },
    }
    record = {"url_slug": _slug(facts), "status": "Draft", "tier": 3, "deployment": entry}
    return _HEADER + yaml.safe_dump(
        record, sort_keys=False, allow_unicode=True, width=statement.WIDTH
    )


def _slug(facts: dict[str, str]) -> str:
    """Returns a name for the record's address, of the model and its owner."""
    words = f"{facts.get('model', '')} {facts.get('owner', '')}"
    slug = "-".join(re.findall(r"[a-z0-9]+", words.lower()))
    return slug[:80].strip("-") or "name-of-the-model"


def _tuning(facts: dict[str, str]) -> str:
    if "tuning" not in facts:
        return statement.NOT_COVERED
    return f"By the operator's word: {facts['tuning']}. {statement.NOT_COVERED}"


def _unprotected(report: PrivacyReport) -> str:
    participation = "" if report.is_amplified else ", in which of them a unit takes part and when"
    return (
        f"The number of rounds{participation}; the hyperparameters; metrics that were published "
        "without noise."
    )


def _parameters(report: PrivacyReport) -> str:
    epsilon = f"Epsilon: {report.accounting}."
    if not report.is_amplified:
        return f"{epsilon} rho is of the same release."
    return (
        f"{epsilon} rho is of the same run without amplification, for which epsilon is "
        f"{round_up(report.epsilon_unamplified):g}."
    )
