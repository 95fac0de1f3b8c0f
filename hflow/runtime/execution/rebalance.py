"""`Rebalancer` moves groups from engines with much work to engines with little, while new weights arrive.

A group goes to the least loaded engine when it is opened, but how long its samples become is not known
then. While engines sleep, moving a group costs nothing extra: its prefix must be computed again with the
new weights anyway. Only groups move of which no member has ended. They take their tokens with them, so no
token is generated twice.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hflow.planner.data.group_placement import GroupPlacer
from hflow.planner.ir import Plan
from hflow.runtime.state.stream_state import StreamState
from hflow.workers.interface import GroupOrder, Workers


class Rebalancer:
    """Moves groups between the engines of a replica.

    Args:
        plan: the plan of the run.
        workers: detach and open groups.
        placer: knows the load of each engine and the worker of each group.
        streams: the state machine's view of the groups.
    """

    def __init__(
        self, plan: Plan, workers: Workers, placer: GroupPlacer, streams: Mapping[str, StreamState]
    ) -> None:
        self._workers = workers
        self._placer = placer
        with_several_engines = {replica.name for replica in plan.replicas if len(replica.heads) > 1}
        self._streams: dict[str, list[StreamState]] = defaultdict(list)
        for stream in plan.schedule.streams:
            if len(stream.replicas) == 1 and stream.replicas[0] in with_several_engines:
                self._streams[stream.replicas[0]].append(streams[stream.name])

    async def balance(self, replica: str) -> tuple[int, dict[str, list[int]]]:
        """Balance the engines of a sleeping replica.

        Returns:
            The number of samples that moved; and for each stream the samples that were refused during
            the move, which no engine works on any more.
        """
        num_moved, refused = 0, {}
        for stream in self._streams[replica]:
            num_moved_of_stream, refused[stream.stream.name] = await self._balance_stream(stream)
            num_moved += num_moved_of_stream
        return num_moved, refused

    async def _balance_stream(self, stream: StreamState) -> tuple[int, list[int]]:
        name = stream.stream.name
        destinations = self._placer.rebalance_moves(name, reversed(stream.movable_groups()))
        groups_from: dict[int, list[int]] = defaultdict(list)
        for group in destinations:
            groups_from[self._placer.home(name, group)].append(group)
        detached = await asyncio.gather(
            *(self._workers.detach_groups(src, name, groups) for src, groups in groups_from.items())
        )
        orders_to: dict[int, list[GroupOrder]] = defaultdict(list)
        refused: list[int] = []
        for order in (order for orders in detached for order in orders):
            destination = destinations[order.group]
            self._placer.move(name, order.group, destination)
            members = stream.members_of(order.group).intersection(order.samples)
            refused += sorted(set(order.samples) - members)
            if members:
                orders_to[destination].append(replace(order, samples=tuple(sorted(members))))
        await asyncio.gather(*(self._workers.open_groups(dst, orders) for dst, orders in orders_to.items()))
        return sum(len(order.samples) for orders in orders_to.values() for order in orders), refused
