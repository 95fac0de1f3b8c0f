"""OpenAI's Responses API, without stored responses: a request has the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hflow.episodes.endpoint.dialects.interface import event
from hflow.episodes.endpoint.dialects.openai import LABELS, openai_error, token_logprobs
from hflow.episodes.endpoint.replies import Reply, ReplyPart
from hflow.episodes.endpoint.requests import (
    CompletionRequest,
    RequestRefused,
    read_messages,
    read_number,
    read_options,
    read_sampling,
    read_tools,
    read_value,
    refuse_unknown_keys,
    shown_json,
)

_OPTIONS = (
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "model",
    "previous_response_id",
    "stream",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "parallel_tool_calls": (True,),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Supported parts of a response. There is no reasoning beside the text."""
_ITEM_KEYS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of an item -> its keys, besides `type`, `id` and `status`."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")


class ResponsesDialect:
    """`/v1/responses`."""

    path = "/v1/responses"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request."""
        options = read_options(body, _OPTIONS, LABELS, _NEUTRAL)
        if "previous_response_id" in options:
            raise RequestRefused(
                "previous_response_id is not supported, as responses are not stored; send the items of the "
                "conversation as input",
                param="previous_response_id",
            )
        include = read_value(options, "include", list, [])
        for part in include:
            if part not in _INCLUDED:
                raise RequestRefused(f"include={shown_json(part)} is not supported", param="include")
        instructions = read_value(options, "instructions", str, None)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        choice = options.get("tool_choice", "auto")
        return CompletionRequest(
            model=read_value(options, "model", str, ""),
            prompt=read_messages([*system, *_messages(options.get("input"))], "input"),
            tools=read_tools([_tool(t, i) for i, t in enumerate(_list(options, "tools"))], choice),
            max_tokens=read_number(options, "max_output_tokens", int, 1),
            **read_sampling(options),
            with_logprobs=_LOGPROBS in include,
            is_streamed=read_value(options, "stream", bool, False),
            options=options,
        )

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return a response."""
        is_cut = reply.finish_reason == "length"
        content = _text_part(reply.text, token_logprobs(reply) if request.with_logprobs else [])
        status = "incomplete" if is_cut else "completed"
        return {
            **_header(reply.reply_id, request, status),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _output(reply, content),
            "usage": {
                "input_tokens": reply.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": len(reply.ids),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.num_prompt_tokens + len(reply.ids),
            },
        }

    def writer(self, request: CompletionRequest) -> ResponseWriter:
        """Return the writer of a streamed response."""
        return ResponseWriter(self, request)

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return an error of OpenAI's APIs."""
        return openai_error(refusal)


