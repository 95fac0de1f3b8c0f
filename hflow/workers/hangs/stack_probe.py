"""Samples the device thread of a worker: its message, its line, the collective that it waits in.

The probe answers on a lane of its own while the device's lane is blocked. A process that hosts all ranks does
not need it, as ranks wait for each other only across processes.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.processes.error_location import relative_path

_HFLOW = str(Path(__file__).parents[2]) + "/"
_COLLECTIVE_FILES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "rendezvous.py")
"""Files of torch.distributed whose functions are collectives, or wait for other processes."""
_BINDING = "/torch/_ops.py"
"""What functional collectives call last."""
_TRANSPORTS = ("/gloo/", "NCCL", "TCPStore")
"""Parts of the messages with which torch.distributed reports that its transport failed."""
_LOST_CONNECTION = ("closed by peer", "reset by peer", "refused", "broken pipe", "remote process exited")
"""Parts of the messages of a transport whose other end is gone, as that process has ended."""


@dataclass(frozen=True)
class StackSnapshot:
    """What a worker's device thread was doing at one moment."""

    activity: str = ""
    """What the worker did, as in `running node 'actor_train', step 3`; empty: it was idle."""
    location: str = ""
    """`function (file:line)`: the innermost line of the node's own file, else of hflow."""
    collective: str = ""
    """The collective in which it waits for other workers; empty: it does not wait."""
    collective_counts: Mapping[str, int] = field(default_factory=dict)
    """Process group -> collectives that this worker has issued in it. Where collectives are asynchronous
    (NCCL), a worker with a higher count than another waits for it, wherever its thread is."""


class CollectiveError(RunError):
    """A collective that failed on this worker, most often because another did not join in time."""

    def __init__(self, message: str, snapshot: StackSnapshot) -> None:
        super().__init__(message)
        self.snapshot = snapshot

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.snapshot)


class LostPeerError(CollectiveError, WorkerFailureError):
    """A collective that failed because another worker's process has ended, or has closed its connections."""


LOST_PEER = "the connection to another worker was closed, as its process has ended"


class StackProbe:
    """Follows the device thread of one worker."""

    def __init__(self, collective_counts: Callable[[], Mapping[str, int]]) -> None:
        self._collective_counts = collective_counts
        self._activity = ""
        self._body_file: str | None = None
        self._thread = 0

    @contextmanager
    def running(self, activity: str, body: Callable[..., Any] | None = None) -> Iterator[None]:
        """Follow the calling thread during an activity; errors are located in the file of the node's body.

        Raises:
            CollectiveError: in place of an error that a collective raised.
        """
        self._body_file, self._thread = _file_of(body), threading.get_ident()
        self._activity = activity
        try:
            yield
        except RuntimeError as error:
            cause = _root_cause(error)
            snapshot = self._describe(traceback.extract_tb(cause.__traceback__))
            if snapshot.collective or _is_of_transport(cause):
                snapshot = replace(snapshot, collective=snapshot.collective or "a collective")
                if _is_lost_connection(cause):
                    raise LostPeerError(f"{activity}: {LOST_PEER}", snapshot) from error
                raise CollectiveError(_message(activity, error), snapshot) from error
            raise
        finally:
            self._activity = ""

    def snapshot(self) -> StackSnapshot:
        """Return the device thread's place. Can be called from any thread."""
        frame = sys._current_frames().get(self._thread)
        if not self._activity or frame is None:
            return StackSnapshot(collective_counts=self._collective_counts())
        return self._describe(traceback.extract_stack(frame))

    def _describe(self, stack: Sequence[FrameSummary]) -> StackSnapshot:
        """Return the snapshot of a thread with this stack, the innermost frame last."""
        return StackSnapshot(
            self._activity,
            _location(stack, self._body_file),
            waiting_collective(stack),
            self._collective_counts(),
        )


def waiting_collective(stack: Sequence[FrameSummary]) -> str:
    """Return the name of the collective that the innermost frames are in, or an empty string.

    A thread that waits by a handle, such as that of `dist.isend`, is in no file of torch.distributed: the
    handle's `wait` is written in C++, so it has no frame, and the innermost line calls it. All waits of
    Python's own library have a frame.
    """
    frames = list(stack)
    while frames and frames[-1].filename.endswith(_BINDING):
        frames.pop()
    functions: list[str] = []
    for frame in reversed(frames):
        if not (frame.filename.endswith(_COLLECTIVE_FILES) and "/torch/distributed/" in frame.filename):
            break
        functions.append(frame.name)
    named = [name for name in functions if name != "wrapper"]
    if named:
        return named[-1]
    if not frames or ".wait(" not in (frames[-1].line or ""):
        return ""
    callers = [name for frame in reversed(frames) if (name := frame.name.strip("_")) != "wait"]
    return callers[0] if callers else "wait"


def _is_of_transport(error: BaseException) -> bool:
    """Return whether torch.distributed reports that messages between processes failed."""
    return any(part in str(error) for part in _TRANSPORTS)


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return any(part in text for part in _LOST_CONNECTION)


def _location(stack: Sequence[FrameSummary], body_file: str | None) -> str:
    in_body = [frame for frame in stack if frame.filename == body_file]
    in_hflow = [frame for frame in stack if frame.filename.startswith(_HFLOW)]
    last = (in_body or in_hflow or list(stack))[-1:]
    return f"{last[0].name} ({relative_path(last[0].filename)}:{last[0].lineno})" if last else ""


def _file_of(body: Callable[..., Any] | None) -> str | None:
    code = None if body is None else getattr(inspect.unwrap(body), "__code__", None)
    return None if code is None else code.co_filename


def _message(activity: str, error: Exception) -> str:
    if isinstance(error, HflowError):
        return str(error)
    return f"{activity}: {' '.join(str(error).split()) or type(error).__name__}"


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
