"""Reads the chat template that `models.NAME.chat_template` sets: a template, or a file that holds one.

Paths of data and chat templates in YAML files, relative to the file that they are written in.

Hydra does not tell which file a value of the composed configuration comes from. So every path is marked with
its file's directory when the file is read, and the mark is resolved when the configuration is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, shorten
from hflow.base.files import read_json_object
from hflow.base.hub import DATASET_PREFIX
from hflow.base.shipped import CHECKPOINT_PREFIX, SMOLLM2, find_checkpoint

MAX_TEMPLATE_BYTES = 1 << 20
"""The largest file that is read. Templates have tens of kB."""
_MARKS = ("{{", "{%")
"""What every template has that renders messages, and no path."""


def read_chat_template(value: str, directory: Path, key: str) -> str:
    """Return the text of a chat template.

    Args:
        value: the template, or the path of a file: of Jinja, or of JSON with a key `chat_template`.
        directory: what a path is relative to.

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


_MARK = "\0"
"""Encloses the directory in front of a path. No path has this character."""
_KEY = "path"
_TEMPLATE_KEY = "chat_template"


def mark_paths(values: Any, directory: str) -> Any:
    """Return the content of a YAML file in `directory` with that directory in front of every path."""
    if isinstance(values, dict):
        return {
            name: _mark(value, directory) if name in (_KEY, _TEMPLATE_KEY) else mark_paths(value, directory)
            for name, value in values.items()
        }
    return values


def resolve_paths(values: Mapping[str, Any], directory: Path | None = None) -> dict[str, Any]:
    """Return a composed configuration without marks.

    Paths of `data` that a file has written become relative to the working directory, or absolute if they are
    not in it. Names of shipped checkpoints become their directories. Files of chat templates become their
    text, so that workers and resumed runs need no file. All others stay as they are written. The paths of
    files are relative to `directory`; None: each file's own directory.

    Raises:
        ConfigError: for a shipped checkpoint that does not exist, or a chat template that cannot be read.
    """
    return {
        name: _resolve(value, directory, is_data=name == "data", key=name) for name, value in values.items()
    }


def _mark(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_mark(item, directory) for item in value]
    return f"{_MARK}{directory}{_MARK}{value}" if isinstance(value, str) and value != "???" else value


def _resolve(value: Any, directory: Path | None, *, is_data: bool, key: str) -> Any:
    if isinstance(value, dict):
        return {
            name: _resolve(item, directory, is_data=is_data, key=f"{key}.{name}")
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_resolve(item, directory, is_data=is_data, key=key) for item in value]
    if not isinstance(value, str):
        return value
    # An interpolation may have put a marked path behind another mark.
    *directories, path = value.split(_MARK) if value.startswith(_MARK) else [value]
    if key.startswith("models.") and key.endswith(f".{_TEMPLATE_KEY}"):
        return read_chat_template(path, Path(directory or (directories or [""])[-1]), key)
    is_path = key.rpartition(".")[2] == _KEY
    if is_path and not is_data and path.startswith(CHECKPOINT_PREFIX) and path != SMOLLM2:
        return _relative(find_checkpoint(path, key))
    if not directories or not is_data or not is_path or not path or path.startswith(DATASET_PREFIX):
        return path
    return _relative(Path(directory or directories[-1]) / path)


def _relative(path: Path) -> str:
    """Return a path relative to the working directory if it is in it, else absolute. Links are kept."""
    absolute, here = Path(os.path.normpath(path.absolute())), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
