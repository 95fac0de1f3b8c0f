"""The layout of the graph drawing: order within columns, positions, and paths of edges.

An edge over several layers passes through a dummy node in each layer between, which keeps its path free of
nodes. Edges from one source share their dummies. Pure: equal graphs give equal drawings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hflow.graph.ir import EdgeKind
from hflow.report.html.plan.cards import Arrow, Card

NUM_SWEEPS = 12

Columns = tuple[tuple[str, ...], ...]
"""layer -> names of nodes and dummies, top to bottom."""


@dataclass(frozen=True)
class Chain:
    """An edge as the places that it visits, one per layer: its source, dummies, its destination."""

    places: tuple[str, ...]

    @property
    def dummies(self) -> tuple[str, ...]:
        """Return the places between its ends."""
        return self.places[1:-1]


def make_chain(src: str, dst: str, layers: Mapping[str, int]) -> Chain:
    """Make the chain of an edge from one layer to a later one."""
    between = range(layers[src] + 1, layers[dst])
    return Chain((src, *(f"{src} over {layer}" for layer in between), dst))


def order_columns(layers: Mapping[str, int], chains: Sequence[Chain]) -> Columns:
    """Put nodes and dummies into columns in an order with few crossings, starting from that of `layers`."""
    columns = _start(layers, chains)
    arcs = list(dict.fromkeys(arc for chain in chains for arc in pairwise(chain.places)))
    best, fewest = columns, num_crossings(columns, arcs)
    for sweep in range(NUM_SWEEPS):
        columns = _exchange(_sweep(columns, arcs, forward=sweep % 2 == 0), arcs)
        crossings = num_crossings(columns, arcs)
        if crossings < fewest:
            best, fewest = columns, crossings
    return best


def num_crossings(columns: Columns, arcs: Iterable[tuple[str, str]]) -> int:
    """Count pairs of arcs that cross between two neighbouring columns."""
    at = _places(columns)
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for src, dst in arcs:
        by_layer.setdefault(at[src][0], []).append((at[src][1], at[dst][1]))
    return sum(
        (a - c) * (b - d) < 0
        for ends in by_layer.values()
        for i, (a, b) in enumerate(ends)
        for c, d in ends[:i]
    )


def _start(layers: Mapping[str, int], chains: Sequence[Chain]) -> Columns:
    columns: list[list[str]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for name, layer in layers.items():
        columns[layer].append(name)
    for chain in chains:
        for offset, dummy in enumerate(chain.dummies, layers[chain.places[0]] + 1):
            columns[offset].append(dummy)
    return tuple(tuple(dict.fromkeys(column)) for column in columns)


def _places(columns: Columns) -> dict[str, tuple[int, int]]:
    return {name: (layer, i) for layer, column in enumerate(columns) for i, name in enumerate(column)}


def _sweep(columns: Columns, arcs: Sequence[tuple[str, str]], forward: bool) -> Columns:
    """Sort each column by the mean position of its neighbours in the column sorted before it."""
    neighbours: dict[str, list[str]] = {}
    for src, dst in arcs:
        fixed, moved = (src, dst) if forward else (dst, src)
        neighbours.setdefault(moved, []).append(fixed)
    sorted_ones = list(columns)
    for layer in range(len(columns)) if forward else reversed(range(len(columns))):
        at = {name: i for name, (_, i) in _places(tuple(sorted_ones)).items()}
        sorted_ones[layer] = tuple(
            sorted(sorted_ones[layer], key=lambda name: _mean([at[n] for n in neighbours.get(name, [name])]))
        )
    return tuple(sorted_ones)


def _exchange(columns: Columns, arcs: Sequence[tuple[str, str]]) -> Columns:
    """Swap neighbours as long as that saves crossings."""
    fewest = num_crossings(columns, arcs)
    improved = True
    while improved:
        improved = False
        for layer, column in enumerate(columns):
            for i in range(len(column) - 1):
                swapped = (*column[:i], column[i + 1], column[i], *column[i + 2 :])
                tried = (*columns[:layer], swapped, *columns[layer + 1 :])
                crossings = num_crossings(tried, arcs)
                if crossings < fewest:
                    columns, column, fewest, improved = tried, swapped, crossings, True
    return columns


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


NUM_PLACEMENT_SWEEPS = 24
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
    """Return the top of every place; the topmost is at 0, and neighbours of a column are `gap` apart."""
    tops = {name: top for column in columns for name, top in _stack(column, heights, gap)}
    for sweep in range(NUM_PLACEMENT_SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            _settle(column, tops, heights, _preferences(tops, pulls, forward), gap)
    both = _preferences(tops, pulls, True), _preferences(tops, pulls, False)
    for column in columns:
        merged = {name: both[0].get(name, []) + both[1].get(name, []) for name in column}
        _settle(column, tops, heights, merged, gap)
    highest = min(tops.values(), default=0.0)
    return {name: top - highest for name, top in tops.items()}


Preferences = Mapping[str, list[tuple[float, float]]]
"""Place -> (top that an edge prefers, its weight)."""


def _preferences(tops: Mapping[str, float], pulls: Sequence[Pull], forward: bool) -> Preferences:
    preferences: dict[str, list[tuple[float, float]]] = {}
    for pull in pulls:
        if forward:
            preferences.setdefault(pull.dst, []).append(
                (tops[pull.src] + pull.leaves - pull.enters, pull.weight)
            )
        else:
            preferences.setdefault(pull.src, []).append(
                (tops[pull.dst] + pull.enters - pull.leaves, pull.weight)
            )
    return preferences


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
    preferences: Preferences,
    gap: float,
) -> None:
    """Move the places of one column to where edges prefer them, in their order and without overlap."""
    blocks: list[tuple[float, float, list[tuple[str, float]]]] = []
    offset = 0.0
    for name in column:
        wanted = [*preferences.get(name, []), (tops[name], AT_REST)]
        weight = sum(share for _, share in wanted)
        mean = sum(top * share for top, share in wanted) / weight - offset
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
    """Find the position of everything on the canvas."""
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


Point = tuple[float, float]
RADIUS = 9.0


def curve(stops: Sequence[tuple[float, float, float]]) -> str:
    """Return a line through stops `(left, right, y)`: horizontal between left and right, smooth in the gaps.

    The first stop is the source's right side, the last one the destination's left side.
    """
    parts = [f"M{stops[0][1]:.1f} {stops[0][2]:.1f}"]
    for (_, x1, y1), (left, right, y2) in pairwise(stops):
        bend = (left - x1) / 2
        parts.append(f"C{x1 + bend:.1f} {y1:.1f} {left - bend:.1f} {y2:.1f} {left:.1f} {y2:.1f}")
        if right > left:
            parts.append(f"H{right:.1f}")
    return "".join(parts)


def rounded(points: Sequence[Point]) -> str:
    """Return a path of horizontal and vertical pieces with round corners."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(RADIUS, _length(before, corner) / 2, _length(corner, after) / 2)
        start, stop = _towards(corner, before, reach), _towards(corner, after, reach)
        parts.append(f"L{start[0]:.1f} {start[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f}")
        parts.append(f" {stop[0]:.1f} {stop[1]:.1f}")
    parts.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(parts)


