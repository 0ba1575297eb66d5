"""What is drawn, clipped and protected is a user, where examples belong to users."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import cases
from bandmf_tf import keras as private_keras
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras.batches import SamplingError, make_batches
from bandmf_tf.keras.clipping import clipped_gradient_sum
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.runs.run_record import load_run_record
from cases import (
    DATASET_SIZE,
    MECHANISM,
    SAMPLING_SEED,
    flat,
    network,
    noise_rows,
    private_model,
)

BOUND = 3
RNG = np.random.default_rng(7)
IDS = RNG.permutation(np.repeat(np.arange(DATASET_SIZE), 1 + np.arange(DATASET_SIZE) % 6))
X = RNG.normal(size=(IDS.size, 4)).astype(np.float32)
X[:, 0] = np.arange(IDS.size)  # Says which example it is.
Y = RNG.integers(0, 3, IDS.size)


def users(ids=IDS, bound=BOUND, scale=1.0):
    examples = private_keras.group_by_user((scale * X, Y), ids, examples_per_user=bound)
    return make_batches(examples, MECHANISM, pinned_seed=SAMPLING_SEED)


@pytest.mark.parametrize("ids", [IDS, np.array([f"user {i}" for i in IDS])], ids=["int", "str"])
def test_a_row_holds_examples_of_one_user_and_no_more_than_the_bound(ids):
    pipeline, taken = users(ids), set()
    for batch in pipeline.dataset():
        is_example = batch.is_example.numpy()
        assert is_example.shape == (pipeline.padded_batch_size, BOUND)
        seen = []
        for row, there in zip(batch.examples[0].numpy(), is_example, strict=True):
            examples = row[there][:, 0].astype(int)
            assert not row[~there].any()  # Padding is of nobody.
            if examples.size:
                assert len(set(examples)) == examples.size
                (owner,) = set(IDS[examples])
                assert examples.size == min(BOUND, np.sum(owner == IDS))
                seen.append(owner)
            taken |= set(examples)
        assert len(set(seen)) == len(seen)
    assert np.unique(IDS[[*taken]]).size > DATASET_SIZE / 2
    # Of users with many examples, others come in other rounds.
    assert max(len(taken & set(np.flatnonzero(i == IDS))) for i in range(DATASET_SIZE)) > BOUND


def test_padding_of_a_row_that_fit_gets_is_of_the_same_user():
    for batch in users()._dataset_for_fit(0, 1, 0):
        for row in batch.examples[0].numpy()[:, :, 0].astype(int):
            assert len(set(IDS[row])) == 1


def test_users_are_clipped_as_one():
    """Brute force: the mean over the bound of a user's gradients, clipped to the whole norm."""
    pipeline = users(scale=0.1)
    model = private_model(learning_rate=1.0, batch_size=1)
    weights, rows = flat(model.get_weights()), noise_rows(model.trainable_variables)
    model.fit(pipeline, steps_per_epoch=1, verbose=0)
    reference, total, was_clipped = network(), np.zeros_like(weights), 0
    (batch,) = pipeline.dataset().take(1)
    for x, y, there in zip(*batch.examples, batch.is_example, strict=True):
        gradient = np.zeros_like(weights)
        for i in np.flatnonzero(there):
            with tf.GradientTape() as tape:
                loss = cases.classification_loss()(y[i : i + 1], reference(x[i : i + 1]))
            gradient += flat(tape.gradient(loss, reference.trainable_variables)) / BOUND
        norm = np.linalg.norm(gradient)
        was_clipped += norm > MECHANISM.l2_norm_clip
        total += gradient * min(1.0, MECHANISM.l2_norm_clip / max(norm, 1e-9))
    np.testing.assert_allclose(
        flat(model.get_weights()), weights - total - rows[0], rtol=1e-4, atol=1e-4
    )
    assert was_clipped
    assert model.optimizer.batch_sizes_seen()["largest"] == np.any(batch.is_example, axis=1).sum()


def test_pieces_replicas_and_chunks_keep_users_whole():
    results = []
    for options in ({}, {"accumulation_steps": 4}, {"chunk_size": 2}, {"replicas": True}):
        names = ["CPU:0", "CPU:1"] if options.pop("replicas", False) else ["CPU:0"]
        with tf.distribute.MirroredStrategy(names).scope():
            model = private_model(**options)
        model.fit(
            users(scale=0.1), steps_per_epoch=4 * options.get("accumulation_steps", 1), verbose=0
        )
        results.append(flat(model.get_weights()))
        assert model.optimizer.sampling_is_enforced
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=2e-5)


