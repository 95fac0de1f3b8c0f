"""Published seconds of weight updates."""

from __future__ import annotations

from collections.abc import Iterator

from comparison import Comparison, Row, compare, costs, hardware, rows, seconds, spread

from hflow.planner.cost.collectives import RankPlacement, send
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import Part
from hflow.planner.cost.transfers import load_weights
from hflow.planner.ir import WeightRoute
from hflow.planner.layout import Layout


def weight_sync() -> Iterator[Comparison]:
    """Yield updates of engines that have GPUs of their own, and of those next to a copy on the host."""
    for row in rows("weight_sync"):
        path = {"collective": from_one_rank, "host": from_hosts, "shards": in_shards}[row["path"]]
        name = (
            f"{row['source']} {row['model']} to {row['generate_gpus']}x{row['device']} t{row['engine_gpus']}"
        )
        yield compare(row["source"], "weight sync", name, float(row["seconds"]), path(row), row)


def from_one_rank(row: Row) -> float:
    """Return the seconds in which one rank broadcasts everything; its own port carries it."""
    receivers = int(row["generate_gpus"])
    engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers), "vllm")
    ranks = RankPlacement(1, receivers)
    return seconds(_loaded(row, route(row, receivers, 1.0), engine, ranks, 1))


def from_hosts(row: Row) -> float:
    """Return the seconds in which every rank loads a part from its host and sends it to all others."""
    receivers = int(row["generate_gpus"])
    engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers), "vllm")
    machines = -(-receivers // 8)
    whole = route(row, receivers, (machines - 1) / machines)
    part = 1e9 * float(row["gigabytes"]) / receivers
    parts = _loaded(row, whole, engine, spread(receivers, 1), receivers)
    return seconds(parts) + send(part, engine.hardware.host, engine.hardware).seconds


def in_shards(row: Row) -> float:
    """Return the seconds in which engine ranks receive their own parts, from all of the trainer's ranks."""
    receivers, t = int(row["generate_gpus"]), int(row["engine_gpus"])
    engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers // t, t), "vllm")
    sources = int(row["train_gpus"])
    moved = route(row, receivers // t, 1.0)
    return seconds(_loaded(row, moved, engine, spread(receivers, 1), sources))


def _loaded(
    row: Row, moved: WeightRoute, engine: ReplicaCosts, ranks: RankPlacement, sources: int
) -> list[Part]:
    """Return the parts of loading a model with as many tensors as the row says."""
    num, network = int(row["tensors"]), engine.hardware.inter
    return load_weights(moved, engine, ranks, network, sources, num_tensors=num)


def route(row: Row, copies: int, crossing: float) -> WeightRoute:
    """Return a route that moves a number of copies of the weights, of which a fraction crosses machines."""
    num_bytes = 1e9 * float(row["gigabytes"]) * copies
    return WeightRoute(
        "m",
        "m@train",
        "m@gen",
        "pull",
        moved_bytes=round(num_bytes),
        node_bytes=round(num_bytes * crossing),
        transport="collective",
    )
