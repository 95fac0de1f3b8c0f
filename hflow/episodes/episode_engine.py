"""`EpisodeEngine`: the `Engine` that a generate body receives for one sample.

Trajectories grow turn by turn. Tokens are only appended, so no generated token is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from random import Random
from time import time
from typing import Any, TypeVar

from hflow.base.errors import DataError, EpisodeError
from hflow.data.text.chat import processed_images
from hflow.data.text.messages import check_prompt, normal_messages, normal_tools, with_images
from hflow.data.text.tokenizer import TextTokenizer
from hflow.data.text.tool_formats.interface import ToolFormat
from hflow.data.text.tool_formats.registry import tool_format
from hflow.data.text.tool_formats.tools import Tool, tool_schema
from hflow.data.text.turn_text import TurnText
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import DrawnTokens, SamplingParams
from hflow.episodes.endpoint.conversations import EpisodeEndpoint, open_endpoint
from hflow.episodes.endpoint.replies import ReplyPart
from hflow.episodes.endpoint.server import EndpointServer
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.episodes.trajectories import append_messages, append_turn, prompt_trajectory
from hflow.types import ToolCall, Trajectory
from hflow.types.image import ProcessedImage

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, Any]] | Trajectory


class EpisodeEngine:
    """The `hflow.types.Engine` of one sample and one model.

    The tokenizer's stop tokens are added to those of `params`. Without a server, `endpoint` cannot be called.
    """

    def __init__(
        self,
        driver: EngineDriver,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        seed: int,
        effects: RecordedEffects,
        model: str,
        format_name: str | None = None,
        server: EndpointServer | None = None,
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        self._effects = effects
        self._model = model
        self._format_name = format_name
        self._server = server
        self._conversation_numbers = itertools.count()

    async def complete(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        images: Sequence[Any] | None = None,
        on_part: Callable[[ReplyPart], None] | None = None,
    ) -> Trajectory:
        """Generate one turn and return the trajectory with it, as `hflow.types.Engine.complete`.

        `on_part` is called with tokens as they are drawn, and the text in front of tool calls that they make
        certain. The last ones are only in the trajectory.

        Raises:
            RecipeError: when the tools cannot be offered with this tokenizer.
            EpisodeError: when a message cannot be encoded, or the journal has another effect.
            BackendError: when the engine refuses the prompt.
            RunError: when the engine has failed.
            DataError: when the messages are no prompt, a tool has no schema, or the tokenizer cannot encode
                the prompt.
        """
        offered = _offered_tools(prompt, tools)
        if offered:
            self._format.check(offered)
            self._effects.offer(offered)
        start = self._start(prompt, offered, images)
        params = self._turn_params(max_tokens, stop)
        format_stops = self._format.stop if offered else ()
        generated = await self._effects.complete(
            self._driver,
            self._model,
            start.input_ids,
            dataclasses.replace(params, stop=(*params.stop, *format_stops)) if format_stops else params,
            None if on_part is None else self._part_sink(on_part, start, offered, params.stop),
            start.pixels,
        )
        text = cut_at_stop(self._tokenizer.decode_answer(generated.ids), params.stop)
        turn = append_turn(start, generated, text, self._parse_calls(text, offered))
        return dataclasses.replace(turn, draws=(*start.draws, (len(start.input_ids), self._seed)))

    def endpoint(self) -> AbstractAsyncContextManager[EpisodeEndpoint]:
        """Return a context manager that opens an HTTP endpoint with OpenAI's API for this episode.

        Every request is a `complete`. Conversations after the first draw with seeds of their own, so that an
        agent that repeats a request gets another answer.

        Raises:
            ConfigError: when the server cannot start.
            RunError: at the end of the block, when the engine has failed, even if the agent hid that.
        """
        assert self._server is not None, "this engine has no server for endpoints"
        params = self._params
        sampling = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return open_endpoint(
            self._server, self._model, self._conversation_engine, sampling, self._conversation_numbers
        )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        return tuple(dict.fromkeys((*self._params.stop_ids, *self._tokenizer.stop_ids)))

    def text_before_calls(self, turn: Trajectory) -> str:
        """Return the text of a trajectory's last turn in front of its tool calls."""
        return self._format.parse(turn.completion, turn.tools).text if turn.tool_calls else turn.completion

    def found_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """Return the string that ended a turn of these tokens; None if none of `stops` did."""
        text = self._tokenizer.decode_answer(ids) if stops else ""
        found = [stop for stop in stops if stop in text]
        return min(found, key=text.find, default=None)

    def token_text(self, token: int) -> str:
        """Return the text of a token, also of a special one."""
        return self._tokenizer.decode_token(token)

    async def call(self, tool: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a tool: a sandboxed one in a process, a coroutine function on this loop, others on a thread.

        If the tool is sandboxed or was offered to the model, an error becomes its result.

        Raises:
            TypeError: for arguments or a result that JSON cannot hold.
            EpisodeError: when the journal has another effect, or another result of an environment.
            RecipeError: for a method of an object that is no environment of the episode.
            Exception: what any other function raised.
        """
        failure = "error: {}".format if self._format_name is None else self._format.failure
        return await self._effects.call(self._model, tool, arguments, failure)

    async def environment(self, kind: Callable[..., T], /, **arguments: Any) -> T:
        """Create an environment of the episode, on a thread unless `kind` is a coroutine function.

        Raises:
            TypeError: for arguments that JSON cannot hold.
            EpisodeError: when the journal has another effect.
            Exception: what `kind` raised.
        """
        environment: T = await self._effects.create_environment(self._model, kind, arguments)
        return environment

    def random(self) -> float:
        """Return a random number in [0, 1), seeded by the sample."""
        return self._effects.number("random", self._model, self._random.random())

    def time(self) -> float:
        """Return the time in seconds since the epoch."""
        return self._effects.number("time", self._model, time())

    def _conversation_engine(self, number: int) -> EpisodeEngine:
        """Return an engine that draws with the seed of one of the endpoint's conversations."""
        seed = self._seed if number == 0 else _hashed_seed(f"{self._seed}/conversation {number}")
        return EpisodeEngine(
            self._driver, self._tokenizer, self._params, seed, self._effects, self._model, self._format_name
        )

    @cached_property
    def _random(self) -> Random:
        return Random(self._seed)

    @cached_property
    def _format(self) -> ToolFormat:
        return tool_format(self._format_name, self._tokenizer.template_text)

    def _turn_params(self, max_tokens: int | None, stop: Sequence[str] | None) -> SamplingParams:
        params = self._params
        return dataclasses.replace(
            params,
            stop_ids=self.stop_ids,
            seed=self._seed,
            max_tokens=params.max_tokens if max_tokens is None else max_tokens,
            stop=params.stop if stop is None else tuple(stop),
        )

    def _part_sink(
        self,
        on_part: Callable[[ReplyPart], None],
        start: Trajectory,
        tools: tuple[Tool, ...],
        stops: Sequence[str],
    ) -> Callable[[DrawnTokens], None]:
        """Return a function that makes parts of a turn's reply of its tokens."""
        num_safe = self._format.num_safe if tools else None
        turn = TurnText(self._tokenizer.decode_answer, stops, num_safe)
        num_prompt = len(start.input_ids)

        def add(drawn: DrawnTokens) -> None:
            tokens = tuple(map(self.token_text, drawn.ids))
            on_part(ReplyPart(turn.add(drawn.ids), drawn.ids, tokens, drawn.logprobs, num_prompt))

        return add

    def _parse_calls(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """Return the tool calls in a turn, and count malformed ones."""
        if not tools:
            return ()
        parsed = self._format.parse(text, tools)
        self._effects.counts["malformed_calls"] += parsed.num_malformed
        return parsed.calls

    def _start(
        self, prompt: Prompt, tools: tuple[Tool, ...], images: Sequence[Any] | None = None
    ) -> Trajectory:
        """Return the trajectory that the turn is appended to."""
        if isinstance(prompt, Trajectory):
            if images is not None:
                raise DataError("images= is for prompts; add images to a trajectory with add(role, image)")
            start = self._append_pending(prompt, tools)
        else:
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = tuple(with_images(normal_messages(said), images))
            check_prompt(messages)
            processed = self._processed(messages)
            if isinstance(prompt, str) and not self._has_template_tools(tools):
                ids, placed = self._tokenizer.encode_content(messages[0]["content"])
            else:
                ids = self._tokenizer.template().prompt(messages, self._template_schemas(tools))
                placed = self._tokenizer.placed(ids, processed)
            start = prompt_trajectory(ids, messages, placed)
        return dataclasses.replace(start, tools=tools) if tools else start

    def _processed(self, messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
        """Return the images in messages as the model takes them.

        Raises:
            EpisodeError: if an image is damaged, or the model does not take it.
        """
        try:
            return processed_images(self._tokenizer.images, messages)
        except DataError as error:  # refuses the sample: only decoding shows that a file is damaged
            raise EpisodeError(str(error)) from error

    def _append_pending(self, trajectory: Trajectory, tools: tuple[Tool, ...]) -> Trajectory:
        """Encode and append the pending messages of a trajectory."""
        if not trajectory.pending:
            return trajectory
        template = self._tokenizer.chat_template
        try:
            pending = tuple(normal_messages(trajectory.pending))
            if tools:
                pending = self._with_result_ids(pending, trajectory.completion)
            check_prompt(pending)
            trajectory = dataclasses.replace(trajectory, pending=pending)
            num_before, processed = len(trajectory.input_ids), self._processed(pending)
            if template is not None:
                end = self._tokenizer.turn_end(trajectory.input_ids, self._params.stop)
                ids = template.continuation(pending, end, self._template_schemas(tools))
            else:
                contents = [message["content"] for message in pending]
                ids = self._tokenizer.encode_added(contents)
            placed = self._tokenizer.placed(ids, processed, num_before)
        except DataError as error:  # the episode added the message, so no dataset row is at fault
            raise EpisodeError(f"a message that the episode added cannot be encoded: {error}") from error
        return append_messages(trajectory, ids, placed)

    def _with_result_ids(self, messages: Sequence[dict[str, Any]], turn: str) -> tuple[dict[str, Any], ...]:
        """Return messages in which the results of a turn's calls have the ids that the template needs."""
        found, number = [dict(message) for message in messages], 0
        for message in found:
            if message["role"] == "tool":
                result_id = self._format.result_id(turn, number)
                if result_id is not None:
                    message.setdefault("tool_call_id", result_id)
                number += 1
        return tuple(found)

    def _has_template_tools(self, tools: tuple[Tool, ...]) -> bool:
        """Return whether the chat template describes tools to the model."""
        return bool(tools) and self._format.is_described

    def _template_schemas(self, tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the chat template describes."""
        return [tool_schema(tool) for tool in tools] if self._has_template_tools(tools) else []


def sample_seed(run_seed: int, stream: str, sample: int, model: str) -> int:
    """Return the seed with which a model generates a sample: 64 bits that depend on nothing else."""
    return _hashed_seed(f"{run_seed}/{stream}/{sample}/{model}")


def _hashed_seed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    ends = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _offered_tools(prompt: Prompt, tools: Sequence[Tool] | None) -> tuple[Tool, ...]:
    """Return the tools that the model may call now: the given ones, else the trajectory's."""
    if tools is not None:
        return normal_tools(tools)
    return prompt.tools if isinstance(prompt, Trajectory) else ()
