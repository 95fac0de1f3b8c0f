"""`apply_overrides`: change knobs and options from a configuration, as in `nodes.actor_train.clip=0.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hflow.base.errors import ConfigError, nearest
from hflow.base.validation import check_value
from hflow.dsl.bodies import loss_hint
from hflow.dsl.nodetype import NODE_TYPES
from hflow.dsl.options import Option
from hflow.graph.errors import SourceLocation
from hflow.graph.ir import NodeSpec, RecipeSpec

Overrides = Mapping[str, Mapping[str, Any]]
"""Node -> knob or option -> value."""

_SPEC_FIELDS = ("group", "every", "after")
"""Fields of a `NodeSpec` that a configuration may change. Names, streams and levels belong to the recipe."""

_DERIVED_OPTIONS = ("min_group", "prox")
"""Options that `to_spec` has derived from the body. They can be changed, but not reset to None."""


def apply_overrides(spec: RecipeSpec, overrides: Overrides) -> RecipeSpec:
    """Return a recipe with some knobs and options changed.

    Args:
        spec: the recipe.
        overrides: node -> knob or option -> value.

    Raises:
        ConfigError: for an unknown node, knob or option, or a value that does not fit.
    """
    names = [node.name for node in spec.nodes]
    for name in overrides:
        if name not in names:
            raise ConfigError(f"nodes.{name}: the recipe has no node {name!r}{nearest(name, names)}")
    nodes = [_override_node(node, overrides.get(node.name, {})) for node in spec.nodes]
    train_nodes = {(node.models[0], node.where): node for node in nodes if node.verb == "train"}
    return replace(spec, nodes=tuple(_follow_train_node(node, train_nodes, overrides) for node in nodes))


def overridable_keys(node: NodeSpec) -> tuple[str, ...]:
    """Return the knobs and options of a node that a configuration may change."""
    options = NODE_TYPES[node.kind_name].options
    fields = tuple(name for name in _SPEC_FIELDS if name in options)
    return (*(knob.name for knob in node.knobs), *(name for name, _ in node.options), *fields)


def override_values(node: NodeSpec) -> dict[str, Any]:
    """Return the options of a node that a configuration may change, with their present values.

    The cadence of an implicit node is left out: it follows that of its train node.
    """
    values = node.knob_values | dict(node.options)
    values |= {key: getattr(node, key) for key in _SPEC_FIELDS}
    left_out = ("every", "after") if node.implicit else ()
    return {key: values[key] for key in overridable_keys(node) if key not in left_out}


def _override_node(node: NodeSpec, values: Mapping[str, Any]) -> NodeSpec:
    for key, value in values.items():
        node = _override_value(node, key, value)
    return node


def _follow_train_node(
    node: NodeSpec, train_nodes: Mapping[tuple[str, SourceLocation], NodeSpec], overrides: Overrides
) -> NodeSpec:
    """Give an implicit node the cadence of its train node, unless the configuration sets its own."""
    if not node.implicit:
        return node
    train_node = train_nodes[node.models[0], node.where]
    overridden = overrides.get(node.name, {})
    every = node.every if "every" in overridden else train_node.every
    return replace(node, every=every, after=node.after if "after" in overridden else train_node.after)


def _override_value(node: NodeSpec, key: str, value: Any) -> NodeSpec:
    path = f"nodes.{node.name}.{key}"
    keys = overridable_keys(node)
    if key not in keys:
        hint = loss_hint(node.body.module, node.body.qualname, key, value) or nearest(key, keys)
        raise ConfigError(f"{path}: the node has no such knob or option{hint}")
    knob = next((knob for knob in node.knobs if knob.name == key), None)
    try:
        if knob is not None:
            changed = replace(knob, value=check_value(value, knob.type))
            return replace(node, knobs=tuple(changed if k.name == key else k for k in node.knobs))
        value = _option(node, key).check(value)
    except ValueError as error:
        raise ConfigError(f"{path} is {error}") from error
    if key in _SPEC_FIELDS:
        return replace(node, **{key: value})
    return replace(node, options=tuple((name, value if name == key else old) for name, old in node.options))


def _option(node: NodeSpec, key: str) -> Option:
    option = NODE_TYPES[node.kind_name].options[key]
    if key in _DERIVED_OPTIONS:
        return replace(option, type=option.type.removeprefix("None | "))
    return option
