"""The README's main job, after planning: train a federated model with the plan and two baselines.

    python -m production.demo --mechanism=demo/mechanism.bandmf --output=demo/run

Trains on real images of digits with clients that are reached at night and count rounds, three
times with the same privacy: with the planned mechanism, with tree aggregation and with independent
noise (DP-SGD). All runs have the same data, cohorts, clip norm and learning rates. The plan's
folder is a complete run folder; the comparison and its picture are written beside it.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path

from absl import app, flags

from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.cli import program
from bandmf_tf.cli.progress import Progress
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.strategies import Strategy, identity
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.mechanisms.files import load_mechanism, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.folder import RunFolder
from bandmf_tf.simulation.config import RunConfig

_MECHANISM = flags.DEFINE_string("mechanism", None, "Mechanism file of the plan.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the run.", required=True)
_CLIENTS = flags.DEFINE_integer("clients_per_round", 8, "Clients in a round.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("server_learning_rate", 0.1, "Peak rate of the server.")

_COMPARISON = "comparison"


def _with_strategy(mechanism: Mechanism, strategy: Strategy) -> Mechanism:
    """Returns the mechanism with another strategy and the same rho, so the same privacy."""
    found = mechanism.participation.sensitivity(strategy).value
    return Mechanism.create(
        strategy.scaled(mechanism.sensitivity.value / found),
        mechanism.workload,
        mechanism.participation,
        noise_multiplier=mechanism.noise_multiplier,
        l2_norm_clip=mechanism.l2_norm_clip,
        delta=mechanism.delta,
    )


def _config(mechanism: Mechanism, path: Path, output: Path) -> RunConfig:
    return RunConfig(
        mechanism=os.fspath(path),
        output=os.fspath(output),
        num_rounds=mechanism.num_rounds,
        clients_per_round=_CLIENTS.value,
        num_clients=4_000,
        server_learning_rate=_LEARNING_RATE.value,
        check_in_seconds=3_600.0,
        min_round_seconds=600.0,
        participation_recording="pseudonymous",
        evaluate_every=max(1, mechanism.num_rounds // 16),
        publish_every=mechanism.num_rounds,
    )


def _train(name: str, config: RunConfig) -> list[tuple[int, float]]:
    """Trains and returns the accuracy on the test set by round."""
    from bandmf_tf.simulation import training

    with training.FederatedTraining(config) as training:
        done = training.run.next_round
        with Progress(config.num_rounds, done, name=f"{name:>16}") as progress:
            training.train(progress.show)
    with RunFolder(Path(config.output)).metrics.open() as file:
        rows = [(int(row["round"]) + 1, row["test_accuracy"]) for row in csv.DictReader(file)]
    return [(number, float(text)) for number, text in rows if text != "nan"]


def _draw(curves: dict[str, list[tuple[int, float]]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="round", ylabel="accuracy on test images", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _run() -> None:
    program.quiet_imports()
    from bandmf_tf.simulation import training

    started = time.monotonic()
    training.prepare_runtime()
    mechanism = load_mechanism(_MECHANISM.value)
    output = Path(_OUTPUT.value)
    others = output.parent / _COMPARISON
    others.mkdir(parents=True, exist_ok=True)
    n = mechanism.num_rounds
    strategies = {"tree aggregation": TreeStrategy(n, "online"), "DP-SGD": identity(n)}
    planned = "BLT" if mechanism.strategy.kind == BufferedStrategy.kind else "BandMF"
    curves = {planned: _train(planned, _config(mechanism, Path(_MECHANISM.value), output))}
    for name, strategy in strategies.items():
        folder = others / name.lower().replace(" ", "_")
        path = others / f"{folder.name}.bandmf"
        if not path.exists():  # A mechanism file has a date; a continued run needs the same one.
            save_mechanism(_with_strategy(mechanism, strategy), path)
        curves[name] = _train(name, _config(mechanism, path, folder))
    title = (
        f"Same privacy: epsilon {round_up(mechanism.epsilon, 3):g} at delta "
        f"{exactly(mechanism.delta)}"
    )
    picture = others / "accuracy.png"
    _draw(curves, title, picture)
    print(f"\n{title} (zero-out neighbours); {_CLIENTS.value} clients a round, {n} rounds.")
    print(f"{'':18}test accuracy: final, best")
    for name, curve in curves.items():
        print(f"  {name:<16}{curve[-1][1]:8.3f} {max(value for _, value in curve):8.3f}")
    print(f"\nTook {time.monotonic() - started:.0f} seconds. Where to look:")
    print(f"  {picture}: accuracy by round")
    run = RunFolder(output)
    print(f"  {run.ledger}: what was released, hash-chained")
    print(f"  {run.released}: the model")
    print(f"  {run.metrics} and tensorboard --logdir={run.tensorboard}")
    print(f"  {run.secret}: owner only; checkpoints with the noise. Do not share.")


def main(argv: list[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line."""
    program.print_in_order()
    try:
        app.define_help_flags()
        program.refuse_repeated(flags.FLAGS)
        flags.FLAGS(list(sys.argv if argv is None else argv))
        _run()
    except (flags.Error, *program.EXPECTED) as error:
        print(f"error: {program.sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
