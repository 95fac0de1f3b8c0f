"""Binds a configuration's overrides to a recipe: `nodes.actor_train.clip=0.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hflow.dsl.nodetype import NODE_TYPES
from hflow.dsl.options import Option
from hflow.errors import ConfigError, nearest
from hflow.graph.ir import NodeSpec, RecipeSpec, SourceLocation
from hflow.validation import check_value

_FIELDS = ("group", "every", "after")
"""Options that are fields of a `NodeSpec`; names, streams and levels are the recipe's alone."""


def apply_overrides(spec: RecipeSpec, overrides: Mapping[str, Mapping[str, Any]]) -> RecipeSpec:
    """Return the recipe with some knobs and options changed.

    Args:
        spec: the recipe.
        overrides: node -> knob or option -> value.

    Raises:
        ConfigError: for an unknown node, knob or option, or a value that does not fit it.
    """
    known = [node.name for node in spec.nodes]
    for name in overrides:
        if name not in known:
            raise ConfigError(f"nodes.{name}: the recipe has no such node{nearest(name, known)}")
    nodes = [_bind_node(node, overrides.get(node.name, {})) for node in spec.nodes]
    trains = {(node.models[0], node.where): node for node in nodes if node.verb == "train"}
    return replace(spec, nodes=tuple(_in_step(node, trains, overrides) for node in nodes))


def overridable_keys(node: NodeSpec) -> tuple[str, ...]:
    """What a configuration may change on a node: its knobs and options."""
    options = NODE_TYPES[node.verb].options
    fields = tuple(name for name in _FIELDS if name in options)
    return (*(knob.name for knob in node.knobs), *(name for name, _ in node.options), *fields)


def _bind_node(node: NodeSpec, values: Mapping[str, Any]) -> NodeSpec:
    for key, value in values.items():
        node = _bind_value(node, key, value)
    return node


def _in_step(
    node: NodeSpec,
    trains: Mapping[tuple[str, SourceLocation], NodeSpec],
    overrides: Mapping[str, Mapping[str, Any]],
) -> NodeSpec:
    """A node that a train node brought along fires when that does, whatever the configuration made of it."""
    if not node.implicit:
        return node
    same = trains[node.models[0], node.where]
    own = overrides.get(node.name, {})
    every = node.every if "every" in own else same.every
    return replace(node, every=every, after=node.after if "after" in own else same.after)


def _bind_value(node: NodeSpec, key: str, value: Any) -> NodeSpec:
    path = f"nodes.{node.name}.{key}"
    if key not in overridable_keys(node):
        raise ConfigError(
            f"{path}: the node has no such knob or option{nearest(key, overridable_keys(node))}"
        )
    knob = next((knob for knob in node.knobs if knob.name == key), None)
    try:
        if knob is not None:
            bound = replace(knob, value=check_value(value, knob.type))
            return replace(node, knobs=tuple(bound if k.name == key else k for k in node.knobs))
        value = _option(node, key).check(value)
    except ValueError as error:
        raise ConfigError(f"{path} is {error}") from error
    if key in _FIELDS:
        return replace(node, **{key: value})
    return replace(node, options=tuple((name, value if name == key else old) for name, old in node.options))


def _option(node: NodeSpec, key: str) -> Option:
    """The option; one that was decided from the body can be changed, not undone."""
    option = NODE_TYPES[node.verb].options[key]
    decided = key in ("min_group", "prox")
    return replace(option, type=option.type.removeprefix("None | ")) if decided else option
