"""What `pip install .` gives without TensorFlow is small, and enough for planning and reporting.

BANDMF_CORE names the folder of programs of such an environment; `.ci/run core_tests` makes one.
"""

import json
import os
import pathlib
import subprocess

import pytest

PROGRAMS = os.environ.get("BANDMF_CORE")
pytestmark = pytest.mark.skipif(PROGRAMS is None, reason="BANDMF_CORE names no environment.")

MEGABYTES = 500


def _run(folder, program, *arguments):
    """Runs a program of the environment, which sees neither this checkout nor this one's Python."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return subprocess.run(
        [pathlib.Path(PROGRAMS, program), *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        check=False,
    )


def _python(folder, code):
    return _run(folder, "python", "-c", code)


def test_it_is_small_and_has_no_tensorflow(tmp_path):
    packages = json.loads(_run(tmp_path, "python", "-m", "pip", "list", "--format=json").stdout)
    names = {package["name"].lower() for package in packages}
    assert "bandmf-tf" in names
    assert not {name for name in names if "tensorflow" in name or "keras" in name}
    files = [path for path in pathlib.Path(PROGRAMS).parent.rglob("*") if not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 1e6


def test_it_plans_reports_verifies_and_adds_up(tmp_path):
    evidence = tmp_path / "plan"
    evidence.mkdir()
    (evidence / "log.csv").write_text(
        "client,round\n" + "\n".join(f"c{i % 6},{i}" for i in range(24))
    )
    (tmp_path / "program.yaml").write_text(
        "delta: 1.0e-6\nreleases:\n  - name: model\n    report: report/report.json\n"
        "    evidence_root: plan\n"
    )
    plan = ("--num_rounds=24", "--min_separation=4", "--epsilon=8", "--delta=1e-6")
    for program, *arguments in (
        ("bandmf-plan", *plan, "--output=plan"),
        (
            "bandmf-report",
            "--mechanism=plan/mechanism.bandmf",
            "--participation=plan/log.csv",
            "--output=report",
        ),
        ("bandmf-report", "--verify=report/report.json", "--evidence_root=plan"),
        ("bandmf-budget", "--program=program.yaml", "--output=budget"),
    ):
        outcome = _run(tmp_path, program, *arguments)
        assert outcome.returncode == 0, outcome.stderr
    assert json.loads((tmp_path / "report" / "report.json").read_text())["epsilon"] < 8
    assert (tmp_path / "budget" / "budget.html").is_file()


@pytest.mark.parametrize("name", ["federated", "keras", "noise", "simulation"])
def test_what_needs_tensorflow_is_an_error_of_one_sentence_with_the_way_out(tmp_path, name):
    outcome = _python(tmp_path, f"import bandmf_tf.{name}")
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines()[-1] == (
        f"bandmf_tf.errors.BandMFImportError: bandmf_tf.{name} needs TensorFlow, which is not "
        "installed; run pip install 'bandmf-tf[keras]'."
    )


def test_an_audit_says_so_without_a_traceback(tmp_path):
    outcome = _run(tmp_path, "bandmf-audit")
    assert outcome.returncode == 2
    assert outcome.stderr == (
        "bandmf-audit: An audit needs TensorFlow, which is not installed; "
        "run pip install 'bandmf-tf[keras]'.\n"
    )
