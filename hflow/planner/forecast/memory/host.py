"""The memory of machines: what ranks keep there besides the memory of their devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hflow.base.errors import PlanError
from hflow.base.text import format_gib, format_ranges
from hflow.config.schema import ONE_PROCESS
from hflow.planner.forecast.memory import activations, transfer
from hflow.planner.forecast.memory.capacity import MEMORY_MARGIN, largest_part
from hflow.planner.forecast.memory.offload import in_host_memory
from hflow.planner.forecast.memory.parts import ItemKey, Items, engine_weights, item
from hflow.planner.forecast.memory.phases import MemoryContext
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.plan.channels import channel_traits
from hflow.planner.plan.forecast import HostMemory, MemoryCategory, MemoryItem
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.planner.plan.schedule import share_of_unchanged_wakes, trains_on_engine_devices
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import num_publishers
from hflow.planner.weights.weight_routes import store_bytes, stored_bytes
from hflow.shapes.model_shape import DTYPE_BYTES, num_parameters

_INPUTS = "inputs of layers"
PINNED_BYTES_PER_SECOND = 2**30
"""Host memory that the processes of a machine pin in a second (an estimate; pages of 4 KiB)."""
_ASLEEP = "weights (asleep)"
_BASE = "base weights"
_IN_STORE = "weights in the object store"
_FETCHED = "weights that the object store fetched"
_RELAYED = "weights for engine processes"
_FIXES = {
    "in host memory": "Set models.{model}.offload=none",
    _INPUTS: "Set models.{model}.offload_activations=false",
    _ASLEEP: "Give the engine devices of its own, as in placement='... {model}.gen=0-3'",
    _BASE: "Set models.{model}.gen.layout to more tensor ranks",
    transfer.RECEIVED_LAST: "Set models.{model}.gen.delta=false",
    _IN_STORE: "Set models.{model}.gen.transport=disk",
    _FETCHED: "Set models.{model}.gen.transport=disk",
    _RELAYED: "Set models.{model}.gen.transport=disk",
    transfer.SAVED_STATE: "Set models.{model}.save_optimizer=false",
}
"""End of an item's name -> what makes it smaller. All of them become smaller with more machines."""


def host_memory(plan: Plan, request: PlanRequest) -> tuple[HostMemory, ...]:
    """Return the items in the memory of every machine; equal machines share a row.

    The items are offloaded state, the copies of a checkpoint that is being written, copies of engines that
    sleep or merge adapters, and published weights, in Ray's object store or beside it. On CPUs there are no
    rows: the memory of the devices counts it all. Left out are processes and data.
    """
    if plan.cluster.device == "cpu":
        return ()
    context = MemoryContext(plan, request)
    machines = _published(context)
    for group in plan.groups:
        for ranks, devices in context.ranks_of_devices(group):
            on_one = _items_of(context, ranks)
            for machine, num in plan.cluster.machines(tuple(devices)).items():
                machines[machine] += Items({key: num * size for key, size in on_one.items()})
    size = plan.cluster.devices_per_node
    equal: dict[tuple[frozenset[tuple[ItemKey, int]], int | None], list[int]] = {}
    for machine, items in machines.items():
        per_device = request.hardware.at(machine * size).device.host_memory_bytes
        capacity = None if per_device is None else per_device * size
        equal.setdefault((frozenset(items.items()), capacity), []).append(machine)
    return tuple(
        HostMemory(
            tuple(same),
            tuple(MemoryItem(key.name, size, key.category) for key, size in machines[same[0]].items()),
            capacity,
        )
        for (_, capacity), same in equal.items()
        if machines[same[0]]
    )


def kept_by_engine(context: MemoryContext, rank: Rank) -> Items:
    """Return the items that an engine's rank on a GPU keeps in host memory all the time."""
    items = Items()
    if rank.replica.merges_adapters:
        items += item(MemoryCategory.WEIGHTS, rank.width * rank.sizes.total, _BASE)
    route = context.route_to(rank)
    return items if route is None else items + transfer.received_on_host(rank, route)


