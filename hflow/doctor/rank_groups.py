"""Collectives over the process groups that plans of a machine's devices use: their results and seconds.

The groups are made as in a run: those of replicas by `ProcessGroups`, and those of axes by megatron's
`ParallelState`. All groups of one axis work at once, as they do in a run.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import ProcessException, spawn

from hflow.base.devices import is_gpu
from hflow.base.errors import ConfigError, RunError
from hflow.models.settings import RankPosition
from hflow.planner.forecast.cost import collectives as cost
from hflow.planner.forecast.memory.nccl import communicator_bytes, nccl_links
from hflow.planner.plan.hardware import GIB, Hardware
from hflow.planner.plan.rows import Replica
from hflow.profiling.calibrate import device_at_hand, machine_hardware
from hflow.profiling.fit import CollectiveTime
from hflow.profiling.measure import MIB, collective_seconds, ring_collectives
from hflow.shapes.layout import Layout
from hflow.training.rank_groups import RankGroups
from hflow.workers.process_groups import ProcessGroups, ProcessRank, leave_process_groups, open_rendezvous
from hflow.workers.real_devices import find_devices

REPLICA = "replica"
"""The kind of a group that has all ranks of a replica: FSDP2's."""


SHARD, REPLICATE = "shard", "replicate"
"""The kinds of the groups of FSDP2 with a replicate axis: they shard the weights, or hold the same shard."""


OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "send")
"""A send is to the next rank, while each receives from the one before, as pipeline stages do."""


NUM_BYTES = {"cpu": 4 * MIB, "cuda": 256 * MIB}
"""The bytes of the whole tensor. Large ones show the bandwidth."""


NUM_TIMES = 5


_MEGATRON_NAMES = {"data": "dp", "tensor": "tp", "pipe": "pp", "context": "cp", "expert": "ep"}
"""Axis -> megatron's name of its groups."""


TIMEOUT = 120.0
"""Seconds that a collective may take. With a link that does not work, it never ends."""


START_SECONDS = 300.0
"""Seconds in which processes start and end, besides."""


@dataclass(frozen=True)
class OperationTime:
    """One operation on a tensor of `NUM_BYTES`, on the slowest rank."""

    name: str
    """One of `OPERATIONS`."""
    is_right: bool
    """Whether every rank had the right result."""
    moved_bytes: float
    """Bytes that each link moves, so that rates of different operations can be compared."""
    seconds: float
    expected_seconds: float | None = None
    """What plans count with; None: there are no figures of this device."""

    @property
    def gb_per_s(self) -> float:
        """The bandwidth of the link, in 1e9 bytes per second."""
        return self.moved_bytes / self.seconds / 1e9

    @property
    def expected_gb_per_s(self) -> float | None:
        """What plans count with."""
        return self.moved_bytes / self.expected_seconds / 1e9 if self.expected_seconds else None


@dataclass(frozen=True)
class GroupTimes:
    """Operations in groups that work at once."""

    kinds: tuple[str, ...]
    """The axes whose groups have these ranks, such as `tensor`, and `REPLICA`, `SHARD` and `REPLICATE`."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each group."""
    operations: tuple[OperationTime, ...]


@dataclass(frozen=True)
class RuntimeMemory:
    """What CUDA and communicators take of a GPU's memory, besides what torch allocates."""

    num_groups: int
    """Communicators that a rank has joined."""
    num_bytes: int
    """On the GPU with the most."""
    planned_bytes: int | None
    """What plans count with; None: there are no figures of this device."""


@dataclass(frozen=True)
class MeasuredGroups:
    """All groups of plans of some devices."""

    times: tuple[GroupTimes, ...]
    """Smaller groups first."""
    memory: RuntimeMemory | None
    """None on CPUs."""
    network: str = ""
    """The network interfaces that NCCL has chosen, in its words; empty on CPUs."""


