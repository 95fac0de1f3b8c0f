"""What bodies receive: `Engine` for episodes, `Tokenizer` for encoders, and `State`.

With it is what every engine treats alike: values of sampling options, environments of an episode, levels of
sleep, and counts.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, runtime_checkable

from hflow.base.errors import RecipeError
from hflow.types.sandbox import sandbox_of
from hflow.types.trajectory import Trajectory

EPISODE_COUNTS = ("tool_calls", "tool_errors", "malformed_calls", "restarts")
"""Counts of an episode that are metrics of its node."""

MIN_TEMPERATURE = 0.01
"""The lowest temperature but 0. Logits divided by less may overflow, and vLLM draws with this one instead."""
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1_000_000_000


def find_sampling_problem(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[str, str] | None:
    """Return the option that no token can be drawn with, and what is wrong with it; None if there is none."""
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        bounds = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        return "temperature", f"temperature is {temperature:g}; it must be from {bounds}, or 0"
    if not 0 < top_p <= 1:
        return "top_p", f"top_p is {top_p:g}; it must be more than 0 and at most 1"
    if not 0 <= top_k <= MAX_TOP_K:
        return "top_k", f"top_k is {top_k}; it must be from 0, which means all tokens, to {MAX_TOP_K:,}"
    if not 0 <= min_p <= 1:
        return "min_p", f"min_p is {min_p:g}; it must be from 0, which means all tokens, to 1"
    return None


Replay = Literal["again", "recorded", "never"]
"""Treatment of an environment's calls when its episode is replayed, as its attribute `replay` says:

- `again`, if it has none: it is created again, and its recorded calls are made again, which restores its
  state. Their results must equal the recorded ones.
- `recorded`: it is created again, and recorded calls return their recorded results. For an object without a
  state that calls change, such as a client of a search engine.
- `never`: the episode begins again, without its journal. For what can neither be repeated nor continued.
"""


def replay_of(environment: object) -> Replay:
    """Return the way in which an environment is replayed.

    Raises:
        RecipeError: if its `replay` is none of the ways.
    """
    replay: Any = getattr(environment, "replay", "again")
    if replay not in get_args(Replay):
        name = type(environment).__name__
        raise RecipeError(f"{name}.replay is {replay!r}; it must be one of {', '.join(get_args(Replay))}")
    return cast(Replay, replay)


def environment_number(tool: Callable[..., Any], environments: Sequence[object]) -> int | None:
    """Return the environment whose method a tool is; None if it is a function or a method of a class.

    Args:
        tool: what is called with `engine.call`.
        environments: the environments that `engine.environment` has created for the episode, in order.

    Raises:
        RecipeError: for a method of another object, whose state would be lost when the episode is replayed,
            and for a method with a sandbox.
    """
    if not inspect.ismethod(tool) or inspect.isclass(tool.__self__):
        return None
    owner, name = tool.__self__, f"{type(tool.__self__).__name__}.{tool.__name__}"
    number = next((i for i, environment in enumerate(environments) if environment is owner), None)
    if number is None:
        kind = type(owner).__name__
        raise RecipeError(
            f"engine.call({name}) would lose the state of its object when the episode is replayed. Create "
            f"the object with `await engine.environment({kind}, ...)`, or call a function"
        )
    if sandbox_of(tool) is not None:
        raise RecipeError(
            f"{name} has a sandbox, whose process does not keep the state of its object. Remove @sandbox, or "
            "call a function"
        )
    return number


T = TypeVar("T")


class EpisodeState(enum.StrEnum):
    """What an episode is doing. It can be interrupted in any state and continues from there."""

    PENDING = "pending"
    """The episode's body has not started yet."""
    GENERATING = "generating"
    """An engine generates tokens for it, or will once it is awake."""
    PROCESSING_TOOLS = "processing_tools"
    """A tool is running."""
    INTERACTING = "interacting"
    """The episode's body is doing something else: it computes, or waits for a service."""
    TERMINATED = "terminated"
    """The episode's body has returned, failed or been cancelled."""


