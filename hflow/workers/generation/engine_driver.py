"""`EngineDriver`: one generation engine on a thread of its own, served to coroutines.

Requests cross to the thread once per turn of the event loop and results come back once per
engine step, however many episodes wait. A request that is interrupted stays here and is resumed
with the tokens that it has, so that whoever awaits it sees one completion.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hflow.backends.interface import GenerationEngine, GenerationResult, SamplingParams
from hflow.errors import HflowError, RunError
from hflow.workers.interface import EngineStats
from hflow.workers.weights.checksum import digest_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class _Request:
    """A submitted request: what was asked, and what was drawn before interruptions."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future[GenerationResult]
    drawn: GenerationResult = field(default_factory=lambda: GenerationResult((), (), (), "abort"))
    on_part: Callable[[GenerationResult], None] | None = None
    """Takes what is drawn when the request is interrupted."""

    def extend(self, part: GenerationResult) -> None:
        if not self.drawn.ids:
            self.drawn = part
            return
        self.drawn = GenerationResult(
            self.drawn.ids + part.ids,
            self.drawn.logprobs + part.logprobs,
            self.drawn.versions + part.versions,
            part.stop_reason,
        )

    def add_to(self, engine: GenerationEngine) -> None:
        """Ask the engine for what is left."""
        num_drawn = len(self.drawn.ids)
        if not num_drawn:
            engine.add(self.request_id, self.prompt_ids, self.params)
            return
        params = dataclasses.replace(
            self.params, max_tokens=self.params.max_tokens - num_drawn, num_resumed=num_drawn
        )
        engine.add(self.request_id, self.prompt_ids + self.drawn.ids, params)


_Outcome = tuple[_Request, GenerationResult | HflowError]


