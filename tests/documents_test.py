"""The Python in the documents runs, and their commands exist."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib

import pytest

from cases import ROOT
from tools.build import refusals, results

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ["", "docs/**/", "production/", "benchmarks/"]
    for path in ROOT.glob(f"{folder}*.md")
}


def _blocks(text):
    """Returns the blocks that this stack can run: all, or those before the first of TFF."""
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if importlib.util.find_spec("tensorflow_federated") is not None:
        return found
    return list(itertools.takewhile(lambda block: "bandmf_tf.federated" not in block, found))


PROGRAMS = {page: "\n".join(found) for page, text in PAGES.items() if (found := _blocks(text))}


def _check_program(page, folder, **environment):
    promised = re.findall(r"^print\(.*\)  # (.*)$", PROGRAMS[page], re.MULTILINE)
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAMS[page]],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == promised


@pytest.mark.parametrize("page", PROGRAMS)
def test_python_in_a_document_runs_and_prints_what_it_says(page, tmp_path):
    _check_program(page, tmp_path)


@pytest.mark.skipif(not importlib.util.find_spec("tf_keras"), reason="There is one Keras.")
def test_the_first_page_runs_with_legacy_keras(tmp_path):
    _check_program("README.md", tmp_path, TF_USE_LEGACY_KERAS="1")


def test_the_first_page_has_python_that_prints():
    assert re.search(r"^print\(.*\)  # ", PROGRAMS["README.md"], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_programs_named_in_a_document_exist(page):
    for name in re.findall(r"-m ((?:tools|benchmarks|examples|production)\.[\w.]*\w)", PAGES[page]):
        assert importlib.util.find_spec(name), name


def test_the_page_of_results_is_written_from_its_tables():
    assert PAGES["docs/results.md"] == results.page()


def test_the_index_of_refusals_is_written_from_the_code():
    assert PAGES["docs/reference/refusals.md"] == refusals.page()


def test_a_sentence_is_found_however_it_is_written():
    source = (
        'TOLD = "Wait."\n'
        "def f(number, way):\n"
        "    if number:\n"
        '        raise errors.RunError(f"Found {number:d} of " + "these.") from None\n'
        "    error = RunError(TOLD)\n"
        "    raise RunError(TOLD)\n"
        "    raise Unsupported('a layer')\n"
        "    raise\n"
    )
    assert list(refusals.refusals(source)) == [
        ("RunError", "Found {number} of these."),
        ("RunError", "Wait."),
    ]


def _block(page, heading):
    return re.search(rf"^## {heading}$.*?^```\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)[1]


def test_the_architecture_page_shows_the_folders_as_they_are():
    words = _block("docs/reference/architecture.md", "The folders").split()
    shown, folder = set(), ""
    for word in words:
        if word.endswith("/"):
            folder = "" if word == "bandmf_tf/" else word
        else:
            shown.add(f"{folder}{word}.py")
    library = ROOT / "bandmf_tf"
    files = {path.relative_to(library).as_posix() for path in library.glob("**/*.py")}
    assert shown == {file for file in files if not file.endswith("__init__.py")}


def test_the_architecture_page_shows_the_layers_that_lint_checks():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [re.sub("[()]", "", layer) for layer in contracts["contracts"][0]["layers"]]
    assert _block("docs/reference/architecture.md", "The layers").splitlines() == layers
