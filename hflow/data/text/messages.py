"""Conversations in the one form that chat templates get, for datasets, bodies and the endpoint alike.

`normal_messages` and `normal_tools` make this form, or say what is wrong. In it,

- a role is one of `system`, `user`, `assistant` and `tool`: `developer` is the newer name of `system`;
- the content is a text or, of a user or a tool, a list of parts: `{"type": "text", "text": ...}`, and images
  as `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`;
- a tool call is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with an `id` if it has
  one. Arguments that were given as JSON text are an object, as templates write JSON themselves;
- keys that are null or an empty list are left out.

Messages that are in this form already stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hflow.base.errors import DataError, nearest, shorten
from hflow.base.json_text import find_json_problem, parse_json
from hflow.data.images.files import NOWHERE, ImageSource, read_image
from hflow.types import Image, Unit

ROLES = ("system", "developer", "user", "assistant", "tool")

_NAMES_OF_ROLES: Mapping[str, str] = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""What other formats and templates call a role -> its name here."""
_WITHOUT_EFFECT: Mapping[str, str] = {
    "audio": "leave it out, or write its text as the content",
    "function_call": "write it as tool_calls",
    "weight": "every message of the assistant is learned; leave it out, or end the conversation before it",
}
"""Keys that would change what a conversation means, but that no template reads."""
PLACE = "<image>"
"""The place of an image in a text of a dataset."""
_SHOWING = ("user", "tool")
"""Roles of messages that may have images."""
_IMAGE_PARTS = ("image_url", "image", "input_image")
_IMAGE_KEYS = ("image_url", "image", "url", "path", "bytes", "base64")
_MAX_SHOWN = 80
"""Characters of a wrong value in an error."""


def normal_messages(
    messages: Any, name: str = "messages", source: ImageSource = NOWHERE
) -> list[dict[str, Any]]:
    """Return a conversation of at least one message in its one form.

    `source` says where images that are given by name may come from.

    Raises:
        DataError: for what cannot be put into a chat template, or would mean something else there.
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"{name} must be a list with at least one message, but it is {_shown(messages)}")
    if not messages:
        raise DataError(f"{name} must be a list with at least one message, but it is empty")
    return [_normal_message(message, f"{name}[{i}]", source) for i, message in enumerate(messages)]


def check_prompt(messages: Sequence[Mapping[str, Any]], name: str = "messages") -> None:
    """Check that the assistant's turn is next.

    Raises:
        DataError: if the conversation ends with a message of the assistant.
    """
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{name}: the last message is the assistant's, and continuing it is not supported; end with a "
            "message of the user or of a tool"
        )


def check_learned(messages: Sequence[Mapping[str, Any]], name: str = "messages") -> None:
    """Check that there is something to learn.

    Raises:
        DataError: if no message is the assistant's.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(
            f"{name}: no message is the assistant's, so there is nothing to learn; add its answer, or remove "
            "the conversation"
        )


def normal_tools(tools: Any) -> tuple[Any, ...]:
    """Return JSON schemas of functions in the form of OpenAI's API. Python functions stay as they are.

    A schema may be an object that has it as `function`.

    Raises:
        DataError: for anything else.
    """
    if not isinstance(tools, list | tuple):
        raise DataError(f"tools must be a list of functions, but it is {_shown(tools)}")
    return tuple(
        tool if callable(tool) else _normal_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)
    )


def read_as(value: Any, unit: Unit, wanted: Unit) -> Any:
    """Return a value of one sample as its reader wants it: a text that is read as messages is the user's."""
    if unit is Unit.TEXT and wanted is Unit.MESSAGES:
        return [{"role": "user", "content": value}]
    return [value] if unit is Unit.IMAGE and wanted is Unit.IMAGES else value


def _normal_message(message: Any, name: str, source: ImageSource) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{name} must be an object with role and content, but it is {_shown(message)}")
    given = {key: value for key, value in message.items() if value is not None and value != []}
    role = _role(given, name)
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": ""}
    for key, value in given.items():
        if key == "tool_calls":
            if role != "assistant" or not isinstance(value, list | tuple):
                raise DataError(f"{name}.tool_calls is not supported: they are a list of the assistant's")
            found[key] = [_normal_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(value)]
        elif key == "content":
            found[key] = _content(value, name, source)
            if isinstance(found[key], list) and role not in _SHOWING:
                raise DataError(
                    f"{name}: a message with role {role} has an image, but only those of user and tool can"
                )
        elif key in _WITHOUT_EFFECT:
            if (key, value) != ("weight", 1):
                raise DataError(f"{name}.{key} is not supported; {_WITHOUT_EFFECT[key]}")
        elif key != "role":
            found[key] = str(value) if key in ("name", "tool_call_id") else value
    if "content" not in given and "tool_calls" not in given:
        raise DataError(f"{name}.content must be text, and it is missing; write it, if only as an empty text")
    if problem := find_json_problem(found):
        raise DataError(f"{name} {problem}")
    return found


