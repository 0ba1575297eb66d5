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
from bandmf_tf.accounting.gaussian import gaussian_noise_multiplier
from bandmf_tf.cli import report
from bandmf_tf.mechanisms.files import load_mechanism
from examples import federated_text, keras_hub_lora, keras_images, patches, scattering
from examples.standardised import StandardisedConv2D


def _report(run: Path, output: Path) -> dict:
    assert report.main(["report", f"--run={run}", f"--output={output}"]) == 0
    return json.loads((output / "report.json").read_text())


def _images(*arguments: str) -> int:
    return keras_images.main(["keras_images", *arguments])


def test_mechanisms_are_compared_at_the_same_privacy(tmp_path, monkeypatch, capsys):
    # One run of each mechanism is enough to see that it trains.
    real = keras_images.train
    trained = []

    def train(setting, data, rate, seed):
        trained.append((setting.name, data.images, setting.momentum, rate, seed))
        assert setting.mechanism.workload.momentum == setting.momentum
        is_first = data.images == "test" and seed == 0
        without = setting.name == "dp_sgd" and setting.momentum == 0.0
        return real(setting, data, rate, seed) if is_first else rate / 10 + 0.01 * without

    monkeypatch.setattr(keras_images, "train", train)
    output = tmp_path / "digits"
    command = [f"--output={output}", "--epsilons=4", "--epochs=1", "--batch_size=128", "--runs=2"]
    command += ["--long_run_rates=1,2", "--mechanisms=bandmf,dp_sgd,tree,dense"]
    status = _images(*command)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    table = (output / "accuracy.md").read_text()
    assert table in printed.out
    assert (output / "accuracy.png").stat().st_size > 1_000
    # The rate that was better on images held out, and momentum unless it is better without.
    for run, momentum in (("bandmf", 0.9), ("dp_sgd", 0.0)):
        assert [done[1:] for done in trained if done[0] == run] == [
            ("held out", 0.9, 1, 0),
            ("held out", 0.9, 2, 0),
            ("held out", 0.0, 2, 0),
            ("test", momentum, 2, 0),
            ("test", momentum, 2, 1),
        ]
    with (output / "accuracy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["images"] == "test"]
    names = ["BandMF", "DP-SGD", "tree aggregation", "multi-epoch MF"]
    assert [row["mechanism"] for row in rows] == [name for name in names for _ in range(2)]
    for run in ("bandmf", "dp_sgd", "tree", "dense"):
        folder = output / "runs" / f"{run}_epsilon_4"
        epsilon = _report(folder, tmp_path / "reports" / run)["epsilon"]
        assert epsilon == pytest.approx(4.0, rel=0.01)
    # Runs that are done are not done again.
    trained.clear()
    assert _images(*command) == 0
    assert not trained


def test_an_interrupted_run_on_images_of_ones_own_goes_on(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(48, 8, 8), dtype=np.uint8), np.arange(48) % 10
    data, output = tmp_path / "data.npz", tmp_path / "mnist"
    np.savez(data, x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    command = ["--dataset=mnist", "--network=scattering", f"--data={data}", f"--output={output}"]
    command += ["--mechanisms=bandmf", "--epsilons=8", "--epochs=2", "--batch_size=10"]
    command += ["--long_run_rates=1", "--runs=1"]
    real, rounds = private_keras.PrivacyCallback.on_epoch_end, []

    def interrupted(self, epoch, logs=None):
        real(self, epoch, logs)
        rounds.append(self.model.optimizer.steps_done)
        if len(rounds) == 1:
            raise OSError("the machine went away")

    monkeypatch.setattr(private_keras.PrivacyCallback, "on_epoch_end", interrupted)
    assert _images(*command) == 2
    assert "the machine went away" in capsys.readouterr().err
    folder = output / "runs" / "bandmf_epsilon_8"
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == stat.S_IRWXU
    assert _images(*command) == 0
    assert rounds == [4, 8]
    assert not (folder / "secret").exists()
    assert _report(folder, tmp_path / "report")["epsilon"] <= 8


@pytest.mark.parametrize(
    ("make", "shape", "parameters"),
    [
        (keras_images.small_network, (28, 28, 1), 26_010),
        (keras_images.normalised_network, (28, 28, 1), 26_106),
        (keras_images.large_network, (32, 32, 3), 550_570),
    ],
)
def test_published_networks_have_the_parameters_they_say(make, shape, parameters):
    network = tf.keras.Sequential([tf.keras.layers.Input(shape), *make()])
    assert network.count_params() == parameters


@pytest.mark.parametrize(("size", "padding"), [(3, "same"), (4, "valid")])
def test_kernels_are_standardised_and_have_their_formula(size, padding):
    layer = StandardisedConv2D(6, size, strides=2, padding=padding)
    images = np.random.default_rng(0).normal(size=(5, 9, 8, 3)).astype(np.float32)
    private_keras.check_formula(layer, images)
    kernel = layer.standardised()[0].numpy()
    np.testing.assert_allclose(kernel.mean(axis=(0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(np.sum(kernel**2, axis=(0, 1, 2)), 1, rtol=1e-3)


def test_digits_stand_upright_in_the_middle_however_they_lean():
    rows, columns = np.indices((28, 28), np.float32)

    def stroke(slant, place):
        near = 1 - abs(columns - place - slant * (rows - 13.5)) / 4
        return np.maximum(0, near) * (abs(rows - 13.5) < 9)

    leaning = [stroke(*where) for where in ((-0.5, 12), (0.0, 13.5), (0.3, 15))]
    leaning = np.stack(leaning)[..., None]
    made = keras_images.upright(leaning)
    np.testing.assert_allclose(made, leaning[[1, 1, 1]], atol=0.15)
    # Nothing of one image depends on another, and an empty one stays empty.
    np.testing.assert_array_equal(keras_images.upright(leaning[2:]), made[2:])
    assert not keras_images.upright(np.zeros((1, 8, 8, 1), np.float32)).any()


def test_scattering_is_moduli_of_wavelets_and_local_means():
    images = np.random.default_rng(0).random((2, 8, 8), np.float32)
    channels = scattering._scatter(images[:, None])
    assert channels.shape == (2, 81, 2, 2)
    # By sums over the torus, without any Fourier transform but that of the filters.
    padded = np.pad(images[0], 4, mode="reflect")
    shape = padded.shape
    bell = np.outer(*(scattering.local_means(16)[0],) * 2)

    def convolved(image, kernel):
        rolled = [
            [np.roll(image, (y, x), (0, 1)) * kernel[y, x] for x in range(16)] for y in range(16)
        ]
        return np.sum(rolled, axis=(0, 1))

    def kernels(octave):
        return [np.fft.ifft2(wavelet) for wavelet in scattering.wavelets(shape, octave)]

    first = np.abs(convolved(padded, kernels(0)[3]))
    second = np.abs(convolved(first, kernels(1)[5]))
    for channel, modulus in ((0, padded), (1 + 3, first), (1 + 16 + 8 * 3 + 5, second)):
        np.testing.assert_allclose(channels[0, channel, 0, 0], np.sum(bell * modulus), rtol=1e-4)


def test_wavelets_see_no_brightness_and_features_are_of_one_image_alone():
    for octave in range(2):
        assert max(abs(wavelet[0, 0]) for wavelet in scattering.wavelets((16, 16), octave)) < 1e-6
    np.testing.assert_allclose(scattering.local_means(16).sum(axis=1), 1, rtol=1e-6)
    images = np.random.default_rng(0).random((3, 8, 8, 3), np.float32)
    together = scattering.scattering_features(images)
    assert together.shape == (3, 3 * 81 * 4)
    np.testing.assert_allclose(
        scattering.scattering_features(images[1:2])[0], together[1], atol=1e-4
    )


def test_a_first_save_that_was_cut_off_is_forgotten_and_later_ones_are_not(tmp_path):
    folder, keeps_two = (
        tmp_path / "run",
        hasattr(keras_images._backup(tmp_path), "double_checkpoint"),
    )
    folder.mkdir()
    (folder / "latest.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n cut off")
    (folder / "latest.weights.h5.bkp").write_bytes(b"whole")
    keras_images._backup(folder)
    assert folder.exists()
    (folder / "latest.weights.h5.bkp").unlink()
    keras_images._backup(folder)
    assert folder.exists() != keeps_two


def test_colours_are_brightness_and_what_differs_from_it():
    grey = np.random.default_rng(0).random((2, 8, 8, 1), np.float32)
    features = scattering.scattering_features(np.repeat(grey, 3, axis=-1)).reshape(2, 3, -1)
    np.testing.assert_allclose(features[:, 0], scattering.scattering_features(grey), atol=1e-3)
    np.testing.assert_allclose(features[:, 1:], 0.0, atol=1e-3)
    tinted = scattering.scattering_features(grey * np.array([1.0, 0.5, 0.2], np.float32))
    assert np.abs(tinted.reshape(2, 3, -1)[:, 1:]).max() > 0.1


def test_mirror_images_have_the_same_mirrored_features():
    images = np.random.default_rng(0).random((2, 12, 8, 3), np.float32)
    ours, theirs = (scattering.mirrored_features(i) for i in (images, images[:, :, ::-1]))
    assert ours.shape == (2, 3 * 81 * 3)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # Not because nothing is left, or because the features themselves were so.
    assert np.abs(ours[0] - ours[1]).max() > 0.1
    plain = [scattering.scattering_features(i) for i in (images, images[:, :, ::-1])]
    assert np.abs(plain[0] - plain[1]).max() > 0.1


def test_patch_features_are_mean_likeness_to_whitened_patches():
    image = np.random.default_rng(0).random((1, 32, 32, 3), np.float32)
    filters, offset = patches._filters()
    likeness = np.zeros((3, 3, 2, 256))
    for row in range(27):
        for column in range(27):
            patch = image[0, row : row + 6, column : column + 6].ravel()
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + 10 / 255**2)
            alike = patch @ filters - offset
            likeness[row // 9, column // 9] += np.maximum([alike - 1, -alike - 1], 0) / 81
    expected = (likeness + np.roll(likeness[:, ::-1], 128, axis=-1))[:, :2] / 2
    np.testing.assert_allclose(patches._likeness()(image)[0], expected, atol=1e-4)
    rows = patches._alike(np.concatenate([image, image[:, :, ::-1]]))
    assert rows.shape == (2, 3072)
    np.testing.assert_allclose(rows[0], rows[1], atol=0.02)
    np.testing.assert_allclose([rows.mean(), rows.std()], [0, 1], atol=1e-3)
    root = np.sqrt(expected.ravel())
    np.testing.assert_allclose(rows[0], (root - root.mean()) / root.std(), atol=0.02)
    for unlike in (image[..., :1], image[:, :7], np.repeat(image, 2, axis=1)):
        with pytest.raises(ValueError, match="three colours and 8 to 53 pixels"):
            patches.patch_features(unlike)


def test_patch_features_are_whitened_as_pieces_of_photographs_are(monkeypatch):
    seen = []

    def alike(images, real=patches._alike):
        seen.append(real(images))
        return seen[-1].copy()

    monkeypatch.setattr(patches, "_alike", alike)
    monkeypatch.setattr(patches, "_PIECES", 2)
    patches._whitening.cache_clear()
    images = np.random.default_rng(0).random((3, 10, 12, 3), np.float32)
    features = patches.patch_features(images)
    patches._whitening.cache_clear()
    # By angles, which no rotation changes.
    pieces, rows = seen
    assert len(pieces) == 2 * 2 * 4
    covariance = np.cov(pieces.T) + np.eye(3072)
    rows = rows - pieces.mean(axis=0)
    products = rows @ np.linalg.solve(covariance, rows.T)
    norms = np.sqrt(np.diag(products))
    angles = products / np.outer(norms, norms)
    np.testing.assert_allclose(features @ features.T / 3072, angles, atol=1e-4)
    assert np.abs(angles[np.triu_indices(3, 1)]).max() < 0.99


def test_means_are_private_and_clip_what_is_too_long():
    features = np.ones((100, 4), np.float32)
    features[0] = 1e6  # Counts as ones: no row is longer than 1 a coordinate.
    means = [
        keras_images.private_mean(features, keras_images.plan_mean(epsilon, 1e-6, 4))
        for epsilon in (1e3, 1e3, *[1.0] * 50)
    ]
    assert not np.array_equal(*means[:2])
    np.testing.assert_allclose(means[:2], 1.0, atol=0.01)
    # Clip norm 2 and the multiplier of one Gaussian release with epsilon 1 and delta 1e-6.
    expected = 2 * gaussian_noise_multiplier(1.0, 1e-6, 1.0) / 100
    assert np.std(means[2:]) == pytest.approx(expected, rel=0.25)


def test_noises_on_text_have_the_same_rho_and_the_better_of_two_rates(
    tmp_path, monkeypatch, capsys
):
    trained = []

    def train(mechanism, data, rate, seed, output):
        noise = Path(mechanism).parent.name
        trained.append((noise, rate, seed))
        assert not Path(output).exists()
        return [(8, rate / 2), (16, rate + seed / 100)]

    monkeypatch.setattr(federated_text, "train", train)
    command = ["federated_text", "--data=plays.txt", f"--output={tmp_path / 'text'}"]
    command += ["--num_rounds=16", "--rates=0.1,0.2", "--runs=2"]
    assert federated_text.main(command) == 0
    table = capsys.readouterr().out
    assert "| BandMF | 0.2 | 0.2150 ± 0.0050 |" in table
    noises = list(federated_text.NOISES)
    assert trained[:8] == [(noise, rate, 0) for noise in noises for rate in (0.1, 0.2)]
    assert trained[8:] == [(noise, 0.2, seed) for seed in (1, 2) for noise in noises]
    assert (tmp_path / "text" / "accuracy.png").stat().st_size > 1_000
    with (tmp_path / "text" / "accuracy.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * 2 * 2
    mechanisms = [
        load_mechanism(tmp_path / "text" / "runs" / noise / "mechanism.bandmf")
        for noise in federated_text.NOISES
    ]
    assert [m.rho for m in mechanisms] == pytest.approx([mechanisms[0].rho] * 4, rel=1e-4)
    assert federated_text.main([*command, "--noises=louder"]) == 2
    assert "noises must be some of" in capsys.readouterr().err
    # Runs of another privacy are not shown as if they had this one.
    assert federated_text.main([*command, "--epsilon=2"]) == 2
    assert "use another --output" in capsys.readouterr().err
    trained.clear()
    assert federated_text.main([*command[:-2], "--runs=1"]) == 0
    assert trained == [(noise, federated_text.NOISES[noise][2], 1) for noise in noises]


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
        (keras_images, [], "give --output"),
        (keras_images, ["--output=x", "--epsilons=2,many"], "epsilons must be positive numbers"),
        (keras_images, ["--output=x", "--epsilons=-1"], "epsilons must be positive numbers"),
        (keras_images, ["--output=x", "--long_run_rates=0"], "long_run_rates must be positive"),
        (keras_images, ["--output=x", "--batch_size=5000"], "at most"),
        (keras_images, ["--output=x", "--epoch=2"], "did you mean --epochs?"),
        (keras_images, ["--output=x", "--mechanisms=none"], "mechanisms must be some of"),
        (keras_images, ["--output=x", "--network=scattering"], "network must be one of dense"),
        (keras_images, ["--output=x", "--data=nowhere.npz"], "data must be a file of the arrays"),
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
    assert _images("--dataset=cifar10", f"--output={tmp_path}") == 2
    assert "by --data" in capsys.readouterr().err
