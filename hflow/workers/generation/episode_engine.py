"""`EpisodeEngine`: what one sample's episode sees of a generation engine."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from random import Random
from time import time
from typing import Any

from hflow.backends.interface import GenerationResult, SamplingParams
from hflow.data.tokenizer import TextTokenizer
from hflow.data.tool_formats import ParsedCalls, ToolFormat, tool_format
from hflow.data.tool_schemas import tool_schema
from hflow.errors import DataError, EpisodeError
from hflow.types import ToolCall, Trajectory
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.recorded_effects import RecordedEffects

# -------------------- Trajectories that grow turn by turn. Tokens are only ever appended: none is
# encoded twice.


def prompted(ids: Sequence[int], messages: tuple[Mapping[str, Any], ...]) -> Trajectory:
    """A prompt: nothing of it is learned."""
    return Trajectory(
        input_ids=tuple(ids),
        loss_mask=(False,) * len(ids),
        behav_logprobs=(0.0,) * len(ids),
        versions=(-1,) * len(ids),
        messages=messages,
    )


def continued(talk: Trajectory, ids: Sequence[int]) -> Trajectory:
    """`talk` with its pending messages, which were encoded as `ids`, behind it."""
    added = prompted(ids, talk.pending)
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + added.input_ids,
        loss_mask=talk.loss_mask + added.loss_mask,
        behav_logprobs=talk.behav_logprobs + added.behav_logprobs,
        versions=talk.versions + added.versions,
        messages=talk.messages + added.messages,
        pending=(),
    )


def answered(
    talk: Trajectory, generated: GenerationResult, text: str, calls: tuple[ToolCall, ...] = ()
) -> Trajectory:
    """`talk` with a generated turn behind it, which says `text` and calls tools.

    A turn that was cut by its length says so, even where it had called a tool before.
    """
    called = calls and generated.stop_reason == "stop"
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + generated.ids,
        loss_mask=talk.loss_mask + (True,) * len(generated.ids),
        behav_logprobs=talk.behav_logprobs + generated.logprobs,
        versions=talk.versions + generated.versions,
        messages=(*talk.messages, {"role": "assistant", "content": text}),
        completion=text,
        stop_reason="tool_calls" if called else generated.stop_reason,
        num_turns=talk.num_turns + 1,
        tool_calls=calls,
    )


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    ends = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


Tool = Callable[..., Any]
Prompt = str | Sequence[Mapping[str, Any]] | Trajectory


def sample_seed(run_seed: int, stream: str, sample: int, model: str) -> int:
    """The seed of one sample's draws from one model: 64 bits that depend on nothing else."""
    digest = hashlib.blake2b(f"{run_seed}/{stream}/{sample}/{model}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class EpisodeEngine:
    """The `hflow.types.Engine` of one sample and one model."""

    def __init__(
        self,
        driver: EngineDriver,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        seed: int,
        effects: RecordedEffects,
        model: str,
        tools: str | None = None,
    ) -> None:
        """Make one.

        Args:
            driver: of the engine that draws.
            tokenizer: the model's.
            params: the node's; the tokenizer's stop tokens are added to `stop_ids`.
            seed: the sample's, see `sample_seed`.
            effects: the episode's.
            model: whose engine it is.
            tools: how calls are written, the node's `tool_format`.
        """
        self._driver = driver
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        self._effects = effects
        self._model = model
        self._tools = tools

    async def complete(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Trajectory:
        """Generate until a stop and return the longer trajectory.

        Args:
            prompt: a text, encoded as it stands (or as the user's message, where a chat template has
                to describe tools); messages, encoded by the chat template; or a trajectory, of
                which every token is kept and only pending messages are encoded.
            tools: functions that the model may call, now and in later turns of the trajectory; those
                of the trajectory by default.
            max_tokens: most tokens to draw now; the node's by default.
            stop: texts that end the turn; the node's by default. Their tokens stay in the
                trajectory, but the completion ends before them.

        Raises:
            RecipeError: when the tools cannot be offered with this tokenizer.
            EpisodeError: when a message cannot be encoded, or the journal has something else.
            BackendError: when the engine refuses the prompt.
            RunError: when the engine has failed.
            DataError: when the tokenizer cannot encode the prompt.
        """
        offered = _tools_of(prompt, tools)
        if offered:
            self._format.check(offered)
            self._effects.offer(offered)
        start = self._opened(prompt, offered)
        params = self._turn(max_tokens, stop)
        closing = self._format.stop if offered else ()
        generated = await self._effects.complete(
            self._driver,
            self._model,
            start.input_ids,
            dataclasses.replace(params, stop=(*params.stop, *closing)) if closing else params,
        )
        said = self._tokenizer.decode(generated.ids)
        found = self._parsed(until_stop(said, params.stop), offered)
        return answered(start, generated, until_stop(said, params.stop), found.calls)

    async def call(self, tool: Tool, /, **arguments: Any) -> Any:
        """Run a tool: a sandboxed one in its process, an asynchronous one here, others on a thread.

        Where the tool is sandboxed or was offered to the model, an error is its result.

        Raises:
            TypeError: for arguments or a result that JSON cannot hold.
            EpisodeError: when the journal has another call.
            Exception: what any other function raised.
        """
        has_format = self._tools is not None or self._tokenizer.chat_template is not None
        failure = self._format.failure if has_format else "error: {}".format
        return await self._effects.call(self._model, tool, arguments, failure)

    def random(self) -> float:
        """A number in [0, 1), seeded by the sample."""
        return self._effects.number("random", self._model, self._random.random())

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._effects.number("time", self._model, time())

    @cached_property
    def _random(self) -> Random:
        return Random(self._seed)

    @cached_property
    def _format(self) -> ToolFormat:
        return tool_format(self._tools, self._tokenizer.chat_template is not None)

    def _turn(self, max_tokens: int | None, stop: Sequence[str] | None) -> SamplingParams:
        """How this turn is drawn."""
        params = self._params
        return dataclasses.replace(
            params,
            stop_ids=tuple(dict.fromkeys((*params.stop_ids, *self._tokenizer.stop_ids))),
            seed=self._seed,
            max_tokens=params.max_tokens if max_tokens is None else max_tokens,
            stop=params.stop if stop is None else tuple(stop),
        )

    def _parsed(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """The calls in a turn, if there are tools to call."""
        if not tools:
            return ParsedCalls(())
        found = self._format.parse(text, tools)
        self._effects.counts["malformed_calls"] += found.num_malformed
        return found

    def _opened(self, prompt: Prompt, tools: tuple[Tool, ...]) -> Trajectory:
        """The trajectory that the next token is drawn behind."""
        if isinstance(prompt, Trajectory):
            start = self._continued(prompt, tools)
        else:
            messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
            if isinstance(prompt, str) and not self._describes(tools):
                ids = self._tokenizer.prompt(prompt)
            else:
                ids = self._tokenizer.template().prompt(messages, self._schemas(tools))
            start = prompted(ids, messages)
        return dataclasses.replace(start, tools=tools) if tools else start

    def _describes(self, tools: tuple[Tool, ...]) -> bool:
        """Whether the chat template tells the model of these tools."""
        return bool(tools) and self._format.is_described

    def _schemas(self, tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
        return [tool_schema(tool) for tool in tools] if self._describes(tools) else []

    def _continued(self, talk: Trajectory, tools: tuple[Tool, ...]) -> Trajectory:
        """The trajectory with its pending messages behind it."""
        if not talk.pending:
            return talk
        template = self._tokenizer.chat_template
        try:
            if template is not None:
                last = talk.input_ids[-1] if talk.input_ids else None
                ids = template.continuation(talk.pending, last, self._schemas(tools))
            else:
                ids = self._tokenizer.encode("".join(str(m.get("content", "")) for m in talk.pending))
        except DataError as error:  # of what the episode added, not of the dataset's row
            raise EpisodeError(f"a message that the episode added cannot be encoded: {error}") from error
        return continued(talk, ids)


def _tools_of(prompt: Prompt, tools: Sequence[Tool] | None) -> tuple[Tool, ...]:
    """What is offered now: the given tools, else the trajectory's."""
    if tools is not None:
        return tuple(tools)
    return prompt.tools if isinstance(prompt, Trajectory) else ()
