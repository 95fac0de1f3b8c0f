"""The output of `hflow nodes`: the ready nodes in a line each, and one with all that can be set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hflow.launch.node_catalog import CatalogNode, CatalogSetting, NodeField, NodeOption


def render_nodes(nodes: Sequence[CatalogNode], settings: Sequence[CatalogSetting]) -> RenderableType:
    """Return a row for each node: name, kind, and what it does, in the order of a recipe; then for others."""
    table = Table.grid(padding=(0, 2))
    for section, title in _SECTIONS.items():
        table.add_row(Text(title, style="bold"))
        for node in nodes:
            if _section(node) == section:
                table.add_row(f"  {node.name}", f"{node.kind} per {node.level}", Text(node.summary))
    others = Table.grid(padding=(0, 2))
    for kind, title in (("optimizer", "Optimizers"), ("adapter", "Adapters")):
        others.add_row(Text(title, style="bold"))
        for setting in settings:
            if setting.kind == kind:
                others.add_row(f"  {setting.name}", Text(setting.summary))
    more = Text("hflow nodes NAME lists the inputs, outputs and options of one", style="dim")
    return Group(table, others, Text(), more)


def render_recipe_nodes(recipe: str, nodes: Sequence[CatalogNode]) -> RenderableType:
    """Return a row for each node of a recipe, in its order: name, kind, function, and what it does."""
    table = Table.grid(padding=(0, 2))
    for node in nodes:
        kind = f"{node.kind} per {node.level}"
        table.add_row(Text(node.name, style="bold"), kind, Text(node.function), Text(node.summary))
    more = f"hflow nodes {recipe} NAME lists the inputs, outputs and options of one, with their values"
    return Group(table, Text(), Text(more, style="dim"))


_SECTIONS = {
    "generate": "Generation",
    "encode": "Written examples",
    "rewards": "Rewards",
    "infer": "Forward passes",
    "compute": "Advantages, weights",
    "train": "Losses",
}
"""Kind of node, or `rewards`, and its title."""


def _section(node: CatalogNode) -> str:
    return "rewards" if node.name.startswith("rewards.") else node.kind


def render_node(node: CatalogNode) -> RenderableType:
    """Return a node with its inputs, outputs, knobs and options."""
    function = f"  {node.function}" if node.function else ""
    parts: list[RenderableType] = [
        Text.assemble((node.name, "bold"), f"  {node.kind} per {node.level}{function}"),
        *([Text(node.description)] if node.description else []),
    ]
    parts += _fields("reads", [*node.inputs, *node.provided])
    parts += _fields("returns", node.outputs)
    title = f"knobs, as nodes.{node.config_name}.KNOB=VALUE"
    parts += _options(f"{title}; for this node alone" if function else title, node.knobs)
    parts += _options(f"options of @{node.kind}", node.options)
    return Group(*parts)


def render_setting(setting: CatalogSetting) -> RenderableType:
    """Return an optimizer or adapters with the options that they have."""
    place = setting.name.partition(".name=")[0]
    parts = _options(f"options, as {place}.OPTION=VALUE", setting.options)
    return Group(Text.assemble((setting.name, "bold"), f"  {setting.kind}"), Text(setting.summary), *parts)


def _fields(title: str, fields: Sequence[NodeField]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for field in fields:
        unit = f"{field.unit}, optional" if field.is_optional else field.unit
        table.add_row(Text(f"  {field.name}"), Text(unit), Text(field.meaning))
    return [Text(f"\n{title}", style="bold"), table] if fields else []


def _options(title: str, options: Sequence[NodeOption]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for option in options:
        table.add_row(
            Text(f"  {option.name}"), Text(option.type), Text(f"= {option.default!r}"), Text(option.meaning)
        )
    return [Text(f"\n{title}", style="bold"), table] if options else []
