"""Paths from a mechanism to releases: the noise stream, the DP queries, a restore, a kill.

Each function lets canaries go through the library's own objects, as a program would use them, and
returns what came out. Canaries come a thousand times longer than the clip norm wherever it is the
path that clips.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf._files import make_secret_folder
from bandmf_tf.audit.attack import AuditError, Canaries, Observation, Target, Undone
from bandmf_tf.mechanisms.files import load_mechanism, save_mechanism
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping, QuantileNorm
from bandmf_tf.noise.query import CorrelatedNoiseSumQuery, SuppliedNoiseSumQuery
from bandmf_tf.noise.stream import NoiseStream

# Length of a canary before it is clipped, in clip norms.
LENGTH = 1_000.0

_LONGEST_WAIT = 300.0  # Seconds for a child to start TensorFlow and draw its rows.


def specs_of(sizes: Sequence[int]) -> list[tf.TensorSpec]:
    """Returns tensors of these lengths."""
    return [tf.TensorSpec([size], tf.float32) for size in sizes]


def flat(tensors: Any) -> np.ndarray:
    """Returns a structure of tensors as one vector."""
    return np.concatenate([np.ravel(tensor) for tensor in tf.nest.flatten(tensors)])


def stream(canaries: Canaries) -> Observation:
    """`NoiseStream`: sums are made here, and its rows added."""
    rows = _rows(_stream(canaries.target, canaries.sizes), canaries.target.rounds)
    return canaries.observed(canaries.sums() + rows)


def restored_stream(canaries: Canaries) -> Observation:
    """`NoiseStream` that is saved, goes on, and is restored: what it gave in between was seen."""
    target, sums = canaries.target, canaries.sums()
    saved, lost = interruption(target.rounds)
    with tempfile.TemporaryDirectory() as folder:
        first = _stream(target, canaries.sizes)
        kept = _rows(first, saved)
        path = tf.train.Checkpoint(stream=first).write(
            os.fspath(make_secret_folder(Path(folder) / "secret") / "stream")
        )
        seen = _rows(first, lost - saved)
        second = _stream(target, canaries.sizes)
        tf.train.Checkpoint(stream=second).read(path).assert_consumed()
        rows = np.r_[kept, _rows(second, target.rounds - saved)]
    undone = Undone(saved, sums[saved:lost] + seen, sums[saved:lost])
    return canaries.observed(sums + rows, [undone])


def killed_stream(canaries: Canaries) -> Observation:
    """`NoiseStream` in a program that is killed (SIGKILL), and restored by another one: this."""
    target, sums = canaries.target, canaries.sums()
    saved, lost = interruption(target.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = make_secret_folder(Path(name) / "secret")
        save_mechanism(target.mechanism, folder / "mechanism.bandmf")
        (folder / "job.json").write_text(json.dumps([canaries.sizes, saved, lost]))
        first = _kill_at(folder, lost)
        second = _stream(target, canaries.sizes)
        path = os.fspath(folder / "stream")
        tf.train.Checkpoint(stream=second).read(path).assert_consumed()
        rows = np.r_[first[:saved], _rows(second, target.rounds - saved)]
    undone = Undone(saved, sums[saved:lost] + first[saved:lost], sums[saved:lost])
    return canaries.observed(sums + rows, [undone])


def state_query(canaries: Canaries) -> Observation:
    """`CorrelatedNoiseSumQuery`, with all noise in its state."""
    query = CorrelatedNoiseSumQuery.from_mechanism(
        canaries.target.mechanism, specs_of(canaries.sizes)
    )
    return _query(canaries, query, lambda state: state)


def supplied_query(canaries: Canaries) -> Observation:
    """`SuppliedNoiseSumQuery`, fed by a `NoiseStream`."""
    query = SuppliedNoiseSumQuery.from_mechanism(
        canaries.target.mechanism, specs_of(canaries.sizes)
    )
    rows = _stream(canaries.target, canaries.sizes)
    return _query(canaries, query, lambda state: query.supply_from(rows, state))


def adaptive_query(canaries: Canaries) -> Observation:
    """`CorrelatedNoiseSumQuery` whose clip norm adapts: the noised votes that move it are seen.

    All records are clipped and vote for a larger norm. So many are expected that the fraction of
    those that are not, which is cut to [0, 1], stays far from both ends and tells the votes.
    """
    mechanism, settings = canaries.target.mechanism, AdaptiveClipping(learning_rate=1.0)
    norm = QuantileNorm(settings, mechanism.l2_norm_clip)
    inverse = canaries.target.strategy.inverse_matmul(np.eye(canaries.target.rounds))
    deviation = mechanism.noise_multiplier * np.linalg.norm(inverse, axis=1).max()
    expected = 4.0 * canaries.included.sum() + 25.0 * deviation / settings.vote_weight
    query = CorrelatedNoiseSumQuery.from_mechanism(
        mechanism, specs_of(canaries.sizes), adaptive_clipping=settings, expected_records=expected
    )
    released, clips = _results(canaries, query, lambda state: state)
    rows = released * (norm.record_length / clips[:-1])
    fractions = settings.target_quantile - np.diff(np.log(clips), axis=0) / settings.learning_rate
    votes = 2 * norm.vote_length * expected * (fractions - 0.5)
    records = np.abs(canaries.target.pattern[:, None]) * canaries.included.sum()
    share = norm.record_length / canaries.target.clip
    seen, last = canaries.observed(rows), len(canaries.included)
    return dataclasses.replace(
        seen,
        released=np.c_[rows, votes],
        sums=np.c_[share * seen.sums, -norm.vote_length * records],
        patterns=share * seen.patterns,
        tensors={**seen.tensors, "vote": slice(last, last + 1)},
    )


def _query(canaries: Canaries, query: Any, supplied: Callable[[Any], Any]) -> Observation:
    return canaries.observed(_results(canaries, query, supplied)[0])


def _results(
    canaries: Canaries, query: Any, supplied: Callable[[Any], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the results of all rounds, and the clip norms before, between and after them."""
    included = tf.constant(np.flatnonzero(canaries.included), tf.int32)
    sizes, dimension = canaries.sizes, len(canaries.included)
    length = LENGTH * canaries.target.clip

    @tf.function(autograph=False)
    def clipped_sum(params: Any, sign: tf.Tensor) -> Any:
        """Returns the sample state of one record for each canary that is in."""

        def add(sample: Any, coordinate: tf.Tensor) -> Any:
            vector = tf.one_hot(coordinate, dimension, sign * length, 0.0)
            record = query.preprocess_record(params, tf.split(vector, sizes))
            return query.accumulate_preprocessed_record(sample, record)

        return tf.foldl(add, included, query.initial_sample_state())

    state, released = query.initial_global_state(), []
    clips = [query.derive_sample_params(state)]
    noised = tf.function(lambda *args: query.get_noised_result(*args)[:2], autograph=False)
    for sign in canaries.target.pattern:
        state = supplied(state)
        params = query.derive_sample_params(state)
        sample = query.initial_sample_state()
        if sign:
            sample = clipped_sum(params, tf.constant(sign, tf.float32))
        result, state = noised(sample, state)
        released.append(flat(result))
        clips.append(query.derive_sample_params(state))
    return np.array(released), np.array(clips, np.float64)[:, None]


