"""`RecordedEffects`: all that an episode does to the world, journaled, watched and counted.

The engines of one episode share one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hflow.backends.interface import GenerationResult, SamplingParams
from hflow.errors import HflowError
from hflow.types import EpisodeState
from hflow.types.sandbox import sandbox_of
from hflow.workers.error_location import error_line
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.journal import Journal, JournalRecorder, completion_request
from hflow.workers.generation.sandboxes import Sandboxes, ToolFailed

# -------------------- What the episodes of a worker do, counted by state.


class EpisodeStatus:
    """The state of one episode. Its changes are counted in a census of all.

    Args:
        census: state -> episodes that are in it.
    """

    def __init__(self, census: Counter[EpisodeState]) -> None:
        self.state = EpisodeState.PENDING
        self._census = census
        self._doing = {EpisodeState.GENERATING: 0, EpisodeState.PROCESSING_TOOLS: 0}
        """How often at once; of both, generating names the state."""
        census[self.state] += 1

    def begin(self) -> None:
        """The body begins."""
        self._become(EpisodeState.INTERACTING)

    def end(self) -> None:
        """The body has ended, or never began."""
        self._become(EpisodeState.TERMINATED)

    def doing(self, state: EpisodeState) -> _Activity:
        """While the block runs, the episode generates or processes tools."""
        return _Activity(self, state)

    def count(self, state: EpisodeState, change: int) -> None:
        """It does so once more, or once less."""
        self._doing[state] += change
        if self.state is EpisodeState.TERMINATED:
            return
        for one, num in self._doing.items():
            if num:
                self._become(one)
                return
        self._become(EpisodeState.INTERACTING)

    def _become(self, state: EpisodeState) -> None:
        self._census[self.state] -= 1
        self._census[state] += 1
        self.state = state


class _Activity:
    """A block in which an episode does something."""

    __slots__ = ("_state", "_watch")

    def __init__(self, watch: EpisodeStatus, state: EpisodeState) -> None:
        self._watch = watch
        self._state = state

    def __enter__(self) -> None:
        self._watch.count(self._state, 1)

    def __exit__(self, *error: object) -> None:
        self._watch.count(self._state, -1)


Tool = Callable[..., Any]


class RecordedEffects:
    """One episode's.

    Attributes:
        watch: the episode's state.
        counts: `tool_calls`, `tool_errors`, `malformed_calls`, of tools that are sandboxed or were offered
            to a model; empty where there are none.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        census: Counter[EpisodeState] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Begin an episode.

        Args:
            sandboxes: where sandboxed tools run.
            census: of the worker's episodes.
            journal: what the episode did elsewhere; None for one that starts.
        """
        self.watch = EpisodeStatus(Counter() if census is None else census)
        self.counts: dict[str, int] = {}
        self._sandboxes = sandboxes
        self._recorder = JournalRecorder(journal)
        self._offered: set[Tool] = set()

    @property
    def journal(self) -> Journal:
        """What the episode did so far."""
        return self._recorder.journal

    @property
    def has_diverged(self) -> bool:
        """Whether the episode did something else than the journal says that it started from."""
        return self._recorder.has_diverged

    def finish(self) -> None:
        """The body returned.

        Raises:
            EpisodeError: when the journal that it started from goes on.
        """
        self._recorder.finish()

    def offer(self, tools: Iterable[Tool]) -> None:
        """These tools are shown to the model, so that their errors are answers to it."""
        self._offered.update(tools)
        for name in ("tool_calls", "tool_errors", "malformed_calls"):
            self.counts.setdefault(name, 0)

    async def complete(
        self, driver: EngineDriver, model: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> GenerationResult:
        """Draw tokens, as far as the journal does not have them."""
        index, effect = self._recorder.begin("complete", model, completion_request(prompt_ids, params))
        if effect.is_done:
            done: GenerationResult = effect.outcome
            return done
        on_part = partial(self._recorder.keep, index, is_done=False)
        with self.watch.doing(EpisodeState.GENERATING):
            drawn = await driver.submit(prompt_ids, params, effect.outcome, on_part)
        self._recorder.keep(index, drawn)
        return drawn

    async def call(
        self, model: str, tool: Tool, arguments: Mapping[str, Any], failure: Callable[[str], str]
    ) -> Any:
        """Run a tool, unless the journal has its result.

        Args:
            model: of the engine that was asked.
            tool: the function.
            arguments: what JSON can hold.
            failure: makes the result of a tool that failed.

        Raises:
            TypeError: for arguments or a result that JSON cannot hold.
            Exception: what a function raised that is neither sandboxed nor offered to the model.
        """
        asked = {"tool": tool.__name__, "arguments": plain(arguments, f"the arguments of {tool.__name__}")}
        index, effect = self._recorder.begin("call", model, asked)
        if not effect.is_done:
            with self.watch.doing(EpisodeState.PROCESSING_TOOLS):
                outcome = await self._outcome(tool, arguments, failure)
            self._recorder.keep(index, outcome)
        else:
            outcome = effect.outcome
        if self._answers_a_model(tool):
            self.offer([tool])
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += outcome["failed"]
        return outcome["result"]

    def number(self, kind: str, model: str, value: float) -> float:
        """A number that is not the same at every run; the journal's, where it has one."""
        index, effect = self._recorder.begin(kind, model, {})
        if effect.is_done:
            return float(effect.outcome)
        self._recorder.keep(index, value)
        return value

    def _answers_a_model(self, tool: Tool) -> bool:
        """Whether a model reads what comes of it, errors included."""
        return tool in self._offered or sandbox_of(tool) is not None

    async def _outcome(
        self, tool: Tool, arguments: Mapping[str, Any], failure: Callable[[str], str]
    ) -> dict[str, Any]:
        limits = sandbox_of(tool)
        try:
            if limits is not None:
                result = await self._sandboxes.run(tool, limits, arguments)
            else:
                result = await _called(tool, arguments)
        except ToolFailed as error:
            return {"result": failure(str(error)), "failed": True}
        except HflowError:
            raise
        except Exception as error:
            if not self._answers_a_model(tool):
                raise
            return {"result": failure(error_line(error)), "failed": True}
        return {"result": plain(result, f"what {tool.__name__} returned"), "failed": False}


async def _called(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """An asynchronous function on this loop, any other on a thread, so that nobody waits for it."""
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(_on_thread, tool, arguments)


def _on_thread(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """Call a function; a future cannot carry the `StopIteration` that one may raise."""
    try:
        return tool(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"{tool.__name__} raised StopIteration") from error


def plain(value: Any, what: str) -> Any:
    """The value as JSON brings it back, which is what a replay sees.

    Raises:
        TypeError: when JSON cannot hold it.
    """
    if isinstance(value, str):
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} is journaled, so it must be text, numbers, lists and dicts of them: {error}"
        ) from error
