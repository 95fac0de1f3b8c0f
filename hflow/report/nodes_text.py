"""The output of `hflow nodes`: the ready nodes in a line each, and one with all that can be set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hflow.launch.node_catalog import NodeField, NodeOption, ReadyNode


def render_nodes(nodes: Sequence[ReadyNode]) -> RenderableType:
    """Return a row for each node: name, kind, and what it does, in the order of a recipe."""
    table = Table.grid(padding=(0, 2))
    for section, title in _SECTIONS.items():
        table.add_row(Text(title, style="bold"))
        for node in nodes:
            if _section(node) == section:
                table.add_row(f"  {node.name}", f"{node.kind} per {node.level}", Text(node.summary))
    more = Text("hflow nodes NAME lists the inputs, outputs and options of one", style="dim")
    return Group(table, Text(), more)


_SECTIONS = {
    "generate": "Generation",
    "encode": "Written examples",
    "rewards": "Rewards",
    "infer": "Forward passes",
    "compute": "Advantages, weights",
    "train": "Losses",
}
"""Kind of node, or `rewards`, and its title."""


def _section(node: ReadyNode) -> str:
    return "rewards" if node.name.startswith("rewards.") else node.kind


def render_node(node: ReadyNode) -> RenderableType:
    """Return a node with its inputs, outputs, knobs and options."""
    parts: list[RenderableType] = [
        Text.assemble((node.name, "bold"), f"  {node.kind} per {node.level}"),
        Text(node.description),
    ]
    parts += _fields("reads", [*node.inputs, *node.provided])
    parts += _fields("returns", node.outputs)
    name = node.name.partition(".")[2]
    parts += _options(f"knobs, as nodes.{name}.KNOB=VALUE", node.knobs)
    parts += _options(f"options of @{node.kind}", node.options)
    return Group(*parts)


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
