"""The path of one edge between positioned cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hflow.graph.ir import EdgeKind
from hflow.report.page.cards import Card
from hflow.report.page.edges import Arrow
from hflow.report.page.layered import Chain
from hflow.report.page.places import DUMMY, GAP_Y, Chains, Places, is_loop, leads_back

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
