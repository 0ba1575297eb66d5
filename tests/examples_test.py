"""The examples run on small sizes, their runs can be reported, and bad input is one sentence."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.cli import report
from examples import keras_cifar10, keras_digits, keras_hub_lora


def _report(run: Path, output: Path) -> dict:
    assert report.main(["report", f"--run={run}", f"--output={output}"]) == 0
    return json.loads((output / "report.json").read_text())


def test_digits_compares_three_mechanisms_at_the_same_privacy(tmp_path, monkeypatch, capsys):
    # One run of each mechanism is enough to see that it trains.
    monkeypatch.setattr(keras_digits, "_LONG_RUN_RATES", (1.0,))
    real = keras_digits.train
    monkeypatch.setattr(
        keras_digits,
        "train",
        lambda setting, data, rate, seed: 0.5 if seed else real(setting, data, rate, seed),
    )
    arguments = ["--epsilons=4", "--epochs=1", "--batch_size=128", "--runs=2"]
    output = tmp_path / "digits"
    status = keras_digits.main(["keras_digits", f"--output={output}", *arguments])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    table = (output / "accuracy.md").read_text()
    assert table in printed.out
    assert (output / "accuracy.png").stat().st_size > 1_000
    with (output / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["BandMF", "DP-SGD", "tree aggregation"]
    assert [row["mechanism"] for row in rows] == [name for name in names for _ in range(2)]
    assert all(0 < float(row["accuracy"]) <= 1 for row in rows)
    runs = sorted(path.name for path in (output / "runs").iterdir())
    assert runs == ["bandmf_epsilon_4", "dp_sgd_epsilon_4", "tree_aggregation_epsilon_4"]
    for run in runs:
        document = _report(output / "runs" / run, tmp_path / "reports" / run)
        epsilon = json.dumps(document)
        assert "3.99" in epsilon or "4.0" in epsilon


def test_cifar10_runs_on_generated_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keras_cifar10, "_GENERATED_TRAINING", 40)
    monkeypatch.setattr(keras_cifar10, "_GENERATED_TEST", 20)
    monkeypatch.setattr(keras_cifar10, "_GENERATED_SIDE", 8)
    output = tmp_path / "cifar10"
    command = ["keras_cifar10", "--generated_images", f"--output={output}"]
    status = keras_cifar10.main([*command, "--epochs=2", "--batch_size=10", "--num_bands=2"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "made-up images" in printed.out
    model = tf.keras.models.load_model(output / "model.keras")
    assert model.count_params() > 250_000
    assert stat.S_IMODE((output / "secret").stat().st_mode) == stat.S_IRWXU
    _report(output, tmp_path / "report")

    assert keras_cifar10.main(command) == 2
    error = capsys.readouterr().err
    assert "finished run" in error
    assert error.count("\n") == 1


def test_the_network_of_cifar10_has_the_parameters_it_says():
    assert keras_cifar10.make_network((32, 32, 3)).count_params() == 550_570


def test_generated_images_are_small_and_balanced_and_repeat():
    images, labels = keras_cifar10.generate_images(500, seed=1)
    assert images.dtype == np.float32
    assert np.abs(images).max() <= 1
    assert np.bincount(labels, minlength=10).min() > 25
    np.testing.assert_array_equal(images, keras_cifar10.generate_images(500, seed=1)[0])


def test_a_model_of_keras_hub_is_fine_tuned_interrupted_and_reported(tmp_path, monkeypatch, capsys):
    pytest.importorskip("keras_hub")
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    monkeypatch.setattr(keras_hub_lora, "_SIZES", sizes)
    monkeypatch.setattr(keras_hub_lora, "_PUBLIC_BYTES", 2_000)
    data, output = tmp_path / "text", tmp_path / "lora"
    data.write_text("It is a truth universally acknowledged. " * 40)
    command = ["keras_hub_lora", f"--data={data}", f"--output={output}", "--length=16"]
    command += ["--batch_size=20", "--epochs=2", "--public_epochs=1", "--rank=2"]
    real, rounds = private_keras.PrivacyCallback.on_epoch_end, []

    def interrupted(self, epoch, logs=None):
        real(self, epoch, logs)
        rounds.append(self.model.optimizer.steps_done)
        if len(rounds) == 1:
            raise OSError("the machine went away")

    monkeypatch.setattr(private_keras.PrivacyCallback, "on_epoch_end", interrupted)
    assert keras_hub_lora.main(command) == 2
    assert "the machine went away" in capsys.readouterr().err
    base = (output / "preset" / "model.weights.h5").read_bytes()
    assert keras_hub_lora.main(command) == 0
    printed = capsys.readouterr().out
    assert "80 of " in printed
    assert rounds == [4, 8]
    assert (output / "preset" / "model.weights.h5").read_bytes() == base
    assert stat.S_IMODE((output / "secret").stat().st_mode) == stat.S_IRWXU
    document = _report(output, tmp_path / "report")
    assert document["epsilon"] <= 8
    assert document["unit"] == "example"
    assert keras_hub_lora.main(command) == 2
    assert "finished run" in capsys.readouterr().err
    missing = [f"--preset={tmp_path / 'nothing'}", f"--output={tmp_path / 'other'}"]
    assert keras_hub_lora.main(["keras_hub_lora", *missing]) == 2
    assert "nothing cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (keras_digits, [], "give --output"),
        (keras_digits, ["--output=x", "--epsilons=2,many"], "epsilons must be numbers"),
        (keras_digits, ["--output=x", "--epsilons=-1"], "epsilon must be"),
        (keras_digits, ["--output=x", "--batch_size=5000"], "at most"),
        (keras_digits, ["--output=x", "--epoch=2"], "did you mean --epochs?"),
        (keras_cifar10, ["--generated_images"], "give --output"),
        (keras_cifar10, ["--generated_images", "--output=x", "--epsilon=0"], "epsilon must be"),
        (keras_cifar10, ["--generated_images", "--output=x", "--batch_size=9999"], "at most"),
        (keras_cifar10, ["--generated_images", "--output=x", "--learning_rate=0"], "positive"),
        (keras_cifar10, ["--output=x", "--epochs=many"], "epochs must be a positive integer"),
        (keras_hub_lora, [], "give --output"),
        (keras_hub_lora, ["--output=x", "--learning_rate=-1"], "positive"),
        (keras_hub_lora, ["--output=x", "--data=y"], "data must be a text file|keras-hub is not"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, program, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert program.main(["program", *arguments]) == 2
    error = capsys.readouterr().err
    assert any(word in error.splitlines()[-1] for word in words.split("|"))
    assert "Traceback" not in error
    assert not list(tmp_path.glob("x/*"))


def test_missing_data_are_one_sentence(tmp_path, monkeypatch, capsys):
    def unreachable():
        raise Exception("URL fetch failure")  # What Keras raises.

    monkeypatch.setattr(tf.keras.datasets.cifar10, "load_data", unreachable)
    assert keras_cifar10.main(["keras_cifar10", f"--output={tmp_path}"]) == 2
    assert "use --generated_images" in capsys.readouterr().err
