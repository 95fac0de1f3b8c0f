"""`EngineControl`: weights for engines and rest for them, as the state machine decides.

Every method returns the events that come of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.errors import RunError
from hflow.planner.data.group_placement import GroupPlacer
from hflow.planner.ir import Plan
from hflow.runtime.events import Asleep, Awake, Event, NodeFailed, Published, Refusal
from hflow.runtime.execution.rebalance import Rebalancer
from hflow.runtime.execution.step_metrics import Observer, StepMetrics
from hflow.runtime.ledger import Ledger
from hflow.workers.interface import WeightsLoaded, Workers

# -------------------- A version of the weights is committed when all who got it confirm that they hold
# what was sent.


def commit(replica: str, version: int, loaded: WeightsLoaded) -> str | None:
    """The digest of weights that a generation replica loaded, in hexadecimal; None where it loaded none.

    Where its ranks hold parts of the model, the digests of all are joined.

    Raises:
        RunError: when a rank holds something else than was sent; both digests are named.
    """
    for sent, held in zip(loaded.sent, loaded.held, strict=True):
        if sent != held:
            raise RunError(
                f"{replica} does not hold the weights of version {version}: their digest was {sent:016x} "
                f"where they were taken, and is {held:016x} in the engine"
            )
    return "".join(f"{digest:016x}" for digest in dict.fromkeys(loaded.held)) or None


class EngineControl:
    """What the executor does with engines.

    Args:
        plan: sources of streams.
        workers: hold the engines.
        observer: is given spans.
        scores: are told of samples that moved.
        ledger: is told which weights engines hold.
        placer: is told of samples that no engine has any more.
        rebalancer: moves groups while engines sleep.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        observer: Observer,
        scores: StepMetrics,
        ledger: Ledger,
        placer: GroupPlacer,
        rebalancer: Rebalancer,
    ) -> None:
        self._streams = {stream.name: stream for stream in plan.schedule.streams}
        self._workers = workers
        self._observer = observer
        self._scores = scores
        self._ledger = ledger
        self._placer = placer
        self._rebalancer = rebalancer

    async def publish(self, replica: str, version: int) -> Sequence[Event]:
        """Put weights where an engine can take them, before anything that its workers are asked later."""
        for worker, span in await self._workers.publish(replica, version):
            self._observer.on_span(worker, span)
        return [Published(replica, version)]

    async def wake(self, replica: str, version: int) -> Sequence[Event]:
        """Let an engine go on, with new weights where it lacks them.

        Raises:
            RunError: when it took other weights than were sent.
        """
        loaded = await self._workers.wake(replica, version)
        digest = commit(replica, version, loaded)
        if digest is not None:
            self._ledger.committed(replica, version, digest)
        return [Awake(replica, version)]

    async def sleep(self, replica: str) -> Sequence[Event]:
        """Interrupt an engine, and even out the work of a replica's engines."""
        await self._workers.sleep(replica)
        num_moved, ended = await self._rebalancer.spread(replica)
        self._scores.moved(num_moved)
        events: list[Event] = []
        for name, samples in ended.items():
            stream = self._streams[name]
            for sample in samples:
                self._placer.finished(name, sample // stream.group_size)
                events.append(NodeFailed(stream.source, sample, Refusal.FAILED))
        return [*events, Asleep(replica)]
