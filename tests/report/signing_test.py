"""Only the owner's key signs, only public editions are signed, and no byte can be changed after."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cryptography", reason="the extra sign is not installed")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from bandmf_tf.accounting.gaussian import gaussian_epsilon, zcdp_rho
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.report import document as document_module
from bandmf_tf.report import signing
from bandmf_tf.report.arithmetic import check_arithmetic
from bandmf_tf.report.document import PrivacyReport, compared_plan, dump, make_report
from bandmf_tf.runs.ledger import read_ledger
from cases import (
    FACTS,
    ROOT,
    B,
    K,
    keras_run,
    make_run,
    number_places,
    refused,
    run_tool,
)

FILES = ("statement.txt", "statement.md", "report.json", "deployment.yaml", "report.html")


def _keys(folder, name, key=None):
    """Writes a pair of keys as openssl does; returns their paths."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}_public.pem"
    pem = serialization.Encoding.PEM
    data = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.touch(0o600)
    private.write_bytes(data)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, form))
    return private, public


@pytest.fixture(scope="module", name="_published")
def _make_published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signed")
    private, _ = _keys(folder, "owner")
    run = make_run(folder / "run", clock="real")
    (folder / "facts.yaml").write_text(FACTS)
    flags = [f"--run={run}", f"--facts={folder / 'facts.yaml'}", f"--signing_key={private}"]
    assert run_tool(*flags, f"--output={folder / 'report'}") == 0
    return folder


@pytest.fixture
def published(_published, tmp_path, capsys):
    """A signed report in a folder of its own, without its evidence and the private key."""
    shutil.copytree(_published / "report", tmp_path / "report")
    shutil.copy(_published / "owner_public.pem", tmp_path)
    capsys.readouterr()
    return tmp_path


def _check(folder, key="owner_public.pem"):
    return (f"--check_signature={folder / 'report'}", f"--public_key={folder / key}")


def _sign_again(folder, name="owner", source=None):
    """Signs the files of a report as they are now, with somebody's key."""
    private, _ = (source, None) if source else _keys(folder, name)
    files = {file: (folder / "report" / file).read_bytes() for file in FILES}
    for file, data in signing.signed(files, private).items():
        (folder / "report" / file).write_bytes(data)


