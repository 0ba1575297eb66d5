"""Paths through TensorFlow Federated: rounds of an aggregator of each of the two factories.

Every canary that is in is a client, whose update is a thousand times longer than the clip norm.
What the server hands on, times the planned number of clients, is what is released. A round in which
nobody takes part has one client, whose update is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bandmf_tf.audit.attack import Canaries, Observation
from bandmf_tf.audit.noise_paths import LENGTH, flat, specs_of
from bandmf_tf.federated import BandMFFactory, NoiseSupply
from bandmf_tf.federated.runtime import end_workers, set_local_context, tff


def state_factory(canaries: Canaries) -> Observation:
    """`BandMFFactory.in_state`."""
    factory = BandMFFactory.in_state(
        canaries.target.mechanism, clients_per_round=_clients_per_round(canaries)
    )
    return _aggregate(canaries, factory, lambda state: state)


def stream_factory(canaries: Canaries) -> Observation:
    """`BandMFFactory.from_stream`, fed by a `NoiseSupply`."""
    mechanism = canaries.target.mechanism
    factory = BandMFFactory.from_stream(mechanism, clients_per_round=_clients_per_round(canaries))
    supply = NoiseSupply(mechanism, specs_of(canaries.sizes))
    return _aggregate(canaries, factory, supply.supply)


def _aggregate(
    canaries: Canaries, factory: BandMFFactory, supplied: Callable[[Any], Any]
) -> Observation:
    set_local_context()
    try:
        value_type = tff.types.to_type(
            [tff.TensorType(np.float32, (size,)) for size in canaries.sizes]
        )
        process = factory.create(value_type)
        state, released = process.initialize(), []
        for sign in canaries.target.pattern:
            output = process.next(supplied(state), _updates(canaries, sign))
            state = output.state
            released.append(_clients_per_round(canaries) * flat(output.result).astype(np.float64))
    finally:
        end_workers()
    return canaries.observed(np.array(released))


def _clients_per_round(canaries: Canaries) -> int:
    return max(1, int(canaries.included.sum()))


def _updates(canaries: Canaries, sign: float) -> list[list[np.ndarray]]:
    ends = np.cumsum(canaries.sizes)[:-1]
    zero = np.zeros(len(canaries.included), np.float32)
    if not sign:
        return [np.split(zero, ends)]
    updates = []
    for coordinate in np.flatnonzero(canaries.included):
        update = zero.copy()
        update[coordinate] = sign * LENGTH * canaries.target.clip
        updates.append(np.split(update, ends))
    return updates
