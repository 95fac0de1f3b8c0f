"""The Ray actor around a `Worker`: it runs each message on the lane that `messages.MESSAGES` gives it."""

from __future__ import annotations

import dataclasses
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray.exceptions import RayActorError

from hflow.base.errors import WorkerFailureError
from hflow.base.garbage import freeze_gc, freeze_imports
from hflow.base.recipe_files import unpack, use_directory
from hflow.processes.guard import die_with_parent
from hflow.workers.hangs.stack_probe import StackProbe, StackSnapshot
from hflow.workers.interface import GroupTask, NodeResult, NodeTask, WorkerSetup
from hflow.workers.messages import LANES, MESSAGES, Message, activity_of

if TYPE_CHECKING:
    from hflow.data_plane.redistribute import Moves
    from hflow.workers.process_groups import ProcessRank
    from hflow.workers.real_devices import ProcessDevices
    from hflow.workers.storage.sample_store import PackedSamples, SampleRequest


class WorkerProcess:
    """The process of one device.

    Its methods that are not written here call the `Worker`'s method of the same name. It is built in two
    steps, so that all processes import torch at the same time.
    """

    def __init__(self, index: int) -> None:
        die_with_parent()  # Ray's raylet: a process that is stopped does not notice that it has ended
        import hflow.workers.worker
        from hflow.workers.process_groups import (
            collective_counts,
            leave_process_groups,
            open_rendezvous,
        )
        from hflow.workers.real_devices import find_devices

        freeze_imports()
        self._module = hflow.workers.worker
        self._open_rendezvous = open_rendezvous
        self._leave_process_groups = leave_process_groups
        self._find_devices = find_devices
        self._index = index
        self._probe = StackProbe(collective_counts)

    def rendezvous(self) -> str:
        """Return the `host:port`, on this worker's machine, where the next run's workers connect."""
        return self._open_rendezvous(ray.util.get_node_ip_address())

    def place(self) -> tuple[str, ProcessDevices]:
        """Return the machine of this process, and what it finds there."""
        return ray.get_runtime_context().get_node_id(), self._find_devices()

    def build(
        self,
        recipe_directory: str,
        packed_files: bytes | None,
        pickled: bytes,
        rank: ProcessRank | None,
        peers: Sequence[Any],
        devices: Sequence[str],
    ) -> None:
        """Build the worker. A collective.

        A process may serve several runs in turn; each must be closed before the next is built.

        Args:
            recipe_directory: the directory of the recipe's file on the controller's machine.
            packed_files: what it holds; None: this process is on that machine.
            pickled: the `WorkerSetup`.
            rank: the rank of this process among those that train or infer; None: it joins no collective.
            peers: the actors of all workers.
            devices: the CUDA device of each worker, as on its machine; empty on CPUs.
        """
        self._copy = None if packed_files is None else unpack(packed_files, recipe_directory)
        use_directory(self._copy or recipe_directory)
        setup: WorkerSetup = cloudpickle.loads(pickled)
        self._peers = list(peers)
        self._bodies = {name: program.body for name, program in setup.programs.items()}
        if rank is None:
            self._leave_process_groups()
        with self._probe.running(activity_of("build")):
            host = ray.util.get_node_ip_address()
            self._worker = self._module.Worker(setup, (self._index,), rank, host, devices)
        freeze_gc()

    def close(self) -> None:
        """End the worker's threads and processes, and delete its copy of the recipe's files."""
        self._worker.close()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)

    def set_peer(self, worker: int, actor: Any) -> None:
        """Note the actor that has taken the place of another worker."""
        self._peers[worker] = actor

    def probe(self) -> StackSnapshot:
        """Return the place of the device's thread."""
        return self._probe.snapshot()

    def open_groups(self, worker: int, tasks: Sequence[GroupTask]) -> None:
        """Start groups; journals that another worker has left are fetched from the object store."""
        fetched = [
            dataclasses.replace(task, journals=ray.get(task.journals))
            if isinstance(task.journals, ray.ObjectRef)
            else task
            for task in tasks
        ]
        self._worker.open_groups(worker, fetched)

    def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupTask]:
        """Stop groups; their journals are put into the object store."""
        tasks = self._worker.detach_groups(worker, stream, groups)
        return [dataclasses.replace(task, journals=ray.put(task.journals)) for task in tasks]

    def pull(self, moves: Moves) -> int:
        """Fetch samples from other workers into the store, and return their bytes.

        Raises:
            RunError: when one of these workers has died.
        """
        requests: dict[int, list[SampleRequest]] = defaultdict(list)
        for move in moves.joined():
            requests[move.src].append((move.samples, move.fields))
        exports = {source: self._peers[source].export.remote(wanted) for source, wanted in requests.items()}
        with self._probe.running(activity_of("pull")):
            return sum(
                self._worker.receive(packed)
                for source, export in exports.items()
                for packed in self._fetch(source, export)
            )

    def _fetch(self, source: int, export: Any) -> list[PackedSamples]:
        try:
            packed: list[PackedSamples] = ray.get(export)
        except RayActorError:
            raise WorkerFailureError(
                f"worker {source} died while worker {self._index} pulled samples from it"
            ) from None
        return packed

    def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on this worker's shards."""
        (task,) = tasks.values()
        with self._probe.running(task.activity, self._bodies[task.node]):
            return self._worker.run(tasks)


def _forward(name: str, message: Message) -> Callable[..., Any]:
    """Return an actor method that calls the worker's method of the same name."""

    def method(self: WorkerProcess, *arguments: Any) -> Any:
        return getattr(self._worker, name)(*arguments)

    def device_method(self: WorkerProcess, *arguments: Any) -> Any:
        with self._probe.running(activity_of(name, *arguments)):
            return getattr(self._worker, name)(*arguments)

    forward = method if message.activity is None else device_method
    forward.__name__ = name
    return forward


for _name, _message in MESSAGES.items():
    _method = vars(WorkerProcess).get(_name) or _forward(_name, _message)
    _options = ray.method(concurrency_group=_message.lane, num_returns=_message.num_returns)
    setattr(WorkerProcess, _name, _options(_method))

_remote: Any = ray.remote
RayWorker = _remote(concurrency_groups=LANES)(WorkerProcess)
"""The actor class."""
