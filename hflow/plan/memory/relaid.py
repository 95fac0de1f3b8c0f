"""A plan with other layouts of some replicas, as far as memory depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hflow.errors import PlanError
from hflow.plan.divide import check_layouts
from hflow.plan.ir import DeviceGroup, Plan, Replica
from hflow.plan.layout import Layout
from hflow.plan.request import PlanRequest
from hflow.plan.routing import rank_order

MOST_TENSOR_RANKS = 8
"""Tensor ranks on more than one machine would cost more time than they save memory."""


def devices_of(plan: Plan, group: str) -> tuple[int, ...]:
    """The devices of a group."""
    return next(g.devices for g in plan.groups if g.name == group)


def with_layouts(
    plan: Plan,
    request: PlanRequest,
    replicas: Sequence[Replica],
    layouts: Sequence[Layout],
    num_devices: int,
) -> Plan | None:
    """The plan with other layouts in a group of that many devices; None where one cannot be."""
    name = replicas[0].group
    at_hand = devices_of(plan, name)
    devices = at_hand if len(at_hand) == num_devices else tuple(range(num_devices))
    changed = {
        replica.name: replace(
            replica,
            layout=layout,
            workers=devices[: layout.world],
            heads=tuple(devices[rank] for rank in layout.heads(rank_order(replica.role))),
        )
        for replica, layout in zip(replicas, layouts, strict=True)
        if layout.world <= num_devices
    }
    if len(changed) < len(replicas) or not _can_be(plan, request, changed.values()):
        return None
    groups = [DeviceGroup(name, devices) if g.name == name else g for g in plan.groups]
    found = tuple(changed.get(replica.name, replica) for replica in plan.replicas)
    return replace(plan, groups=tuple(groups), replicas=found)


def _can_be(plan: Plan, request: PlanRequest, replicas: Iterable[Replica]) -> bool:
    """Whether layouts divide their models, and every dp rank has a sample of every minibatch."""
    stream = plan.schedule.streams[0]
    most_cuts = max((cut.minibatches for _, cut in plan.cuts), default=1)
    num_samples = (stream.batch or 1) // most_cuts * stream.group_size
    if any(r.role != "gen" and r.layout.data > num_samples for r in replicas):
        return False
    try:
        check_layouts(replicas, request)
    except PlanError:
        return False
    return True
