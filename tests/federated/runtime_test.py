"""TFF runs, nobody else reaches its worker, which ends with the process; absence is explained."""

from __future__ import annotations

import collections
import os
import re
import runpy
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tensorflow_federated.proto.v0 import executor_pb2

from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.federated import runtime
from bandmf_tf.federated.runtime import tff
from cases import all_end, running

# After a learning round TFF's worker outlives Python unless somebody ends it (a plain sum does not
# show it). The last line tells this test which worker to look for.
_ONE_LEARNING_ROUND = """
    import collections
    import sys
    import numpy as np
    import psutil
    import tensorflow as tf
    from bandmf_tf.federated import runtime
    from bandmf_tf.federated.runtime import tff

    runtime.set_local_context()
    examples = collections.OrderedDict(x=np.ones((4, 2), np.float32), y=np.ones((4, 1), np.float32))
    batches = tf.data.Dataset.from_tensor_slices(examples).batch(2)

    def model_fn():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        loss = tf.keras.losses.MeanSquaredError()
        return tff.learning.models.from_keras_model(model, loss, input_spec=batches.element_spec)

    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1)
    )
    process.next(process.initialize(), [batches, batches])
    print("worker", *[child.pid for child in psutil.Process().children(recursive=True)])
"""


def _run(code: str, folder: Path) -> tuple[int, str]:
    """Runs `code` in a new Python, its output in a file because a worker can keep pipes open."""
    output = folder / "output.txt"
    with output.open("w") as stream:
        status = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).returncode
    return status, output.read_text()


@pytest.fixture(name="sum_over_clients")
def _sum_over_clients():
    runtime.set_local_context()

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def sum_over_clients(values):
        return tff.federated_sum(values)

    yield sum_over_clients
    runtime.end_workers()


def test_federated_sum_runs_in_the_local_context(sum_over_clients):
    assert sum_over_clients([1, 2, 39]) == 42


def test_ended_workers_are_replaced_when_needed(sum_over_clients):
    sum_over_clients([1, 2])
    assert runtime.end_workers() == 1
    assert sum_over_clients([3, 4]) == 7


def test_a_worker_that_dies_fails_its_computation_and_the_next_one_has_another(sum_over_clients):
    """TFF itself would begin again with new workers, for ever if it is the data that kills them."""
    sum_over_clients([1, 2])
    relay, _ = _relay()
    (worker,) = relay.children()
    worker.kill()
    psutil.wait_procs([relay])
    with pytest.raises(runtime.WorkerLostError, match="worker ended before"):
        sum_over_clients([3, 4])
    assert sum_over_clients([3, 4]) == 7


_LARGE = np.arange(2_400, dtype=np.float32).reshape(2, 1_200)
_STATE = collections.OrderedDict(
    weights=[_LARGE, np.ones(3, np.float32)],
    aggregator=(np.int32(3), collections.OrderedDict(row=_LARGE[0], none=())),
    doubles=_LARGE.astype(np.float64),
    transposed=_LARGE.T,
    name="x",
)


def _type_of_state():
    def floats(*shape):
        return tff.TensorType(np.float32, shape)

    return tff.types.to_type(
        collections.OrderedDict(
            weights=[floats(2, 1_200), floats(3)],
            aggregator=(np.int32, collections.OrderedDict(row=floats(None), none=())),
            doubles=tff.TensorType(np.float64, [2, 1_200]),
            transposed=floats(1_200, 2),
            name=np.str_,
        )
    )


@pytest.mark.parametrize("clients", [None, 0, 2])
def test_messages_are_those_of_tff(clients):
    """They are only built another way, without copies of the arrays in them."""
    value = _STATE if clients is None else [_STATE] * clients
    placement = tff.SERVER if clients is None else tff.CLIENTS
    type_spec = tff.FederatedType(_type_of_state(), placement)
    message = executor_pb2.Value()
    runtime._fill(message, value, type_spec)
    assert message == tff.framework.serialize_value(value, type_spec)[0]


@pytest.mark.parametrize("clients", [None, 2])
@pytest.mark.parametrize("size", [3, 2_000])
def test_what_a_mask_hides_is_not_sent(clients, size):
    """TFF itself sends it."""
    masked = np.ma.masked_array(np.arange(size, dtype=np.float32), np.arange(size) == 1)
    member = tff.types.to_type([tff.TensorType(np.float32, [size])])
    value = [masked] if clients is None else [[masked]] * clients
    type_spec = tff.FederatedType(member, tff.SERVER if clients is None else tff.CLIENTS)
    with pytest.raises(BandMFTypeError, match="what the mask of an array hides"):
        runtime._fill(executor_pb2.Value(), value, type_spec)


