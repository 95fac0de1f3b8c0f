"""`StreamingRunner` runs models on samples as they arrive, before a batch is formed.

Samples that a model works on may be refused meanwhile. Invariant: the data of a sample is not freed while
a model works on it, so that the model reads no freed data and leaves none behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from hflow.data_plane.locations import DataLocations
from hflow.data_plane.redistribute import Move, Moves
from hflow.runtime.events import NodeDone, RunStreamingInference
from hflow.runtime.execution.node_execution import NodeExecution
from hflow.runtime.execution.run_context import RunContext
from hflow.workers.interface import ComputeReady


class StreamingRunner:
    """Runs nodes on arrived samples and moves their outputs to the samples' home workers."""

    def __init__(
        self, run: RunContext, node_execution: NodeExecution, locations: Mapping[str, DataLocations]
    ) -> None:
        self._run = run
        self._node_execution = node_execution
        self._locations = locations
        plan = run.plan
        self._roots = {node.name: plan.graph.root_stream(node.stream).name for node in plan.graph.nodes}
        self._group_size = {stream.name: stream.group_size for stream in plan.schedule.streams}
        self._in_use: dict[tuple[str, int], list[asyncio.Event]] = {}
        """(root stream, sample) -> for each model that works on it, the event that is set when it is done."""

    async def run(self, instruction: RunStreamingInference) -> Sequence[NodeDone]:
        """Run a node. Returns when its outputs are on the workers where sample bodies read them."""
        node, samples = instruction.node, instruction.samples
        root = self._roots[node]
        groups: dict[int, list[int]] = {}
        for sample in samples:
            groups.setdefault(sample // self._group_size[root], []).append(sample)
        done = asyncio.Event()
        for sample in samples:
            self._in_use.setdefault((root, sample), []).append(done)
        result = await self._node_execution.run(node, instruction.number, groups, self._locations[root])
        for part in result.results:
            self._run.metrics.devices.add_span(part.worker, part.span)
        worker_of = {sample: part.worker for part in result.results for sample in part.samples}
        await self._move_home(node, root, worker_of)
        self._end_use(root, samples, done)
        for key in instruction.keys:
            self._run.ledger.record_result(ComputeReady(node, key))
        return [NodeDone(node, key) for key in instruction.keys]

    async def wait_until_unused(self, stream: str, samples: Iterable[int]) -> None:
        """Wait until no model that works on these samples of a root stream does so any more."""
        for sample in samples:
            for done in tuple(self._in_use.get((stream, sample), ())):
                await done.wait()

    def _end_use(self, root: str, samples: Iterable[int], done: asyncio.Event) -> None:
        for sample in samples:
            uses = self._in_use[root, sample]
            uses.remove(done)
            if not uses:
                del self._in_use[root, sample]
        done.set()

    async def _move_home(self, node: str, root: str, worker_of: Mapping[int, int]) -> None:
        """Move a node's outputs from the workers that made them to the samples' home workers."""
        locations, fields = self._locations[root], self._node_execution.output_fields(node)
        routes: dict[tuple[int, int], list[int]] = {}
        for home, samples in locations.by_home(worker_of).items():
            for sample in samples:
                if worker_of[sample] != home:
                    routes.setdefault((worker_of[sample], home), []).append(sample)
        moves = Moves.of(
            Move(src, dst, tuple(samples), fields) for (src, dst), samples in sorted(routes.items())
        )
        if routes:
            await self._run.workers.transfer(moves)
        locations.add_moves(moves)
