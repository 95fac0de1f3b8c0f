"""`GenerateRunner`: runs the episodes of one generate node on one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from hflow.base.errors import BackendError, DataError, EpisodeError, HflowError, ReturnError, timeout_message
from hflow.data.text.tokenizer import TextTokenizer
from hflow.data.text.tool_formats.registry import tool_format
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import SamplingParams
from hflow.episodes.endpoint.server import EndpointServer
from hflow.episodes.episode_engine import EpisodeEngine, sample_seed
from hflow.episodes.journal import Journal
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.planner.plan.rows import Plan
from hflow.processes.error_location import error_with_location
from hflow.types.recorded import requested_kinds
from hflow.workers.bodies.body_output import body_call
from hflow.workers.interface import ComputeReady, Failed, GroupTask, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import DatasetRow, row_error
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.sample_writer import SampleWriter

_SAMPLE_ERRORS = (BackendError, DataError, EpisodeError)
"""hflow's own errors that refuse the sample in which they are raised; the others end the run.

A `DataError` also ends the run where the episode starts from a dataset row, as the data is wrong."""


@dataclass(frozen=True)
class EpisodeStart:
    """One sample to generate, and what it starts from."""

    program: NodeProgram
    sample: int
    group: int
    inputs: Mapping[str, Any]
    """Fields that the body receives, by parameter."""
    row: DatasetRow = field(default_factory=DatasetRow)
    """The dataset row; empty for a sample that derives from one of another stream."""
    task: GroupTask | None = None
    """The task to which the sample belongs; None for a sample that derives from one of another stream."""
    parent: str | None = None
    """The stream of the sample from which this one derives."""
    journal: Journal | None = None
    """What the episode did before on another worker."""


class GenerateRunner:
    """What the episodes of one node have in common, and how one of them runs.

    Attributes:
        program: the node's program.
        replicas: model -> the generation replica that generates for it.
        clock: drives the timeouts of the node's episodes; it runs while all of its engines are awake.
        concurrency_limit: bounds how many of the node's episodes run at the same time.

    Raises:
        RecipeError: for an unknown `tool_format`.
    """

    def __init__(
        self,
        plan: Plan,
        program: NodeProgram,
        store: SampleStore,
        drivers: Mapping[str, EngineDriver],
        tokenizers: Mapping[str, TextTokenizer],
        seed: int,
        server: EndpointServer,
    ) -> None:
        self.program = program
        self.replicas = {plan.replica(name).model: name for name in plan.placement(program.name).replicas}
        self.clock = PausableClock()
        self.concurrency_limit = _concurrency_limit(program)
        self._plan = plan
        self._writer = SampleWriter.for_node(program, plan, store)
        self._drivers = {model: drivers[replica] for model, replica in self.replicas.items()}
        self._tokenizers = tokenizers
        self._params = _sampling_params(program)
        self._seed = seed
        self._server = server
        self._tool_format = program.options.get("tool_format")
        if self._tool_format is not None:
            for model in program.models:
                tool_format(self._tool_format, tokenizers[model].template_text)

    async def run(self, start: EpisodeStart, effects: RecordedEffects) -> WorkerEvent:
        """Run one episode to its end, store what it returns, and return the event that reports it.

        Raises:
            HflowError: when the run has to end: a dataset row cannot be read, the engine has failed, or
                the recipe is wrong.
        """
        program, sample = start.program, start.sample
        seconds = program.options.get("timeout")
        arguments = self._arguments(start, effects)
        try:
            with body_call(program.body, program.name, sample):
                async with self.clock.timeout(seconds) as timeout:
                    try:
                        result = await program.body(**arguments)
                    finally:
                        await effects.close_environments()
            effects.finish()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                return Failed(program.name, sample, "timeout", timeout_message(seconds))
            for driver in self._drivers.values():
                driver.raise_if_failed()
            if isinstance(error, DataError) and start.task is not None:
                raise row_error(start.row, error) from error
            if isinstance(error, HflowError) and not isinstance(error, _SAMPLE_ERRORS):
                raise
            return Failed(program.name, sample, "failed", error_with_location(error, program.body))
        try:
            checked = self._writer.read(result)
        except ReturnError as error:
            return Failed(program.name, sample, "failed", str(error).removeprefix(f"node {program.name!r}: "))
        event = self._writer.write(sample, start.group, checked, start.row, start.parent)
        event = replace(event, interruption=effects.interruption)
        self._writer.write_metrics(sample, effects.counts)
        return event if start.task is not None else ComputeReady(program.name, sample)

    def _arguments(self, start: EpisodeStart, effects: RecordedEffects) -> dict[str, Any]:
        """Return the body's arguments: knobs, fields, a tokenizer, and an engine for each model."""
        program = self.program
        arguments = {**program.knobs, **start.inputs}
        for name, kind in program.provided:
            kind, _, model = kind.partition(":")
            if kind == "tokenizer":
                arguments[name] = self._tokenizers[program.models[0]]
            elif kind == "engine":
                arguments[name] = self._engine(start.sample, effects, model or program.models[0])
        return arguments

    def _engine(self, sample: int, effects: RecordedEffects, model: str) -> EpisodeEngine:
        return EpisodeEngine(
            self._drivers[model],
            self._tokenizers[model],
            self._params,
            sample_seed(self._seed, self.program.stream, sample, model),
            effects,
            model,
            self._tool_format,
            self._server,
        )


