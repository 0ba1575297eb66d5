"""What a run leaves behind: checkpoints, a ledger and released models, or a run record."""

from bandmf_tf.runs.folder import RunError
from bandmf_tf.runs.ledger import (
    Ledger,
    LedgerError,
    LedgerHeader,
    LedgerWriter,
    Pseudonyms,
    RoundRecord,
    read_ledger,
    verify_ledger,
)
from bandmf_tf.runs.registry import ParticipationRegistry, RegistryError, RegistryRound
from bandmf_tf.runs.run_record import RunRecord, load_run_record, save_run_record
from bandmf_tf.runs.training_run import PublishedRound, RoundResult, TrainingRun

__all__ = [
    "Ledger",
    "LedgerError",
    "LedgerHeader",
    "LedgerWriter",
    "ParticipationRegistry",
    "Pseudonyms",
    "PublishedRound",
    "RegistryError",
    "RegistryRound",
    "RoundRecord",
    "RoundResult",
    "RunError",
    "RunRecord",
    "TrainingRun",
    "load_run_record",
    "read_ledger",
    "save_run_record",
    "verify_ledger",
]
