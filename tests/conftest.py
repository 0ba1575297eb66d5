"""Which tests a stack can run; no chance or speed that decides them; two logical CPUs.

The federated stack (Python 3.11, TensorFlow 2.14) runs every test. The modern one has neither
TensorFlow Federated nor TensorFlow Privacy: a test that fails there because it imports one of them
is skipped, one that needs TFF in another process says so by `@pytest.mark.tff`, and one of
something that only Keras 2 has by `@pytest.mark.keras2`.

Mathematics, files and reports are the same code on both stacks: what differs is Python, NumPy,
SciPy, dp-accounting. So the modern one runs each test of them, but with its first parameters alone;
with all of them what every strategy has to do. Of what trains or makes noise each test runs with
every value of each of its parameters, and not with all combinations of those. `--first-cases` does
so on any stack, for an answer in a minute or two.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys

import pytest
from hypothesis import HealthCheck, settings

import bandmf_tf  # noqa: F401 (before TensorFlow, see bandmf_tf/_onednn.py)

# The same examples everywhere, and however long they take.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tests")

_MATHEMATICS = {"accounting", "factorization", "planning"}
_SAME_CODE = _MATHEMATICS | {"cli", "evidence", "mechanisms", "report", "runs"}
_EVERY_STRATEGY = "factorization/strategies_test.py"

_MISSING = [
    name
    for name in ("tensorflow_federated", "tensorflow_privacy")
    if importlib.util.find_spec(name) is None
]
if _MISSING and os.environ.get("BANDMF_STACK") == "federated":
    raise pytest.UsageError(f"The federated stack runs every test, but has no {_MISSING}.")


def _lacks_a_package(error):
    while error is not None:
        if isinstance(error, ImportError) and error.name in _MISSING:
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except ImportError as error:
        if _lacks_a_package(error):
            pytest.skip(f"This stack has no {', '.join(_MISSING)}.")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    missing = (f"No module named '{name}'" for name in _MISSING)
    if report.failed and any(text in str(report.longrepr) for text in missing):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: this stack has no {_MISSING}.")
    return report


def pytest_addoption(parser):
    text = "of folders that need no TensorFlow, each test with its first parameters alone"
    parser.addoption("--first-cases", action="store_true", help=text)


def pytest_collection_modifyitems(config, items):
    if _MISSING or config.getoption("first_cases"):
        items[:], further = _fewer_cases(items)
        config.hook.pytest_deselected(items=further)
    for item in items:
        if _MISSING and item.get_closest_marker("tff"):
            item.add_marker(pytest.mark.skip(reason=f"This stack has no {_MISSING}."))
        if item.get_closest_marker("keras2") and _has_keras_3():
            item.add_marker(pytest.mark.skip(reason="Keras 3 has no such thing."))


def _fewer_cases(items):
    """Returns the items without further cases, and those.

    A further case of the same code is any but the first, and of other code one in which no
    parameter has a value that it did not have before.
    """
    folder, seen, kept, further = pathlib.Path(__file__).parent, {}, [], []
    for item in items:
        path = item.path.relative_to(folder)
        test = item.nodeid.partition("[")[0]
        values = {(key, id(value)) for key, value in _parameters(item).items()} | {None}
        if path.as_posix() == _EVERY_STRATEGY:
            is_further = False
        elif path.parts[0] in _SAME_CODE:
            is_further = test in seen
        else:
            is_further = values <= seen.get(test, set())
        (further if is_further else kept).append(item)
        seen.setdefault(test, set()).update(values)
    return kept, further


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _has_keras_3():
    from bandmf_tf.keras._compat import IS_KERAS_3

    return IS_KERAS_3


class _TwoProcessors(importlib.abc.MetaPathFinder):
    """Splits the CPU as soon as a test imports TensorFlow: once that has started, it is too late.

    Tests of mathematics import no TensorFlow, and do not pay for it.
    """

    def find_spec(self, fullname, path, target=None):
        if fullname != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_split(module):
            execute(module)
            cpu = module.config.list_physical_devices("CPU")[0]
            half = module.config.LogicalDeviceConfiguration()
            module.config.set_logical_device_configuration(cpu, [half, half])

        spec.loader.exec_module = execute_and_split
        return spec


sys.meta_path.insert(0, _TwoProcessors())


def pytest_collection_finish():
    """Has the garbage collector look at what tests make, and no more at what imports have made.

    Graphs are made of many small objects, and it would go through those of TensorFlow each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish():
    """Drops TFF's context while its modules still exist.

    In the workers of pytest-xdist TFF would otherwise do so too late and print an ignored
    exception below the results of every run. Likewise nanobind, unless garbage is collected again.
    """
    gc.unfreeze()
    tff = sys.modules.get("tensorflow_federated")
    if tff is None:
        return

    class NoContext(tff.framework.SyncContext):
        def invoke(self, comp, arg):
            raise RuntimeError("The test session is over.")

    tff.framework.set_default_context(NoContext())
