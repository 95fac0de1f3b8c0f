"""`EngineManager`: brings the generation replicas of a worker to a version of the weights, and to sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from hflow.backends.interface import ModelBackend
from hflow.planner.ir import Plan, WeightRoute
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.episode_loop import EpisodeLoop
from hflow.workers.interface import EngineStats, Span
from hflow.workers.weights.checksum import MODULUS, tensor_digest
from hflow.workers.weights.transfer import IncomingWeights


@dataclass(frozen=True)
class EngineUpdate:
    """What an engine took; digests as in `workers.digest`."""

    num_bytes: int
    """Pulled from other workers."""
    local_checksum: int
    """Of what did not come from other workers, or is shared with them."""
    engine_checksum: int
    """Of what it generates with now."""


class EngineManager:
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
        episodes: EpisodeLoop,
        on_span: Callable[[Span], None],
    ) -> None:
        self._routes: dict[str, WeightRoute] = {route.dst: route for route in plan.weights}
        self._drivers = drivers
        self._backends = backends
        self._sharing = sharing
        self._episodes = episodes
        self._on_span = on_span
        self._lock = threading.Lock()
        self._drawn = EngineStats()
        self._versions: dict[str, int] = {}
        self._awake_since: dict[str, float] = {}
        for driver in drivers.values():
            driver.interrupt()
            driver.sleep()

    def lacks(self, replica: str, version: int) -> bool:
        """Whether an engine has other weights than those of a version."""
        return self._versions.get(replica) != version

    def wake(self, replica: str, version: int, arriving: IncomingWeights | None) -> EngineUpdate | None:
        """Give an engine the weights of a version, unless it has them, and let it run.

        Returns what it took, if anything.

        Args:
            replica: of the engine.
            version: of the weights.
            arriving: weights that other workers sent; None: a replica here has them.
        """
        driver = self._drivers[replica]
        is_asleep = replica not in self._awake_since
        if is_asleep:
            driver.wake()
        taken = self._take(replica, version, arriving) if self.lacks(replica, version) else None
        if is_asleep:
            driver.resume()
            self._awake_since[replica] = time.time()
            self._episodes.set_awake(replica, True)
        return taken

    def sleep(self, replica: str) -> None:
        """Interrupt an engine and free its memory; unfinished requests are kept."""
        self._episodes.set_awake(replica, False)
        self._drivers[replica].interrupt()
        self._drivers[replica].sleep()
        start = self._awake_since.pop(replica)
        version = {"version": self._versions[replica]}
        self._on_span(Span(f"generate {replica}", "generate", start, time.time(), version))

    def take_stats(self) -> EngineStats:
        """What the engines did since the last call."""
        with self._lock:
            total = sum((driver.drawn for driver in self._drivers.values()), EngineStats())
            new, self._drawn = total - self._drawn, total
            return new

    def close(self) -> None:
        """End the engines' threads."""
        for driver in self._drivers.values():
            driver.close()

    def _take(self, replica: str, version: int, arriving: IncomingWeights | None) -> EngineUpdate | None:
        start = time.time()
        driver, route = self._drivers[replica], self._routes.get(replica)
        taken = None
        if route is None:
            driver.set_version(version)
        elif replica in self._sharing:
            driver.set_version(version)
            held = driver.digest()
            taken = EngineUpdate(0, held, held)
        else:
            named = _Named(self._backends[route.src].weights() if arriving is None else arriving)
            driver.load(iter(named), version)
            num_bytes, own = (arriving.num_bytes, arriving.local_checksum) if arriving else (0, named.digest)
            taken = EngineUpdate(num_bytes, own, driver.digest(named.names))
        self._versions[replica] = version
        note = {"version": version, "pulled_bytes": taken.num_bytes if taken else 0}
        self._on_span(Span(f"weights {replica}", "weights", start, time.time(), note))
        return taken


class _Named:
    """Passes weights on, notes their names, and adds up their digest."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.names: list[str] = []
        self.digest = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.names.append(name)
            self.digest = (self.digest + tensor_digest(name, tensor)) % MODULUS
            yield name, tensor
