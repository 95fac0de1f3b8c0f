"""Settings of all tests, which tests run where, and worker processes that tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from runs import SharedProcesses

    from hflow.workers.ray.ray_actors import RayActors

settings.register_profile("hflow", deadline=None)  # a busy machine is not a failure
settings.load_profile("hflow")
os.environ.setdefault("RAY_worker_niceness", "0")  # another test must not starve the workers of this one

LONGEST = [
    "test_public_types.py",
    "test_twin.py",
    "test_hangs.py",
    "test_vllm_runs.py",
    "test_run_ray.py",
    "test_ray_workers.py",
    "test_engine_conformance.py",
    "test_faults.py",
    "test_replaced_workers.py",
    "test_bad_input.py",
    "test_resume.py",
    "test_serve.py",
    "test_endpoint.py",
    "test_page_browser.py",
    "test_pretend_device.py",
    "test_recipes_algorithms.py",
    "test_good_recipes.py",
]
"""The files that take longest run first: then the processes of tests end at about the same time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first. Leave tests marked gpu to `make gpu-check`."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    asked = "gpu" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("gpu") and not asked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make gpu-check`"))


def pytest_collection_finish() -> None:
    """Python's garbage collector leaves alone what was imported, instead of looking at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test that was asked for and cannot run is a failure, not a skip."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("this machine has no CUDA device that torch can use", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _without_installed_engines() -> Iterator[None]:
    """Plans for GPUs must not depend on what this machine has: vLLM counts as not installed."""
    problems = {"vllm": "vllm is not installed; pip install 'hflow[vllm]'"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hflow.launch.plan_request.engine_problems", lambda device: problems)
        yield


@pytest.fixture(scope="session")
def shared_processes() -> Iterator[SharedProcesses]:
    from runs import SharedProcesses

    shared = SharedProcesses()
    yield shared
    shared.close()


@pytest.fixture
def two_processes(shared_processes: SharedProcesses) -> RayActors:
    return shared_processes.take(2)


@pytest.fixture
def four_processes(shared_processes: SharedProcesses) -> RayActors:
    return shared_processes.take(4)


@pytest.fixture
def eight_processes(shared_processes: SharedProcesses) -> RayActors:
    return shared_processes.take(8)


@pytest.fixture(scope="module")
def no_ray(shared_processes: SharedProcesses) -> None:
    """Ray does not run in this process, so that a test of the module can start it."""
    shared_processes.close()
