"""`RecordedEffects`: performs everything that an episode does to the outside, and records it in a journal."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from hflow.base.errors import EpisodeError, HflowError
from hflow.data.images.files import with_digests, with_images_of_urls, with_urls
from hflow.data.text.tool_formats.tools import Tool, tool_name
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import DrawnTokens, GenerationResult, SamplingParams
from hflow.episodes.journal import Journal, JournalRecorder, completion_request
from hflow.processes.error_location import error_line
from hflow.sandboxes.providers import Sandboxes
from hflow.types import EpisodeState
from hflow.types.engine import environment_number, replay_of
from hflow.types.image import PlacedImage
from hflow.types.sandbox import ToolFailed, sandbox_of

Function = Callable[..., Any]
MAX_RESTARTS = 5
"""How often an episode may begin again whose environment is never replayed."""


class RecordedEffects:
    """The effects of one attempt of an episode.

    All engines of the episode share it, so that their effects have one order.

    Args:
        state_counts: the worker's number of episodes in each state.
        journal: what the episode did in an earlier attempt, here or elsewhere; None for a new one.

    Attributes:
        status: the episode's state.
        counts: `tool_calls`, `tool_errors` and `malformed_calls`, for tools that are sandboxed or were
            offered to a model; `restarts`, if an environment is never replayed; else empty.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        state_counts: Counter[EpisodeState] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.status = EpisodeStatus(Counter() if state_counts is None else state_counts)
        self.counts: dict[str, int] = {}
        self._sandboxes = sandboxes
        self._recorder = JournalRecorder(journal)
        self._environments: list[Any] = []
        self._environment_locks: list[asyncio.Lock] = []
        """One lock for each environment: its calls are made one after the other, as they begin."""
        self._offered: set[Function] = set()
        self._offered_names: set[str] = set()
        """Names of the tools that were offered by their JSON schema."""

    @property
    def journal(self) -> Journal:
        """What the episode did so far."""
        return self._recorder.journal

    @property
    def has_diverged(self) -> bool:
        """Whether the episode did something else than the journal from which it started."""
        return self._recorder.has_diverged

    @property
    def interruption(self) -> str:
        """How an episode that was interrupted before continued, in one line; empty if it was not."""
        return self._recorder.interruption

    def finish(self) -> None:
        """End the episode, after its body returned.

        Raises:
            EpisodeError: when the journal from which it started has further effects.
        """
        self._recorder.finish()

    def offer(self, tools: Iterable[Tool]) -> None:
        """Note that a model may call these tools. Their errors become results that the model reads.

        A tool that is offered by its JSON schema is the function with its name.
        """
        for tool in tools:
            if isinstance(tool, Mapping):
                self._offered_names.add(tool_name(tool))
            else:
                self._offered.add(tool)
        for name in ("tool_calls", "tool_errors", "malformed_calls"):
            self.counts.setdefault(name, 0)

    async def complete(
        self,
        driver: EngineDriver,
        model: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[DrawnTokens], None] | None = None,
        images: tuple[PlacedImage, ...] = (),
    ) -> GenerationResult:
        """Generate tokens, except those that the journal has, for which `on_tokens` is not called."""
        index, entry = self._recorder.begin("complete", model, completion_request(prompt_ids, params, images))
        if entry.is_done:
            recorded: GenerationResult = entry.outcome
            return recorded
        on_interrupt = partial(self._recorder.record, index, is_done=False)
        with self.status.during(EpisodeState.GENERATING):
            generated = await driver.submit(
                prompt_ids, params, entry.outcome, on_interrupt, on_tokens, images
            )
        self._recorder.record(index, generated)
        return generated

    async def call(
        self, model: str, tool: Function, arguments: Mapping[str, Any], failure: Callable[[str], str]
    ) -> Any:
        """Run a tool with arguments that JSON can hold, unless the journal has its result.

        `failure` makes the result of a tool that failed.

        Raises:
            TypeError: for arguments or a result that JSON cannot hold.
            RecipeError: for a method of an object that is no environment of the episode.
            EpisodeError: when an environment returns something else than in the journal.
            Exception: what the function raised, if it is neither sandboxed nor offered to the model.
        """
        number = environment_number(tool, self._environments)
        request = {
            "tool": tool.__name__ if number is None else tool.__qualname__,
            "arguments": json_value(with_digests(arguments), f"the arguments of {tool.__name__}"),
        }
        if number is not None:
            request["environment"] = number
        index, entry = self._recorder.begin("call", model, request)
        is_again = number is not None and replay_of(self._environments[number]) == "again"
        if entry.is_done and not is_again:
            outcome = entry.outcome
        else:
            async with nullcontext() if number is None else self._environment_locks[number]:
                outcome = await self._perform(tool, arguments, failure)
            if entry.is_done:
                self._recorder.check_result(index, outcome)
            else:
                self._recorder.record(index, outcome)
        if self._is_for_model(tool):
            self.offer([tool])
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += outcome["failed"]
        result = outcome["result"]
        return with_images_of_urls(result) if outcome.get("has_images") else result

    async def create_environment(
        self, model: str, kind: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Any:
        """Create an environment, also when the journal has it, and return it.

        Raises:
            RecipeError: for a way of replay that does not exist.
            EpisodeError: when it is never replayed, and the episode has begun again too often.
            TypeError: for arguments that JSON cannot hold.
            Exception: what `kind` raised.
        """
        name = getattr(kind, "__name__", type(kind).__name__)
        request = {
            "environment": name,
            "arguments": json_value(with_digests(arguments), f"the arguments of {name}"),
        }
        index, entry = self._recorder.begin("environment", model, request)
        with self.status.during(EpisodeState.PROCESSING_TOOLS):
            environment = await _call_function(kind, arguments)
        self._environments.append(environment)
        self._environment_locks.append(asyncio.Lock())
        replay = replay_of(environment)
        if replay == "never":
            self._count_restarts(name)
        if not entry.is_done:
            self._recorder.record(index, None if replay == "again" else replay)
        return environment

    async def close_environments(self) -> None:
        """Call the `close` of environments that have one, in reverse order.

        Raises:
            Exception: what the first one raised, after all were closed.
        """
        errors = []
        while self._environments:
            close = getattr(self._environments.pop(), "close", None)
            if close is not None:
                try:
                    await _call_function(close, {})
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)
        if errors:
            raise errors[0]

    def number(self, kind: str, model: str, value: float) -> float:
        """Return the number that the journal has, else record and return `value`."""
        index, entry = self._recorder.begin(kind, model, {})
        if entry.is_done:
            return float(entry.outcome)
        self._recorder.record(index, value)
        return value

    def _count_restarts(self, name: str) -> None:
        """Count how often the episode began again.

        Raises:
            EpisodeError: when that was too often.
        """
        self.counts["restarts"] = self._recorder.num_restarts
        if self._recorder.num_restarts > MAX_RESTARTS:
            raise EpisodeError(
                f"the episode began again {MAX_RESTARTS} times and was interrupted each time, as {name} is "
                "never replayed. Shorten the episode, or update weights less often"
            )

    def _is_for_model(self, tool: Function) -> bool:
        """Return whether a model reads the tool's result, errors included."""
        is_offered = tool in self._offered or tool.__name__ in self._offered_names
        return is_offered or sandbox_of(tool) is not None

    async def _perform(
        self, tool: Function, arguments: Mapping[str, Any], failure: Callable[[str], str]
    ) -> dict[str, Any]:
        with self.status.during(EpisodeState.PROCESSING_TOOLS):
            return await self._run_tool(tool, arguments, failure)

    async def _run_tool(
        self, tool: Function, arguments: Mapping[str, Any], failure: Callable[[str], str]
    ) -> dict[str, Any]:
        limits = sandbox_of(tool)
        try:
            if limits is not None:
                result = await self._sandboxes.run(tool, limits, arguments)
            else:
                result = await _call_function(tool, arguments)
        except ToolFailed as error:
            return {"result": failure(str(error)), "failed": True}
        except HflowError:
            raise
        except Exception as error:
            if not self._is_for_model(tool):
                raise
            return {"result": failure(error_line(error)), "failed": True}
        plain, has_images = with_urls(result)
        outcome = {"result": json_value(plain, f"what {tool.__name__} returned"), "failed": False}
        return outcome | {"has_images": True} if has_images else outcome


