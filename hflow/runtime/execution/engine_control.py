"""`EngineControl` publishes weights, and wakes and interrupts generation engines.

Invariant: an engine is reported awake only after all its ranks have confirmed, by checksum, that they hold
the weights that were sent. Every method returns the events that the state machine handles next.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hflow.base.errors import RunError
from hflow.runtime.events import Asleep, Awake, Event, NodeFailed, Published, Refusal
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.activity import GENERATE, WEIGHTS, OngoingWork
from hflow.runtime.state.run_state import RunState
from hflow.types.engine import SleepLevel
from hflow.workers.interface import GroupTask, WeightsLoaded


class EngineControl:
    """Performs the instructions `Publish`, `Wake` and `Sleep`."""

    def __init__(self, run: RunContext, rebalancer: Rebalancer) -> None:
        self._run = run
        self._streams = {stream.name: stream for stream in run.plan.schedule.streams}
        self._rebalancer = rebalancer
        self._work: dict[str, OngoingWork] = {}
        """Engine replica -> what it does."""

    async def publish(self, replica: str, version: int) -> Sequence[Event]:
        """Copy weights to where an engine can load them, before their devices do anything asked later."""
        for worker, span in await self._run.workers.publish(replica, version):
            self._run.observer.on_span(worker, span)
        return [Published(replica, version)]

    async def wake(self, replica: str, version: int) -> Sequence[Event]:
        """Let an engine generate, with new weights if it lacks them.

        Raises:
            RunError: when it holds other weights than were sent.
        """
        self._begin(replica, f"weights {replica}", WEIGHTS, version)
        loaded = await self._run.workers.wake(replica, version)
        checksum = verify_weights(replica, version, loaded)
        if checksum is not None:
            self._run.ledger.record_weights(replica, version, checksum)
        self._begin(replica, f"generate {replica}", GENERATE, version)
        return [Awake(replica, version)]

    async def sleep(self, replica: str, level: SleepLevel) -> Sequence[Event]:
        """Interrupt an engine and balance the work between the engines of its replica."""
        self._finish(replica)
        await self._run.workers.sleep(replica, level)
        num_moved, refused = await self._rebalancer.balance(replica)
        self._run.metrics.add_moved(num_moved)
        events: list[Event] = []
        for name, samples in refused.items():
            stream = self._streams[name]
            for sample in samples:
                self._run.placer.finished(name, sample // stream.group_size)
                events.append(NodeFailed(stream.source, sample, Refusal.FAILED))
        return [*events, Asleep(replica)]

    def _begin(self, replica: str, name: str, lane: str, version: int) -> None:
        """Report what an engine begins to do, and that it has finished what it did before."""
        self._finish(replica)
        work = OngoingWork(name, lane, self._run.plan.replica(replica).heads, time.time(), version + 1)
        self._work[replica] = work
        self._run.observer.on_begin(work)

    def _finish(self, replica: str) -> None:
        if (work := self._work.pop(replica, None)) is not None:
            self._run.observer.on_finish(work)


def verify_weights(replica: str, version: int, loaded: WeightsLoaded) -> str | None:
    """Return the checksum of the weights that a generation replica loaded, in hexadecimal.

    Where the ranks hold different parts of the model, their checksums are joined. The result is None
    if no weights were loaded.

    Raises:
        RunError: when a rank holds other weights than were sent.
    """
    for sent, loaded_checksum in zip(loaded.sent_checksums, loaded.engine_checksums, strict=True):
        if sent != loaded_checksum:
            raise RunError(
                f"{replica} does not hold the weights of version {version}: their checksum was {sent:016x} "
                f"when they were sent, but is {loaded_checksum:016x} in the engine. "
                "Resume from the last checkpoint; if it happens again, the weight transfer has a bug."
            )
    return "".join(f"{checksum:016x}" for checksum in dict.fromkeys(loaded.engine_checksums)) or None


class Rebalancer:
    """Moves groups from engines with much work to engines with little, while new weights arrive.

    A group goes to the least loaded engine when it is opened, but how long its samples become is not known
    then. While engines sleep, moving a group costs nothing extra: its prefix must be computed again with the
    new weights anyway. Only groups move of which no member has ended. They take their tokens with them, so no
    token is generated twice.
    """

    def __init__(self, run: RunContext, state: RunState) -> None:
        self._run = run
        self._state = state
        with_several_engines = {replica.name for replica in run.plan.replicas if len(replica.heads) > 1}
        self._streams: dict[str, list[str]] = defaultdict(list)
        """Replica with several engines -> the streams that only it generates."""
        for stream in run.plan.schedule.streams:
            if len(stream.replicas) == 1 and stream.replicas[0] in with_several_engines:
                self._streams[stream.replicas[0]].append(stream.name)

    async def balance(self, replica: str) -> tuple[int, dict[str, list[int]]]:
        """Balance the engines of a sleeping replica.

        Returns:
            The number of samples that moved; and for each stream the samples that were refused during
            the move, which no engine works on any more.
        """
        num_moved, refused = 0, {}
        for stream in self._streams[replica]:
            num_moved_of_stream, refused[stream] = await self._balance_stream(stream)
            num_moved += num_moved_of_stream
        return num_moved, refused

    async def _balance_stream(self, stream: str) -> tuple[int, list[int]]:
        movable = self._state.movable_groups(stream)
        destinations = self._run.placer.rebalance_moves(stream, reversed(movable))
        groups_from: dict[int, list[int]] = defaultdict(list)
        for group in destinations:
            groups_from[self._run.placer.home(stream, group)].append(group)
        detached = await asyncio.gather(
            *(self._run.workers.detach_groups(src, stream, groups) for src, groups in groups_from.items())
        )
        tasks_to: dict[int, list[GroupTask]] = defaultdict(list)
        refused: list[int] = []
        for task in (task for tasks in detached for task in tasks):
            destination = destinations[task.group]
            self._run.placer.move(stream, task.group, destination)
            members = self._state.members_of(stream, task.group).intersection(task.samples)
            refused += sorted(set(task.samples) - members)
            if members:
                tasks_to[destination].append(replace(task, samples=tuple(sorted(members))))
        await asyncio.gather(
            *(self._run.workers.open_groups(dst, orders) for dst, orders in tasks_to.items())
        )
        return sum(len(task.samples) for tasks in tasks_to.values() for task in tasks), refused
