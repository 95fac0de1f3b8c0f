"""The memory of machines: what ranks keep there besides the memory of their devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hflow.errors import PlanError
from hflow.planner.cluster import device_ranges
from hflow.planner.forecast import HostMemory, MemoryCategory, MemoryItem
from hflow.planner.hardware import GIB
from hflow.planner.ir import Plan
from hflow.planner.memory import activations, transfer
from hflow.planner.memory.capacity import gib
from hflow.planner.memory.context import MemoryContext
from hflow.planner.memory.items import ItemKey, Items, item
from hflow.planner.memory.offload import in_host_memory
from hflow.planner.memory.rank import Rank
from hflow.planner.request import PlanRequest


def host_memory(plan: Plan, request: PlanRequest) -> tuple[HostMemory, ...]:
    """Return what is in the memory of every machine; equal machines share a row.

    That is what is offloaded, and the copies of a checkpoint that is being written. On CPUs it is the
    memory of the devices, which counts it. Left out are processes, data, Ray's object store, and the weights
    that a sleeping engine keeps.
    """
    hardware = request.hardware
    if plan.cluster.device == "cpu" or hardware is None:
        return ()
    context = MemoryContext(plan, request)
    saved = {replica for p in plan.placements if context.verb(p.node) == "save" for replica in p.replicas}
    machines: dict[int, Items] = {machine: Items() for machine in range(plan.cluster.num_nodes)}
    for group in plan.groups:
        for ranks, devices in context.ranks_of_devices(group):
            on_one = _items_of(context, ranks, saved)
            for machine, num in Counter(map(plan.cluster.node_of, devices)).items():
                machines[machine] += Items({key: num * size for key, size in on_one.items()})
    per_device = hardware.device.host_memory_gib
    capacity = None if per_device is None else round(per_device * GIB) * plan.cluster.devices_per_node
    equal: dict[frozenset[tuple[ItemKey, int]], list[int]] = {}
    for machine, items in machines.items():
        equal.setdefault(frozenset(items.items()), []).append(machine)
    return tuple(
        HostMemory(
            tuple(same),
            tuple(MemoryItem(key.name, size, key.category) for key, size in machines[same[0]].items()),
            capacity,
        )
        for same in equal.values()
        if machines[same[0]]
    )


def _items_of(context: MemoryContext, ranks: Iterable[Rank], saved: set[str]) -> Items:
    """Return what the ranks on one device keep in host memory."""
    items = Items()
    for rank in ranks:
        if rank.replica.role == "gen":
            continue
        name, kept = rank.replica.name, in_host_memory(rank)
        if name in saved:
            kept += transfer.checkpoint_copies(rank)
        if rank.config.offload_activations:
            size = max(
                activations.inputs_in_host_memory(rank, context.largest_microbatch(rank, placement.node))
                for placement in context.plan.placements
                if name in placement.replicas and context.verb(placement.node) == "train"
            )
            kept += item(MemoryCategory.ACTIVATIONS, size, "inputs of layers")
        items += Items({ItemKey(f"{name} {key.name}", key.category): size for key, size in kept.items()})
    return items


def check_host_memory(rows: Iterable[HostMemory]) -> None:
    """Refuse a plan that does not fit into the memory of its machines.

    Raises:
        PlanError: naming the machines, the largest item, and what to change.
    """
    for row in rows:
        if row.capacity is None or row.total <= row.capacity:
            continue
        name, size, category = max(row.items, key=lambda item: item.num_bytes)
        is_activation = category is MemoryCategory.ACTIVATIONS
        key = "offload_activations=false" if is_activation else "offload=none"
        is_one = len(row.machines) == 1
        machines, need, have = ("machine", "needs", "has") if is_one else ("machines", "need", "have")
        raise PlanError(
            f"{machines} {device_ranges(row.machines)} {need} {gib(row.total)} of host memory, but "
            f"{have} {gib(row.capacity)}. Most of it is for {name} "
            f"({gib(size)}). Set models.{name.partition('@')[0]}.{key}, or use more machines."
        )
