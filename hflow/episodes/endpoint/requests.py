"""`CompletionRequest`: what every API's request becomes, and checks by which no option is ignored."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hflow.base.errors import DataError, nearest, shorten
from hflow.base.json_schema import schema_validator
from hflow.base.json_text import find_json_problem
from hflow.data.text.messages import check_prompt, normal_messages, normal_tools
from hflow.types.engine import find_sampling_problem

Message = Mapping[str, Any]
"""`role` and `content`, and what the role needs: `tool_calls` of an assistant, `tool_call_id` of a tool."""

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
"""A client may expect that others have an effect. Those of datasets are for the chat template."""

_MAX_NUMBER = 2**63 - 1
"""The largest number of an option, such as a seed."""
MAX_SHOWN = 80
"""Characters of a wrong value in a message."""


class RequestRefused(Exception):
    """A request is answered with an error instead of a completion.

    The message says in one line what is wrong and what to change; `code` is OpenAI's.
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
class TokenPrompt:
    """A prompt that the client has encoded."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    """One request. None means that the client leaves the choice to the server."""

    model: str
    prompt: str | tuple[Message, ...] | TokenPrompt
    """A text, the messages of a chat, or tokens."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model may call; empty if it may call none."""
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_ids: tuple[int, ...] = ()
    """Tokens that the client expects to end the turn."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    with_logprobs: bool = False
    is_streamed: bool = False
    with_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options as the client set them, for replies that repeat them."""
    session: str | None = None
    """The header `X-Session-ID`. A request continues conversations of its session only."""


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Answer with an error for what no dataset may have either."""
    try:
        yield
    except DataError as error:
        raise RequestRefused(str(error), param=param) from error


def read_options(
    body: Any, known: Sequence[str], labels: Sequence[str], neutral: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the options that are set, after refusing those that cannot be honoured.

    Args:
        body: the JSON of a request.
        known: options that the API's dialect reads.
        labels: options that change no result.
        neutral: option that is not supported -> the values at which it changes nothing. null is always among
            them.

    Raises:
        RequestRefused: for an option that is unknown or not supported.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body of the request must be a JSON object")
    if problem := find_json_problem(body):
        raise RequestRefused(f"the request {problem}")
    options = {name: value for name, value in body.items() if value is not None}
    for name, value in options.items():
        if name in known or name in labels:
            continue
        if name not in neutral:
            name = shorten(name, MAX_SHOWN)
            raise RequestRefused(
                f"the option {name!r} is unknown to this endpoint{nearest(name, known)}", param=name
            )
        if value not in neutral[name]:
            only = " or ".join(map(json.dumps, neutral[name]))
            fix = f"set it to {only}, or leave it out" if only else "leave it out"
            raise RequestRefused(f"{name}={shown_json(value)} is not supported; {fix}", param=name)
    return options


def shown(value: Any) -> str:
    """Return a wrong value for a message."""
    return shorten(repr(value), MAX_SHOWN)


def shown_json(value: Any) -> str:
    """Return a wrong value for a message, as JSON."""
    return shorten(json.dumps(value), MAX_SHOWN)


def read_value(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return an option of a type; the default if it is not set."""
    value = options.get(name, default)
    if value is default:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestRefused(f"{name} is {shown(value)}; it must be of type {kind.__name__}", param=name)
    return value


def read_number(options: Mapping[str, Any], name: str, kind: type[int] | type[float], minimum: float) -> Any:
    """Return a number; None if it is not set."""
    value = options.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= _MAX_NUMBER:
        wanted = "whole number" if kind is int else "number"
        raise RequestRefused(
            f"{name} is {shown(value)}; it must be a {wanted} from {minimum} to {_MAX_NUMBER}", param=name
        )
    return kind(value)


def read_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `temperature`, `top_p`, `top_k` and `min_p`."""
    values = {
        "temperature": read_number(options, "temperature", float, 0.0),
        "top_p": read_number(options, "top_p", float, 0.0),
        "top_k": read_number(options, "top_k", int, 0),
        "min_p": read_number(options, "min_p", float, 0.0),
    }
    set_values = {name: value for name, value in values.items() if value is not None}
    if (found := find_sampling_problem(**set_values)) is not None:
        raise RequestRefused(found[1], param=found[0])
    return values


def read_stops(options: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the texts that end a turn."""
    value = options.get(name)
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRefused(f"{name} must be a text or a list of texts", param=name)
    return tuple(stops)


def read_messages(messages: Any, name: str) -> tuple[Message, ...]:
    """Return messages of OpenAI's chat API in their one form, after checking that the model is next."""
    with refused(name):
        prompt = tuple(normal_messages(messages, name))
        check_prompt(prompt, name)
    for i, message in enumerate(prompt):
        refuse_unknown_keys(message, _MESSAGE_KEYS, f"{name}[{i}]", name)
    return prompt


def refuse_unknown_keys(given: Iterable[str], known: Collection[str], name: str, param: str) -> None:
    """Refuse a part of a request, such as `messages[0]` of an option, with other keys than the known ones."""
    if unknown := [key for key in given if key not in known]:
        key = shorten(unknown[0], MAX_SHOWN)
        raise RequestRefused(f"{name}.{key} is not supported; leave it out", param=param)


def read_tools(tools: Any, choice: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that the model may call, schemas of OpenAI's chat API; none by the choice `none`."""
    with refused("tools"):
        found = normal_tools(tools)
    for i, tool in enumerate(found):
        try:
            schema_validator(tool["function"].get("parameters") or {})
        except ValueError as error:
            raise RequestRefused(
                f"the parameters of tools[{i}] are no JSON schema: {error}", param="tools"
            ) from None
    if choice not in ("auto", "none"):
        raise RequestRefused(
            f"tool_choice={shown_json(choice)} is not supported; set it to auto or none",
            param="tool_choice",
        )
    return found if choice == "auto" else ()
