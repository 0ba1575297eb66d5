"""Ends TFF's part of a test process in an orderly way."""

from __future__ import annotations

import sys


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
