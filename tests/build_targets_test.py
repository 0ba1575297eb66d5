"""BUILD files name every Python file and its dependencies, and imports point one way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Resolved, so that under Bazel this is the checkout and not the links in the test's own folder.
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bandmf_tf", "benchmarks", "examples", "production", "tests", "tools")

# Modules that may import TensorFlow; every other module of the library is mathematics.
TENSORFLOW_MODULES = {
    "bandmf_tf.aggregators",
    "bandmf_tf.clipping",
    "bandmf_tf.federated_tasks",
    "bandmf_tf.federated_training",
    "bandmf_tf.google_matrices",
    "bandmf_tf.keras",
    "bandmf_tf.keras_callbacks",
    "bandmf_tf.keras_compat",
    "bandmf_tf.keras_layers",
    "bandmf_tf.keras_models",
    "bandmf_tf.keras_optimizers",
    "bandmf_tf.keras_schedules",
    "bandmf_tf.noise_recurrence",
    "bandmf_tf.noise_source",
    "bandmf_tf.noise_stream",
    "bandmf_tf.query",
    "bandmf_tf.sampling",
    "bandmf_tf.tff_runtime",
}
BLOCKED_FOR_MATHEMATICS = ("keras", "tensorflow", "tensorflow_federated", "tensorflow_privacy")

TARGET_RULES = ("py_binary", "py_library", "py_test", "pytest_test")


def _python_files() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        # Environments of peers that a benchmark has made (benchmarks/.peers) are not ours.
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def _targets() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yields `(label, attributes)` of every Python target; BUILD files are Python syntax."""
    for folder in FOLDERS:
        for build_file in sorted((ROOT / folder).rglob("BUILD")):
            package = build_file.parent.relative_to(ROOT).as_posix()
            for node in ast.parse(build_file.read_text()).body:
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in TARGET_RULES:
                    attributes = {key.arg: ast.literal_eval(key.value) for key in call.keywords}
                    yield f"//{package}:{attributes['name']}", attributes


def _label(name: str, package: str) -> str:
    """Expands `:name`, and `//folder` to `//folder:folder`."""
    if name.startswith(":"):
        return f"//{package}{name}"
    return name if ":" in name else f"{name}:{name.rsplit('/', 1)[-1]}"


def _package(label: str) -> str:
    return label[2:].split(":")[0]


TARGETS = dict(_targets())
FILES_OF = {
    label: [f"{_package(label)}/{source}" for source in attributes.get("srcs", [])]
    for label, attributes in TARGETS.items()
}
TARGET_OF = {source: label for label, sources in FILES_OF.items() for source in sources}


def _imported_files(path: str) -> set[str]:
    """The files of this repository that the file at `path` imports, anywhere in its code."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name`: the name is a submodule or comes out of the package.
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found = {module for module in submodules if _file_of(module)}
            modules |= found if found == submodules else found | {node.module}
    return {file for module in modules if (file := _file_of(module))} - {path}


def _file_of(module: str) -> str | None:
    if (ROOT / "tests" / f"{module}.py").is_file():  # Tests import their helpers by name alone.
        return f"tests/{module}.py"
    if module.split(".")[0] not in FOLDERS:
        return None
    stem = module.replace(".", "/")
    return next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if (ROOT / f).is_file()), None)


@pytest.mark.parametrize("path", _python_files())
def test_every_python_file_has_a_target(path):
    folder = path.rsplit("/", 1)[0]
    assert path in TARGET_OF, f"{path} is in no target; add one to {folder}/BUILD."


@pytest.mark.parametrize("label", TARGETS)
def test_targets_name_files_that_exist(label):
    data = [name for name in TARGETS[label].get("data", []) if not name.startswith(("/", ":"))]
    files = FILES_OF[label] + [f"{_package(label)}/{name}" for name in data]
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert not missing, f"{label} names files that do not exist: {missing}."


@pytest.mark.parametrize("label", TARGETS)
def test_targets_depend_on_what_their_files_import(label):
    sources = [source for source in FILES_OF[label] if (ROOT / source).is_file()]
    imported = set().union(*map(_imported_files, sources))
    needed = {TARGET_OF[file] for file in imported if file in TARGET_OF} - {label}
    declared = {_label(name, _package(label)) for name in TARGETS[label].get("deps", [])}
    assert needed <= declared, f"{label} lacks deps {sorted(needed - declared)}."
    assert declared <= TARGETS.keys(), f"{label} has unknown deps {declared - TARGETS.keys()}."


@pytest.mark.parametrize("path", [p for p in _python_files() if p.startswith("bandmf_tf/")])
def test_the_library_imports_no_program(path):
    programs = [file for file in _imported_files(path) if not file.startswith("bandmf_tf/")]
    assert not programs, f"{path} must not import {programs}: what programs share lives here."


def _modules_of_the_library() -> list[str]:
    files = [path for path in _python_files() if path.startswith("bandmf_tf/")]
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files]


def test_mathematics_imports_without_tensorflow():
    mathematics = [name for name in _modules_of_the_library() if name not in TENSORFLOW_MODULES]
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({BLOCKED_FOR_MATHEMATICS}))  # None makes an import fail
for module in {mathematics}:
    importlib.import_module(module)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_tensorflow_modules_exist():
    assert set(_modules_of_the_library()) >= TENSORFLOW_MODULES
