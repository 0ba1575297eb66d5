"""Every way in which Keras saves and restores brings the noise back, or is noticed."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import shutil
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.keras._compat import IS_KERAS_3
from bandmf_tf.keras.batches import SamplingError, make_batches
from bandmf_tf.keras.optimizers import PrivacyError
from cases import (
    MECHANISM,
    NUM_PARTS,
    NUM_ROUNDS,
    SAMPLING_SEED,
    X,
    Y,
    batches,
    classification_loss,
    flat,
    make_mechanism,
    network,
    private_model,
)

HALF = NUM_ROUNDS // 2
KINDS = ["banded", "blt"]


@functools.cache
def _mechanism(kind):
    if kind == "banded":
        return MECHANISM
    blt = BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.5]), NUM_ROUNDS)
    return make_mechanism(blt, sampling=BallsInBins(NUM_ROUNDS, NUM_PARTS), l2_norm_clip=0.7)


def _private_adam(kind="banded", **options):
    return private_model("Adam", mechanism=_mechanism(kind), **options)


def _train(model, pipeline=None, kind="banded"):
    pipeline = pipeline or make_batches((X, Y), _mechanism(kind), pinned_seed=SAMPLING_SEED)
    model.fit(pipeline, epochs=2, steps_per_epoch=HALF // 2, verbose=0)
    return flat(model.get_weights())


@functools.cache
def _weights_of_uninterrupted(kind):
    """The weights after half of the steps, and after all of them."""
    model = _private_adam(kind)
    return [_train(model, kind=kind), _train(model, kind=kind)]


@functools.cache
def _half(kind, **options):
    model = _private_adam(kind, **options)
    _train(model, kind=kind)
    return model


@pytest.fixture(name="half_trained", scope="module")
def _half_trained():
    return _half("banded")


def _checkpoint(model, folder, fresh):
    path = tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    tf.train.Checkpoint(model=fresh).read(path)
    return fresh


def _checkpoint_with_optimizer(model, folder, fresh):
    path = tf.train.Checkpoint(net=model, optimizer=model.optimizer).write(str(folder / "both"))
    tf.train.Checkpoint(net=fresh, optimizer=fresh.optimizer).read(path)
    return fresh


def _keras_file(model, folder, fresh):
    del fresh
    model.save(folder / "model.keras")
    return tf.keras.models.load_model(folder / "model.keras")


def _hdf5_file(model, folder, fresh):
    del fresh
    model.save(folder / "model.h5")
    return tf.keras.models.load_model(folder / "model.h5")


def _saved_model(model, folder, fresh):
    del fresh
    model.save(folder / "folder", save_format="tf")
    return private_keras.load_model(folder / "folder")


def _tensorflow_weights(model, folder, fresh):
    model.save_weights(str(folder / "weights"))
    fresh.load_weights(str(folder / "weights"))
    return fresh


def _keras_weights(model, folder, fresh):
    model.save_weights(folder / "model.weights.h5")
    fresh.load_weights(folder / "model.weights.h5")
    return fresh


WAYS = [
    _checkpoint,
    _checkpoint_with_optimizer,
    _keras_file,
    pytest.param(_hdf5_file, marks=pytest.mark.keras2),
    pytest.param(_saved_model, marks=pytest.mark.keras2),
    pytest.param(_tensorflow_weights, marks=pytest.mark.keras2),
    _keras_weights,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restore", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, restore, kind):
    model = restore(_half(kind), tmp_path, _private_adam(kind))
    after_half, after_all = _weights_of_uninterrupted(kind)
    assert model.optimizer.steps_done == HALF
    np.testing.assert_array_equal(flat(model.get_weights()), after_half)
    np.testing.assert_array_equal(_train(model, kind=kind), after_all)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restore", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_without_a_pinned_seed_future_noise_differs(tmp_path, restore, kind):
    """Two restores of one state must not add the same noise to what may be other data."""
    unpinned = _half(kind, pinned_seed=None)
    start = flat(unpinned.get_weights())
    rows = []
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        restored = restore(unpinned, folder, _private_adam(kind, pinned_seed=None))
        np.testing.assert_array_equal(flat(restored.get_weights()), start)
        restored._build_optimizer()
        assert int(restored.optimizer.noise_stream.round) == HALF
        rows.append(flat(restored.optimizer.noise_stream.next()))
    assert np.abs(rows[0] - rows[1]).max() > 1e-3
    assert np.abs(start - _weights_of_uninterrupted(kind)[0]).max() > 1e-3


@pytest.fixture(name="open_umask")
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_files_that_hold_noise_are_for_their_owner_only(half_trained, tmp_path):
    (tmp_path / "model.keras").touch(mode=0o666)  # A file that is overwritten keeps its mode.
    half_trained.save(tmp_path / "model.keras")
    half_trained.save_weights(tmp_path / "new.weights.h5")
    for name in ("model.keras", "new.weights.h5"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name
    assert os.umask(0) == 0


@pytest.mark.keras2
@pytest.mark.usefixtures("open_umask")
def test_files_of_older_formats_that_hold_noise_are_for_their_owner_only(half_trained, tmp_path):
    half_trained.save(tmp_path / "folder", save_format="tf")
    half_trained.save_weights(str(tmp_path / "weights"))
    half_trained.save_weights(tmp_path / "steps.h5")
    for name in ("folder", "folder/saved_model.pb", "weights.index", "steps.h5"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize(
    "write",
    [
        lambda model, folder: tf.keras.models.save_model(model, folder / "model.keras"),
        pytest.param(
            lambda model, folder: tf.keras.models.save_model(model, folder / "model.h5"),
            marks=pytest.mark.keras2,
        ),
        pytest.param(
            lambda model, folder: tf.keras.models.save_model(model, folder / "folder"),
            marks=pytest.mark.keras2,
        ),
        lambda model, folder: tf.saved_model.save(model, str(folder / "folder")),
        lambda model, folder: tf.saved_model.save(_Around(model), str(folder / "folder")),
        lambda model, folder: (folder / "pickle").write_bytes(pickle.dumps(model)),
        lambda model, folder: copy.deepcopy(model),
    ],
    ids=["keras", "h5", "tf", "saved_model", "nested", "pickle", "copy"],
)
def test_functions_that_would_write_noise_for_everybody_are_refused(half_trained, tmp_path, write):
    with pytest.raises(PrivacyError, match="save it with model"):
        write(half_trained, tmp_path)
    leaked = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert not leaked


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 brings optimizers back from such files.")
def test_old_hdf5_is_refused_and_takes_nothing_from_later_files(half_trained, tmp_path):
    with pytest.raises(BandMFError, match="Old HDF5 files bring no private optimizer back"):
        tf.keras.models.save_model(half_trained, tmp_path / "model.h5")
    half_trained.save(tmp_path / "model.keras")
    loaded = private_keras.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.steps_done == half_trained.optimizer.steps_done > 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_with_noise_is_not_copied(half_trained, duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled once it has noise"):
        duplicate(half_trained.optimizer)


@pytest.mark.keras2
def test_what_is_exported_for_serving_holds_weights_alone(half_trained, tmp_path):
    half_trained.export(str(tmp_path / "folder"))
    stored = tf.train.list_variables(str(tmp_path / "folder" / "variables" / "variables"))
    numbers = sum(np.prod(shape) for name, shape in stored if not name.startswith("_CHECK"))
    assert numbers == half_trained.count_params()


class _Around(tf.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.usefixtures("open_umask")
def test_the_folder_of_backups_is_for_its_owner_only(tmp_path):
    backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    model = private_model()
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(), epochs=4, verbose=0, callbacks=[backup, _Interrupt(4)])
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0


class _Interrupt(tf.keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        if self.model.optimizer.steps_done == self._step:
            raise KeyboardInterrupt


class TestBackupAndRestore:
    """Keras's callback restores after `fit` has begun; the pipeline must follow."""

    def _interrupted(self, folder, model, step, **options):
        backup = tf.keras.callbacks.BackupAndRestore(str(folder), **options)
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(), epochs=4, verbose=0, callbacks=[backup, _Interrupt(step)])

    def _restarted(self, folder, model, **options):
        backup = tf.keras.callbacks.BackupAndRestore(str(folder), **options)
        # A new process has a new pipeline; its partition is restored with the model.
        model.fit(batches(pinned_seed=99), epochs=4, verbose=0, callbacks=[backup])
        return flat(model.get_weights())

    @pytest.mark.parametrize("options", [{}, {"save_freq": 2}], ids=["epochs", "steps"])
    def test_it_goes_on_bit_for_bit(self, tmp_path, options):
        self._interrupted(tmp_path, private_model("Adam"), 8, **options)
        final = self._restarted(tmp_path, private_model("Adam"), **options)
        np.testing.assert_array_equal(final, _weights_of_uninterrupted("banded")[1])

    def test_without_a_pinned_seed_it_draws_new_noise(self, tmp_path):
        first = private_model("Adam", pinned_seed=None)
        self._interrupted(tmp_path / "a", first, 7)
        finals = []
        for name in ("b", "c"):
            shutil.copytree(tmp_path / "a", tmp_path / name)
            model = private_model("Adam", pinned_seed=None)
            finals.append(self._restarted(tmp_path / name, model))
        assert np.abs(finals[0] - finals[1]).max() > 1e-3


