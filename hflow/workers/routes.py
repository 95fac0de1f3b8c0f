"""`Routes`: what this worker sends of weights, and what arrives at its engines, as the plan's routes say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hflow.backends.base import ModelBackend
from hflow.plan.ir import Plan, WeightRoute
from hflow.plan.slices import Receivers
from hflow.workers.transfer import Arriving, own_slices, sent_slices, sent_whole
from hflow.workers.weights import Bucket


class Routes:
    """The weight routes of one worker process.

    Args:
        plan: whose routes they are.
        worker: the worker's index.
        backends: replica -> its shard here.
    """

    def __init__(self, plan: Plan, worker: int, backends: Mapping[str, ModelBackend]) -> None:
        self._plan = plan
        self._worker = worker
        self._backends = backends

    def sent(self, replica: str) -> Iterator[tuple[Receivers, Bucket]]:
        """What this worker sends of the weights that a generation replica pulls, and to whom.

        By the rows of its route, and not a collective; where the route has none, the worker of the source's
        rank 0 sends all and the others take part.
        """
        route = self._of(replica)
        backend = self._backends[route.src]
        if route.rows:
            return sent_slices(route, self._plan.cluster, self._worker, backend)
        is_sender = self._plan.replica(route.src).workers[0] == self._worker
        return sent_whole(self._plan.replica(replica).workers, backend, is_sender)

    def arriving(self, replica: str, streams: Sequence[Iterable[Bucket]]) -> Arriving:
        """Weights out of what others sent, and of what this worker holds itself."""
        route = self._of(replica)
        backend = self._backends.get(route.src)
        return Arriving(streams, () if backend is None else own_slices(route, self._worker, backend))

    def _of(self, replica: str) -> WeightRoute:
        return next(route for route in self._plan.weights if route.dst == replica)
