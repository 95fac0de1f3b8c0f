"""Compiles a recipe and its configuration to a checked graph and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hflow.config import ConfigLoader, DataConfig, ModelConfig, RunConfig, to_yaml, validate_names
from hflow.dsl import Recipe, apply_overrides, load_recipe, overridable_keys, override_values
from hflow.errors import ConfigError, nearest
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph, NodeSpec, RecipeSpec
from hflow.launch.auto_placement import AUTO, free_keys, with_choices
from hflow.launch.data_settings import check_data, replaced_data_warnings
from hflow.launch.model_fit import check_model_fit
from hflow.launch.model_overrides import with_overridden_models
from hflow.launch.plan_request import plan_request
from hflow.launch.shown_metrics import check_metric_names
from hflow.launch.trackers import check_trackers
from hflow.observer import Observer
from hflow.planner.backends import BACKENDS, ENGINES
from hflow.planner.compile import compile_plan
from hflow.planner.forecast import Candidate
from hflow.planner.ir import Plan
from hflow.planner.request import PlanRequest
from hflow.planner.search import PastSearches
from hflow.planner.unused_keys import check_unused_keys
from hflow.runtime.simulation.simulate_plan import simulated_period


@dataclass(frozen=True)
class Compiled:
    """A recipe with its configuration, graph and plan."""

    config: RunConfig
    graph: Graph
    bodies: Mapping[str, Callable[..., Any]]
    """Node name -> the decorated function."""
    plan: Plan
    recipe: Path
    """The recipe's Python file."""
    observers: tuple[Observer, ...] = ()
    """Those of the recipe."""
    set_keys: frozenset[str] = frozenset()
    """Keys of the configuration that the recipe's files and overrides set."""


@dataclass(frozen=True)
class ReadRecipe:
    """A recipe with its configuration and its checked graph, before it is planned."""

    path: Path
    """The recipe's Python file."""
    overrides: tuple[str, ...]
    config: RunConfig
    set_keys: frozenset[str]
    """Keys of the configuration that the recipe's files and overrides set."""
    graph: Graph
    recipe: Recipe
    is_decided: bool
    """Whether the configuration was given as a whole, so that nothing is left to choose."""
    warnings: tuple[str, ...] = ()
    """What overrides replace besides the keys that they name."""


class RecipeReader:
    """Reads a recipe once, and its configuration with any overrides."""

    def __init__(self, recipe: str | Path) -> None:
        """Import a recipe's Python file.

        Raises:
            RecipeError: for an error in the recipe.
        """
        self._path = Path(recipe)
        self._recipe = load_recipe(recipe)
        self._configs = ConfigLoader(recipe)

    def read(self, overrides: Sequence[str] = (), config: RunConfig | None = None) -> ReadRecipe:
        """Return the recipe with its configuration and graph.

        Args:
            overrides: configuration as `key=value`.
            config: a whole configuration, used instead of the recipe's YAML file and overrides.

        Raises:
            RecipeError: for an error in the recipe.
            ConfigError: for an unknown key, or a value that does not fit.
        """
        is_decided, set_keys, warnings = config is not None, frozenset[str](), tuple[str, ...]()
        if config is None:
            config, set_keys = self._configs.load(overrides)
            config, warnings = with_overridden_models(config, overrides)
        spec = self._recipe.spec()
        check_names(config, spec)
        graph = build_graph(apply_overrides(spec, config.nodes))
        self._recipe.check_bodies(graph)
        check_model_fit(config, graph)
        check_data(config, graph)
        check_metric_names(config, graph)
        check_trackers(config.report)
        return ReadRecipe(
            self._path, tuple(overrides), config, set_keys, graph, self._recipe, is_decided, warnings
        )


def check(recipe: str | Path, overrides: Sequence[str] = ()) -> Graph:
    """Read a recipe and its configuration, and return its checked graph.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    return RecipeReader(recipe).read(overrides).graph


def plan(recipe: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of a recipe.

    Raises:
        RecipeError: as `check`.
        ConfigError: as `check`.
        PlanError: if the graph cannot be placed on the cluster as configured.
    """
    return compile_recipe(recipe, overrides).plan


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
    recipe: str | Path,
    overrides: Sequence[str] = (),
    config: RunConfig | None = None,
    engines: Mapping[str, str] | None = None,
    candidates: tuple[Candidate, ...] = (),
    *,
    with_limits: bool = False,
) -> Compiled:
    """Compile a recipe without torch and ray.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        config: a whole configuration, used instead of the recipe's YAML file and overrides.
        engines: model -> the engine that a plan file names, for models whose configuration names none.
        candidates: placements that a plan file was compared with.
        with_limits: also find the settings that make a step longer than necessary.

    Raises:
        HflowError: as `plan`.
    """
    read = RecipeReader(recipe).read(overrides, config)
    return compile_read(read, engines, candidates, with_limits=with_limits)


