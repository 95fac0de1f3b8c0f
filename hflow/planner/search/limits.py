"""`throttles`: settings that make a step longer than it needs to be, and what would use idle devices.

Each remedy is tried: the plan is made again with one change. Where the planner chose, it chooses again on the
same devices, so that a user who sets what is named gains that much or more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hflow.base.errors import PlanError
from hflow.base.text import format_seconds, format_setting
from hflow.graph.ir import Graph
from hflow.graph.queries import trained_models
from hflow.planner.checks.unrunnable import runs_family
from hflow.planner.forecast.cost.nodes import EPISODES
from hflow.planner.forecast.cost.roofline import NETWORK
from hflow.planner.forecast.memory.capacity import MEMORY_MARGIN
from hflow.planner.make.replicas import replica_roles
from hflow.planner.plan.forecast import Forecast, Limit, Remedy
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import EngineChoice
from hflow.planner.plan.traits import traits
from hflow.planner.search.backends import backend_trials, layers_with
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.explore import explore
from hflow.planner.search.options import MAX_RUNNING
from hflow.planner.search.problem import PLACEMENT, SearchProblem
from hflow.planner.search.remedies import other_backends
from hflow.planner.search.result import (
    MIN_GAIN,
    MODEL_SETTINGS,
    placement_of,
    with_settings,
    without_places,
)
from hflow.planner.search.simulated import PeriodFunction, by_seconds
from hflow.types.kernels import FP8_NEEDS, LayerKernels

MUCH_IDLE = 0.3
"""Idle share of a step from which on devices count as idle."""
STALENESS = (1, 2, 4, 8)
"""Values of `max_staleness` to try for idle devices."""
PLACEMENT_BUDGET = 2000
"""Candidates when another placement is tried for idle devices."""


NUM_SIMULATED = 1
"""Candidates of a changed plan that are simulated where analytic periods are estimates: a plan of its own
compares more of them, so it may be faster than what is named here."""

Tried = tuple[Mapping[str, Any], float | None]
"""Settings, and the seconds of a step with them; None: they do not fit."""


@dataclass(frozen=True)
class Basis:
    """The inputs that a plan was made from, from which plans with other settings can be made."""

    graph: Graph
    request: PlanRequest
    """The request that the plan was compiled from, with its groups and layouts."""
    searched: PlanRequest | None = None
    """The request before the planner chose; it would choose again. None: it chose nothing."""
    simulate: PeriodFunction | None = None
    """Gives the seconds of a step where analytic periods are estimates."""
    engines: tuple[EngineChoice, ...] = ()
    """The engine of each replica that generates."""

    def is_chosen(self, key: str) -> bool:
        """Return whether the planner chose a setting."""
        return self.searched is not None and key in self.searched.free

    def period(self, settings: Mapping[str, Any], longest: float = math.inf) -> float | None:
        """Return the seconds of a step with other settings; None if no plan of less than `longest` fits."""
        base = self.searched or replace(self.request, free=frozenset())
        request = with_settings(replace(base, free=base.free - settings.keys()), settings)
        if self.searched is None:
            found = self._fastest(request, budget=1, margin=0.0, longest=longest)
        else:
            found = self._fastest(request, longest=longest)
        return None if found is None else found[1]

    def freed(self, key: str, longest: float) -> Tried:
        """Return the value that the planner would choose for a setting of a model that trains or infers."""
        base = self.searched or replace(self.request, free=frozenset())
        found = self._fastest(replace(base, free=base.free | {key}), longest=longest)
        if found is None:
            return {}, None
        _, model, name = key.split(".")
        choice, seconds = found
        configs = (o.config for o in choice.options if o.replica.model == model and o.replica.role != "gen")
        return {key: getattr(next(configs), name)}, seconds

    def elsewhere(self, longest: float) -> Tried | None:
        """Return the best placement with the same settings; None if no step takes less than `longest`."""
        free = replace(without_places(self.request), placement=None, free=frozenset({PLACEMENT}))
        found = self._fastest(free, longest=longest)
        return None if found is None else ({PLACEMENT: placement_of(found[0])}, found[1])

    def _fastest(
        self,
        request: PlanRequest,
        budget: int = PLACEMENT_BUDGET,
        margin: float = MEMORY_MARGIN,
        longest: float = math.inf,
    ) -> tuple[Choice, float] | None:
        try:
            evaluator = Evaluator(SearchProblem(self.graph, request, margin=margin))
            ranked = explore(evaluator, budget, longest=longest).ranked()
        except PlanError:
            return None
        return next(iter(by_seconds(evaluator, ranked, self.simulate, NUM_SIMULATED)), None)


def throttles(
    basis: Basis, forecast: Forecast, *, is_placed: bool = True, can_run: bool = True
) -> tuple[Limit, ...]:
    """Return the limits of a plan: settings, then devices that are idle for much of a step.

    Args:
        is_placed: whether the user has placed the replicas, so that another placement may be better.
        can_run: whether the plan runs. Then only what runs as well is named.
    """
    if forecast.missing or forecast.period is None:
        return ()
    before = forecast.candidates[0].seconds if basis.searched and forecast.candidates else basis.period({})
    if not before:
        return ()
    limits, longest = list(_controller(forecast, before)), before * (1 - MIN_GAIN)
    others = [*_engines(basis, can_run), *_parallel(basis, forecast, can_run)]
    for what, settings in others:  # with another backend other devices may be best
        limits += _tried(basis, what, settings, before)
    for key, value in _set_by_user(basis):
        what = f"{format_setting(key, value)} makes a step longer than the planner's own choice"
        limits += [Limit(what, (one,)) for one in _remedies([basis.freed(key, longest)], before)]
    if basis.searched and basis.is_chosen(PLACEMENT) and basis.searched.placement is None:  # for speed
        devices = re.sub(r":\S+", "", forecast.candidates[0].placement)
        basis = replace(basis, searched=replace(basis.searched, placement=devices))
    for what, settings in _changes(basis):
        limits += _tried(basis, what, settings, before)
    idle = [(lane, share) for lane, share in forecast.period.idle if share > MUCH_IDLE]
    if idle:
        shares = ", ".join(f"{lane} is idle for {share:.0%}".replace("%", " %") for lane, share in idle)
        tried = [*_staler(basis, before)]
        if is_placed and (other := basis.elsewhere(longest)) is not None:
            tried.append(other)
        lanes = tuple(lane for lane, _ in idle)
        limits.append(Limit(f"{shares} of a step", tuple(_remedies(tried, before)), lanes))
    for what, settings in _low_precision(basis):
        limits += _tried(basis, what, settings, before)
    return tuple(limits)


def _tried(basis: Basis, what: str, settings: Mapping[str, Any], before: float) -> list[Limit]:
    """Return a limit if the plan with some settings takes noticeably less than `before` seconds."""
    after = basis.period(settings, before * (1 - MIN_GAIN))
    return [Limit(what, (one,)) for one in _remedies([(settings, after)], before)]


def _controller(forecast: Forecast, before: float) -> Iterator[Limit]:
    """Yield the sources that wait for the controller, which handles a sample at a time."""
    for row in forecast.times:
        seconds = dict(row.parts).get(EPISODES, 0.0)
        if seconds > MIN_GAIN * before:
            more = f"{format_seconds(seconds)} longer, as the controller handles one sample after the other"
            yield Limit(f"{row.node} takes {more}", ())


def _remedies(tried: Iterable[Tried], before: float) -> Iterator[Remedy]:
    """Yield the settings that shorten a step of `before` seconds noticeably."""
    for settings, after in tried:
        if after is not None and after < before * (1 - MIN_GAIN):
            yield Remedy(tuple(settings.items()), 1 - after / before)


def _changes(basis: Basis) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the effect of a setting on the plan, and another value. The planner's own choice is no limit."""
    request = basis.request
    key, value = "schedule.max_concurrent", request.schedule.max_concurrent
    useful = _useful(basis, request.schedule.max_staleness)
    if useful > value and not basis.is_chosen(key):
        yield f"{key}={value} limits how many samples are generated at once", {key: useful}
    for model, role in replica_roles(basis.graph):
        key, value = f"models.{model}.gen.max_running", request.model(model).gen.max_running
        larger = [number for number in MAX_RUNNING if number > value]
        if role == "gen" and larger and not basis.is_chosen(key):
            what = f"{key}={value} limits how many sequences an engine decodes at once"
            yield what, {key: min(larger)}


