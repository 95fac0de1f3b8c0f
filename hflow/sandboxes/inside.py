"""What runs inside of a sandbox: the call of a tool, and its reply, which is JSON: a kind and a value.

This module needs the standard library only: `remote/` sends its source to machines without hflow.
"""

from __future__ import annotations

import errno
import inspect
import json
from collections.abc import Callable
from typing import Any


def run_call(tool: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """Call a tool, and return the reply."""
    try:
        result = tool(**arguments)
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a tool may raise anything
        shortage = _find_shortage(error)
        return (
            make_reply("failed", format_error(error))
            if shortage is None
            else make_reply("lost", format_error(shortage))
        )
    try:
        return make_reply("result", result)
    except (TypeError, ValueError, RecursionError) as error:
        return make_reply("no JSON", str(error))


def make_reply(kind: str, value: Any) -> bytes:
    """Return a reply with the result, or the reason why there is none.

    Its kind is `result`; `failed`, the tool's own failure; `no JSON`, its result is none; or `lost`, nothing
    is known of the call.
    """
    return json.dumps([kind, value]).encode()


def format_error(error: BaseException) -> str:
    """Return `ValueError: message`, in one line."""
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_shortage(error: BaseException | None) -> OSError | None:
    """Return the error with which another began, if calls share what was short: the disk, or open files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENFILE):
            return error
        error = error.__cause__ or error.__context__
    return None
