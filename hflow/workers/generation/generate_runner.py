"""`GenerateRunner`: one generate node on one worker; plays the episodes of its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from hflow.backends.interface import SamplingParams
from hflow.data.tokenizer import TextTokenizer
from hflow.data.tool_formats import tool_format
from hflow.errors import BackendError, DataError, EpisodeError, HflowError
from hflow.planner.ir import Plan
from hflow.workers.bodies.pool_child import too_long
from hflow.workers.error_location import blame
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.episode_engine import EpisodeEngine, sample_seed
from hflow.workers.generation.episode_result import Opener, Row
from hflow.workers.generation.journal import Journal
from hflow.workers.generation.recorded_effects import RecordedEffects
from hflow.workers.interface import ComputeReady, Failed, GroupOrder, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import bad_row
from hflow.workers.storage.store import Store

# -------------------- Time limits of episodes that stand still while their engine sleeps.


class Limit:
    """Cancels a block after so many seconds of an engine that is awake, and raises `TimeoutError`."""

    def __init__(self, patience: PausableTimeout, seconds: float | None) -> None:
        self._patience = patience
        self._seconds = seconds or 0.0
        self._clock = None if seconds is None else asyncio.Timeout(None)

    def expired(self) -> bool:
        """Whether it was this limit that ended the block."""
        return self._clock is not None and self._clock.expired()

    async def __aenter__(self) -> Limit:
        if self._clock is not None:
            await self._clock.__aenter__()
            self._patience.begin(self._clock, self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._clock is not None:
            self._patience.end(self._clock)
            await self._clock.__aexit__(kind, error, traceback)


class PausableTimeout:
    """Limits of the episodes on one engine; all on the event loop's thread. Starts standing still.

    An engine that shares its devices with training sleeps for much of a step, which is no fault
    of the episodes that it interrupted.
    """

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Limit -> seconds left when time last stood still or began to run."""
        self._runs = False

    def limit(self, seconds: float | None) -> Limit:
        """A limit to enter with `async with`; None: it never ends the block."""
        return Limit(self, seconds)

    def begin(self, clock: asyncio.Timeout, seconds: float) -> None:
        """A limit's clock was entered."""
        self._left[clock] = seconds
        self._schedule(clock)

    def end(self, clock: asyncio.Timeout) -> None:
        """A limit's clock was left."""
        self._left.pop(clock, None)

    def run(self) -> None:
        """The engine is awake."""
        if not self._runs:
            self._runs = True
            for clock in self._left:
                self._schedule(clock)

    def pause(self) -> None:
        """The engine sleeps."""
        now = asyncio.get_running_loop().time()
        self._runs = False
        for clock in self._left:
            if not clock.expired():
                self._left[clock] = max(0.0, (clock.when() or now) - now)
                clock.reschedule(None)

    def _schedule(self, clock: asyncio.Timeout) -> None:
        if self._runs and not clock.expired():
            clock.reschedule(asyncio.get_running_loop().time() + self._left[clock])


# -------------------- What an episode starts from, and how its node draws.


@dataclass(frozen=True)
class EpisodeStart:
    """One sample to generate."""

    program: NodeProgram
    sample: int
    group: int
    inputs: Mapping[str, Any]
    """The body's fields, by parameter."""
    row: Row = field(default_factory=dict)
    """The dataset's row of a root stream's sample."""
    order: GroupOrder | None = None
    """What asked for it; None where it stands beside a sample of another stream."""
    parent: str | None = None
    """That stream."""
    journal: Journal | None = None
    """What the episode did elsewhere before."""


def params_of(program: NodeProgram) -> SamplingParams:
    """How a node draws."""
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    return SamplingParams(**{name: program.options[name] for name in names if name in program.options})


def limit_of(program: NodeProgram) -> AbstractAsyncContextManager[Any]:
    """Bounds how many of a node's episodes run at once."""
    concurrency = program.options.get("concurrency")
    return asyncio.Semaphore(concurrency) if concurrency else nullcontext()


_REFUSING = (BackendError, DataError, EpisodeError)
"""Errors of ours that are the sample's own fault."""


class GenerateRunner:
    """What the episodes of a node have in common.

    Attributes:
        program: the node's.
        replicas: model -> the generation replica that draws for it.
        patience: time limits, which stand still unless all of its engines are awake.
        limit: bounds how many of its episodes run at once.
    """

    def __init__(
        self,
        plan: Plan,
        program: NodeProgram,
        store: Store,
        drivers: Mapping[str, EngineDriver],
        tokenizers: Mapping[str, TextTokenizer],
        seed: int,
    ) -> None:
        """Set it.

        Args:
            plan: for the node's engines and streams.
            program: the node's.
            store: where samples go.
            drivers: generation replica -> its engine on this worker.
            tokenizers: model -> its tokenizer.
            seed: of the run.

        Raises:
            RecipeError: for a `tool_format` that is none.
        """
        self.program = program
        self.replicas = {plan.replica(name).model: name for name in plan.placement(program.name).replicas}
        self.patience = PausableTimeout()
        self.limit = limit_of(program)
        self._plan = plan
        self._opener = Opener.of(program, plan.graph, store)
        self._drivers = {model: drivers[replica] for model, replica in self.replicas.items()}
        self._tokenizers = tokenizers
        self._params = params_of(program)
        self._seed = seed
        self._tool_format = program.options.get("tool_format")
        if self._tool_format is not None:
            for model in program.models:
                tool_format(self._tool_format, tokenizers[model].chat_template is not None)

    async def play(self, start: EpisodeStart, effects: RecordedEffects) -> WorkerEvent:
        """Run one episode to its end, and put away what it returns.

        Raises:
            HflowError: what ends the run: a row that cannot be read, an engine that has failed, a
                recipe that is wrong.
        """
        program, sample = start.program, start.sample
        timeout = program.options.get("timeout")
        arguments = self._arguments(start, effects)
        try:
            async with self.patience.limit(timeout) as clock:
                result = await program.body(**arguments)
            effects.finish()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return Failed(program.name, sample, "timeout", too_long(timeout))
            for driver in self._drivers.values():
                driver.check()
            if isinstance(error, DataError) and start.order is not None:
                raise bad_row(self._plan, start.order, error) from error
            if isinstance(error, HflowError) and not isinstance(error, _REFUSING):
                raise
            return Failed(program.name, sample, "failed", blame(error, program.body))
        made = self._opener.put(sample, start.group, result, start.row, start.parent)
        self._opener.report(sample, effects.counts)
        return made if start.order is not None else ComputeReady(program.name, sample)

    def _arguments(self, start: EpisodeStart, effects: RecordedEffects) -> dict[str, Any]:
        """The body's fields, knobs, tokenizer, and an engine for each model."""
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
        )