def _set_by_user(basis: Basis) -> Iterator[tuple[str, Any]]:
    """Yield the settings, with their values, that were not left open for models that train or infer."""
    if basis.searched is None:
        return
    for model in dict.fromkeys(model for model, role in replica_roles(basis.graph) if role != "gen"):
        for name in MODEL_SETTINGS:
            if not basis.is_chosen(key := f"models.{model}.{name}"):
                yield key, getattr(basis.request.model(model), name)


def _parallel(basis: Basis, forecast: Forecast, can_run: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield backends that divide layers, but those that the planner chose against.

    Devices may be idle because a model that divides its data alone can use no more of them, whatever limits
    its own seconds. That is tried where the planner chose the plan.
    """
    assert forecast.period is not None
    slowest = max(forecast.period.cycle, key=lambda step: step.seconds).node
    limit = next((row.limit for row in forecast.times if row.node == slowest), None)
    trains = any(node.name == slowest and node.spec.verb == "train" for node in basis.graph.nodes)
    backends = {
        key: name for key, name in _usable_backends(basis, can_run) if not key.endswith(".gen.engine")
    }
    if basis.searched is None or not backends:
        return
    if any(trial.objection is None for trial in backend_trials(basis.graph, basis.searched)):
        return
    if trains and limit == NETWORK:
        yield f"{slowest} waits for the network for most of its seconds", backends
    elif any(share > MUCH_IDLE for _, share in forecast.period.idle):
        yield "models that are divided over data alone cannot use more devices well", backends
    else:
        names = " and ".join(dict.fromkeys(basis.request.model(_model_of(key)).backend for key in backends))
        yield f"{names} is slower than another backend", backends


def _low_precision(basis: Basis) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield FP8 where devices and programs have it. It changes results, so the planner never chooses it."""
    request, searched = basis.request, basis.searched
    if searched is None or request.cluster.parts or "fp8" not in request.hardware.device.tflops:
        return
    changes = "would be faster in FP8, which changes results"
    for engine in basis.engines:
        model = engine.replica.partition("@")[0]
        for setting, precision in traits(engine.engine).precisions:
            if getattr(request.model(model).gen, setting) is None:
                yield f"{engine.replica} {changes}", {f"models.{model}.gen.{setting}": precision}
    for model in trained_models(basis.graph):
        if (recipe := _fp8_recipe(model, request)) is not None:
            yield f"{model}@train {changes}", {f"models.{model}.fp8": recipe}


def _fp8_recipe(model: str, request: PlanRequest) -> str | None:
    """Return the recipe of `models.NAME.fp8` for a model that could train with it; else None."""
    config, hardware = request.model(model), request.hardware
    capability = hardware.device.capability
    if config.fp8 is not None or capability is None or "fp8" not in hardware.calibration.matmul:
        return None
    choice = layers_with(config.backend, model, request)
    if choice is None or choice.kernels is not LayerKernels.TRANSFORMER_ENGINE:
        return None
    return next((recipe for recipe in reversed(FP8_NEEDS) if FP8_NEEDS[recipe].fits(capability)), None)


def _engines(basis: Basis, can_run: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the engines that are made for the cluster's devices, where replicas have others."""
    names = {choice.replica.partition("@")[0]: choice.engine for choice in basis.engines}
    settings = {
        key: name
        for key, name in _usable_backends(basis, can_run)
        if key.endswith(".gen.engine") and names.get(_model_of(key), name) != name
    }
    if settings:
        slow = " and ".join(dict.fromkeys(names[_model_of(key)] for key in settings))
        yield f"the {slow} engine limits how fast samples are generated", settings


def _usable_backends(basis: Basis, can_run: bool) -> Iterator[tuple[str, str]]:
    """Yield other backends and engines; those that do not run a model only where the plan cannot run."""
    shapes = basis.request.shapes
    for key, name in other_backends(basis.graph, basis.request):
        if not can_run or runs_family(name, shapes.get(_model_of(key))):
            yield key, name


def _model_of(key: str) -> str:
    """Return the model in a key such as `models.actor.backend`."""
    return key.split(".")[1]


def _useful(basis: Basis, max_staleness: float) -> int:
    """Return the most samples that can be in flight with a `max_staleness`."""
    group_size = max((stream.group for stream in basis.graph.streams if stream.trained), default=1)
    schedule = replace(basis.request.schedule, max_staleness=max_staleness)
    return group_size * schedule.admission_limit(0, basis.request.batch)


def _staler(basis: Basis, before: float) -> Iterator[Tried]:
    """Yield larger values of staleness, as long as each shortens the step noticeably more than the last."""
    schedule, last = basis.request.schedule, before
    for value in STALENESS:
        if value <= schedule.max_staleness:
            continue
        settings: dict[str, Any] = {"schedule.max_staleness": value}
        if (useful := _useful(basis, value)) > schedule.max_concurrent:
            settings["schedule.max_concurrent"] = useful
        longest = last - MIN_GAIN * before
        after = basis.period(settings, longest)
        if after is None or after > longest:
            return
        last = after
        yield settings, after
