"""`placement=auto`: what the planner may choose, and the configuration with its choices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hflow.config import RunConfig
from hflow.graph.ir import Graph
from hflow.planner.make.placement_setting import parse_items
from hflow.planner.make.replicas import GEN_SUFFIX, replica_roles
from hflow.planner.plan.request import PlanRequest
from hflow.planner.search import PLACEMENT, free_settings, with_settings, without_places

AUTO = "auto"
"""The value of `placement` with which the planner places every replica."""


def free_keys(
    config: RunConfig, set_keys: Collection[str], graph: Graph, request: PlanRequest
) -> frozenset[str]:
    """Return the keys of the configuration that the planner may choose.

    On accelerators this is the default where there is something to choose. Devices of a CPU cluster are
    processes that share their machine, mostly for tests: there every model runs on all of them unless
    `placement=auto`.

    Args:
        config: the configuration.
        set_keys: the keys that the user has set; they are never chosen.
        graph: the recipe's graph.
        request: made of the configuration.
    """
    roles = replica_roles(graph)
    if not roles:
        return frozenset()
    if config.placement != AUTO:
        if request.cluster.device == "cpu" or request.cluster.num_devices == 1 or _names_groups(config):
            return frozenset()
        if any(model not in request.shapes for model, _ in roles):
            return frozenset()
        if config.placement is not None:
            names = [model + GEN_SUFFIX * (role == "gen") for model, role in roles]
            if len(parse_items(config.placement, names)) == len(names):
                return frozenset()
    settings = free_settings([model for model, _ in roles])
    return frozenset({PLACEMENT, *(key for key in settings if key not in set_keys)})


def with_choices(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with what the planner chose, so that nothing is left to choose.

    Args:
        config: what was searched for.
        overrides: keys of the configuration and their values. If the placement is among them, it has all
            groups and layouts.
    """
    if PLACEMENT in overrides:
        config = replace(without_places(config), placement=overrides[PLACEMENT])
    return with_settings(config, overrides)


def _names_groups(config: RunConfig) -> bool:
    """Return whether the user has named device groups, in which replicas stay then."""
    return bool(config.groups) or any(model.group or model.gen.group for model in config.models.values())
