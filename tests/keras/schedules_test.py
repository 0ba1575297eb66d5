"""Training follows the learning rates that the strategy was optimised for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.factorization import workloads
from bandmf_tf.keras.schedules import WorkloadSchedule

WORKLOAD = workloads.sgd(8, momentum=0.9, learning_rates=np.linspace(1.0, 0.05, 8))


def test_rates_are_those_of_the_workload_and_the_last_one_stays():
    schedule = WorkloadSchedule(WORKLOAD, 0.5)
    found = [float(schedule(tf.constant(step, tf.int64))) for step in range(10)]
    expected = 0.5 * np.append(WORKLOAD.learning_rates, [0.05, 0.05])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _displacement(momentum: float) -> tuple[float, np.ndarray]:
    """Returns where Keras's SGD ends from zero, and the gradients on the way."""
    variable = tf.Variable(0.0)
    optimizer = tf.keras.optimizers.SGD(WorkloadSchedule(WORKLOAD, 2.0), momentum=momentum)
    gradients = np.random.default_rng(0).normal(size=8)
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient, tf.float32), variable)])
    return float(variable), gradients


def test_without_momentum_an_optimizer_moves_as_the_workload_says():
    found, gradients = _displacement(momentum=0.0)
    workload = workloads.sgd(8, learning_rates=WORKLOAD.learning_rates)
    assert found == pytest.approx(-2.0 * workload.matmul(gradients)[-1], rel=1e-5)


def test_with_momentum_keras_scales_gradients_before_they_enter_the_velocity():
    found, gradients = _displacement(momentum=0.9)
    constant = workloads.sgd(8, momentum=0.9)
    scaled = WORKLOAD.learning_rates * gradients
    assert found == pytest.approx(-2.0 * constant.matmul(scaled)[-1], rel=1e-5)
    assert found != pytest.approx(-2.0 * WORKLOAD.matmul(gradients)[-1], rel=1e-2)


def test_a_schedule_is_made_again_from_its_configuration():
    schedule = WorkloadSchedule(WORKLOAD, 0.5)
    optimizer = tf.keras.optimizers.SGD(schedule)
    again = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert float(again._learning_rate(3)) == float(schedule(3))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_factors_are_positive(factor):
    with pytest.raises(ValueError, match="factor"):
        WorkloadSchedule(WORKLOAD, factor)
