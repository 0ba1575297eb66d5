"""How units really took part in a run: one reader for each source, and what they agree on."""

from bandmf_tf.evidence.logs import read_participation_log
from bandmf_tf.evidence.participation import ObservedParticipation
from bandmf_tf.evidence.reader import ReportError, ReportRequest

__all__ = [
    "ObservedParticipation",
    "ReportError",
    "ReportRequest",
    "read_participation_log",
]