def measure_groups(kind: str, num: int) -> MeasuredGroups:
    """Return the times of the groups that plans of 2 or more devices use; with `cpu`, a device is a process.

    Raises:
        RunError: if processes fail, or do not end.
    """
    names = find_devices().names if is_gpu(kind) else ()
    address = open_rendezvous("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="hflow-groups-") as directory:
        file = Path(directory) / "groups.json"
        context = spawn(_measure_rank, args=(num, kind, address, names, str(file)), nprocs=num, join=False)
        _wait(context.join, TIMEOUT + START_SECONDS, context.processes)
        found = json.loads(file.read_text())
    hardware = _figures(kind)
    rows = sorted(found["rows"], key=lambda row: (len(row["ranks"][0]), row["ranks"]))
    memory = None
    if found["runtime_bytes"] is not None:
        memory = RuntimeMemory(len(rows), found["runtime_bytes"], _planned_bytes(rows, num, hardware))
    times = tuple(_times(row, NUM_BYTES[kind], hardware) for row in rows)
    return MeasuredGroups(times, memory, network_in(found["log"]))


def network_in(log: str) -> str:
    """Return the lines of NCCL's log about the network interfaces that it uses."""
    return "; ".join(dict.fromkeys(re.findall(r"NCCL INFO ((?:Bootstrap|NET/\w+) ?: Using .*\S)", log)))


def _planned_bytes(rows: Sequence[Mapping[str, Any]], num: int, hardware: Hardware | None) -> int | None:
    """Return the bytes that plans count for CUDA and one communicator of each row."""
    if hardware is None:
        return None
    links, total = nccl_links(hardware, num), round(hardware.device.overhead_gib * GIB)
    if links is not None:
        total += sum(communicator_bytes(row["ranks"][0], links, num_peers=1) for row in rows)
    return total


def _times(row: Mapping[str, Any], num_bytes: int, hardware: Hardware | None) -> GroupTimes:
    """Return the times that rank 0 has written of some groups, with those that plans count with."""
    size = len(row["ranks"][0])
    operations = [OperationTime(**operation) for operation in row["operations"]]
    return GroupTimes(
        tuple(row["kinds"]),
        tuple(map(tuple, row["ranks"])),
        tuple(
            replace(operation, expected_seconds=_expected(operation.name, num_bytes, size, hardware))
            for operation in operations
        ),
    )


def _wait(join: Callable[[float], bool], seconds: float, processes: Sequence[BaseProcess]) -> None:
    """Wait until processes have ended; those that do not are killed."""
    deadline = time.monotonic() + seconds
    try:
        while not join(1.0):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                raise RunError(f"collectives of {len(processes)} processes did not end in {seconds:.0f} s")
    except ProcessException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise RunError(f"a process failed: {lines[-1]}") from None


def _figures(kind: str) -> Hardware | None:
    """Return the planner's figures of the device at hand; None if it has none."""
    try:
        return machine_hardware("cpu" if kind == "cpu" else device_at_hand())
    except ConfigError:
        return None


def _expected(operation: str, num_bytes: int, size: int, hardware: Hardware | None) -> float | None:
    if hardware is None:
        return None
    if operation == "send":
        return cost.send(num_bytes, hardware.intra, hardware).seconds
    collective = cost.all_reduce if operation == "all-reduce" else cost.all_gather
    return collective(num_bytes, cost.RankPlacement(per_machine=size), hardware).seconds


def _measure_rank(rank: int, num: int, kind: str, address: str, names: Sequence[str], file: str) -> None:
    """Join all groups as one rank, try and time them; rank 0 writes the results."""
    if is_gpu(kind):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank]  # a worker's process sees one GPU
        if rank == 0 and "NCCL_DEBUG" not in os.environ:
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{file}.log"}
    else:
        torch.set_num_threads(1)
    replicas = [_replica(block) for size in group_sizes(num) for block in _blocks(num, size)]
    groups = ProcessGroups(ProcessRank(rank, tuple(range(num)), address), replicas, kind, TIMEOUT)
    # All ranks exchange through a measured group: that of the world would have a communicator besides.
    whole = groups.group(replicas[-1])
    assert whole is not None, "the last replica has all ranks"
    found: dict[tuple[tuple[int, ...], ...], tuple[ProcessGroup, list[str]]] = {}
    for name, group in _groups_of(rank, replicas, groups, whole, kind):
        members: list[tuple[int, ...]] = [()] * num
        dist.all_gather_object(members, tuple(dist.get_process_group_ranks(group)), group=whole)
        kinds = found.setdefault(tuple(sorted(set(members))), (group, []))[1]
        kinds.append(name)
    rows = [
        {"kinds": kinds, "ranks": ranks, "operations": _operations(group, whole, kind)}
        for ranks, (group, kinds) in found.items()
    ]
    runtime_bytes = _largest_runtime(whole) if is_gpu(kind) else None
    if rank == 0:
        log = Path(f"{file}.log")
        text = log.read_text(errors="replace") if log.exists() else ""
        Path(file).write_text(json.dumps({"rows": rows, "runtime_bytes": runtime_bytes, "log": text}))
    dist.barrier(whole)
    leave_process_groups()


def _largest_runtime(whole: ProcessGroup) -> int:
    """Return the bytes of the GPUs' memory that torch has not allocated, on the rank with the most."""
    free, total = torch.cuda.mem_get_info()
    taken = [0] * whole.size()
    dist.all_gather_object(taken, total - free - torch.cuda.memory_reserved(), group=whole)
    return max(taken)


def group_sizes(num: int) -> list[int]:
    """Return the sizes of groups that divide some devices evenly."""
    return [size for size in range(2, num + 1) if num % size == 0]


