"""Bazel has the layers that lint checks and depends on what is imported; insides have a place."""

import ast
import re
import tomllib

import grimp

from cases import ROOT

LIBRARY = ROOT / "bandmf_tf"
FOLDERS = {path.parent.name for path in LIBRARY.glob("*/BUILD")}


def test_bazel_has_the_layers_that_lint_checks():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    expected = [set(re.findall(r"\w+", x)) & FOLDERS for x in contracts["contracts"][0]["layers"]]
    rules = (ROOT / "tools" / "build" / "python.bzl").read_text()
    layers = ast.literal_eval(
        re.search(r"^_LAYERS = (\[.*?^\])", rules, re.DOTALL | re.MULTILINE)[1]
    )
    assert [set(layer) for layer in layers] == [layer for layer in expected if layer]


def test_bazel_depends_on_what_is_imported():
    def below(folder):
        deps = re.findall(r'(?<=[\[ ])"(\w+)"(?=[\],])', (LIBRARY / folder / "BUILD").read_text())
        return {folder, *deps}.union(*map(below, deps))

    graph = grimp.build_graph("bandmf_tf", cache_dir=None)
    for folder in FOLDERS:
        graph.squash_module(f"bandmf_tf.{folder}")
    for folder in FOLDERS:
        imported = graph.find_modules_directly_imported_by(f"bandmf_tf.{folder}")
        folders = {name.split(".")[1] for name in imported if "." in name} & FOLDERS
        assert folders <= below(folder), folder


INSIDES = {
    "tensorflow.python": {"noise/_tensorflow.py"},
    "keras.src": {"keras/_keras3.py"},
    "tensorflow_federated.python": {"federated/runtime.py"},
    "tensorflow_privacy": set(),  # By name, in noise/_dp_query.py, if it is there.
}


def test_insides_of_a_library_are_imported_in_one_module():
    found = {name: set() for name in INSIDES}
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or "" if isinstance(node, ast.ImportFrom) else ""
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [module]
            for name in INSIDES:
                if any(f"{module}.".startswith(f"{name}.") for module in modules):
                    found[name].add(path.relative_to(LIBRARY).as_posix())
    assert found == INSIDES
