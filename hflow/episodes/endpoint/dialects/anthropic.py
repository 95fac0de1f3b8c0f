"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hflow.episodes.endpoint.dialects.interface import event
from hflow.episodes.endpoint.replies import Reply, ReplyPart
from hflow.episodes.endpoint.requests import (
    CompletionRequest,
    RequestRefused,
    read_messages,
    read_number,
    read_options,
    read_sampling,
    read_stops,
    read_tools,
    read_value,
    refuse_unknown_keys,
    shown_json,
)

_OPTIONS = (
    "max_tokens",
    "messages",
    "model",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
)
_LABELS = ("cache_control", "metadata")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
}
_BLOCK_KEYS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Type of a block -> its keys, besides `type` and `cache_control`."""
_TOOL_KEYS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
"""Key of a tool -> the key in OpenAI's form."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DIRECT = {"type": "direct"}
"""The `caller` of a tool that the model calls itself."""


class MessagesDialect:
    """`/v1/messages`."""

    path = "/v1/messages"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request."""
        options = read_options(body, _OPTIONS, _LABELS, _NEUTRAL)
        max_tokens = read_number(options, "max_tokens", int, 1)
        if max_tokens is None:
            raise RequestRefused("max_tokens is missing; set it", param="max_tokens")
        tools = [_tool(tool, i) for i, tool in enumerate(read_value(options, "tools", list, []))]
        return CompletionRequest(
            model=read_value(options, "model", str, ""),
            prompt=read_messages(_messages(options), "messages"),
            tools=read_tools(tools, _tool_choice(options.get("tool_choice", {"type": "auto"}))),
            max_tokens=max_tokens,
            stop=read_stops(options, "stop_sequences"),
            **read_sampling(options),
            is_streamed=read_value(options, "stream", bool, False),
        )

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return a message."""
        text = [{"type": "text", "text": reply.text, "citations": None}] if reply.text else []
        return {
            **_header(reply.reply_id, request),
            "content": [*text, *map(_tool_use, reply.tool_calls)],
            **_ending(reply),
            "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": len(reply.ids)},
        }

    def writer(self, request: CompletionRequest) -> MessageWriter:
        """Return the writer of a streamed message."""
        return MessageWriter(request)

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return an error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}


class MessageWriter:
    """Writes the events of a streamed message."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._has_text = False
        self._num_prompt = 0

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        """Return the event of an empty message."""
        self._num_prompt = num_prompt_tokens
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_header(reply_id, self._request), "content": [], **ending, "usage": usage}
        return _event("message_start", message=message)

    def add(self, part: ReplyPart) -> str:
        """Return the event of a text."""
        if not part.text:
            return ""
        begin = "" if self._has_text else _begin_block(0, {"type": "text", "text": ""})
        self._has_text = True
        return begin + _block_delta(0, {"type": "text_delta", "text": part.text})

    def end(self, reply: Reply) -> str:
        """Return the end of the text, tool calls, and why the message ended."""
        events = _event("content_block_stop", index=0) if self._has_text else ""
        for i, call in enumerate(reply.tool_calls, self._has_text):
            block = _tool_use(call)
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += _begin_block(i, {**block, "input": {}}) + _block_delta(i, delta)
            events += _event("content_block_stop", index=i)
        usage = {"input_tokens": self._num_prompt, "output_tokens": len(reply.ids)}
        return events + _event("message_delta", delta=_ending(reply), usage=usage) + _event("message_stop")

    def fail(self, refusal: RequestRefused) -> str:
        """Return the error."""
        return event(MessagesDialect().error_json(refusal), "error")


def _messages(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a conversation, the system's first."""
    system = options.get("system")
    found = [] if system is None else [{"role": "system", "content": _text(system, "system")}]
    for i, message in enumerate(read_value(options, "messages", list, [])):
        name = f"messages[{i}]"
        values = message if isinstance(message, dict) else {}
        if values.keys() != {"role", "content"} or values["role"] not in ("user", "assistant"):
            raise RequestRefused(
                f"{name} must have role (user or assistant) and content, but it is {shown_json(message)}",
                param="messages",
            )
        content = values["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise RequestRefused(f"{name}.content must be a text or a list of blocks", param="messages")
        checked = [_block(block, f"{name}.content[{j}]", values["role"]) for j, block in enumerate(blocks)]
        found += _assistant(checked) if values["role"] == "assistant" else _user(checked)
    return found


def _assistant(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": block.get("input")},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return [{"role": "assistant", "content": text, "tool_calls": calls}]


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a user's blocks: one for each tool result, and for adjacent texts."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            text = _text(block.get("content", ""), "the content of a tool_result")
            text = f"error: {text}" if block.get("is_error") else text
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += block["text"]
        else:
            messages.append({"role": "user", "content": block["text"]})
    return messages


def _block(block: Any, name: str, role: str) -> dict[str, Any]:
    """Return a block of a message, after checking its type and keys."""
    kinds = ("text", "tool_use" if role == "assistant" else "tool_result")
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in kinds:
        shown, wanted = shown_json(block), " or ".join(kinds)
        raise RequestRefused(f"{name} is {shown}; the {role}'s must be of type {wanted}", param="messages")
    found = {key: value for key, value in block.items() if value is not None and key != "cache_control"}
    if found.get("caller") == _DIRECT:
        del found["caller"]
    refuse_unknown_keys(found, (*_BLOCK_KEYS[kind], "type"), name, "messages")
    if kind == "text" and not isinstance(found.get("text"), str):
        raise RequestRefused(f"{name}.text must be a text", param="messages")
    return found


def _text(content: Any, name: str) -> str:
    """Return a text that may be given in blocks."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks if isinstance(blocks, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestRefused(f"{name} must be text, but it has {shown_json(block)}")
    return "".join(block["text"] for block in blocks)


def _tool(tool: Any, i: int) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    values = tool if isinstance(tool, dict) else {}
    if values.get("type", "custom") != "custom" or "input_schema" not in values:
        raise RequestRefused(
            f"tools[{i}] is {shown_json(tool)}; only tools with name and input_schema are supported",
            param="tools",
        )
    given = {key: value for key, value in values.items() if value is not None}
    refuse_unknown_keys(given, (*_TOOL_KEYS, "type", "cache_control"), f"tools[{i}]", "tools")
    function = {new: given[key] for key, new in _TOOL_KEYS.items() if key in given}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> str:
    """Return `auto` or `none`."""
    values = choice if isinstance(choice, dict) else {}
    kind, is_serial = values.get("type"), values.get("disable_parallel_tool_use")
    if kind not in ("auto", "none") or is_serial or values.keys() - {"type", "disable_parallel_tool_use"}:
        raise RequestRefused(
            f'tool_choice={shown_json(choice)} is not supported; set it to {{"type": "auto"}} or '
            '{"type": "none"}',
            param="tool_choice",
        )
    return str(kind)


def _header(reply_id: str, request: CompletionRequest) -> dict[str, Any]:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": request.model}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _ending(reply: Reply) -> dict[str, Any]:
    ended = "end_turn" if reply.stop is None else "stop_sequence"
    return {"stop_reason": _STOP_REASONS.get(reply.finish_reason, ended), "stop_sequence": reply.stop}


def _begin_block(index: int, block: Mapping[str, Any]) -> str:
    return _event("content_block_start", index=index, content_block=block)


def _block_delta(index: int, delta: Mapping[str, Any]) -> str:
    return _event("content_block_delta", index=index, delta=delta)


def _event(name: str, **data: Any) -> str:
    return event({"type": name, **data}, name)
