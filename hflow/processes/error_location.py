"""Errors in one line, with the place in the user's source that they come from."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

from hflow.base.secrets import mask_secrets


def error_with_location(error: BaseException, body: Callable[..., Any]) -> str:
    """Return `ValueError: message (file:line)`, with the innermost line of the body's own file.

    An exception that never passed through that file gets the line where it was raised.
    """
    return f"{error_line(error)}{_location(error, body)}"


def error_line(error: BaseException) -> str:
    """Return `ValueError: message`, in one line, with secrets masked."""
    text = mask_secrets(str(error).strip().replace("\n", " "))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _location(error: BaseException, body: Callable[..., Any]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(body), "__code__", None)
    in_body = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (in_body or frames)[-1:]
    return f" ({relative_path(last[0].filename)}:{last[0].lineno})" if last else ""


def relative_path(path: str) -> str:
    """Return a path for a message: relative if it is below the working directory."""
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # the working directory was deleted
        return path
