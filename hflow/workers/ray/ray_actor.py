"""The Ray actor around a `Worker`: the same messages, each with the lane that it waits in.

`device` runs one message at a time, in the order in which the controller sent them, so that all
ranks issue their collectives in one order and a node finds what it was sent before; `poll` blocks
until something happens; `export` serves other workers and waits for nobody; `probe` says what the
device is doing while it does it; everything else is short and goes through `data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray.exceptions import RayActorError

from hflow.errors import RunError
from hflow.workers.hangs.stack_probe import StackProbe, StackSnapshot
from hflow.workers.interface import ComputeOrder, GroupOrder, NodeResult, NodeTask, Report, WorkerSetup
from hflow.workers.process_setup import freeze_gc
from hflow.workers.weights.transfer import Parcel, Wanted

if TYPE_CHECKING:
    from hflow.workers.generation.engine_manager import EngineUpdate
    from hflow.workers.process_groups import Membership
    from hflow.workers.weights.publisher import Handles, Sent

LANES = {"device": 1, "poll": 1, "data": 2, "export": 1, "probe": 1}
"""Lane -> messages that it runs at once."""


class WorkerProcess:
    """One device's process. Built in two steps, so that all processes import at the same time."""

    def __init__(self, index: int) -> None:
        import hflow.workers.worker
        from hflow.workers.process_groups import collective_counts, open_meeting
        from hflow.workers.weights.transports.ray_store import RayTransport

        self._store = RayTransport()
        self._module = hflow.workers.worker
        self._open_meeting = open_meeting
        self._index = index
        self._watch = StackProbe(collective_counts)

    def rendezvous(self) -> str:
        """`host:port` where the workers of the next run find each other, on this worker's machine."""
        return self._open_meeting(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="device")
    def build(self, shipped: bytes, member: Membership | None, peers: Sequence[Any]) -> None:
        """Build the worker from a shipped `WorkerSetup`; a collective. `peers` are all its actors.

        A process may serve several runs, one after the other, each closed before the next is built.
        """
        setup: WorkerSetup = cloudpickle.loads(shipped)
        self._peers = peers
        self._bodies = {name: program.body for name, program in setup.programs.items()}
        with self._watch.at("building its models"):
            self._worker = self._module.Worker(setup, (self._index,), self._store, member)
        freeze_gc()

    @ray.method(concurrency_group="probe")
    def probe(self) -> StackSnapshot:
        """Where the device's thread stands."""
        return self._watch.standing()

    @ray.method(concurrency_group="data")
    def open_groups(self, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        self._worker.open_groups(self._index, [_with_journals(order) for order in orders])

    @ray.method(concurrency_group="data")
    def detach_groups(self, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop groups; their journals go into the object store."""
        orders = self._worker.detach_groups(self._index, stream, groups)
        return [dataclasses.replace(order, journals=ray.put(order.journals)) for order in orders]

    @ray.method(concurrency_group="data")
    def compute(self, orders: Sequence[ComputeOrder]) -> None:
        """Queue bodies."""
        self._worker.compute(self._index, orders)

    @ray.method(concurrency_group="poll")
    def poll(self) -> Report:
        """Wait for events."""
        return self._worker.poll(self._index)

    @ray.method(concurrency_group="export")
    def export(self, wanted: Wanted) -> list[Parcel]:
        """Pack parcels for the worker that asks; Ray moves large ones without a copy."""
        return [self._worker.export(samples, fields) for samples, fields in wanted]

    @ray.method(concurrency_group="device")
    def pull(self, wanted: Mapping[int, Wanted]) -> int:
        """Take parcels from other workers; returns their bytes.

        Raises:
            RunError: when one of them died.
        """
        asked = {source: self._peers[source].export.remote(parcels) for source, parcels in wanted.items()}
        with self._watch.at("pulling samples"):
            return sum(
                self._worker.receive(parcel)
                for source, sent in asked.items()
                for parcel in self._get(source, sent)
            )

    def _get(self, source: int, sent: Any) -> list[Parcel]:
        try:
            parcels: list[Parcel] = ray.get(sent)
        except RayActorError:
            raise RunError(
                f"worker {source} died while worker {self._index} pulled samples from it"
            ) from None
        return parcels

    @ray.method(concurrency_group="device")
    def run(self, task: NodeTask) -> NodeResult:
        """Run a batch node."""
        with self._watch.at(f"node {task.node!r}, step {task.step}", self._bodies[task.node]):
            return self._worker.run({self._index: task})[0]

    @ray.method(concurrency_group="device", num_returns=2)
    def publish(self, replica: str, version: int) -> tuple[Handles, Sent]:
        """Put what a generation replica needs of this worker's weights where it can take it."""
        with self._watch.at(f"sending weights to {replica}"):
            return self._worker.publish(replica, version)

    @ray.method(concurrency_group="device")
    def wake(self, replica: str, version: int, *published: Handles) -> EngineUpdate | None:
        """Bring an engine to a version, by what each source published; returns what it took."""
        with self._watch.at(f"loading weights {version} into {replica}"):
            return self._worker.wake(replica, version, published or None)

    @ray.method(concurrency_group="data")
    def free(self, replica: str) -> None:
        """Free what was published here for a generation replica."""
        self._worker.free(replica)

    @ray.method(concurrency_group="device")
    def sleep(self, replica: str) -> None:
        """Interrupt an engine."""
        with self._watch.at(f"interrupting {replica}"):
            self._worker.sleep(replica)

    @ray.method(concurrency_group="data")
    def release(self, samples: Sequence[int], stream: str, fields: Sequence[str] | None) -> None:
        """Free fields of samples."""
        self._worker.release(samples, stream, fields)

    @ray.method(concurrency_group="data")
    def summarize(self, stream: str, samples: Sequence[int]) -> Mapping[str, tuple[float, int]]:
        """Sums and counts of numeric fields."""
        return self._worker.summarize(stream, samples)

    @ray.method(concurrency_group="device")
    def save(self, model: str, directory: str) -> None:
        """Write a model; a collective."""
        with self._watch.at(f"saving model {model!r}"):
            self._worker.save(model, directory)

    @ray.method(concurrency_group="data")
    def close(self) -> None:
        """End threads and processes."""
        self._worker.close()


def _with_journals(order: GroupOrder) -> GroupOrder:
    if order.journals is None:
        return order
    return dataclasses.replace(order, journals=ray.get(order.journals))


_remote: Any = ray.remote
RayWorker = _remote(concurrency_groups=LANES)(WorkerProcess)
"""The actor class."""
