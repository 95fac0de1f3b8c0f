"""What a program waits for while it starts, and for how long, so that minutes do not pass in silence."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

FIRST_LINE_SECONDS = 10.0
"""A wait is printed after so many seconds, and again whenever it has become twice as long."""

Awaited = str | Callable[[], str]
"""What is awaited, as in `Ray to start`, or a function that returns it, as it may change meanwhile."""

WaitFor = Callable[[Awaited], AbstractContextManager[None]]
"""Tells the user what is awaited while the context lasts."""


def awaited_text(what: Awaited) -> str:
    """Return the text of what is awaited."""
    return what if isinstance(what, str) else what()


def wait_line(what: Awaited, seconds: float) -> str:
    """Return the line that says what is awaited, and for how long."""
    return f"waiting for {awaited_text(what)}: {seconds:.0f} s"


def wait_silently(what: Awaited) -> AbstractContextManager[None]:
    """Show nothing: the `WaitFor` of callers without a user."""
    return nullcontext()


def print_waits(print_line: Callable[[str], None]) -> WaitFor:
    """Return the `WaitFor` of a program without a panel: a thread prints a line after 10, 20, 40 ... s.

    It may do so on any thread.
    """

    @contextmanager
    def wait_for(what: Awaited) -> Iterator[None]:
        ended = threading.Event()
        arguments = (what, print_line, ended)
        thread = threading.Thread(target=_print_until, args=arguments, name="hflow-waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    return wait_for


def _print_until(what: Awaited, print_line: Callable[[str], None], ended: threading.Event) -> None:
    block_sigterm()
    start, due = time.monotonic(), FIRST_LINE_SECONDS
    while not ended.wait(max(0.0, start + due - time.monotonic())):
        print_line(wait_line(what, due))
        due *= 2


def block_sigterm() -> None:
    """Leave SIGTERM to other threads. While Ray starts, it would end the process on this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
