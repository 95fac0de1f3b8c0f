"""The positions of the graph's cards, columns and backward paths on the canvas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hflow.graph.ir import EdgeKind
from hflow.report.page.cards import Card
from hflow.report.page.edges import Arrow
from hflow.report.page.layered import Chain, Columns

NUM_SWEEPS = 24
AT_REST = 0.01
"""Weight of a place's current position, relative to the edges that pull it."""


@dataclass(frozen=True)
class Pull:
    """One piece of an edge between neighbouring columns, which should be horizontal."""

    src: str
    dst: str
    leaves: float
    """Where it leaves, relative to the source's top."""
    enters: float
    """Where it enters, relative to the destination's top."""
    weight: float = 1.0


def place_tops(
    columns: Sequence[Sequence[str]], heights: Mapping[str, float], pulls: Sequence[Pull], gap: float
) -> dict[str, float]:
    """Return the top of every place; the topmost is at 0.

    Args:
        columns: layer -> places, top to bottom.
        heights: place -> height.
        pulls: pieces of edges between neighbouring columns.
        gap: smallest distance between two neighbours of a column.
    """
    tops = {name: top for column in columns for name, top in _stack(column, heights, gap)}
    for sweep in range(NUM_SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            _settle(column, tops, heights, _wishes(tops, pulls, forward), gap)
    both = _wishes(tops, pulls, True), _wishes(tops, pulls, False)
    for column in columns:
        merged = {name: both[0].get(name, []) + both[1].get(name, []) for name in column}
        _settle(column, tops, heights, merged, gap)
    highest = min(tops.values(), default=0.0)
    return {name: top - highest for name, top in tops.items()}


Wishes = Mapping[str, list[tuple[float, float]]]
"""Place -> (top that an edge prefers, its weight)."""


def _wishes(tops: Mapping[str, float], pulls: Sequence[Pull], forward: bool) -> Wishes:
    wishes: dict[str, list[tuple[float, float]]] = {}
    for pull in pulls:
        if forward:
            wishes.setdefault(pull.dst, []).append((tops[pull.src] + pull.leaves - pull.enters, pull.weight))
        else:
            wishes.setdefault(pull.src, []).append((tops[pull.dst] + pull.enters - pull.leaves, pull.weight))
    return wishes


def _stack(column: Sequence[str], heights: Mapping[str, float], gap: float) -> list[tuple[str, float]]:
    """Return a column centred on 0."""
    top = -(sum(heights[name] for name in column) + gap * (len(column) - 1)) / 2
    rows = []
    for name in column:
        rows.append((name, top))
        top += heights[name] + gap
    return rows


def _settle(
    column: Sequence[str],
    tops: dict[str, float],
    heights: Mapping[str, float],
    wishes: Wishes,
    gap: float,
) -> None:
    """Move the places of one column to where edges prefer them, in their order and without overlap."""
    blocks: list[tuple[float, float, list[tuple[str, float]]]] = []
    offset = 0.0
    for name in column:
        asked = [*wishes.get(name, []), (tops[name], AT_REST)]
        weight = sum(share for _, share in asked)
        mean = sum(top * share for top, share in asked) / weight - offset
        members = [(name, offset)]
        while blocks and blocks[-1][0] > mean:
            above, above_weight, above_members = blocks.pop()
            mean = (above * above_weight + mean * weight) / (above_weight + weight)
            weight, members = weight + above_weight, above_members + members
        blocks.append((mean, weight, members))
        offset += heights[name] + gap
    for mean, _, members in blocks:
        for name, offset in members:
            tops[name] = mean + offset


GAP_X, GAP_Y = 62, 22
MARGIN_X, MARGIN_Y = 46, 10
TITLE = 22
"""Height of the stages' titles."""
LANE_ABOVE, LANE_BELOW = 12, 24
"""Distance between two backward paths; those above have no labels."""
DUMMY = 10
"""Height that an edge takes in a column that it passes."""
WEIGHTS = {EdgeKind.DATA: 1.0, EdgeKind.OVERWRITE: 0.1, EdgeKind.ORDER: 0.05}
"""How strongly an edge pulls its ends to one height."""

Chains = Mapping[tuple[str, str], Chain]
"""(source, destination) -> the places that an edge to the right visits."""


@dataclass(frozen=True)
class Places:
    """The canvas, in pixels."""

    layers: Mapping[str, int]
    """Node -> column."""
    lefts: tuple[float, ...]
    widths: tuple[float, ...]
    """Column -> left edge and width of its cards."""
    tops: Mapping[str, float]
    """Node or dummy -> top."""
    lanes: Mapping[str, float]
    """Key of backward arrows -> height of their path around the cards."""
    width: float
    height: float

    def left(self, node: str) -> float:
        """Return the left edge of a node's card."""
        return self.lefts[self.layers[node]]

    def right(self, node: str) -> float:
        """Return the right edge of a node's card."""
        return self.left(node) + self.widths[self.layers[node]]


def leads_back(arrow: Arrow, layers: Mapping[str, int]) -> bool:
    """Return whether an arrow goes around the cards: to an earlier column, or to a later step."""
    src, dst = layers[arrow.src], layers[arrow.dst]
    return src > dst or (src == dst and bool(arrow.lag))


def is_loop(arrow: Arrow) -> bool:
    """Return whether an arrow is a node's own state, which returns directly below its card."""
    return arrow.kind is EdgeKind.DATA and arrow.src == arrow.dst


def find_places(
    cards: Mapping[str, Card],
    arrows: Sequence[Arrow],
    layers: Mapping[str, int],
    chains: Chains,
    columns: Columns,
) -> Places:
    """Find the position of everything on the canvas.

    Args:
        cards: node -> its card.
        arrows: all edges.
        layers: node -> column.
        chains: those of the arrows that go to the right.
        columns: order within each column, dummies included.
    """
    dummies = {dummy: float(DUMMY) for chain in chains.values() for dummy in chain.dummies}
    heights = {name: card.height for name, card in cards.items()} | dummies
    pulls = [pull for arrow in arrows for pull in _pulls(arrow, cards, chains)]
    above = _lanes(arrows, layers, above=True)
    below = _lanes(arrows, layers, above=False)
    head = float(MARGIN_Y + TITLE + LANE_ABOVE * len(above) + 8)
    tops = {name: top + head for name, top in place_tops(columns, heights, pulls, GAP_Y).items()}
    bottom = max(tops[name] + heights[name] for name in tops)
    lanes = {key: head - LANE_ABOVE * (i + 1) + 2 for i, key in enumerate(above)}
    lanes |= {key: bottom + LANE_BELOW * (i + 1) for i, key in enumerate(below)}
    lefts, widths, x = [], [], float(MARGIN_X)
    for column in columns:
        width = max((cards[name].width for name in column if name in cards), default=0.0)
        lefts.append(x)
        widths.append(width)
        x += width + GAP_X
    return Places(
        layers=layers,
        lefts=tuple(lefts),
        widths=tuple(widths),
        tops=tops,
        lanes=lanes,
        width=x - GAP_X + MARGIN_X,
        height=bottom + LANE_BELOW * len(below) + MARGIN_Y,
    )


def _pulls(arrow: Arrow, cards: Mapping[str, Card], chains: Chains) -> list[Pull]:
    chain = chains.get((arrow.src, arrow.dst))
    pieces = []
    for src, dst in pairwise(chain.places if chain else ()):
        leaves = cards[src].exit(arrow.kind) if src in cards else DUMMY / 2
        enters = cards[dst].port(arrow.id) if dst in cards else DUMMY / 2
        is_inner = src not in cards and dst not in cards
        pieces.append(
            Pull(src, dst, leaves, enters, WEIGHTS.get(arrow.kind, 0.1) * (4.0 if is_inner else 1.0))
        )
    return pieces


def _lanes(arrows: Sequence[Arrow], layers: Mapping[str, int], above: bool) -> list[str]:
    """Return the keys of the backward paths on one side, innermost first: orders above, weights below."""
    back = [arrow for arrow in arrows if leads_back(arrow, layers) and not is_loop(arrow)]
    back = [arrow for arrow in back if (arrow.kind is EdgeKind.ORDER) is above]
    return list(dict.fromkeys(arrow.key for arrow in back))
