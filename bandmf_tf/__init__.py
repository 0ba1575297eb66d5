"""BandMF: differentially private training with banded matrix factorization, for TensorFlow.

The public names of the library, in the order in which data flows:

    workload -> strategy -> sensitivity and error -> noise and guarantee -> mechanism file

Everything here is mathematics (NumPy, SciPy and `dp_accounting`) and imports without TensorFlow.
Modules that need TensorFlow or TensorFlow Federated are imported by name, for example
`bandmf_tf.google_matrices` or `bandmf_tf.tff_runtime`.

Notation, the same in code, flags, files and reports (capitals inside the mathematics only):

    A workload, C strategy, X = C^T C          num_rounds n, num_bands
    z independent noise, x + C^-1 z released   min_separation b = r2 - r1, max_participations k
"""

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

__all__ = [
    "Adjacency",
    "BandCandidate",
    "BandSearch",
    "BandedStrategy",
    "CalibrationError",
    "CyclicScheme",
    "DenseStrategy",
    "FixedSizeSampling",
    "InverseStream",
    "Mechanism",
    "MechanismFileError",
    "OptimizationResult",
    "Participation",
    "Plan",
    "PlanRequest",
    "PoissonSampling",
    "PrivacyGuarantee",
    "Provenance",
    "Sensitivity",
    "Shuffling",
    "Strategy",
    "ToeplitzStrategy",
    "TreeStrategy",
    "Workload",
    "banded_min_separation",
    "chain_min_separation",
    "choose_num_bands",
    "fixed_epochs",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_guarantee",
    "gaussian_noise_multiplier",
    "gdp_mu",
    "general_min_separation",
    "identity",
    "load_mechanism",
    "lower_factor",
    "make_participation",
    "mechanism_checksum",
    "min_separation_participation",
    "noise_multiplier_for_rho",
    "optimize_banded",
    "optimize_banded_fixed_epochs",
    "optimize_dense",
    "optimize_toeplitz",
    "plan_mechanism",
    "prefix_sum",
    "rmse",
    "save_mechanism",
    "sgd",
    "single_participation",
    "square_root",
    "squared_error",
    "step_variances",
    "vec_sens",
    "warmup_cooldown_schedule",
    "zcdp_epsilon",
    "zcdp_rho",
    "zcdp_rho_for_epsilon",
]
