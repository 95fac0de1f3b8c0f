"""`EngineDriver`: runs one generation engine on a thread of its own, for coroutines.

Requests cross to the thread once per iteration of the event loop and results come back once per
engine step, however many episodes wait. A request that is interrupted remains here and is resumed
with the tokens that it has, so the coroutine that awaits it sees a single completion.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.engines.interface import DrawnTokens, GenerationEngine, GenerationResult, SamplingParams
from hflow.types.engine import EngineStats, SleepLevel
from hflow.types.image import PlacedImage
from hflow.types.recorded import extend_recorded

if TYPE_CHECKING:
    from hflow.weights.incoming import IncomingWeights
    from hflow.weights.loading import LoadedWeights


class EngineDriver:
    """Owns an engine. `submit` is for one event loop, the other methods for any other thread.

    Attributes:
        stats: what the engine has done since it started.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self.stats = EngineStats()
        self._engine = engine
        self._request_ids = itertools.count()
        self._submitted: list[_Request] = []
        """Submitted in this iteration of the event loop."""
        self._inbox: deque[_Request | int] = deque()
        """For the engine's thread: new requests, and ids of cancelled ones."""
        self._requests: dict[int, _Request] = {}
        """Requests that the engine has, or had when it was interrupted; the oldest first."""
        self._streamed: dict[int, _Request] = {}
        """Entries of `_requests` whose tokens are awaited one by one."""
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._waiting_lock, self._engine_lock = threading.Lock(), threading.Lock()
        self._has_work = threading.Event()
        self._thread = threading.Thread(target=self._main, name="hflow-engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        generated: GenerationResult | None = None,
        on_interrupt: Callable[[GenerationResult], None] | None = None,
        on_tokens: Callable[[DrawnTokens], None] | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> GenerationResult:
        """Generate; cancelling the awaiting task cancels the request.

        Args:
            params: how to sample. `max_tokens` includes the tokens of `generated`.
            generated: what another engine generated before it was interrupted. The result starts with it.
            on_interrupt: called with all tokens generated so far whenever the engine is interrupted, from
                the thread that interrupts it.
            on_tokens: called on the event loop after engine steps, with the tokens since the last call. Those
                of the last steps may only be in the result. What it raises, `submit` raises.

        Raises:
            BackendError: when the engine refuses the request.
            RunError: when the engine has failed.
        """
        self.raise_if_failed()
        loop = asyncio.get_running_loop()
        request = _Request(
            next(self._request_ids),
            tuple(prompt_ids),
            params,
            loop.create_future(),
            on_interrupt=on_interrupt,
            on_tokens=on_tokens,
            images=tuple(images),
        )
        if generated is not None:
            request.generated = generated
        if not self._submitted:
            loop.call_soon(self._send_submitted)
        self._submitted.append(request)
        try:
            return await request.future
        except BaseException:  # cancelled, or `on_tokens` raised
            self._inbox.append(request.request_id)
            self._has_work.set()
            raise

    def raise_if_failed(self) -> None:
        """Raise the error that every request is answered with once the engine has failed.

        Raises:
            RunError: saying why the engine stopped.
        """
        if self._failure is not None:
            raise _engine_stopped(self._failure)

    def interrupt(self) -> None:
        """Stop generating before returning. Unfinished requests keep their tokens until `resume`."""
        with self._exclusive() as engine:
            self._pause(engine)

    def resume(self) -> None:
        """Continue after `interrupt`, with interrupted requests before new ones."""
        with self._exclusive() as engine:
            if self._paused:
                self._paused = False
                for request in self._requests.values():
                    request.add_to(engine)
        self._has_work.set()

    def load(self, incoming: Sequence[IncomingWeights], version: int) -> LoadedWeights:
        """Load new weights into the engine, between two steps; returns what its ranks loaded.

        Raises:
            BackendError: when they are not weights of the engine's model.
            RunError: when a rank holds other weights than were sent.
        """
        with self._exclusive() as engine:
            return engine.load_weights(incoming, version)

    def set_version(self, version: int) -> None:
        """Set the version of an engine that shares its trainer's weights, after these have changed."""
        with self._exclusive() as engine:
            engine.set_version(version)

    def sleep(self, level: SleepLevel) -> None:
        """Interrupt the engine and free its memory, as far as its level says."""
        with self._exclusive() as engine:
            self._pause(engine)
            if level is not SleepLevel.PAUSE:
                engine.sleep(level)

    def wake_weights(self) -> None:
        """Allocate the engine's weights again, before new ones are loaded."""
        with self._exclusive() as engine:
            engine.wake_weights()

    def wake_cache(self) -> None:
        """Allocate the engine's KV cache again; `resume` makes it generate."""
        with self._exclusive() as engine:
            engine.wake_cache()

    def close(self) -> None:
        """End the thread and the engine; unfinished requests are never answered. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._has_work.set()
            self._thread.join()
            self._engine.close()

    def _pause(self, engine: GenerationEngine) -> None:
        self._paused = True
        finished: list[_Answer] = []
        for request_id, result in engine.interrupt():
            if result.stop_reason != "abort":
                finished.append(self._finish(request_id, result))
                continue
            request = self._requests[request_id]
            self._record(request, result)
            self.stats += EngineStats(num_interrupted=1, num_kept=len(request.generated.ids))
            if request.on_interrupt is not None:
                request.on_interrupt(request.generated)
        _send_answers(finished)

    @contextmanager
    def _exclusive(self) -> Iterator[GenerationEngine]:
        """Hold the engine. The first lock makes it fair: a thread that waits comes before the next step."""
        with self._waiting_lock:
            self._engine_lock.acquire()
        try:
            yield self._engine
        finally:
            self._engine_lock.release()

    def _send_submitted(self) -> None:
        """Send what was submitted in this iteration of the event loop to the engine's thread."""
        submitted, self._submitted = self._submitted, []
        self._inbox.extend(submitted)
        self._has_work.set()
        if self._failure is not None:
            _resolve([(request, _engine_stopped(self._failure)) for request in submitted])

    # On the engine's thread

    def _main(self) -> None:
        try:
            while not self._closed:
                self._has_work.wait()
                self._has_work.clear()
                while not self._closed and self._step():
                    pass
        except HflowError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _step(self) -> bool:
        """Take new requests and make one step of the engine. Returns False when there is nothing to do."""
        with self._exclusive() as engine:
            if self._paused:
                return False
            answers = self._take_requests(engine)
            num_unfinished = engine.num_unfinished
            if num_unfinished:
                start = time.perf_counter()
                answers += [self._finish(*result) for result in engine.step()]
                self.stats += EngineStats(seconds=time.perf_counter() - start)
            if self._streamed:
                self._send_drawn(engine)
        _send_answers(answers)
        return num_unfinished > 0

    def _take_requests(self, engine: GenerationEngine) -> list[_Answer]:
        """Give new requests to the engine. Returns answers to those that it refuses."""
        refused: list[_Answer] = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, int):
                if self._requests.pop(message, None) is not None:
                    self._streamed.pop(message, None)
                    engine.cancel(message)
                continue
            if message.future.cancelled():
                continue
            try:
                message.add_to(engine)
            except HflowError as error:
                refused.append((message, error))
            else:
                self._requests[message.request_id] = message
                if message.on_tokens is not None:
                    self._streamed[message.request_id] = message
        return refused

    def _send_drawn(self, engine: GenerationEngine) -> None:
        """Send the new tokens of streamed requests to their event loops."""
        starts = {number: request.num_unsent_start for number, request in self._streamed.items()}
        drawn = engine.drawn(starts)
        for number, request in self._streamed.items():
            tokens = request.take_unsent(drawn.get(number, DrawnTokens((), ())))
            if tokens.ids:
                request.future.get_loop().call_soon_threadsafe(_stream, request, tokens)

    def _finish(self, request_id: int, result: GenerationResult) -> _Answer:
        request = self._requests.pop(request_id)
        self._streamed.pop(request_id, None)
        self._record(request, result)
        return request, request.generated

    def _record(self, request: _Request, result: GenerationResult) -> None:
        request.extend(result)
        self.stats += EngineStats(num_tokens=len(result.ids))

    def _fail(self, failure: BaseException) -> None:
        """Answer all waiting requests with an error, and from now on all new ones."""
        self._failure = failure
        waiting = [
            *self._requests.values(),
            *(message for message in self._inbox if not isinstance(message, int)),
        ]
        _send_answers([(request, _engine_stopped(failure)) for request in waiting])


