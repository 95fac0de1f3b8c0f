"""Messages of a conversation as values of a sample: what they must be, and a text as one of them."""

from __future__ import annotations

from typing import Any

from hflow.types import Unit


def messages_problem(value: Any) -> str | None:
    """Return what is wrong with a value that should be messages; None: nothing.

    Messages are a list of at least one dict. Each has a `role` and a `content`, which are strings; a message
    with `tool_calls` needs no content.
    """
    if not isinstance(value, list):
        return f"is {value!r:.40}, not a list of messages"
    if not value:
        return "is an empty list, and a conversation has at least one message"
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return f"has {message!r:.40} as message {i}, not an object with role and content"
        for name in ("role", "content"):
            is_optional = name == "content" and bool(message.get("tool_calls"))
            if not isinstance(message.get(name), str) and not (is_optional and message.get(name) is None):
                return f"has the message {message!r:.60}, whose {name} is no string"
    return None


def read_as(value: Any, unit: Unit, wanted: Unit) -> Any:
    """Return a value of one sample as its reader wants it: a text that is read as messages is the user's."""
    if unit is Unit.TEXT and wanted is Unit.MESSAGES:
        return [{"role": "user", "content": value}]
    return value
