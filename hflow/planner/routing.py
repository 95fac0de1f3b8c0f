"""Who is reached under which name: the routing table, and the many-to-few `grouping`.

Three kinds of key lead to a worker: a model shard, the data shard `__data{i}__` (dp-head i of
the source node) and the bare worker index. Several keys may lead to one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hflow.planner.ir import Replica, RoutingRow
from hflow.planner.layout import RankOrder


def shard_key(model: str, dp: int, tp: int, pp: int) -> str:
    """The key of one shard of a replica (or of a model that has one replica)."""
    return f"({model}, {dp}, {tp}, {pp})"


def data_key(i: int) -> str:
    """The key of the source's data shard `i`."""
    return f"__data{i}__"


def worker_key(worker: int) -> str:
    """The key of a worker by its index."""
    return str(worker)


def rank_order(role: str) -> RankOrder:
    """The rank order of a replica: generation has its own, all others that of training."""
    return RankOrder.GENERATE if role == "gen" else RankOrder.TRAIN


def shard_rows(replica: Replica) -> list[RoutingRow]:
    """One row for every shard of a replica, by rank."""
    order = rank_order(replica.role)
    rows = []
    for rank, worker in enumerate(replica.workers):
        dp, tp, pp = replica.layout.coords(order, rank)
        rows.append(RoutingRow(shard_key(replica.name, dp, tp, pp), worker))
    return rows


def routing_table(
    replicas: Iterable[Replica], source_heads: Sequence[int], workers: Iterable[int]
) -> tuple[RoutingRow, ...]:
    """The whole table: shards of every replica, data shards of the source, worker indices.

    Args:
        replicas: all replicas of the plan.
        source_heads: dp index -> worker of the node that opens the trained stream.
        workers: indices of all workers.
    """
    rows = [row for replica in replicas for row in shard_rows(replica)]
    rows += [RoutingRow(data_key(i), worker) for i, worker in enumerate(source_heads)]
    rows += [RoutingRow(worker_key(worker), worker) for worker in workers]
    return tuple(rows)
