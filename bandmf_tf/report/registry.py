"""An entry for OpenDP's registry of DP deployments, in the words of the statement."""

from __future__ import annotations

import yaml

from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.report import statement
from bandmf_tf.report.document import PrivacyReport

_HEADER = """\
# Draft for the registry of DP deployments that OpenDP keeps. Answer the questions in <brackets>. In
# a record of the registry all this stands under `deployment`, beside `url_slug`, `status` (Draft)
# and `tier` (3).
"""


def registry_entry(report: PrivacyReport) -> str:
    """Returns an entry for OpenDP's registry of DP deployments as YAML.

    These are the fields that the registry's records of 2026 have under `deployment`. What the
    evidence of a run cannot tell (who, where, what for) is left as a question in angle brackets, to
    be answered before the entry is submitted.
    """
    unit = report.unit
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
            "publication_date": report.created[:10],
            "description": f"<what was trained, on what>. {statement.opening(report)}",
        },
        "dp_variant": {
            "variant_name": "Approximate DP" if report.is_amplified else "Zero-concentrated DP",
            "data_domain": f"<what the data of one {unit} are>",
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
            "actors": "<who sees the model, and who is trusted with what>",
            "release_type": "One release",
            "release_type_details": f"One training run of {report.rounds_completed:,} rounds. "
            "<Will the same data be used again?>",
            "data_source_type": "<Static or Dynamic>",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "composition": "All rounds are one release with correlated noise, accounted as a "
            f"whole: {report.accounting}. The guarantee holds if "
            f"{'; '.join(report.assumptions)}.",
            "post_processing": statement.output(report),
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": statement.NOT_COVERED,
            "mechanisms": "Gaussian noise of multiplier "
            f"{round_down(report.noise_multiplier, 6):g}, "
            f"correlated over rounds by {statement.mechanism_words(report)} (matrix "
            f"factorization), checksum {report.mechanism.checksum}. Libraries: bandmf_tf "
            f"{report.library_version}, dp_accounting. {statement.FLOATING_POINT}",
            "justification": "<why these choices were made>",
        },
        "administrative": {
            "sources": "<link to the published statement and report.json>",
            "notes": " ".join([*report.findings, *report.cautions]),
            "registry_authors": ["<author of this entry>"],
        },
    }
    return _HEADER + yaml.safe_dump(
        entry, sort_keys=False, allow_unicode=True, width=statement.WIDTH
    )


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
