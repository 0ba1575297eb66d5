"""Running TensorFlow Federated without open doors and without leaving processes behind.

TFF's native runtime is a program, `worker_binary`, that listens on all interfaces without
authentication: whoever reaches it can run computations as its owner, read `secret/`, or ask for the
noise. After some computations it also outlives Python and keeps its pipes open. This module is the
one place in the library that chooses the runtime:

* `set_local_context`: a worker on this machine, in a network of its own, behind a Unix socket that
  only its owner can open (`_relay.py`). It ends with the program, whichever way that ends.
* `set_remote_context`: workers on other machines, behind TLS with client certificates. They get
  client data and the model. The rest of a round, with the state of the aggregator and the noise in
  it, is computed by a local worker.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tree

from bandmf_tf.errors import BandMFError, BandMFImportError, BandMFTypeError
from bandmf_tf.federated import _relay

try:
    import grpc

    with warnings.catch_warnings():
        # TFF's imports use a deprecated module, which nobody but TFF can change.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated", UserWarning)
        import tensorflow_federated as tff
        from tensorflow_federated.proto.v0 import data_type_pb2, executor_pb2
        from tensorflow_federated.python.core.impl.executors import remote_executor
        from tensorflow_federated.python.core.impl.types import type_serialization
except ModuleNotFoundError as error:
    if error.name not in ("grpc", "tensorflow_federated"):
        raise  # An installed but broken TFF should say itself what it lacks.
    raise BandMFImportError(
        "The TFF parts of bandmf_tf need tensorflow_federated, and "
        f"{error.name} is not installed: plain pip cannot resolve bandmf-tf[tff] because "
        "tensorflow-federated 0.87.0 pins a jaxlib that is no longer published, so install the "
        "lock of the bandmf_tf repository instead (`make setup`, or "
        "`pip install --no-deps --require-hashes -r requirements/federated.lock`).",
        name=error.name,
    ) from error

__all__ = [
    "TlsFiles",
    "WorkerLostError",
    "end_workers",
    "set_local_context",
    "set_program_context",
    "set_remote_context",
    "tff",
]


class WorkerLostError(BandMFError):
    """A worker of TFF died; on this machine the next computation gets a new one."""


_UNLIMITED = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
_START_SECONDS = 60.0
_LOST_SECONDS = 20.0
_LONGEST_FOLDER = 90
_FEW_NUMBERS = 1_000

# Entries of an aggregator's state that only the merging side needs; see `noise/`.
_SUPPLIED_ROW = "row"
_SECRET_ENTRY = re.compile(rf"{_SUPPLIED_ROW}|seed|ready_rows|memory_\d+")


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """Files (PEM) by which the program and its workers know each other.

    Attributes:
      certificate: The program's certificate.
      key: Its private key.
      ca: The authority that signed the certificates of the workers.
    """

    certificate: str
    key: str
    ca: str

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the files as credentials of a gRPC channel."""
        ca, key, certificate = (
            Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


def set_local_context(
    max_concurrent_computation_calls: int = 0, *, allow_open_worker: bool = False
) -> None:
    """Makes TFF run computations synchronously on this machine, in a worker that ends with us.

    Safe to call more than once: each call installs a new context in the calling thread (TFF keeps
    one for each thread) and ends the workers of earlier ones.

    Args:
        max_concurrent_computation_calls: How many calls of one computation (clients, in effect) run
            at the same time; 0 means no limit. Each running client holds its own copy of the model.
        allow_open_worker: Go on where the system gives the worker no private network, as in most
            containers. Whoever reaches a port of this machine can then read what its owner can:
            only where a firewall or a network policy closes all ports.

    Raises:
        BandMFError: The worker would be open, and that was not allowed.
    """
    if max_concurrent_computation_calls < 0:
        raise BandMFError(
            "max_concurrent_computation_calls must be at least 0 (0 means no limit); "
            f"got {max_concurrent_computation_calls}."
        )
    end_workers()
    global _remote
    _remote = None
    worker = _LocalWorker(max_concurrent_computation_calls, allow_open_worker)
    worker.stub()  # A refusal comes now, not in the first round.
    tff.framework.set_default_context(_context(tff.framework.SyncExecutionContext, worker.stub))


def set_program_context(*, allow_open_worker: bool = False) -> None:
    """Does what `set_local_context` does, for TFF's own programs (`tff.learning.programs`).

    They are coroutines, in which computations return references to their results.

    Args:
        allow_open_worker: As in `set_local_context`.
    """
    set_local_context(allow_open_worker=allow_open_worker)
    (worker,) = _RUNNING
    context = _context(tff.framework.AsyncExecutionContext, worker.stub)
    tff.framework.set_default_context(tff.program.NativeFederatedContext(context))


def set_remote_context(
    workers: Sequence[str],
    tls: TlsFiles | None = None,
    *,
    connect_seconds: float = 60.0,
    allow_open_worker: bool = False,
) -> None:
    """Makes TFF train clients on worker services, spread over them, and do the rest here.

    Every worker trains and sums its share of the clients. The partial sums are merged, noised and
    applied by a worker on this machine: the others never see a row of noise. A sum of floats
    depends on its order, so results agree with those of one machine up to rounding.

    Args:
        workers: `host:port` of each worker service (`production/workers.sh` starts some), or
            `unix:PATH` of a tunnel that was authenticated elsewhere, by ssh for example.
        tls: The program's certificate; workers at a `host:port` want one.
        connect_seconds: How long to wait for each of them.
        allow_open_worker: Speak to workers without TLS, who will then speak to anybody, and accept
            an open worker on this machine as in `set_local_context`.
    """
    if not workers:
        raise BandMFError("workers must name at least one host:port.")
    plain = [address for address in workers if not address.startswith("unix:")]
    if plain and tls is None and not allow_open_worker:
        raise BandMFError(
            f"The worker at {plain[0]} needs TLS with client certificates, or anybody could run "
            "computations on it; give its files (production/certificates.sh makes some), or accept "
            "that with allow_open_worker."
        )
    end_workers()
    remote = [_RemoteWorker(address, tls, connect_seconds) for address in workers]
    _use_remote(remote, _LocalWorker(0, allow_open_worker))


def leave_out_lost_workers() -> int:
    """Goes on with the workers of `set_remote_context` that are not lost.

    Returns:
      How many are left out now that were not before. If none is left, or TFF does not run on
      remote workers, nothing is changed, and that is 0.
    """
    if _remote is None:
        return 0
    workers, local = _remote
    left = [worker for worker in workers if not worker.is_lost]
    if not left or len(left) == len(workers):
        return 0
    _use_remote(left, local)
    return len(workers) - len(left)


# The workers of the remote context and the one beside this program; None without such a context.
_remote: tuple[Sequence[_RemoteWorker], _LocalWorker] | None = None


def _use_remote(workers: Sequence[_RemoteWorker], local: _LocalWorker) -> None:
    global _remote
    merging = _context(tff.framework.AsyncExecutionContext, local.stub)
    forms = weakref.WeakSet[Any]()

    def compile_form(computation: Any) -> Any:
        form = tff.backends.native.compile_to_mergeable_comp_form(computation)
        forms.add(form.up_to_merge)
        return form

    contexts = []
    for worker in workers:
        training = _context(tff.framework.AsyncExecutionContext, worker.stub)
        contexts.append(_SplitContext(training, merging, forms))
    local.stub()
    tff.framework.set_default_context(
        tff.framework.MergeableCompExecutionContext(contexts, compiler_fn=compile_form)
    )
    _remote = (workers, local)


class _SplitContext(tff.framework.AsyncContext):
    """Gives a remote context what comes before the merge, without the noise, and keeps the rest.

    Args:
        training: Where clients are.
        merging: Where sums are merged, noised and applied.
        before_merge: The computations that belong to `training`.
    """

    def __init__(
        self,
        training: tff.framework.AsyncContext,
        merging: tff.framework.AsyncContext,
        before_merge: weakref.WeakSet[Any],
    ):
        self._training = training
        self._merging = merging
        self._before_merge = before_merge

    async def invoke(self, comp: Any, arg: Any) -> Any:
        if comp in self._before_merge:
            return await self._training.invoke(
                comp, _without_noise(arg, comp.type_signature.parameter)
            )
        return await self._merging.invoke(comp, arg)


def _without_noise(value: Any, type_spec: tff.Type | None) -> Any:
    """Returns an argument without its row of noise, with NaN for other rows and 0 for seeds.

    A sum would show either: a round needs its row, and NaN spreads.
    """
    if isinstance(type_spec, tff.StructType):
        parts = zip(_parts(value), tff.structure.iter_elements(type_spec), strict=True)
        return tff.structure.Struct([(n, _without_noise(part, t)) for part, (n, t) in parts])
    if isinstance(type_spec, tff.FederatedType) and type_spec.placement is tff.CLIENTS:
        return value

    def clean(path: tuple[Any, ...], leaf: Any) -> Any:
        if not path or not _SECRET_ENTRY.fullmatch(str(path[-1])):
            return leaf
        if path[-1] == _SUPPLIED_ROW:
            return leaf[:0]
        return np.full_like(leaf, np.nan if np.asarray(leaf).dtype.kind == "f" else 0)

    return tree.map_structure_with_path(clean, value)


def _context(kind: Callable[..., Any], get_stub: Callable[[], Any]) -> Any:
    """Returns a context that runs computations on the executor service of a stub."""

    def make_executor(cardinalities: dict[Any, int]) -> tff.framework.RemoteExecutor:
        cardinalities.setdefault(tff.CLIENTS, 0)
        executor = _Executor(get_stub())
        executor.set_cardinalities(cardinalities)
        return executor

    return kind(
        tff.framework.ResourceManagingExecutorFactory(make_executor),
        _compile,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )


class _Executor(tff.framework.RemoteExecutor):
    """Sends values of a round without the copies that TFF makes of them.

    TFF builds a message from the inside outwards, and each of the dozen messages around an array is
    a copy of it, most of a round of 25 million parameters. Here they are filled from the outside.
    """

    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        if not isinstance(type_spec, tff.FederatedType):
            return await super().create_value(value, type_spec)
        request = executor_pb2.CreateValueRequest(executor=self._executor_id)
        _fill(request.value, value, type_spec)
        response = self._stub.create_value(request)
        return remote_executor.RemoteValue(response.value_ref, type_spec, self)


def _fill(message: executor_pb2.Value, value: Any, type_spec: tff.Type) -> None:
    """Writes a value into its message; what is not as it should be TFF refuses, but for masks."""
    if isinstance(value, np.ma.MaskedArray):
        raise BandMFTypeError(
            "TFF would send what the mask of an array hides; fill it first, with value.filled(0)."
        )
    is_federated = isinstance(type_spec, tff.FederatedType)
    if is_federated and (type_spec.all_equal or isinstance(value, list)):
        message.federated.type.CopyFrom(type_serialization.serialize_type(type_spec).federated)
        for part in [value] if type_spec.all_equal else value:
            _fill(message.federated.value.add(), part, type_spec.member)
    elif isinstance(type_spec, tff.StructType) and len(_parts(value)) == len(type_spec):
        message.struct.SetInParent()
        named = tff.structure.iter_elements(type_spec)
        for (name, part_type), part in zip(named, _parts(value), strict=True):
            element = message.struct.element.add()
            element.name = name or ""
            _fill(element.value, part, part_type)
    elif _is_large_array(value, type_spec):
        message.array.dtype = data_type_pb2.DT_FLOAT
        message.array.shape.dim.extend(value.shape)
        message.array.content = value.tobytes()
    else:
        message.MergeFrom(tff.framework.serialize_value(value, type_spec)[0])


def _parts(value: Any) -> tff.structure.Struct:
    return tff.structure.from_container(value)


def _is_large_array(value: Any, type_spec: tff.Type) -> bool:
    return (
        isinstance(type_spec, tff.TensorType)
        and type(value) is np.ndarray
        and value.size > _FEW_NUMBERS
        and value.dtype == type_spec.dtype == np.float32
        and len(type_spec.shape) == value.ndim
        and all(at in (None, size) for at, size in zip(type_spec.shape, value.shape, strict=True))
    )


def _compile(computation: Any) -> Any:
    if "federated_secure_" in computation.to_building_block().compact_representation():
        raise BandMFError(
            "TFF's native runtime has no secure aggregation, and this computation asks for it (by "
            "a SecureSumFactory, perhaps); use a plain sum here, or a runtime that has it."
        )
    return tff.backends.native.desugar_and_transform_to_native(computation)


def _channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, _UNLIMITED)
    return grpc.secure_channel(address, tls.credentials(), _UNLIMITED)


