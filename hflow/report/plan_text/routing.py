"""The routing table: which worker stands for which shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hflow.plan.ir import Plan, RoutingRow
from hflow.report.plan_text.section import Section, add_row, number, table, text

NUM_SHOWN = 2
"""Keys of one replica before the dots; one more stands behind them."""
NOTE = (
    "How a part is found. A key is (replica, d, t, p), or __data0__ for data rank 0 of the node that opens "
    "the stream, or a worker's number; there is one worker to a device."
)


def routing_section(plan: Plan, width: int) -> Section:
    """A row for each replica, the samples' source and the bare workers."""
    shown = table(text("of"), number("keys"), text("key → worker"))
    for name, rows in _parts(plan):
        add_row(shown, name, f"{len(rows):,}", _keys(rows))
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


def _keys(rows: Sequence[RoutingRow]) -> str:
    shown = [f"{row.key} → {row.worker}" for row in rows]
    if len(shown) > NUM_SHOWN + 1:
        shown[NUM_SHOWN:-1] = ["…"]
    return ", ".join(shown)
