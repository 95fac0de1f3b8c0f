"""`Reply`: one completion, and its JSON in OpenAI's API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hflow.types import ToolCall, Trajectory


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
        """The number of tokens."""
        num_prompt, num_generated = self.num_prompt_tokens, len(self.tokens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


def reply_of(reply_id: str, before: Trajectory, after: Trajectory, text: str, tokens: Sequence[str]) -> Reply:
    """Return the reply for the last turn of a trajectory.

    Args:
        reply_id: identifies the reply, and its tool calls.
        before: the trajectory without the turn; its pending messages were encoded in front of the turn.
        after: the trajectory with the turn.
        text: the turn's text without its tool calls.
        tokens: the text of each generated token.
    """
    num_generated = after.num_tokens - before.num_tokens
    num_prompt = len(after.input_ids) - num_generated
    return Reply(
        reply_id=reply_id,
        text=text,
        tool_calls=tuple(_wire_call(f"call_{reply_id}_{i}", call) for i, call in enumerate(after.tool_calls)),
        finish_reason=after.stop_reason,
        tokens=tuple(tokens),
        logprobs=after.behav_logprobs[num_prompt:],
        num_prompt_tokens=num_prompt,
    )


def generated_ids(before: Trajectory, after: Trajectory) -> tuple[int, ...]:
    """Return the tokens that the last turn added to a trajectory."""
    return after.input_ids[len(after.input_ids) - (after.num_tokens - before.num_tokens) :]


def chat_json(reply: Reply, model: str, with_logprobs: bool) -> dict[str, Any]:
    """Return a chat completion."""
    message = {**reply.message, "content": reply.text if reply.text or not reply.tool_calls else None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(reply) if with_logprobs else None,
        "finish_reason": reply.finish_reason,
    }
    return {**_header(reply, model, "chat.completion"), "choices": [choice], "usage": reply.usage}


def text_json(reply: Reply, model: str, with_logprobs: bool) -> dict[str, Any]:
    """Return the completion of a text."""
    choice = {
        "index": 0,
        "text": reply.text,
        "logprobs": _text_logprobs(reply) if with_logprobs else None,
        "finish_reason": reply.finish_reason,
    }
    return {**_header(reply, model, "text_completion"), "choices": [choice], "usage": reply.usage}


def chat_stream(reply: Reply, model: str, with_logprobs: bool, with_usage: bool) -> Iterator[str]:
    """Yield a chat completion as server-sent events: the whole message, then why it ended."""
    calls = [{"index": i, **call} for i, call in enumerate(reply.tool_calls)]
    delta = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
    logprobs = _chat_logprobs(reply) if with_logprobs else None
    choices = [
        {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish_reason},
    ]
    yield from _events(_header(reply, model, "chat.completion.chunk"), choices, reply, with_usage)


def text_stream(reply: Reply, model: str, with_logprobs: bool, with_usage: bool) -> Iterator[str]:
    """Yield the completion of a text as server-sent events."""
    logprobs = _text_logprobs(reply) if with_logprobs else None
    choice = {"index": 0, "text": reply.text, "logprobs": logprobs, "finish_reason": reply.finish_reason}
    yield from _events(_header(reply, model, "text_completion"), [choice], reply, with_usage)


def _events(
    header: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], reply: Reply, with_usage: bool
) -> Iterator[str]:
    usage = {"usage": None} if with_usage else {}
    for choice in choices:
        yield _event({**header, "choices": [choice], **usage})
    if with_usage:
        yield _event({**header, "choices": [], "usage": reply.usage})
    yield "data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _header(reply: Reply, model: str, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
        "id": f"{prefix}-{reply.reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _chat_logprobs(reply: Reply) -> dict[str, Any]:
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(reply: Reply) -> dict[str, Any]:
    offsets = [0, *accumulate(map(len, reply.tokens))][: len(reply.tokens)]
    return {
        "tokens": list(reply.tokens),
        "token_logprobs": list(reply.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _wire_call(call_id: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": call_id, "type": "function", "function": function}
