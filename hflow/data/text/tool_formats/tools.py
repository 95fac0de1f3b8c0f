"""Tools that a model may call, functions or JSON schemas, and their schemas for chat templates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from hflow.base.errors import RecipeError
from hflow.base.json_schema import schema_validator

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or the JSON schema of one in the form of OpenAI's API and of chat templates."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool_name(tool: Tool) -> str:
    """Return the name by which a model calls a tool."""
    return str(tool["function"]["name"]) if isinstance(tool, Mapping) else tool.__name__


def parameter_names(tool: Tool) -> tuple[str, ...]:
    """Return the names of a tool's parameters, in order."""
    if isinstance(tool, Mapping):
        return tuple((tool["function"].get("parameters") or {}).get("properties") or {})
    return tuple(inspect.signature(tool).parameters)


def accepts(tool: Tool, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tool may be called with some arguments: only a `strict` schema refuses any."""
    function = tool["function"] if isinstance(tool, Mapping) else {}
    if not function.get("strict"):
        return True
    return bool(schema_validator(function.get("parameters") or {}).is_valid(arguments))


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool in the form that chat templates expect.

    A function's docstring in Google style also describes the parameters; any other describes only the tool.

    Raises:
        RecipeError: if a parameter has no annotation, or one without a JSON type.
    """
    return dict(tool) if isinstance(tool, Mapping) else dict(_function_schema(tool))


@lru_cache(256)
def _function_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return dict(get_json_schema(tool))
    except DocstringParsingException:
        return _from_signature(tool)
    except TypeHintParsingException as error:
        raise RecipeError(f"tool {tool.__name__!r} cannot be described to a model: {error}") from error


def _from_signature(tool: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(tool)
    parameters = inspect.signature(tool).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": inspect.getdoc(tool) or "",
            "parameters": {
                "type": "object",
                "properties": {name: _property(tool, name, hints) for name in parameters},
                "required": required,
            },
        },
    }


def _property(tool: Callable[..., Any], name: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one parameter."""
    if name not in hints:
        raise RecipeError(f"tool {tool.__name__!r} cannot be described to a model: annotate {name!r}")
    hint = hints[name]
    kind = _TYPES.get(get_origin(hint) or hint)
    if kind is None:
        raise RecipeError(
            f"tool {tool.__name__!r} cannot be described to a model: {name!r} is {hint}; "
            f"annotate it with one of {', '.join(t.__name__ for t in _TYPES)}, or describe it in the "
            "docstring's Args"
        )
    items = [_TYPES[inner] for inner in get_args(hint)[:1] if inner in _TYPES]
    return {"type": kind, "items": {"type": items[0]}} if kind == "array" and items else {"type": kind}
