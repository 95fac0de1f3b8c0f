"""What each kind of difference means for a resume: the table of `docs/plans.md` as code.

A checkpoint holds the weights and optimizer state of trained models, the position in the data, and samples
with their ids. A difference that makes one of these meaningless is refused. One that only changes their
placement needs resharding. All others change the results from the resume on, or nothing at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hflow.planner.diff.values import Rows, trained_models
from hflow.types.recorded import requestable_kinds


class Effect(enum.StrEnum):
    """The effect of resuming the checkpoint of one plan with another plan. The most severe is last."""

    SAME = "same"
    """Nothing to do, and the same results."""
    NEW = "new"
    """Allowed, but the results differ from here on."""
    RESHARD = "reshard"
    """Allowed after resharding weights and optimizer state."""
    REFUSE = "refuse"
    """The checkpoint, or its position in the data, would have another meaning."""


@dataclass(frozen=True)
class TrainedNames:
    """The names of what either of two plans trains, on which their checkpoints depend."""

    models: frozenset[str]
    """Models that are trained."""
    datasets: frozenset[str]
    """Datasets of trained streams."""
    streams: frozenset[str]
    """Trained streams."""
    sources: frozenset[str]
    """Nodes that open those streams."""
    is_rate_decayed: bool
    """Whether the learning rate of a trained model depends on the number of steps, in either plan."""


def trained_names(before: Rows, after: Rows) -> TrainedNames:
    """Return the names of what either plan trains."""
    streams = [s for rows in (before, after) for s in rows["graph"]["streams"] if s["trained"]]
    models = trained_models(before) | trained_models(after)
    settings = [setting for rows in (before, after) for setting in rows["settings"]]
    return TrainedNames(
        models=models,
        datasets=frozenset(stream["dataset"] for stream in streams if stream["dataset"]),
        streams=frozenset(stream["name"] for stream in streams),
        sources=frozenset(stream["source"] for stream in streams),
        is_rate_decayed=any(
            key == f"models.{model}.optim.schedule" and value != "constant"
            for model in models
            for key, value in settings
        ),
    )


SETTINGS: tuple[tuple[str, Effect], ...] = (
    ("seed", Effect.REFUSE),
    ("workers", Effect.SAME),
    ("data.TRAINED.*", Effect.REFUSE),
    ("models.TRAINED.path", Effect.REFUSE),
    ("models.TRAINED.architecture*", Effect.REFUSE),
    ("models.TRAINED.alphabet", Effect.REFUSE),
    ("models.TRAINED.lora.save_merged", Effect.SAME),
    ("models.TRAINED.lora*", Effect.REFUSE),
    ("models.*.tokens_per_microbatch", Effect.SAME),
    ("models.*.activation_checkpointing", Effect.SAME),
    ("models.*.offload_activations", Effect.SAME),
    ("models.*.offload", Effect.SAME),
    ("models.*.zero_stage", Effect.SAME),
    ("models.*.save_optimizer", Effect.SAME),
    ("models.*.gen.max_running", Effect.SAME),
    ("models.*.gen.cuda_graphs", Effect.SAME),
    ("models.*.gen.engine", Effect.SAME),
    ("models.*.gen.cache_gib", Effect.SAME),
    ("models.*.layout", Effect.SAME),
    ("models.*.group", Effect.SAME),
    ("models.*.backend", Effect.SAME),
    ("models.*.base_of", Effect.SAME),
    ("services.*.url", Effect.NEW),
    ("services.*.model", Effect.NEW),
    ("services.*", Effect.SAME),
)
"""Effects of settings by pattern; the first match counts, and all others are `new`. `TRAINED` matches names
of trained models and their datasets. Layouts, groups, backends and engines are `same` here, as the rows of
replicas show their effects."""

_SCHEDULE = {"max_concurrent": Effect.SAME, "max_refused_per_step": Effect.SAME}
_RECIPE = {"name": Effect.SAME, "dataset": Effect.REFUSE}
_NODE = {
    "name of the body": Effect.SAME,
    "shape": Effect.SAME,
    ".concurrency": Effect.SAME,
}


@dataclass(frozen=True)
class Difference:
    """Something that differs between two plans."""

    topic: str
    subject: str
    attribute: str
    is_unmatched: bool = False
    """Whether one of the plans has no such value."""


def effect_of(difference: Difference, trained: TrainedNames) -> Effect:
    """Return the effect of a difference, given the models that the plans train."""
    return (
        _FIXED[difference.topic]
        if difference.topic in _FIXED
        else _RULES[difference.topic](difference, trained)
    )


def _recipe(difference: Difference, trained: TrainedNames) -> Effect:
    return _RECIPE.get(difference.subject, Effect.NEW)


def _stream(difference: Difference, trained: TrainedNames) -> Effect:
    return Effect.REFUSE if difference.subject in trained.streams else Effect.NEW


def _model(difference: Difference, trained: TrainedNames) -> Effect:
    if difference.subject not in trained.models:
        return Effect.NEW
    return Effect.SAME if difference.attribute == "init_from" else Effect.REFUSE


def _shape(difference: Difference, trained: TrainedNames) -> Effect:
    """Ignore sizes that the planner knew for one plan only."""
    if difference.is_unmatched:
        return Effect.SAME
    return Effect.REFUSE if difference.subject in trained.models else Effect.NEW


def _node(difference: Difference, trained: TrainedNames) -> Effect:
    """Refuse other group sizes, as the ids of samples depend on them, and records that saved samples lack."""
    if difference.attribute == "group":
        return Effect.REFUSE
    options = {f".{kind.option}" for kind in requestable_kinds()}
    is_recorded = difference.attribute in options and not difference.is_unmatched
    if difference.subject in trained.sources and is_recorded:
        return Effect.REFUSE
    return _NODE.get(difference.attribute, Effect.NEW)


def _setting(difference: Difference, trained: TrainedNames) -> Effect:
    section, _, rest = difference.subject.partition(".")
    name, _, last = rest.partition(".")
    is_trained = name in (trained.models if section == "models" else trained.datasets)
    key = f"{section}.TRAINED.{last}" if is_trained else difference.subject
    return next((effect for pattern, effect in SETTINGS if fnmatchcase(key, pattern)), Effect.NEW)


def _schedule(difference: Difference, trained: TrainedNames) -> Effect:
    """Allow other numbers of steps; results differ only where the learning rate falls until the last one."""
    if difference.subject == "steps" and not trained.is_rate_decayed:
        return Effect.SAME
    return _SCHEDULE.get(difference.subject, Effect.NEW)


def _firing(difference: Difference, trained: TrainedNames) -> Effect:
    """Allow other `every` and `after`, which only nodes that save have here."""
    return Effect.SAME if difference.attribute else Effect.NEW


def _cluster(difference: Difference, trained: TrainedNames) -> Effect:
    return Effect.NEW if difference.subject == "device" else Effect.SAME


def _replica(difference: Difference, trained: TrainedNames) -> Effect:
    """Reshard trained models only: engines and frozen models are not in a checkpoint."""
    if difference.is_unmatched or difference.attribute not in ("", "backend"):
        return Effect.SAME
    model, _, role = difference.subject.partition("@")
    if model in trained.models and role != "gen":
        return Effect.RESHARD
    return Effect.NEW if difference.attribute == "backend" else Effect.SAME


_RULES: Mapping[str, Callable[[Difference, TrainedNames], Effect]] = {
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
