"""Which machines of a Ray cluster hold the machines of a plan.

Tensor ranks and engines of a plan are within a machine, so workers of one machine of the plan are never
placed on two real ones. Machines of the plan may share a real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

from hflow.base.devices import is_gpu
from hflow.base.errors import RunError
from hflow.planner.plan.cluster import ClusterSpec, device_of

MAX_LISTED = 8
"""The most machines that a message lists."""
ACCELERATOR_TYPE = "accelerator_type:"
"""Begin of the resource with which Ray names a machine's GPUs."""
NODE_ID = "ray.io/node-id"
"""Ray's label of each machine."""


@dataclass(frozen=True)
class Machine:
    """A machine of a Ray cluster, and what it has, or has free."""

    node: str
    """Ray's id."""
    address: str
    """The machine's IP address."""
    cpus: float
    gpus: float
    kind: str = ""
    """Ray's name of its GPUs, in lower case, as `h100` or `geforce-rtx-4090`; empty if it knows none."""

    def has(self, device: str) -> bool:
        """Return whether its GPUs may be devices of a name: as far as Ray's name of them says."""
        ours, theirs = set(device.split("-")), set(self.kind.split("-"))
        return not self.kind or ours <= theirs or theirs <= ours

    def num_workers(self, device: str) -> int:
        """Return the number of workers that it can hold: one for each GPU or CPU, and each has a CPU."""
        return int(min(self.cpus, self.gpus) if is_gpu(device) else self.cpus)


@dataclass(frozen=True)
class ChosenMachines:
    """The real machine of each machine of a plan."""

    nodes: tuple[str, ...]
    """Ray's ids."""
    cpus_per_worker: int
    """The number of cores that each machine has for each of its workers."""


def all_machines() -> list[Machine]:
    """Return the machines of the Ray cluster that this process has joined, with what they have in all."""
    return [_machine(node, node["Resources"]) for node in ray.nodes() if node["Alive"]]


def free_machines() -> list[Machine]:
    """Return the same machines with what no one has reserved."""
    free = available_resources_per_node()
    return [_machine(node, free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]


def _machine(node: Mapping[str, str], resources: Mapping[str, float]) -> Machine:
    cpus, gpus = (resources.get(name, 0.0) for name in ("CPU", "GPU"))
    kinds = (name for name in resources if name.startswith(ACCELERATOR_TYPE))
    kind = next(kinds, "").removeprefix(ACCELERATOR_TYPE).lower()
    return Machine(node["NodeID"], node["NodeManagerAddress"], cpus, gpus, kind)


def choose_machines(cluster: ClusterSpec, machines: Sequence[Machine]) -> ChosenMachines:
    """Choose a machine for each machine of a plan: one that is not used yet, and the smallest that fits.

    Of a plan with several kinds of devices, each kind gets machines that Ray names alike.

    Raises:
        RunError: when there are too few, which are listed.
    """
    size, device = cluster.devices_per_node, cluster.device
    used: Counter[Machine] = Counter()
    chosen: list[Machine] = []
    for node in range(cluster.num_nodes):
        part = cluster.part_of(node * size)
        alike = [m for m in machines if not cluster.parts or m.has(device_of(part.name))]
        fitting = [m for m in alike if m.num_workers(device) >= size * (used[m] + 1)]
        if not fitting:
            raise RunError(_too_few(part, alike))
        machine = min(fitting, key=lambda m: (used[m], m.num_workers(device), m.address, m.node))
        used[machine] += 1
        chosen.append(machine)
    cpus = min(int(machine.cpus) // (size * count) for machine, count in used.items())
    return ChosenMachines(tuple(machine.node for machine in chosen), cpus)


def _too_few(cluster: ClusterSpec, machines: Sequence[Machine]) -> str:
    """Say what the plan needs and what there is."""
    is_cuda = is_gpu(cluster.device)
    size, plural = cluster.devices_per_node, "s" * (cluster.devices_per_node != 1)
    each = f"{size} GPU{plural} and {size} CPU{plural}" if is_cuda else f"{size} CPU{plural}"
    needed = f"a machine with {each}"
    if cluster.num_nodes > 1:
        needed = f"{cluster.num_nodes} machines with {each} each"
    listed = sorted(machines, key=lambda m: (-m.num_workers(cluster.device), m.address, m.node))[:MAX_LISTED]
    found = [
        f"{machine.address} ({f'{machine.gpus:g} GPUs, ' if is_cuda else ''}{machine.cpus:g} CPUs)"
        for machine in listed
    ]
    if len(machines) > len(listed):
        found.append(f"{len(machines) - len(listed)} smaller ones")
    return f"cluster={cluster.name} needs {needed}, but the Ray cluster has {', '.join(found) or 'none'}"
