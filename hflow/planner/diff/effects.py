"""What each kind of change means for a resume: the table of `docs/plans.md`, as code.

A checkpoint holds the weights and optimizer state of the trained models, the place in the data, and kept
samples with their ids. What makes one of these meaningless is refused; what only places it differently
means to reshard; the rest is as good before as after, or gives other numbers from here on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hflow.planner.diff.plan_rows import Rows, trained_models


class Effect(enum.StrEnum):
    """What a resume of the one plan's checkpoint under the other plan means, the gravest last."""

    SAME = "same"
    """Nothing to do, and the results are the same."""
    NEW = "new"
    """Allowed; results differ from here on."""
    RESHARD = "reshard"
    """Allowed once weights and optimizer state are cut anew."""
    REFUSE = "refuse"
    """The checkpoint, or its place in the data, would mean something else."""


@dataclass(frozen=True)
class Held:
    """What the checkpoints of two plans speak of."""

    models: frozenset[str]
    """Models that one of them trains."""
    datasets: frozenset[str]
    """Datasets that feed steps."""
    streams: frozenset[str]
    """Streams whose batches make steps."""
    sources: frozenset[str]
    """Nodes that open those streams."""


def held(before: Rows, after: Rows) -> Held:
    """What is trained in either plan."""
    streams = [s for rows in (before, after) for s in rows["graph"]["streams"] if s["trained"]]
    return Held(
        models=trained_models(before) | trained_models(after),
        datasets=frozenset(stream["dataset"] for stream in streams if stream["dataset"]),
        streams=frozenset(stream["name"] for stream in streams),
        sources=frozenset(stream["source"] for stream in streams),
    )


SETTINGS: tuple[tuple[str, Effect], ...] = (
    ("seed", Effect.REFUSE),
    ("workers", Effect.SAME),
    ("data.TRAINED.*", Effect.REFUSE),
    ("models.TRAINED.path", Effect.REFUSE),
    ("models.TRAINED.architecture*", Effect.REFUSE),
    ("models.TRAINED.alphabet", Effect.REFUSE),
    ("models.*.tokens_per_microbatch", Effect.SAME),
    ("models.*.activation_checkpointing", Effect.SAME),
    ("models.*.save_optimizer", Effect.SAME),
    ("models.*.gen.max_running", Effect.SAME),
    ("models.*.layout", Effect.SAME),
    ("models.*.group", Effect.SAME),
    ("models.*.backend", Effect.SAME),
)
"""Settings by pattern, the first that fits; all others are `new`. `TRAINED` stands for the name of a model
or dataset that is trained on. Layouts, groups and backends are `same` here, as a replica's row tells what
follows from them."""

_SCHEDULE = {"max_concurrent": Effect.SAME, "max_refused_per_step": Effect.SAME}
_RECIPE = {"name": Effect.SAME, "dataset": Effect.REFUSE}
_NODE = {
    "name of the body": Effect.SAME,
    "shape": Effect.SAME,
    ".concurrency": Effect.SAME,
}


@dataclass(frozen=True)
class Point:
    """Where two plans differ."""

    topic: str
    subject: str
    attribute: str
    is_lone: bool = False
    """Whether one of the plans has nothing of the kind."""


def effect_of(at: Point, both: Held) -> Effect:
    """What a difference means, given what the two plans train."""
    return _FIXED[at.topic] if at.topic in _FIXED else _RULES[at.topic](at, both)


def _recipe(at: Point, both: Held) -> Effect:
    return _RECIPE.get(at.subject, Effect.NEW)


def _stream(at: Point, both: Held) -> Effect:
    return Effect.REFUSE if at.subject in both.streams else Effect.NEW


def _model(at: Point, both: Held) -> Effect:
    if at.subject not in both.models:
        return Effect.NEW
    return Effect.SAME if at.attribute == "init_from" else Effect.REFUSE


def _shape(at: Point, both: Held) -> Effect:
    """Sizes that only one planner knew say nothing of the other's model."""
    if at.is_lone:
        return Effect.SAME
    return Effect.REFUSE if at.subject in both.models else Effect.NEW


def _node(at: Point, both: Held) -> Effect:
    """Ids of samples are made with the group's size."""
    if at.attribute == "group" and at.subject in both.sources:
        return Effect.REFUSE
    return _NODE.get(at.attribute, Effect.NEW)


def _setting(at: Point, both: Held) -> Effect:
    section, _, rest = at.subject.partition(".")
    name, _, last = rest.partition(".")
    is_trained = name in (both.models if section == "models" else both.datasets)
    key = f"{section}.TRAINED.{last}" if is_trained else at.subject
    return next((effect for pattern, effect in SETTINGS if fnmatchcase(key, pattern)), Effect.NEW)


def _schedule(at: Point, both: Held) -> Effect:
    return _SCHEDULE.get(at.subject, Effect.NEW)


def _firing(at: Point, both: Held) -> Effect:
    """`every` and `after` are facts of saving only."""
    return Effect.SAME if at.attribute else Effect.NEW


def _cluster(at: Point, both: Held) -> Effect:
    return Effect.NEW if at.subject == "device" else Effect.SAME


def _replica(at: Point, both: Held) -> Effect:
    """Engines and frozen models are copies: only what a checkpoint holds can be cut anew."""
    if at.is_lone or at.attribute not in ("", "backend"):
        return Effect.SAME
    model, _, role = at.subject.partition("@")
    if model in both.models and role != "gen":
        return Effect.RESHARD
    return Effect.NEW if at.attribute == "backend" else Effect.SAME


_RULES: Mapping[str, Callable[[Point, Held], Effect]] = {
    "recipe": _recipe,
    "stream": _stream,
    "model": _model,
    "shape": _shape,
    "node": _node,
    "setting": _setting,
    "schedule": _schedule,
    "firing": _firing,
    "cluster": _cluster,
    "replica": _replica,
}

_FIXED: Mapping[str, Effect] = {
    "edge": Effect.NEW,
    "cut": Effect.NEW,
    "staleness": Effect.NEW,
    **dict.fromkeys(("group", "placement", "order", "routing", "data", "weights"), Effect.SAME),
    **dict.fromkeys(("forecast", "hardware", "workload", "memory", "traffic", "time", "period"), Effect.SAME),
}
