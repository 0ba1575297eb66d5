"""Mechanisms: a strategy with its noise and its guarantee, and the file that holds them.

Google's published matrices are read by `google_matrices`; import it by its name.
"""

from bandmf_tf.mechanisms.files import (
    MechanismFileError,
    load_mechanism,
    mechanism_checksum,
    save_mechanism,
)
from bandmf_tf.mechanisms.mechanism import Mechanism, Provenance
from bandmf_tf.mechanisms.spending import EpsilonSpent, epsilon_after

__all__ = [
    "EpsilonSpent",
    "Mechanism",
    "MechanismFileError",
    "Provenance",
    "epsilon_after",
    "load_mechanism",
    "mechanism_checksum",
    "save_mechanism",
]
