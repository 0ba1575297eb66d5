"""A Bazel test target for a pytest file."""

def pytest_test(name, srcs, data = [], size = "small", **kwargs):
    """Declares a py_test that runs the pytest file(s) in `srcs`.

    Args:
      name: Name of the target: the file's name without `.py`.
      srcs: The test files.
      data: Other files the tests read.
      size: Bazel's size of the test; .bazelrc sets one timeout for all sizes.
      **kwargs: Further attributes of py_test, `deps` above all.
    """
    native.py_test(
        name = name,
        size = size,
        srcs = srcs + ["//build_defs:pytest_main.py"],
        main = "//build_defs:pytest_main.py",
        args = ["$(location %s)" % src for src in srcs],
        data = data + ["//:pyproject.toml"],
        **kwargs
    )
