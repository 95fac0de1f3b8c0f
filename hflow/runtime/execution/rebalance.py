"""Groups that move to another engine while new weights come.

Dispatch is least-loaded when a group is opened; lengths are not known then. While engines sleep, nothing
holds a conversation where it is: its prefix is computed again with the new weights anyway. So groups of
which no member has ended go from engines with much to do to those with little, as journals: no token is
drawn again.
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
    """Moves groups.

    Args:
        plan: for engines and streams.
        workers: give groups up, and open them.
        placer: knows loads and homes.
        streams: what the state machine knows of groups.
    """

    def __init__(
        self, plan: Plan, workers: Workers, placer: GroupPlacer, streams: Mapping[str, StreamState]
    ) -> None:
        self._workers = workers
        self._placer = placer
        several = {replica.name for replica in plan.replicas if len(replica.heads) > 1}
        self._streams: dict[str, list[StreamState]] = defaultdict(list)
        for stream in plan.schedule.streams:
            if len(stream.replicas) == 1 and stream.replicas[0] in several:
                self._streams[stream.replicas[0]].append(streams[stream.name])

    async def spread(self, replica: str) -> tuple[int, dict[str, list[int]]]:
        """Even out the engines of a replica that sleeps.

        Returns:
            How many samples moved; and by stream those that were refused meanwhile, which have ended.
        """
        num_moved, ended = 0, {}
        for stream in self._streams[replica]:
            moved, refused = await self._spread(stream)
            num_moved += moved
            ended[stream.stream.name] = refused
        return num_moved, ended

    async def _spread(self, stream: StreamState) -> tuple[int, list[int]]:
        name = stream.stream.name
        moves = self._placer.rebalance_moves(name, reversed(stream.untouched()))
        leaving: dict[int, list[int]] = defaultdict(list)
        for group in moves:
            leaving[self._placer.home(name, group)].append(group)
        given = await asyncio.gather(
            *(self._workers.detach_groups(src, name, groups) for src, groups in leaving.items())
        )
        arriving: dict[int, list[GroupOrder]] = defaultdict(list)
        refused: list[int] = []
        for order in (order for orders in given for order in orders):
            self._placer.move(name, order.group, moves[order.group])
            left = stream.members_of(order.group).intersection(order.samples)
            refused += sorted(set(order.samples) - left)
            if left:
                arriving[moves[order.group]].append(replace(order, samples=tuple(sorted(left))))
        await asyncio.gather(*(self._workers.open_groups(dst, held) for dst, held in arriving.items()))
        return sum(len(order.samples) for held in arriving.values() for order in held), refused
