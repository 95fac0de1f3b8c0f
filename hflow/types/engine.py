"""What episodes and encoders are given: protocols that engines and tokenizers fulfil."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from hflow.types.trajectory import Trajectory

# -------------------- The states of an episode.


class EpisodeState(enum.StrEnum):
    """What an episode does right now. It can be interrupted in any of these, and goes on from there."""

    PENDING = "pending"
    """It waits for its turn: its body has not begun."""
    GENERATING = "generating"
    """An engine draws for it, or is to draw once it is awake."""
    PROCESSING_TOOLS = "processing_tools"
    """A tool runs."""
    INTERACTING = "interacting"
    """Its body does something else: it computes, or waits for a service."""
    TERMINATED = "terminated"
    """Its body has ended, one way or another."""


@runtime_checkable
class Engine(Protocol):
    """One sample's view of a generation engine. Every effect of an episode goes through it."""

    async def complete(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Trajectory,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Trajectory:
        """Generate until a stop and return the longer trajectory.

        A `str` is encoded as it stands, a list of messages by the model's chat template, a
        `Trajectory` (with its pending messages) is continued token for token. The `tools` are offered
        to the model, in this and all later turns of the trajectory.
        """
        ...

    async def call(self, tool: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a tool and return its result.

        Where the tool is sandboxed or was offered to the model, its errors are results: one line of
        text. Those of any other function are raised.
        """
        ...

    def random(self) -> float:
        """A number in [0, 1), seeded by the sample."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """A model's tokenizer, as encode bodies see it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def join(self, prompt: str, answer: str) -> Trajectory:
        """Prompt (masked) and answer with its end-of-text token (learned)."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Trajectory:
        """Messages by the chat template; what assistants say is learned."""
        ...


class State(dict[str, Any]):
    """A node's checkpointed JSON memory."""