def hook(x: float, start: float, stop: float, reach: float) -> str:
    """Return a path from one card to another of the same column, along their left sides."""
    return f"M{x:.1f} {start:.1f}C{x - reach:.1f} {start:.1f} {x - reach:.1f} {stop:.1f} {x:.1f} {stop:.1f}"


def _length(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(corner: Point, other: Point, reach: float) -> Point:
    """Return the point between two corners at a distance from the first."""
    length = _length(corner, other) or 1.0
    return (
        corner[0] + (other[0] - corner[0]) / length * reach,
        corner[1] + (other[1] - corner[1]) / length * reach,
    )


ELBOW, STEP, NUM_STEPS = 16, 6, 4
"""Distance from the cards at which backward paths turn: the first, each next one, and how many differ."""
SHIFTS = {EdgeKind.DATA: 0.0, EdgeKind.OVERWRITE: 4.0, EdgeKind.ORDER: -4.0}
"""Offsets of edges of different kinds that pass a column at one place."""
REACH = 26.0


def wire(arrow: Arrow, places: Places, cards: Mapping[str, Card], chains: Chains) -> str:
    """Return the SVG path of an arrow."""
    chain = chains.get((arrow.src, arrow.dst))
    start = places.tops[arrow.src] + cards[arrow.src].exit(arrow.kind)
    stop = places.tops[arrow.dst] + cards[arrow.dst].port(arrow.id)
    if chain is not None:
        return curve(_stops(arrow, places, chain, start, stop))
    if not leads_back(arrow, places.layers):
        return hook(places.left(arrow.dst), start, stop, REACH)
    lane, elbow = _way_back(arrow, places, cards)
    right, left = places.right(arrow.src), places.left(arrow.dst)
    out, back = right + elbow, left - elbow
    return rounded([(right, start), (out, start), (out, lane), (back, lane), (back, stop), (left, stop)])


def _way_back(arrow: Arrow, places: Places, cards: Mapping[str, Card]) -> tuple[float, float]:
    """Return the height at which an arrow returns, and how far from the cards it turns."""
    if is_loop(arrow):
        return places.tops[arrow.src] + cards[arrow.src].height + GAP_Y / 2, ELBOW
    return places.lanes[arrow.key], ELBOW + STEP * (list(places.lanes).index(arrow.key) % NUM_STEPS)


def _stops(
    arrow: Arrow, places: Places, chain: Chain, start: float, stop: float
) -> list[tuple[float, float, float]]:
    first, last = places.right(arrow.src), places.left(arrow.dst)
    stops = [(first, first, start)]
    for layer, dummy in enumerate(chain.dummies, places.layers[arrow.src] + 1):
        left = places.lefts[layer]
        y = places.tops[dummy] + DUMMY / 2 + SHIFTS.get(arrow.kind, 0.0)
        stops.append((left, left + places.widths[layer], y))
    return [*stops, (last, last, stop)]