def _stream(target: Target, sizes: Sequence[int]) -> NoiseStream:
    mechanism = target.mechanism
    return NoiseStream(mechanism.strategy, mechanism.stddev, specs_of(sizes))


def _rows(rows: NoiseStream, count: int) -> np.ndarray:
    drawn = [flat(rows.next_in_graph()) for _ in range(count)]
    return np.array(drawn).reshape(count, -1)


def interruption(rounds: int) -> tuple[int, int]:
    """Returns where a run is saved and how far it comes before it is lost; not at a block's end."""
    if rounds < 3:
        raise AuditError(f"A run that is interrupted has at least 3 rounds. Found {rounds}.")
    saved = rounds // 3
    return saved, max(saved + 1, 2 * rounds // 3)


def _kill_at(folder: Path, count: int) -> np.ndarray:
    """Runs `_work` in another process, kills it when it has released `count` rows; returns them."""
    code = "from bandmf_tf.audit import noise_paths as paths; paths.work_until_killed()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / "errors").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=environment, stderr=errors
        )
    try:
        deadline = time.monotonic() + _LONGEST_WAIT
        while not (folder / f"{count - 1}.npy").exists():
            if child.poll() is not None or time.monotonic() > deadline:
                words = (folder / "errors").read_text(errors="replace").strip().splitlines()[-1:]
                raise AuditError(f"The program to be killed ended before: {' '.join(words)}")
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    return np.array([np.load(folder / f"{number}.npy") for number in range(count)])


def work_until_killed() -> None:
    """Draws rows and releases them as files, saves the stream on the way, and never ends."""
    sizes, saved, lost = json.loads(Path("job.json").read_text())
    mechanism = load_mechanism("mechanism.bandmf")
    rows = NoiseStream(mechanism.strategy, mechanism.stddev, specs_of(sizes))
    for number in range(lost):
        if number == saved:
            tf.train.Checkpoint(stream=rows).write(os.path.abspath("stream"))
        row = flat(rows.next_in_graph())
        np.save(f"{number}.tmp.npy", row)
        os.replace(f"{number}.tmp.npy", f"{number}.npy")
    while True:
        time.sleep(60)