@pytest.mark.parametrize(
    "value", [_LARGE[:, 1:], _LARGE.astype(np.float64), _LARGE.ravel(), [_LARGE, _LARGE], "x"]
)
def test_tff_refuses_values_of_another_type(value):
    type_spec = tff.FederatedType(tff.TensorType(np.float32, _LARGE.shape), tff.SERVER)
    with pytest.raises((TypeError, NotImplementedError)) as refusal:
        tff.framework.serialize_value(value, type_spec)
    with pytest.raises(refusal.type, match=re.escape(str(refusal.value))):
        runtime._fill(executor_pb2.Value(), value, type_spec)


def test_other_children_are_left_alone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        runtime.end_workers()
        assert child.poll() is None
        child.communicate(b"\n")
    assert child.returncode == 0


def test_a_program_that_trained_leaves_no_worker_behind(tmp_path):
    status, output = _run(_ONE_LEARNING_ROUND, tmp_path)
    assert status == 0, output
    workers = [int(pid) for pid in output.split("worker ")[-1].split()]
    assert len(workers) == 2, output  # The relay and TFF's worker.
    assert all_end(workers)


def test_a_killed_program_leaves_no_worker_behind(tmp_path):
    output = tmp_path / "output.txt"
    code = """
        import time, psutil
        from bandmf_tf.federated import runtime
        runtime.set_local_context()
        workers = psutil.Process().children(recursive=True)
        print("worker", *[worker.pid for worker in workers], flush=True)
        time.sleep(600)
        """
    with output.open("w") as stream:
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=stream, stderr=stream
        )
    while not (said := re.search(r"^worker (\d+) (\d+)\n", output.read_text(), re.MULTILINE)):
        assert program.poll() is None, output.read_text()
        time.sleep(0.1)
    workers = [int(pid) for pid in said.groups()]
    assert running(workers) == workers
    program.kill()
    program.wait()
    assert all_end(workers)


def _relay() -> tuple[psutil.Process, str]:
    """The process before the worker, among whatever else this one has started, and its socket."""
    (found,) = [
        (child, word.removeprefix("--listen="))
        for child in psutil.Process().children()
        if running([child.pid])
        for word in child.cmdline()
        if word.startswith("--listen=")
    ]
    return found


def test_nobody_but_the_owner_reaches_the_worker(sum_over_clients):
    sum_over_clients([1, 2])
    relay, path = _relay()
    (worker,) = relay.children()
    (port,) = [word for word in worker.cmdline() if word.startswith("--port=")]
    for host in ("127.0.0.1", "::1", socket.gethostname()):
        with pytest.raises(OSError, match=r"refused|Cannot assign|not known|resolution"):
            socket.create_connection((host, int(port.removeprefix("--port="))), timeout=5)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700


@pytest.mark.skipif(
    os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split()[2] == "1",
    reason="only root can become somebody else, and nobody can in Bazel's sandbox",
)
def test_another_user_is_turned_away_even_if_the_socket_is_open(sum_over_clients):
    sum_over_clients([1, 2])
    _, path = _relay()

    def attempt(user: int) -> str:
        code = (
            "import os, socket, sys; os.setuid(int(sys.argv[1]));"
            "s = socket.socket(socket.AF_UNIX);"
            "s.connect(sys.argv[2]); s.sendall(b'PRI * HTTP/2.0'); print(len(s.recv(100)), 'bytes')"
        )
        command = [sys.executable, "-c", code, str(user), path]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        return outcome.stdout + outcome.stderr

    nobody = 65534
    assert re.match("[1-9][0-9]* bytes", attempt(0))
    assert "PermissionError" in attempt(nobody)
    os.chmod(path, 0o666)
    os.chmod(os.path.dirname(path), 0o755)
    assert re.search("^0 bytes|ConnectionResetError|BrokenPipeError", attempt(nobody))


# A user namespace in which no network namespace may be made: what most containers are like.
_WITHOUT_NETWORKS = ["unshare", "-r", "sh", "-c", "echo 0 >/proc/sys/user/max_net_namespaces; $0"]


@pytest.mark.skipif(
    subprocess.run(["unshare", "-r", "true"], check=False).returncode != 0,
    reason="the system allows no namespaces",
)
@pytest.mark.parametrize("allowed", [False, True])
def test_an_open_worker_is_refused_unless_it_is_allowed(tmp_path, allowed):
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\n"
        "from bandmf_tf.federated import runtime\n"
        f"runtime.set_local_context(allow_open_worker={allowed})\n"
        "print('went on')\n"
    )
    program.chmod(0o700)
    outcome = subprocess.run(
        [*_WITHOUT_NETWORKS, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ("went on" in outcome.stdout) == allowed, outcome.stderr
    if not allowed:
        assert "would listen on all interfaces" in outcome.stderr
        assert "allow_open_worker" in outcome.stderr


def test_a_long_name_of_the_temporary_folder_does_not_matter(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    runtime.set_local_context()
    assert not list(folder.iterdir())
    runtime.end_workers()


def test_negative_concurrency_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        runtime.set_local_context(max_concurrent_computation_calls=-1)


def test_without_tff_the_import_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)  # Makes its import fail.
    with pytest.raises(ImportError, match=r"is not installed.*install the lock"):
        runpy.run_path(runtime.__file__)
