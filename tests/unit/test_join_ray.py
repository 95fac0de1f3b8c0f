"""Connecting to a Ray cluster that runs already, and a Ray that does not start."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hflow.base.errors import RunError, WorkerFailureError
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.preflight import refuse_unrunnable
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.cluster import ClusterSpec

GSM8K = Path(__file__).parents[2] / "recipes/gsm8k/grpo.py"


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


def test_a_cluster_that_this_machine_cannot_hold_is_refused_before_ray_is_started(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine has 65 GPUs, or a Ray that no process runs."""
    from hflow.workers.ray.ray_actors import RayActors, num_gpus

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", frozenset)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda directory: None)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray is started"))
    said: list[str] = []
    for cluster, message in (
        (
            ClusterSpec("h100-1x65", "cuda", 1, 65, 1 << 30),
            f"needs 65 GPUs, but this machine has {num_gpus()};",
        ),
        (
            ClusterSpec("cpu-2x2", "cpu", 2, 2, 1 << 30),
            "needs 2 machines, but no Ray cluster is running here",
        ),
    ):
        with pytest.raises(RunError, match=message) as error:
            RayActors(cluster).start(said.append)
        assert not isinstance(error.value, WorkerFailureError)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_gpus() == 0
    compiled = compile_recipe(GSM8K, ["setup=qwen2.5-0.5b-1x24g"])
    absent = replace(engine_kind("vllm"), packages=("an_absent_package",))
    monkeypatch.setattr("hflow.launch.running.preflight.descriptor", lambda name: absent)
    with pytest.raises(RunError, match="=rtx-4090-1x1 needs 1 GPU, but this machine has 0;"):
        refuse_unrunnable(compiled)  # before the package, which would not help
    assert said == []


@pytest.mark.ray
def test_a_ray_that_does_not_start_leaves_no_daemon(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GCS runs already when the raylet is late, as on a machine that is too busy. The run tries again."""
    from hflow.workers.ray.ray_actors import reserve

    started = []

    def late(*arguments: object, **options: object) -> None:
        started.extend(process for process in psutil.Process().children() if process not in known)
        raise TimeoutError("the raylet is late")

    known = psutil.Process().children()
    monkeypatch.setattr("ray._private.services.start_raylet", late)
    with pytest.raises(WorkerFailureError, match="Ray cannot be started: the raylet is late"):
        reserve(ClusterSpec("cpu-1x1", "cpu", 1, 1, 1 << 30))
    assert started
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


END_WITHOUT = """
import os, signal, sys
from ray._private import worker
from hflow import launch
from hflow.planner.plan.cluster import ClusterSpec
from hflow.workers.ray import ray_actors

role, is_ours = sys.argv[1], sys.argv[2] == "ours"
ray_actors.FREE_SECONDS = 2.0
reservation = ray_actors.reserve(ClusterSpec("cpu-1x1", "cpu", 1, 1, 1 << 30))
(stopped,) = worker._global_node.all_processes[role]
os.kill(stopped.process.pid, signal.SIGSTOP)
if not is_ours:
    reservation = ray_actors.Reservation(reservation.bundles, 1, 0, owns_ray=False)
reservation.free(print)
if not is_ours:
    worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)
launch.exit_without_ray(3)
sys.exit(4)
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("role", "whose", "line", "code"),
    [
        ("gcs_server", "ours", "Ray has not ended for 2 s", 4),
        pytest.param("raylet", "ours", "Ray has not ended for 2 s", 4, marks=pytest.mark.long),
        pytest.param(
            "gcs_server", "joined", "the Ray cluster has not answered for 2 s", 3, marks=pytest.mark.long
        ),
    ],
)
def test_a_run_ends_although_ray_does_not_answer(
    no_ray: None, role: str, whose: str, line: str, code: int
) -> None:
    """Its GCS or raylet is stopped."""
    command = [sys.executable, "-c", END_WITHOUT, role, whose]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.startswith(line), ended.stderr
    assert ended.returncode == code


SIGTERM_WHILE_RAY_CONNECTS = """
import ctypes, os, signal
from ray._private import services
from hflow.workers.ray.ray_actors import _as_a_guest

def is_blocked():
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
services.start_ray_process = is_blocked
with _as_a_guest():
    assert not services.start_ray_process(), "Ray's daemons would not end by it"
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # Ray sets one in C++ that ends the process
    os.kill(os.getpid(), signal.SIGTERM)
    assert not received
assert received == [signal.SIGTERM] and not is_blocked()
"""


def test_sigterm_reaches_a_run_while_ray_connects() -> None:
    subprocess.run([sys.executable, "-c", SIGTERM_WHILE_RAY_CONNECTS], check=True)


@pytest.mark.long
@pytest.mark.ray
def test_workers_are_placed_on_the_machines_of_the_plan(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several raylets with declared GPUs: a head without any, one too small, and two that differ."""
    import ray
    from ray.cluster_utils import Cluster

    from hflow.workers.ray import ray_actors
    from hflow.workers.ray.ray_actors import RayActors, reserve, send

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    try:
        for gpus, cpus in ((1, 4), (2, 4), (3, 2)):
            cluster.add_node(num_gpus=gpus, num_cpus=cpus)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(RunError, match=r"needs 3 machines with 2 GPUs .*\(3 GPUs, 2 CPUs\)"):
            reserve(ClusterSpec("h100-3x2", "cuda", 3, 2, 1 << 30))
        planned = ClusterSpec("h100-2x2", "cuda", 2, 2, 1 << 30)
        with monkeypatch.context() as late:  # a reservation that is never made
            late.setattr(
                ray_actors, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: False)
            )
            late.setattr(ray_actors, "remove_placement_group", lambda _: None)
            late.setattr(ray_actors, "RESERVE_SECONDS", 0.0)
            with pytest.raises(
                RunError, match=r"Ray did not reserve the free devices of cluster=h100-2x2\. Stop"
            ):
                reserve(planned)
        actors = RayActors(planned)
        actors.start()
        try:
            answers = ray.get([send(actor, "place") for actor in actors.actors(4)])
            places = [pickle.loads(answer) for answer in answers]
            node_of = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes()}
            # Both hold two workers and have one address, so that Ray's ids decide which is the first.
            assert [node_of[node] for node, _ in places] in ([3, 3, 2, 2], [2, 2, 3, 3])
            assert all("torch" in dict(found.versions) for _, found in places)
            assert all(found.names == () and found.problem for _, found in places), "no GPU is there"
        finally:
            asyncio.run(actors.close())
    finally:
        ray.shutdown()
        cluster.shutdown()
