"""The production program trains, survives kills with TFF inside, and refuses with one sentence.

A first run is a process started as in production, runs that are killed are forked processes, and
whatever refuses or just trains on does so in the process of the test, which saves imports.
`kills_test.py` kills at random moments and at every point of a round, with light rounds;
here the program itself is killed, at points before, at and after the commit.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from absl import flags
from absl.testing import flagsaver

import forked_program
from bandmf_tf import _memory
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.federated import runtime as tff_runtime
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import ledger
from bandmf_tf.simulation.config import FIELDS
from cases import ROOT, all_end, last_of_each, make_mechanism
from production import train_federated

NUM_ROUNDS = 6
ARGUMENTS = (
    f"--num_rounds={NUM_ROUNDS}",
    "--num_clients=60",
    "--clients_per_round=3",
    "--examples_per_client=6",
    "--pinned_noise_seed=3",
    "--evaluate_every=6",
    "--publish_every=1",
    "--availability=always",
    "--participation_recording=pseudonymous",
)


def _mechanism(num_rounds: int, min_separation: int = 3) -> Mechanism:
    strategy = optimize_banded(prefix_sum(num_rounds), min_separation).strategy
    participation = MinSeparation(min_separation)
    return make_mechanism(strategy, participation, noise_multiplier=0.3, l2_norm_clip=0.5)


@pytest.fixture(name="mechanism_file", scope="module")
def _mechanism_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mechanism") / "m.bandmf"
    save_mechanism(_mechanism(NUM_ROUNDS), path)
    return path


@pytest.fixture(name="start", scope="module")
def _start(mechanism_file):
    """Starts the program on a folder, as a newcomer does; its output goes to a file beside it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)

    def start(folder, *more):
        given = [f"--mechanism={mechanism_file}", f"--output={folder}", *ARGUMENTS, *more]
        arguments = last_of_each(given)
        # Not a pipe: a worker that outlives a kill keeps it open.
        with (folder.parent / "output.txt").open("w") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "production.train_federated", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return start


@pytest.fixture(name="train_apart", scope="module")
def _train_apart(mechanism_file):
    """Runs the program in a process that can be killed; returns exit code and output."""
    server = forked_program.fork_server()

    def train_apart(folder, *more, largest_file=None):
        given = [f"--mechanism={mechanism_file}", f"--output={folder}", *ARGUMENTS, *more]
        arguments = last_of_each(given)
        output = folder.parent / "output.txt"
        child = server.Process(
            target=forked_program.run, args=(arguments, str(output), largest_file)
        )
        child.start()
        child.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # The worker of a program that was killed.
        return child.exitcode, output.read_text()

    return train_apart


@pytest.fixture(name="train")
def _train(mechanism_file, capfd):
    """Runs the program in this process; returns exit code and output."""
    handler = signal.getsignal(signal.SIGTERM)

    def train(folder, *more):
        given = [f"--mechanism={mechanism_file}", f"--output={folder}", *ARGUMENTS, *more]
        arguments = last_of_each(given)
        with flagsaver.flagsaver():
            status = train_federated.main(["train_federated", *arguments])
        return status, "".join(capfd.readouterr())

    yield train
    tff_runtime.end_workers()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(name="whole", scope="module")
def _whole(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    status = start(folder, f"--anchor={folder.parent / 'anchor'}").wait()
    output = (folder.parent / "output.txt").read_text()
    assert status == 0, output
    return folder, output


def test_the_anchor_has_the_hash_of_every_round(whole):
    folder, output = whole
    lines = (folder / "ledger.jsonl").read_text().splitlines()[1:]
    expected = [f"{i} {json.loads(line)['hash']}" for i, line in enumerate(lines, start=1)]
    assert (folder.parent / "anchor").read_text().splitlines() == expected
    assert f"ledger head: {expected[-1].split()[1]}" in output


def _final_model(folder):
    return np.load(folder / "released" / f"model_{NUM_ROUNDS:06d}.npz")


def test_a_run_leaves_a_complete_folder_and_says_where_to_look(whole, mechanism_file):
    folder, output = whole
    assert "NOT private" in output  # The noise seed is pinned.
    assert "real images of handwritten digits" in output
    assert f"run folder: {folder}" in output
    assert f"round {NUM_ROUNDS} of {NUM_ROUNDS}: loss " in output
    for noise in ("cuDNN", "pkg_resources", "Warning", "\r"):
        assert noise not in output
    found = ledger.verify_ledger(folder / "ledger.jsonl", num_records=NUM_ROUNDS)
    assert found.header.clients_per_round == 3
    assert found.header.noise_source == "pinned"
    assert found.header.enforced_min_separation == 3
    for record in found.records:
        model = folder / "released" / f"model_{record.round + 1:06d}.npz"
        assert hashlib.sha256(model.read_bytes()).hexdigest() == record.model_digest
        assert len(record.participants) == record.num_participants == 3
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert len(rows) == NUM_ROUNDS
    assert 0.0 <= float(rows[-1]["test_accuracy"]) <= 1.0
    assert list((folder / "tensorboard").iterdir())


def test_nothing_outside_the_secret_folder_holds_noise_or_seed(whole):
    folder, _ = whole
    assert sorted(_final_model(folder).files) == [f"trainable_{i:03d}" for i in range(4)]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        ".lock",
        "ledger.jsonl",
        "mechanism.bandmf",
        "metrics.csv",
        "metrics.prom",
        "released",
        "run.json",
        "secret",
        "tensorboard",
    ]


