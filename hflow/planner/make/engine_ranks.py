"""Which device each rank of an engine runs on: the one that already holds what the rank needs.

Ranks follow the order of devices, unless another order moves fewer bytes when new weights arrive. A trainer
with layout t4 holds quarters 0, 1, 2, 3 of every tensor on devices 0 to 3. Two engines with layout t2 on
these devices, in their order, need halves 0, 1, 0, 1, so devices 1 and 2 hold nothing that they need. With
engines on devices (0, 2) and (1, 3) each device needs the half that contains its quarter. HybridFlow (Sheng
et al. 2024, arXiv 2409.19256, 5.3) chooses its generation groups for this reason. What is best for other
layouts is found as an assignment of ranks to devices.

A rank changes places only with ranks on the same machine. So no group of ranks is on more machines than in
the order of devices, and all links between ranks stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from hflow.graph.arcs import Arcs
from hflow.graph.ir import Graph
from hflow.graph.queries import written_models
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import Replica, batch_replica, generation_replica
from hflow.planner.plan.traits import traits
from hflow.planner.weights.resharding import held_bytes
from hflow.planner.weights.weight_routes import way_of
from hflow.shapes.model_shape import DTYPE_BYTES, num_parameters

MIN_SAVING = 0.01
"""Share of the bytes that engines need, below which ranks stay in the order of devices: neighbours may have
a shorter way to each other."""

Held = Mapping[int, Sequence[int]]
"""Worker -> shard of an engine -> bytes of it that the worker holds."""


def order_engine_ranks(
    graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest
) -> tuple[Replica, ...]:
    """Return the replicas, with the ranks of engines on the devices from which the fewest bytes move.

    Engines that one node uses together keep the same workers. Models of unknown sizes, and engines whose
    weights do not change or come from other devices, keep the order of devices.
    """
    orders: dict[str, tuple[int, ...]] = {}
    for engines in _used_together(graph, replicas):
        first = engines[0]
        if first.layout.num_shards == 1 or len({(r.layout, r.workers) for r in engines}) > 1:
            continue
        held: dict[int, list[int]] = {worker: [0] * first.layout.num_shards for worker in first.workers}
        needed = 0
        for engine, src, item_bytes in _trained(graph, engines, replicas, request):
            shape = request.trained_shape(engine.model)
            assert shape is not None
            needed += _num_engines(first) * num_parameters(shape) * item_bytes
            for worker, shards in held_bytes(src, engine, shape, item_bytes, request.cluster).items():
                if worker in held:
                    held[worker] = [a + b for a, b in zip(held[worker], shards, strict=True)]
        workers, saved = best_workers(first, held, request.cluster)
        if saved > MIN_SAVING * needed:
            orders |= {engine.name: workers for engine in engines}
    return tuple(
        on_workers(replica, orders[replica.name]) if replica.name in orders else replica
        for replica in replicas
    )


def best_workers(engine: Replica, held: Held, cluster: ClusterSpec) -> tuple[tuple[int, ...], int]:
    """Return the workers of an engine's ranks with which they hold the most bytes that they need.

    The replica has ranks in the order of devices; `held` has the bytes that its workers hold. Return the
    workers by rank, and how many bytes less move than in the order of devices.
    """
    ranks_on: dict[int, list[int]] = {}
    for rank, worker in enumerate(engine.workers):
        ranks_on.setdefault(cluster.node_of(worker), []).append(rank)
    workers, saved = list(engine.workers), 0
    for ranks in ranks_on.values():
        rows = tuple(tuple(held[engine.workers[rank]]) for rank in ranks)
        shards = tuple(rank % engine.layout.num_shards for rank in ranks)
        order = best_order(rows, shards)
        for place, rank in enumerate(ranks):
            workers[rank] = engine.workers[ranks[order[place]]]
            saved += rows[order[place]][shards[place]] - rows[place][shards[place]]
    return tuple(workers), saved


@lru_cache(maxsize=4096)
def best_order(held: tuple[tuple[int, ...], ...], shards: tuple[int, ...]) -> tuple[int, ...]:
    """Return the device of each rank with which devices hold the most of what their ranks need.

    Args:
        shards: rank -> the shard that it needs; one rank for each device.

    Returns:
        Rank -> device: the order of devices if no other is better, otherwise that of the best ones in which
        ranks are nearest to where they would be in it.
    """
    num = len(shards)
    if all(row[shard] == max(row[s] for s in shards) for row, shard in zip(held, shards, strict=True)):
        return tuple(range(num))
    import networkx as nx  # which takes a tenth of a second, and is rarely needed

    flow = nx.DiGraph()
    for device, row in enumerate(held):
        flow.add_node(("device", device), demand=-1)
        for rank, shard in enumerate(shards):
            cost = abs(device - rank) - num * num * row[shard]
            flow.add_edge(("device", device), ("rank", rank), capacity=1, weight=cost)
    for rank in range(num):
        flow.add_node(("rank", rank), demand=1)
    chosen = nx.network_simplex(flow)[1]
    devices_of: dict[int, list[int]] = {}
    for device in range(num):
        rank = next(rank for rank in range(num) if chosen["device", device]["rank", rank])
        devices_of.setdefault(shards[rank], []).append(device)
    ascending = {shard: iter(devices) for shard, devices in devices_of.items()}
    return tuple(next(ascending[shard]) for shard in shards)


def _used_together(graph: Graph, replicas: tuple[Replica, ...]) -> Iterator[list[Replica]]:
    """Yield the generation replicas in sets, each of which some nodes use together."""
    arcs: list[tuple[str, str]] = []
    for node in graph.nodes:
        if node.spec.opens_stream and node.spec.reads_weights:
            first, *others = (generation_replica(replicas, m).name for m in node.spec.reads_weights)
            arcs += [(first, other) for other in (first, *others)]
            arcs += [(other, first) for other in others]
    uses = Arcs(arcs)
    together = (frozenset({name}) | uses.descendants(name) for name, _ in arcs)
    for names in dict.fromkeys(together):
        yield [replica for replica in replicas if replica.name in names]


def _trained(
    graph: Graph, engines: Sequence[Replica], replicas: tuple[Replica, ...], request: PlanRequest
) -> Iterator[tuple[Replica, Replica, int]]:
    """Yield engines and the trainers on their devices that hold enough to matter, with bytes of an entry.

    An engine to which whole tensors are gathered needs nothing in place.
    """
    written = written_models(graph)
    for engine in engines:
        if engine.model in written and engine.model in request.shapes:
            src = batch_replica(replicas, engine.model)
            is_sharded = traits(src.backend).shards_weights
            held_copies = src.layout.replicate if is_sharded else src.layout.num_copies
            matters = held_copies > MIN_SAVING * _num_engines(engine)
            config = request.model(engine.model)
            if (
                matters
                and set(src.workers) & set(engine.workers)
                and way_of(src, engine, config, request) == "pull"
            ):
                yield engine, src, DTYPE_BYTES[config.compute_dtype]


def _num_engines(replica: Replica) -> int:
    """Return the copies of the model that a generation replica's ranks hold together."""
    return replica.layout.world // replica.layout.num_shards
