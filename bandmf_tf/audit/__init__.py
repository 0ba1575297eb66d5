"""Attacks on the library's own guarantees: canaries, lower bounds, p-values, a record."""

from bandmf_tf.audit.attack import AuditError
from bandmf_tf.audit.paths import PATHS, audit, available_paths
from bandmf_tf.audit.statistics import one_run_epsilon
from bandmf_tf.runs.audit_errors import Errors, epsilon_lower_bound, mu_lower_bound

__all__ = [
    "PATHS",
    "AuditError",
    "Errors",
    "audit",
    "available_paths",
    "epsilon_lower_bound",
    "mu_lower_bound",
    "one_run_epsilon",
]
