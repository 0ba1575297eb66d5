"""The mathematics of matrix factorization: workloads A, strategies C, sensitivity and error.

NumPy and SciPy only. A strategy is optimised for a workload under a participation; its sensitivity
and its error are computed without writing down an n x n matrix.
"""

from bandmf_tf.factorization.buffered import BufferedStrategy, optimize_buffered
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.error import rmse, squared_error
from bandmf_tf.factorization.inverse_banded import (
    InverseBandedStrategy,
    inverse_square_root,
    optimize_inverse_banded,
)
from bandmf_tf.factorization.optimization import (
    OptimizationResult,
    optimize_banded,
    optimize_banded_fixed_epochs,
    optimize_toeplitz,
    square_root,
)
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from bandmf_tf.factorization.sensitivity import (
    Sensitivity,
    banded_min_separation,
    chain_min_separation,
    fixed_epochs,
    general_min_separation,
    min_separation_participation,
    single_participation,
    toeplitz_participation,
    vec_sens,
)
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    InverseStream,
    Strategy,
    ToeplitzStrategy,
    identity,
    lower_factor,
)
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.factorization.workloads import Workload, prefix_sum, sgd, warmup_cooldown_schedule

__all__ = [
    "BandedStrategy",
    "BufferedStrategy",
    "DenseStrategy",
    "FixedEpochs",
    "InverseBandedStrategy",
    "InverseStream",
    "MinSeparation",
    "OptimizationResult",
    "Participation",
    "Sensitivity",
    "SingleParticipation",
    "Strategy",
    "ToeplitzStrategy",
    "TreeStrategy",
    "Workload",
    "banded_min_separation",
    "chain_min_separation",
    "fixed_epochs",
    "general_min_separation",
    "identity",
    "inverse_square_root",
    "lower_factor",
    "min_separation_participation",
    "optimize_banded",
    "optimize_banded_fixed_epochs",
    "optimize_buffered",
    "optimize_dense",
    "optimize_inverse_banded",
    "optimize_toeplitz",
    "prefix_sum",
    "rmse",
    "sgd",
    "single_participation",
    "square_root",
    "squared_error",
    "toeplitz_participation",
    "vec_sens",
    "warmup_cooldown_schedule",
]
