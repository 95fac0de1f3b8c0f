"""A hand-made forecast for any compiled plan: round numbers of plausible size, for tests of reports.

Nothing here is computed from a model's sizes. Seconds and shares of memory are written down below, so that
a test can say what a report must show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plan_graphs import hardware_of

from hflow.graph.ir import Level
from hflow.planner.plan.forecast import (
    CycleStep,
    EdgeTraffic,
    Forecast,
    MemoryCategory,
    MemoryItem,
    NodeTime,
    Period,
    PhaseMemory,
    Slot,
    StepTraffic,
)
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import EdgeRule, Plan, ScheduledNode, WeightRoute
from hflow.planner.plan.workload import Workload

KIB, MIB, GIB = 2**10, 2**20, 2**30

SECONDS = {"generate": 60.0, "encode": 0.5, "infer": 4.0, "train": 30.0, "update": 0.5, "save": 0.2}
"""Seconds of one firing by verb; a compute takes 0.05 s."""
COMPUTE_SECONDS = 0.05
PARTS = {
    "generate": (("prefill", 0.1), ("decode", 0.75), ("wait for the longest", 0.15)),
    "infer": (("forward", 0.9), ("all-gather", 0.1)),
    "train": (("forward", 0.25), ("backward", 0.5), ("all-gather", 0.15), ("optimizer", 0.1)),
}
"""Parts of a firing as shares of its seconds."""
LIMITS = {"generate": "memory bandwidth", "infer": "compute", "train": "compute", "update": "network"}
BYTES_OF_A_SAMPLE = 12 * KIB
ROUTE_BYTES = 14 * GIB
"""What every weight route that is not shared moves; as much is held already."""


def sample_hardware(plan: Plan) -> Hardware:
    """H100s for a CUDA cluster, workers of 8 GiB else; memory is that of the plan's cluster."""
    return hardware_of(plan.cluster, 1.5 if plan.cluster.device == "cuda" else 0.5)


def with_forecast(plan: Plan, missing: tuple[str, ...] = (), shrink: float = 1.0) -> Plan:
    """The plan with hardware, sample forecast and bytes on its weight routes.

    Args:
        plan: any compiled plan.
        missing: lines of `Forecast.missing`.
        shrink: factor on all bytes in memory; 1 fills the fullest device to 84 per cent, 2 is too much.
    """
    routes = tuple(_with_bytes(route) for route in plan.weights)
    return replace(
        plan,
        weights=routes,
        hardware=sample_hardware(plan),
        forecast=sample_forecast(plan, missing, shrink),
    )


def sample_forecast(plan: Plan, missing: tuple[str, ...] = (), shrink: float = 1.0) -> Forecast:
    """The forecast alone."""
    return Forecast(
        workload=tuple(
            (stream.name, Workload(512, 1024.0, 0.6, 4096, is_assumed=stream.batch is not None))
            for stream in plan.schedule.streams
        ),
        memory=tuple(_memory(plan, shrink)),
        times=tuple(sorted(_times(plan), key=lambda row: row.node)),
        period=_period(plan),
        traffic=tuple(_traffic(plan, rule) for rule in plan.rules if rule.fields),
        missing=missing,
    )


def _with_bytes(route: WeightRoute) -> WeightRoute:
    if route.how == "shared":
        return replace(route, moved_bytes=0, node_bytes=0, held_bytes=ROUTE_BYTES)
    crossing = ROUTE_BYTES // 2 if route.how == "pull" else 0
    return replace(route, moved_bytes=ROUTE_BYTES, node_bytes=crossing, held_bytes=ROUTE_BYTES)


def _verb(plan: Plan, node: str) -> str:
    return "save" if node.startswith("save.") else plan.graph.node(node).spec.verb


def _seconds(plan: Plan, node: str) -> float:
    return SECONDS.get(_verb(plan, node), COMPUTE_SECONDS)


def _times(plan: Plan) -> Iterator[NodeTime]:
    names = [stream.source for stream in plan.schedule.streams]
    names += [node.name for node in plan.schedule.nodes]
    for name in dict.fromkeys(names):
        verb, seconds = _verb(plan, name), _seconds(plan, name)
        shares = PARTS.get(verb, (("body" if verb == "compute" else verb, 1.0),))
        parts = tuple((part, share * seconds) for part, share in shares)
        yield NodeTime(name, seconds, parts, LIMITS.get(verb, "latency"))


def _memory(plan: Plan, shrink: float) -> Iterator[PhaseMemory]:
    """Two classes of devices a group: in the second half activations and logits are half as large."""
    unit = plan.cluster.memory_bytes / 100 * shrink
    shared = dict(plan.schedule.shared)
    orders = dict(plan.schedule.orders)
    for group in plan.groups:
        half = (len(group.devices) + 1) // 2
        engines = [r for r in plan.replicas if group.name in r.groups and r.role == "gen"]
        resident = tuple(_resident(plan, group.name, unit))
        for devices, factor in ((group.devices[:half], 1.0), (group.devices[half:], 0.5)):
            if not devices:
                continue
            for engine in engines:
                weights = MemoryItem(
                    f"{engine.name} weights", int(10 * unit / len(engines)), MemoryCategory.WEIGHTS
                )
                cache = MemoryItem("KV cache", int(30 * unit / len(engines)), MemoryCategory.KV_CACHE)
                yield PhaseMemory(group.name, devices, "generate", resident, (weights, cache))
            if shared.get(group.name):
                wake = (
                    MemoryItem("bucket", int(2 * unit), MemoryCategory.BUFFERS),
                    MemoryItem("engine weights", int(10 * unit), MemoryCategory.WEIGHTS),
                )
                yield PhaseMemory(group.name, devices, "wake", resident, wake)
            for node in orders.get(group.name, ()):
                transient = tuple(_transient(_verb(plan, node), unit, factor))
                yield PhaseMemory(group.name, devices, node, resident, transient)