def kept_asleep(context: MemoryContext, rank: Rank) -> Items:
    """Return the items that an engine's rank on a GPU keeps in host memory while it sleeps.

    That is a copy of its weights, if it may wake with the same version (`share_of_unchanged_wakes`).
    """
    if context.shares_weights(rank):
        return Items()
    return item(MemoryCategory.WEIGHTS, engine_weights(rank), _ASLEEP)


def kept_by_trainer(context: MemoryContext, rank: Rank) -> Items:
    """Return the items that a rank that trains or infers keeps in host memory.

    That is what is offloaded, its copies of a checkpoint, and the inputs of layers.
    """
    items, name = in_host_memory(rank), rank.replica.name
    nodes = [placement.node for placement in context.plan.placements if name in placement.replicas]
    if any(context.verb(node) == "save" for node in nodes):
        items += transfer.checkpoint_copies(rank)
    if rank.config.offload_activations:
        sizes = (
            activations.inputs_in_host_memory(rank, context.largest_microbatch(rank, node))
            for node in nodes
            if context.verb(node) == "train"
        )
        items += item(MemoryCategory.ACTIVATIONS, max(sizes, default=0), _INPUTS)
    return items


def _items_of(context: MemoryContext, ranks: Iterable[Rank]) -> Items:
    """Return the items that the ranks on one device keep in host memory."""
    items, schedule = Items(), context.plan.schedule
    asleep = {name for _, replicas in schedule.shared for name in replicas}
    for rank in ranks:
        name = rank.replica.name
        if rank.replica.role == "gen":
            kept = kept_by_engine(context, rank)
            is_trained = trains_on_engine_devices(schedule, rank.replica)
            if name in asleep and share_of_unchanged_wakes(schedule, name, trains_on_its_devices=is_trained):
                kept += kept_asleep(context, rank)
        else:
            kept = kept_by_trainer(context, rank)
        items += Items({ItemKey(f"{name} {key.name}", key.category): size for key, size in kept.items()})
    return items


def _published(context: MemoryContext) -> dict[int, Items]:
    """Return the versions of weights that are published through the memory of each machine."""
    machines = {machine: Items() for machine in range(context.plan.cluster.num_nodes)}
    for route in context.plan.weights:
        for machine, items in published_by(context.plan, context.request, route):
            for key, size in items.items():
                machines[machine][ItemKey(f"{route.dst} {key.name}", key.category)] += size
    return machines


def published_by(plan: Plan, request: PlanRequest, route: WeightRoute) -> Iterator[tuple[int, Items]]:
    """Yield the items of one route in the memory of machines.

    Senders put their shares there, and the first engine that needs a bucket of the object store fetches it
    for its whole machine. Ray drops fetched copies when a store is full, so they take what is left of it. An
    engine in a process of its own cannot read that store, so its worker makes a copy for it.
    """
    shape = request.trained_shape(route.model)
    in_one_process = request.settings.get("workers") in ONE_PROCESS
    buckets = channel_traits(route.transport).buckets
    if buckets not in ("store", "host") or shape is None or in_one_process:
        return
    src, dst = plan.replica(route.src), plan.replica(route.dst)
    if buckets == "host":
        version = DTYPE_BYTES[request.model(route.model).compute_dtype] * num_parameters(shape)
        for machine, num in plan.cluster.machines(src.workers).items():
            publishers = num_publishers(traits(src.backend), src.layout)
            num_bytes = version * min(num, publishers) // publishers
            yield machine, item(MemoryCategory.BUFFERS, num_bytes, "published weights")
        return
    stored, store = stored_bytes(route, src, dst, request), store_bytes(request)
    engines, receivers = plan.cluster.machines(dst.heads), plan.cluster.machines(dst.workers)
    for machine in sorted(stored.keys() | receivers.keys()):
        share = stored.get(machine, 0)
        items = item(MemoryCategory.BUFFERS, share, _IN_STORE)
        if machine in receivers:
            others = sum(stored.values()) - share
            kept = others if store is None else min(others, max(0, round(store) - share))
            items += item(MemoryCategory.BUFFERS, kept, _FETCHED)
        if traits(dst.backend).has_own_process:
            relayed = route.moved_bytes * engines.get(machine, 0) // len(dst.heads)
            items += item(MemoryCategory.BUFFERS, relayed, _RELAYED)
        yield machine, items