class EpisodeStatus:
    """The state of one episode, also counted in `state_counts`: state -> episodes of the worker in it."""

    def __init__(self, state_counts: Counter[EpisodeState]) -> None:
        self.state = EpisodeState.PENDING
        self._state_counts = state_counts
        self._num_active = {EpisodeState.GENERATING: 0, EpisodeState.PROCESSING_TOOLS: 0}
        """Completions and calls under way. If there are both, the state is GENERATING."""
        state_counts[self.state] += 1

    def begin(self) -> None:
        """Note that the body begins."""
        self._set(EpisodeState.INTERACTING)

    def end(self) -> None:
        """Note that the body has ended, or never began."""
        self._set(EpisodeState.TERMINATED)

    def during(self, state: EpisodeState) -> _Activity:
        """Return a context manager during which the episode generates or processes tools."""
        return _Activity(self, state)

    def change_activity(self, state: EpisodeState, change: int) -> None:
        """Add to the number of completions or calls under way."""
        self._num_active[state] += change
        if self.state is EpisodeState.TERMINATED:
            return
        for active_state, num in self._num_active.items():
            if num:
                self._set(active_state)
                return
        self._set(EpisodeState.INTERACTING)

    def _set(self, state: EpisodeState) -> None:
        self._state_counts[self.state] -= 1
        self._state_counts[state] += 1
        self.state = state


class _Activity:
    """A block in which an episode generates or processes tools. A class, as it is entered for every turn."""

    __slots__ = ("_state", "_status")

    def __init__(self, status: EpisodeStatus, state: EpisodeState) -> None:
        self._status = status
        self._state = state

    def __enter__(self) -> None:
        self._status.change_activity(self._state, 1)

    def __exit__(self, *error: object) -> None:
        self._status.change_activity(self._state, -1)


async def _call_function(tool: Function, arguments: Mapping[str, Any]) -> Any:
    """Call a coroutine function on this loop, and any other on a thread, so that it blocks no episode."""
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(_call_on_thread, tool, arguments)


def _call_on_thread(tool: Function, arguments: Mapping[str, Any]) -> Any:
    """Call a function. A `StopIteration` is replaced, as a future cannot carry it."""
    try:
        return tool(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(tool, '__name__', tool)} raised StopIteration") from error


def json_value(value: Any, what: str) -> Any:
    """Return the value as JSON reads it back, so that an episode sees the same value when it is replayed.

    Raises:
        TypeError: when JSON cannot hold it.
    """
    if isinstance(value, str):
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} cannot be recorded in the episode's journal: {error}. Use text, numbers, and lists and "
            "dicts of them."
        ) from error
