"""The search for a plan: where replicas run, with which layouts and settings.

`search` is called before `compile_plan`. It costs candidates with the functions that the forecast uses, from
tables, without making plans (`evaluate`), and explores them (`explore`). What the user has set is never
changed. Nothing downstream knows that a machine chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hflow.base.errors import PlanError
from hflow.config.schema import OPEN_SETTINGS, OptimConfig
from hflow.graph.ir import Graph
from hflow.planner.make.replicas import replica_roles
from hflow.planner.plan.forecast import Candidate
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Plan, Replica
from hflow.planner.plan.traits import traits
from hflow.planner.search.backends import backend_trials, is_better, kept_backend, with_backend
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.explore import BUDGET, NUM_IMPROVED, Exploration, explore
from hflow.planner.search.limits import Basis, throttles
from hflow.planner.search.options import MIN_DIFFERENCE
from hflow.planner.search.problem import PLACEMENT, SearchProblem, check_known
from hflow.planner.search.remedies import nearest_fit, no_fit
from hflow.planner.search.replica_option import ReplicaOption
from hflow.planner.search.result import MIN_GAIN, SearchResult, make_result, with_settings, without_places
from hflow.planner.search.simulated import PeriodFunction, by_seconds, is_estimate, step_seconds

__all__ = [
    "PLACEMENT",
    "Basis",
    "Candidate",
    "Evaluator",
    "PastSearches",
    "PeriodFunction",
    "SearchProblem",
    "SearchResult",
    "chosen_layouts",
    "decide_layouts",
    "free_settings",
    "nearest_fit",
    "search",
    "throttles",
    "with_settings",
    "without_places",
]


def search(
    graph: Graph, request: PlanRequest, *, simulate: PeriodFunction | None = None, budget: int = BUDGET
) -> SearchResult:
    """Choose what a request leaves open, for the shortest step.

    Only if nothing else fits, it tries layouts that divide sequences although they are not long, and then
    those that can be planned but not run yet.

    Args:
        request: the request, whose `free` lists the keys that may be chosen besides layouts.
        simulate: decides between the best candidates where the analytic period is only an estimate; None: the
            estimate decides.
        budget: most candidates to look at. It counts candidates and not seconds, so that equal requests have
            equal results on every machine.

    Raises:
        PlanError: if nothing fits; the message names the nearest change that does.
    """
    found, trials = _find(graph, request, simulate, budget), tuple(backend_trials(graph, request))
    for trial in trials:
        if trial.objection is None:
            longest = math.inf if found is None else found.seconds * (1 - MIN_GAIN)
            asked = with_settings(request, trial.settings)
            try:
                other = _find(graph, asked, simulate, budget, longest)
            except PlanError:  # settings of a model are for the configured backend
                continue
            if other is not None and is_better(other, found):
                found = with_backend(trial, other, found)
    if found is not None:
        return replace(found, backend=found.backend or kept_backend(trials))
    refusal = no_fit(graph, request)
    problem = SearchProblem(graph, request, allows_planned_only=True, divides_sequences=True)
    evaluator = Evaluator(problem)
    best = explore(evaluator, budget) if refusal.is_too_large else None
    if best is None or not best.best:
        raise PlanError(f"no placement fits into memory{refusal.text}")
    result = _result(evaluator, best, simulate)
    return replace(result, warnings=(f"no placement that can run fits into memory{refusal.text}",))


def _find(
    graph: Graph,
    request: PlanRequest,
    simulate: PeriodFunction | None,
    budget: int,
    longest: float = math.inf,
) -> SearchResult | None:
    """Return the best plan that can run, with the backends of a request; None if none fits.

    A plan is of no use if a step takes `longest` seconds or more. The other arguments are those of `search`.
    """
    for divides_sequences in (False, True):
        problem = SearchProblem(graph, request, divides_sequences=divides_sequences)
        check_known(problem)
        evaluator = Evaluator(problem)
        keeps = simulate is not None and is_estimate(problem)
        found = explore(evaluator, budget, keeps_alternatives=keeps, longest=longest)
        if found.best:
            return _result(evaluator, found, simulate)
        if problem.divides_sequences:
            break
    return None


def _result(evaluator: Evaluator, found: Exploration, simulate: PeriodFunction | None) -> SearchResult:
    """Return the best of some choices, by simulated seconds where analytic ones are estimates."""
    seconds = dict(by_seconds(evaluator, found.ranked(), simulate, NUM_IMPROVED, found.alternatives))
    ranked = list(seconds)
    best = simplified(evaluator, ranked[0])
    if best is not ranked[0]:
        seconds[best] = step_seconds(evaluator, best, simulate)
        if seconds[best] > seconds[ranked[0]] * (1 + MIN_DIFFERENCE):
            best = ranked[0]
    return make_result(evaluator, [best, *ranked[1:]], found.num_tried, seconds)


class PastSearches:
    """Searches that are not repeated for requests that differ in nothing that a search reads."""

    def __init__(self, simulate: PeriodFunction | None = None) -> None:
        """Take what `search` takes as `simulate`."""
        self._simulate = simulate
        self._found: list[tuple[Graph, PlanRequest, SearchResult]] = []

    def search(self, graph: Graph, request: PlanRequest) -> SearchResult:
        """Return the result of `search`. Its request may be an earlier one; its other rows hold for both."""
        read = _what_is_read(request)
        for other_graph, other, result in self._found:
            if (other_graph, other) == (graph, read):
                return result
        result = search(graph, request, simulate=self._simulate)
        self._found.append((graph, read, result))
        return result


def _what_is_read(request: PlanRequest) -> PlanRequest:
    """Return a request without learning rates and other settings that change results alone."""
    models = {
        name: replace(config, optim=OptimConfig(config.optim.name, momentum=config.optim.momentum))
        for name, config in request.models.items()
    }
    workers = {key: value for key, value in request.settings.items() if key == "workers"}
    return replace(request, models=models, settings=workers, warnings=())


def decide_layouts(
    graph: Graph, request: PlanRequest, structure: Plan
) -> tuple[PlanRequest, tuple[tuple[str, str], ...]]:
    """Return a request with the layouts that the user left open, and the reason for each.

    Where no layout fits, they stay open: `compile_plan` then takes data ranks alone, and refuses what does
    not fit. The same request is returned where nothing is decided. `structure` is the plan of the request,
    with data ranks alone where layouts are open.
    """
    if not any(_is_open(replica, request) for replica in structure.replicas):
        return request, ()
    evaluator = Evaluator(SearchProblem(graph, request, structure=structure))
    ranked = explore(evaluator).ranked()
    if not ranked:
        return request, ()
    result = make_result(evaluator, ranked[:1], 0, {ranked[0]: ranked[0].period})
    return result.request, result.layouts


def chosen_layouts(graph: Graph, request: PlanRequest) -> frozenset[str]:
    """Return the replicas whose layout a search chooses."""
    names = {f"{model}@{role}" for model, role in replica_roles(graph)}
    return frozenset(names - SearchProblem(graph, request).layouts.keys())


def free_settings(models: Iterable[str]) -> frozenset[str]:
    """Return the keys of the configuration that a search may set, besides `placement` and layouts."""
    names = list(models)
    return frozenset(key.replace("NAME", name) for key in OPEN_SETTINGS for name in names)


def _is_open(replica: Replica, request: PlanRequest) -> bool:
    """Return whether a replica's layout may be chosen."""
    config = request.model(replica.model)
    layout = config.gen.layout if replica.role == "gen" else config.layout
    own = traits(replica.backend)
    may_replicate = own.shards_weights and len(request.cluster.machines(replica.workers)) > 1
    return layout is None and (own.is_model_parallel or may_replicate)


def simplified(evaluator: Evaluator, choice: Choice) -> Choice:
    """Return the choice with as many default settings as fit and cost no time."""
    limit = choice.period * (1 + MIN_DIFFERENCE)
    for before in choice.options:
        for option in _defaults(evaluator, before):
            groups = evaluator.replaced(choice, option)
            if groups is None:
                continue
            other = evaluator.choice(choice.partition.blocks, choice.devices, groups, math.inf)
            if other is not None and other.period <= limit:
                choice = other
                break
    return choice


def _defaults(evaluator: Evaluator, option: ReplicaOption) -> Iterator[ReplicaOption]:
    """Yield a replica's option with all settings as configured, if it is not that already."""
    config = evaluator.problem.config(option.name)
    if config != option.config:
        yield evaluator.table.option(option.replica, config)
