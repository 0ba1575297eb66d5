"""Privacy reports: the analysis of a run, the document that states it, and its verification."""

from bandmf_tf.report.analysis import PrivacyAnalysis, UnsupportedGuaranteeError, analyze
from bandmf_tf.report.document import make_report, verify_report

__all__ = [
    "PrivacyAnalysis",
    "UnsupportedGuaranteeError",
    "analyze",
    "make_report",
    "verify_report",
]
