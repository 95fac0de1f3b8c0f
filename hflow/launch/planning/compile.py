"""`placement=auto`: what the planner may choose, and the configuration with its choices.

Compiles a recipe and its configuration, or a plan file, to a checked graph and a plan.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import ConfigError, PlanError, RecipeError
from hflow.base.shipped import find_recipe, is_recipe_file, shipped_recipes
from hflow.config import DataConfig, ModelConfig, RunConfig, to_mapping, to_yaml
from hflow.dsl import Recipe, apply_overrides, override_values
from hflow.graph.ir import Graph
from hflow.launch.planning.plan_file import FORMAT, read_plan_file, recipe_file
from hflow.launch.planning.read_recipe import ReadRecipe, RecipeReader, options_of
from hflow.launch.planning.replaced import replaced_warnings
from hflow.launch.planning.request import LearnedFromRun, plan_request
from hflow.launch.planning.this_machine import fewer_workers
from hflow.models.hub import is_pinning
from hflow.observer import Observer
from hflow.planner.checks.settings import check_unused_keys
from hflow.planner.compile import compile_plan
from hflow.planner.diff import PlanDiff, and_more, diff_plans
from hflow.planner.forecast.cost import Explanation
from hflow.planner.forecast.cost import explain as explain_node
from hflow.planner.make.placement_setting import parse_items
from hflow.planner.make.replicas import GEN_SUFFIX, replica_roles
from hflow.planner.plan.forecast import Candidate, Pace, SimulatedStep
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Plan, Schedule
from hflow.planner.plan.serialise import to_json
from hflow.planner.plan.workload import Workload
from hflow.planner.search import (
    PLACEMENT,
    PastSearches,
    SearchResult,
    free_settings,
    with_settings,
    without_places,
)

if TYPE_CHECKING:
    from hflow.runtime.simulation.simulate_plan import Simulation

AUTO = "auto"
"""The value of `placement` with which the planner places every replica."""


def free_keys(
    config: RunConfig, set_keys: Collection[str], graph: Graph, request: PlanRequest
) -> frozenset[str]:
    """Return the keys of the configuration that the planner may choose, of which the user has set none.

    On accelerators this is the default where there is something to choose. Devices of a CPU cluster are
    processes that share their machine, mostly for tests: there every model runs on all of them unless
    `placement=auto`.
    """
    roles = replica_roles(graph)
    if not roles or any(model not in request.shapes for model, _ in roles):
        return frozenset({PLACEMENT} if roles and config.placement == AUTO else ())
    free = {key for key in free_settings([model for model, _ in roles]) if key not in set_keys}
    if request.cluster.device == "cpu":  # processes of a machine, where results are compared
        free = {key for key in free if not key.endswith(".backend")}
    if config.placement == AUTO or _may_place(config, roles, request):
        free.add(PLACEMENT)
    return frozenset(free)


def _may_place(config: RunConfig, roles: Sequence[tuple[str, str]], request: PlanRequest) -> bool:
    """Return whether the planner may place replicas although `placement` is not `auto`."""
    if request.cluster.device == "cpu" or request.cluster.num_devices == 1 or _names_groups(config):
        return False
    names = [model + GEN_SUFFIX * (role == "gen") for model, role in roles]
    return config.placement is None or len(parse_items(config.placement, names)) < len(names)


def with_choices(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with what the planner chose, so that nothing is left to choose.

    A placement that is among the choices has all groups and layouts.
    """
    if PLACEMENT in overrides:
        config = replace(without_places(config), placement=overrides[PLACEMENT])
    return with_settings(config, overrides)


def _names_groups(config: RunConfig) -> bool:
    """Return whether the user has named device groups, in which replicas stay then."""
    return bool(config.groups) or any(model.group or model.gen.group for model in config.models.values())


@dataclass(frozen=True)
class Compiled:
    """A recipe with its configuration, graph and plan."""

    config: RunConfig
    graph: Graph
    bodies: Mapping[str, Callable[..., Any]]
    """Node name -> the decorated function."""
    plan: Plan
    recipe: Path
    """The recipe's Python file, or `session_recipe`."""
    observers: tuple[Observer, ...] = ()
    """The recipe's observers."""
    set_keys: frozenset[str] = frozenset()
    """Keys of the configuration that the recipe's files and overrides set."""
    row_functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """The recipe's functions that make rows, by name."""
    samplers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """The recipe's functions that choose rows, by name."""