@dataclass(eq=False)
class _Request:
    """A submitted request, with what was generated for it before interruptions."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future[GenerationResult]
    generated: GenerationResult = field(default_factory=lambda: GenerationResult((), (), (), "abort"))
    on_interrupt: Callable[[GenerationResult], None] | None = None
    """Called with `generated` when the request is interrupted."""
    on_tokens: Callable[[DrawnTokens], None] | None = None
    num_sent: int = 0
    """Number of tokens that `on_tokens` has received."""
    images: tuple[PlacedImage, ...] = ()

    @property
    def num_unsent_start(self) -> int:
        """Where unsent tokens begin among those that the engine has drawn since the last interruption."""
        return max(0, self.num_sent - len(self.generated.ids))

    def take_unsent(self, drawn: DrawnTokens) -> DrawnTokens:
        """Return the unsent ones of the engine's tokens from `num_unsent_start` on, counted as sent."""
        kept = self.generated
        tokens = DrawnTokens(
            kept.ids[self.num_sent :] + drawn.ids, kept.logprobs[self.num_sent :] + drawn.logprobs
        )
        self.num_sent += len(tokens.ids)
        return tokens

    def extend(self, result: GenerationResult) -> None:
        """Append what the engine generated since the last interruption."""
        if not self.generated.ids:
            self.generated = result
            return
        self.generated = GenerationResult(
            self.generated.ids + result.ids,
            self.generated.logprobs + result.logprobs,
            self.generated.versions + result.versions,
            result.stop_reason,
            extend_recorded(self.generated.recorded, result.recorded),
        )

    def add_to(self, engine: GenerationEngine) -> None:
        """Add the rest of the request to an engine: its prompt with the tokens so far, and fewer to draw."""
        num_generated = len(self.generated.ids)
        if not num_generated:
            engine.add(self.request_id, self.prompt_ids, self.params, self.images)
            return
        params = dataclasses.replace(
            self.params, max_tokens=self.params.max_tokens - num_generated, num_resumed=num_generated
        )
        engine.add(self.request_id, self.prompt_ids + self.generated.ids, params, self.images)


_Answer = tuple[_Request, GenerationResult | HflowError]


def _engine_stopped(failure: BaseException) -> RunError:
    reason = failure if isinstance(failure, HflowError) else f"{type(failure).__name__}: {failure}"
    kind = WorkerFailureError if isinstance(failure, WorkerFailureError) else RunError
    error = kind(f"the generation engine stopped: {reason}")
    error.__cause__ = failure
    return error


def _send_answers(answers: Sequence[_Answer]) -> None:
    """Answer requests, with one call into each event loop."""
    answers_of: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for answer in answers:
        answers_of.setdefault(answer[0].future.get_loop(), []).append(answer)
    for loop, loop_answers in answers_of.items():
        loop.call_soon_threadsafe(_resolve, loop_answers)


def _stream(request: _Request, tokens: DrawnTokens) -> None:
    if request.future.done():
        return
    assert request.on_tokens is not None
    try:
        request.on_tokens(tokens)
    except Exception as error:  # noqa: BLE001 - for the coroutine that waits
        request.future.set_exception(error)


def _resolve(answers: Sequence[_Answer]) -> None:
    for request, answer in answers:
        if request.future.done():
            continue
        if isinstance(answer, HflowError):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)