class ResponseWriter:
    """Writes the events of a streamed response."""

    def __init__(self, dialect: ResponsesDialect, request: CompletionRequest) -> None:
        self._dialect = dialect
        self._request = request
        self._reply_id = ""
        self._num_events = 0
        self._has_message = False
        self._logprobs: list[dict[str, Any]] = []

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        """Return the events of an empty response."""
        self._reply_id = reply_id
        response = {**_header(reply_id, self._request, "in_progress"), "output": [], "usage": None}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def add(self, part: ReplyPart) -> str:
        """Return the event of a text; its log-probs are those of the tokens since the last one."""
        if self._request.with_logprobs:
            self._logprobs += token_logprobs(part)
        if not part.text:
            return ""
        logprobs, self._logprobs = self._logprobs, []
        begin = "" if self._has_message else self._begin_message()
        return begin + self._text_event("output_text.delta", delta=part.text, logprobs=logprobs)

    def end(self, reply: Reply) -> str:
        """Return the ends of all items, and the whole response."""
        response = self._dialect.reply_json(reply, self._request)
        events = ""
        for i, item in enumerate(response["output"]):
            events += self._end_message(item) if item["type"] == "message" else self._call(item, i)
        return events + self._event(response["status"], response=response)

    def fail(self, refusal: RequestRefused) -> str:
        """Return the error."""
        self._num_events += 1
        error = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
        return event({"type": "error", **error, "sequence_number": self._num_events - 1}, "error")

    def _begin_message(self) -> str:
        self._has_message = True
        item = {**_message(self._reply_id, "in_progress"), "content": []}
        part = _text_part("", [])
        return self._event("output_item.added", output_index=0, item=item) + self._text_event(
            "content_part.added", part=part
        )

    def _end_message(self, item: Mapping[str, Any]) -> str:
        begin = "" if self._has_message else self._begin_message()
        (part,) = item["content"]
        return (
            begin
            + self._text_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
            + self._text_event("content_part.done", part=part)
            + self._event("output_item.done", output_index=0, item=item)
        )

    def _call(self, item: Mapping[str, Any], index: int) -> str:
        place = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        return (
            self._event("output_item.added", output_index=index, item=begun)
            + self._event("function_call_arguments.delta", **place, delta=arguments)
            + self._event("function_call_arguments.done", **place, arguments=arguments, name=item["name"])
            + self._event("output_item.done", output_index=index, item=item)
        )

    def _text_event(self, kind: str, **data: Any) -> str:
        place = {"item_id": f"msg_{self._reply_id}", "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **data)

    def _event(self, kind: str, **data: Any) -> str:
        self._num_events += 1
        kind = f"response.{kind}"
        return event({"type": kind, **data, "sequence_number": self._num_events - 1}, kind)


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of a text, or of the items of a conversation."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestRefused(
            f"input must be a text or a list of items, not {shown_json(given)}", param="input"
        )
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        name = f"input[{i}]"
        values = item if isinstance(item, dict) else {}
        kind = values.get("type", "message" if "role" in values else None)
        if kind not in _ITEM_KEYS:
            wanted = ", ".join(_ITEM_KEYS)
            shown = shown_json(kind if values else item)
            raise RequestRefused(f"{name} is of type {shown}; it must be one of {wanted}", param="input")
        known = (*_ITEM_KEYS[kind], "type", "id", "status")
        given = [key for key, value in values.items() if value is not None]
        refuse_unknown_keys(given, known, name, "input")
        if kind == "message":
            messages.append({"role": values.get("role"), "content": _text(values.get("content"), name)})
        elif kind == "function_call_output":
            content = _text(values.get("output"), name)
            messages.append({"role": "tool", "tool_call_id": values.get("call_id"), "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": values.get("name"), "arguments": values.get("arguments")}
            call = {"id": values.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _text(content: Any, name: str) -> Any:
    """Return the text of an item. What is no text is refused with the message's other errors."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise RequestRefused(f"{name} must be text, but it has {shown_json(part)}", param="input")
    return "".join(str(part.get("text", "")) for part in content)


def _tool(tool: Any, i: int) -> Any:
    """Return a function tool in the form of the chat API."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestRefused(
            f"tools[{i}] is {shown_json(tool)}; only tools of type function are supported", param="tools"
        )
    given = [key for key, value in tool.items() if value is not None]
    refuse_unknown_keys(given, _TOOL_KEYS, f"tools[{i}]", "tools")
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _list(options: Mapping[str, Any], name: str) -> list[Any]:
    found: list[Any] = read_value(options, name, list, [])
    return found


def _header(reply_id: str, request: CompletionRequest, status: str) -> dict[str, Any]:
    options = request.options
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": options.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": options.get("metadata", {}),
        "model": request.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": options.get("tool_choice", "auto"),
        "tools": options.get("tools", []),
        "top_p": request.top_p,
        "truncation": "disabled",
    }


def _message(reply_id: str, status: str) -> dict[str, Any]:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "status": status}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _output(reply: Reply, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a response: a message, unless there are only calls, and the calls."""
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    calls = [
        {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            **call["function"],
        }
        for call in reply.tool_calls
    ]
    is_silent = calls and not reply.text
    message = [] if is_silent else [{**_message(reply.reply_id, status), "content": [content]}]
    return [*message, *calls]
