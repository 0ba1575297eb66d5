"""Mechanisms inside the configuration of a Keras optimizer, which is JSON.

A saved model holds the whole mechanism, so that it can be loaded without the mechanism file: as the
bytes of such a file, compressed and in base64, verified like one when they are read. A DP query is
an object that no file holds; whoever loads a model that was trained with one hands it over again.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import dataclasses
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from bandmf_tf import _arrays, _checks
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import Strategy, restored_strategy
from bandmf_tf.mechanisms.files import decode_mechanism, encode_mechanism, mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping

_QUERY: contextvars.ContextVar[Any] = contextvars.ContextVar("query", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class BareMechanism:
    """A strategy and its noise without any statement of privacy.

    Attributes:
      strategy: C, as it is used.
      noise_multiplier: Standard deviation of z over the clip norm.
      l2_norm_clip: Clip norm of one example's contribution to one step.
    """

    strategy: Strategy
    noise_multiplier: float
    l2_norm_clip: float

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "l2_norm_clip"):
            object.__setattr__(self, name, _checks.positive_float(name, getattr(self, name)))

    @property
    def num_rounds(self) -> int:
        """Number of steps n."""
        return self.strategy.num_rounds

    @property
    def stddev(self) -> float:
        """Standard deviation of the entries of z."""
        return self.noise_multiplier * self.l2_norm_clip


def identity_of(mechanism: Mechanism | BareMechanism) -> int:
    """Returns a number that tells mechanisms apart, never 0."""
    if isinstance(mechanism, Mechanism):
        digest = bytes.fromhex(mechanism_checksum(mechanism))
    else:
        digest = hashlib.sha256(json.dumps(encoded(mechanism)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) | 1


def encoded(mechanism: Mechanism | BareMechanism) -> dict[str, Any]:
    """Returns the mechanism as JSON."""
    if isinstance(mechanism, Mechanism):
        return {"kind": "mechanism", "data": _text(encode_mechanism(mechanism))}
    stored, arrays = mechanism.strategy.stored()
    members = {f"{name}.npy": _arrays.npy(array) for name, array in arrays.items()}
    return {
        "kind": "bare",
        "data": _text(_arrays.pack(members)),
        "strategy": stored,
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_norm_clip": mechanism.l2_norm_clip,
    }


def decoded(config: Any) -> Mechanism | BareMechanism:
    """Returns the mechanism of a configuration, or the one that it already is."""
    if isinstance(config, Mechanism | BareMechanism):
        return config
    data = zlib.decompress(base64.b64decode(config["data"]))
    if config["kind"] == "mechanism":
        return decode_mechanism(data, "The mechanism of the configuration")
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    strategy = restored_strategy(config["strategy"], arrays)
    return BareMechanism(strategy, config["noise_multiplier"], config["l2_norm_clip"])


def encoded_source(
    mechanism: Any, query: Any, identity: int, adaptive_clipping: AdaptiveClipping | None
) -> dict[str, Any]:
    """Returns what a configuration says about where noise comes from."""
    if adaptive_clipping is not None:
        settings = dataclasses.asdict(adaptive_clipping)
        return {"mechanism": encoded(mechanism), "adaptive_clipping": settings}
    if query is None:
        return {"mechanism": encoded(mechanism)}
    return {"query": {"kind": type(query).__name__, "identity": identity}}


def decoded_source(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with the mechanism in it, or the query that was handed over."""
    described = config.get("query")
    if isinstance(config.get("adaptive_clipping"), dict):
        config = {**config, "adaptive_clipping": AdaptiveClipping(**config["adaptive_clipping"])}
    if described is None:
        return {**config, "mechanism": decoded(config["mechanism"])}
    query = _QUERY.get() if isinstance(described, dict) else described
    if query is None:
        raise BandMFError(
            f"The optimizer was made with a DP query ({described['kind']}), which no file holds; "
            "hand the same one over: bandmf_tf.keras.load_model(path, query=query)."
        )
    return {**config, "query": query}


@contextlib.contextmanager
def query_at_hand(query: Any) -> Iterator[None]:
    """Has configurations that were made with a query decoded with this one."""
    token = _QUERY.set(query)
    try:
        yield
    finally:
        _QUERY.reset(token)


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode("ascii")
