"""Ranks that do not join a collective, on real workers: the error names the rank, its line, and who waits."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
import torch.distributed as dist
import worker_kit as kit
from runs import run as run_recipe

from hflow.base.errors import RunError
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_processes, make_setup
from hflow.workers.interface import NodeTask, WorkerSetup
from hflow.workers.ray import ray_actors, ray_workers
from hflow.workers.ray.ray_workers import RayWorkers

pytestmark = pytest.mark.ray
RECIPE = Path(__file__).parent / "recipes" / "hanging.py"
TIMEOUT = 8
SECONDS = 150
"""Within which everything ends, far from the hour that a body sleeps."""

AtWork = Callable[[RayWorkers], None]


@pytest.fixture(scope="module", autouse=True)
def _short_waits() -> Iterator[None]:
    """For workers that will not answer: when they are closed, and when they are sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actors, "CLOSE_SECONDS", 2.0)
        patch.setattr(ray_workers, "PROBE_SECONDS", 4.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def cluster(no_ray: None) -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def setup_of() -> WorkerSetup:
    overrides = [key for key in kit.TINY if "actor_gen" not in key]
    timeout = f"collective_timeout={TIMEOUT}"
    return make_setup(compile_recipe(RECIPE, (*overrides, "cluster=cpu-1x2", timeout)))


def tasks(node: str) -> dict[int, NodeTask]:
    return {0: kit.task(node, (0, 1), step=3), 1: kit.task(node, (2, 3), step=3, dp=1)}


async def encoded(workers: RayWorkers) -> None:
    """Give each worker two samples."""
    for worker, groups in ((0, range(2)), (1, range(2, 4))):
        await workers.open_groups(worker, kit.group_tasks("sft_view", groups, size=1))
        await kit.collect(workers, worker, 2)


def failure(node: str, at_work: AtWork | None = None) -> str:
    """Run a node on two new workers and close them, within `SECONDS`; return the message of its error.

    With `at_work`, the node first runs to its end, and then again, while `at_work` is called.
    """
    setup = setup_of()
    workers = RayWorkers(make_processes(setup.plan))

    async def work() -> None:
        async with asyncio.timeout(SECONDS):
            try:
                await workers.start(setup)
                await encoded(workers)
                if at_work is not None:
                    assert [result.node for result in await workers.run(tasks(node))] == [node, node]
                running = asyncio.ensure_future(workers.run(tasks(node)))
                if at_work is not None:
                    await asyncio.to_thread(at_work, workers)
                await running
            finally:
                await workers.close()

    with pytest.raises(RunError) as error:
        asyncio.run(work())
    return str(error.value)


def pid(workers: RayWorkers, worker: int) -> int:
    found: int = ray.get(workers._actors[worker].__ray_call__.remote(lambda _: os.getpid()))
    return found


def place(function: str, text: str, recipe: Path = RECIPE) -> str:
    """`function (file:line)` of the line in the recipe that holds a text."""
    lines = recipe.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {function}("))
    number = next(i for i in range(start, len(lines)) if text in lines[i]) + 1
    return f"{function} ({recipe.relative_to(Path.cwd())}:{number})"


MISSING = "running node '{}', step 4: worker 1 (rank 1 of actor@train) did not join within 8 s"


@pytest.mark.long
def test_a_sleeping_rank_is_named_with_its_line() -> None:
    message = failure("sleeps")
    assert message.startswith(MISSING.format("sleeps"))
    assert f"in {place('sleeps', 'time.sleep')}" in message
    assert "worker 0 waits for it in all_reduce" in message


@pytest.mark.long
def test_a_long_node_keeps_running_and_a_stopped_process_is_named() -> None:
    """Both are silent for longer than the timeout of collectives."""
    stopped: list[int] = []

    def stop(workers: RayWorkers) -> None:
        stopped.append(pid(workers, 1))
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        message = failure("slow", stop)
    finally:
        wait_for_end(stopped[0])
    assert message.startswith(MISSING.format("slow"))
    assert "does not respond" in message
    assert "worker 0 waits for it" in message


def wait_for_end(process: int) -> None:
    """Wait until Ray has killed a process; kill it and fail if Ray does not."""
    for _ in range(100):
        if not Path(f"/proc/{process}").exists() or "Z" in state_of(process):
            return
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    raise AssertionError(f"process {process} outlived its run")


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
def test_ranks_that_wait_for_each_other_are_both_located() -> None:
    reduces, receives = place("together", "all_reduce"), place("disagrees", "recv")
    message = failure("disagrees")
    assert message.startswith("running node 'disagrees', step 4: no progress for 8 s")
    assert f"worker 0 (rank 0 of actor@train) waits in all_reduce at {reduces}" in message
    assert f"worker 1 (rank 1 of actor@train) waits in recv at {receives}" in message


@pytest.mark.long
def test_a_waiter_that_is_ended_does_not_hide_the_missing_rank(tmp_path: Path) -> None:
    """The executor polls the worker that dies, and still reports the rank that it waited for."""
    recipe = RECIPE.with_name("ended_waiter.py")
    overrides = [key for key in kit.TINY if "actor_gen" not in key]
    with pytest.raises(RunError) as error:
        run_recipe(recipe, tmp_path, *overrides, "cluster=cpu-1x2", "collective_timeout=4")
    message = str(error.value)
    assert message.startswith("running node 'patient', step 1: worker 1 (rank 1 of actor@train) did not join")
    assert f"in {place('patient', 'time.sleep', recipe)}" in message
    assert "worker 0 waits for it in barrier" in message


def late_model(settings: Any, position: Any) -> Any:
    """A backend that one rank is late to build."""
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.barrier(position.group)


@pytest.mark.long
def test_a_hang_while_building_is_reported() -> None:
    setup = setup_of()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    setup = dataclasses.replace(setup, factories={**setup.factories, "torch": late_model})

    async def work() -> None:
        workers = RayWorkers(make_processes(setup.plan))
        async with asyncio.timeout(SECONDS):
            try:
                await workers.start(setup)
            finally:
                await workers.close()

    with pytest.raises(RunError) as error:
        asyncio.run(work())
    assert re.search(r"worker 1 did not join within 8 s.* in .* \(.*\).*worker 0 waits", str(error.value))
