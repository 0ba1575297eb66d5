"""Tasks give every client the same data whenever they are asked, and say where data come from."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.federated import runtime as tff_runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.runs.folder import RunError
from bandmf_tf.simulation import tasks as federated_tasks
from bandmf_tf.simulation import training as federated_training
from bandmf_tf.simulation.config import ConfigError, RunConfig
from bandmf_tf.simulation.tasks import make_task
from cases import make_mechanism

# What TFF calls the maker of each of its baselines.
BASELINES = {
    "emnist": "create_character_recognition_task",
    "shakespeare": "create_character_prediction_task",
    "stackoverflow": "create_word_prediction_task",
}


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


def _plays(path, roles=20):
    speeches = [f"Role {i:02}:\n{chr(ord('a') + i) * 30}, Ö!\nAnd more:" for i in range(roles)]
    path.write_text("\n\n".join([*speeches, "Role 00:\nAgain.", "Nobody:"]) + "\n", "utf-8")
    return path


def test_roles_of_plays_are_clients_and_every_tenth_is_for_testing(tmp_path):
    plays = _plays(tmp_path / "plays.txt")
    config = _config(task="shakespeare", data_file=str(plays), num_clients=18, clients_per_round=2)
    task = make_task(config)
    assert task.data.startswith("real text of 20 roles, 18 to train on (SHA-256 ")
    for client, letters in ((0, "a"), (9, "k")):  # The tenth role, with its j, is not a client.
        inputs, labels = _examples(task.client_dataset(client))
        assert inputs.shape == labels.shape
        assert inputs.shape[1] == 25
        number = ord(letters) - ord("a") + 1
        np.testing.assert_array_equal(inputs[0], number)
        np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    tested, _ = _examples(task.test_dataset)
    assert set(tested[:, 0]) == {10, 20}
    # Clients have the same data at every call, characters of any kind, and both speeches.
    again = federated_tasks._roles(plays.read_text("utf-8"))["Role 00:"]
    assert again.endswith("And more:\nAgain.\n")
    assert federated_tasks._windows("Ö!").tolist() == [[0, 33] * 13]
    assert sum(np.size(weight) for weight in task.model.initial_weights[0]) == 6_765


def test_a_fused_lstm_is_the_one_of_keras():
    inputs = tf.random.stateless_normal([3, 7, 5], [1, 2])
    fused = federated_tasks.FusedLSTM(4, tf.keras.initializers.GlorotUniform(1))
    other = tf.keras.layers.LSTM(4, return_sequences=True)
    fused(inputs), other(inputs)
    fused.bias.assign(tf.random.stateless_normal([16], [3, 4]))

    def as_keras(array):
        """Orders gates as Keras does: input, forget, cell, output."""
        gates = np.split(np.asarray(array), 4, axis=-1)
        return np.concatenate([gates[i] for i in (0, 2, 1, 3)], axis=-1)

    kernel, states = np.split(as_keras(fused.kernel), [5])
    always = np.repeat([0.0, 1.0, 0.0, 0.0], 4)  # Added to the forget gate.
    other.set_weights([kernel, states, as_keras(fused.bias) + always])
    found = []
    for layer in (fused, other):
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
            loss = tf.reduce_sum(tf.sin(3.0 * outputs))
        found.append((outputs, tape.gradient(loss, layer.trainable_variables)))
    (outputs, (of_kernel, of_bias)), (expected, gradients) = found
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    np.testing.assert_allclose(as_keras(of_kernel), np.concatenate(gradients[:2]), atol=1e-5)
    np.testing.assert_allclose(as_keras(of_bias), gradients[2], atol=1e-5)


def test_what_is_no_text_of_plays_is_refused(tmp_path):
    plays = _plays(tmp_path / "plays.txt")

    def make(path):
        return make_task(_config(task="shakespeare", data_file=str(path), num_clients=21))

    with pytest.raises(ConfigError, match=r"at most 18, the roles .* Found 21\."):
        make(plays)
    with pytest.raises(ConfigError, match=r"at least 10 roles.* Found 9\."):
        make(_plays(plays, 9))
    plays.write_bytes(b"\xff")
    for path in (plays, tmp_path / "missing.txt"):
        with pytest.raises(ConfigError, match="cannot be read"):
            make(path)


def _without_network(made):
    def create(*args, use_synthetic_data, **kwargs):
        if not use_synthetic_data:
            raise OSError("no network")
        return made(*args, use_synthetic_data=True, **kwargs)

    return create


@pytest.fixture(name="offline")
def _offline(monkeypatch):
    """No baseline finds its real data, with or without a network."""
    for name, maker in BASELINES.items():
        module = getattr(tff.simulation.baselines, name)
        monkeypatch.setattr(module, maker, _without_network(getattr(module, maker)))


@pytest.fixture(name="mechanism_file", scope="module")
def _mechanism_file(tmp_path_factory):
    strategy = ToeplitzStrategy(np.array([1.0, 0.5]), 40)
    mechanism = make_mechanism(strategy, MinSeparation(10), noise_multiplier=0.1)
    path = tmp_path_factory.mktemp("mechanism") / "m.bandmf"
    save_mechanism(mechanism, path)
    return path


def _run_config(mechanism_file, folder, **changes) -> RunConfig:
    return RunConfig(
        mechanism=str(mechanism_file),
        output=str(folder),
        num_clients=400,
        availability="always",
        pinned_noise_seed=1,
        **changes,
    )


def _train(config) -> tuple[federated_tasks.FederatedTask, dict[str, str]]:
    """Trains; returns the task and the last line of metrics.csv."""
    tff_runtime.set_local_context()
    try:
        with federated_training.FederatedTraining(config) as training:
            training.train()
    finally:
        tff_runtime.end_workers()
    return training.task, list(csv.DictReader(Path(config.output, "metrics.csv").open()))[-1]


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_train_and_do_not_take_other_data_for_those_they_began_with(
    name, offline, monkeypatch, mechanism_file, tmp_path
):
    del offline
    config = _run_config(
        mechanism_file,
        tmp_path / "run",
        task=name,
        num_rounds=1,
        clients_per_round=2,
        examples_per_client=4,
        local_batch_size=2,
    )
    task, row = _train(config)
    assert task.data.startswith("SYNTHETIC")
    assert list(task.client_dataset(12_345))  # Any number of clients share what there is.
    assert np.isfinite(float(row["test_loss"]))
    assert 0.0 <= float(row["test_accuracy"]) <= 1.0

    module = getattr(tff.simulation.baselines, name)
    create = getattr(module, BASELINES[name])
    monkeypatch.setattr(  # Now the download works.
        module,
        BASELINES[name],
        lambda *args, use_synthetic_data, **more: create(*args, use_synthetic_data=True, **more),
    )
    with pytest.raises(RunError, match=r"began with other data \(SYNTHETIC.* now \(real"):
        federated_training.FederatedTraining(config)


def test_stackoverflow_is_the_papers_one_layer_lstm(offline):
    """Embedding 96, one LSTM of 670 units, projected to 96; the embedding holds the vocabulary."""
    del offline
    variables = make_task(_config(task="stackoverflow")).model().trainable_variables
    shapes = [tuple(variable.shape) for variable in variables]
    assert shapes[1:4] == [(96, 4 * 670), (670, 4 * 670), (4 * 670,)]
    assert shapes[4:6] == [(670, 96), (96,)]
    assert [shape[-1] for shape in shapes[:1]] == [96]
    assert len(shapes) == 8


def test_the_example_of_a_task_of_ones_own_learns(mechanism_file, tmp_path):
    config = _run_config(
        mechanism_file,
        tmp_path / "run",
        task="production.example_task:iris",
        num_rounds=24,
        evaluate_every=24,
        clients_per_round=8,
        server_learning_rate=0.3,
    )
    _, row = _train(config)
    assert float(row["test_accuracy"]) > 0.9


@pytest.mark.parametrize("task", ["no_such_module:task", "bandmf_tf.simulation.tasks:nothing"])
def test_a_task_that_cannot_be_imported_is_refused(task):
    with pytest.raises(ConfigError, match="cannot be imported"):
        federated_tasks.make_task(_config(task=task))
