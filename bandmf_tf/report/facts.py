"""Facts that no evidence of a run holds: who, which model, when, with what around it.

A *facts file* (YAML) answers the questions that a reader of a published statement asks:

    model: next word prediction, en-GB
    owner: Example Ltd
    contact: privacy@example.org
    period: {first: 2026-03-01, last: 2026-05-17}
    tuning: 12 runs on public text
    pretraining_data: public web text
    secure_aggregation: no
    randomness: system
    code_commit: 5f2bc232aacdfb7b

What the evidence can show is compared with it, and a fact that contradicts it is refused. The rest
is the word of whoever wrote the file, and is called so. A question that the file does not answer is
an open question of the statement; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
from pathlib import Path
from typing import Any

from bandmf_tf._provenance import parse_time
from bandmf_tf.evidence.reader import UNIT_EXAMPLE, UNIT_USER, Evidence, ReportError
from bandmf_tf.report import strict_yaml
from bandmf_tf.runs.basis import SYSTEM
from bandmf_tf.runs.ledger import CLOCK_REAL

# What a statement asks, by the name of the fact: its title and the question.
QUESTIONS = {
    "model": ("Model", "Which model is this, and of which product?"),
    "owner": ("Owner", "Who is responsible for it?"),
    "contact": ("Contact", "Whom can people ask about it?"),
    "period": ("Period", "From when to when did training take place?"),
    "tuning": ("Tuning", "How were hyperparameters found, and on whose data?"),
    "pretraining_data": ("Pre-training data", "What was it trained on before, and is that public?"),
    "secure_aggregation": (
        "Secure aggregation",
        "Could the server see a single contribution, or sums alone?",
    ),
    "randomness": ("Generator of randomness", "What drew the noise?"),
    "code_commit": ("Code", "Which commit of the training program ran?"),
}
# What else a facts file may say: for the model's file, and for OpenDP's registry.
FURTHER = {
    "model_sha256": "SHA-256 of the published model",
    "purpose": "Purpose",
    "data": "Data",
    "region": "Region",
    "sector": "Sector",
    "data_source": "Data source",
    "actors": "Actors",
    "justification": "Justification",
    "further_use": "Further use of the same data",
    "published_at": "Published at",
    "author": "Author of the registry's entry",
}
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
DATA_SOURCES = ("Static", "Dynamic")

_CHOICES = {"sector": SECTORS, "data_source": DATA_SOURCES}
_PATTERNS = {
    "code_commit": (re.compile(r"[0-9a-f]{7,64}"), "7 to 64 hexadecimal digits"),
    "model_sha256": (re.compile(r"[0-9a-f]{64}"), "64 hexadecimal digits"),
}
_LONGEST = 600
_DAY = datetime.timedelta(days=1)


@dataclasses.dataclass(frozen=True)
class Fact:
    """One answer.

    Attributes:
      name: Which question, or what else, it answers.
      value: The answer in words.
      agrees_with: What in the evidence says the same; None if it is the operator's word alone.
    """

    name: str
    value: str
    agrees_with: str | None

    @property
    def title(self) -> str:
        """What the fact is called in words."""
        return QUESTIONS[self.name][0] if self.name in QUESTIONS else FURTHER[self.name]


def load_facts(path: Path, evidence: Evidence) -> tuple[Fact, ...]:
    """Returns the facts in a file, compared with the evidence.

    Raises:
      ReportError: The file cannot be read, or a fact is of the wrong type, or contradicts the
        evidence.
    """
    loaded = strict_yaml.load(path, (*QUESTIONS, *FURTHER))
    try:
        return tuple(
            _fact(name, loaded[name], evidence)
            for name in (*QUESTIONS, *FURTHER)
            if loaded.get(name) is not None  # A name without a value is a question still.
        )
    except ReportError as error:
        raise ReportError(f"{os.fspath(path)}: {error}") from error


def open_questions(facts: tuple[Fact, ...]) -> tuple[str, ...]:
    """Returns what nobody has answered, in sentences."""
    answered = {fact.name for fact in facts}
    return tuple(
        f"{title}: {question}"
        for name, (title, question) in QUESTIONS.items()
        if name not in answered
    )


def _fact(name: str, value: Any, evidence: Evidence) -> Fact:
    if name == "period":
        return _period(value, evidence)
    if name == "secure_aggregation" and isinstance(value, bool):
        value = "yes" if value else "no"
    if not isinstance(value, str):
        raise ReportError(f"{name} must be text; put it in quotes. Found {value!r}.")
    text = " ".join(value.split())
    if not text or len(text) > _LONGEST or not text.isprintable():
        raise ReportError(
            f"{name} must be printable text of 1 to {_LONGEST} characters. Found {value[:40]!r}."
        )
    if name in _CHOICES and text not in _CHOICES[name]:
        raise ReportError(f"{name} must be one of {', '.join(_CHOICES[name])}. Found {text!r}.")
    if name in _PATTERNS and not _PATTERNS[name][0].fullmatch(text):
        raise ReportError(f"{name} must be {_PATTERNS[name][1]}. Found {text!r}.")
    return Fact(name, text, _agreement(name, text, evidence))


def _agreement(name: str, text: str, evidence: Evidence) -> str | None:
    """Returns what in the evidence says the same; raises if something says otherwise."""
    if name == "randomness" and evidence.noise_multiplier is not None:
        # No evidence of another source than the operating system gets as far as here.
        if text != SYSTEM:
            raise ReportError(
                f"randomness is {text!r}, and by the evidence the noise was drawn from the "
                f"operating system; say {SYSTEM}, or correct the evidence."
            )
        return "the ledger" if evidence.ledger is not None else "the run record"
    if name == "secure_aggregation" and evidence.unit in (UNIT_EXAMPLE, UNIT_USER) and text != "no":
        raise ReportError(
            f"secure_aggregation is {text!r}, and by the run record there were no clients whose "
            "contributions could have been summed so; say no."
        )
    if name == "model_sha256" and evidence.ledger is not None:
        rounds = [r.round + 1 for r in evidence.ledger.records if r.model_digest == text]
        if not rounds:
            raise ReportError(
                f"model_sha256 is {text[:12]}.., and no model of the ledger has that digest; give "
                "the SHA-256 of a file in released/."
            )
        return f"the ledger, after round {rounds[-1]:,}"
    return None


def _period(value: Any, evidence: Evidence) -> Fact:
    if not isinstance(value, dict) or value.keys() != {"first", "last"}:
        raise ReportError(
            "period must have two dates, as in {first: 2026-03-01, last: 2026-05-17}. Found "
            f"{value!r}."
        )
    first, last = (_date(f"period.{name}", value[name]) for name in ("first", "last"))
    if last < first:
        raise ReportError(f"period ends on {last}, before it begins on {first}.")
    ledger, agrees_with = evidence.ledger, None
    if ledger is not None and ledger.header.clock == CLOCK_REAL and ledger.records:
        began = min(parse_time(record.start) for record in ledger.records).date()
        ended = max(parse_time(record.end) for record in ledger.records).date()
        # Dates of the ledger are UTC's; those of people are a day off at most.
        if abs(first - began) > _DAY or abs(last - ended) > _DAY:
            raise ReportError(
                f"period is {first} to {last}, and by the ledger the rounds were from {began} to "
                f"{ended}."
            )
        agrees_with = "the ledger"
    return Fact("period", f"{first} to {last}", agrees_with)


def _date(name: str, value: Any) -> datetime.date:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.date.fromisoformat(value)
    if type(value) is not datetime.date:  # A moment is a date as well, by inheritance.
        raise ReportError(f"{name} must be a date such as 2026-03-01. Found {value!r}.")
    return value
