"""Mechanisms, runs and logs that the tests of privacy reports share."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
from pathlib import Path

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.cli.report import main
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism, Participation
from bandmf_tf.runs.ledger import LedgerHeader, LedgerWriter, Pseudonyms, RoundRecord, format_time
from bandmf_tf.runs.run_record import RunRecord, save_run_record

N, B, K = 24, 6, 4
# Much noise: accounting takes time in proportion to the privacy loss.
NOISE = 8.0
MODEL = b"a model"
# What --json promises.
KEYS = {
    "min_separation",
    "max_participations",
    "rounds_completed",
    "sensitivity",
    "sensitivity_kind",
    "rho",
    "epsilon",
    "delta",
    "adjacency",
}


@functools.cache
def planned_mechanism(noise_multiplier: float = NOISE) -> Mechanism:
    return Mechanism.create(
        optimize_banded(prefix_sum(N), B).strategy,
        prefix_sum(N),
        Participation.separated(B, K),
        noise_multiplier=noise_multiplier,
        l2_norm_clip=0.5,
        delta=1e-6,
    )


def write_log(folder: Path) -> Path:
    path = folder / "log.csv"
    rows = [f"secret-{i % B},{i}" for i in range(N)]
    path.write_text("client,round\n" + "\n".join(rows) + "\n")
    return path


def make_run(
    folder: Path, *, pseudonymous: bool = True, rounds: int = N, liar: bool = False, **header
) -> Path:
    (folder / "released").mkdir(parents=True)
    (folder / "released" / f"model_{rounds:06d}.npz").write_bytes(MODEL)
    save_mechanism(planned_mechanism(), folder / "mechanism.bandmf")
    checksum = mechanism_checksum(planned_mechanism())
    pseudonyms = Pseudonyms.create(folder / "salt") if pseudonymous else None
    fields = {
        "run_id": "test",
        "mechanism_checksum": checksum,
        "num_rounds": N,
        "clients_per_round": 1,
        "participation_recording": "pseudonymous" if pseudonymous else "none",
        "salt_id": pseudonyms.salt_id if pseudonyms else None,
        "clock": "simulated",
        "timer_seconds": None,
        "enforced_min_separation": None,
        "enforced_max_participations": None,
        "library_version": "0",
        **header,
    }
    with LedgerWriter.create(folder / "ledger.jsonl", LedgerHeader(**fields)) as writer:
        for i in range(rounds):
            opened = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + i * datetime.timedelta(
                minutes=1
            )
            writer.append(
                RoundRecord(
                    round=i,
                    start=format_time(opened),
                    end=format_time(opened + datetime.timedelta(seconds=30)),
                    num_participants=1,
                    mechanism_checksum=checksum,
                    model_digest=hashlib.sha256(MODEL).hexdigest(),
                    participants=pseudonyms
                    and pseudonyms.of(["secret-liar" if liar and i < 2 else f"secret-{i % B}"]),
                )
            )
    return folder


@functools.cache
def sampled_mechanism() -> Mechanism:
    sampling = PoissonSampling(N, B, 0.1)
    return Mechanism.create(
        optimize_banded(prefix_sum(N), B).strategy,
        prefix_sum(N),
        Participation.of_sampling(sampling),
        noise_multiplier=NOISE,
        l2_norm_clip=0.5,
        delta=1e-6,
        sampling=sampling,
    )


def run_record(**changes: object) -> RunRecord:
    mechanism = sampled_mechanism()
    record = RunRecord(
        mechanism_checksum=mechanism_checksum(mechanism),
        num_rounds=N,
        rounds_completed=N,
        sampling=mechanism.sampling,
        sampling_basis="enforced",
        batch_size=8.0,
        batch_sizes_seen={"smallest": 3, "largest": 12, "mean": 8.1},
        noise_multiplier=NOISE,
        l2_norm_clip=0.5,
        microbatch_size=1,
        accumulation_steps=1,
        epsilon=None,
        delta=None,
        adjacency="zero-out",
        started="2024-01-01T00:00:00Z",
        finished="2024-01-01T00:01:00Z",
    )
    return dataclasses.replace(record, **changes)


def keras_run(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    save_mechanism(sampled_mechanism(), folder / "mechanism.bandmf")
    save_run_record(run_record(**changes), folder / "record.json")
    return folder


def run_tool(*arguments: object) -> int:
    return main(["bandmf-report", *map(str, arguments)])


def refused(capsys, *arguments: object, status: int = 2) -> str:
    """Runs the tool, which must fail with one sentence, and returns that."""
    assert run_tool(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bandmf-report: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err