def _resident(plan: Plan, group: str, unit: float) -> Iterator[MemoryItem]:
    here = [replica for replica in plan.replicas if group in replica.groups]
    trained = [replica for replica in here if replica.role == "train"]
    yield MemoryItem("runtime", int(2 * unit), MemoryCategory.RUNTIME)
    for replica in here:
        if replica.role == "infer":
            yield MemoryItem(f"{replica.name} weights", int(5 * unit), MemoryCategory.WEIGHTS)
    for replica in trained:
        yield MemoryItem(f"{replica.name} weights", int(10 * unit / len(trained)), MemoryCategory.WEIGHTS)
        yield MemoryItem(f"{replica.name} optimizer", int(20 * unit / len(trained)), MemoryCategory.OPTIMIZER)


def _transient(verb: str, unit: float, factor: float) -> Iterator[MemoryItem]:
    if verb == "train":
        yield MemoryItem("gradients", int(10 * unit), MemoryCategory.GRADIENTS)
    if verb in ("train", "infer"):
        yield MemoryItem(
            "activations", int((30 if verb == "train" else 8) * unit * factor), MemoryCategory.ACTIVATIONS
        )
        yield MemoryItem("logits", int(7 * unit * factor), MemoryCategory.LOGITS)


def _traffic(plan: Plan, rule: EdgeRule) -> EdgeTraffic:
    """Every head but the first receives a tenth of its samples from the head before it."""
    trained = plan.schedule.streams[0]
    num_samples = (trained.batch or 1) * trained.group_size
    each = max(1, num_samples // len(rule.heads) // 10)
    steps = tuple(
        StepTraffic("scatter", src, (src,), (dst,), each, rule.fields, each * BYTES_OF_A_SAMPLE)
        for src, dst in zip(rule.heads, rule.heads[1:], strict=False)
        if src != dst
    )
    moved = sum(step.num_bytes for step in steps)
    total = num_samples * BYTES_OF_A_SAMPLE
    return EdgeTraffic(
        consumer=rule.consumer,
        num_bytes=moved,
        lower_bound=moved // 10 * 9,
        local_bytes=total - moved,
        imbalance=1.03,
        steps=steps[:16],
        num_steps=len(steps),
        num_node_bytes=moved // 2 if plan.cluster.num_nodes > 1 else 0,
    )


def _period(plan: Plan) -> Period:
    """One step after the other: the source, then every batch node of every group in the plan's order.

    With engines on their own devices and `max_staleness` above 0 the groups overlap: the longest lane
    is the period.
    """
    source = plan.schedule.streams[0].source
    lane_of = {name: group for group, names in plan.schedule.orders for name in names}
    chain = [source, *(node.name for node in plan.schedule.nodes if _is_in_chain(plan, node))]
    slots, now = [], 0.0
    for name in chain:
        seconds = _seconds(plan, name)
        slots.append(Slot(name, lane_of.get(name) or _engine_lane(plan, source), now, seconds))
        now += seconds
    busy: dict[str, float] = {}
    for slot in slots:
        busy[slot.lane] = busy.get(slot.lane, 0.0) + slot.seconds
    overlaps = plan.schedule.settings.max_staleness > 0 and len(busy) > 1
    longest = max(busy, key=lambda lane: busy[lane])
    seconds = busy[longest] if overlaps else now
    on_cycle = [slot.node for slot in slots if not overlaps or slot.lane == longest]
    lanes = dict.fromkeys((*(group for group, _ in plan.schedule.orders), *busy))
    idle = tuple((lane, 1 - busy.get(lane, 0.0) / seconds) for lane in lanes)
    return Period(seconds, tuple(_cycle(plan, on_cycle)), tuple(slots), idle)


def _is_in_chain(plan: Plan, node: ScheduledNode) -> bool:
    return (
        node.level is Level.BATCH
        and node.groups
        and node.every == 1
        and node.stream == plan.schedule.streams[0].name
    )


def _engine_lane(plan: Plan, source: str) -> str:
    """The group of the source's engines where it takes turns, else the engine's name; data else."""
    replicas = plan.placement(source).replicas
    if not replicas:
        return "data"
    shared = {engine: group for group, engines in plan.schedule.shared for engine in engines}
    return shared.get(replicas[0], replicas[0])


def _cycle(plan: Plan, names: list[str]) -> Iterator[CycleStep]:
    model = (*plan.graph.node(names[0]).spec.models, "actor")[0]
    for name in names[:-1]:
        yield CycleStep(name, _seconds(plan, name), "data", 0)
    yield CycleStep(names[-1], _seconds(plan, names[-1]), f"weights of {model}", 1)