def compile_read(
    read: ReadRecipe,
    engines: Mapping[str, str] | None = None,
    candidates: tuple[Candidate, ...] = (),
    *,
    with_limits: bool = False,
    searches: PastSearches | None = None,
) -> Compiled:
    """Compile a recipe that has been read.

    Args:
        read: a recipe with its configuration.
        engines: as in `compile_recipe`.
        candidates: as in `compile_recipe`.
        with_limits: as in `compile_recipe`.
        searches: of plans with other settings, which are not repeated.

    Raises:
        HflowError: as `plan`.
    """
    config, graph, recipe = read.config, read.graph, read.path
    replaced = () if read.is_decided else tuple(replaced_data_warnings(config, graph, recipe, read.overrides))

    def requested(config: RunConfig) -> PlanRequest:
        request = plan_request(config, graph, recipe)
        return replace(
            request, engines=engines or {}, warnings=(*request.warnings, *read.warnings, *replaced)
        )

    request = requested(config)
    check_unused_keys(graph, request)
    searched = None
    free = frozenset() if read.is_decided else free_keys(config, read.set_keys, graph, request)
    if free:
        placement = None if config.placement == AUTO else config.placement
        searched = replace(request, placement=placement, free=free)
        found = (searches or PastSearches(simulated_period)).search(graph, searched)
        candidates = found.candidates
        config = with_choices(config, found.overrides)
        request = requested(config)
        request = replace(request, warnings=(*request.warnings, *found.warnings))
    elif config.placement == AUTO:  # the recipe has no model to place
        config, request = replace(config, placement=None), replace(request, placement=None)
    compiled_plan = compile_plan(
        graph,
        request,
        candidates=candidates,
        with_limits=with_limits,
        searched=searched,
        simulate=simulated_period,
    )
    bodies = read.recipe.bodies(_options(graph))
    return Compiled(config, graph, bodies, compiled_plan, recipe, read.recipe.observers, read.set_keys)


def read_recipe(
    recipe: str | Path, overrides: Sequence[str] = (), config: RunConfig | None = None
) -> tuple[RunConfig, Graph, Mapping[str, Callable[..., Any]]]:
    """Return a recipe's configuration, its graph, and its node bodies by name.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        config: a whole configuration, used instead of the recipe's YAML file and overrides.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    read = RecipeReader(recipe).read(overrides, config)
    return read.config, read.graph, read.recipe.bodies(_options(read.graph))


def read_nodes(recipe: str | Path) -> tuple[Recipe, dict[str, NodeSpec]]:
    """Return a recipe, and its nodes by name with the values of its configuration.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    read = RecipeReader(recipe).read()
    nodes = apply_overrides(read.recipe.spec(), read.config.nodes).nodes
    return read.recipe, {node.name: node for node in nodes}


def _options(graph: Graph) -> dict[str, dict[str, Any]]:
    """Return node -> its options, as the configuration set them."""
    return {node.name: dict(node.spec.options) for node in graph.nodes}


def check_names(config: RunConfig, spec: RecipeSpec) -> None:
    """Check that a configuration names only what the recipe has, and backends that exist.

    Raises:
        ConfigError: for the first other name, with the nearest one.
    """
    validate_names(
        config,
        models=[model.name for model in spec.models],
        data=[dataset.name for dataset in spec.datasets],
        nodes={node.name: overridable_keys(node) for node in spec.nodes},
    )
    _check_backends(config)


def _check_backends(config: RunConfig) -> None:
    """Check that the names of backends and engines are registered.

    Raises:
        ConfigError: naming the key, the nearest name and all names.
    """
    for name, model in config.models.items():
        settings = (("backend", model.backend, BACKENDS), ("gen.engine", model.gen.engine, ENGINES))
        for key, value, known in settings:
            if value is not None and value not in known:
                choices = " or ".join(map(repr, known))
                raise ConfigError(
                    f"models.{name}.{key} is {value!r}; it must be {choices}{nearest(value, known)}"
                )
