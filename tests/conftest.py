"""Starts TensorFlow with two logical CPUs and ends TFF's part of a process in an orderly way."""

from __future__ import annotations

import sys

import tensorflow as tf

# Devices can be set only before TensorFlow starts, and some test files start it while they are
# imported. Files that need two CPUs set the same again, for when they run without this file.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


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
