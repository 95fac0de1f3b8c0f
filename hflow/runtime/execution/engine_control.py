"""`EngineControl` publishes weights, and wakes and interrupts generation engines.

Invariant: an engine is reported awake only after all its ranks have confirmed, by checksum, that they hold
the weights that were sent. Every method returns the events that the state machine handles next.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.errors import RunError
from hflow.planner.data.group_placement import GroupPlacer
from hflow.planner.ir import Plan
from hflow.runtime.events import Asleep, Awake, Event, NodeFailed, Published, Refusal
from hflow.runtime.execution.rebalance import Rebalancer
from hflow.runtime.execution.step_metrics import RunEvents, StepMetrics
from hflow.runtime.ledger import Ledger
from hflow.types.sleep_level import SleepLevel
from hflow.workers.interface import WeightsLoaded, Workers


class EngineControl:
    """Performs the instructions `Publish`, `Wake` and `Sleep`.

    Args:
        plan: the plan of the run.
        workers: hold the engines.
        observer: receives spans.
        metrics: counts samples that moved.
        ledger: records which weights engines hold.
        placer: learns which samples no engine works on any more.
        rebalancer: moves groups between engines while these sleep.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        observer: RunEvents,
        metrics: StepMetrics,
        ledger: Ledger,
        placer: GroupPlacer,
        rebalancer: Rebalancer,
    ) -> None:
        self._streams = {stream.name: stream for stream in plan.schedule.streams}
        self._workers = workers
        self._observer = observer
        self._metrics = metrics
        self._ledger = ledger
        self._placer = placer
        self._rebalancer = rebalancer

    async def publish(self, replica: str, version: int) -> Sequence[Event]:
        """Copy weights to where an engine can load them, before their devices do anything asked later."""
        for worker, span in await self._workers.publish(replica, version):
            self._observer.on_span(worker, span)
        return [Published(replica, version)]

    async def wake(self, replica: str, version: int) -> Sequence[Event]:
        """Let an engine generate, with new weights if it lacks them.

        Raises:
            RunError: when it holds other weights than were sent.
        """
        loaded = await self._workers.wake(replica, version)
        checksum = verify_weights(replica, version, loaded)
        if checksum is not None:
            self._ledger.record_weights(replica, version, checksum)
        return [Awake(replica, version)]

    async def sleep(self, replica: str, level: SleepLevel) -> Sequence[Event]:
        """Interrupt an engine and balance the work between the engines of its replica."""
        await self._workers.sleep(replica, level)
        num_moved, refused = await self._rebalancer.balance(replica)
        self._metrics.add_moved(num_moved)
        events: list[Event] = []
        for name, samples in refused.items():
            stream = self._streams[name]
            for sample in samples:
                self._placer.finished(name, sample // stream.group_size)
                events.append(NodeFailed(stream.source, sample, Refusal.FAILED))
        return [*events, Asleep(replica)]


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
