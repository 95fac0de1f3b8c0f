"""The border between the controller and the workers: the handle that sends messages, and the messages.

The controller (`runtime.executor`) knows ids, lengths, versions and workers; tensors stay in the
workers' stores and move worker to worker. Every message is a frozen row of plain values.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from hflow.plan.redistribute import Move
from hflow.workers.messages import (
    ComputeOrder,
    ComputeReady,
    Drawn,
    Failed,
    GroupOrder,
    Loaded,
    NodeProgram,
    NodeResult,
    NodeTask,
    Report,
    SampleReady,
    ShardInput,
    Span,
    WorkerEvent,
    WorkerSetup,
)

__all__ = [
    "ComputeOrder",
    "ComputeReady",
    "Drawn",
    "Failed",
    "GroupOrder",
    "Loaded",
    "Move",
    "NodeProgram",
    "NodeResult",
    "NodeTask",
    "Report",
    "SampleReady",
    "ShardInput",
    "Span",
    "WorkerEvent",
    "WorkerSetup",
    "Workers",
]


class Workers(abc.ABC):
    """All workers of a run, as the executor sees them. One instance per run."""

    @abc.abstractmethod
    async def start(self, setup: WorkerSetup) -> None:
        """Create the workers, join their process groups, build replicas; returns when all are ready."""

    @abc.abstractmethod
    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources; results come by `poll`."""

    @abc.abstractmethod
    async def give_up(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop the samples of groups whose members all run, and say no more of them.

        Their engines must sleep. Returns orders, with journals, by which any worker goes on with them; groups
        of which a member has ended are left alone.
        """

    @abc.abstractmethod
    async def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        """Queue sample- and group-level bodies; results come by `poll`."""

    @abc.abstractmethod
    async def poll(self, worker: int) -> Report:
        """Wait until something happened on the worker, and return all of it."""

    @abc.abstractmethod
    async def transfer(self, moves: Sequence[Move]) -> int:
        """Perform moves between stores; returns the bytes moved.

        Nodes that are run after this call began find what it moves, without waiting for its answer.
        """

    @abc.abstractmethod
    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run one batch node on several workers at once (its collectives need all of them).

        Results come in the order of `tasks`.
        """

    @abc.abstractmethod
    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Copy weights out of the replica that trains them, for a generation replica that pulls them.

        What is asked of the same devices later comes after it. Returns what each sender did, by worker.
        """

    @abc.abstractmethod
    async def wake(self, replica: str, version: int) -> Loaded:
        """Bring a generation replica to `version` (by the plan's weight route) and start it.

        It loads what was published for it; where nothing was, the weights are taken as they are.
        """

    @abc.abstractmethod
    async def sleep(self, replica: str) -> None:
        """Interrupt and stop a generation replica; unfinished samples are kept on its workers."""

    @abc.abstractmethod
    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples, `stream/field` names; None: all that their root stream has of them.

        A sample whose source still runs is stopped; its source reports it as failed. So do bodies of
        samples and groups that are all gone.
        """

    @abc.abstractmethod
    async def summarize(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[str, tuple[float, int]]:
        """Sum and count of every numeric field of these samples (not per token), by `stream/field`."""

    @abc.abstractmethod
    async def save(self, model: str, directory: str) -> None:
        """Write a model in HF layout with its tokenizer."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop everything; safe to call twice."""
