"""Epsilon is shown while training, and what happened is written down."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.accounting import (
    BallsInBins,
    BoundedPoissonSampling,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
)
from bandmf_tf.evidence.participation import ParticipationError
from bandmf_tf.evidence.reader import ReportRequest
from bandmf_tf.evidence.run_records import participation_of_record
from bandmf_tf.keras.batches import SamplingError
from bandmf_tf.keras.callbacks import shown_epsilon
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.report.document import make_report
from bandmf_tf.report.statement import statement_text
from bandmf_tf.runs.run_record import load_run_record
from cases import (
    MECHANISM,
    NUM_ROUNDS,
    STRATEGY,
    X,
    Y,
    batches,
    make_mechanism,
    network,
    private_model,
)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
    """A run of three epochs, and what it left behind."""
    folder = tmp_path_factory.mktemp("run")
    model = private_model(metrics=["accuracy"])
    callbacks = [
        private_keras.PrivacyCallback(folder / "record.json"),
        tf.keras.callbacks.TensorBoard(str(folder / "board")),
        tf.keras.callbacks.CSVLogger(str(folder / "log.csv")),
    ]
    history = model.fit(batches(), epochs=3, verbose=0, callbacks=callbacks).history
    return model, folder, history


EXPECTED = [epsilon_after(MECHANISM, t) for t in (4, 8, 12)]


def test_history_shows_epsilon_after_each_epoch(run):
    _, _, history = run
    assert history["epsilon"] == [shown_epsilon(epsilon) for epsilon in EXPECTED]
    assert {"loss", "accuracy"} < history.keys()


def test_tensorboard_shows_epsilon(run):
    _, folder, _ = run
    found = []
    for path in sorted((folder / "board").rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            found += [
                float(tf.make_ndarray(value.tensor))
                for value in event.summary.value
                if value.tag == "epoch_epsilon"
            ]
    np.testing.assert_allclose(found, [shown_epsilon(epsilon) for epsilon in EXPECTED], rtol=1e-6)


def test_the_progress_bar_shows_epsilon_after_every_step(capsys):
    model = private_model()
    model.fit(batches(), epochs=1, verbose=1, callbacks=[private_keras.PrivacyCallback()])
    shown = capsys.readouterr().out
    for t in (1, NUM_ROUNDS):
        assert f"epsilon: {shown_epsilon(epsilon_after(MECHANISM, t)):.4f}" in shown


@pytest.mark.parametrize(
    "epsilon",
    [0.0, 1.23e-5, 0.00012341, 0.00123401, 0.12341, 1.1, 1.23451, 7.9999993, 98.76541, 999.99991]
    + [1234.56781, 123456.1, np.inf],
)
def test_keras_never_shows_a_smaller_epsilon(epsilon):
    """Keras keeps it in float32, and prints four decimals, or of small numbers four and a power."""
    shown = np.float32(shown_epsilon(epsilon))
    printed = float(f"{shown:.4f}" if shown > 1e-3 else f"{shown:.4e}")
    assert epsilon <= printed <= max(epsilon + 1e-4, 1.001 * epsilon)


def test_the_record_says_what_happened(run):
    model, folder, _ = run
    record = load_run_record(folder / "record.json")
    assert record.mechanism_checksum == mechanism_checksum(MECHANISM)
    assert (record.rounds_completed, record.num_rounds) == (NUM_ROUNDS, NUM_ROUNDS)
    assert record.sampling == MECHANISM.sampling
    assert record.sampling_basis == "enforced"
    assert record.epsilon == MECHANISM.epsilon
    sizes = [len(batches().indices(i)) for i in range(NUM_ROUNDS)]
    assert record.batch_sizes_seen == {
        "smallest": min(sizes),
        "largest": max(sizes),
        "mean": pytest.approx(np.mean(sizes)),
    }
    assert record.batch_size == model.optimizer.batch_size
    assert len(record.cautions) == 2  # Both seeds were pinned, for this test,
    assert record.noise_source == "pinned"
    with pytest.raises(ParticipationError, match="noise is pinned"):  # so there is no guarantee.
        participation_of_record(record)
    observed = participation_of_record(dataclasses.replace(record, noise_source="system"))
    assert (observed.min_separation, observed.max_participations) == (3, 4)


def test_the_record_holds_no_metric_and_no_seed(run):
    _, folder, history = run
    text = (folder / "record.json").read_text()
    assert "accuracy" not in text
    assert f"{history['loss'][-1]:.5g}" not in text
    assert "seed" not in {key for key in json.loads(text) if key != "cautions"}


def test_a_run_that_nobody_watched_is_called_assumed(tmp_path):
    model = private_model(sampling="unchecked", pinned_seed=None)
    callback = private_keras.PrivacyCallback(tmp_path / "record.json")
    model.fit(X, Y, batch_size=30, verbose=0, callbacks=[callback])
    record = load_run_record(tmp_path / "record.json")
    assert (record.sampling, record.sampling_basis) == (None, "assumed")
    assert record.rounds_completed == 2
    assert record.epsilon < MECHANISM.epsilon
    assert "only assumed" in record.cautions[0]
    # A pipeline later in the run does not make up for it.
    model.fit(batches(), steps_per_epoch=1, verbose=0, callbacks=[callback])
    assert load_run_record(tmp_path / "record.json").sampling_basis == "assumed"


@pytest.mark.parametrize(
    "scheme",
    [
        BoundedPoissonSampling(NUM_ROUNDS, 3, 0.3, 9, len(X)),
        BallsInBins(NUM_ROUNDS, 4),
        SecretParts(NUM_ROUNDS, 3, 0.3),
        MinSeparationSampling(NUM_ROUNDS, 3, 0.15),
        OncePerEpoch(NUM_ROUNDS, 3, 8),
    ],
    ids=lambda scheme: scheme.kind,
)
def test_a_run_on_any_scheme_is_recorded_and_reported_with_its_confidence(scheme, tmp_path):
    mechanism = make_mechanism(STRATEGY, sampling=scheme, l2_norm_clip=0.7)
    save_mechanism(mechanism, tmp_path / "mechanism.bandmf")
    model = private_keras.make_private(network())
    model.compile(
        private_keras.SGD(mechanism, 0.1),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    with pytest.raises(SamplingError, match=r"epsilon of the mechanism assumes|do not keep"):
        model.fit(batches(None), verbose=0)
    callback = private_keras.PrivacyCallback(tmp_path / "record.json")
    pipeline = private_keras.make_batches((X, Y), mechanism)
    history = model.fit(pipeline, epochs=3, steps_per_epoch=4, verbose=0, callbacks=[callback])
    spent = history.history["epsilon"]
    assert spent[0] < spent[1]
    assert spent[2] == shown_epsilon(mechanism.epsilon)  # An upper bound before.
    record = load_run_record(tmp_path / "record.json")
    assert (record.sampling, record.sampling_basis, record.cautions) == (scheme, "enforced", ())
    assert (record.epsilon, record.batch_size) == (mechanism.epsilon, pipeline.batch_size)
    request = ReportRequest(
        mechanism=tmp_path / "mechanism.bandmf", participation=tmp_path / "record.json"
    )
    report, analysis = make_report(request)
    assert analysis.amplified.epsilon == mechanism.epsilon
    assert analysis.amplified.certificate == mechanism.guarantee.certificate
    certified = isinstance(scheme, RandomParticipation)
    assert report.failure_probability == (1e-12 if certified else None)
    text = statement_text(report)
    for words in (analysis.amplified.accounting, text.partition("1. DP setting")[0]):
        assert ("estimated with confidence 1 - 1e-12" in " ".join(words.split())) == certified
    assert analysis.plan_was_kept


@pytest.mark.keras2
def test_plain_models_show_epsilon_after_each_epoch():
    model = network()
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(private_keras.SGD(MECHANISM, batch_size=6, sampling="unchecked"), loss=loss)
    history = model.fit(
        X[:12],
        np.zeros((12, 3)),
        batch_size=6,
        epochs=2,
        verbose=0,
        callbacks=[private_keras.PrivacyCallback()],
    ).history
    assert history["epsilon"] == [shown_epsilon(epsilon_after(MECHANISM, t)) for t in (2, 4)]


def test_other_optimizers_are_refused():
    model = network()
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match="private optimizer"):
        model.fit(X, np.zeros((60, 3)), verbose=0, callbacks=[private_keras.PrivacyCallback()])
