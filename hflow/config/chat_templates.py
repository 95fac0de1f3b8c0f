"""Reads the chat template that `models.NAME.chat_template` sets: a template, or a file that holds one."""

from __future__ import annotations

from pathlib import Path

from hflow.errors import ConfigError, shorten
from hflow.json_text import read_json_object

MAX_TEMPLATE_BYTES = 1 << 20
"""The largest file that is read. Templates have tens of kB."""
_MARKS = ("{{", "{%")
"""What every template has that renders messages, and no path."""


def read_chat_template(value: str, directory: Path, key: str) -> str:
    """Return the text of a chat template.

    Args:
        value: the template, or the path of a file: of Jinja, or of JSON with a key `chat_template`.
        directory: what a path is relative to.
        key: where it is set, for messages.

    Raises:
        ConfigError: for anything else, and a file that cannot be read.
    """
    if any(mark in value for mark in _MARKS):
        return value
    file = directory / value
    fix = f"set {key} to a file with a Jinja template, or to the template itself"

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{key} is {shorten(value, 80)!r}, {problem}; {fix}")

    if not value.strip():
        raise refuse("which is empty")
    try:
        if not file.is_file():
            raise refuse("a directory" if file.is_dir() else "neither a file nor a Jinja template")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise refuse("a file that is too large for a template")
        is_json = file.suffix == ".json"
        text = read_json_object(file).get("chat_template") if is_json else file.read_text("utf-8-sig")
    except OSError as error:
        raise refuse(f"which cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refuse("a file that is not UTF-8") from error
    if not isinstance(text, str) or not any(mark in text for mark in _MARKS):
        raise refuse("a file without a Jinja template")
    return text
