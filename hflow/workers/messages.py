"""The messages that a worker process receives: on which lane each runs, and what it does meanwhile.

A typed method of `interface.Workers` sends a message; the method of `Worker` with the same name receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hflow.workers.interface import NodeTask

LANES = {"device": 1, "poll": 1, "data": 2, "export": 1, "probe": 1, "disk": 1}
"""Lane -> number of messages that it runs at once.

`device` runs messages in the order in which the controller sent them. So all ranks issue their collectives in
the same order, and a node finds what was sent before it. `poll` blocks until something happens. `export`
serves other workers and never waits. `probe` answers while the device is busy. `disk` waits for what is
written in the background. Everything else is short and uses `data`.
"""


@dataclass(frozen=True)
class Message:
    """How a worker process runs one kind of message."""

    lane: str
    """A key of `LANES`."""
    activity: Callable[..., str] | None = None
    """Says what the device does, as in `saving model 'actor'`, from the message's arguments. For errors."""
    num_returns: int = 1
    """Values that it returns, each with an object reference of its own."""
    is_quick: bool = False
    """Whether it only queues work, so that it may run on an event loop."""
    has_references: bool = False
    """Whether its arguments or its answer hold references to Ray's objects or actors, which Ray must find in
    them. All others are sent as bytes: Ray takes a tenth of a millisecond to look through objects."""
    is_repeated: bool = True
    """Whether it is sent again to the process that takes the place of a worker which died meanwhile. The
    executor asks for everything else again by itself."""


def _run_activity(tasks: Mapping[int, NodeTask]) -> str:
    return next(iter(tasks.values())).activity


MESSAGES: Mapping[str, Message] = {
    "place": Message("device", lambda *_: "starting"),
    "rendezvous": Message("device", lambda *_: "opening a rendezvous"),
    "build": Message("device", lambda *_: "building its models", has_references=True),
    "probe": Message("probe"),
    "set_peer": Message("data", has_references=True),
    "open_groups": Message("data", is_quick=True, has_references=True, is_repeated=False),
    "detach_groups": Message("data", has_references=True),
    "compute": Message("data", is_quick=True, is_repeated=False),
    "poll": Message("poll"),
    "body_lines": Message("data"),
    "export": Message("export", has_references=True),
    "pull": Message("device", lambda *_: "pulling samples"),
    "run": Message("device", _run_activity),
    "publish": Message(
        "device",
        lambda replica, version, *_: f"publishing weights {version} for {replica}",
        num_returns=2,
        has_references=True,
    ),
    "load_weights": Message(
        "device",
        lambda replica, version, *_: f"loading weights {version} into {replica}",
        has_references=True,
    ),
    "wake": Message("device", lambda replica: f"waking {replica}"),
    "free_weights": Message("data"),
    "sleep": Message("device", lambda replica, _: f"interrupting {replica}"),
    "release": Message("data", is_quick=True),
    "summarize": Message("data"),
    "sample_texts": Message("data"),
    "sample_values": Message("data"),
    "save": Message("device", lambda model, _: f"saving model {model!r}"),
    "finish_save": Message("disk"),
    "save_samples": Message("data"),
    "finish_samples": Message("disk"),
    "restore_samples": Message("data"),
    "restore_log": Message("data"),
    "close": Message("data"),
}
"""Method of the worker process -> how it runs."""


def activity_of(method: str, *arguments: Any) -> str:
    """Return the activity of a device while it runs a message with these arguments."""
    activity = MESSAGES[method].activity
    assert activity is not None, f"{method} does not run on the device"
    return activity(*arguments)