def test_kills_and_a_full_disk_change_nothing(train_apart, whole, tmp_path):
    folder = tmp_path / "run"
    for point, number in (("computed", 1), ("checkpoint_written", 2), ("model_released", 4)):
        status, output = train_apart(folder, f"--crash_at={point}:{number}")
        assert status == -signal.SIGKILL, output
    before = (folder / "ledger.jsonl").read_bytes()
    # No file of the program can grow beyond this: the next checkpoint does not fit.
    status, output = train_apart(folder, largest_file=10_000)
    assert status == 1, output
    assert "Nothing is lost: make room and start the same command again." in output
    assert "Traceback" not in output
    assert (folder / "ledger.jsonl").read_bytes() == before
    status, output = train_apart(folder)
    assert status == 0, output
    assert "continuing after 5 of 6 rounds" in output
    found = ledger.verify_ledger(folder / "ledger.jsonl", num_records=NUM_ROUNDS)
    expected = ledger.read_ledger(whole[0] / "ledger.jsonl")
    assert [r.model_digest for r in found.records] == [r.model_digest for r in expected.records]
    assert [(r.start, r.end) for r in found.records] == [(r.start, r.end) for r in expected.records]
    for name, array in _final_model(whole[0]).items():
        np.testing.assert_array_equal(_final_model(folder)[name], array)


def test_a_finished_run_does_nothing_more(train, whole):
    ledger_file = whole[0] / "ledger.jsonl"
    before = ledger_file.read_bytes()
    status, output = train(whole[0])
    assert status == 0, output
    assert "continuing after 6 of 6 rounds" in output
    assert ledger_file.read_bytes() == before


def test_noise_in_the_state_trains_the_same_model(train_apart, train, whole, tmp_path):
    folder = tmp_path / "run"
    status, output = train_apart(folder, "--aggregator=state", "--crash_at=checkpoint_written:2")
    assert status == -signal.SIGKILL, output
    status, output = train(folder, "--aggregator=state")
    assert status == 0, output
    for name, array in _final_model(whole[0]).items():
        np.testing.assert_allclose(_final_model(folder)[name], array, rtol=1e-4, atol=1e-5)


def test_a_blt_that_is_killed_continues_and_is_the_same_in_the_state(train_apart, train, tmp_path):
    strategy = BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.5]), NUM_ROUNDS)
    blt = make_mechanism(strategy, MinSeparation(3), noise_multiplier=0.3, l2_norm_clip=0.5)
    save_mechanism(blt, tmp_path / "blt.bandmf")
    given = f"--mechanism={tmp_path / 'blt.bandmf'}"
    killed, in_state = tmp_path / "killed", tmp_path / "in_state"
    status, output = train_apart(killed, given, "--crash_at=checkpoint_written:2")
    assert status == -signal.SIGKILL, output
    status, output = train(killed, given)
    assert status == 0, output
    assert "continuing after 3 of 6 rounds" in output
    status, output = train(in_state, given, "--aggregator=state")
    assert status == 0, output
    for name, array in _final_model(in_state).items():
        np.testing.assert_allclose(_final_model(killed)[name], array, rtol=1e-4, atol=1e-5)


def test_a_swapped_mechanism_is_refused(train, whole, tmp_path):
    other = tmp_path / "other.bandmf"
    save_mechanism(_mechanism(NUM_ROUNDS, 2), other)
    status, output = train(whole[0], f"--mechanism={other}")
    assert status == 1
    assert "keeps its mechanism to the end" in output
    assert "Traceback" not in output


