"""The routing table of a plan, and the workers whose process can be replaced while the run continues.

The table names the worker that each key stands for. There are three kinds of keys: a model shard, the data
shard `__data{i}__` (dp-head i of the source node), and the worker's own index. Several keys may stand for one
worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Plan, Replica, RoutingRow
from hflow.shapes.layout import RankOrder


def shard_key(model: str, dp: int, tp: int, pp: int, cp: int | None = None) -> str:
    """Return the key of one shard of a replica. Only layouts with a context axis name its index."""
    context = "" if cp is None else f", {cp}"
    return f"({model}, {dp}, {tp}, {pp}{context})"


def data_key(i: int) -> str:
    """Return the key of the source's data shard `i`."""
    return f"__data{i}__"


def worker_key(worker: int) -> str:
    """Return the key of a worker."""
    return str(worker)


def rank_order(role: str) -> RankOrder:
    """Return the rank order of a replica with this role: only generation has its own order."""
    return RankOrder.GENERATE if role == "gen" else RankOrder.TRAIN


def on_workers(replica: Replica, workers: tuple[int, ...]) -> Replica:
    """Return a replica whose ranks run on these workers."""
    dp_heads = tuple(workers[rank] for rank in replica.layout.dp_heads(rank_order(replica.role)))
    return replace(replica, workers=workers, heads=dp_heads)


def tensor_ranks(engine: Replica, dp_head: int) -> tuple[int, ...]:
    """Return the workers of the tensor ranks of one engine of a generation replica, given its dp-head."""
    num_ranks, rank = engine.layout.tensor, engine.workers.index(dp_head)
    return engine.workers[rank : rank + num_ranks]


def shard_rows(replica: Replica) -> list[RoutingRow]:
    """Return one row for every shard of a replica, by rank."""
    order = rank_order(replica.role)
    rows = []
    for rank, worker in enumerate(replica.workers):
        dp, tp, pp, cp = replica.layout.coords(order, rank)
        context = cp if replica.layout.context > 1 else None
        rows.append(RoutingRow(shard_key(replica.name, dp, tp, pp, context), worker))
    return rows


def routing_table(
    replicas: Iterable[Replica], source_dp_heads: Sequence[int], workers: Iterable[int]
) -> tuple[RoutingRow, ...]:
    """Return the whole table: shards of every replica, data shards of the source, worker indices.

    `source_dp_heads` are the workers, by dp index, of the node that opens the trained stream.
    """
    rows = [row for replica in replicas for row in shard_rows(replica)]
    rows += [RoutingRow(data_key(i), worker) for i, worker in enumerate(source_dp_heads)]
    rows += [RoutingRow(worker_key(worker), worker) for worker in workers]
    return tuple(rows)


def replaceable_workers(plan: Plan) -> dict[int, str]:
    """Return the workers that can be replaced, each with its generation replica.

    Such a worker does nothing but generate, and run sample and group nodes. Its engine, which may have
    several ranks, is sent weights by any transport.
    """
    workers = range(plan.cluster.num_devices)
    used = {worker: [r for r in plan.replicas if worker in r.workers] for worker in workers}
    return {
        worker: replicas[0].name
        for worker, replicas in used.items()
        if len(replicas) == 1 and _is_replaceable(worker, replicas[0], plan)
    }


def _is_replaceable(worker: int, replica: Replica, plan: Plan) -> bool:
    if replica.role != "gen":
        return False
    runs_batches = {node.name for node in plan.schedule.nodes if node.level is Level.BATCH or node.groups}
    if any(worker in placement.heads for placement in plan.placements if placement.node in runs_batches):
        return False
    routes = [route for route in plan.weights if route.dst == replica.name]
    return all(route.how == "pull" for route in routes)
