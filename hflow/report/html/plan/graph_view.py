"""The graph as a drawing: cards by stage from left to right, edges between them, and paths back around them.

Edges within a step go to the right. Weights return below the cards, backward order edges above them, and a
node's own state directly below its card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.graph.render import stages
from hflow.planner.plan.rows import Plan
from hflow.report.html.plan.cards import LINE, VERBS, Arrow, Card, CardRow, arrows, make_card, outline
from hflow.report.html.plan.graph_layout import (
    MARGIN_Y,
    Chains,
    Places,
    find_places,
    leads_back,
    make_chain,
    order_columns,
    wire,
)

BASELINE = 11
"""Baseline of a row's text, relative to the row's top."""
LAST_ROW = 1_000
"""Sorts rows of backward edges after all others."""


@dataclass(frozen=True)
class RowView:
    """One row of a card, with its position."""

    row: CardRow
    lines: tuple[tuple[str, float], ...]
    """(text, baseline below the card's top)."""
    port: float
    """Centre of its first line, below the card's top."""


@dataclass(frozen=True)
class NodeView:
    """One card, with its position."""

    card: Card
    x: float
    y: float
    width: float
    outline: str
    rows: tuple[RowView, ...]


@dataclass(frozen=True)
class LaneLabel:
    """The name of a backward path, written along it."""

    kind: str
    text: str
    x: float
    y: float
    edges: tuple[str, ...]


@dataclass(frozen=True)
class GraphView:
    """The whole drawing."""

    width: float
    height: float
    nodes: tuple[NodeView, ...]
    edges: tuple[tuple[Arrow, str], ...]
    """Each with its path."""
    labels: tuple[LaneLabel, ...]
    stages: tuple[tuple[str, float, float], ...]
    """(title, x, y) of each column."""
    verbs: tuple[tuple[str, str], ...]
    """(verb, meaning) of the verbs in the graph."""


def graph_view(plan: Plan, seconds: Mapping[str, str]) -> GraphView:
    """Draw a plan's graph; `seconds` is node -> its time as text, where it is known."""
    drawn = arrows(plan)
    depth = stages(plan.graph)
    layers = {node.name: depth[node.name] for node in plan.graph.nodes}
    chains = {
        (arrow.src, arrow.dst): make_chain(arrow.src, arrow.dst, layers)
        for arrow in drawn
        if layers[arrow.src] < layers[arrow.dst]
    }
    columns = order_columns(layers, tuple(chains.values()))
    at = {name: i for column in columns for i, name in enumerate(column)}
    entry = {ends: at[chain.places[-2]] for ends, chain in chains.items()}
    cards = {}
    for node in plan.graph.nodes:
        arriving = [arrow for arrow in drawn if arrow.dst == node.name]
        arriving.sort(key=lambda arrow: entry.get((arrow.src, arrow.dst), LAST_ROW))
        cards[node.name] = make_card(plan, node, arriving, seconds.get(node.name, ""))
    places = find_places(cards, drawn, layers, chains, columns)
    return _view(cards, drawn, places, chains)


def _view(cards: Mapping[str, Card], drawn: tuple[Arrow, ...], places: Places, chains: Chains) -> GraphView:
    shapes = {card.shape for card in cards.values()}
    return GraphView(
        width=round(places.width, 1),
        height=round(places.height, 1),
        nodes=tuple(_node(card, places) for card in cards.values()),
        edges=tuple((arrow, wire(arrow, places, cards, chains)) for arrow in drawn),
        labels=tuple(_label(key, drawn, places) for key in places.lanes),
        stages=tuple((f"stage {i}", round(x, 1), MARGIN_Y + 8.0) for i, x in enumerate(places.lefts)),
        verbs=tuple((verb, text) for verb, text in VERBS.items() if verb in shapes),
    )


def _node(card: Card, places: Places) -> NodeView:
    width = places.widths[places.layers[card.name]]
    return NodeView(
        card,
        x=round(places.left(card.name), 1),
        y=round(places.tops[card.name], 1),
        width=round(width, 1),
        outline=outline(card.shape, width, card.height),
        rows=tuple(_row(row, top) for row, top in zip(card.rows, card.row_tops(), strict=True)),
    )


def _row(row: CardRow, top: float) -> RowView:
    lines = tuple((line, top + BASELINE + LINE * i) for i, line in enumerate(row.lines))
    return RowView(row, lines, top + LINE / 2)


def _label(key: str, drawn: tuple[Arrow, ...], places: Places) -> LaneLabel:
    members = [arrow for arrow in drawn if arrow.key == key and leads_back(arrow, places.layers)]
    first = members[0]
    ids = tuple(arrow.id for arrow in members)
    x, y = places.right(first.src), places.lanes[key] - 5
    return LaneLabel(str(first.kind), ", ".join(first.label), round(x, 1), round(y, 1), ids)
