"""One library a folder, whose visibility is the architecture, and one test a file."""

# The folders of bandmf_tf, high to low; pyproject.toml has the same layers as contracts of imports.
_LAYERS = [
    ["audit"],
    ["cli", "simulation"],
    ["federated", "keras", "report"],
    ["evidence", "noise", "planning"],
    ["runs"],
    ["mechanisms"],
    ["accounting"],
    ["factorization"],
]
_PROGRAMS = ["benchmarks", "examples", "production", "tests", "tools"]

def _folder():
    return native.package_name().split("/")[-1]

def layer(deps = []):
    """Declares a folder of bandmf_tf as a library that programs and the layers above it may use.

    Args:
      deps: The folders of lower layers that it imports.
    """
    above = []
    for layer in _LAYERS:
        if _folder() in layer:
            break
        above += layer
    native.py_library(
        name = _folder(),
        srcs = native.glob(["*.py"]),
        visibility = ["//bandmf_tf:__pkg__"] +
                     ["//bandmf_tf/%s:__pkg__" % name for name in above] +
                     ["//%s:__subpackages__" % name for name in _PROGRAMS],
        deps = ["//bandmf_tf:base"] + ["//bandmf_tf/" + name for name in deps],
    )

def all_layers():
    return ["//bandmf_tf/" + name for layer in _LAYERS for name in layer]

def programs(names, deps = ["//bandmf_tf"]):
    """Declares a folder of programs: a library of all its files, and a binary for each name."""
    native.py_library(
        name = _folder(),
        srcs = native.glob(["**/*.py"]),
        data = native.glob(["**"], exclude = ["**/*.py", "**/*.pyc"]),
        visibility = ["//visibility:public"],
        deps = deps,
    )
    for name in names:
        native.py_binary(
            name = name,
            srcs = [name + ".py"],
            deps = [":" + _folder()],
        )

def pytests(folder, deps, data = []):
    """Declares a test for each `*_test.py` of a folder of tests; .bazelrc sets one timeout."""
    for file in native.glob([folder + "*_test.py"]):
        native.py_test(
            name = file[:-len(".py")],
            size = "small",
            srcs = [file, "//tools/build:pytest_main.py"],
            main = "//tools/build:pytest_main.py",
            args = ["$(location %s)" % file],
            data = data + ["//:pyproject.toml"],
            deps = [":conftest"] + deps,
        )
