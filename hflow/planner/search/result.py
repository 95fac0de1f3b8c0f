"""`SearchResult`: the chosen plan as settings, and the candidates with the reason why each one is slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hflow.base.text import format_gib, format_ranges
from hflow.config.schema import ModelConfig, RunConfig
from hflow.planner.make.replicas import Devices, placement_name
from hflow.planner.plan.forecast import Candidate
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import PUBLISH_PREFIX
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.problem import PLACEMENT, with_place
from hflow.planner.search.replica_option import ReplicaOption

NUM_CANDIDATES = 10
MODEL_SETTINGS = ("tokens_per_microbatch", "activation_checkpointing", "offload", "zero_stage")
"""Settings of the replica that trains or infers; a generation replica has `gen.max_running`."""

Configured = TypeVar("Configured", PlanRequest, RunConfig)


@dataclass(frozen=True)
class SearchResult:
    """The choice of a search."""

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
    num_reasons: int = 0
    """Reasons of a run to refuse the plan, whatever its layouts."""
    backend: str = ""
    """The training backend of models that leave it open, with the reason for it; empty if none does."""
    warnings: tuple[str, ...] = ()
    """Warnings of the plan."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.candidates[0].seconds


def make_result(
    evaluator: Evaluator, choices: Sequence[Choice], num_tried: int, seconds: Mapping[Choice, float]
) -> SearchResult:
    """Return the result of a search: the best choices, the fastest first, with the seconds of a step."""
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
    request = replace(request, free=frozenset())
    num_reasons = evaluator.num_unrunnable(best.partition.blocks) or 0
    return SearchResult(request, overrides, rows, layouts, num_tried, num_reasons)


def placement_of(choice: Choice) -> str:
    """Return a choice as the setting `placement`."""
    items: dict[tuple[Devices, str], list[str]] = {}
    for option in choice.options:
        key = choice.devices_of(option.name), str(option.layout)
        items.setdefault(key, []).append(placement_name(option.name))
    return " ".join(
        f"{','.join(names)}={format_ranges(devices)}:{layout}" for (devices, layout), names in items.items()
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
    if (in_flight := evaluator.in_flight(choice)) != problem.request.schedule.max_concurrent:
        chosen["schedule.max_concurrent"] = in_flight
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


MIN_GAIN = 0.05
"""Share of a step below which a gain is not noticeable."""
SMALL = 0.02
"""Share of a step below which a part is not named."""


def reason(evaluator: Evaluator, choice: Choice, best: Choice, seconds: Mapping[Choice, float]) -> str:
    """Describe a division of the replicas: its groups, how much slower it is, and its slowest cycle."""
    waits = waiting(evaluator, choice)
    if choice is best:
        return f"{division(choice)}: shortest, {waits}"
    if not seconds[best]:
        return division(choice)
    slower = seconds[choice] / seconds[best] - 1
    return f"{division(choice)}: " + f"{slower:+.0%}".replace("%", " %") + f", {waits}"


def division(choice: Choice) -> str:
    """Return the replicas that share devices, as text."""
    blocks = [[placement_name(name) for name in block] for block in choice.partition.blocks]
    if len(blocks) == 1:
        return "all colocated"
    if all(len(block) == 1 for block in blocks):
        return "all apart"
    return " | ".join("+".join(block) for block in blocks)


def waiting(evaluator: Evaluator, choice: Choice) -> str:
    """Return the parts of a choice's slowest cycle."""
    source = evaluator.problem.events.stream.source
    parts = {name: choice.seconds.get(name, 0.0) for name in choice.cycle}
    large = {name: value for name, value in parts.items() if value > SMALL * choice.period}
    others = [name for name in large if name != source]
    longest = max(others, key=lambda name: large[name], default="")
    if source in large and longest:
        return f"generation waits for {_words(longest)}"
    if source in large:
        return "generation never waits"
    if len(others) == 1:
        return f"{_words(longest)} never waits"
    if not longest:
        return "idle"
    return f"{_words(longest)} takes {large[longest] / choice.period:.0%} of the step".replace("%", " %")


def layout_reasons(evaluator: Evaluator, choice: Choice) -> Iterator[tuple[str, str]]:
    """Yield each replica whose layout was chosen among several, with the reason for it."""
    problem, blocks = evaluator.problem, choice.partition.blocks
    for option in choice.options:
        if option.name in problem.layouts:
            continue
        if not problem.traits(option.name).is_model_parallel:
            reason = _reason_of_sets(evaluator, choice, option)
            if reason is not None:
                yield option.name, reason
            continue
        if option.replica.model not in problem.request.shapes:
            yield option.name, "data ranks alone, as its sizes are unknown"
            continue
        devices = evaluator.costed(option.name, blocks, choice.devices)
        table = evaluator.table.options(option.name, devices, with_too_large=True)
        simpler = [other for other in table if other.cuts < option.cuts]
        if not simpler:
            faster = any(other.cuts > option.cuts for other in table)
            yield option.name, "data ranks alone are fastest" if faster else "data ranks alone fit"
            continue
        other = min(simpler, key=lambda other: (-other.cuts, other.total))
        yield option.name, _too_large(evaluator, choice, other) or _faster(option, other)


def _reason_of_sets(evaluator: Evaluator, choice: Choice, option: ReplicaOption) -> str | None:
    """Return the reason for the size of a replicate axis; None if nothing else was possible."""
    devices = evaluator.costed(option.name, choice.partition.blocks, choice.devices)
    table = evaluator.table.options(option.name, devices, with_too_large=True, with_offload=True)
    others = [o for o in table if o.layout != option.layout and o.config == option.config]
    if not others or option.replica.model not in evaluator.problem.request.shapes:
        return None
    fastest, fewest = min(others, key=lambda o: o.total), min(others, key=lambda o: o.layout.replicate)
    is_replicated = option.layout.replicate > 1
    reasons = [_faster(option, fewest)] if is_replicated and option.total < fewest.total else []
    if fastest.total < option.total:
        reasons.append(_too_large(evaluator, choice, fastest) or f"{fastest.layout} leaves less memory")
    if reasons:
        return "; ".join(reasons)
    if is_replicated:
        return f"the step is shorter than with {fewest.layout}"
    if option.total < fastest.total:
        return _faster(option, fastest)
    return f"as fast as {fastest.layout}, with less memory"


def _too_large(evaluator: Evaluator, choice: Choice, other: ReplicaOption) -> str | None:
    """Return the memory that a replica would need with another layout; None if it fits."""
    problem, fit = evaluator.problem, evaluator.fullest(choice, other)
    device = other.replica.workers[0]
    if fit.total <= problem.memory_limit(device):
        return None
    limit = f"{problem.cluster.memory_of(device) / GIB:.1f}"
    return f"with {other.layout} {fit.phase} would need {format_gib(fit.total)} of {limit}"


def _faster(option: ReplicaOption, other: ReplicaOption) -> str:
    return f"{1 - option.total / other.total:.0%} faster than {other.layout}".replace("%", " %")


def _words(name: str) -> str:
    """Return the name of a node, or what happens to an engine's weights."""
    if name.startswith(PUBLISH_PREFIX):
        return f"publishing the weights of {name.removeprefix(PUBLISH_PREFIX)}"
    return f"new weights of {name}" if "@" in name else name
