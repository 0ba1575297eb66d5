"""The interface of DP queries, from whichever library the process has it.

TensorFlow Federated and TensorFlow Privacy take a query only if it is derived from their own base
classes: those of TensorFlow Privacy up to TFF 0.87, and TFF's own copy of them since it dropped
TensorFlow Privacy. Without both, the classes here have the same interface, so that queries work as
they do there. Nothing else of the library imports TensorFlow Privacy.
"""

from __future__ import annotations

import abc
import collections
import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

_TFF_COPY = "tensorflow_federated.python.aggregators.privacy.query"


class _DPQuery(abc.ABC):
    """Clips records, sums them and adds noise, without a state of its own.

    A round derives parameters from the global state, preprocesses every record with them, sums
    the results in a sample state, and turns that into a result and the next global state.
    """

    def initial_global_state(self) -> Any:
        """Returns the state before the first round."""
        return ()

    def derive_sample_params(self, global_state: Any) -> Any:
        """Returns what `preprocess_record` needs to know in this round."""
        del global_state
        return ()

    @abc.abstractmethod
    def initial_sample_state(self, template: Any = None) -> Any:
        """Returns the sample state of no records, for records like the template."""

    def preprocess_record(self, params: Any, record: Any) -> Any:
        """Returns what is summed for a record; runs where the record is."""
        del params
        return record

    @abc.abstractmethod
    def accumulate_preprocessed_record(self, sample_state: Any, preprocessed_record: Any) -> Any:
        """Returns the sample state with one more record."""

    def accumulate_record(self, params: Any, sample_state: Any, record: Any) -> Any:
        """Preprocesses a record and adds it to the sample state."""
        preprocessed = self.preprocess_record(params, record)
        return self.accumulate_preprocessed_record(sample_state, preprocessed)

    @abc.abstractmethod
    def merge_sample_states(self, sample_state_1: Any, sample_state_2: Any) -> Any:
        """Returns the sample state of the records of both."""

    @abc.abstractmethod
    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple[Any, Any, Any]:
        """Returns the result of the round, the next global state and the `DpEvent`."""

    def derive_metrics(self, global_state: Any) -> collections.OrderedDict[str, Any]:
        """Returns what may be shown of the state, by name."""
        del global_state
        return collections.OrderedDict()


class _SumAggregationDPQuery(_DPQuery):
    """A query whose sample state is the sum of preprocessed records."""

    def initial_sample_state(self, template: Any = None) -> Any:
        return tf.nest.map_structure(_zeros, template)

    def accumulate_preprocessed_record(self, sample_state: Any, preprocessed_record: Any) -> Any:
        return tf.nest.map_structure(
            lambda total, part: total if part is None else total + part,
            sample_state,
            preprocessed_record,
        )

    def merge_sample_states(self, sample_state_1: Any, sample_state_2: Any) -> Any:
        return tf.nest.map_structure(tf.add, sample_state_1, sample_state_2)


def _zeros(like: Any) -> tf.Tensor:
    if not isinstance(like, tf.TensorSpec):
        like = tf.convert_to_tensor(like)
    return tf.zeros(like.shape, like.dtype)


class _NormalizedState(NamedTuple):
    numerator_state: Any
    denominator: tf.Tensor


class _NormalizedQuery(_SumAggregationDPQuery):
    """Divides the result of a query by a number that depends on no record."""

    def __init__(self, numerator_query: _SumAggregationDPQuery, denominator: float):
        self._numerator = numerator_query
        self._denominator = denominator

    def initial_global_state(self) -> _NormalizedState:
        return _NormalizedState(
            self._numerator.initial_global_state(), tf.cast(self._denominator, tf.float32)
        )

    def derive_sample_params(self, global_state: _NormalizedState) -> Any:
        return self._numerator.derive_sample_params(global_state.numerator_state)

    def initial_sample_state(self, template: Any = None) -> Any:
        return self._numerator.initial_sample_state(template)

    def preprocess_record(self, params: Any, record: Any) -> Any:
        return self._numerator.preprocess_record(params, record)

    def get_noised_result(
        self, sample_state: Any, global_state: _NormalizedState
    ) -> tuple[Any, _NormalizedState, Any]:
        total, state, event = self._numerator.get_noised_result(
            sample_state, global_state.numerator_state
        )
        mean = tf.nest.map_structure(
            lambda t: t / tf.cast(global_state.denominator, t.dtype), total
        )
        return mean, _NormalizedState(state, global_state.denominator), event

    def derive_metrics(self, global_state: _NormalizedState) -> collections.OrderedDict[str, Any]:
        return self._numerator.derive_metrics(global_state.numerator_state)


def _tff_has_a_copy() -> bool:
    """Whether TFF brings the classes itself, found without importing it."""
    found = importlib.util.find_spec("tensorflow_federated")
    if found is None or found.origin is None:
        return False
    return Path(found.origin).parents[1].joinpath(*_TFF_COPY.split(".")).with_suffix(".py").exists()


def _provided() -> tuple[Any, Any]:
    name = _TFF_COPY if _tff_has_a_copy() else "tensorflow_privacy"
    try:
        module = importlib.import_module(name)
        return module.SumAggregationDPQuery, module.NormalizedQuery
    except (ImportError, AttributeError):  # The second: of a TensorFlow that is too new for it.
        return _SumAggregationDPQuery, _NormalizedQuery


SumAggregationDPQuery, NormalizedQuery = _provided()
