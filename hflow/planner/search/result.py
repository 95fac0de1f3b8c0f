"""`SearchResult`: the chosen plan as settings, and the candidates that it was compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hflow.config.schema import ModelConfig, RunConfig
from hflow.planner.cluster import device_ranges
from hflow.planner.forecast import Candidate
from hflow.planner.placement.replicas import Devices, placement_name
from hflow.planner.request import PlanRequest
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.problem import PLACEMENT, with_place
from hflow.planner.search.reasons import layout_reasons, reason

NUM_CANDIDATES = 10
MODEL_SETTINGS = ("tokens_per_microbatch", "activation_checkpointing", "offload")
"""Settings of the replica that trains or infers; a generation replica has `gen.max_running`."""

Configured = TypeVar("Configured", PlanRequest, RunConfig)


@dataclass(frozen=True)
class SearchResult:
    """What a search chose."""

    request: PlanRequest
    """The request with every choice made: nothing in it is free."""
    overrides: Mapping[str, Any]
    """The choices as keys of the configuration."""
    candidates: tuple[Candidate, ...]
    """The best plans that were compared, the chosen one first. Their seconds leave out what inputs move."""
    layouts: tuple[tuple[str, str], ...]
    """Replica whose layout was chosen -> the reason."""
    num_tried: int
    """Candidates that were looked at."""
    warnings: tuple[str, ...] = ()
    """What the plan should warn about."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.candidates[0].seconds


def make_result(
    evaluator: Evaluator, choices: Sequence[Choice], num_tried: int, seconds: Mapping[Choice, float]
) -> SearchResult:
    """Return the result of a search.

    Args:
        evaluator: made the choices.
        choices: the best ones, the fastest first.
        num_tried: candidates that were looked at.
        seconds: of a step with each choice.
    """
    best = choices[0]
    rows = tuple(
        Candidate(
            placement=placement_of(choice),
            settings=tuple(sorted(settings_of(evaluator, choice).items())),
            seconds=seconds[choice],
            memory_bytes=max(group.fit.total for group in choice.groups),
            why=reason(evaluator, choice, best, seconds),
        )
        for choice in choices[:NUM_CANDIDATES]
    )
    overrides = settings_of(evaluator, best)
    request = with_settings(evaluator.problem.request, overrides)
    if evaluator.problem.is_free(PLACEMENT):
        overrides = {PLACEMENT: placement_of(best), **overrides}
        request = replace(without_places(request), placement=placement_of(best))
    else:
        request = _with_layouts(evaluator, request, best)
    layouts = tuple(layout_reasons(evaluator, best))
    return SearchResult(replace(request, free=frozenset()), overrides, rows, layouts, num_tried)


def placement_of(choice: Choice) -> str:
    """Return a choice as the setting `placement`."""
    items: dict[tuple[Devices, str], list[str]] = {}
    for option in choice.options:
        key = choice.devices_of(option.name), str(option.layout)
        items.setdefault(key, []).append(placement_name(option.name))
    return " ".join(
        f"{','.join(names)}={device_ranges(devices)}:{layout}" for (devices, layout), names in items.items()
    )


def settings_of(evaluator: Evaluator, choice: Choice) -> dict[str, Any]:
    """Return the settings that a choice changes, by their key in the configuration."""
    problem = evaluator.problem
    chosen: dict[str, Any] = {}
    for option in choice.options:
        model, before = option.replica.model, problem.config(option.name)
        if option.replica.role == "gen":
            if option.config.gen.max_running != before.gen.max_running:
                chosen[f"models.{model}.gen.max_running"] = option.config.gen.max_running
            continue
        for name in MODEL_SETTINGS:
            if getattr(option.config, name) != getattr(before, name):
                chosen[f"models.{model}.{name}"] = getattr(option.config, name)
    if evaluator.table.in_flight != problem.request.schedule.max_concurrent:
        chosen["schedule.max_concurrent"] = evaluator.table.in_flight
    return chosen


def with_settings(target: Configured, settings: Mapping[str, Any]) -> Configured:
    """Return a request or a configuration with settings of models and of the schedule; others are ignored."""
    models, schedule = dict(target.models), target.schedule
    for key, value in settings.items():
        part, _, rest = key.partition(".")
        if part == "schedule":
            schedule = replace(schedule, **{rest: value})
        elif part == "models":
            model, _, name = rest.partition(".")
            models[model] = _set_model_key(models.get(model, ModelConfig()), name, value)
    return replace(target, models=models, schedule=schedule)


def without_places(target: Configured) -> Configured:
    """Return a request or a configuration without device groups, and without layouts of models."""
    models = {
        name: replace(config, group=None, layout=None, gen=replace(config.gen, group=None, layout=None))
        for name, config in target.models.items()
    }
    return replace(target, models=models, groups={})


def _set_model_key(config: ModelConfig, name: str, value: Any) -> ModelConfig:
    """Return a model's configuration with one key changed, such as `gen.max_running`."""
    if name.startswith("gen."):
        return replace(config, gen=replace(config.gen, **{name.removeprefix("gen."): value}))
    return replace(config, **{name: value})


def _with_layouts(evaluator: Evaluator, request: PlanRequest, choice: Choice) -> PlanRequest:
    """Return the request with the groups that were given and the layouts that were chosen."""
    problem, models = evaluator.problem, dict(request.models)
    for option in choice.options:
        model, group = option.replica.model, problem.given_places[option.name]
        models[model] = with_place(models.get(model, ModelConfig()), option.name, group, str(option.layout))
    return replace(request, models=models, groups=problem.given_groups)
