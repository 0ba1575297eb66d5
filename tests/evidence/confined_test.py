"""A report, whoever wrote it, leads to nothing that the one who verifies it has not offered."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from bandmf_tf.evidence import confined, logs
from bandmf_tf.evidence.reader import UnreadableError
from bandmf_tf.mechanisms.files import save_mechanism
from cases import make_run, planned_mechanism, refused, run_tool, verify, write_log

SECRET = "root:$6$salt$digest"


@pytest.fixture(scope="module")
def _folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("confined") / "theirs"
    folder.mkdir()
    save_mechanism(planned_mechanism(), folder / "mechanism.bandmf")
    flags = [f"--mechanism={folder / 'mechanism.bandmf'}", f"--participation={write_log(folder)}"]
    assert run_tool(*flags, f"--output={folder / 'out'}") == 0
    return folder


@pytest.fixture
def theirs(_folder, tmp_path, capsys):
    """A stranger's folder: a mechanism, a log and their report. A secret of ours is beside it."""
    folder = tmp_path / "theirs"
    shutil.copytree(_folder, folder)
    (tmp_path / "secret.csv").write_text(f"{SECRET}\n")
    capsys.readouterr()
    return folder


def _ask(folder, **request):
    """Has the report of a folder name other evidence."""
    path = folder / "out" / "report.json"
    document = json.loads(path.read_text())
    document["request"] |= request
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("name", ["participation", "mechanism", "audit", "facts"])
@pytest.mark.parametrize(
    "place", ["/dev/zero", "../../secret.csv", "/**", "../../secret*", "../*/../../*.csv", "x"]
)
def test_a_report_does_not_lead_out_of_the_folder(theirs, tmp_path, capsys, name, place):
    (theirs / "x").symlink_to(tmp_path / "secret.csv")
    error = refused(capsys, *verify(_ask(theirs, **{name: place})))
    assert f"leads out of {theirs}" in error
    assert SECRET not in error


def test_the_folder_is_that_of_the_report_unless_the_caller_names_one(theirs, capsys):
    path = theirs / "out" / "report.json"
    message = f"{path.parent} has no log.csv, on which the report rests; state the folder"
    assert message in refused(capsys, f"--verify={path}")
    for place in ("", "nowhere", path):
        error = refused(capsys, f"--verify={path}", f"--evidence_root={place}")
        assert "evidence_root must be a folder" in error
    assert "such as" in refused(capsys, f"--verify={path.parent}")
    assert run_tool(*verify(path)) == 0
    for name in ("mechanism.bandmf", "log.csv"):
        (theirs / name).rename(path.parent / name)
    assert run_tool(f"--verify={path}") == 0


def test_a_folder_in_place_of_a_statement_is_no_regular_file(theirs, capsys):
    (theirs / "out" / "statement.txt").unlink()
    (theirs / "out" / "statement.txt").mkdir()
    error = refused(capsys, *verify(theirs / "out" / "report.json"))
    assert "statement.txt is no regular file" in error


def test_two_shards_of_one_name_are_named_by_the_caller(tmp_path, capsys):
    """The report says their names without folders, so one folder cannot hold both."""
    save_mechanism(planned_mechanism(), tmp_path / "mechanism.bandmf")
    shards = []
    for day, client in (("monday", "a"), ("tuesday", "b")):
        (tmp_path / day).mkdir()
        (tmp_path / day / "part.csv").write_text(f"client,round\n{client},0\n{client},6\n")
        shards.append(f"--participation={tmp_path / day / 'part.csv'}")
    mechanism = f"--mechanism={tmp_path / 'mechanism.bandmf'}"
    assert run_tool(mechanism, *shards, f"--output={tmp_path / 'out'}") == 0
    (tmp_path / "part.csv").write_bytes((tmp_path / "monday" / "part.csv").read_bytes())
    capsys.readouterr()
    path = tmp_path / "out" / "report.json"
    error = refused(capsys, *verify(path))
    assert "two files of the name part.csv; name both" in error
    assert run_tool(f"--verify={path}", mechanism, *shards) == 0


def test_what_the_caller_names_is_taken_where_it_is(theirs, tmp_path, capsys):
    path, evidence = theirs / "out" / "report.json", tmp_path / "ours"
    evidence.mkdir()
    for name in ("mechanism.bandmf", "log.csv"):
        (theirs / name).rename(evidence / name)
    mechanism = f"--mechanism={evidence / 'mechanism.bandmf'}"
    assert run_tool(f"--verify={path}", mechanism, f"--participation={evidence / 'log.csv'}") == 0
    capsys.readouterr()
    assert "has no log.csv" in refused(capsys, f"--verify={path}", mechanism)
    assert "belongs to verify" in refused(capsys, mechanism, f"--evidence_root={evidence}")


@pytest.mark.parametrize("name", ["log.csv", "mechanism.bandmf", "out/statement.txt"])
def test_a_pipe_is_no_evidence(theirs, capsys, name):
    (theirs / name).unlink()
    os.mkfifo(theirs / name)
    error = refused(capsys, *verify(theirs / "out" / "report.json"))
    assert f"{name} is no regular file" in error.replace("out/../", "")


