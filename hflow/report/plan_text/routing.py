"""The routing table: which worker stands for which shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hflow.plan.ir import Plan, RoutingRow
from hflow.report.plan_text.section import GAP, Section, add_row, number, table, text

FIRST_KEYS = (2, 1)
"""Keys before the dots: the most that fit into a line with the last one."""
NOTE = (
    "How a part is found. A key is (replica, d, t, p), or __data0__ for data rank 0 of the node that opens "
    "the stream, or a worker's number; there is one worker to a device."
)


def routing_section(plan: Plan, width: int) -> Section:
    """A row for each replica, the samples' source and the bare workers."""
    shown, parts = table(text("of"), number("keys"), text("key → worker")), list(_parts(plan))
    room = width - max(len(name) for name, _ in parts) - len("1,024") - 2 * GAP
    for name, rows in parts:
        add_row(shown, name, f"{len(rows):,}", _keys(rows, room))
    return Section("Routing", NOTE, (shown,))


def _parts(plan: Plan) -> Iterator[tuple[str, Sequence[RoutingRow]]]:
    start = 0
    for replica in plan.replicas:
        yield replica.name, plan.routing[start : start + replica.layout.world]
        start += replica.layout.world
    rest = plan.routing[start:]
    num_data = sum(row.key.startswith("__data") for row in rest)
    yield plan.schedule.streams[0].source, rest[:num_data]
    yield "workers", rest[num_data:]


def _keys(rows: Sequence[RoutingRow], room: int) -> str:
    """All keys where there are few; else the first ones and the last, in one line if possible."""
    pairs = [f"{row.key} → {row.worker}" for row in rows]
    if len(pairs) <= FIRST_KEYS[0] + 1:
        return ", ".join(pairs)
    folded = [", ".join((*pairs[:first], "…", pairs[-1])) for first in FIRST_KEYS]
    return next((words for words in folded if len(words) <= room), folded[-1])
