"""What a release costs: zCDP, Gaussian DP, privacy loss distributions, amplification."""

from bandmf_tf.accounting.amplification import (
    CyclicScheme,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.gaussian import (
    Adjacency,
    CalibrationError,
    PrivacyGuarantee,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_guarantee,
    gaussian_noise_multiplier,
    gdp_mu,
    zcdp_epsilon,
    zcdp_rho,
)
from bandmf_tf.accounting.releases import Release

__all__ = [
    "Adjacency",
    "CalibrationError",
    "CyclicScheme",
    "FixedSizeSampling",
    "PoissonSampling",
    "PrivacyGuarantee",
    "Release",
    "Shuffling",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_guarantee",
    "gaussian_noise_multiplier",
    "gdp_mu",
    "zcdp_epsilon",
    "zcdp_rho",
]