class TestLeftBehind:
    @pytest.mark.keras2
    @pytest.mark.parametrize("name", ["weights.hdf5", "weights"])
    def test_weights_without_noise_are_refused(self, half_trained, tmp_path, name):
        half_trained.save_weights(tmp_path / name, save_format="h5")
        model = private_model("Adam")
        model.load_weights(tmp_path / name)
        model.evaluate(X, Y, verbose=0)  # Using them is fine,
        with pytest.raises(PrivacyError, match="hold 6 private steps"):  # training is not.
            _train(model)
        with pytest.raises(PrivacyError, match="left the noise behind"):
            model.train_on_batch(X[:4], Y[:4])
        model.start_new_run()
        _train(model)

    def test_a_keras_weights_file_that_lost_its_noise_is_refused(self, half_trained, tmp_path):
        path = tmp_path / "model.weights.h5"
        half_trained.save_weights(path)
        with h5py.File(path, "a") as file:
            del file["optimizer"]
        model = private_model("Adam")
        model.load_weights(path)
        with pytest.raises(PrivacyError, match="left the noise behind"):
            _train(model)

    @pytest.mark.keras2
    def test_a_saved_model_loaded_by_keras_alone_is_refused(self, half_trained, tmp_path):
        half_trained.save(tmp_path / "folder", save_format="tf")
        model = tf.keras.models.load_model(tmp_path / "folder")
        with pytest.raises(PrivacyError, match="left the noise behind"):
            _train(model)

    @pytest.mark.keras2
    def test_a_model_saved_without_its_optimizer_is_refused(self, half_trained, tmp_path):
        half_trained.save(tmp_path / "folder", save_format="tf", include_optimizer=False)
        model = tf.keras.models.load_model(tmp_path / "folder", compile=False)
        model.compile(private_keras.Adam(MECHANISM, batch_size=6), loss="mse")
        with pytest.raises(PrivacyError, match="left the noise behind"):
            _train(model)

    def test_another_optimizer_is_not_called_a_restore(self):
        model = private_model()
        model.fit(batches(), steps_per_epoch=2, verbose=0)
        first = model.optimizer
        model.compile(private_keras.SGD(MECHANISM, 0.1, batch_size=6), loss=classification_loss())
        for train in (_train, lambda model: model.train_on_batch(X[:4], Y[:4])):
            with pytest.raises(PrivacyError, match=r"2 private .*compiled with another optimizer"):
                train(model)
        with pytest.raises(tf.errors.InvalidArgumentError, match="another optimizer, has left"):
            model.train_step((tf.constant(X[:4]), tf.constant(Y[:4])))
        model.compile(first, loss=classification_loss())
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        assert first.steps_done == 3

    def test_noise_of_another_mechanism_is_refused(self, half_trained, tmp_path):
        path = tf.train.Checkpoint(model=half_trained).write(str(tmp_path / "checkpoint"))
        other = make_mechanism(
            MECHANISM.strategy, sampling=MECHANISM.sampling, noise_multiplier=3.0, l2_norm_clip=0.7
        )
        model = private_model("Adam", mechanism=other)
        tf.train.Checkpoint(model=model).read(path)
        with pytest.raises(tf.errors.InvalidArgumentError, match="another mechanism"):
            _train(model)

    def test_another_partition_of_the_data_is_refused(self, half_trained, tmp_path):
        half_trained.save(tmp_path / "model.keras")  # Does not hold the pipeline.
        model = tf.keras.models.load_model(tmp_path / "model.keras")
        with pytest.raises(SamplingError, match="another random partition"):
            model.fit(make_batches((X, Y), MECHANISM), steps_per_epoch=1, verbose=0)

    def test_weights_of_a_public_model_are_a_fine_start(self, tmp_path):
        network().save_weights(tmp_path / "public.weights.h5")
        model = private_model("Adam")
        model.load_weights(tmp_path / "public.weights.h5")
        _train(model)
        assert model.optimizer.steps_done == HALF


