"""From a plan that chooses how batches are drawn to a report that holds, as a user goes."""

from __future__ import annotations

import json

import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf import load_mechanism
from bandmf_tf.accounting import RandomParticipation
from bandmf_tf.cli import plan, report
from bandmf_tf.keras.callbacks import shown_epsilon
from cases import X, Y, network


def test_a_plan_by_auto_trains_and_its_report_states_its_confidence_and_verifies(tmp_path, capsys):
    sizes = [f"--dataset_size={len(X)}", "--batch_size=12", "--num_rounds=8"]
    target = ["--epsilon=4", "--delta=1e-5", "--l2_norm_clip=0.7", f"--output={tmp_path}"]
    assert plan.main(["bandmf-plan", "--sampling=auto", *sizes, *target]) == 0
    assert "once_per_epoch" in capsys.readouterr().out
    mechanism = load_mechanism(tmp_path / "mechanism.bandmf")
    assert isinstance(mechanism.sampling, RandomParticipation)
    model = private_keras.make_private(network())
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(private_keras.SGD(mechanism, 0.1), loss)
    record = tmp_path / "run_record.json"
    batches = private_keras.make_batches((X, Y), mechanism)
    spending = private_keras.PrivacyCallback(record)
    history = model.fit(batches, epochs=2, steps_per_epoch=4, verbose=0, callbacks=[spending])
    assert history.history["epsilon"][-1] == shown_epsilon(mechanism.epsilon)

    flags = [f"--mechanism={tmp_path / 'mechanism.bandmf'}", f"--participation={record}"]
    folder = tmp_path / "report"
    assert report.main(["bandmf-report", *flags, f"--output={folder}"]) == 0
    stated = json.loads((folder / "report.json").read_text())
    assert (stated["failure_probability"], stated["epsilon"]) == (1e-12, mechanism.epsilon)
    text = " ".join((folder / "report.html").read_text().split())
    assert "estimated with confidence 1 - 1e-12" in text
    verify = f"--verify={folder / 'report.json'}"
    assert report.main(["bandmf-report", *flags, verify]) == 0