def _answers(channel: grpc.Channel, seconds: float) -> bool:
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        return False
    return True


class _RemoteWorker:
    """A worker service on another machine.

    TFF asks for its stub before every computation, and again when a call has failed, for ever. A
    worker that comes back in time, or one with the same name, is given the computation anew.
    """

    def __init__(self, address: str, tls: TlsFiles | None, connect_seconds: float):
        self._address = address
        self._channel = _channel(address, tls)
        self.is_lost = False
        if not _answers(self._channel, connect_seconds):
            self._channel.close()
            raise ConnectionError(
                f"No TFF worker answers at {address} after {connect_seconds:g} seconds; start it, "
                "or leave it out of the workers, and see that both sides know each other's "
                "certificates."
            )
        self._stub = tff.framework.RemoteExecutorGrpcStub(self._channel)

    def stub(self) -> tff.framework.RemoteExecutorGrpcStub:
        """Returns the stub of a worker that answers."""
        self.is_lost = self.is_lost or not _answers(self._channel, _LOST_SECONDS)
        if self.is_lost:
            raise WorkerLostError(
                f"The TFF worker at {self._address} was lost and did not come back within "
                f"{_LOST_SECONDS:g} seconds; nothing of its computation was released, start it and "
                "then the same command again."
            )
        return self._stub