class Endpoint(Protocol):
    """An HTTP endpoint with the APIs of OpenAI and Anthropic on the policy of one episode."""

    @property
    def base_url(self) -> str:
        """The URL for OpenAI's clients, such as `http://127.0.0.1:40123/v1`."""
        ...

    @property
    def server_url(self) -> str:
        """The URL without `/v1`, as Anthropic's clients want it."""
        ...

    @property
    def api_key(self) -> str:
        """The key for clients. It identifies the episode, and is valid until the endpoint is closed."""
        ...

    @property
    def model(self) -> str:
        """Name of the model for clients."""
        ...

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory for each conversation, in the order in which they began."""
        ...

    @property
    def sessions(self) -> tuple[str | None, ...]:
        """The header `X-Session-ID` of the requests of each trajectory; None if they had none."""
        ...

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory of the only conversation.

        Raises:
            EpisodeError: if there is no conversation, or there are several.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """The generation engine as one sample uses it.

    An episode calls the model, tools, the clock and random numbers through its engine. hflow records the
    results, so that an interrupted episode can be replayed.
    """

    async def complete(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Trajectory,
        *,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        images: Sequence[Any] | None = None,
    ) -> Trajectory:
        """Generate a completion and return the trajectory with it.

        Args:
            prompt: a text, which is encoded without a template; messages, which the model's chat template
                encodes; or a trajectory, whose tokens are kept and whose pending messages are appended.
            tools: functions that the model may call in this and all later turns of the trajectory, or their
                JSON schemas in the form of OpenAI's API. Default: those that the trajectory already has.
            max_tokens: largest number of tokens of the completion. Default: the generate node's option.
            stop: texts that end the completion. Default: the generate node's option.
            images: images for the places that a prompt has for them: `<image>` in a text, or a part
                `{"type": "image"}` of a message. Without a place they are in front of the user's last text.
                Each is an `Image`, bytes, a data URL, or an image of Pillow.
        """
        ...

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """Return a context manager that opens an HTTP endpoint for this episode.

        It has the APIs of OpenAI and Anthropic. An agent framework can generate with it; its conversations
        become trajectories.
        """
        ...

    async def call(self, tool: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a tool and return its result.

        If the tool has a sandbox or was offered to the model, an exception becomes the result, as one line of
        text. Exceptions of other functions are raised. A method must belong to an environment of the episode.

        Arguments and results are JSON values, or images: an `Image`, or a Pillow image as a result, which the
        caller gets as an `Image`.
        """
        ...

    async def environment(self, kind: Callable[..., T], /, **arguments: Any) -> T:
        """Create a stateful environment of this episode and return it.

        Call its methods with `call`. When the episode is replayed, the environment is created again and its
        calls are made again, so that it has the same state. A method `close`, if there is one, is called
        when the episode ends.

        Args:
            kind: the class, or a function that returns the environment.
            arguments: JSON values.
        """
        ...

    def random(self) -> float:
        """Return a number in [0, 1), seeded by the sample."""
        ...

    def time(self) -> float:
        """Return the seconds since the epoch."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer of a model, as encode bodies receive it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can encode messages."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...

    def token_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the end of the text of each token of an answer, in characters from the answer's first one.

        It is -1 for a token that ends within a character, and one more than the length of the text for a last
        token that ends the turn.
        """
        ...

    def join(self, prompt: str, answer: str, images: Sequence[Any] | None = None) -> Trajectory:
        """Return a trajectory whose prompt is masked, and whose answer and end-of-text token are learned.

        Images are in the places `<image>` of the prompt, or in front of it.
        """
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None) -> Trajectory:
        """Return a trajectory of messages in the chat template. The messages of assistants are learned.

        Images are in the places that the messages have for them.
        """
        ...


class State(dict[str, Any]):
    """A dict of JSON values that a node keeps from one step to the next. Checkpoints include it."""


class SleepLevel(enum.IntEnum):
    """What an engine keeps, from most to least."""

    PAUSE = 0
    """Everything: the engine has devices of its own, so it only stops."""
    KEEP_WEIGHTS = 1
    """A copy of its weights in host memory, since it may wake with the same version."""
    DROP_WEIGHTS = 2
    """Nothing, since it loads new weights when it wakes, or does not wake again."""


@dataclass(frozen=True)
class EngineStats:
    """What engines did in some time."""

    num_tokens: int = 0
    """Tokens drawn by requests that finished or were interrupted."""
    seconds: float = 0.0
    """Time spent in engine steps, summed over engines."""
    num_interrupted: int = 0
    """Requests interrupted before they finished."""
    num_kept: int = 0
    """Tokens that the interrupted requests had, and kept."""

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.num_interrupted + other.num_interrupted,
            self.num_kept + other.num_kept,
        )

    def __sub__(self, other: EngineStats) -> EngineStats:
        return EngineStats(
            self.num_tokens - other.num_tokens,
            self.seconds - other.seconds,
            self.num_interrupted - other.num_interrupted,
            self.num_kept - other.num_kept,
        )
