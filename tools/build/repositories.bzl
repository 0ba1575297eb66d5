"""Repositories made on the spot, so that Bazel 4.2 builds without any download."""

# The rules that Bazel's own files load from repositories which it would otherwise download. Only
# Python is built here, so the native ones are enough.
_RULES = {
    "cc": "binary import library test toolchain toolchain_suite",
    "java": "binary import library runtime toolchain plugin package_configuration test",
    "python": "binary library runtime test",
}

_COVERAGE_BUILD = """
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "coverage_output_generator")
"""

def _stand_in_impl(repository_ctx):
    language = repository_ctx.attr.language
    repository_ctx.file("BUILD", "" if language else _COVERAGE_BUILD)
    if language:
        rules = [language.replace("thon", "") + "_" + rule for rule in _RULES[language].split(" ")]
        repository_ctx.file(language + "/BUILD")
        repository_ctx.file(
            language + "/defs.bzl",
            "\n".join(["%s = native.%s" % (rule, rule) for rule in rules]),
        )

_stand_in = repository_rule(
    implementation = _stand_in_impl,
    attrs = {"language": attr.string()},
)

def offline_stand_ins():
    """Declares a stand-in for every repository that Bazel would download."""
    _stand_in(name = "remote_coverage_tools")
    for language in _RULES:
        _stand_in(name = "rules_" + language, language = language)

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
