"""What a hang looks like, in one line: who is missing and where it is, who waits for it and in what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow.planner.ir import Replica
from hflow.planner.placement.device_groups import device_ranges
from hflow.workers.hangs.stack_probe import StackSnapshot

Standings = Mapping[int, StackSnapshot | None]
"""Worker -> where it stands; None: its process does not answer."""


@dataclass(frozen=True)
class WorkerCall:
    """Something that several workers do together on their devices."""

    title: str
    """As in `node 'actor_train', step 3`."""
    doing: str
    """What a worker is doing then, as in `running node 'actor_train' of step 3`."""
    workers: tuple[int, ...]
    """Who takes part."""
    replica: Replica | None = None
    """Whose ranks they are."""

    def name(self, worker: int) -> str:
        """A worker, and its rank."""
        if self.replica is None or worker not in self.replica.workers:
            return f"worker {worker}"
        return f"worker {worker} (rank {self.replica.workers.index(worker)} of {self.replica.name})"


def waiting(standings: Standings) -> list[int]:
    """Workers that wait for others.

    Those whose thread is in a collective; where none is, as collectives are asynchronous, those that have
    issued more of them than another member of the same group.
    """
    known = {worker: standing for worker, standing in standings.items() if standing is not None}
    blocked = [worker for worker, standing in known.items() if standing.waits]
    if blocked:
        return blocked
    counts = [standing.counts for standing in known.values()]
    return [worker for worker, standing in known.items() if any(_ahead(standing.counts, c) for c in counts)]


def _ahead(mine: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return any(count > other.get(group, count) for group, count in mine.items())


def report(call: WorkerCall, timeout: float, standings: Standings) -> str:
    """The error's line.

    Args:
        call: what hangs.
        timeout: seconds that somebody waited.
        standings: of all who take part.
    """
    waiters = waiting(standings)
    missing = [worker for worker in standings if worker not in waiters]
    limit = f"{timeout:g} s"
    if not missing:
        places = "; ".join(f"{call.name(w)} waits in {_awaited(standings[w])}" for w in waiters)
        return f"{call.title}: nothing went on for {limit}, as each rank waits for another: {places}"
    first, *rest = missing
    said = [f"{call.name(first)} did not join within {limit}: it {_where(call, standings[first])}"]
    said += [f"nor did {call.name(worker)}: it {_where(call, standings[worker])}" for worker in rest]
    said += _waits(waiters, standings, "it" if len(missing) == 1 else "them")
    return f"{call.title}: {'; '.join(said)}"


def elsewhere(call: WorkerCall, standings: Standings) -> list[str]:
    """Where each worker stands."""
    return [f"{call.name(worker)} {_where(call, standing)}" for worker, standing in standings.items()]


def _waits(waiters: Sequence[int], standings: Standings, whom: str) -> list[str]:
    """Who waits, by what they wait in."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for worker in waiters:
        standing = standings[worker]
        by_place[standing.waits if standing is not None else ""].append(worker)
    said = []
    for waits, workers in by_place.items():
        verb = "workers {} wait" if len(workers) > 1 else "worker {} waits"
        place = f"in {waits}" if waits else "in a collective that it has not issued"
        said.append(f"{verb.format(device_ranges(workers))} for {whom} {place}")
    return said


def _awaited(standing: StackSnapshot | None) -> str:
    assert standing is not None
    return f"{standing.waits or 'a collective'} at {standing.place}"


def _where(call: WorkerCall, standing: StackSnapshot | None) -> str:
    """`is in score (file:line)`."""
    if standing is None:
        return "does not answer, as its process is stopped or its interpreter is held"
    if not standing.doing:
        return "has nothing to do: it was not asked, or has finished"
    at = "" if standing.doing == call.title else f"still at {standing.doing}, "
    how = f"waits in {standing.waits} at" if standing.waits else f"is {at}in"
    return f"{how} {standing.place}"
