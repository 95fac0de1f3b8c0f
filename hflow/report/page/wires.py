"""The path of one edge between cards that have their places."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.ir import EdgeKind
from hflow.report.page.cards import Card
from hflow.report.page.edges import Arrow
from hflow.report.page.layered import Chain
from hflow.report.page.paths import curve, hook, rounded
from hflow.report.page.places import DUMMY, GAP_Y, Chains, Places, is_loop, leads_back

ELBOW, STEP, NUM_STEPS = 16, 6, 4
"""Ways back turn so far beside the cards: the first, and each next one, of so many."""
SHIFTS = {EdgeKind.DATA: 0.0, EdgeKind.OVERWRITE: 4.0, EdgeKind.ORDER: -4.0}
"""Edges of different kinds that pass a column at one place run beside each other."""
REACH = 26.0


def wire(arrow: Arrow, places: Places, cards: Mapping[str, Card], chains: Chains) -> str:
    """The SVG path of an arrow."""
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
    """The height at which an arrow returns, and how far beside the cards it turns."""
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
