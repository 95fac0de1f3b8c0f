"""Where in the user's source something was written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hflow.graph.ir import SourceLocation


def caller_location() -> SourceLocation:
    """The innermost line of code on the stack that is not part of `hflow.dsl`."""
    frame = _user_frame()
    return SourceLocation(relative_path(frame.f_code.co_filename), frame.f_lineno)


def caller_module() -> str:
    """The name of the module whose code `caller_location` finds."""
    return _module(_user_frame())


def definition_location(body: Callable[..., Any]) -> SourceLocation:
    """Where a function is defined (its first decorator's line)."""
    code = body.__code__
    return SourceLocation(relative_path(code.co_filename), code.co_firstlineno)


def relative_path(path: str) -> str:
    """A path as messages show it: relative where it lies below the working directory."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _user_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).startswith("hflow.dsl"):
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
