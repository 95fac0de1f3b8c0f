"""Connecting to a Ray cluster that runs already."""

from __future__ import annotations

import socket

import pytest

from hflow.errors import RunError, WorkerFailureError
from hflow.planner.ir import ClusterSpec


def test_a_cluster_that_does_not_answer_is_a_mistake_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault would be tried again."""
    from hflow.workers.ray.ray_actors import reserve

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(RunError, match=f"no Ray cluster answers at RAY_ADDRESS={address}") as error:
            reserve(ClusterSpec("cpu-1x1", "cpu", 1, 1, 1 << 30))
    assert not isinstance(error.value, WorkerFailureError)
