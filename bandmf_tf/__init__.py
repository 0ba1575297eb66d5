"""BandMF: differentially private training with banded matrix factorization, for TensorFlow.

The public names of the library, in the order in which data flows:

    workload -> strategy -> sensitivity and error -> noise and guarantee -> mechanism file

Mathematics (NumPy, SciPy and `dp_accounting`) is imported at once and needs no TensorFlow. What
needs TensorFlow, DuckDB or TensorFlow Federated is imported when it is first asked for:

    training    the modules `keras` (optimizers, models) and `aggregators` (TFF), `make_batches`
    noise       `NoiseStream`, `CorrelatedNoiseSumQuery`, `SuppliedNoiseSumQuery`
    evidence    `read_ledger`, `read_participation_log`, `make_report`

Notation, the same in code, flags, files and reports (capitals inside the mathematics only):

    A workload, C strategy, X = C^T C          num_rounds n, num_bands
    z independent noise, x + C^-1 z released   min_separation b = r2 - r1, max_participations k
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bandmf_tf.accounting import (
    Adjacency,
    CalibrationError,
    PrivacyGuarantee,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_guarantee,
    gaussian_noise_multiplier,
    gdp_mu,
    noise_multiplier_for_rho,
    zcdp_epsilon,
    zcdp_rho,
    zcdp_rho_for_epsilon,
)
from bandmf_tf.amplification import CyclicScheme, FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.bands import BandCandidate, BandSearch, choose_num_bands
from bandmf_tf.dense_optimization import optimize_dense
from bandmf_tf.mechanism_files import (
    MechanismFileError,
    load_mechanism,
    mechanism_checksum,
    save_mechanism,
)
from bandmf_tf.mechanisms import Mechanism, Participation, Provenance
from bandmf_tf.objective import rmse, squared_error, step_variances
from bandmf_tf.optimization import (
    OptimizationResult,
    optimize_banded,
    optimize_banded_fixed_epochs,
    optimize_toeplitz,
    square_root,
)
from bandmf_tf.planning import make_participation, plan_mechanism
from bandmf_tf.plans import Plan, PlanRequest
from bandmf_tf.sensitivity import (
    Sensitivity,
    banded_min_separation,
    chain_min_separation,
    fixed_epochs,
    general_min_separation,
    min_separation_participation,
    single_participation,
    vec_sens,
)
from bandmf_tf.strategies import (
    BandedStrategy,
    DenseStrategy,
    InverseStream,
    Strategy,
    ToeplitzStrategy,
    identity,
    lower_factor,
)
from bandmf_tf.trees import TreeStrategy
from bandmf_tf.workloads import Workload, prefix_sum, sgd, warmup_cooldown_schedule

if TYPE_CHECKING:  # For `_LATE`, below.
    from bandmf_tf import aggregators, keras
    from bandmf_tf.google_matrices import import_google_mechanism, load_google_matrix
    from bandmf_tf.ledger import Ledger, LedgerError, read_ledger, verify_ledger
    from bandmf_tf.noise_stream import FunctionalNoiseStream, NoiseStream
    from bandmf_tf.participation_logs import read_participation_log
    from bandmf_tf.privacy_analysis import PrivacyAnalysis, UnsupportedGuaranteeError, analyze
    from bandmf_tf.privacy_reports import make_report, verify_report
    from bandmf_tf.query import CorrelatedNoiseSumQuery, SuppliedNoiseSumQuery
    from bandmf_tf.report_evidence import ReportError, ReportRequest
    from bandmf_tf.sampling import Batches, SamplingError, cyclic_scheme, make_batches
    from bandmf_tf.secret_files import make_secret_folder, restrict_checkpoint

# Public names that are imported when they are first asked for, and the modules that hold them.
_LATE: dict[str, str] = {
    "Batches": "sampling",
    "CorrelatedNoiseSumQuery": "query",
    "FunctionalNoiseStream": "noise_stream",
    "Ledger": "ledger",
    "LedgerError": "ledger",
    "NoiseStream": "noise_stream",
    "PrivacyAnalysis": "privacy_analysis",
    "ReportError": "report_evidence",
    "ReportRequest": "report_evidence",
    "SamplingError": "sampling",
    "SuppliedNoiseSumQuery": "query",
    "UnsupportedGuaranteeError": "privacy_analysis",
    "analyze": "privacy_analysis",
    "cyclic_scheme": "sampling",
    "import_google_mechanism": "google_matrices",
    "load_google_matrix": "google_matrices",
    "make_batches": "sampling",
    "make_report": "privacy_reports",
    "make_secret_folder": "secret_files",
    "read_ledger": "ledger",
    "read_participation_log": "participation_logs",
    "restrict_checkpoint": "secret_files",
    "verify_ledger": "ledger",
    "verify_report": "privacy_reports",
}
_LATE_MODULES = ("aggregators", "keras")

__all__ = [
    "Adjacency",
    "BandCandidate",
    "BandSearch",
    "BandedStrategy",
    "Batches",
    "CalibrationError",
    "CorrelatedNoiseSumQuery",
    "CyclicScheme",
    "DenseStrategy",
    "FixedSizeSampling",
    "FunctionalNoiseStream",
    "InverseStream",
    "Ledger",
    "LedgerError",
    "Mechanism",
    "MechanismFileError",
    "NoiseStream",
    "OptimizationResult",
    "Participation",
    "Plan",
    "PlanRequest",
    "PoissonSampling",
    "PrivacyAnalysis",
    "PrivacyGuarantee",
    "Provenance",
    "ReportError",
    "ReportRequest",
    "SamplingError",
    "Sensitivity",
    "Shuffling",
    "Strategy",
    "SuppliedNoiseSumQuery",
    "ToeplitzStrategy",
    "TreeStrategy",
    "UnsupportedGuaranteeError",
    "Workload",
    "aggregators",
    "analyze",
    "banded_min_separation",
    "chain_min_separation",
    "choose_num_bands",
    "cyclic_scheme",
    "fixed_epochs",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_guarantee",
    "gaussian_noise_multiplier",
    "gdp_mu",
    "general_min_separation",
    "identity",
    "import_google_mechanism",
    "keras",
    "load_google_matrix",
    "load_mechanism",
    "lower_factor",
    "make_batches",
    "make_participation",
    "make_report",
    "make_secret_folder",
    "mechanism_checksum",
    "min_separation_participation",
    "noise_multiplier_for_rho",
    "optimize_banded",
    "optimize_banded_fixed_epochs",
    "optimize_dense",
    "optimize_toeplitz",
    "plan_mechanism",
    "prefix_sum",
    "read_ledger",
    "read_participation_log",
    "restrict_checkpoint",
    "rmse",
    "save_mechanism",
    "sgd",
    "single_participation",
    "square_root",
    "squared_error",
    "step_variances",
    "vec_sens",
    "verify_ledger",
    "verify_report",
    "warmup_cooldown_schedule",
    "zcdp_epsilon",
    "zcdp_rho",
    "zcdp_rho_for_epsilon",
]


def __getattr__(name: str) -> Any:
    if name in _LATE_MODULES:
        return importlib.import_module(f"bandmf_tf.{name}")
    if name in _LATE:
        return getattr(importlib.import_module(f"bandmf_tf.{_LATE[name]}"), name)
    raise AttributeError(f"module 'bandmf_tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
