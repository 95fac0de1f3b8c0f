"""The formats of tool calls, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.base.errors import RecipeError
from hflow.data.text.tool_formats.deepseek import DeepSeekV3, DeepSeekV31
from hflow.data.text.tool_formats.hermes import Hermes
from hflow.data.text.tool_formats.interface import ToolFormat
from hflow.data.text.tool_formats.llama import LlamaJson, Pythonic
from hflow.data.text.tool_formats.marked import Marked
from hflow.data.text.tool_formats.mistral import Mistral
from hflow.data.text.tool_formats.tagged import Glm, QwenCoder

FORMATS: Mapping[
    str,
    type[Hermes]
    | type[LlamaJson]
    | type[Pythonic]
    | type[Mistral]
    | type[DeepSeekV3]
    | type[DeepSeekV31]
    | type[Glm]
    | type[QwenCoder],
] = {
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "glm": Glm,
    "qwen3_coder": QwenCoder,
}
"""Name, as in a node's `tool_format` -> format."""
DEFAULT_FORMAT = "hermes"
"""The format of models whose chat template describes none."""
_UNREADABLE = ("<function=", "<|python_start|>")
"""Parts of templates whose calls are in a format that is not here, or in one that the prompt chooses."""


def tool_format(option: str | None, template: str | None) -> ToolFormat:
    """Return the format of a generate node.

    Args:
        option: the node's `tool_format`: a name, two or three characters, or None for the chat template's.
        template: the chat template, which describes tools; None if the tokenizer has none.

    Raises:
        RecipeError: if the option is invalid, the tokenizer cannot describe tools, or the template's format
            is not known.
    """
    if option is not None and _are_marks(option):
        return Marked(*option)
    known = ", ".join(map(repr, FORMATS))
    if option is not None and option not in FORMATS:
        raise RecipeError(
            f"tool_format is {option!r}; set it to {known}, or to two different characters such as '[]'"
        )
    if template is None:
        raise RecipeError(
            "this tokenizer has no chat template to describe tools with; set the generate node's tool_format "
            "to the two characters that enclose a call, such as '[]'"
        )
    return FORMATS[_format_of(template) if option is None else option]()


def _format_of(template: str) -> str:
    """Return the name of the format that a chat template describes; the default if it describes none.

    Raises:
        RecipeError: if it describes several, or another one.
    """
    found = [name for name, kind in FORMATS.items() if kind.is_in(template)]
    if len(found) > 1 or (not found and any(part in template for part in _UNREADABLE)):
        several = f"may be {' or '.join(found)}" if found else "is not known"
        raise RecipeError(
            f"the format of tool calls in the chat template {several}; set the generate node's tool_format "
            f"to one of {', '.join(map(repr, FORMATS))}"
        )
    return found[0] if found else DEFAULT_FORMAT


def _are_marks(option: str) -> bool:
    """Return whether the option is two or three different characters, none of them a letter or digit."""
    return len(option) in (2, 3) and len(set(option)) == len(option) and not any(map(str.isalnum, option))
