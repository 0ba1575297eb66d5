"""Processes that have TensorFlow imported when they begin, and the production program in one.

Importing TensorFlow takes longer than the rounds that tests interrupt. A test session has one fork
server: whoever uses it asks for the same imports.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext

import bandmf_tf.simulation.training  # noqa: F401  # What takes long.
from production import train_federated


def fork_server() -> ForkServerContext:
    """Returns a context whose processes are forked from one that has imported TensorFlow."""
    # The only way to tell a fork server of Python 3.11 where modules are.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crash_program", "forked_program"])
    return context


def run(arguments: Sequence[str], output: str, largest_file: int | None) -> None:
    """Runs the production program as the leader of a process group; its output goes to a file."""
    os.setsid()
    # Not a pipe: a worker that outlives a kill keeps it open.
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(stream, standard)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(train_federated.main(["train_federated", *arguments]))
