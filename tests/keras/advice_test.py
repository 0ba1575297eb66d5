"""What a careless user is told before or after a run that will not be what was meant."""

from __future__ import annotations

import numpy as np
import pytest

from bandmf_tf import keras as private_keras
from cases import (
    MECHANISM,
    NUM_ROUNDS,
    X,
    Y,
    batches,
    classification_loss,
    private_model,
    zero_loss,
)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ({"steps_per_epoch": 3, "epochs": 2}, "6 steps and the plan is for 12"),
        ({"steps_per_epoch": 4, "epochs": 3}, None),
        ({"epochs": 3}, None),
    ],
    ids=str,
)
def test_steps_that_do_not_match_the_plan(fit, message, caplog):
    private_model().fit(batches(), verbose=0, **fit)
    assert (message is None) == ("steps_per_epoch x epochs" not in caplog.text)
    assert message is None or message in caplog.text


def test_more_steps_than_the_plan_has(caplog):
    model = private_model()
    model.fit(batches(), steps_per_epoch=10, verbose=0)
    model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0)
    assert "4 steps and 2 of the plan are left" in caplog.text
    assert model.optimizer.steps_done == NUM_ROUNDS


@pytest.mark.parametrize(
    ("scale", "message"),
    [(1e-4, "smaller l2_norm_clip"), (1e4, "larger l2_norm_clip"), (0.4, None), (np.nan, "finite")],
)
def test_a_norm_that_clips_everything_or_nothing(scale, message, caplog):
    x = X.copy()
    x[0] *= np.nan if np.isnan(scale) else 1.0

    def loss(y_true, y_pred):
        return (1.0 if np.isnan(scale) else scale) * classification_loss()(y_true, y_pred)

    optimizer = private_keras.SGD(MECHANISM, 1e-6, batch_size=6, sampling="unchecked")
    model = private_model(lambda **_: optimizer, loss=loss)
    model.fit(np.tile(x, [2, 1]), np.tile(Y, 2), batch_size=10, verbose=0)
    told = [r.message for r in caplog.records if "private data" in r.message]
    if message is None:
        assert not told
    else:
        assert message in told[0]
        assert "not to be published" in told[0]
        assert f"Of {2 * len(X)} gradients" in told[0]
        assert f"and {2 if np.isnan(scale) else 0} not finite" in told[0]
        if not np.isnan(scale):
            assert f"gradients {2 * len(X) if scale > 1 else 0} were longer" in told[0]


@pytest.mark.parametrize(
    ("optimizer", "messages"),
    [
        ("SGD", {1e-6: "scale the rate up", 0.1: None, 1e4: "smaller rate"}),
        ("Adam", {1e-6: None}),
    ],
)
def test_a_rate_for_gradients_of_another_length(optimizer, messages, caplog):
    model = private_model(optimizer, loss=zero_loss)
    for rate, message in messages.items():
        caplog.clear()
        model.optimizer.learning_rate = rate
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        assert message is None or message in caplog.text
        assert message is not None or "their norm is" not in caplog.text
