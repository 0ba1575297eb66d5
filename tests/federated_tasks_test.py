"""Tasks give every client the same data whenever they are asked, and say where data come from."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import federated_tasks
from bandmf_tf.federated_tasks import FederatedTask, make_task
from bandmf_tf.run_config import ConfigError, RunConfig
from bandmf_tf.tff_runtime import tff


def _config(**changes) -> RunConfig:
    return RunConfig(mechanism="m.bandmf", output="run", **changes)


def _examples(dataset):
    batches = list(dataset.as_numpy_iterator())
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def test_digits_of_a_client_are_the_same_at_every_call():
    task = make_task(_config(examples_per_client=15, local_batch_size=4, local_epochs=2))
    first, second = (_examples(task.client_dataset(7)) for _ in range(2))
    assert first[0].shape == (30, 64)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(first[0], _examples(task.client_dataset(8))[0])


def test_digits_are_real_and_test_images_are_not_on_clients():
    task = make_task(_config())
    assert "real images" in task.data
    test_images, _ = _examples(task.test_dataset)
    assert len(test_images) == 359
    tested = {image.tobytes() for image in test_images}
    for client in range(20):
        images, _ = _examples(task.client_dataset(client))
        assert not tested & {image.tobytes() for image in images}


def test_the_seed_changes_who_has_what():
    first, second = (make_task(_config(population_seed=s)).client_dataset(0) for s in (0, 1))
    assert not np.array_equal(_examples(first)[0], _examples(second)[0])


def test_a_baseline_without_its_data_says_so_and_is_synthetic(monkeypatch):
    """Where the download fails, TFF's embedded data take its place; the name tells."""
    created = tff.simulation.baselines.emnist.create_character_recognition_task

    def offline(*args, use_synthetic_data, **kwargs):
        if not use_synthetic_data:
            raise OSError("no network")
        return created(*args, use_synthetic_data=True, **kwargs)

    monkeypatch.setattr(
        tff.simulation.baselines.emnist, "create_character_recognition_task", offline
    )
    task = make_task(_config(task="emnist", local_batch_size=2))
    assert task.data.startswith("SYNTHETIC")
    assert "OSError" in task.data
    batch = next(iter(task.client_dataset(12_345)))
    assert batch[0].shape[0] <= 2
    assert next(iter(task.test_dataset)) is not None


def my_task(config: RunConfig) -> FederatedTask:
    data = tf.data.Dataset.from_tensors((np.zeros((1, 2), np.float32), np.zeros(1, np.float32)))
    return FederatedTask("mine", "zeros", collections.OrderedDict, lambda client: data, data)


def test_a_task_of_ones_own_is_imported_by_name(monkeypatch):
    import sys
    import types

    module = types.ModuleType("my_package")
    module.my_task = my_task
    monkeypatch.setitem(sys.modules, "my_package", module)
    assert make_task(_config(task="my_package:my_task")).name == "mine"


@pytest.mark.parametrize("task", ["no_such_module:task", "bandmf_tf.federated_tasks:nothing"])
def test_a_task_that_cannot_be_imported_is_refused(task):
    with pytest.raises(ConfigError, match="cannot be imported"):
        federated_tasks.make_task(_config(task=task))
