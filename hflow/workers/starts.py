"""What an episode starts from, and how its node draws."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hflow.backends.base import SamplingParams
from hflow.workers.base import GroupOrder, NodeProgram
from hflow.workers.journal import Journal
from hflow.workers.opened import Row


@dataclass(frozen=True)
class Start:
    """One sample to generate."""

    program: NodeProgram
    sample: int
    group: int
    inputs: Mapping[str, Any]
    """The body's fields, by parameter."""
    row: Row = field(default_factory=dict)
    """The dataset's row of a root stream's sample."""
    order: GroupOrder | None = None
    """What asked for it; None where it stands beside a sample of another stream."""
    parent: str | None = None
    """That stream."""
    journal: Journal | None = None
    """What the episode did elsewhere before."""


def params_of(program: NodeProgram) -> SamplingParams:
    """How a node draws."""
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    return SamplingParams(**{name: program.options[name] for name in names if name in program.options})


def limit_of(program: NodeProgram) -> AbstractAsyncContextManager[Any]:
    """Bounds how many of a node's episodes run at once."""
    concurrency = program.options.get("concurrency")
    return asyncio.Semaphore(concurrency) if concurrency else nullcontext()
