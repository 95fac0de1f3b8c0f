"""`Engines`: brings the generation replicas of a worker to a version of the weights, and to sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from hflow.backends.base import ModelBackend
from hflow.plan.ir import Plan, WeightRoute
from hflow.workers.base import Drawn, Span
from hflow.workers.engine_driver import EngineDriver
from hflow.workers.episodes import Episodes
from hflow.workers.transfer import Arriving


class Engines:
    """All engines start asleep, as nobody has committed weights yet.

    Args:
        plan: for the weight routes.
        drivers: generation replica -> its engine here.
        backends: training replica -> its shard here.
        sharing: generation replicas whose engine uses the trainer's own storage.
        episodes: whose time limits stand still while an engine sleeps.
        on_span: takes the span of each turn of generation.
    """

    def __init__(
        self,
        plan: Plan,
        drivers: Mapping[str, EngineDriver],
        backends: Mapping[str, ModelBackend],
        sharing: frozenset[str],
        episodes: Episodes,
        on_span: Callable[[Span], None],
    ) -> None:
        self._routes: dict[str, WeightRoute] = {route.dst: route for route in plan.weights}
        self._drivers = drivers
        self._backends = backends
        self._sharing = sharing
        self._episodes = episodes
        self._on_span = on_span
        self._lock = threading.Lock()
        self._drawn = Drawn()
        self._versions: dict[str, int] = {}
        self._awake_since: dict[str, float] = {}
        for driver in drivers.values():
            driver.interrupt()
            driver.sleep()

    def wake(self, replica: str, version: int, arriving: Arriving | None) -> None:
        """Give an engine the weights of a version, unless it has them, and let it run.

        Args:
            replica: of the engine.
            version: of the weights.
            arriving: weights that other workers sent; None: a replica here has them.
        """
        driver = self._drivers[replica]
        is_asleep = replica not in self._awake_since
        if is_asleep:
            driver.wake()
        if self._versions.get(replica) != version:
            self._take(replica, version, arriving)
        if is_asleep:
            driver.resume()
            self._awake_since[replica] = time.time()
            self._episodes.set_awake(replica, True)

    def sleep(self, replica: str) -> None:
        """Interrupt an engine and free its memory; unfinished requests are kept."""
        self._episodes.set_awake(replica, False)
        self._drivers[replica].interrupt()
        self._drivers[replica].sleep()
        start = self._awake_since.pop(replica)
        version = {"version": self._versions[replica]}
        self._on_span(Span(f"generate {replica}", "generate", start, time.time(), version))

    def take_drawn(self) -> Drawn:
        """What the engines did since the last call."""
        with self._lock:
            total = sum((driver.drawn for driver in self._drivers.values()), Drawn())
            new, self._drawn = total - self._drawn, total
            return new

    def close(self) -> None:
        """End the engines' threads."""
        for driver in self._drivers.values():
            driver.close()

    def _take(self, replica: str, version: int, arriving: Arriving | None) -> None:
        start = time.time()
        driver, route = self._drivers[replica], self._routes.get(replica)
        if route is None or replica in self._sharing:
            driver.set_version(version)
        elif arriving is None:
            driver.load(self._backends[route.src].weights(), version)
        else:
            driver.load(iter(arriving), version)
        self._versions[replica] = version
        note = {"version": version, "pulled_bytes": arriving.num_bytes if arriving else 0}
        self._on_span(Span(f"weights {replica}", "weights", start, time.time(), note))
