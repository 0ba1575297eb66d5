"""TFF runs, its worker ends with the process, and its absence is explained."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest

from bandmf_tf.federated import runtime
from bandmf_tf.federated.runtime import tff

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
    print("worker", *[child.pid for child in psutil.Process().children()])
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
    assert len(workers) == 1, output
    assert not psutil.pid_exists(workers[0]), "The worker is still alive."


def test_clean_up_is_registered_once(monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    runtime._register_clean_up.cache_clear()
    runtime.set_local_context()
    runtime.set_local_context()
    runtime._register_clean_up.cache_clear()  # so that the next context registers for real
    assert registered.count(runtime.end_workers) == 1


def test_negative_concurrency_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        runtime.set_local_context(max_concurrent_computation_calls=-1)


def test_without_tff_the_import_says_what_to_do_and_the_library_still_imports(tmp_path):
    status, output = _run(
        """
        import sys
        sys.modules["tensorflow_federated"] = None  # makes its import fail
        import bandmf_tf
        print("the library imports")
        import bandmf_tf.federated.runtime
        """,
        tmp_path,
    )
    assert status == 1
    assert "the library imports" in output
    assert "tensorflow_federated is not installed" in output
    assert "install requirements.lock" in output