def test_a_run_that_cannot_fit_is_refused_with_the_number_and_touches_nothing(
    train, whole, tmp_path, monkeypatch
):
    finished, _ = whole
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 250000 kB\n")
    monkeypatch.setattr(_memory, "_ROOT", tmp_path)
    for folder in (tmp_path / "run", finished):
        code, output = train(folder)
        assert code == 1
        assert "of memory and 0.26 GB can be had (what the machine has available)" in output
    assert not (tmp_path / "run").exists()
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_another_configuration_is_refused(train, whole):
    status, output = train(whole[0], "--local_epochs=2")
    assert status == 1
    assert "differs in ['local_epochs']" in output


def test_clients_that_lie_show_in_the_ledger_and_the_others_keep_their_separation(train, tmp_path):
    folder = tmp_path / "run"
    status, output = train(folder, "--misbehaving_fraction=0.5", "--num_clients=20")
    assert status == 0, output
    records = ledger.verify_ledger(folder / "ledger.jsonl", num_records=NUM_ROUNDS).records
    last_round, too_soon = {}, 0
    for record in records:
        for client in record.participants:
            too_soon += record.round - last_round.get(client, -3) < 3
            last_round[client] = record.round
    assert too_soon > 0
    assert sum(r.flags.get(ledger.FLAG_TIMER_VIOLATIONS, 0) for r in records) == too_soon
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert all(not float(row["min_separation"]) < 3 for row in rows)


def test_without_pseudonyms_the_ledger_only_counts(train, tmp_path):
    folder = tmp_path / "run"
    arguments = ("--participation_recording=none", "--task=production.example_task:iris")
    status, output = train(folder, *arguments)
    assert status == 0, output
    found = ledger.verify_ledger(folder / "ledger.jsonl", num_records=NUM_ROUNDS)
    assert [(r.num_participants, r.participants) for r in found.records] == [(3, None)] * NUM_ROUNDS
    assert not (folder / "secret" / "participation_salt").exists()


def test_a_population_that_cannot_be_reached_ends_the_run_with_a_sentence(train, tmp_path):
    rare = ("--availability=diurnal", "--idle_probability=0.02", "--num_clients=9")
    rare += ("--round_attempts=2",)
    status, output = train(tmp_path / "run", *rare)
    assert status == 1
    assert "needs at least 1 clients and 0 came, in 2 attempts: of num_clients=9" in output
    assert "Traceback" not in output


def test_an_interrupted_program_says_how_to_go_on_and_leaves_no_worker(start, tmp_path):
    long = tmp_path / "long.bandmf"
    save_mechanism(_mechanism(500), long)
    folder = tmp_path / "run"
    child = start(folder, f"--mechanism={long}", "--num_rounds=500", "--num_clients=2000")
    while child.poll() is None and _num_rounds(folder) < 2:
        time.sleep(0.05)
    workers = psutil.Process(child.pid).children(recursive=True)
    assert [worker.name() for worker in workers][1:] == ["worker_binary"]  # Behind its relay.
    child.terminate()
    assert child.wait() == 130
    assert all_end([worker.pid for worker in workers])
    output = (folder.parent / "output.txt").read_text()
    assert output.endswith("interrupted; start the same command again to continue.\n")
    assert "Traceback" not in output
    ledger.verify_ledger(folder / "ledger.jsonl", num_records=_num_rounds(folder))


def _num_rounds(folder) -> int:
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=missing.yaml"], "No such file"),
        (["--num_rounds=0", "--mechanism=m", "--output=o"], "num_rounds is invalid"),
        (["--num_rounds=many"], "--num_rounds"),
        (["--task=mnist", "--mechanism=m", "--output=o"], "task must be one of"),
        (["surplus"], "unexpected arguments"),
        (["--rounds=3"], "Unknown command line flag"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_sentence(arguments, message, capsys):
    with flagsaver.flagsaver():
        assert train_federated.main(["train_federated", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")


def test_a_wrong_command_line_is_told_before_tensorflow_is_imported(tmp_path):
    code = f"""
import sys
from production import train_federated
code = train_federated.main(["train_federated", "--output={tmp_path}", "--num_rounds=0"])
assert "tensorflow" not in sys.modules
sys.exit(code)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: num_rounds is invalid")
    assert "Traceback" not in result.stderr


def test_every_field_of_the_configuration_is_a_flag():
    for name, field in FIELDS.items():
        assert flags.FLAGS[name].help.startswith(field.metadata["help"])


def test_the_checksum_in_the_ledger_is_that_of_the_mechanism_file(whole, mechanism_file):
    header = ledger.read_ledger(whole[0] / "ledger.jsonl").header
    assert header.mechanism_checksum == mechanism_checksum(load_mechanism(mechanism_file))


def test_a_bug_keeps_its_traceback(monkeypatch):
    def buggy(*arguments):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(train_federated, "_train", buggy)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    with pytest.raises(ValueError, match="broadcast"):
        train_federated.main(["train_federated"])
