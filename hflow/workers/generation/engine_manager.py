"""`EngineManager`: gives the engines of a worker new weights, wakes them, and puts them to sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hflow.base.errors import RunError
from hflow.engines.driver import EngineDriver
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.planner.plan.traits import traits
from hflow.training.interface import ModelBackend
from hflow.types.engine import EngineStats, SleepLevel
from hflow.weights.checksum import weights_checksum
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import LoadedWeights
from hflow.workers.generation.episode_loop import EpisodeLoop
from hflow.workers.interface import Span
from hflow.workers.mailbox import ENGINE_LANE
from hflow.workers.process_setup import free_device_bytes


class EngineManager:
    """Manages the generation replicas of a worker.

    Engines that share devices with training start asleep, before they have weights. An engine with devices of
    its own only pauses.

    Engines of replicas in `sharing` use the trainer's own storage. Timeouts of episodes pause while an engine
    sleeps. `on_span` receives each weight update and each time that an engine was awake.
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
        self._reads_in_place = frozenset(
            replica for replica in drivers if not traits(plan.replica(replica).backend).has_own_process
        )
        """Engines in this process, which read what a trainer here holds in place."""
        self._drivers = drivers
        self._backends = backends
        self._sharing = sharing
        self._episodes = episodes
        self._on_span = on_span
        self._lock = threading.Lock()
        self._taken_stats = EngineStats()
        """What `take_stats` has returned so far, in total."""
        self._versions: dict[str, int] = {}
        self._awake_since: dict[str, float] = {}
        shared = {name for _, names in plan.schedule.shared for name in names}
        self._without_weights: dict[str, SleepLevel] = {}
        """Engines that have freed their weights, and how."""
        self._without_cache: set[str] = set()
        """Engines that have freed their KV cache."""
        for replica in drivers:
            self._sleep(replica, self._first_level(replica) if replica in shared else SleepLevel.PAUSE)

    def has(self, replica: str) -> bool:
        """Return whether this worker has an engine of a replica. Other workers host ranks only."""
        return replica in self._drivers

    def needs_weights(self, replica: str, version: int) -> bool:
        """Return whether an engine has other weights than those of a version."""
        return self._versions.get(replica) != version

    def load_weights(
        self, replica: str, version: int, incoming: Sequence[IncomingWeights] | None
    ) -> LoadedWeights | None:
        """Give a stopped engine the weights of a version; return the checksums of what it loaded, or None.

        What was sent is loaded also by an engine that has the version: another engine of the replica, which
        was replaced, may need it as a member of the same broadcast.

        `incoming` is what was sent to each rank of the engine; None: a replica on this worker has the
        weights, which are loaded unless the engine has them.

        Its KV cache remains free until it wakes.

        Raises:
            RunError: if the engine dropped the weights of this version when it slept.
        """
        needs_weights = incoming is not None or self.needs_weights(replica, version)
        level = self._without_weights.pop(replica, None)
        if level is SleepLevel.DROP_WEIGHTS and not needs_weights:
            raise RunError(
                f"{replica} dropped its weights of version {version} when it slept, but must wake with "
                "them, which is a bug in hflow; resume the run from its last checkpoint"
            )
        if level is not None:
            with self._measured("allocate weights", replica):
                self._drivers[replica].wake_weights()
        return self._update(replica, version, incoming) if needs_weights else None

    def wake(self, replica: str) -> None:
        """Let an engine generate, which has its weights. Nothing is done if it is awake.

        Raises:
            RunError: if it has none, as it has taken the place of the engine that loaded them.
        """
        if replica in self._awake_since:
            return
        if replica in self._without_weights or replica not in self._versions:
            raise RunError(f"{replica} has no weights yet, so it cannot wake")
        if replica in self._without_cache:
            self._without_cache.remove(replica)
            with self._measured("allocate cache", replica):
                self._drivers[replica].wake_cache()
        self._drivers[replica].resume()
        self._awake_since[replica] = time.time()
        self._episodes.set_awake(replica, True)

    def sleep(self, replica: str, level: SleepLevel) -> None:
        """Interrupt an engine and free its memory, as far as its level says. Unfinished requests are kept.

        Nothing is done if it sleeps.
        """
        if replica not in self._awake_since:
            return
        self._episodes.set_awake(replica, False)
        self._sleep(replica, level)
        start = self._awake_since.pop(replica)
        args = {"version": self._versions[replica]}
        self._on_span(Span(f"generate {replica}", ENGINE_LANE, start, time.time(), args))

    def _sleep(self, replica: str, level: SleepLevel) -> None:
        if level is SleepLevel.PAUSE:
            self._drivers[replica].sleep(level)
        else:
            with self._measured("sleep", replica):
                self._drivers[replica].sleep(level)
            self._without_weights[replica] = level
            self._without_cache.add(replica)

    @contextmanager
    def _measured(self, what: str, replica: str) -> Iterator[None]:
        """Report the span of a change of an engine's memory, with the bytes of its GPU that it frees."""
        start, before = time.time(), free_device_bytes()
        yield
        after = free_device_bytes()
        args = {} if before is None or after is None else {"freed_bytes": after - before}
        self._on_span(Span(f"{what} {replica}", "weights", start, time.time(), args))

    def take_stats(self) -> EngineStats:
        """Return the engines' work since the last call."""
        with self._lock:
            total = sum((driver.stats for driver in self._drivers.values()), EngineStats())
            new, self._taken_stats = total - self._taken_stats, total
            return new

    def close(self) -> None:
        """End the engines' threads."""
        for driver in reversed(tuple(self._drivers.values())):  # those on the weights of others first
            driver.close()

    def _first_level(self, replica: str) -> SleepLevel:
        """Return the level of an engine before its first weights: some never get any but their own."""
        has_source = replica in self._routes and replica not in self._sharing
        return SleepLevel.DROP_WEIGHTS if has_source else SleepLevel.KEEP_WEIGHTS

    def _source_on_device(self, replica: str, route: WeightRoute) -> AbstractContextManager[None]:
        """Have the weights of a trainer here on the device, if the engine reads them in place."""
        source = self._backends.get(route.src) if replica in self._reads_in_place else None
        return nullcontext() if source is None else source.on_device()

    def _update(
        self, replica: str, version: int, incoming: Sequence[IncomingWeights] | None
    ) -> LoadedWeights | None:
        start = time.time()
        driver, route = self._drivers[replica], self._routes.get(replica)
        loaded = None
        if route is None:
            driver.set_version(version)
        elif replica in self._sharing:
            driver.set_version(version)
            checksum = weights_checksum(dict(self._backends[route.src].weights()))
            loaded = LoadedWeights((0,), (checksum,), (checksum,))
        else:
            if incoming is None:
                incoming = [IncomingWeights.of_tensors(self._backends[route.src].weights)]
            with self._source_on_device(replica, route):
                loaded = driver.load(incoming, version)
        self._versions[replica] = version
        args = {"version": version, "pulled_bytes": sum(loaded.num_bytes) if loaded else 0}
        self._on_span(Span(f"weights {replica}", "weights", start, time.time(), args))
        return loaded
