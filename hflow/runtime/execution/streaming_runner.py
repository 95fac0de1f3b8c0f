"""Models that run as samples arrive: the executor's side of a station.

Samples that a model works on are still open: any of them may be refused meanwhile. Their data is then freed
when the model is done with them, so that nothing is read, or comes back, that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from hflow.planner.data.data_locations import DataLocations
from hflow.planner.data.redistribute import Move
from hflow.planner.ir import Plan
from hflow.runtime.events import NodeDone, RunStreamingInference
from hflow.runtime.execution.node_execution import NodeExecution
from hflow.runtime.ledger import Ledger
from hflow.workers.interface import ComputeReady, Workers


class StreamingRunner:
    """Runs nodes on what has arrived, and brings what they make to where the samples are.

    Args:
        plan: for streams.
        workers: move fields.
        firing: fires nodes.
        holdings: root stream -> who holds what of its samples.
        ledger: is told what is done.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        firing: NodeExecution,
        holdings: Mapping[str, DataLocations],
        ledger: Ledger,
    ) -> None:
        self._workers = workers
        self._firing = firing
        self._holdings = holdings
        self._ledger = ledger
        self._roots = {node.name: plan.graph.root_stream(node.stream).name for node in plan.graph.nodes}
        self._group_size = {stream.name: stream.group_size for stream in plan.schedule.streams}
        self._busy: dict[tuple[str, int], list[asyncio.Event]] = {}
        """Sample of a root stream -> for each model that works on it, what is set when it is done."""

    async def run(self, what: RunStreamingInference) -> Sequence[NodeDone]:
        """Run a node; returns when its outputs are on the workers where bodies of samples read them."""
        root = self._roots[what.node]
        groups: dict[int, list[int]] = {}
        for sample in what.samples:
            groups.setdefault(sample // self._group_size[root], []).append(sample)
        done = asyncio.Event()
        for sample in what.samples:
            self._busy.setdefault((root, sample), []).append(done)
        fired = await self._firing.fire(what.node, what.number, groups, self._holdings[root])
        made = {sample: result.worker for result in fired.results for sample in result.samples}
        await self._bring_home(what.node, root, made)
        self._leave(root, what.samples, done)
        for number in what.keys:
            self._ledger.reported(ComputeReady(what.node, number))
        return [NodeDone(what.node, number) for number in what.keys]

    async def until_free(self, stream: str, samples: Iterable[int]) -> None:
        """Wait until none of the models that work on these samples of a root stream does so any more."""
        for sample in samples:
            for done in tuple(self._busy.get((stream, sample), ())):
                await done.wait()

    def _leave(self, root: str, samples: Iterable[int], done: asyncio.Event) -> None:
        """A model is done with samples."""
        for sample in samples:
            at_work = self._busy[root, sample]
            at_work.remove(done)
            if not at_work:
                del self._busy[root, sample]
        done.set()

    async def _bring_home(self, node: str, root: str, made: Mapping[int, int]) -> None:
        holdings, fields = self._holdings[root], self._firing.outputs(node)
        ends: dict[tuple[int, int], list[int]] = {}
        for home, samples in holdings.by_home(made).items():
            for sample in samples:
                if made[sample] != home:
                    ends.setdefault((made[sample], home), []).append(sample)
        moves = [Move(src, dst, tuple(samples), fields) for (src, dst), samples in sorted(ends.items())]
        if moves:
            await self._workers.transfer(moves)
        holdings.add_moves(moves)