def axis_layouts(num: int, size: int) -> dict[str, Layout]:
    """Return for each axis a layout of some devices in which it has a size."""
    rest = num // size
    return {
        "data": Layout(data=size, tensor=rest),
        "tensor": Layout(data=rest, tensor=size),
        "pipe": Layout(data=rest, pipe=size),
        "context": Layout(data=rest, context=size),
        "expert": Layout(data=num, expert=size),
    }


def replicate_layouts(num: int) -> list[Layout]:
    """Return the layouts of some devices that have a replicate axis: `d8r2` and `d8r4` of eight."""
    return [Layout(data=num, replicate=size) for size in group_sizes(num) if size < num]


def _blocks(num: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(start, start + size)) for start in range(0, num, size)]


def _replica(workers: tuple[int, ...]) -> Replica:
    """Return a replica that trains on some workers, as plans of the torch backend have them."""
    name, layout = f"model@{workers[0]}", Layout(data=len(workers))
    return Replica(name, "model", "train", "torch", layout, ("all",), workers, workers)


def _groups_of(
    rank: int, replicas: Sequence[Replica], groups: ProcessGroups, whole: ProcessGroup, kind: str
) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield the kind and the process group of each group that this rank is in."""
    for replica in replicas:
        group = groups.group(replica)
        if rank in replica.workers and group is not None:
            yield REPLICA, group
    num = whole.size()
    made = RankGroups(whole)
    for layout in replicate_layouts(num):
        yield SHARD, made.of(layout.fsdp_ranks(rank))
        yield REPLICATE, made.of(layout.replicate_ranks(rank))
    if find_spec("megatron") is None:
        return
    from hflow.training.megatron.device import prepare

    prepare(kind)
    from hflow.training.megatron.parallel_state import ParallelState

    for size in group_sizes(num):
        for axis, layout in axis_layouts(num, size).items():
            state = ParallelState.of(RankPosition(whole, layout))
            yield axis, getattr(state.groups, _MEGATRON_NAMES[axis])


def _operations(group: ProcessGroup, all_ranks: ProcessGroup, kind: str) -> list[dict[str, object]]:
    """Try and time each operation in a group, while the other ranks do so in theirs."""
    size = group.size()
    num = NUM_BYTES[kind] // 4 // size * size
    device = torch.device(kind)
    is_right = _results(group, num, device)
    whole, part = torch.zeros(num, device=device), torch.zeros(num // size, device=device)
    works: list[Callable[[], object]] = [*ring_collectives(whole, part, group)]
    works.append(partial(send_around, whole, torch.empty_like(whole), group))
    seconds = [collective_seconds(work, kind, NUM_TIMES, all_ranks) for work in works]
    everywhere: list[tuple[list[bool], list[float]]] = [([], [])] * all_ranks.size()
    dist.all_gather_object(everywhere, (is_right, seconds), group=all_ranks)
    return [
        asdict(
            OperationTime(
                name,
                all(right[i] for right, _ in everywhere),
                _moved_bytes(name, 4 * num, size),
                max(times[i] for _, times in everywhere),
            )
        )
        for i, name in enumerate(OPERATIONS)
    ]


def _moved_bytes(name: str, num_bytes: int, size: int) -> float:
    if name == "send":
        return num_bytes
    return CollectiveTime(num_bytes, size, 0.0, is_all_reduce=name == "all-reduce").moved_bytes


def _results(group: ProcessGroup, num: int, device: torch.device) -> list[bool]:
    """Return whether each operation gives this rank what can be calculated, in numbers without rounding."""
    size, me = group.size(), group.rank()
    entries = torch.arange(num, device=device, dtype=torch.float32) % 1000
    total = size * entries + sum(range(size))
    mine = slice(me * num // size, (me + 1) * num // size)
    whole, received = entries + me, torch.empty_like(entries)
    send_around(whole, received, group)
    is_sent = torch.equal(received, entries + (me - 1) % size)
    all_reduce, _, reduce_scatter = ring_collectives(whole, part := torch.empty_like(whole[mine]), group)
    reduce_scatter()
    is_scattered = torch.equal(part, total[mine])
    all_reduce()
    is_reduced = torch.equal(whole, total)
    gathered = torch.empty_like(entries)
    gathered[mine] = (entries + me)[mine]
    _, all_gather, _ = ring_collectives(gathered, part, group)
    all_gather()
    senders = torch.arange(size, device=device).repeat_interleave(num // size)
    return [is_reduced, torch.equal(gathered, entries + senders), is_scattered, is_sent]


def send_around(sent: torch.Tensor, received: torch.Tensor, group: ProcessGroup) -> None:
    """Send to the next rank of a group, and receive from the one before; returns when both are done."""
    size, me = group.size(), group.rank()
    to, source = (dist.get_global_rank(group, (me + step) % size) for step in (1, -1))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    )
    for work in works:
        work.wait()
