"""`Stage`: one generate node on one worker; plays the episodes of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.data.tokenizer import TextTokenizer
from hflow.data.tool_formats import tool_format
from hflow.errors import BackendError, DataError, EpisodeError, HflowError
from hflow.plan.ir import Plan
from hflow.workers.base import ComputeReady, Failed, NodeProgram, WorkerEvent
from hflow.workers.blame import blame
from hflow.workers.effects import Effects
from hflow.workers.engine_driver import EngineDriver
from hflow.workers.episode import EpisodeEngine, sample_seed
from hflow.workers.opened import Opener
from hflow.workers.patience import Patience
from hflow.workers.pool_child import too_long
from hflow.workers.rows import bad_row
from hflow.workers.starts import Start, limit_of, params_of
from hflow.workers.store import Store

_REFUSING = (BackendError, DataError, EpisodeError)
"""Errors of ours that are the sample's own fault."""


class Stage:
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
        self.patience = Patience()
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

    async def play(self, start: Start, effects: Effects) -> WorkerEvent:
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

    def _arguments(self, start: Start, effects: Effects) -> dict[str, Any]:
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

    def _engine(self, sample: int, effects: Effects, model: str) -> EpisodeEngine:
        return EpisodeEngine(
            self._drivers[model],
            self._tokenizers[model],
            self._params,
            sample_seed(self._seed, self.program.stream, sample, model),
            effects,
            model,
            self._tool_format,
        )
