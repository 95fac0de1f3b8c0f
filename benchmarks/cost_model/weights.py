"""Published seconds of weight updates."""

from __future__ import annotations

from collections.abc import Iterator

from comparison import Comparison, Row, compare, costs, hardware, rows, seconds, spread

from hflow.planner.cost.collectives import RankPlacement, send
from hflow.planner.cost.transfers import load_weights
from hflow.planner.ir import RouteRow, WeightRoute
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
    return seconds(load_weights(route(row, receivers, 1.0), engine, ranks, engine.hardware.inter, 1))


def from_hosts(row: Row) -> float:
    """Return the seconds in which every rank loads a part from its host and sends it to all others."""
    receivers = int(row["generate_gpus"])
    engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers), "vllm")
    machines = -(-receivers // 8)
    whole = route(row, receivers, (machines - 1) / machines)
    part = 1e9 * float(row["gigabytes"]) / receivers
    parts = load_weights(whole, engine, spread(receivers, 1), engine.hardware.inter, receivers)
    return seconds(parts) + send(part, engine.hardware.host, engine.hardware).seconds


def in_shards(row: Row) -> float:
    """Return the seconds in which engine ranks receive their own parts, from all of the trainer's ranks."""
    receivers, t = int(row["generate_gpus"]), int(row["engine_gpus"])
    engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers // t, t), "vllm")
    sources = int(row["train_gpus"])
    moved = route(row, receivers // t, 1.0)
    return seconds(load_weights(moved, engine, spread(receivers, 1), engine.hardware.inter, sources))


def route(row: Row, copies: int, crossing: float) -> WeightRoute:
    """Return a route that moves a number of copies of the weights, of which a fraction crosses machines."""
    num_bytes = 1e9 * float(row["gigabytes"]) * copies
    return WeightRoute(
        "m",
        "m@train",
        "m@gen",
        "pull",
        rows=(RouteRow("tensor", (0, int(row["tensors"])), (), 0, 0),),
        moved_bytes=round(num_bytes),
        node_bytes=round(num_bytes * crossing),
        transport="collective",
    )
