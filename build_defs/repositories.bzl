"""Repositories made on the spot, so that Bazel 4.2 builds without any download."""

# What Bazel's own rules ask of repositories that it would otherwise download. Only Python is built
# here, so native rules and empty groups are enough.
_STAND_INS = {
    "rules_cc": {
        "BUILD": "",
        "cc/BUILD": "",
        "cc/defs.bzl": """
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
""",
    },
    "rules_java": {
        "BUILD": "",
        "java/BUILD": "",
        "java/defs.bzl": """
java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
java_plugin = native.java_plugin
java_package_configuration = native.java_package_configuration
java_test = native.java_test
""",
    },
    "rules_python": {
        "BUILD": "",
        "python/BUILD": "",
        "python/defs.bzl": """
py_binary = native.py_binary
py_library = native.py_library
py_runtime = native.py_runtime
py_test = native.py_test
""",
    },
    "remote_coverage_tools": {
        "BUILD": """
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "coverage_output_generator")
""",
    },
}

def _stand_in_impl(repository_ctx):
    for path, content in _STAND_INS[repository_ctx.attr.stands_for].items():
        repository_ctx.file(path, content, executable = False)

_stand_in = repository_rule(
    implementation = _stand_in_impl,
    attrs = {"stands_for": attr.string(mandatory = True)},
)

def offline_stand_ins():
    """Declares a stand-in for every repository that Bazel would download."""
    for name in _STAND_INS:
        _stand_in(name = name, stands_for = name)

_TOOLCHAIN_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _venv_python_impl(repository_ctx):
    checkout = repository_ctx.path(Label("//:WORKSPACE")).dirname
    interpreter = checkout.get_child(".venv").get_child("bin").get_child("python")
    if not interpreter.exists:
        fail("There is no .venv in the checkout; run `make setup` first.")
    repository_ctx.file("BUILD", _TOOLCHAIN_BUILD.format(interpreter = interpreter))

# Local, because the answer depends on the checkout's folder and not on any declared input.
venv_python = repository_rule(implementation = _venv_python_impl, local = True)
