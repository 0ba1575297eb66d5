"""Running TensorFlow Federated on this machine without leaving processes behind.

TFF's native runtime is a program, `worker_binary`, that it starts for the first computation. After
some computations that program outlives Python and keeps its pipes open, so that a command like
`python train.py | tee log` never ends. `set_local_context` is the one place in this library that
chooses the runtime, and it sees to it that the workers end with the process.
"""

from __future__ import annotations

import atexit
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandmf_tf.errors import BandMFError

try:
    import grpc
    import psutil

    with warnings.catch_warnings():
        # TFF's imports use a deprecated module, which nobody but TFF can change.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated", UserWarning)
        import tensorflow_federated as tff
except ModuleNotFoundError as error:
    if error.name not in ("grpc", "psutil", "tensorflow_federated"):
        raise  # An installed but broken TFF should say itself what it lacks.
    raise ImportError(
        "The TFF parts of bandmf_tf need tensorflow_federated and psutil, and "
        f"{error.name} is not installed: plain pip cannot resolve bandmf-tf[tff] because "
        "tensorflow-federated 0.87.0 pins a jaxlib that is no longer published, so install "
        "requirements.lock of the bandmf_tf repository instead "
        "(`make setup`, or `pip install --no-deps --require-hashes -r requirements.lock`).",
        name=error.name,
    ) from error

__all__ = ["end_workers", "set_local_context", "set_remote_context", "tff", "worker_binary"]

# The name under which the operating system lists TFF's worker.
_WORKER_NAME = "worker_binary"


def set_local_context(max_concurrent_computation_calls: int = 0) -> None:
    """Makes TFF run computations synchronously on this machine, in a worker that ends with us.

    Safe to call more than once: each call installs a new context in the calling thread (TFF keeps
    one for each thread); the clean-up at exit is registered only the first time. The clean-up runs
    when Python ends by itself, by an exception or by `sys.exit`; it cannot run when a signal kills
    the process or after `os._exit`.

    Args:
        max_concurrent_computation_calls: How many calls of one computation (clients, in effect) run
            at the same time; 0 means no limit. Each running client holds its own copy of the model.
    """
    if max_concurrent_computation_calls < 0:
        raise BandMFError(
            "max_concurrent_computation_calls must be at least 0 (0 means no limit); "
            f"got {max_concurrent_computation_calls}."
        )
    _register_clean_up()
    # TFF interrupts the worker of the context that is replaced and waits for it to end; a busy
    # worker ignores the interrupt, and the wait would never end.
    end_workers()
    tff.backends.native.set_sync_local_cpp_execution_context(
        max_concurrent_computation_calls=max_concurrent_computation_calls
    )


def set_remote_context(workers: Sequence[str], connect_seconds: float = 60.0) -> None:
    """Makes TFF run computations on worker services on other machines, clients spread over them.

    Every worker trains and sums its share of the clients; the partial sums are merged here. A sum
    of floats depends on its order, so results agree with those of one machine up to rounding.

    Args:
        workers: `host:port` of each worker service; `production/workers.sh` starts some.
        connect_seconds: How long to wait for each of them.
    """
    if not workers:
        raise BandMFError("workers must name at least one host:port.")
    contexts = [_remote_context(address, connect_seconds) for address in workers]
    tff.backends.native.set_mergeable_comp_execution_context(contexts)


def _remote_context(address: str, connect_seconds: float) -> tff.framework.AsyncExecutionContext:
    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    channel = grpc.insecure_channel(address, unlimited)
    try:
        grpc.channel_ready_future(channel).result(timeout=connect_seconds)
    except grpc.FutureTimeoutError:
        raise ConnectionError(
            f"No TFF worker answers at {address} after {connect_seconds:g} seconds; start it, or "
            "leave it out of the workers."
        ) from None
    stub = tff.framework.RemoteExecutorGrpcStub(channel)

    def make_executor(cardinalities: dict[Any, int]) -> tff.framework.RemoteExecutor:
        cardinalities.setdefault(tff.CLIENTS, 0)
        executor = tff.framework.RemoteExecutor(stub)
        executor.set_cardinalities(cardinalities)
        return executor

    return tff.framework.AsyncExecutionContext(
        tff.framework.ResourceManagingExecutorFactory(make_executor),
        tff.backends.native.desugar_and_transform_to_native,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )


def worker_binary() -> Path:
    """Returns where TFF's worker service is installed."""
    return Path(tff.__file__).parent / "data" / _WORKER_NAME


def end_workers() -> int:
    """Ends the TFF workers that this process started; returns how many there were.

    Workers of other processes are left alone. A context starts a new worker when it needs one.
    """
    workers = [child for child in psutil.Process().children() if _is_running_worker(child)]
    for worker in workers:
        # Workers hold no state worth saving. They are not waited for: TFF itself signals and reaps
        # its worker when the context is deleted, and complains if the process has been reaped.
        worker.kill()
    return len(workers)


def _is_running_worker(process: psutil.Process) -> bool:
    try:
        return process.name() == _WORKER_NAME and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@functools.cache
def _register_clean_up() -> None:
    atexit.register(end_workers)
