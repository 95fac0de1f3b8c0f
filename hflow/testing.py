"""For tests of recipes: an engine and a tokenizer for bodies, and `try_recipe`, which trains for two steps.

The engine and the tokenizer need no model, worker or torch. Their tokens are Unicode code points, so that a
test can read them.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hflow.base.errors import HflowError
from hflow.data.text.messages import check_prompt, normal_messages, normal_tools, text_of, with_images
from hflow.services.client import services_of_process, use_services
from hflow.services.limits import ServiceSettings
from hflow.services.server import LimitServer
from hflow.types import Endpoint, ToolCall, Trajectory
from hflow.types.engine import environment_number
from hflow.types.sandbox import ToolFailed, sandbox_of

if TYPE_CHECKING:
    from hflow.runtime.records.run_summary import RunSummary

T = TypeVar("T")

END = 3
"""The end-of-text token (ASCII "end of text")."""

Reply = str | ToolCall | Sequence[ToolCall]
"""A completion of a scripted engine: a text, or the tools that the model calls."""


class CharacterTokenizer:
    """A `Tokenizer` whose tokens are characters."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can encode messages: it needs no template."""
        return True

    def encode(self, text: str) -> list[int]:
        """Return the code points of a text."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of code points, without end-of-text tokens."""
        return "".join(chr(token) for token in ids if token != END)

    def token_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the end of the text of each token; one after the text for end-of-text tokens."""
        size = len(self.decode(ids))
        return [size + 1 if token == END else end for end, token in enumerate(ids, start=1)]

    def join(self, prompt: str, answer: str, images: Sequence[Any] | None = None) -> Trajectory:
        """Return a trajectory whose prompt is masked, and whose answer and end-of-text token are learned.

        An image is the text `[image]`.
        """
        (asked,) = with_images([{"role": "user", "content": prompt}], images)
        return Trajectory.learned(
            tuple(self.encode(text_of(asked["content"]))),
            (*self.encode(answer), END),
            messages=(asked, {"role": "assistant", "content": answer}),
            completion=answer,
            num_turns=1,
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None) -> Trajectory:
        """Return a trajectory of messages without a template. The messages of assistants are learned.

        An image is the text `[image]`.
        """
        messages = with_images(normal_messages(messages), images)
        trajectory = Trajectory((), (), (), (), messages=tuple(messages))
        for message in messages:
            learned = message["role"] == "assistant"
            ids = [*self.encode(text_of(message["content"])), *([END] if learned else [])]
            trajectory = _append_tokens(trajectory, ids, learned, version=-1)
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        return replace(trajectory, completion=replies[-1] if replies else "", num_turns=len(replies))


class ScriptedEngine:
    """An `Engine` whose completions are given: `ScriptedEngine(["1 + 1 = 2"])`.

    Args:
        replies: one completion for each call of `complete`, in order.
        logprob: the log-prob of every generated token.
        version: the version of the weights of every generated token.
        temperature: the only temperature that requests to an endpoint may have, as a generate node has one.
        top_p: the only `top_p` that such requests may have.
        seed: the seed of `random`.
        now: the time in seconds; every call of `time` adds one.

    Attributes:
        prompts: the text before each completion.
        calls: the tool calls of the episode, with their arguments.
    """

    def __init__(
        self,
        replies: Sequence[Reply],
        *,
        logprob: float = -1.0,
        version: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        now: float = 0.0,
    ) -> None:
        self.prompts: list[str] = []
        self.calls: list[ToolCall] = []
        self._replies = list(replies)
        self._logprob = logprob
        self._version = version
        self._sampling = {"temperature": temperature, "top_p": top_p}
        self._random = random.Random(seed)
        self._now = now
        self._offered: set[str] = set()
        """Names of the tools that were offered to the model."""
        self._environments: list[object] = []
        self._conversation_numbers = itertools.count()
        self._tokenizer = CharacterTokenizer()

    async def complete(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Trajectory,
        *,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        images: Sequence[Any] | None = None,
        on_part: object = None,
    ) -> Trajectory:
        """Return the trajectory with the next reply. `max_tokens` limits a text; `stop` has no effect.

        An image is the text `[image]` in `prompts`.

        Raises:
            ValueError: if no reply is left.
            DataError: when the messages are no prompt, or a tool has no schema.
        """
        before = self._before_completion(prompt, images)
        if tools is not None:
            before = replace(before, tools=normal_tools(tools))
            self._offered.update(
                tool["function"]["name"] if isinstance(tool, Mapping) else tool.__name__
                for tool in before.tools
            )
        self.prompts.append(self._tokenizer.decode(before.input_ids))
        if not self._replies:
            raise ValueError(f"the scripted engine has no reply for completion {len(self.prompts)}. Add one")
        reply = self._replies.pop(0)
        if isinstance(reply, str):
            return self._complete_text(before, reply, max_tokens)
        calls = (reply,) if isinstance(reply, ToolCall) else tuple(reply)
        completed = self._complete_text(before, " ".join(str(call) for call in calls), None)
        return replace(completed, tool_calls=calls, stop_reason="tool_calls")

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """Open an HTTP endpoint here whose completions are the replies. Needs `hflow-rl[serve]`."""
        from hflow.episodes.endpoint.conversations import open_endpoint
        from hflow.episodes.endpoint.server import EndpointServer

        server = EndpointServer()
        try:
            numbers = self._conversation_numbers
            async with open_endpoint(server, "scripted", lambda _: self, self._sampling, numbers) as endpoint:
                yield endpoint
        finally:
            await server.close()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-text token."""
        return (END,)

    def text_before_calls(self, turn: Trajectory) -> str:
        """Return the text of a trajectory's last turn; nothing if it calls tools."""
        return "" if turn.tool_calls else turn.completion

    def found_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """Return None, as `stop` has no effect."""
        return None

    def token_text(self, token: int) -> str:
        """Return the character of a token."""
        return chr(token)

    async def call(self, tool: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run the tool in this process.

        As in a run, an exception of a tool with a sandbox, or of one that was offered to the model, is its
        result.

        Raises:
            RecipeError: for a method of an object that is no environment of the episode.
        """
        environment_number(tool, self._environments)
        self.calls.append(ToolCall(tool.__name__, arguments))
        try:
            result = tool(**arguments)
            return await result if inspect.isawaitable(result) else result
        except ToolFailed as error:
            return f"error: {error}"
        except HflowError:
            raise
        except Exception as error:
            if tool.__name__ not in self._offered and sandbox_of(tool) is None:
                raise
            return f"error: {type(error).__name__}: {error}"

    async def environment(self, kind: Callable[..., T], /, **arguments: Any) -> T:
        """Create an environment."""
        created = kind(**arguments)
        environment: T = await created if inspect.isawaitable(created) else created
        self._environments.append(environment)
        return environment

    def random(self) -> float:
        """Return a number in [0, 1), seeded."""
        return self._random.random()

    def time(self) -> float:
        """Return the time, one second later at each call."""
        self._now += 1.0
        return self._now

    def _before_completion(
        self, prompt: str | Sequence[Mapping[str, Any]] | Trajectory, images: Sequence[Any] | None
    ) -> Trajectory:
        """Return the prompt as a trajectory without pending messages."""
        if not isinstance(prompt, Trajectory):
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = with_images(normal_messages(said), images)
            check_prompt(messages)
            text = "".join(text_of(message["content"]) for message in messages)
            return Trajectory.learned(tuple(self._tokenizer.encode(text)), (), messages=tuple(messages))
        pending = normal_messages(prompt.pending) if prompt.pending else []
        check_prompt(pending)
        added = "".join(text_of(message["content"]) for message in pending)
        longer = _append_tokens(prompt, self._tokenizer.encode(added), learned=False, version=-1)
        return replace(longer, messages=(*prompt.messages, *pending), pending=(), tool_calls=())

    def _complete_text(self, before: Trajectory, text: str, max_tokens: int | None) -> Trajectory:
        ids = [*self._tokenizer.encode(text), END]
        is_truncated = max_tokens is not None and len(ids) > max_tokens
        ids = ids[:max_tokens]
        text = self._tokenizer.decode(ids)
        after = _append_tokens(before, ids, learned=True, version=self._version, logprob=self._logprob)
        return replace(
            after,
            messages=(*before.messages, {"role": "assistant", "content": text}),
            completion=text,
            stop_reason="length" if is_truncated else "stop",
            num_turns=before.num_turns + 1,
            draws=(*before.draws, (len(before.input_ids), len(self.prompts))),
        )


def try_recipe(
    recipe: str | Path, directory: str | Path, overrides: Sequence[str] = (), steps: int = 2, batch: int = 16
) -> RunSummary:
    """Run a recipe for a few steps, on small batches, with its own models and data, on one CPU process.

    A model whose checkpoint does not exist has random weights, if the configuration has its architecture.

    Args:
        recipe: path of the recipe's Python file.
        directory: where the run writes, such as pytest's `tmp_path`.
        overrides: keys of the configuration to change, as `key=value`.
        steps: training steps.
        batch: groups per step.

    Raises:
        HflowError: for the reasons of `hflow.run`.
    """
    from hflow import launch
    from hflow.launch.planning.read_recipe import read_recipe

    config, _, _ = read_recipe(recipe, overrides)
    random = [
        f"models.{name}.path=null"
        for name, model in config.models.items()
        if model.path is not None and model.architecture is not None and not Path(model.path).is_dir()
    ]
    small = [f"steps={steps}", f"batch={batch}", f"out={directory}"]
    one_process = ["workers=inproc", "cluster=cpu-1x1", "placement=null"]
    return launch.run(recipe, [*small, *one_process, *random, *overrides], live=False)


@asynccontextmanager
async def services(**settings: Mapping[str, Any]) -> AsyncIterator[None]:
    """Let bodies call services in the block of `async with`.

    Args:
        **settings: service -> keys of `services.NAME`, such as `judge={"url": "http://127.0.0.1:8000/v1"}`.
    """
    found = [ServiceSettings(name=name, **values) for name, values in settings.items()]
    async with LimitServer(found) as server:
        before = services_of_process()
        use_services(server.access)
        try:
            yield
        finally:
            use_services(before)


def _append_tokens(
    trajectory: Trajectory, ids: Sequence[int], learned: bool, version: int, logprob: float = 0.0
) -> Trajectory:
    """Return the trajectory with tokens appended."""
    num_tokens = len(ids)
    return replace(
        trajectory,
        input_ids=(*trajectory.input_ids, *ids),
        loss_mask=(*trajectory.loss_mask, *[learned] * num_tokens),
        behav_logprobs=(*trajectory.behav_logprobs, *[logprob] * num_tokens),
        versions=(*trajectory.versions, *[version] * num_tokens),
    )