class Subclass(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = tf.keras.layers.Dense(5, "relu"), tf.keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


def _subclass():
    return private_keras.make_private_model_class(Subclass)()


def _functional(*stack):
    x = outputs = tf.keras.Input((4,))
    for layer in stack:
        outputs = layer(outputs)
    return tf.keras.Model(x, outputs)


def _sequential(*stack):
    return tf.keras.Sequential([tf.keras.Input((4,)), *stack])


def _on_private(kind):
    """A model whose base was trained privately before."""
    base = private_model("Adam", model=kind(tf.keras.layers.Dense(3)))
    base.fit(batches(), steps_per_epoch=1, verbose=0)
    base.trainable = False
    model = private_keras.make_private(kind(base, tf.keras.layers.Dense(3)))
    model.start_new_run()
    return model


def _leaks(folder, secrets):
    contents = []
    for file in (path for path in folder.rglob("*") if path.is_file()):
        contents.append(file.read_bytes())
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents += map(archive.read, archive.namelist())
    assert sum(map(len, contents)) > 100
    return [secret for secret in secrets if any(secret in content for content in contents)]


@pytest.mark.parametrize(
    "make",
    [network, _subclass, lambda: _on_private(_sequential), lambda: _on_private(_functional)],
    ids=["sequential", "subclass", "on_sequential", "on_functional"],
)
def test_nothing_that_is_published_holds_noise_or_counts(make, tmp_path):
    model = private_model("Adam", model=make(), pinned_seed=None)
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    noise = [np.asarray(v).tobytes() for v in model.optimizer.noise_stream.variables]
    secrets = [b"private_steps", *(value for value in noise if len(set(value)) > 16)]
    assert len(secrets) > 1
    folders = [tmp_path / name for name in ("secret", "public")]
    for folder in folders:
        folder.mkdir()
    model.save_weights(folders[0] / "a.weights.h5")
    assert _leaks(folders[0], secrets) == secrets

    plain = None
    if isinstance(model, Subclass):
        with pytest.raises(TypeError, match=r"plain one .* to_public\(model, plain\)"):
            private_keras.to_public(model)
        plain = Subclass()
        plain(X[:1])
    public = private_keras.to_public(model, plain)
    np.testing.assert_array_equal(public.predict(X, verbose=0), model.predict(X, verbose=0))
    public.save(folders[1] / "a.keras")
    for name in ["a.weights.h5", *([] if IS_KERAS_3 else ["a.h5", "a"])]:
        public.save_weights(folders[1] / name)
    tf.train.Checkpoint(model=public).write(str(folders[1] / "checkpoint"))
    tf.saved_model.save(public, str(folders[1] / "folder"))
    assert not _leaks(folders[1], secrets)
    if plain is not None:
        other = Subclass()
        other(X[:1])
        other.load_weights(folders[1] / "a.weights.h5")
        np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_public_copy_of_a_subclass_has_all_weights_or_none():
    model = private_model("Adam", model=_subclass())
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    unbuilt, other, secret = Subclass(), Subclass(), Subclass()
    other.out = tf.keras.layers.Dense(2)
    secret.compile(private_keras.SGD(MECHANISM, batch_size=6), "mse")
    for plain in (other, secret):
        plain(X[:1])
    for plain, problem in (
        (unbuilt, "4 weights .* call it once. Found 0"),
        (other, "same order and shapes"),
        (secret, "nor compiled with a private optimizer"),
        (model, "neither private"),
    ):
        with pytest.raises(TypeError, match=problem):
            private_keras.to_public(model, plain)


def test_a_public_copy_holds_no_noise(half_trained, tmp_path):
    private_keras.to_public(half_trained).save(tmp_path / "at_once.keras")
    at_once = tf.keras.models.load_model(tmp_path / "at_once.keras")
    np.testing.assert_array_equal(at_once.predict(X, verbose=0), half_trained.predict(X, verbose=0))
    public = private_keras.to_public(half_trained)
    np.testing.assert_array_equal(public.predict(X, verbose=0), half_trained.predict(X, verbose=0))
    assert type(public) is tf.keras.Sequential
    public.save(tmp_path / "public.keras")
    size = (tmp_path / "public.keras").stat().st_size
    half_trained.save(tmp_path / "private.keras")
    assert size < (tmp_path / "private.keras").stat().st_size
    loaded = tf.keras.models.load_model(tmp_path / "public.keras")
    assert getattr(loaded, "optimizer", None) is None