def plan(recipe: str | Path | Recipe, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of a recipe.

    Raises:
        RecipeError: for the reasons of `check`.
        ConfigError: for the reasons of `check`.
        PlanError: if the graph cannot be placed on the cluster as configured.
    """
    return compile_recipe(recipe, overrides).plan


def simulate(
    recipe: str | Path | Recipe, overrides: Sequence[str] = (), steps: int | None = None, seed: int = 0
) -> Simulation:
    """Run a recipe's plan on a virtual clock. No device is needed.

    Args:
        recipe: path of the recipe's Python file, the name of a shipped one, or a `Recipe`.
        overrides: configuration as `key=value`.
        steps: training steps; None: the plan's steps, or as many as show a steady speed.
        seed: seed of the response lengths.

    Raises:
        HflowError: for the reasons of `plan`, and if the plan has no estimates of time.
    """
    from hflow.runtime.simulation.simulate_plan import simulate_plan

    if steps is not None:
        overrides = (*overrides, f"steps={steps}")
    return simulate_plan(plan(recipe, overrides), steps, seed)


def compose_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return the whole configuration of a recipe as YAML, with every model, dataset and option of a node.

    The YAML composes to the same graph and configuration. What it sets, `placement=auto` does not choose.
    """
    read = RecipeReader(recipe).read(overrides)
    config, graph = read.config, read.graph
    nodes = apply_overrides(read.recipe.spec(), config.nodes).nodes
    whole = replace(
        config,
        models={model.name: config.models.get(model.name, ModelConfig()) for model in graph.models},
        data={dataset.name: config.data.get(dataset.name, DataConfig()) for dataset in graph.datasets},
        nodes={node.name: override_values(node) for node in nodes},
    )
    return to_yaml(whole)


def compile_recipe(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    config: RunConfig | None = None,
    engines: Mapping[str, str] | None = None,
    candidates: tuple[Candidate, ...] = (),
    backend: str = "",
    *,
    with_limits: bool = False,
) -> Compiled:
    """Compile a recipe without torch and ray.

    `config` replaces the recipe's YAML file and overrides. `engines` (model -> engine, where the
    configuration names none), `candidates` and `backend`, with the reason for it, are those of a plan file.
    `with_limits` also finds the settings that make a step longer than necessary.

    Raises:
        HflowError: for the reasons of `plan`.
    """
    read = RecipeReader(recipe).read(overrides, config)
    return compile_read(read, engines, candidates, backend, with_limits=with_limits)


def compile_read(
    read: ReadRecipe,
    engines: Mapping[str, str] | None = None,
    candidates: tuple[Candidate, ...] = (),
    backend: str = "",
    *,
    with_limits: bool = False,
    searches: PastSearches | None = None,
) -> Compiled:
    """Compile a recipe that has been read, as `compile_recipe`; past `searches` are not repeated.

    With `placement=auto`, the cores of this machine become the workers with which a step is shortest, of one
    core or of several.

    Raises:
        HflowError: for the reasons of `plan`.
    """
    compiled_read = partial(
        _compile_read,
        engines=engines or {},
        candidates=candidates,
        backend=backend,
        with_limits=with_limits,
        searches=searches or PastSearches(simulated_period),
    )
    if read.config.placement != AUTO or not read.is_here or read.is_decided:
        return compiled_read(read)
    found, problems = [], []
    for config in (read.config, *fewer_workers(read.config)):
        try:
            found.append(compiled_read(replace(read, config=config)))
        except PlanError as problem:  # such as a model that needs the memory of two workers
            problems.append(problem)
    if not found:
        raise problems[0]
    return min(found, key=_step_seconds)


def _step_seconds(compiled: Compiled) -> float:
    period = compiled.plan.forecast.period
    return math.inf if period is None else period.seconds


def _compile_read(
    read: ReadRecipe,
    *,
    engines: Mapping[str, str],
    candidates: tuple[Candidate, ...],
    backend: str,
    with_limits: bool,
    searches: PastSearches,
) -> Compiled:
    config, graph, recipe = read.config, read.graph, read.path
    replaced: tuple[str, ...] = ()
    if not read.is_decided:
        replaced = tuple(replaced_warnings(config, graph, read.configs, read.overrides))

    learn = cache(learn_from_run)

    def requested(config: RunConfig) -> PlanRequest:
        request = plan_request(config, graph, recipe, learn)
        return replace(request, engines=engines, warnings=(*request.warnings, *read.warnings, *replaced))

    request = requested(config)
    check_unused_keys(graph, request)
    searched = None
    free = frozenset() if read.is_decided else free_keys(config, read.set_keys, graph, request)
    if free:
        placement = None if config.placement == AUTO else config.placement
        searched = replace(request, placement=placement, free=free)
        found = _search(searches, graph, searched)
        if found is not None:
            if PLACEMENT in free:
                candidates = found.candidates
            backend, config = found.backend, with_choices(config, found.overrides)
            chosen = {key: value for key, value in found.overrides.items() if key.endswith(".backend")}
            searched = with_settings(searched, chosen)
            request = requested(config)
            request = replace(request, warnings=(*request.warnings, *found.warnings))
    elif config.placement == AUTO:  # the recipe has no model to place
        config, request = replace(config, placement=None), replace(request, placement=None)
    compiled_plan = compile_plan(
        graph,
        request,
        candidates=candidates,
        backend=backend,
        with_limits=with_limits,
        searched=searched,
        simulate=simulated_period,
    )
    bodies = read.recipe.bodies(options_of(graph))
    return Compiled(
        config,
        graph,
        bodies,
        compiled_plan,
        recipe,
        read.recipe.observers,
        read.set_keys,
        read.recipe.row_functions,
        read.recipe.samplers,
    )


def _search(searches: PastSearches, graph: Graph, request: PlanRequest) -> SearchResult | None:
    """Return the result of a search; None if no settings fit where replicas are: `compile_plan` says why.

    Raises:
        PlanError: if no placement fits.
    """
    try:
        return searches.search(graph, request)
    except PlanError:
        if PLACEMENT in request.free:
            raise
        return None


def explain(compiled: Compiled, node: str) -> Explanation:
    """Unfold the seconds of a node of a compiled recipe.

    Raises:
        PlanError: for an unknown node, or a model whose sizes the planner does not know.
    """
    request = plan_request(compiled.config, compiled.graph, compiled.recipe, cache(learn_from_run))
    return explain_node(compiled.plan, request, node)


def plan_file_text(compiled: Compiled) -> str:
    """Return the plan file of a compiled recipe, as indented JSON."""
    recipe, directory = compiled.recipe.absolute(), Path.cwd()
    is_local = recipe.is_relative_to(directory)
    values = {
        "format": FORMAT,
        "recipe": (recipe.relative_to(directory) if is_local else recipe).as_posix(),
        "config": to_mapping(compiled.config),
        "plan": to_json(compiled.plan),
    }
    return json.dumps(values, indent=2)


def compile_plan_file(
    path: str | Path, recipe: str | Path | None = None, overrides: Sequence[str] = ()
) -> Compiled:
    """Compile the recipe of a plan file or a run with its configuration, and check that the plan is the same.

    Models of the Hub that the file names without a commit, as it was made without a network, get one.

    `recipe` is the recipe's file, if it has moved. `overrides` may only change what the plan does not depend
    on, such as `out=elsewhere`.

    Raises:
        ConfigError: for a file that is not a plan file, or overrides that do not fit.
        PlanError: if the plan differs from the stored one; the message names the first change.
        RecipeError: if there is no recipe.
    """
    file = read_plan_file(path)
    source, config = recipe_file(file, recipe), file.configuration(overrides)
    try:
        compiled = compile_recipe(
            source,
            config=config,
            engines=file.engines,
            candidates=file.candidates,
            backend=file.backend,
        )
    except (ConfigError, PlanError, RecipeError) as error:
        raise PlanError(f"{file.path} is out of date: {error}") from error
    diff = diff_plans(file.rows, to_json(compiled.plan))
    misfits = [change for change in diff.decided if not is_pinning(change.before, change.after)]
    if misfits:
        command = shlex.join(["hflow", "plan", "--diff", str(file.path), str(source), *overrides])
        others = and_more(len(misfits) - 1)
        raise PlanError(f"{file.path} is out of date: {misfits[0]}{others}; see `{command}`")
    return compiled


def compare_plans(before: str, after: str, overrides: Sequence[str] = ()) -> PlanDiff:
    """Compare two plans: plan files, runs' directories, or recipes, which are compiled with the overrides.

    A recipe is a `.py` file or the name of a shipped one.

    Raises:
        HflowError: for any other file, or a recipe that cannot be compiled.
    """
    if overrides and not (_is_recipe(before) or _is_recipe(after)):
        raise ConfigError(
            f"{overrides[0]} has no effect: neither {before!r} nor {after!r} is a recipe (a .py file, or the "
            "name of a shipped one); remove it"
        )
    return diff_plans(_rows(before, overrides), _rows(after, overrides))


def _rows(operand: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    if _is_recipe(operand):
        return to_json(compile_recipe(find_recipe(operand), overrides).plan)
    return read_plan_file(operand).rows


def _is_recipe(operand: str) -> bool:
    """Return whether an operand is a recipe. A file or directory here comes before a shipped recipe."""
    return is_recipe_file(operand) or (operand in shipped_recipes() and not Path(operand).exists())


def learn_from_run(run: str, device: str) -> LearnedFromRun:
    """Learn from a run, as `profiling.from_run.learn_from_run`, which is imported by the first call."""
    from hflow.profiling import from_run

    return from_run.learn_from_run(run, device)


def simulated_period(
    schedule: Schedule, seconds: Mapping[str, float], pace: Pace, workload: Workload
) -> SimulatedStep:
    """Simulate a step, as `simulate_plan.simulated_period`, which is imported by the first call."""
    from hflow.runtime.simulation import simulate_plan

    return simulate_plan.simulated_period(schedule, seconds, pace, workload)