class _LocalWorker:
    """TFF's worker on this machine, behind its relay; started when needed.

    If it dies, the computation fails and the next one has a new worker. TFF would repeat it for
    ever, with a new worker each time, if it is the computation that kills them.
    """

    def __init__(self, max_concurrent_computation_calls: int, allow_open: bool):
        self._command = [
            str(Path(tff.__file__).parent / "data" / "worker_binary"),
            f"--max_concurrent_computation_calls={max_concurrent_computation_calls}",
        ]
        self._allow_open = allow_open
        self._lock = threading.RLock()  # TFF asks for its worker in threads of its own.
        self._process: subprocess.Popen[str] | None = None
        self._folder = ""
        self._stub: tff.framework.RemoteExecutorGrpcStub | None = None
        _end_workers_at_exit()

    def stub(self) -> tff.framework.RemoteExecutorGrpcStub:
        """Returns the stub of the running worker."""
        with self._lock:
            if _ENDING.is_set():
                raise ConnectionError("The program is ending and starts no TFF worker any more.")
            if self._process is None:
                self._start()
            elif self._process.poll() is not None:
                self.end()
                raise WorkerLostError(
                    "TFF's worker ended before a computation was done, for lack of memory perhaps; "
                    "nothing of it was released, start the same command again."
                )
            return self._stub

    def end(self) -> bool:
        """Ends the worker; returns whether it was running. Workers hold nothing worth saving."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return False
            was_running = process.poll() is None
            process.kill()
            process.communicate()
            shutil.rmtree(self._folder, ignore_errors=True)
            _RUNNING.discard(self)
            return was_running

    def _start(self) -> None:
        self._folder = _short_private_folder()
        try:
            self._process = self._started(is_open=False)
        except _NoNamespaceError as error:
            if not self._allow_open:
                raise BandMFError(
                    "TFF's worker would listen on all interfaces without authentication, because "
                    f"this system gives it no private network ({error}); allow user namespaces to "
                    "this user, or accept that with allow_open_worker where a firewall closes all "
                    "ports."
                ) from None
            self._process = self._started(is_open=True)
        _RUNNING.add(self)
        channel = _channel(f"unix:{self._socket}", None)
        if not _answers(channel, _START_SECONDS):
            raise WorkerLostError("TFF's worker does not answer; see its output above.")
        self._stub = tff.framework.RemoteExecutorGrpcStub(channel)

    @property
    def _socket(self) -> str:
        return f"{self._folder}/worker"

    def _started(self, *, is_open: bool) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", _relay.__file__, f"--listen={self._socket}"),
                *(["--open"] if is_open else []),
                *("--", *self._command),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said == _relay.READY:
            return process
        process.communicate()
        Path(self._socket).unlink(missing_ok=True)
        if process.returncode == _relay.NO_NAMESPACE:
            raise _NoNamespaceError(said)
        raise BandMFError(
            f"TFF's worker ended at once with status {process.returncode}; see its output above."
        )


def _short_private_folder() -> str:
    """Returns a new folder of the owner's; the path of a Unix socket has at most 107 bytes."""
    folder = tempfile.mkdtemp(prefix="bandmf-")
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="bandmf-", dir="/tmp")
    return folder


_ENDING = threading.Event()
_RUNNING = weakref.WeakSet[_LocalWorker]()


class _NoNamespaceError(Exception):
    """The system refuses a network namespace."""


def end_workers() -> int:
    """Ends the local workers that this process started; returns how many were running.

    A context starts a new worker when it needs one.
    """
    return sum(worker.end() for worker in list(_RUNNING))


@functools.cache
def _end_workers_at_exit() -> None:
    atexit.register(_end)


def _end() -> None:
    _ENDING.set()  # TFF would otherwise have the worker back to finish what was interrupted.
    end_workers()
