"""`Reply`: one completion, and `StreamedTurn`: its parts, while it is generated."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.types import ToolCall, Trajectory


@dataclass(frozen=True)
class ReplyPart:
    """Some tokens of a reply. The text may lag behind them."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """The text of each token, with special tokens."""
    logprobs: tuple[float, ...]
    num_prompt_tokens: int


@dataclass(frozen=True)
class Reply:
    """One completion."""

    reply_id: str
    text: str
    """What the model wrote, without the calls in `tool_calls`."""
    tool_calls: tuple[Mapping[str, Any], ...]
    """In the form of OpenAI's API."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop: str | None
    """The stop string of the request that ended the text."""
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """The text of each generated token, with special tokens."""
    logprobs: tuple[float, ...]
    """The log-prob of each generated token, under the distribution from which it was drawn."""
    num_prompt_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The message of the assistant, as the client sends it back in its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": list(self.tool_calls)} if self.tool_calls else message

    @property
    def usage(self) -> dict[str, int]:
        """The number of tokens, as OpenAI's chat API names them."""
        num_prompt, num_generated = self.num_prompt_tokens, len(self.tokens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }

    def part(self, num_characters: int, num_tokens: int) -> ReplyPart:
        """Return the reply without its first characters and tokens."""
        return ReplyPart(
            self.text[num_characters:],
            self.ids[num_tokens:],
            self.tokens[num_tokens:],
            self.logprobs[num_tokens:],
            self.num_prompt_tokens,
        )


class StreamedTurn:
    """The parts of a reply that is being generated.

    Attributes:
        reply_id: the reply's, from the time that the first part is there.
    """

    def __init__(self) -> None:
        self.reply_id = ""
        self._parts: asyncio.Queue[ReplyPart | None] = asyncio.Queue()

    def add(self, part: ReplyPart) -> None:
        """Add a part."""
        self._parts.put_nowait(part)

    def end(self) -> None:
        """Note that there are no further parts."""
        self._parts.put_nowait(None)

    async def parts(self) -> AsyncIterator[ReplyPart]:
        """Yield the parts as they come."""
        while (part := await self._parts.get()) is not None:
            yield part


def reply_of(
    reply_id: str,
    before: Trajectory,
    after: Trajectory,
    text: str,
    tokens: Sequence[str],
    stop: str | None = None,
) -> Reply:
    """Return the reply for the last turn of a trajectory.

    Args:
        reply_id: identifies the reply, and its tool calls.
        before: the trajectory without the turn; its pending messages were encoded in front of the turn.
        after: the trajectory with the turn.
        text: the turn's text without its tool calls.
        tokens: the text of each generated token.
        stop: the stop string of the request that ended the turn.
    """
    ids = generated_ids(before, after)
    num_prompt = len(after.input_ids) - len(ids)
    return Reply(
        reply_id=reply_id,
        text=text,
        tool_calls=tuple(_wire_call(_call_id(reply_id, i), call) for i, call in enumerate(after.tool_calls)),
        finish_reason=after.stop_reason,
        stop=stop,
        ids=ids,
        tokens=tuple(tokens),
        logprobs=after.behav_logprobs[num_prompt:],
        num_prompt_tokens=num_prompt,
    )


def generated_ids(before: Trajectory, after: Trajectory) -> tuple[int, ...]:
    """Return the tokens that the last turn added to a trajectory."""
    return after.input_ids[len(after.input_ids) - (after.num_tokens - before.num_tokens) :]


def _call_id(reply_id: str, number: int) -> str:
    """Return the id of a call: nine letters and digits, as Mistral's chat templates demand."""
    digest = hashlib.blake2b(f"{reply_id}/{number}".encode(), digest_size=5).digest()
    return "c" + base64.b32hexencode(digest).decode().lower()


def _wire_call(call_id: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": call_id, "type": "function", "function": function}
