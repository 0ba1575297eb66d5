"""The picture of an audit: scores of the attack, and its errors against what the claim allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy

from bandmf_tf import drawing
from bandmf_tf.audit.attack import Attack
from bandmf_tf.runs.audit_record import AuditRecord

_BINS = 60
_COLOURS = (drawing.BLUE, drawing.GREEN, drawing.AMBER, drawing.PINK, drawing.SKY, drawing.ORANGE)


def audit_picture(record: AuditRecord, attacks: Mapping[str, Attack]) -> bytes | None:
    """Returns scores and trade-off curves as PNG; None if no path was attacked by scores."""
    shown = {
        path.name: attacks[path.name]
        for path in record.paths
        if path.mu_lower is not None and attacks[path.name].errors.having
    }
    if not shown:
        return None
    with drawing.figure(10.0, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        _draw_scores(left, record, *next(iter(shown.items())))
        _draw_trade_off(right, record, shown)
        return drawing.png(figure)


def _draw_scores(axes: Any, record: AuditRecord, name: str, attack: Attack) -> None:
    scores = np.r_[attack.with_canary, attack.without]
    lowest, highest = np.quantile(scores, [0.0005, 0.9995])
    bins = np.linspace(lowest, highest, _BINS)
    options = {"bins": bins, "density": True, "alpha": 0.6}
    axes.hist(attack.without, color=drawing.GREY, label="without the canary", **options)
    axes.hist(attack.with_canary, color=drawing.BLUE, label="with it", **options)
    claimed = {"color": drawing.ORANGE, "linestyle": "--"}
    axes.plot(bins, scipy.stats.norm.pdf(bins), **claimed, label="claimed")
    axes.plot(bins, scipy.stats.norm.pdf(bins, record.claimed_mu), **claimed)
    axes.axvline(attack.threshold, color=drawing.DARK_GREY, linewidth=1)
    axes.set_xlabel("score")
    axes.set_ylabel("density")
    axes.set_title(f"Scores of the attack ({name})")
    axes.legend(loc="upper left", fontsize=8)


def _draw_trade_off(axes: Any, record: AuditRecord, shown: Mapping[str, Attack]) -> None:
    rates = np.linspace(0.0, 1.0, 401)
    allowed = scipy.stats.norm.cdf(scipy.stats.norm.isf(rates) - record.claimed_mu)
    axes.fill_between(rates, 0.0, allowed, color=drawing.ORANGE, alpha=0.15, linewidth=0)
    axes.plot(rates, allowed, color=drawing.ORANGE, linestyle="--", label="claimed")
    for number, (name, attack) in enumerate(shown.items()):
        thresholds = np.quantile(np.r_[attack.with_canary, attack.without], rates)
        positives = np.array([np.mean(attack.without > t) for t in thresholds])
        negatives = np.array([np.mean(attack.with_canary <= t) for t in thresholds])
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(positives, negatives, color=colour, linewidth=1, label=name)
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("false negative rate")
    axes.set_title("Errors, and the least that the claim allows")
    axes.legend(loc="upper right", fontsize=8)
