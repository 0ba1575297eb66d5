"""Mechanisms: a strategy with its noise and its guarantee, and the file that holds them."""

from bandmf_tf.mechanisms.files import (
    MechanismFileError,
    load_mechanism,
    mechanism_checksum,
    save_mechanism,
)
from bandmf_tf.mechanisms.google_matrices import import_google_mechanism, load_google_matrix
from bandmf_tf.mechanisms.mechanism import Mechanism, Participation, Provenance
from bandmf_tf.mechanisms.spending import EpsilonSpent, epsilon_after

__all__ = [
    "EpsilonSpent",
    "Mechanism",
    "MechanismFileError",
    "Participation",
    "Provenance",
    "epsilon_after",
    "import_google_mechanism",
    "load_google_matrix",
    "load_mechanism",
    "mechanism_checksum",
    "save_mechanism",
]
