r"""Federated training on real text with four kinds of noise at the same privacy.

    python -m examples.federated_text --data=shakespeare.txt --output=text

The text is plays: a line `NAME:` after an empty line starts a speech. Every role is a client, whose
speeches teach an LSTM the next character; every tenth role is for testing. Clients keep apart and
come a limited number of times, so there is no sampling to amplify privacy. The noises are BandMF, a
BLT, tree aggregation and independent noise, all with the same rho for zero-out neighbours at the
level of a role, and with the same clients and clip norm. Each has a server learning rate of its
own; with several `--rates` to choose from, each is tried with one run that is not in the result.
Shown is the mean over several seeds (who comes when, and the initial model) with its standard
error.

Every run is one of `production.train_federated`, which goes on where it was stopped, and of which
`python -m tools.privacy_report --run=text/runs/bandmf/rate_1_seed_1 --output=report` makes a
report. An epsilon is that of one run: choosing a rate on private data would cost more.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import bandmf_tf as bm
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.cli.program import UsageError, run_program
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.runs.folder import RunFolder

# Strategy, name to show, and server learning rate; docs/results.md says how it was chosen.
NOISES = {
    "bandmf": ("banded", "BandMF", 1.0),
    "blt": ("blt", "BLT", 1.0),
    "tree": ("tree_online", "tree aggregation (online)", 0.6),
    "independent": ("identity", "independent noise", 0.6),
}
_MOMENTUM = 0.9
_SEPARATION = 10
_CLIP = 1.0
_DELTA = 1e-4

# Rounds done, and the accuracy then.
Curve = list[tuple[int, float]]


def plan(noise: str, epsilon: float, num_rounds: int) -> bm.Mechanism:
    """Returns the mechanism of one kind of noise, for clients that keep apart."""
    apart = MinSeparation(_SEPARATION, -(-num_rounds // _SEPARATION))
    return bm.plan_mechanism(
        bm.PlanRequest(
            workload=bm.sgd(
                num_rounds,
                momentum=_MOMENTUM,
                learning_rates=bm.factorization.warmup_cooldown_schedule(num_rounds),
            ),
            epsilon=epsilon,
            delta=_DELTA,
            l2_norm_clip=_CLIP,
            participation=apart,
            strategy=NOISES[noise][0],
            compare_dense=False,
        )
    ).mechanism


def train(mechanism: Path, data: str, rate: float, seed: int, output: Path) -> Curve:
    """Trains, or goes on, and returns the accuracy on test roles by round."""
    rounds = bm.load_mechanism(mechanism).num_rounds
    config = {
        "mechanism": mechanism,
        "output": output,
        "task": "shakespeare",
        "data_file": data,
        "num_rounds": rounds,
        "clients_per_round": 27,
        "num_clients": 270,
        "examples_per_client": 128,
        "local_batch_size": 16,
        "local_learning_rate": 5.0,
        "server_learning_rate": rate,
        "server_momentum": _MOMENTUM,
        "availability": "always",
        "participation_recording": "pseudonymous",
        "population_seed": seed,
        "publish_every": rounds,
        "evaluate_every": max(1, rounds // 8),
    }
    command = [sys.executable, "-m", "production.train_federated"]
    command += [f"--{name}={value}" for name, value in config.items()]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise UsageError(f"The run in {output} ended with status {status} and can be continued.")
    with RunFolder(output).metrics.open(encoding="utf-8") as file:
        rows = [
            (int(row["round"]) + 1, float(row["test_accuracy"])) for row in csv.DictReader(file)
        ]
    return [(number, accuracy) for number, accuracy in rows if not math.isnan(accuracy)]


def measure(
    values: flags.FlagValues, rates: list[float]
) -> tuple[dict[str, float], dict[str, list[Curve]]]:
    """Chooses learning rates by seed 0 and returns them with the runs of other seeds.

    Seed after seed, so that all noises have as many runs if it is stopped.
    """

    def run(noise: str, rate: float, seed: int, name: str) -> Curve:
        print(f"{noise}, rate {rate:g}, seed {seed}:", flush=True)
        mechanism = _mechanism(noise, values)
        return train(mechanism, values.data, rate, seed, mechanism.parent / name)

    def chosen(noise: str) -> float:
        if len(rates) < 2:
            return rates[0] if rates else NOISES[noise][2]
        return max(rates, key=lambda rate: run(noise, rate, 0, f"rate_{rate:g}")[-1][1])

    best = {noise: chosen(noise) for noise in values.noises}
    curves: dict[str, list[Curve]] = {noise: [] for noise in values.noises}
    for seed in range(1, 1 + values.runs):
        for noise, rate in best.items():
            curves[noise].append(run(noise, rate, seed, f"rate_{rate:g}_seed_{seed}"))
    return best, curves


def _mechanism(noise: str, values: flags.FlagValues) -> Path:
    """Returns the mechanism file of a noise; it has a date, and a continued run needs the same."""
    path = Path(values.output, "runs", noise, "mechanism.bandmf")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        bm.save_mechanism(plan(noise, values.epsilon, values.num_rounds), path)
    found = bm.load_mechanism(path)
    is_same = math.isclose(found.epsilon, values.epsilon, rel_tol=1e-3)
    if found.num_rounds != values.num_rounds or not is_same:
        raise UsageError(
            f"{path} has num_rounds={found.num_rounds} and epsilon {round_up(found.epsilon):g}, "
            f"for {values.num_rounds} and {exactly(values.epsilon)}; use another --output."
        )
    return path


def draw(curves: dict[str, list[Curve]], title: str, path: Path) -> None:
    """Draws accuracy by round, with error bars of two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for noise, runs in curves.items():
        rounds, accuracies = (np.array(runs)[..., i] for i in range(2))
        errors = 2 * accuracies.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else None
        label = NOISES[noise][1]
        axes.errorbar(
            rounds[0], accuracies.mean(axis=0), errors, marker="o", capsize=3, label=label
        )
    axes.set(xlabel="round", ylabel="accuracy on characters of test roles", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("data", None, "Text of plays.", **where)
    flags.DEFINE_string("output", None, "Folder for the table, the picture and the runs.", **where)
    flags.DEFINE_list("noises", list(NOISES), f"Some of {', '.join(NOISES)}.", **where)
    flags.DEFINE_float("epsilon", 8.0, "Epsilon of every run.", **where)
    flags.DEFINE_integer("num_rounds", 40, "Rounds of a run.", lower_bound=_SEPARATION, **where)
    flags.DEFINE_list("rates", [], "Server learning rates to choose from; a noise's own.", **where)
    flags.DEFINE_integer("runs", 3, "Runs with the best of them.", lower_bound=1, **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    started = time.monotonic()
    if not values.output or not values.data:
        raise UsageError("data must be a text and output a folder; give --data and --output.")
    if not values.noises or set(values.noises) - NOISES.keys():
        raise UsageError(
            f"noises must be some of {', '.join(NOISES)}. Found {','.join(values.noises)!r}."
        )
    try:
        rates = [float(rate) for rate in values.rates]
    except ValueError as error:
        raise UsageError(f"rates must be numbers. Found {','.join(values.rates)!r}.") from error
    best, curves = measure(values, rates)
    output, title = (
        Path(values.output),
        f"Same privacy: epsilon {exactly(values.epsilon)}, a role a client",
    )
    draw(curves, title, output / "accuracy.png")
    lines = ["| noise | server learning rate | accuracy |", "| --- | ---: | --- |"]
    with (output / "accuracy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["noise", "learning_rate", "seed", "round", "accuracy"])
        for noise, runs in curves.items():
            rate = best[noise]
            last = np.array([curve[-1][1] for curve in runs])
            error = f" ± {last.std(ddof=1) / np.sqrt(last.size):.4f}" if last.size > 1 else ""
            lines.append(f"| {NOISES[noise][1]} | {rate:g} | {last.mean():.4f}{error} |")
            for seed, curve in enumerate(runs, 1):
                writer.writerows([noise, f"{rate:g}", seed, *point] for point in curve)
    print(f"\n{title}, delta {exactly(_DELTA)}, zero-out neighbours; mean of {values.runs} runs.\n")
    print("\n".join(lines))
    print(
        f"\nTook {time.monotonic() - started:.0f} seconds. In {output}{os.sep}: accuracy.png and "
    )
    print("accuracy.csv, and runs/ with a mechanism and folders of runs.")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    usage = "Compares kinds of noise at the same privacy, in federated training on text.\n\nFlags:"
    return run_program("federated_text", usage, _define(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