def test_the_public_verifies_a_report_from_the_public_edition_alone(published, capsys):
    assert run_tool(*_check(published)) == 0
    assert "was signed with this key" in capsys.readouterr().out
    assert {path.name for path in (published / "report").iterdir()} == {
        *FILES,
        "SHA256SUMS",
        "SHA256SUMS.sig",
    }


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_openssl_and_sha256sum_verify_it_without_this_library(published):
    report = published / "report"
    verify = "openssl pkeyutl -verify -pubin -inkey ../owner_public.pem -rawin -in SHA256SUMS"
    verify = [*verify.split(), "-sigfile", "SHA256SUMS.sig"]
    assert subprocess.run(verify, cwd=report, capture_output=True, check=False).returncode == 0
    sums = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    assert subprocess.run(sums, cwd=report, capture_output=True, check=False).returncode == 0
    (report / "SHA256SUMS").write_bytes((report / "SHA256SUMS").read_bytes() + b"\n")
    assert subprocess.run(verify, cwd=report, capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_keys_of_openssl_are_taken(published, tmp_path, capsys):
    key = tmp_path / "openssl.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    key.chmod(0o600)
    public = tmp_path / "openssl_public.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    _sign_again(published, source=key)
    assert run_tool(*_check(published, "openssl_public.pem")) == 0
    assert "not a signature" in refused(
        capsys.readouterr() and capsys, *_check(published), status=1
    )


@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS", "SHA256SUMS.sig"])
def test_a_changed_or_missing_file_is_found(published, capsys, name):
    path = published / "report" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "does not hold" in refused(capsys, *_check(published), status=1)
    path.unlink()
    assert name in refused(capsys, *_check(published))


def test_the_signature_of_another_key_is_found(published, capsys):
    _keys(published, "other")
    message = refused(capsys, *_check(published, "other_public.pem"), status=1)
    assert "another key signed" in message
    _sign_again(published, "liar")  # Whoever signs everything again has another key.
    assert "another key signed" in refused(capsys, *_check(published), status=1)


def test_a_signed_report_whose_figures_do_not_follow_does_not_hold(published, capsys):
    path = published / "report" / "report.json"
    document = json.loads(path.read_text())
    for name in ("epsilon", "rho", "mu", "sensitivity", "epsilon_zcdp"):
        path.write_text(dump({**document, name: document[name] / 2}))
        _sign_again(published, name)
        message = refused(capsys, *_check(published, f"{name}_public.pem"), status=1)
        assert "follows as" in message


def test_signed_words_that_are_not_those_of_the_figures_do_not_hold(published, capsys):
    path = published / "report" / "statement.md"
    path.write_text(path.read_text().replace("zCDP", "pure DP", 1))
    _sign_again(published)
    assert "statement.md does not say" in refused(capsys, *_check(published), status=1)


def test_an_internal_edition_is_neither_signed_nor_accepted(published, tmp_path, capsys):
    private, _ = _keys(tmp_path, "mine")
    run = make_run(tmp_path / "run")
    flags = [f"--run={run}", "--edition=internal", f"--signing_key={private}"]
    assert "public editions alone" in refused(capsys, *flags, f"--output={tmp_path / 'o'}")
    assert "needs output" in refused(capsys, f"--run={run}", f"--signing_key={private}")
    assert run_tool(*flags[:2], f"--output={tmp_path / 'o'}") == 0
    shutil.rmtree(published / "report")
    shutil.copytree(tmp_path / "o", published / "report")
    _sign_again(published)  # By a program of somebody's own.
    capsys.readouterr()
    assert "no public edition" in refused(capsys, *_check(published), status=1)


def test_a_signed_report_is_not_replaced_by_one_without_signature(published, tmp_path, capsys):
    run = make_run(tmp_path / "run")
    message = refused(capsys, f"--run={run}", f"--output={published / 'report'}")
    assert "SHA256SUMS" in message
    assert run_tool(*_check(published)) == 0


@pytest.mark.parametrize("kind", ["open", "other", "none", "public", "password"])
def test_keys_that_are_none_get_a_sentence(tmp_path, capsys, kind):
    private, public = _keys(tmp_path, "mine")
    if kind == "open":
        private.chmod(0o644)
    elif kind == "other":
        private, _ = _keys(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    elif kind == "none":
        private.write_text("no key")
    elif kind == "public":
        private = public
        private.chmod(0o600)
    else:
        key = ed25519.Ed25519PrivateKey.generate()
        secret = serialization.BestAvailableEncryption(b"secret")
        pkcs8 = serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, secret))
    flags = [f"--run={make_run(tmp_path / 'run')}", f"--signing_key={private}"]
    message = refused(capsys, *flags, f"--output={tmp_path / 'out'}")
    assert ("644" if kind == "open" else "ed25519") in message
    assert not (tmp_path / "out").exists()


