"""Iteration on a thread of its own, so that weights are received while others are loaded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetched(items: Iterator[T], size_of: Callable[[T], int], max_size: int) -> Generator[T, None, None]:
    """Yield items that a thread takes from an iterator ahead of their use.

    What the iterator raises is raised here, after the items before it. When the consumer stops early, the
    thread ends after the item that it is taking.

    Args:
        items: iterated on the thread.
        size_of: the size of an item.
        max_size: the thread waits while the items that are ready have at least this size.
    """
    ready: deque[T] = deque()
    changed = threading.Condition()
    is_closed = is_finished = False
    failure: BaseException | None = None

    def take() -> None:
        nonlocal is_finished, failure
        try:
            for item in items:
                with changed:
                    ready.append(item)
                    changed.notify_all()
                    changed.wait_for(lambda: is_closed or sum(map(size_of, ready)) < max_size)
                    if is_closed:
                        return
        except BaseException as error:  # noqa: BLE001 - raised by the consumer
            failure = error
        finally:
            with changed:
                is_finished = True
                changed.notify_all()

    threading.Thread(target=take, name="hflow-weights", daemon=True).start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: ready or is_finished)
                if not ready:
                    break
                item = ready.popleft()
                changed.notify_all()
            yield item
        if failure is not None:
            raise failure
    finally:
        with changed:
            is_closed = True
            changed.notify_all()
