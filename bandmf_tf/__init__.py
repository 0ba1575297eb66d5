"""BandMF: differentially private training with banded matrix factorization, for TensorFlow.

The names of the first five minutes are here; everything else lives in the subpackage that its job
names, in the order in which data flows (docs/reference/architecture.md draws it):

    factorization    workloads A, strategies C, sensitivity, error, optimisation
    accounting       what a release costs: zCDP, PLDs, amplification
    mechanisms       a strategy with its noise and guarantee, and the file that holds it
    planning         from a request to a calibrated mechanism, with its alternatives
    noise            rows of C^-1 z as a stream and as DP queries      (TensorFlow starts here)
    keras            optimizers, models and batches for `model.fit`
    federated        TFF aggregators and the runtime they need
    simulation       a population of clients and the training program that asks it
    runs             what a run leaves behind: checkpoints, ledger, run record
    evidence         how units really took part, one reader a source
    report           the analysis of a run and the statement that it supports
    audit            attacks on all of it: canaries, lower bounds, p-values

Nothing is imported before it is asked for, so that the mathematics needs no TensorFlow. Notation is
the paper's (docs/reference/notation.md): min_separation b = r2 - r1, noise_multiplier over the clip
norm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bandmf_tf import _onednn

if TYPE_CHECKING:  # The same names as in `_NAMES`, below.
    from bandmf_tf.errors import BandMFError
    from bandmf_tf.evidence.reader import ReportRequest
    from bandmf_tf.factorization.participation import MinSeparation
    from bandmf_tf.factorization.workloads import prefix_sum, sgd
    from bandmf_tf.mechanisms.files import load_mechanism, save_mechanism
    from bandmf_tf.mechanisms.mechanism import Mechanism
    from bandmf_tf.planning.plan import PlanRequest
    from bandmf_tf.planning.planner import plan_mechanism
    from bandmf_tf.report.document import make_report

# The other names of `__all__` are subpackages.
_NAMES = {
    "BandMFError": "errors",
    "Mechanism": "mechanisms.mechanism",
    "MinSeparation": "factorization.participation",
    "PlanRequest": "planning.plan",
    "ReportRequest": "evidence.reader",
    "load_mechanism": "mechanisms.files",
    "make_report": "report.document",
    "plan_mechanism": "planning.planner",
    "prefix_sum": "factorization.workloads",
    "save_mechanism": "mechanisms.files",
    "sgd": "factorization.workloads",
}

__all__ = [
    "BandMFError",
    "Mechanism",
    "MinSeparation",
    "PlanRequest",
    "ReportRequest",
    "accounting",
    "audit",
    "evidence",
    "factorization",
    "federated",
    "keras",
    "load_mechanism",
    "make_report",
    "mechanisms",
    "noise",
    "plan_mechanism",
    "planning",
    "prefix_sum",
    "report",
    "runs",
    "save_mechanism",
    "sgd",
    "simulation",
]

_onednn.turn_off()


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"bandmf_tf.{_NAMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"bandmf_tf.{name}")
    raise AttributeError(f"module 'bandmf_tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
