"""The cards of the graph drawing, one for each node, and the edges between their rows.

A card has a head, then one row for everything that the node reads and returns. An edge, of the graph or of
the node order of a device group, ends at the row of its fields, so edges need no labels that could overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.graph.ir import Edge, EdgeKind, Level, Node
from hflow.planner.plan.rows import SAVE_PREFIX, Plan
from hflow.planner.plan.schedule import order_edges
from hflow.planner.plan.staleness import max_lag

SAMPLES = ("samples",)
"""Label of a data edge that names no fields."""


@dataclass(frozen=True)
class Arrow:
    """One edge to draw."""

    id: str
    kind: EdgeKind
    src: str
    dst: str
    label: tuple[str, ...]
    """What it carries, one line each: fields, or the model whose weights."""
    lag: int
    """Number of steps that it crosses."""
    is_at_most: bool
    """Whether it may cross fewer."""
    key: str
    """Arrows with the same key share one path back (weights of one writer for all its readers)."""

    @property
    def lag_text(self) -> str:
        """Return `lag 1` or `lag ≤ 2`; empty within a step."""
        return f"lag {'≤ ' if self.is_at_most else ''}{self.lag}" if self.lag else ""

    @property
    def text(self) -> str:
        """Return label and lag in one line."""
        return ", ".join((*self.label, self.lag_text) if self.lag else self.label)


def arrows(plan: Plan) -> tuple[Arrow, ...]:
    """Return all edges, in the plan's order."""
    made = [*_of_graph(plan), *_orders(plan)]
    return tuple(replace(arrow, id=f"e{i}") for i, arrow in enumerate(made))


def _of_graph(plan: Plan) -> Iterator[Arrow]:
    schedule = plan.schedule
    for edge in plan.graph.edges:
        lag = max_lag(edge, schedule.settings)
        key = f"{edge.kind} {edge.src} {edge.model or edge.fields}"
        yield Arrow("", edge.kind, edge.src, edge.dst, _label(edge), lag, edge.at_most, key)


def _label(edge: Edge) -> tuple[str, ...]:
    if edge.kind is EdgeKind.DATA:
        return edge.fields or SAMPLES
    return (f"weights of {edge.model}" if edge.kind is EdgeKind.WEIGHTS else f"before {edge.model} changes",)


def _orders(plan: Plan) -> Iterator[Arrow]:
    """Yield the cyclic orders of nodes; saving is drawn as part of its writer."""
    orders = []
    for group, names in plan.schedule.orders:
        turns = tuple(name for name in names if not name.startswith(SAVE_PREFIX))
        orders += [(group, turns)] if turns else []
    for edge in order_edges(orders):
        label = (f"order of group {' and '.join(edge.groups)}",)
        key = f"order {edge.src} {edge.dst}"
        yield Arrow("", EdgeKind.ORDER, edge.src, edge.dst, label, edge.lag, False, key)


VERBS: Mapping[str, str] = {
    "generate": "an engine writes answers to prompts",
    "encode": "texts become tokens, without a model",
    "compute": "plain Python or tensor code, such as rewards and advantages",
    "infer": "a forward pass without learning",
    "train": "forward, backward and optimizer steps: the weights change",
    "update": "weights are blended into another copy, as in a moving average",
    "own": "a kind of node that the recipe defines",
}
"""Verb -> what such a node does."""


def shape_of(node: Node) -> str:
    """Return the node's verb, or `own` for a user's node type."""
    return "own" if node.spec.kind else node.spec.verb


def outline(verb: str, width: float, height: float) -> str:
    """Return an SVG path around a box at (0, 0)."""
    corners = {
        "generate": _round(width, height, (14, 14, 14, 14)),
        "encode": _round(width, height, (14, 3, 3, 14)),
        "infer": _cut(width, height, (9, 9, 9, 9)),
        "update": _cut(width, height, (14, 0, 14, 0)),
        "train": _round(width, height, (3, 14, 14, 3)),
    }
    return corners.get(verb, _round(width, height, (3, 3, 3, 3)))


def _round(w: float, h: float, radii: tuple[int, int, int, int]) -> str:
    a, b, c, d = radii
    return (
        f"M{a} 0H{w - b:g}A{b} {b} 0 0 1 {w:g} {b}V{h - c:g}A{c} {c} 0 0 1 {w - c:g} {h:g}"
        f"H{d}A{d} {d} 0 0 1 0 {h - d:g}V{a}A{a} {a} 0 0 1 {a} 0Z"
    )


def _cut(w: float, h: float, cuts: tuple[int, int, int, int]) -> str:
    a, b, c, d = cuts
    return f"M{a} 0H{w - b:g}L{w:g} {b}V{h - c:g}L{w - c:g} {h:g}H{d}L0 {h - d:g}V{a}Z"


