"""What `bandmf_tf` and its subpackages export is documented, and imported late."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import bandmf_tf
from cases import ROOT

SUBPACKAGES = [
    f"bandmf_tf.{module.name}"
    for module in pkgutil.iter_modules(bandmf_tf.__path__)
    if module.ispkg
]


@pytest.mark.parametrize("package", ["bandmf_tf", *SUBPACKAGES])
def test_public_names_are_documented(package: str):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    for name in names:
        if isinstance(value := getattr(module, name), str):  # A constant has its comment.
            continue
        documentation = inspect.getdoc(value) or ""
        assert documentation.split("\n\n")[0].endswith((".", ":")), f"{name} has no docstring"
    assert set(dir(module)) >= set(names)


NEED_TENSORFLOW = ("federated", "keras", "noise", "simulation")
WITHOUT_TENSORFLOW = """
import importlib, sys
for name in ("keras", "tensorflow", "tensorflow_federated", "tensorflow_privacy"):
    sys.modules[name] = None
"""


def test_names_are_not_imported_before_they_are_asked_for():
    code = """
import sys
import bandmf_tf
heavy = {"tensorflow", "tensorflow_federated", "duckdb", "matplotlib", "scipy"}
assert not heavy & sys.modules.keys()
bandmf_tf.make_report
assert not {"tensorflow", "tensorflow_federated"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mathematics_imports_where_there_is_no_tensorflow():
    files = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("bandmf_tf/**/*.py")]
    needs_it = {*NEED_TENSORFLOW}
    needs_it |= {"federated_paths", "keras_paths", "noise_paths"}
    names = [".".join(file.parts) for file in files if needs_it.isdisjoint(file.parts)]
    code = f"""{WITHOUT_TENSORFLOW}
for name in {names}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_there_is_no_tensorflow_a_sentence_says_how_to_install_it():
    code = f"""{WITHOUT_TENSORFLOW}
import bandmf_tf
from bandmf_tf.audit import program
for name in {NEED_TENSORFLOW}:
    try:
        getattr(bandmf_tf, name)
    except ImportError as error:
        assert isinstance(error, bandmf_tf.BandMFError)
        print(error)
sys.exit(program.main(["bandmf-audit"]))
"""
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    sentence = "needs TensorFlow, which is not installed; run pip install 'bandmf-tf[keras]'.\n"
    assert outcome.stdout == "".join(f"bandmf_tf.{name} {sentence}" for name in NEED_TENSORFLOW)
    assert (outcome.returncode, outcome.stderr) == (2, f"bandmf-audit: An audit {sentence}")


@pytest.mark.parametrize("program", ["audit.program", "cli.budget", "cli.plan", "cli.report"])
def test_help_waits_for_no_heavy_import(program):
    code = f"""
import sys
from bandmf_tf.{program} import main
assert main(["program", "--help"]) == 0
heavy = {{"dp_accounting", "duckdb", "jinja2", "jsonschema", "matplotlib", "tensorflow"}}
heavy |= {{f"scipy.{{name}}" for name in ("linalg", "optimize", "signal", "special", "stats")}}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Flags:" in outcome.stdout
    assert not outcome.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'privacy'"):
        bandmf_tf.privacy  # noqa: B018
