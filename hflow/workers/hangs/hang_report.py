"""The error message of a hang: which rank is missing and where it is, which ranks wait for it and in what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow.planner.plan.cluster import device_ranges
from hflow.planner.plan.rows import Replica
from hflow.workers.hangs.stack_probe import StackSnapshot

Snapshots = Mapping[int, StackSnapshot | None]
"""Worker -> where its device thread is; None: its process does not respond."""


@dataclass(frozen=True)
class WorkerCall:
    """Something that several workers do together on their devices."""

    activity: str
    """As in `running node 'actor_train', step 3`."""
    workers: tuple[int, ...]
    """All that take part."""
    replica: Replica | None = None
    """The replica that they are the ranks of, if it is one."""

    def describe(self, worker: int) -> str:
        """Return a worker with its rank."""
        if self.replica is None or worker not in self.replica.workers:
            return f"worker {worker}"
        return f"worker {worker} (rank {self.replica.workers.index(worker)} of {self.replica.name})"


def waiting_workers(snapshots: Snapshots) -> list[int]:
    """Return the workers that wait for others.

    These are the workers whose thread is in a collective. If none is, because collectives are asynchronous,
    they are the workers that have issued more collectives than another member of the same group.
    """
    known = {worker: snapshot for worker, snapshot in snapshots.items() if snapshot is not None}
    blocked = [worker for worker, snapshot in known.items() if snapshot.collective]
    if blocked:
        return blocked
    all_counts = [snapshot.collective_counts for snapshot in known.values()]
    return [
        worker
        for worker, snapshot in known.items()
        if any(_is_ahead(snapshot.collective_counts, counts) for counts in all_counts)
    ]


def _is_ahead(counts: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return any(count > other.get(group, count) for group, count in counts.items())


def hang_message(call: WorkerCall, timeout: float, snapshots: Snapshots) -> str:
    """Return the error message, in one line.

    Args:
        call: what hangs.
        timeout: seconds that a worker waited.
        snapshots: of all workers that take part.
    """
    waiting = waiting_workers(snapshots)
    missing = [worker for worker in snapshots if worker not in waiting]
    limit = f"{timeout:g} s"
    if not missing:
        places = "; ".join(f"{call.describe(w)} {_location(call, snapshots[w])}" for w in waiting)
        return f"{call.activity}: no progress for {limit}, because every rank waits for another: {places}"
    first, *rest = missing
    parts = [f"{call.describe(first)} did not join within {limit}: it {_location(call, snapshots[first])}"]
    parts += [
        f"{call.describe(worker)} did not join either: it {_location(call, snapshots[worker])}"
        for worker in rest
    ]
    parts += _waits(waiting, snapshots, "it" if len(missing) == 1 else "them")
    return f"{call.activity}: {'; '.join(parts)}"


def describe_locations(call: WorkerCall, snapshots: Snapshots) -> list[str]:
    """Return a phrase for each worker that says where it is."""
    return [f"{call.describe(worker)} {_location(call, snapshot)}" for worker, snapshot in snapshots.items()]


def _waits(waiting: Sequence[int], snapshots: Snapshots, missing: str) -> list[str]:
    """Return a phrase for each collective that workers wait in."""
    by_collective: dict[str, list[int]] = defaultdict(list)
    for worker in waiting:
        snapshot = snapshots[worker]
        by_collective[snapshot.collective if snapshot is not None else ""].append(worker)
    phrases = []
    for collective, workers in by_collective.items():
        subject = "workers {} wait" if len(workers) > 1 else "worker {} waits"
        place = f"in {collective}" if collective else "in a collective that it has not issued"
        phrases.append(f"{subject.format(device_ranges(workers))} for {missing} {place}")
    return phrases


def _location(call: WorkerCall, snapshot: StackSnapshot | None) -> str:
    """Return where a worker is, as in `is in score (file:line)`."""
    if snapshot is None:
        return "does not respond, because its process is stopped or its interpreter is blocked"
    if not snapshot.activity:
        return "is idle, because it was not called or has finished"
    if snapshot.collective:
        return f"waits in {snapshot.collective} at {snapshot.location}"
    still = "" if snapshot.activity == call.activity else f"still {snapshot.activity}, "
    return f"is {still}in {snapshot.location}"
