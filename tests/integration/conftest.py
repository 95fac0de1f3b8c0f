"""Worker processes that the runs of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runs import worker_processes

from hflow.workers.ray.ray_actors import RayActors


@pytest.fixture(scope="module")
def two_processes() -> Iterator[RayActors]:
    with worker_processes(2) as made:
        yield made


@pytest.fixture(scope="module")
def four_processes() -> Iterator[RayActors]:
    with worker_processes(4) as made:
        yield made
