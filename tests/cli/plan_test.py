"""The planning tool as its users see it: numbers, files, sentences and exit statuses."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import pytest

from bandmf_tf.cli import plan as plan_cli
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum
from cases import ROOT, last_of_each

PAPER = [
    "--num_rounds=2052",
    "--min_separation=342",
    "--max_participations=6",
    "--epsilon=1",
    "--delta=1e-6",
]
SMALL = ["--num_rounds=24", "--min_separation=8", "--epsilon=1", "--delta=1e-6"]
FILES = {"mechanism.bandmf", "plan.html", "plan.json", "plan.png"}


def _run(*arguments, module="tools.plan_mechanism", cwd=ROOT):
    """Runs the tool as a program of its own."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def _main(capsys, *arguments):
    """Runs the tool in this process, which saves the start of another one; last flags win."""
    status = plan_cli.main(["bandmf-plan", *last_of_each(arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _json(capsys, *arguments):
    status, out, err = _main(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("flags", "rho", "epsilon"),
    [
        # The paper's production run with tree aggregation, nodes of norm 1.
        (
            ["--strategy=tree_online", "--min_separation=390", "--max_participations=4"]
            + ["--noise_multiplier=7", f"--column_norm={math.sqrt(11)}"],
            0.5204,
            6.693,
        ),
        # The launch in Google's notebook; its separation counts the rounds in between, 484.
        (
            ["--num_bands=400", "--min_separation=485", "--max_participations=3"]
            + ["--noise_multiplier=1.411", f"--column_norm={1 / math.sqrt(5)}"]
            + ["--tolerance=1e-3"],
            0.150684,
            3.42401,
        ),
    ],
)
def test_published_releases_from_their_public_parameters(capsys, flags, rho, epsilon):
    document = _json(capsys, "--num_rounds=2000", "--delta=1e-10", *flags)
    assert document["rho"] == pytest.approx(rho, abs=5e-5)
    assert document["epsilon"] == pytest.approx(epsilon, abs=1e-3)


def test_the_scale_of_columns_changes_the_noise_and_not_the_error(capsys):
    shared = ["--num_rounds=24", "--min_separation=6", "--epsilon=2", "--delta=1e-6"]
    unit, scaled = _json(capsys, *shared), _json(capsys, *shared, "--column_norm=1")
    assert scaled["max_column_norm"] == pytest.approx(1.0)
    assert scaled["sensitivity"] == pytest.approx(2.0)  # Four participations.
    assert scaled["noise_multiplier"] == pytest.approx(2 * unit["noise_multiplier"], rel=1e-5)
    assert scaled["rmse"] == pytest.approx(unit["rmse"])


def test_json_of_the_papers_amplified_mechanism(capsys):
    sizes = ["--batch_size=1001", "--dataset_size=342477", "--num_bands=9"]
    document = _json(capsys, *PAPER, *sizes, "--tolerance=1e-5")  # For all digits of the error.
    noise = document["noise_multiplier"]
    # The paper's grid: reproduction_test.py. A largest batch costs about half a percent more.
    assert 0.79118 < noise < 0.79118 * 1.006
    assert 1001 < document["sampling"]["max_batch_size"] < 1.2 * 1001
    assert document["rmse"] == pytest.approx(27.146, abs=5e-3)
    assert document["num_bands"] == 9
    assert document["sensitivity"] == pytest.approx(1.0, rel=1e-9)
    assert document["epsilon"] == pytest.approx(1.0, rel=1e-5)
    assert document["epsilon"] <= 1.0
    assert document["rho"] == pytest.approx(228 / 6 / (2 * noise**2), rel=1e-9)
    assert "WITHOUT amplification" in document["rho_note"]
    # More are drawn, so that 1,001 are left in the mean.
    assert 1 < document["sampling"]["sampling_probability"] / (1001 / (342477 // 9)) < 1.0102
    assert document["sampling"]["rounds_per_part"] == 228


@pytest.mark.parametrize(
    ("strategy", "rmse", "num_bands"), [("identity", 78.48, 1), ("tree_full", 12.47, 2052)]
)
def test_json_of_the_papers_baselines(capsys, strategy, rmse, num_bands):
    document = _json(capsys, *PAPER, f"--strategy={strategy}")
    assert document["noise_multiplier"] == pytest.approx(4.22468, abs=5e-6)
    assert document["rmse"] == pytest.approx(rmse, abs=5e-3)
    assert document["num_bands"] == num_bands
    assert document["sensitivity_kind"] == "exact"
    assert document["delta"] == 1e-6


def test_json_of_a_blt_is_that_of_bands_with_the_buffers_beside(capsys):
    document = _json(capsys, *PAPER, "--strategy=blt", "--num_buffers=2")
    assert document["noise_multiplier"] == pytest.approx(4.22468, abs=5e-6)
    assert document["rmse"] == pytest.approx(9.18275, abs=1e-5)
    assert (document["strategy"], document["num_buffers"]) == ("blt", 2)
    assert document["bytes_per_parameter"] == 8
    assert document["sensitivity_kind"] == "exact"
    banded = _json(capsys, *SMALL)
    assert banded["num_buffers"] is None
    assert document.keys() == banded.keys()


@pytest.mark.parametrize(
    ("strategy", "rmse"), [("inverse_banded", 12.2065), ("inverse_square_root", 36.27)]
)
def test_json_of_a_banded_inverse_counts_its_bands(capsys, strategy, rmse):
    document = _json(capsys, *PAPER, f"--strategy={strategy}", "--num_bands=3")
    assert document["rmse"] == pytest.approx(rmse, abs=5e-3)
    assert (document["num_inverse_bands"], document["num_buffers"]) == (3, None)
    assert document["bytes_per_parameter"] == 8
    assert document["sensitivity_kind"] == "exact"


@pytest.mark.parametrize(
    "budget",
    [
        ["--memory_per_parameter=8"],
        ["--memory=20MB", "--model_parameters=2500000"],
        ["--memory=0.02 GB", "--model_parameters=2500000"],
        ["--memory=20e6", "--model_parameters=2500000"],
        ["--memory=2.01GB", "--model_parameters=251250000"],  # 2.01 * 1e9 is a little less.
    ],
)
def test_a_budget_of_memory_chooses_the_strategy(capsys, budget):
    document = _json(capsys, *SMALL, *budget)
    assert document["memory_per_parameter"] == 8.0
    assert document["bytes_per_parameter"] <= 8
    (chosen,) = [point for point in document["frontier"]["points"] if point["is_chosen"]]
    assert chosen["strategy"] == document["strategy"] == "inverse_banded"
    assert chosen["num_bands"] == document["num_inverse_bands"] == 3
    assert document["frontier"]["explanation"] == document["num_bands_reason"]


def test_the_summary_shows_the_frontier(capsys):
    status, out, _ = _main(capsys, *SMALL, "--memory_per_parameter=8")
    assert status == 0
    for words in ("Error against memory", "BandMF with 8 bands", "chosen", "of the inverse"):
        assert words in out


def test_the_standard_output_holds_one_json_object_and_nothing_else():
    result = _run(*SMALL, "--json")
    document = json.loads(result.stdout)
    assert document["num_rounds"] == 24
    assert document["num_bands"] == 8
    assert "optimising" in result.stderr


def test_an_installed_library_needs_no_checkout(tmp_path):
    result = _run(
        *SMALL, "--strategy=identity", "--json", module="bandmf_tf.cli.plan", cwd=tmp_path
    )
    assert json.loads(result.stdout)["num_bands"] == 1
    assert list(tmp_path.iterdir()) == []


def test_the_planner_does_not_import_tensorflow_nor_drawing_libraries():
    code = (
        "import sys, bandmf_tf.cli.plan;"
        "print([m for m in ('tensorflow', 'keras', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_the_summary_says_what_a_guarantee_rests_on(capsys):
    status, out, _ = _main(capsys, *SMALL)
    assert status == 0
    for words in (
        "zero-out neighbours",
        "exact, by Theorem 2",
        "standard deviation",
        "columns of norm 1",
        "bytes a",
    ):
        assert words in out
    for alternative in ("DP-SGD", "TreeAgg (online)", "OptTreeAgg (full)", "MF (dense)"):
        assert alternative in out
    assert max(map(len, out.splitlines())) <= 100


def test_losses_are_printed_rounded_up(capsys):
    flags = ["--num_rounds=6", "--strategy=identity", "--min_separation=3", "--delta=1e-6"]
    for noise in (2.1, 2.2, 2.3, 2.4):
        document = _json(capsys, *flags, f"--noise_multiplier={noise}")
        _, out, _ = _main(capsys, *flags, f"--noise_multiplier={noise}")
        for name in ("epsilon", "rho"):
            printed = re.search(rf"^  {name} +([0-9.]+)", out, re.MULTILINE)[1]
            assert document[name] * (1 - 1e-11) <= float(printed) <= document[name] * (1 + 1e-5)


def test_the_summary_of_an_amplified_plan_states_its_sampling(capsys):
    arguments = ["--num_rounds=24", "--epsilon=1", "--delta=1e-6", "--num_bands=2"]
    _, out, _ = _main(capsys, *arguments, "--batch_size=5", "--dataset_size=100")
    for words in ("Poisson samples of probability 0.1", "WITHOUT amplification", "stays secret"):
        assert words in out


# Files


def test_the_output_folder_is_complete_and_verifies(capsys, tmp_path):
    folder = tmp_path / "new" / "plan"
    status, out, _ = _main(capsys, *SMALL, f"--output={folder}")
    assert status == 0
    assert {file.name for file in folder.iterdir()} == FILES
    assert {file.name for file in folder.parent.iterdir()} == {"plan"}
    for file in FILES:
        assert file in out
    mechanism = load_mechanism(folder / "mechanism.bandmf")
    mechanism.verify_epsilon()
    document = json.loads((folder / "plan.json").read_text())
    assert document["noise_multiplier"] == mechanism.noise_multiplier
    assert document["mechanism_checksum"] == mechanism_checksum(mechanism)
    assert document["mechanism_checksum"] in (folder / "plan.html").read_text()
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_replaces_an_older_one_leaves_other_files_alone_and_is_printed(capsys, tmp_path):
    for name in (*FILES, "notes.txt"):
        (tmp_path / name).write_text("older")
    document = _json(capsys, *SMALL, "--strategy=identity", f"--output={tmp_path}")
    assert json.loads((tmp_path / "plan.json").read_text()) == document
    older = [file.name for file in tmp_path.iterdir() if file.read_bytes() == b"older"]
    assert older == ["notes.txt"]
    assert load_mechanism(tmp_path / "mechanism.bandmf").epsilon == pytest.approx(1.0, rel=1e-4)


def test_nothing_is_left_behind_when_drawing_fails(capsys, tmp_path, monkeypatch):
    def fail(plan):
        raise OSError("No space left on device.")

    monkeypatch.setattr("bandmf_tf.planning.figures.overview", fail)
    status, out, err = _main(capsys, *SMALL, "--strategy=identity", f"--output={tmp_path / 'x'}")
    assert (status, out) == (2, "")
    assert "No space left" in err
    assert list(tmp_path.iterdir()) == []


# Flags


def test_participation_can_be_given_by_epochs(capsys):
    epochs = ["--num_rounds=24", "--num_epochs=3", "--epsilon=1", "--delta=1e-6"]
    assert _json(capsys, *epochs)["rmse"] == pytest.approx(_json(capsys, *SMALL)["rmse"])


def test_unequal_column_norms_stand_for_exact_epochs(capsys):
    free = _json(capsys, *SMALL, "--equal_column_norms=false")
    assert free["participation"] == "fixed_epochs"
    assert free["rmse"] < _json(capsys, *SMALL)["rmse"]
    separated = _json(capsys, *SMALL, "--noequal_column_norms", "--participation=min_separation")
    assert separated["rmse"] > _json(capsys, *SMALL)["rmse"]


def test_learning_rates_come_as_names_numbers_and_files(capsys, tmp_path):
    file = tmp_path / "rates.csv"
    file.write_text("\n".join(["0.5"] * 12 + ["1.0"] * 12))
    inline = ",".join(["0.5"] * 12 + ["1.0"] * 12)

    def rmse(rates):
        flags = ["--workload=sgd", "--momentum=0.9", f"--learning_rates={rates}"]
        return _json(capsys, *SMALL, "--strategy=toeplitz", *flags)["rmse"]

    assert rmse(file) == pytest.approx(rmse(inline))
    assert rmse("0.5") == pytest.approx(0.5 * rmse("constant"), rel=1e-6)
    assert rmse("0.5") < rmse(inline) < rmse("constant")
    assert rmse("warmup_cooldown") < rmse("constant")


def test_a_noise_multiplier_gives_an_epsilon(capsys):
    arguments = ["--num_rounds=24", "--noise_multiplier=4.22468", "--delta=1e-6"]
    assert _json(capsys, *arguments, "--strategy=identity")["epsilon"] == pytest.approx(1, rel=1e-5)


def test_help_names_every_flag(capsys):
    status, out, _ = _main(capsys, "--help")
    assert status == 0
    names = """num_rounds num_bands min_separation max_participations epsilon noise_multiplier delta
        l2_norm_clip batch_size dataset_size workload momentum learning_rates strategy
        equal_column_norms output json num_buffers memory_per_parameter memory model_parameters"""
    for flag in names.split():
        assert f"--{flag}\n" in out


BAD_FLAGS = [
    (["--bogus=1"], "There is no flag --bogus"),
    (["--bogus=1", "--undefok=bogus"], "There is no flag --undefok"),
    (["--epsilonn=1"], "did you mean --epsilon?"),
    (["--num_rounds=many"], "num_rounds must be an integer. Found 'many'."),
    (["--epsilon=small"], "epsilon must be a number. Found 'small'."),
    (["--json=perhaps"], "json must be true or false"),
    (["--strategy=magic"], "strategy must be one of banded, toeplitz"),
    (["--epsilon"], "Missing value for flag --epsilon"),
    (["surplus"], "Every argument must be a flag"),
    (["--num_rounds=0"], "num_rounds must be at least 1"),
    (["--epsilon=nan"], "epsilon must be finite"),
    (["--delta=1"], "delta must be strictly between 0 and 1"),
    (["--noise_multiplier=1"], "Exactly one of epsilon"),
    (["--num_bands=25", "--strategy=banded"], "num_bands must be at most num_rounds=24"),
    (["--num_bands=2"], "leave it out for strategy=identity"),
    (["--min_separation=25"], "min_separation must be at most num_rounds=24"),
    (["--num_epochs=3"], "num_epochs stands for min_separation"),
    (["--batch_size=4"], "batch_size and dataset_size must be given together"),
    (["--batch_size=4", "--dataset_size=100", "--strategy=dense"], "needs a banded strategy"),
    (["--momentum=0.9"], "add --workload=sgd"),
    (["--learning_rates=constant"], "add --workload=sgd"),
    (["--workload=sgd", "--momentum=1"], "momentum must be in [0, 1)"),
    (["--workload=sgd", "--learning_rates=1,2,3"], "one rate for each of the num_rounds=24"),
    (["--workload=sgd", "--learning_rates=no_such_file"], "learning_rates must be constant"),
    (["--workload=sgd", "--learning_rates=" + "1,x" * 3000], "learning_rates must be constant"),
    (["--output="], "output must be a folder"),
    (["--epsilon=1e9"], "epsilon must be at most 100000"),
    ([f"--num_rounds={10**30}"], "num_rounds must be at most 2000000, the most that a mechanism"),
    (["--num_rounds=2000001"], "num_rounds must be at most 2000000, the most that a mechanism"),
    (["--workload=sgd", "--learning_rates=1e308"], "learning_rates must be finite"),
    (["--l2_norm_clip=1e308"], "l2_norm_clip must be at most 1e+150"),
    (["--memory_per_parameter=8"], "A budget of memory chooses the strategy"),
    (["--memory=1GB"], "memory and model_parameters must be given together"),
    (["--memory=lots", "--model_parameters=5"], "memory must be a number of bytes"),
    (["--memory=G", "--model_parameters=5"], "memory must be a number of bytes"),
    (["--memory=5GK", "--model_parameters=5"], "memory must be a number of bytes"),
    (["--memory=nan", "--model_parameters=5"], "memory must be finite"),
    (["--memory=-1GB", "--model_parameters=5"], "memory must be positive"),
    (["--memory=1GB", "--model_parameters=0"], "model_parameters must be at least 1"),
    (
        ["--memory=1GB", "--model_parameters=5", "--memory_per_parameter=4"],
        "memory_per_parameter is memory over model_parameters",
    ),
    (["--num_buffers=2"], "num_buffers is for strategy=blt"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD_FLAGS)
def test_bad_flags_get_one_sentence_and_status_2(capsys, arguments, sentence):
    status, out, err = _main(capsys, *SMALL, "--strategy=identity", *arguments)
    assert (status, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("bandmf-plan: ")
    assert sentence in last
    assert "Traceback" not in err


def test_a_flag_that_is_given_twice_is_an_error(capsys):
    assert plan_cli.main(["bandmf-plan", *SMALL, "--delta=1e-3"]) == 2
    assert "--delta was given twice, at last as '1e-3'" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["num_rounds", "delta", "epsilon"])
def test_missing_flags_get_one_sentence_and_status_2(capsys, missing):
    arguments = [flag for flag in SMALL if not flag.startswith(f"--{missing}=")]
    status, out, err = _main(capsys, *arguments)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert missing in err


def test_a_program_with_bad_flags_ends_with_status_2():
    result = _run(*SMALL, "--num_bands=-3", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "bandmf-plan: num_bands must be at least 1. Found -3.\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def buggy(*arguments):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(plan_cli, "plan_mechanism", buggy)
    with pytest.raises(ValueError, match="broadcast"):
        plan_cli.main(["bandmf-plan", *SMALL])


def test_an_output_that_cannot_be_written_is_refused_before_any_work(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "taken" / "plan.png").mkdir(parents=True)
    for output in (file, file / "below", tmp_path / "taken"):
        status, out, err = _main(capsys, *SMALL, f"--output={output}")
        assert (status, out) == (2, "")
        assert len(err.strip().splitlines()) == 1
        assert "output" in err
    assert file.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "taken"}
