"""From a recipe's path and overrides to the checked graph and the compiled plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hflow.config import RunConfig, flatten, load_config, to_yaml, validate_names
from hflow.dsl import bind, load_recipe, overridable
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph
from hflow.plan.cluster import GIB, parse_cluster
from hflow.plan.compile import compile_plan
from hflow.plan.ir import ClusterSpec, Plan
from hflow.plan.request import ModelRequest, PlanRequest
from hflow.plan.serialise import to_json as plan_to_json

RESULT_KEYS = ("models.", "data.", "workers")
"""Configuration that changes what a run computes but is no part of the plan's own rows."""


@dataclass(frozen=True)
class Compiled:
    """One recipe with one configuration, as far as planning goes."""

    config: RunConfig
    graph: Graph
    bodies: Mapping[str, Callable[..., Any]]
    """Node name -> the decorated function."""
    plan: Plan


def check(recipe: str | Path, overrides: Sequence[str] = ()) -> Graph:
    """Read a recipe and its configuration and build the graph.

    Raises:
        RecipeError: for a recipe that cannot be right.
        ConfigError: for a key or value that does not exist or fit.
    """
    return _read(recipe, overrides)[1]


def plan(recipe: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Compile the plan of a recipe.

    Raises:
        RecipeError: as `check`.
        ConfigError: as `check`.
        PlanError: when the graph cannot be laid out as asked.
    """
    return compile_recipe(recipe, overrides).plan


def compose(recipe: str | Path, overrides: Sequence[str] = ()) -> str:
    """The composed configuration as YAML."""
    return to_yaml(_read(recipe, overrides)[0])


def to_json(made: Plan) -> str:
    """A plan as indented JSON."""
    return json.dumps(plan_to_json(made), indent=2)


def compile_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Compiled:
    """Everything that a run is made from, short of torch and ray."""
    config, graph, bodies = _read(recipe, overrides)
    return Compiled(config, graph, bodies, compile_plan(graph, _request(config)))


def _read(
    recipe: str | Path, overrides: Sequence[str]
) -> tuple[RunConfig, Graph, Mapping[str, Callable[..., Any]]]:
    loaded = load_recipe(recipe)
    config = load_config(recipe, overrides)
    spec = loaded.spec()
    validate_names(
        config,
        models=[model.name for model in spec.models],
        data=[dataset.name for dataset in spec.datasets],
        nodes={node.name: overridable(node) for node in spec.nodes},
    )
    bound = bind(spec, config.nodes)
    options = {node.name: dict(node.options) for node in bound.nodes}
    return config, build_graph(bound), loaded.bodies(options)


def _request(config: RunConfig) -> PlanRequest:
    settings = {key: value for key, value in flatten(config) if key.startswith(RESULT_KEYS)}
    return PlanRequest(
        cluster=_cluster(config),
        batch=config.batch,
        num_steps=config.steps,
        models={
            name: ModelRequest(
                layout=model.layout,
                gen_layout=model.gen.layout,
                group=model.group,
                gen_group=model.gen.group,
                backend=model.backend,
                engine=model.gen.engine,
            )
            for name, model in config.models.items()
        },
        groups=config.groups,
        max_staleness=config.max_staleness,
        sync_every=config.sync_every,
        max_concurrent=config.max_concurrent,
        max_refused_per_step=config.max_refused_per_step,
        save_every=config.save_every,
        seed=config.seed,
        settings=settings,
    )


def _cluster(config: RunConfig) -> ClusterSpec:
    cluster = parse_cluster(config.cluster)
    if config.device_memory_gib is None:
        return cluster
    return replace(cluster, memory_bytes=int(config.device_memory_gib * GIB))