def test_without_the_package_there_is_a_sentence(published, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert "pip install 'bandmf-tf[sign]'" in refused(capsys, *_check(published))


def test_what_stands_beside_a_signed_report_is_called_unsigned(published, capsys):
    (published / "report" / "report.pdf").write_text("epsilon is 0.1")
    assert run_tool(*_check(published)) == 0
    assert "Not signed: report.pdf." in capsys.readouterr().out


def test_flags_of_signatures_go_together(published, capsys):
    assert "no public_key" in refused(capsys, _check(published)[0])
    assert "--run" in refused(capsys, *_check(published), "--run=x")
    assert "check_signature" in refused(capsys, _check(published)[1])


def test_the_arithmetic_of_stored_and_amplified_reports_holds(tmp_path):
    for path in sorted((ROOT / "tests" / "stacks").glob("*/report.json")):
        assert check_arithmetic(PrivacyReport.from_json(json.loads(path.read_text()))) > 5
    run = keras_run(tmp_path / "run")
    assert run_tool(f"--run={run}", "--replace_one", f"--output={tmp_path / 'out'}") == 0
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert check_arithmetic(PrivacyReport.from_json(document)) > 5
    document["attacker"]["success"] /= 2
    with pytest.raises(ReportError, match="attacker"):
        check_arithmetic(PrivacyReport.from_json(document))


def _tenths(document):
    """Yields the document with one number a tenth, or 1 for small integers, and where."""
    for place in list(number_places(document)):
        changed = json.loads(json.dumps(document))
        parent = changed
        for name in place[:-1]:
            parent = parent[name]
        value = parent[place[-1]]
        parent[place[-1]] = value / 10 if isinstance(value, float) else max(1, value // 10)
        if parent[place[-1]] != value:
            yield ".".join(map(str, place)), changed


# What nothing else in a report follows from: what was observed, counted, or chosen.
_INPUTS = re.compile(
    r"observed\..*|rounds_completed|l2_norm_clip|timer_seconds|min_column_norm"
    r"|mechanism\.num_bands|sampling\..*|(?:well_behaved|comparison\.0)\.m\w*"
)


@pytest.mark.parametrize("kind", ["enforced", "liar", "early", "amplified"])
def test_no_loss_in_a_report_can_be_made_smaller_without_its_evidence(tmp_path, kind):
    run, request = tmp_path / "run", {"replace_one": True, "edition": "public"}
    if kind == "enforced":  # Beside what was observed.
        make_run(run, clock="real", enforced_min_separation=B - 2, enforced_max_participations=K)
        request["ledger_head"] = read_ledger(run / "ledger.jsonl").head
    elif kind == "liar":
        make_run(run, liar=True, timer_seconds=330.0)
    elif kind == "early":
        make_run(run, rounds=17, kind="blt")
    else:
        keras_run(run)
    report, _ = make_report(ReportRequest(run=run, **request))
    assert check_arithmetic(PrivacyReport.from_json(report.to_json())) > 40
    names = set()
    for name, changed in _tenths(report.to_json()):
        if not _INPUTS.fullmatch(name):
            names.add(name)
            with pytest.raises(ReportError):
                check_arithmetic(document_module._typed(PrivacyReport, changed))
    assert {"epsilon", "groups.0.rho", "planned.epsilon", "max_column_norm"} <= names
    assert ("well_behaved.rho" in names) == (kind == "liar")


@pytest.mark.parametrize("number", ["1e300", "1" + 400 * "0"])
def test_numbers_that_nothing_can_count_get_a_sentence(published, capsys, number):
    path = published / "report" / "report.json"
    honest = path.read_text()
    for name in ("group_size", "mu"):
        path.write_text(re.sub(rf'("{name}": )[\d.e-]+', rf"\g<1>{number}", honest, count=1))
        _sign_again(published, name)
        flags = _check(published, f"{name}_public.pem")
        assert "does not hold" in refused(capsys, *flags, status=1)


def test_what_stands_side_by_side_is_not_less_than_what_it_contains(tmp_path):
    """Each of them follows from its own rho; together they would contradict each other."""
    run = make_run(
        tmp_path, clock="real", enforced_min_separation=B - 2, enforced_max_participations=K
    )
    head = read_ledger(run / "ledger.jsonl").head
    report, _ = make_report(ReportRequest(run=run, ledger_head=head, edition="public"))
    enforced, *others = report.comparison
    half = gaussian_epsilon(1.0, report.mu / 2, report.delta)
    less = dataclasses.replace(enforced, epsilon=half, rho=report.rho / 4)
    with pytest.raises(ReportError, match="beside the enforced worst case"):
        check_arithmetic(dataclasses.replace(report, comparison=(less, *others)))
    with pytest.raises(ReportError, match="the kinds of comparison"):
        check_arithmetic(dataclasses.replace(report, comparison=(less, *report.comparison)))


def test_a_plan_that_was_kept_allows_what_happened(tmp_path):
    report, _ = make_report(ReportRequest(run=make_run(tmp_path / "run"), edition="public"))
    assert report.plan_was_kept
    epsilon = gaussian_epsilon(1.0, 0.9 * report.mu, report.delta)
    planned = dataclasses.replace(
        report.planned,
        sensitivity=0.9 * report.sensitivity,
        rho=zcdp_rho(report.noise_multiplier, 0.9 * report.sensitivity),
        epsilon=epsilon,
        epsilon_if_kept=epsilon,
    )
    changed = dataclasses.replace(report, planned=planned)
    comparison = (*report.comparison[:2], compared_plan(changed))
    with pytest.raises(ReportError, match="sensitivity of a plan that was kept"):
        check_arithmetic(dataclasses.replace(changed, comparison=comparison))


def test_a_report_cannot_claim_amplification_without_sampling(tmp_path):
    report, _ = make_report(ReportRequest(run=make_run(tmp_path / "run"), edition="public"))
    for changes in (
        {"epsilon_amplified": 0.1, "epsilon": 0.1},
        {"failure_probability": 1e-12},
        {"comparison": report.comparison[:2]},
        {"plan_was_kept": True, "max_participations": K + 1},
        {"theorem_3_bound": 0.9 * report.sensitivity},
    ):
        with pytest.raises(ReportError):
            check_arithmetic(dataclasses.replace(report, **changes))
    keras, _ = make_report(ReportRequest(run=keras_run(tmp_path / "keras"), edition="public"))
    # A plan of which a report does not say that it rests on sampling is one without.
    for changes in (
        {"findings": keras.findings[:-1]},
        {"sampling": None},
        {"sampling_basis": None},
    ):
        with pytest.raises(ReportError):
            check_arithmetic(dataclasses.replace(keras, **changes))
