"""`Sandboxes`: runs tools in processes of their own, which are killed when their time is up.

These are not the processes of the pool of bodies. The pool may run a body twice, to find which job of a chunk
is slow, while a tool is called once and never again. And a process that gave up its network cannot run
a body that needs one.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hflow.types.sandbox import Sandbox
from hflow.workers.bodies.pool_child import timeout_message
from hflow.workers.bodies.pool_lanes import stop_processes
from hflow.workers.forkserver import CleanContext
from hflow.workers.generation.sandbox_child import confine, run_tool
from hflow.workers.pickling import pickle_with_bodies

Tool = Callable[..., Any]


class ToolFailed(Exception):
    """A sandboxed tool failed; the message says how, in one line."""


class Sandboxes:
    """Processes for each tool, started when the tool is first called.

    Args:
        num_processes: most calls of one tool that run at the same time.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._pools: dict[Tool, ProcessPool] = {}

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its result. Cancelling the awaiting task kills the process.

        Raises:
            ToolFailed: when it raised, died or took too long.
            RunError: when it cannot be sent to another process.
        """
        pool = self._pool(tool, limits)
        call = pool.schedule(run_tool, args=(arguments,), timeout=limits.timeout)
        try:
            answer = await asyncio.wrap_future(call)
        except TimeoutError:
            raise ToolFailed(timeout_message(limits.timeout)) from None
        except (ProcessExpired, BrokenProcessPool):
            raise ToolFailed("its process died") from None
        has_failed, result = pickle.loads(answer)
        if has_failed:
            raise ToolFailed(result)
        return result

    def close(self) -> None:
        """Kill what runs and end the processes."""
        for pool in self._pools.values():
            stop_processes(pool)
        self._pools.clear()

    def _pool(self, tool: Tool, limits: Sandbox) -> ProcessPool:
        pool = self._pools.get(tool)
        if pool is not None and not pool.active:  # all its processes died while they were idle
            stop_processes(pool)
            pool = None
        if pool is None:
            pool = self._pools[tool] = ProcessPool(
                self._num_processes,
                initializer=confine,
                initargs=(pickle_with_bodies(tool, [tool]), limits.memory_mb),
                context=CleanContext(),
            )
        return pool
