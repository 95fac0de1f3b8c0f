"""Where a worker's device thread stands: what it was asked, its line, the collective that it waits in.

A lane of its own answers this while the device's lane is blocked. Only where processes run in step
is there anything to wait for, so a worker that hosts all ranks has no use for it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import hflow
from hflow.errors import HflowError, RunError
from hflow.workers.error_location import shown

_HFLOW = str(Path(hflow.__file__).parent) + "/"
_CALLS = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "rendezvous.py")
"""Files of torch.distributed whose functions are collectives, or wait for other processes."""
_WAITING_LIBRARIES = ("/torch/distributed/", "/megatron/core/")
"""Libraries that wait for a collective by its handle."""


@dataclass(frozen=True)
class StackSnapshot:
    """What a worker's device thread was doing at one moment."""

    doing: str = ""
    """What it was asked, as in `node 'actor_train', step 3`; empty: nothing."""
    place: str = ""
    """`function (file:line)`: the innermost line of the node's own file, or else of hflow."""
    waits: str = ""
    """The collective in which it waits for other workers; empty: it does not wait."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Process group -> collectives that this worker has issued in it. Where they are asynchronous (NCCL)
    a worker that is ahead of another waits for it, wherever its thread stands."""


class StrandedError(RunError):
    """A collective that failed on this worker, most often as another did not join in time."""

    def __init__(self, message: str, standing: StackSnapshot) -> None:
        super().__init__(message)
        self.standing = standing

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.standing)


class StackProbe:
    """Follows the device thread of one worker.

    Args:
        counts: the collectives issued so far, by process group.
    """

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts
        self._doing = ""
        self._file: str | None = None
        self._thread = 0

    @contextmanager
    def at(self, doing: str, body: Callable[..., Any] | None = None) -> Iterator[None]:
        """While the calling thread does this, by this body.

        Raises:
            StrandedError: in the place of an error that a collective raised.
        """
        self._file, self._thread = _file(body), threading.get_ident()
        self._doing = doing
        try:
            yield
        except RuntimeError as error:
            standing = self._described(traceback.extract_tb(_first(error).__traceback__))
            if standing.waits:
                raise StrandedError(_said(doing, error), standing) from error
            raise
        finally:
            self._doing = ""

    def standing(self) -> StackSnapshot:
        """Where the device thread stands now; from any thread."""
        frame = sys._current_frames().get(self._thread)
        if not self._doing or frame is None:
            return StackSnapshot(counts=self._counts())
        return self._described(traceback.extract_stack(frame))

    def _described(self, stack: Sequence[FrameSummary]) -> StackSnapshot:
        """The standing of a thread with this stack, the innermost frame last."""
        return StackSnapshot(self._doing, _place(stack, self._file), awaited(stack), self._counts())


def awaited(stack: Sequence[FrameSummary]) -> str:
    """Name of the collective that the innermost frames are in, or an empty string."""
    calls: list[str] = []
    for frame in reversed(stack):
        if not (frame.filename.endswith(_CALLS) and "/torch/distributed/" in frame.filename):
            break
        calls.append(frame.name)
    named = [name for name in calls if name != "wrapper"]
    if named:
        return named[-1]
    last = stack[-1] if stack else None
    if last is None or not any(library in last.filename for library in _WAITING_LIBRARIES):
        return ""
    return last.name.strip("_") if ".wait(" in (last.line or "") else ""


def _place(stack: Sequence[FrameSummary], file: str | None) -> str:
    own = [frame for frame in stack if frame.filename == file]
    ours = [frame for frame in stack if frame.filename.startswith(_HFLOW)]
    last = (own or ours or list(stack))[-1:]
    return f"{last[0].name} ({shown(last[0].filename)}:{last[0].lineno})" if last else ""


def _file(body: Callable[..., Any] | None) -> str | None:
    code = None if body is None else getattr(inspect.unwrap(body), "__code__", None)
    return None if code is None else code.co_filename


def _said(doing: str, error: Exception) -> str:
    if isinstance(error, HflowError):
        return str(error)
    return f"{doing}: {' '.join(str(error).split()) or type(error).__name__}"


def _first(error: BaseException) -> BaseException:
    """The error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
