"""What a release costs: zCDP, Gaussian DP, privacy loss distributions, amplification."""

from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
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
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
)
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme, scheme_from_json

__all__ = [
    "Adjacency",
    "BallsInBins",
    "BoundedPoissonSampling",
    "CalibrationError",
    "CyclicScheme",
    "FixedSizeSampling",
    "MinSeparationSampling",
    "OncePerEpoch",
    "PoissonSampling",
    "PrivacyGuarantee",
    "RandomParticipation",
    "Release",
    "SamplingScheme",
    "SecretParts",
    "Shuffling",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_guarantee",
    "gaussian_noise_multiplier",
    "gdp_mu",
    "scheme_from_json",
    "zcdp_epsilon",
    "zcdp_rho",
]
