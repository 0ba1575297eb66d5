"""Runs pytest on the files that a Bazel test target names (see pytest_test.bzl)."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", *sys.argv[1:]]))