def test_record_and_report_are_of_users(tmp_path, capsys):
    """As long as `fit` drew them; a step on anything else ends it."""
    examples = private_keras.group_by_user((0.1 * X, Y), IDS, examples_per_user=BOUND)
    model, path = private_model(pinned_seed=None), tmp_path / "record.json"
    callback = private_keras.PrivacyCallback(path)
    model.fit(make_batches(examples, MECHANISM), steps_per_epoch=2, verbose=0, callbacks=[callback])
    record = load_run_record(path)
    assert (record.unit, record.examples_per_user, record.cautions) == ("user", BOUND, ())
    assert record.sampling_basis == "enforced"
    save_mechanism(MECHANISM, tmp_path / "mechanism.bandmf")
    out = tmp_path / "report"
    assert cases.run_tool(f"--run={tmp_path}", f"--output={out}") == 0
    assert cases.run_tool(f"--verify={out / 'report.json'}", f"--run={tmp_path}") == 0
    for name in ("report.html", "statement.txt", "statement.md", "deployment.yaml"):
        text = " ".join((out / name).read_text().split())
        assert "at the level of one user" in text
        assert f"at most {BOUND} of them" in text
    capsys.readouterr()
    model.train_on_batch(0.1 * X[:8], Y[:8])
    record = load_run_record(path)
    assert (record.unit, record.sampling_basis) == ("unknown", "assumed")
    assert record.cautions
    assert "Not all batches were drawn" in cases.refused(capsys, f"--run={tmp_path}")


def test_zeroing_one_example_of_a_user_moves_more_than_the_clip_norm():
    """Why a report on users must not be read as one on examples, nor the other way round."""
    weights = tf.Variable([0.0, 0.0])

    def loss(unit):
        return tf.linalg.matvec(unit, weights)

    clipped = [
        clipped_gradient_sum(
            loss, tf.constant(rows), [weights], 1.0, microbatch_size=2, is_user=True
        )
        .gradients[0]
        .numpy()
        for rows in ([[9.0, 0.0], [-3.0, 0.0]], [[0.0, 0.0], [-3.0, 0.0]])
    ]
    assert np.linalg.norm(clipped[0] - clipped[1]) == pytest.approx(2.0, rel=1e-4)


def test_a_run_does_not_go_on_with_other_units():
    model = private_model()
    model.fit(users(scale=0.1), steps_per_epoch=1, verbose=0)
    for other in (cases.batches(), users(bound=2)):
        with pytest.raises(SamplingError, match="another random partition"):
            model.fit(other, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_ids": IDS[1:]}, "one entry for each"),
        ({"user_ids": np.where(IDS == 3, np.nan, IDS)}, "Found float64"),
        ({"user_ids": np.where(IDS == 3, None, IDS)}, "Found NoneType, int"),
        ({"user_ids": IDS.astype(np.float32)}, "Found float32"),
        ({"user_ids": np.ma.masked_equal(IDS, 3)}, "masked"),
        ({"user_ids": [1, "1", *IDS[2:].tolist()]}, "Found int, str"),
        ({"examples_per_user": 0}, "examples_per_user"),
        ({"user_ids": np.arange(IDS.size)}, None),
    ],
    ids=str,
)
def test_groups_that_make_no_sense(change, message):
    arguments = {"user_ids": IDS, "examples_per_user": BOUND, **change}
    if message is None:  # Which is fine: everybody has one example.
        private_keras.group_by_user((X, Y), **arguments)
        return
    with pytest.raises(BandMFError, match=message):
        private_keras.group_by_user((X, Y), **arguments)


def test_names_that_numpy_would_cut_are_different_users():
    names = ["a", "a\0", *["b"] * (IDS.size - 2)]
    assert private_keras.group_by_user((X, Y), names, examples_per_user=1).num_users == 3


def test_microbatches_of_users():
    with pytest.raises(SamplingError, match="where users are drawn"):
        private_keras.SGD(MECHANISM, sampling=users(), microbatch_size=2)
