"""What a run leaves behind: checkpoints, a ledger and released models, or a run record."""

from bandmf_tf.runs.folder import RunError
from bandmf_tf.runs.ledger import Ledger, LedgerError, read_ledger, verify_ledger
from bandmf_tf.runs.registry import ParticipationRegistry, RegistryError
from bandmf_tf.runs.run_record import RunRecord, load_run_record, save_run_record
from bandmf_tf.runs.training_run import TrainingRun

__all__ = [
    "Ledger",
    "LedgerError",
    "ParticipationRegistry",
    "RegistryError",
    "RunError",
    "RunRecord",
    "TrainingRun",
    "load_run_record",
    "read_ledger",
    "save_run_record",
    "verify_ledger",
]