@pytest.mark.parametrize("report", ["", ".", "out"])
def test_a_folder_is_no_report_and_nobody_looks_into_it(theirs, capsys, monkeypatch, report):
    monkeypatch.chdir(theirs)
    os.mkfifo(theirs / "out" / "pipe")
    assert "verify must be a report" in refused(capsys, f"--verify={report}")


@pytest.mark.parametrize("name", ["report.json", "SHA256SUMS", "statement.md"])
def test_a_signed_report_is_of_regular_files_as_well(theirs, tmp_path, capsys, name):
    (theirs / "out" / name).unlink(missing_ok=True)
    os.mkfifo(theirs / "out" / name)
    flags = [f"--check_signature={theirs / 'out'}", f"--public_key={tmp_path / 'secret.csv'}"]
    assert f"{name} is no regular file" in refused(capsys, *flags)
    if name == "report.json":
        assert "no regular file" in refused(capsys, f"--verify={theirs / 'out' / name}")


@pytest.mark.parametrize("name", ["released/model_000024.npz", "secret", "more/ledger.jsonl"])
def test_all_that_is_in_a_run_folder_is_looked_at(tmp_path, capsys, name):
    """A folder that is a link within the root counts as the folder it leads to."""
    run = make_run(tmp_path / "theirs" / "run")
    assert run_tool(f"--run={run}", f"--output={tmp_path / 'theirs' / 'out'}") == 0
    (tmp_path / "theirs" / "elsewhere").mkdir()
    (run / "more").symlink_to(tmp_path / "theirs" / "elsewhere")
    path = run / name
    path.unlink(missing_ok=True)
    path.symlink_to("/") if name == "secret" else os.mkfifo(path)
    capsys.readouterr()
    error = refused(capsys, *verify(tmp_path / "theirs" / "out" / "report.json"))
    assert ("leads out of" if name == "secret" else "no regular file") in error


def test_files_beside_the_evidence_are_looked_at_and_folders_are_not(theirs, tmp_path, capsys):
    (theirs / "folder").symlink_to(tmp_path)
    assert run_tool(*verify(theirs / "out" / "report.json")) == 0
    capsys.readouterr()
    (theirs / "ledger").symlink_to(tmp_path / "secret.csv")
    assert "ledger leads out of" in refused(capsys, *verify(theirs / "out" / "report.json"))


@pytest.mark.parametrize("name", ["log.csv", "beside.json", "out/report.html"])
def test_a_file_without_end_is_refused_before_it_is_opened(theirs, capsys, name):
    with (theirs / name).open("a") as file:
        file.truncate(1 << 40)
    error = refused(capsys, *verify(theirs / "out" / "report.json"))
    assert "more evidence than" in error


@pytest.mark.parametrize(
    ("name", "words"),
    [("a\0b", "zero byte"), ("a\ud800b", "UTF-8"), ("*/../../**", "leads upwards from a pattern")],
)
def test_names_that_only_a_stranger_gives_get_a_sentence(theirs, capsys, name, words):
    assert words in refused(capsys, *verify(_ask(theirs, participation=name)))


def test_no_pattern_goes_round_in_circles(theirs, capsys):
    """With two links to their own folder ** would find 2^40 names."""
    for name in "ab":
        (theirs / name).symlink_to(theirs)
    error = refused(capsys, *verify(_ask(theirs, participation="**")))
    assert "is a link, which ** would follow" in error


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"{")
    for size, words in (((1 << 28) + 1, "hardly any on disk"), (1 << 28, None)):
        os.truncate(path, size)
        if words is None:
            confined.check([path], tmp_path)
            continue
        with pytest.raises(UnreadableError, match=words):
            confined.check([path], tmp_path)


def test_the_limit_of_size_is_for_all_files_together(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(10))
    confined.check([tmp_path / "a", tmp_path / "b"], tmp_path, 20, beside=False)
    with pytest.raises(UnreadableError, match="more evidence than 19 bytes"):
        confined.check([tmp_path / "a", tmp_path / "b"], tmp_path, 19, beside=False)
    confined.check([tmp_path / "a"], tmp_path, 30)
    with pytest.raises(UnreadableError, match="more evidence than 29 bytes"):
        confined.check([tmp_path / "a"], tmp_path, 29)


def _wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").open()


def _query(tmp_path):
    with logs._engine(100) as engine:
        engine.execute("SELECT sum(sin(a.i + b.i)) FROM range(1000000) a(i), range(1000000) b(i)")


def _insist(tmp_path):
    """As a reader that takes any error for a file of another kind."""
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


@pytest.mark.parametrize("task", [_wait, _query, _insist])
def test_work_without_end_is_ended(tmp_path, task):
    message = r"took longer than 0.1 seconds"
    with pytest.raises(UnreadableError, match=message), confined.limited_time(0.1):
        task(tmp_path)
    with confined.limited_time(60.0), pytest.raises(ZeroDivisionError):
        assert 1 / 0  # Within the time errors stay what they are.