def _sampling_params(program: NodeProgram) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")
    return SamplingParams(
        **{name: program.options[name] for name in names if name in program.options},
        record=tuple(kind.name for kind in requested_kinds(program.options)),
    )


def _concurrency_limit(program: NodeProgram) -> AbstractAsyncContextManager[Any]:
    concurrency = program.options.get("concurrency")
    return asyncio.Semaphore(concurrency) if concurrency else nullcontext()


class PausableClock:
    """Drives the timeouts of a node's episodes while its engines are awake. Starts paused.

    An engine that shares its devices with training sleeps for much of a step, which must not count
    against the episodes that it interrupted. All methods are for the thread of the event loop.
    """

    def __init__(self) -> None:
        self._remaining: dict[asyncio.Timeout, float] = {}
        """Active timeout -> seconds that remained when the clock last started or paused."""
        self._is_running = False

    def timeout(self, seconds: float | None) -> PausableTimeout:
        """Return a timeout to enter with `async with`; None: it never ends the block."""
        return PausableTimeout(self, seconds)

    def add(self, timeout: asyncio.Timeout, seconds: float) -> None:
        """Drive a timeout whose block was entered."""
        self._remaining[timeout] = seconds
        self._schedule(timeout)

    def remove(self, timeout: asyncio.Timeout) -> None:
        """Stop driving a timeout whose block was left."""
        self._remaining.pop(timeout, None)

    def run(self) -> None:
        """Let time pass: the engines are awake."""
        if not self._is_running:
            self._is_running = True
            for timeout in self._remaining:
                self._schedule(timeout)

    def pause(self) -> None:
        """Stop time: an engine sleeps."""
        now = asyncio.get_running_loop().time()
        self._is_running = False
        for timeout in self._remaining:
            if not timeout.expired():
                self._remaining[timeout] = max(0.0, (timeout.when() or now) - now)
                timeout.reschedule(None)

    def _schedule(self, timeout: asyncio.Timeout) -> None:
        if self._is_running and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + self._remaining[timeout])


class PausableTimeout:
    """Cancels a block after some seconds of a `PausableClock`, and raises `TimeoutError`."""

    def __init__(self, clock: PausableClock, seconds: float | None) -> None:
        self._clock = clock
        self._seconds = seconds or 0.0
        self._timeout = None if seconds is None else asyncio.Timeout(None)

    def expired(self) -> bool:
        """Return whether this timeout ended the block."""
        return self._timeout is not None and self._timeout.expired()

    async def __aenter__(self) -> PausableTimeout:
        if self._timeout is not None:
            await self._timeout.__aenter__()
            self._clock.add(self._timeout, self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timeout is not None:
            self._clock.remove(self._timeout)
            await self._timeout.__aexit__(kind, error, traceback)
