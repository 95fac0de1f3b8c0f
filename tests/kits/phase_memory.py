"""The bytes on the pretend device in each phase of a colocated step, within a limit for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pretend_device
import pytest

from hflow.workers.worker import Worker


@dataclass
class PhaseMemory:
    """The account of a run whose engine shares its device with a trainer.

    A phase lasts until the next one begins. An engine generates from the time that it is awake until it
    sleeps; then the device belongs to the node that ran last, so that what an engine keeps asleep counts
    there.
    """

    memory: pretend_device.Memory
    limits: Mapping[str, int]
    """Phase -> the most bytes in it. A phase without a limit fails."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Phase -> the most bytes that were allocated at once."""
    phase: str = ""

    def begin(self, phase: str) -> None:
        """Begin a phase.

        Raises:
            torch.OutOfMemoryError: if more is allocated than the phase allows.
        """
        self.end()
        self.phase, self.memory.limit, self.memory.most = phase, self.limits[phase], 0
        self.memory.add(0)

    def end(self) -> None:
        """Note the peak of the phase."""
        if self.phase:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.memory.most)


@contextmanager
def phase_memory(limits: Mapping[str, int]) -> Iterator[PhaseMemory]:
    """Hold the workers of this process to the limits of their phases."""
    with pretend_device.memory() as memory, pytest.MonkeyPatch.context() as patch:
        account = PhaseMemory(memory, limits)
        memory.limit = max(limits.values())  # while models are built, and loaded from a checkpoint

        def before(method: str, phase_of: Callable[..., str]) -> None:
            real = getattr(Worker, method)

            def call(worker: Worker, *args: Any) -> Any:
                account.begin(phase_of(*args))
                return real(worker, *args)

            patch.setattr(Worker, method, call)

        def wake(worker: Worker, replica: str, real: Any = Worker.wake) -> None:
            account.begin("generate")
            real(worker, replica)

        before("load_weights", lambda *_: "wake")
        before("run", lambda tasks: next(iter(tasks.values())).node)
        before("save", lambda model, _: f"save.{model}")
        patch.setattr(Worker, "wake", wake)
        yield account
        account.end()