def _role(message: Mapping[str, Any], name: str) -> str:
    if "role" not in message and {"from", "value"} <= message.keys():
        raise DataError(
            f"{name} has the keys from and value of ShareGPT's format; write them as role (user for human, "
            "assistant for gpt) and content"
        )
    role = message.get("role")
    if role in ROLES:
        return str(role)
    known = str(role).strip().lower()
    meant = known if known in ROLES else _NAMES_OF_ROLES.get(known)
    fix = f"; did you mean {meant!r}?" if meant else nearest(str(role), ROLES)
    raise DataError(f"{name}.role must be one of {', '.join(ROLES)}, but it is {_shown(role)}{fix}")


def _content(content: Any, name: str, source: ImageSource) -> str | list[dict[str, Any]]:
    """Return a text, or parts of which at least one is an image."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        given = part if isinstance(part, Mapping) else {}
        kind, text = given.get("type"), given.get("text")
        if isinstance(part, str) or (kind == "text" and isinstance(text, str)):
            parts.append({"type": "text", "text": part if isinstance(part, str) else text})
        elif isinstance(part, Image) or kind in _IMAGE_PARTS:
            parts.append(_image_part(part, name, source))
        else:
            raise DataError(f"{name}.content must be text and images, but it has {_shown(part)}")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _image_part(part: Any, name: str, source: ImageSource) -> dict[str, Any]:
    """Return an image in its one form; `{"type": "image"}` for one that `with_images` puts there."""
    value = part
    if isinstance(part, Mapping):
        values = [part[key] for key in _IMAGE_KEYS if part.get(key) is not None]
        if not values and part["type"] == "image":
            return {"type": "image"}
        if not values:
            raise DataError(f"{name}.content must be text and images, but it has {_shown(part)}")
        value = values[0]
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
    try:
        return image_part(read_image(value, source))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def image_part(image: Image) -> dict[str, Any]:
    """Return an image as a part of a message's content."""
    return {"type": "image_url", "image_url": {"url": image.url}}


def image_urls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the data URLs of the images in messages, in order.

    Raises:
        DataError: for a place of an image without one.
    """
    found = []
    for part in content_parts(messages):
        if part["type"] == "image":
            raise DataError(
                "a message has a place for an image, but no image; give one with images=, or as image_url"
            )
        if part["type"] == "image_url":
            found.append(part["image_url"]["url"])
    return found


def content_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of those messages whose content is a list."""
    for message in messages:
        if isinstance(message["content"], list):
            yield from message["content"]


def text_of(content: Any) -> str:
    """Return the text of a content, with `[image]` for images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content or ())


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return messages with images in their places.

    A place is a part `{"type": "image"}`, or `<image>` in the text of a user, as datasets write it. Without
    any, the images are in front of the text of the user's last message.

    Args:
        images: what `read_image` takes, in the order of the places; None: the messages have all images.

    Raises:
        DataError: if there are more places than images or fewer, or no message of a user.
    """
    if images is None:
        return [dict(message) for message in messages]
    found = [_with_places(message) for message in messages]
    num_places = sum(part["type"] == "image" for part in content_parts(found))
    parts = [image_part(read_image(image)) for image in images]
    if num_places == 0 and parts:
        last = next((m for m in reversed(found) if m["role"] == "user"), None)
        if last is None:
            raise DataError("there is no message of a user that images can be put into; add one")
        text = last["content"]
        last["content"] = parts + (text if isinstance(text, list) else [{"type": "text", "text": text}])
        return found
    if num_places != len(parts):
        raise DataError(
            f"the messages have {num_places} places for images, but there are {len(parts)} images; write "
            f"{PLACE} once for each"
        )
    rest = iter(parts)
    for message in found:
        if isinstance(message["content"], list):
            message["content"] = [next(rest) if p["type"] == "image" else p for p in message["content"]]
    return found


def _with_places(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in which `<image>` of a user's text is a part."""
    content = message["content"]
    if message["role"] != "user" or PLACE not in text_of(content):
        return dict(message)
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] != "text":
            parts.append(part)
            continue
        for i, text in enumerate(part["text"].split(PLACE)):
            parts += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


def _normal_call(call: Any, name: str) -> dict[str, Any]:
    given = call if isinstance(call, Mapping) else {}
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{name} must be a function call with name and arguments, but it is {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise DataError(f"{name}.function.arguments is text, but not JSON: {error}") from error
    elif arguments is None:  # Parquet has no empty objects
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{name}.function.arguments must be a JSON object, or one as text")
    found: dict[str, Any] = {} if given.get("id") is None else {"id": str(given["id"])}
    return {
        **found,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _normal_tool(tool: Any, name: str) -> dict[str, Any]:
    given = tool if isinstance(tool, Mapping) else {}
    function = given.get("function", given)
    is_function = isinstance(function, Mapping) and given.get("type") in (None, "function")
    parameters = function.get("parameters") if is_function else None
    if not (is_function and isinstance(function.get("name"), str) and isinstance(parameters, Mapping | None)):
        raise DataError(
            f"{name} must be a function with a name: "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            f", but it is {_shown(tool)}"
        )
    for key, schema in ((parameters or {}).get("properties") or {}).items():
        if schema is None:
            raise DataError(
                f"{name} describes the parameter {key!r} as null, which libraries write for parameters of "
                "other rows; leave it out"
            )
    if problem := find_json_problem(tool):
        raise DataError(f"{name} {problem}")
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _shown(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN)
