"""The configuration of a federated training run: one flat record, from YAML and flags.

Every field is a line of the YAML file and a flag of the program, under the same name; a flag wins.
All of it is checked, against its JSON schema and against the mechanism, before anything runs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import FixedEpochs
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.ledger import (
    CLOCK_REAL,
    CLOCK_SIMULATED,
    CLOCKS,
    RECORDING_NONE,
    RECORDINGS,
)
from bandmf_tf.simulation.population import DAY_SECONDS, Availability, ParticipationRule

TASKS = ("digits", "emnist", "shakespeare", "stackoverflow")
AGGREGATORS = ("stream", "state")
AVAILABILITIES = ("always", "diurnal")
SIMULATED, REGISTERED, DATA_SOURCE = CLIENTS = ("simulated", "registered", "data_source")

# Simulated time begins in 2024, and no ledger can write a year of five digits.
_LONGEST_SECONDS = 2.5e11


class ConfigError(BandMFError):
    """The configuration is invalid; the message names the field."""


def _field(default: Any, help_text: str, **schema: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, "schema": schema})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a federated training run does. `FIELDS` documents every field."""

    mechanism: str = _field("", "Mechanism file of the run.", minLength=1)
    output: str = _field("", "Folder of the run.", minLength=1)
    task: str = _field(
        "digits",
        f"One of {', '.join(TASKS)}, or module:function of a task of your own.",
        minLength=1,
    )
    data_file: str = _field("", "Text of plays for shakespeare; without it TFF's own data.")
    num_rounds: int = _field(100, "Number of rounds.", minimum=1)
    clients_per_round: int = _field(
        20, "Clients wanted in a round; the sum is divided by this number.", minimum=1
    )
    clients: str = _field(
        SIMULATED,
        "Who they are: simulated, registered (real time, kept apart by a participation registry), "
        "or data_source (real time, from a data source that the task has).",
        enum=list(CLIENTS),
    )
    clock: str = _field(
        "",
        "The clock that the run must have, real or simulated, which clients decide; else refused.",
        enum=["", *CLOCKS],
    )
    num_clients: int = _field(
        4_000, "Size of the simulated population, or of a registered one without names.", minimum=1
    )
    over_selection: float = _field(
        1.0, "So many times as many clients are invited as are wanted.", minimum=1, maximum=100
    )
    minimum_clients: int = _field(
        1, "An attempt at a round to which fewer come is discarded, and repeated.", minimum=1
    )
    round_attempts: int = _field(
        10, "After so many attempts at a round that too few came to, the program ends.", minimum=1
    )
    report_timeout_seconds: float = _field(
        0.0, "A round waits no longer for the clients that it has invited; 0 to wait.", minimum=0
    )
    dropout_fraction: float = _field(
        0.0,
        "Share of the invited simulated clients of whom nothing comes.",
        minimum=0,
        exclusiveMaximum=1,
    )
    examples_per_client: int = _field(20, "Examples of a client at most.", minimum=1)
    local_learning_rate: float = _field(0.1, "Learning rate on clients.", exclusiveMinimum=0)
    local_epochs: int = _field(1, "Passes over a client's data in a round.", minimum=1)
    local_batch_size: int = _field(10, "Batch size on clients.", minimum=1)
    server_learning_rate: float = _field(
        0.1, "Peak learning rate of the server.", exclusiveMinimum=0
    )
    server_momentum: float = _field(0.95, "Momentum of the server.", minimum=0, exclusiveMaximum=1)
    warmup_fraction: float = _field(
        0.15, "Share of the rounds with linear warm-up from 0.05.", minimum=0, maximum=1
    )
    cooldown_fraction: float = _field(
        0.25, "Share of the rounds with linear cool-down to 0.05.", minimum=0, maximum=1
    )
    zeroing: bool = _field(True, "Replace updates with a huge entry by zeros, as the paper does.")
    zeroing_norm: float = _field(
        10.0,
        "What is huge: an entry above this times the mechanism's clip norm.",
        exclusiveMinimum=0,
    )
    clip_quantile: float = _field(
        0.0,
        "The clip norm follows this quantile of the clients' norms, within the same guarantee, and "
        "begins with the mechanism's; 0 for a fixed one.",
        minimum=0,
        exclusiveMaximum=1,
    )
    clip_learning_rate: float = _field(
        0.2,
        "A round changes a clip norm that adapts by a factor of exp of this, at most.",
        exclusiveMinimum=0,
        maximum=1,
    )
    clip_vote_weight: float = _field(
        0.1,
        "Room for the estimate of the quantile, in clip norms; more with few clients.",
        exclusiveMinimum=0,
        maximum=0.5,
    )
    aggregator: str = _field(
        "stream",
        "Where past noise is kept: stream (in this program) or state (in TFF's; small models).",
        enum=list(AGGREGATORS),
    )
    availability: str = _field(
        "diurnal",
        "When clients can be reached: always, or diurnal (at night, plugged in, idle, unmetered).",
        enum=list(AVAILABILITIES),
    )
    plugged_in_hour: float = _field(
        22.0, "Mean local hour at which a diurnal client is plugged in.", minimum=0, maximum=24
    )
    plugged_in_hours: float = _field(
        8.0, "Mean number of hours for which it stays plugged in.", exclusiveMinimum=0
    )
    time_zone_hours: float = _field(
        3.0, "Clients' local times differ by up to so many hours.", minimum=0
    )
    idle_probability: float = _field(
        0.8,
        "Share of its days on which a plugged-in client is idle.",
        exclusiveMinimum=0,
        maximum=1,
    )
    unmetered_probability: float = _field(
        0.85, "Share of its days on an unmetered network.", exclusiveMinimum=0, maximum=1
    )
    check_in_seconds: float = _field(
        1_800.0, "Mean time between check-ins of a diurnal client.", exclusiveMinimum=0
    )
    min_round_seconds: float = _field(60.0, "Shortest round in simulated time.", exclusiveMinimum=0)
    timer_hours: float = _field(
        0.0, "Clients stay away for so long after they took part; 0 for no timer.", minimum=0
    )
    strict_separation: bool = _field(
        True, "Clients also count rounds and keep the mechanism's min_separation exactly."
    )
    misbehaving_fraction: float = _field(
        0.0, "Share of the clients that ignore timer and separation.", minimum=0, exclusiveMaximum=1
    )
    participation_recording: str = _field(
        RECORDING_NONE, "What the ledger tells of participants.", enum=list(RECORDINGS)
    )
    population_seed: int = _field(0, "Seed of population, data split and initial model.", minimum=0)
    pinned_noise_seed: int = _field(
        -1, "For tests only: a seed of 0 or more makes the noise predictable.", minimum=-1
    )
    publish_every: int = _field(10, "Publish the model after every so many rounds.", minimum=1)
    evaluate_every: int = _field(10, "Evaluate the model after every so many rounds.", minimum=1)

    def __post_init__(self) -> None:
        error = jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator(json_schema()).iter_errors(dataclasses.asdict(self))
        )
        if error is not None:
            name = ".".join(map(str, error.path)) or "configuration"
            raise ConfigError(f"{name} is invalid: {error.message}.")
        for field in dataclasses.fields(self):
            if str(field.type) == "float":
                value = float(getattr(self, field.name))
                if not math.isfinite(value):
                    raise ConfigError(f"{field.name} must be finite. Found {value}.")
                object.__setattr__(self, field.name, value)
        if self.warmup_fraction + self.cooldown_fraction > 1.0:
            raise ConfigError(
                "warmup_fraction and cooldown_fraction must sum to at most 1. Found "
                f"{self.warmup_fraction} + {self.cooldown_fraction}."
            )
        if self.task not in TASKS and ":" not in self.task:
            raise ConfigError(
                f"task must be one of {TASKS}, or module:function. Found {self.task!r}."
            )
        if self.clients != DATA_SOURCE and self.clients_per_round > self.num_clients:
            raise ConfigError(
                f"clients_per_round={self.clients_per_round} needs at least as many clients. Found "
                f"num_clients={self.num_clients}."
            )
        attempt = DAY_SECONDS + self.min_round_seconds + self.check_in_seconds
        longest = self.num_rounds * self.round_attempts * attempt
        if longest > _LONGEST_SECONDS:
            raise ConfigError(
                f"num_rounds={self.num_rounds} of min_round_seconds={self.min_round_seconds:g} "
                f"could last {longest:.3g} simulated seconds, until after the year 9999; plan for "
                f"{_LONGEST_SECONDS:g} at most."
            )
        self._check_clients()
        if not self.timer_hours and not self.strict_separation:
            raise ConfigError(
                "Clients must keep a timer (timer_hours above 0) or the separation in rounds "
                "(strict_separation); without either the mechanism's participation cannot hold."
            )

    def _check_clients(self) -> None:
        """Raises ConfigError where a field belongs to other clients than there are."""
        registered = "whose rounds the registry counts"
        source = "of whom the program knows nothing, not even who came"
        wrong = {
            SIMULATED: {},
            REGISTERED: {
                "timer_hours": (self.timer_hours > 0, registered),
                "strict_separation": (not self.strict_separation, registered),
                "misbehaving_fraction": (self.misbehaving_fraction > 0, registered),
                "dropout_fraction": (self.dropout_fraction > 0, "who drop out by themselves"),
            },
            DATA_SOURCE: {
                "over_selection": (self.over_selection > 1, source),
                "report_timeout_seconds": (self.report_timeout_seconds > 0, source),
                "misbehaving_fraction": (self.misbehaving_fraction > 0, source),
                "dropout_fraction": (self.dropout_fraction > 0, source),
                "participation_recording": (
                    self.participation_recording != RECORDING_NONE,
                    source,
                ),
            },
        }
        for name, (is_set, who) in wrong[self.clients].items():
            if is_set:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not for clients={self.clients}, {who}; "
                    "leave it at its default."
                )
        clock = CLOCK_SIMULATED if self.clients == SIMULATED else CLOCK_REAL
        if self.clock not in ("", clock):
            raise ConfigError(
                f"clock={self.clock} is not for clients={self.clients}, whose clock is {clock}; "
                "choose other clients, or leave it at its default."
            )
        if self.minimum_clients > self.clients_per_round:
            raise ConfigError(
                f"minimum_clients={self.minimum_clients} must be at most clients_per_round="
                f"{self.clients_per_round}."
            )

    @property
    def most_invited(self) -> int:
        """How many clients a round invites at most."""
        return math.ceil(self.clients_per_round * self.over_selection)

    @property
    def noise_seed(self) -> int | None:
        """The pinned seed of the noise; None draws it from the operating system."""
        return None if self.pinned_noise_seed < 0 else self.pinned_noise_seed

    @property
    def timer_seconds(self) -> float | None:
        """The clients' timer in seconds; None if they have none."""
        return self.timer_hours * 3_600.0 or None

    def stored(self) -> dict[str, Any]:
        """Returns what must stay the same when a run is continued: all but where its files are."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {n: value for n, value in values.items() if n not in ("mechanism", "output")}

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raises ConfigError unless the mechanism covers the run."""
        if mechanism.num_rounds < self.num_rounds:
            raise ConfigError(
                f"The mechanism covers num_rounds={mechanism.num_rounds} and the run has "
                f"{self.num_rounds}; plan a mechanism for all rounds or do fewer."
            )
        if mechanism.sampling is not None:
            raise ConfigError(
                "The mechanism's epsilon is amplified by sampling, which cross-device training "
                "cannot do: the server does not choose who is reachable. Plan one without sampling."
            )
        if isinstance(mechanism.participation, FixedEpochs):
            raise ConfigError(
                f"The mechanism needs that {mechanism.participation.describe()}, and clients come "
                "back when they can, at least so many rounds later; plan it with MinSeparation."
            )
        if self.clients == SIMULATED:
            self._check_population(self.participation_rule(mechanism))

    def _check_population(self, rule: ParticipationRule) -> None:
        """Raises ConfigError if even clients that are always reached could not fill the rounds."""
        most = min(rule.max_participations or self.num_rounds, self.num_rounds)
        needed = math.ceil(self.most_invited * self.num_rounds / most)
        reason = f"no client takes part in more than {most} of {self.num_rounds} rounds"
        apart = min(rule.min_separation or 1, self.num_rounds)
        if self.most_invited * apart > needed:
            needed = self.most_invited * apart
            reason = f"no client takes part twice in {apart} rounds"
        if self.num_clients < needed:
            invited = f", {self.most_invited} invited," if self.over_selection > 1 else ""
            raise ConfigError(
                f"num_clients={self.num_clients} cannot fill rounds of clients_per_round="
                f"{self.clients_per_round}{invited or ':'} {reason}, so at least {needed} clients "
                "are needed."
            )

    def participation_rule(self, mechanism: Mechanism) -> ParticipationRule:
        """Returns the rule that clients keep."""
        participation = mechanism.participation
        separation = None
        if self.strict_separation:
            separation = participation.separation(mechanism.num_rounds)
        return ParticipationRule(
            timer_seconds=self.timer_seconds,
            min_separation=separation,
            max_participations=participation.max_participations,
        )

    def availability_model(self) -> Availability | None:
        """Returns when clients can be reached; None for always."""
        if self.availability == "always":
            return None
        return Availability(
            plugged_in_hour=self.plugged_in_hour % 24.0,
            plugged_in_hours=self.plugged_in_hours,
            time_zone_hours=self.time_zone_hours,
            idle_probability=self.idle_probability,
            unmetered_probability=self.unmetered_probability,
            check_in_seconds=self.check_in_seconds,
            min_round_seconds=self.min_round_seconds,
        )


FIELDS: Mapping[str, dataclasses.Field] = types.MappingProxyType(
    {field.name: field for field in dataclasses.fields(RunConfig)}
)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a configuration."""
    kinds = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of a federated training run",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: {
                "type": kinds[str(field.type)],
                "description": field.metadata["help"],
                **field.metadata["schema"],
            }
            for name, field in FIELDS.items()
        },
    }


def load_config(
    path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Returns the configuration in a YAML file, with `overrides` (flags) in its place.

    Raises:
      ConfigError: A field is unknown, of the wrong type or out of range.
      OSError: The file cannot be read.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            first_line = str(error).splitlines()[0]
            raise ConfigError(f"{os.fspath(path)} is not a YAML file: {first_line}.") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{os.fspath(path)} must hold `name: value` lines.")
        values.update(loaded)
    values.update(overrides or {})
    unknown = sorted(map(str, values.keys() - FIELDS.keys()))
    if unknown:
        raise ConfigError(f"Unknown fields {unknown}; the fields are {sorted(FIELDS)}.")
    return RunConfig(**values)