HEAD = 46
LINE = 15
PAD = 6
CHAR = 6.7
"""Width of a character in a row, in pixels (monospaced font at 11 pixels)."""
HEAD_CHAR = 7.9
"""Width of a character in the head (13 pixels)."""
NOTE_CHAR = 6.2
"""Width of a character in the line below the name."""
NARROWEST, WIDEST = 148, 226
PORT = HEAD / 2
"""Where edges without a row of their own arrive and leave."""


@dataclass(frozen=True)
class CardRow:
    """One thing that a node reads (an edge arrives) or returns (edges leave)."""

    side: str
    """`in` or `out`."""
    kind: str
    """`data`, `column` (of the dataset, without an edge), `weights`."""
    lines: tuple[str, ...]
    note: str = ""
    arrow: str = ""
    """The edge that arrives here."""

    @property
    def height(self) -> int:
        """Pixels."""
        return LINE * len(self.lines)


@dataclass(frozen=True)
class Card:
    """The content and size of a node's card, before it has a position."""

    name: str
    title: str
    verb: str
    shape: str
    note: str
    groups: tuple[str, ...]
    """The device groups whose turns it takes."""
    rows: tuple[CardRow, ...]

    @property
    def group_title(self) -> str:
        """Return the names of its groups, shortened to the card's width."""
        return ellipsize(", ".join(self.groups), 10)

    @property
    def height(self) -> float:
        """Pixels."""
        return HEAD + sum(row.height for row in self.rows) + 2 * PAD

    @property
    def width(self) -> float:
        """Return the width of the longest line, in pixels."""
        head = 44 + HEAD_CHAR * len(self.title)
        rows = [30 + CHAR * max(len(line) for line in row.lines) + CHAR * len(row.note) for row in self.rows]
        note = 50 + NOTE_CHAR * (len(self.note) + len(self.group_title))
        return min(WIDEST, max(NARROWEST, head, note, *rows))

    def row_tops(self) -> tuple[float, ...]:
        """Return the top of each row, relative to the card's top."""
        tops, top = [], float(HEAD + PAD)
        for row in self.rows:
            tops.append(top)
            top += row.height
        return tuple(tops)

    def port(self, arrow: str) -> float:
        """Return the height at which an edge arrives, relative to the card's top."""
        for row, top in zip(self.rows, self.row_tops(), strict=True):
            if row.arrow == arrow:
                return top + LINE / 2
        return PORT

    def exit(self, kind: EdgeKind) -> float:
        """Return the height at which edges of a kind leave, relative to the card's top."""
        wanted = {EdgeKind.DATA: "data", EdgeKind.WEIGHTS: "weights"}.get(kind)
        for row, top in zip(self.rows, self.row_tops(), strict=True):
            if row.side == "out" and row.kind == wanted:
                return top + LINE / 2
        return PORT


def make_card(plan: Plan, node: Node, arriving: Sequence[Arrow], seconds: str) -> Card:
    """Make the card of a node, with a row for each arriving edge, and its time (empty if unknown)."""
    placement = plan.placement(node.name)
    level = next((row.level for row in plan.schedule.nodes if row.name == node.name), Level.SAMPLE)
    is_turn = placement.groups and (level is Level.BATCH or node.spec.opens_stream)
    fires = "" if is_turn else f"per {node.spec.level}"
    parts = [node.spec.kind_name, fires, seconds]
    return Card(
        name=node.name,
        title=ellipsize(node.name, 22),
        verb=node.spec.kind_name,
        shape=shape_of(node),
        note=" · ".join(part for part in parts if part),
        groups=placement.groups,
        rows=tuple(_rows(node, arriving)),
    )


def ellipsize(text: str, num_chars: int) -> str:
    """Shorten a text to a number of characters, with dots in its middle."""
    if len(text) <= num_chars:
        return text
    tail = (num_chars - 1) // 2
    return f"{text[: num_chars - 1 - tail]}…{text[-tail:]}"


def _rows(node: Node, arriving: Sequence[Arrow]) -> Iterator[CardRow]:
    columns = tuple(ellipsize(read.field, 24) for read in node.reads if read.producer == node.name)
    if node.spec.opens_stream and columns:
        yield CardRow("in", "column", columns)
    for kind, name in ((EdgeKind.DATA, "data"), (EdgeKind.WEIGHTS, "weights")):
        for arrow in arriving:
            if arrow.kind is kind:
                lines = tuple(ellipsize(line, 24) for line in arrow.label)
                yield CardRow("in", name, lines, note=arrow.lag_text, arrow=arrow.id)
    yield from _out_rows(node)


def _out_rows(node: Node) -> Iterator[CardRow]:
    if node.spec.opens_stream:
        yield CardRow("out", "data", ("samples",))
    elif node.spec.returns and node.spec.verb != "train":
        yield CardRow("out", "data", tuple(ellipsize(row.field, 24) for row in node.spec.returns))
    for model in node.spec.writes_weights:
        yield CardRow("out", "weights", (f"weights of {ellipsize(model, 12)}",))
