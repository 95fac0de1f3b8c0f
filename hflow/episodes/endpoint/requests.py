"""`CompletionRequest`: a request in OpenAI's API, checked so that no option is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import DataError, nearest, shorten
from hflow.base.json_text import find_json_problem
from hflow.data.text.messages import check_prompt, normal_messages, normal_tools
from hflow.types.engine import find_sampling_problem

Message = Mapping[str, Any]
"""`role` and `content`, and what the role needs: `tool_calls` of an assistant, `tool_call_id` of a tool."""

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
"""A client may expect that others have an effect. Those of datasets are for the chat template."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Option that is not supported -> the values at which it changes nothing. null is always among them."""
_LABELS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
"""Options that change no result."""
_COMMON = ("model", "max_tokens", "seed", "stop", "stream", "stream_options", "temperature", "top_k", "top_p")
_CHAT = (*_COMMON, "logprobs", "max_completion_tokens", "messages", "tool_choice", "tools")
_TEXT = (*_COMMON, "logprobs", "prompt")
_MAX_NUMBER = 2**63 - 1
"""The largest number of an option, such as a seed."""
_MAX_SHOWN = 80
"""Characters of a wrong value in a message."""


class RequestRefused(Exception):
    """A request is answered with an error instead of a completion.

    Args:
        message: what is wrong and what to change, in one line.
        status: the HTTP status.
        param: the option that is at fault.
        code: OpenAI's code of the error.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True)
class CompletionRequest:
    """One request. None means that the client leaves the choice to the server."""

    model: str
    prompt: str | tuple[Message, ...]
    """A text, or the messages of a chat."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model may call; empty if it may call none."""
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    with_logprobs: bool = False
    is_streamed: bool = False
    with_usage: bool = False
    """Whether a stream ends with the number of tokens."""


def parse_chat(body: Any) -> CompletionRequest:
    """Read the body of a request for a chat completion.

    Raises:
        RequestRefused: for an option that is unknown, not supported or wrong.
    """
    options = _options(body, _CHAT)
    messages = options.get("messages", [])
    with _refused("messages"):
        prompt = tuple(normal_messages(messages))
        check_prompt(prompt)
    for i, message in enumerate(prompt):
        if unknown := [key for key in message if key not in _MESSAGE_KEYS]:
            shown = shorten(unknown[0], _MAX_SHOWN)
            raise RequestRefused(f"messages[{i}].{shown} is not supported; leave it out", param="messages")
    if None not in (options.get("max_tokens"), options.get("max_completion_tokens")):
        raise RequestRefused("max_tokens and max_completion_tokens exclude each other", param="max_tokens")
    return CompletionRequest(
        prompt=prompt,
        tools=_tools(options),
        with_logprobs=_value(options, "logprobs", bool, False),
        **_common(options, "max_completion_tokens" if "max_tokens" not in options else "max_tokens"),
    )


def parse_text(body: Any) -> CompletionRequest:
    """Read the body of a request for the completion of a text.

    Raises:
        RequestRefused: for the reasons of `parse_chat`.
    """
    options = _options(body, _TEXT)
    prompt = options.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise RequestRefused("prompt must be one text; send one request per prompt", param="prompt")
    num_logprobs = _value(options, "logprobs", int, None)
    if num_logprobs:
        raise RequestRefused(
            f"logprobs={num_logprobs} asks for alternatives to the sampled tokens, which are not recorded; "
            "set logprobs=0 for the sampled tokens only",
            param="logprobs",
        )
    with_logprobs = num_logprobs is not None
    return CompletionRequest(prompt=prompt, with_logprobs=with_logprobs, **_common(options, "max_tokens"))


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Answer with an error for what no dataset may have either."""
    try:
        yield
    except DataError as error:
        raise RequestRefused(str(error), param=param) from error


def _options(body: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that are set, after refusing those that cannot be honoured."""
    if not isinstance(body, dict):
        raise RequestRefused("the body of the request must be a JSON object")
    if problem := find_json_problem(body):
        raise RequestRefused(f"the request {problem}")
    options = {name: value for name, value in body.items() if value is not None}
    for name, value in options.items():
        if name in known or name in _LABELS:
            continue
        if name not in _NEUTRAL:
            name = shorten(name, _MAX_SHOWN)
            raise RequestRefused(
                f"the option {name!r} is unknown to this endpoint{nearest(name, known)}", param=name
            )
        if value not in _NEUTRAL[name]:
            only = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
            fix = f"set it to {only}, or leave it out" if only else "leave it out"
            raise RequestRefused(f"{name}={_shown_json(value)} is not supported; {fix}", param=name)
    return options


def _common(options: Mapping[str, Any], max_tokens: str) -> dict[str, Any]:
    """Return the fields of a request that chats and texts have in common."""
    stream_options = _value(options, "stream_options", dict, {})
    if unknown := sorted(stream_options.keys() - {"include_usage", "include_obfuscation"}):
        option = shorten(unknown[0], _MAX_SHOWN)
        raise RequestRefused(f"stream_options.{option} is not supported", param="stream_options")
    return {
        "model": _value(options, "model", str, ""),
        "max_tokens": _number(options, max_tokens, int, 1),
        "stop": _stop(options),
        **_sampling(options),
        "seed": _number(options, "seed", int, 0),
        "is_streamed": _value(options, "stream", bool, False),
        "with_usage": bool(stream_options.get("include_usage")),
    }


def _shown(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN)


def _shown_json(value: Any) -> str:
    return shorten(json.dumps(value), _MAX_SHOWN)


def _value(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = options.get(name, default)
    if value is default:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestRefused(f"{name} is {_shown(value)}; it must be of type {kind.__name__}", param=name)
    return value


def _number(options: Mapping[str, Any], name: str, kind: type[int] | type[float], minimum: float) -> Any:
    value = options.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= _MAX_NUMBER:
        wanted = "whole number" if kind is int else "number"
        raise RequestRefused(
            f"{name} is {_shown(value)}; it must be a {wanted} from {minimum} to {_MAX_NUMBER}", param=name
        )
    return kind(value)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        "temperature": _number(options, "temperature", float, 0.0),
        "top_p": _number(options, "top_p", float, 0.0),
        "top_k": _number(options, "top_k", int, 0),
    }
    set_values = {name: value for name, value in values.items() if value is not None}
    if (found := find_sampling_problem(**set_values)) is not None:
        raise RequestRefused(found[1], param=found[0])
    return values


def _stop(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    value = options.get("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRefused("stop must be a text or a list of texts", param="stop")
    return tuple(stops)


def _tools(options: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that the model may call: none with `tool_choice="none"`."""
    with _refused("tools"):
        tools = normal_tools(options.get("tools", []))
    for i, tool in enumerate(tools):
        if tool["function"].get("strict"):
            raise RequestRefused(
                f"tools[{i}].function.strict is not supported, as output is not constrained; leave it out",
                param="tools",
            )
    choice = options.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestRefused(
            f"tool_choice={_shown_json(choice)} is not supported; set it to auto or none",
            param="tool_choice",
        )
    return tools if choice == "auto" else ()
