"""The process groups of a plan: those of each device. On GPUs each is an NCCL communicator, with buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hflow.planner.plan.channels import channel_traits
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.planner.weights.weight_slices import relays, streams
from hflow.shapes.layout import Layout, RankOrder
from hflow.shapes.model_shape import ModelShape


@dataclass(frozen=True)
class Communicator:
    """Processes that issue collectives together, each with buffers on its device."""

    use: str
    """`collectives of REPLICA`, `tensor ranks of REPLICA`, or `weights for REPLICA`."""
    workers: frozenset[int]
    """The workers of its ranks. An engine's process is on the device of its worker."""


def communicators(plan: Plan, workers: Iterable[int]) -> dict[int, tuple[Communicator, ...]]:
    """Return the communicators that the devices of some workers have.

    Replicas on the same workers share the group of all ranks; those with the same layout share all groups.
    """
    sends = [one for route in plan.weights for one in weight_communicators(plan, route)]
    return {
        worker: (
            *_of_replicas(plan, worker),
            *_of_engines(plan, worker),
            *(one for one in sends if worker in one.workers),
        )
        for worker in workers
    }


def _of_replicas(plan: Plan, worker: int) -> Iterator[Communicator]:
    known: set[tuple[Layout | None, frozenset[int]]] = set()
    for replica in plan.replicas:
        if replica.role == "gen" or worker not in replica.workers:
            continue
        rank, shape = replica.workers.index(worker), dict(plan.shapes).get(replica.model)
        for ranks in rank_groups(replica.layout, traits(replica.backend), shape, rank):
            layout = None if len(ranks) == len(replica.workers) else replica.layout
            workers = frozenset(replica.workers[other] for other in ranks)
            if (layout, workers) not in known:
                known.add((layout, workers))
                yield Communicator(f"collectives of {replica.name}", workers)


def _of_engines(plan: Plan, worker: int) -> Iterator[Communicator]:
    for replica in plan.replicas:
        size = replica.layout.world // replica.layout.data
        if replica.role == "gen" and worker in replica.workers and size > 1:
            start = replica.workers.index(worker) // size * size
            ranks = replica.workers[start : start + size]
            yield Communicator(f"tensor ranks of {replica.name}", frozenset(ranks))


def weight_communicators(plan: Plan, route: WeightRoute) -> Iterator[Communicator]:
    """Yield the communicators in which the weights of a route are broadcast."""
    if channel_traits(route.transport).broadcasts:
        src, dst = plan.replica(route.src), plan.replica(route.dst)
        whole = {(src.workers[0], dst.workers)}  # without rows one worker sends everything
        found = streams(route, plan.cluster) or whole
        relay_of = relays(found, plan.cluster)
        use = f"weights for {route.dst}"
        for sender, receivers in sorted(found):
            relay = relay_of.get((sender, receivers))
            yield Communicator(use, frozenset((sender, *(receivers if relay is None else (relay,)))))
        for receivers in sorted({receivers for _, receivers in relay_of}):
            yield Communicator(use, frozenset(receivers))


def rank_groups(
    layout: Layout, traits: BackendTraits, shape: ModelShape | None, rank: int
) -> frozenset[frozenset[int]]:
    """Return the sets of ranks of a training replica that have a group with a rank, without sets of one.

    Groups with the same ranks are one. Without model parallelism there is one, of all ranks, and with a
    replicate axis also those that FSDP shards weights over and that hold the same ones.
    """
    return frozenset(rank_messages(layout, traits, shape, rank))


def rank_messages(
    layout: Layout,
    traits: BackendTraits,
    shape: ModelShape | None,
    rank: int,
    *,
    sends_matrices: bool = False,
) -> dict[frozenset[int], int]:
    """Return the groups of a rank, each with the most ranks to which it sends messages there.

    Neighbouring stages do so, and ranks that divide the experts of a layer. With `sends_matrices`, ranks also
    send each other parts of matrices (`Rank.sends_matrices`). The other arguments are those of `rank_groups`.
    """
    if not traits.is_model_parallel:
        groups = (range(layout.world), layout.fsdp_ranks(rank), layout.replicate_ranks(rank))
        messages = dict.fromkeys((frozenset(ranks) for ranks in groups if len(ranks) > 1), 0)
        if sends_matrices:
            messages[frozenset(layout.fsdp_ranks(rank))] = layout.fsdp_size - 1
        return messages
    d, t, p, c = layout.coords(RankOrder.TRAIN, rank)
    copy = layout.copy_index(d, c)
    copies, tensor, stages = range(layout.num_copies), range(layout.tensor), range(layout.pipe)
    same_context = [layout.copy_index(other, c) for other in range(layout.data)]
    same_data = [layout.copy_index(d, other) for other in range(layout.context)]
    block = copy // layout.expert * layout.expert
    experts = range(block, block + layout.expert)
    ends = [0, layout.pipe - 1] if p in (0, layout.pipe - 1) else []
    neighbours = sum(0 <= stage < layout.pipe for stage in (p - 1, p + 1))
    sets = [
        (copies, tensor, stages, layout.stage_size - 1 if sends_matrices else 0),
        ([copy], tensor, [p], 0),
        (same_context, [t], [p], 0),
        (copies, [t], [p], 0),
        (same_data, [t], [p], 0),
        ([copy], [t], stages, neighbours),
        ([copy], [t], ends, 0),
        ([copy], tensor, stages, 0),
        (same_data, tensor, [p], 0),
        (copies, tensor, [p], 0),
        (same_data, tensor, stages, 0),
        (experts, [t], [p], layout.expert - 1),
        (range(copy % layout.expert, layout.num_copies, layout.expert), [t], [p], 0),
        (experts, tensor, [p], 0),
        (experts, tensor, stages, 0),
    ]
    if shape is not None and layout.tensor > shape.num_kv_heads:  # ranks with the same key-value head
        size = layout.tensor // shape.num_kv_heads
        sets.append(([copy], range(t // size * size, (t // size + 1) * size), [p], 0))
    found: dict[frozenset[int], int] = {}
    num_copies = layout.num_copies
    for *axes, num_peers in sets:
        ranks = frozenset(
            (stage * num_copies + copy) * layout.tensor + t for copy, t, stage in itertools.product(*axes)
        )
        if len(ranks) > 1:
            found[ranks] = max(found.get(ranks, 0), num_peers)
    return found