class EngineDriver:
    """Owns an engine. `submit` is for one event loop, everything else for any other thread."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.drawn = EngineStats()
        """What the engine did so far."""
        self._engine = engine
        self._ids = itertools.count()
        self._outgoing: list[_Request] = []
        """Submitted in this turn of the event loop."""
        self._inbox: deque[_Request | int] = deque()
        """For the engine's thread: new requests, and ids of cancelled ones."""
        self._held: dict[int, _Request] = {}
        """Requests that the engine has, or had when it was interrupted; the oldest first."""
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._bell = threading.Event()
        self._thread = threading.Thread(target=self._main, name="hflow-engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        drawn: GenerationResult | None = None,
        on_part: Callable[[GenerationResult], None] | None = None,
    ) -> GenerationResult:
        """Generate; cancelling the awaiting task cancels the request.

        Args:
            prompt_ids: the tokens to go on from.
            params: how to draw; `max_tokens` counts `drawn` too.
            drawn: what another engine drew before it was interrupted. It is part of the answer.
            on_part: called with all that is drawn whenever the engine is interrupted, from the thread
                that interrupts.

        Raises:
            BackendError: when the engine refuses the request.
            RunError: when the engine has failed.
        """
        self.check()
        loop = asyncio.get_running_loop()
        request = _Request(next(self._ids), tuple(prompt_ids), params, loop.create_future(), on_part=on_part)
        if drawn is not None:
            request.drawn = drawn
        if not self._outgoing:
            loop.call_soon(self._flush)
        self._outgoing.append(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.append(request.request_id)
            self._bell.set()
            raise

    def check(self) -> None:
        """Raise what every request is answered with once the engine has failed.

        Raises:
            RunError: saying why the engine stopped.
        """
        if self._failure is not None:
            raise _engine_failed(self._failure)

    def interrupt(self) -> None:
        """Stop drawing before returning; unfinished requests keep their tokens until `resume`."""
        with self._exclusive() as engine:
            self._pause(engine)

    def resume(self) -> None:
        """Go on, interrupted requests before fresh ones; nothing where nothing was interrupted."""
        with self._exclusive() as engine:
            if self._paused:
                self._paused = False
                for request in self._held.values():
                    request.add_to(engine)
        self._bell.set()

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give the engine new weights, between two steps.

        Raises:
            BackendError: when they are not the engine's model's.
        """
        with self._exclusive() as engine:
            engine.load_weights(weights, version)

    def digest(self, names: Iterable[str] | None = None) -> int:
        """The digest of the engine's weights under these names; None: of all, each storage once."""
        with self._exclusive() as engine:
            weights = engine.weights()
            if names is None:
                names = {tensor.data_ptr(): name for name, tensor in weights.items()}.values()
            return digest_of(weights, names)

    def set_version(self, version: int) -> None:
        """Tell an engine that shares its trainer's weights that these have changed."""
        with self._exclusive() as engine:
            engine.set_version(version)

    def sleep(self) -> None:
        """Interrupt, and free the engine's memory."""
        with self._exclusive() as engine:
            self._pause(engine)
            engine.sleep()

    def wake(self) -> None:
        """Allocate again; `resume` starts it."""
        with self._exclusive() as engine:
            engine.wake()

    def close(self) -> None:
        """End the thread; what is unfinished is never answered. Safe to call twice."""
        self._closed = True
        self._bell.set()
        self._thread.join()

    def _pause(self, engine: GenerationEngine) -> None:
        self._paused = True
        for request_id, part in engine.interrupt():
            request = self._held[request_id]
            self._record(request, part)
            self.drawn += EngineStats(num_interrupted=1, num_kept=len(request.drawn.ids))
            if request.on_part is not None:
                request.on_part(request.drawn)

    # --------------------------------------------------------------- on the event loop
    def _flush(self) -> None:
        """Hand on what was submitted since the last turn."""
        submitted, self._outgoing = self._outgoing, []
        self._inbox.extend(submitted)
        self._bell.set()
        if self._failure is not None:
            _settle([(request, _engine_failed(self._failure)) for request in submitted])

    # ------------------------------------------------------------ on the engine's thread
    def _main(self) -> None:
        try:
            while not self._closed:
                self._bell.wait()
                self._bell.clear()
                while not self._closed and self._advance():
                    pass
        except HflowError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _advance(self) -> bool:
        """Take requests in and make one step; False when there is nothing to do."""
        with self._exclusive() as engine:
            if self._paused:
                return False
            outcomes = self._take_in(engine)
            num_unfinished = engine.num_unfinished
            if num_unfinished:
                start = time.perf_counter()
                outcomes += [self._finished(*result) for result in engine.step()]
                self.drawn += EngineStats(seconds=time.perf_counter() - start)
        _deliver(outcomes)
        return num_unfinished > 0

    def _take_in(self, engine: GenerationEngine) -> list[_Outcome]:
        """Hand new requests to the engine; return those that it refuses."""
        refused: list[_Outcome] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                if self._held.pop(item, None) is not None:
                    engine.cancel(item)
                continue
            if item.future.cancelled():
                continue
            try:
                item.add_to(engine)
            except HflowError as error:
                refused.append((item, error))
            else:
                self._held[item.request_id] = item
        return refused

    def _finished(self, request_id: int, part: GenerationResult) -> _Outcome:
        request = self._held.pop(request_id)
        self._record(request, part)
        return request, request.drawn

    def _record(self, request: _Request, part: GenerationResult) -> None:
        request.extend(part)
        self.drawn += EngineStats(num_tokens=len(part.ids))

    def _fail(self, failure: BaseException) -> None:
        """Answer everybody who waits, and all who come later."""
        self._failure = failure
        waiting = [*self._held.values(), *(item for item in self._inbox if not isinstance(item, int))]
        _deliver([(request, _engine_failed(failure)) for request in waiting])

    # ----------------------------------------------------------------------- everywhere
    @contextmanager
    def _exclusive(self) -> Iterator[GenerationEngine]:
        """Hold the engine. The turnstile makes it fair: who waits comes before the next step."""
        with self._turnstile:
            self._lock.acquire()
        try:
            yield self._engine
        finally:
            self._lock.release()


def _engine_failed(failure: BaseException) -> RunError:
    reason = failure if isinstance(failure, HflowError) else f"{type(failure).__name__}: {failure}"
    error = RunError(f"the generation engine stopped: {reason}")
    error.__cause__ = failure
    return error


def _deliver(outcomes: Sequence[_Outcome]) -> None:
    """Answer requests, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].future.get_loop(), []).append(outcome)
    for loop, answered in by_loop.items():
        loop.call_soon_threadsafe(_settle, answered)


def _settle(outcomes: Sequence[_Outcome]) -> None:
    for request, outcome in outcomes:
        if request.future.done():
            continue
        if isinstance(outcome, HflowError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