def pinning_seconds(row: HostMemory) -> float:
    """Return the seconds in which a machine pins the memory for copies of checkpoints, which it does once."""
    ends = transfer.SAVED_WEIGHTS, transfer.SAVED_STATE
    return sum(item.num_bytes for item in row.items if item.name.endswith(ends)) / PINNED_BYTES_PER_SECOND


def check_host_memory(rows: Iterable[HostMemory]) -> None:
    """Refuse a plan that does not fit into the memory of its machines.

    Raises:
        PlanError: naming the machines, the largest item, and what to change.
    """
    for row in rows:
        if row.capacity is None or row.total <= row.capacity:
            continue
        is_one = len(row.machines) == 1
        machines, need, have = ("machine", "needs", "has") if is_one else ("machines", "need", "have")
        raise PlanError(
            f"{machines} {format_ranges(row.machines)} {need} {format_gib(row.total)} of host memory, but "
            f"{have} {format_gib(row.capacity)}. {_largest(row)}, or use more machines."
        )


def host_memory_warnings(rows: Iterable[HostMemory], request: PlanRequest) -> Iterator[str]:
    """Yield a warning for each kind of machine that a plan leaves little memory, and one of small stores."""
    rows = tuple(rows)
    for row in rows:
        machines = f"machine{'s' * (len(row.machines) > 1)} {format_ranges(row.machines)}"
        if row.capacity is not None and row.total > (1 - MEMORY_MARGIN) * row.capacity:
            yield (
                f"{machines}: {format_gib(row.total)} of {format_gib(row.capacity)} of host memory are "
                f"needed, without processes and data. {_largest(row)}, or use more machines."
            )
    yield from _store_warning(rows, store_bytes(request))


def _store_warning(rows: Iterable[HostMemory], store: float | None) -> Iterator[str]:
    """Yield a warning if published weights do not fit into the object stores of machines."""
    stored = {row: [item for item in row.items if item.name.endswith(_IN_STORE)] for row in rows}
    sizes = {row: sum(item.num_bytes for item in items) for row, items in stored.items()}
    full = [row for row in sizes if store is not None and sizes[row] > store]
    if store is None or not full:
        return
    fullest = max(full, key=sizes.__getitem__)
    model = max(stored[fullest], key=lambda item: item.num_bytes).name.partition("@")[0]
    machines = sorted(machine for row in full for machine in row.machines)
    yield (
        f"machine{'s' * (len(machines) > 1)} {format_ranges(machines)}: published weights take up to "
        f"{format_gib(sizes[fullest])} of Ray's object store, which has {format_gib(round(store))} by "
        f"default; Ray would write the rest to disk, which the seconds of the plan leave out. Start Ray with "
        f"--object-store-memory={sizes[fullest]}, or set models.{model}.gen.transport=disk, which is slower."
    )


def _largest(row: HostMemory) -> str:
    """Return the largest item of a machine, and the fix."""
    name, size, _ = max(row.items, key=lambda item: item.num_bytes)
    fix = next((text for end, text in _FIXES.items() if name.endswith(end)), "Set a larger cluster")
    part = largest_part(size, row.total)
    return f"{part} {name} ({format_gib(size)}). {fix.format(model=name.partition('@')[0])}"
