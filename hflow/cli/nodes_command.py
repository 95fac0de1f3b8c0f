"""`hflow nodes`."""

from __future__ import annotations

from typing import Annotated

import typer

from hflow import launch
from hflow.report.nodes_text import render_node, render_nodes
from hflow.terminal import print_json, show


def nodes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A node, such as actor_train. Default: list all.", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ready nodes and rewards, or all that can be set of one."""
    if name is None:
        found = launch.ready_nodes()
        if json:
            print_json([node.to_json() for node in found])
        else:
            show(render_nodes(found))
        return
    node = launch.ready_node(name)
    if json:
        print_json(node.to_json())
    else:
        show(render_node(node))
