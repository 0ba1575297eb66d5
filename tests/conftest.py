"""Fixes what chance and speed could decide, and gives TensorFlow two logical CPUs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

from hypothesis import HealthCheck, settings

# The same examples everywhere, and however long they take.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tests")


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


def pytest_sessionfinish():
    """Drops TFF's context while its modules still exist.

    In the workers of pytest-xdist TFF would otherwise do so too late and print an ignored
    exception below the results of every run.
    """
    tff = sys.modules.get("tensorflow_federated")
    if tff is None:
        return

    class NoContext(tff.framework.SyncContext):
        def invoke(self, comp, arg):
            raise RuntimeError("The test session is over.")

    tff.framework.set_default_context(NoContext())
