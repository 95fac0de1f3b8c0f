"""`Routes`: what this worker sends of weights, and what arrives at its engines, as the plan's routes say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hflow.backends.base import ModelBackend
from hflow.plan.ir import Plan, WeightRoute
from hflow.workers.transfer import Arriving, Leaving, own_slices, sent_slices, sent_whole
from hflow.workers.weights import Bucket


class Routes:
    """The weight routes of one worker process.

    Args:
        plan: whose routes they are.
        hosted: indices of the workers that live in this process.
        backends: replica -> its shard here.
    """

    def __init__(self, plan: Plan, hosted: Sequence[int], backends: Mapping[str, ModelBackend]) -> None:
        self._plan = plan
        self._worker = hosted[0]
        self._hosts_all = len(hosted) == plan.cluster.num_devices
        self._backends = backends

    def leaving(self, replica: str) -> Leaving:
        """What this process sends of the weights that a generation replica pulls, and to whom.

        By the rows of its route, and not a collective; where the route has none, the worker of the source's
        rank 0 sends all and the others take part. Where all workers are one process it sends to itself.
        """
        route = self._of(replica)
        backend = self._backends[route.src]
        if self._hosts_all:
            return Leaving(sent_whole((self._worker,), backend, True))
        if route.rows:
            return Leaving(sent_slices(route, self._plan.cluster, self._worker, backend))
        is_sender = self._plan.replica(route.src).workers[0] == self._worker
        return Leaving(sent_whole(self._plan.replica(replica).workers, backend, is_sender))

    def arriving(self, replica: str, streams: Sequence[Iterable[Bucket]]) -> Arriving:
        """Weights out of what others sent, and of what this worker holds itself."""
        route = self._of(replica)
        backend = None if self._hosts_all else self._backends.get(route.src)
        return Arriving(streams, () if backend is None else own_slices(route, self._worker, backend))

    def _of(self, replica: str) -> WeightRoute:
        return next(route for route in self._plan.weights if route.dst == replica)
