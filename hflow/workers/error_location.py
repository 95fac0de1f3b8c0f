"""Says where in the user's source an exception came from, in one line."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any


def blame(error: BaseException, body: Callable[..., Any]) -> str:
    """`ValueError: message (file:line)`: the innermost line of the body's own file.

    An exception that never passed through that file is placed where it was raised.
    """
    return f"{said(error)}{_place(error, body)}"


def said(error: BaseException) -> str:
    """`ValueError: message`, in one line."""
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException, body: Callable[..., Any]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(body), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or frames)[-1:]
    return f" ({shown(last[0].filename)}:{last[0].lineno})" if last else ""


def shown(path: str) -> str:
    """A path as messages show it: relative where it lies below the working directory."""
    return path.removeprefix(os.getcwd() + os.sep)
