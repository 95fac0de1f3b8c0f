"""`hflow run` on a real Ray cluster of this machine: two workers, real gloo collectives."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from runs import ROOT, largest_difference, run, steps_of, weights_of

from hflow.base.errors import WorkerFailureError
from hflow.planner.plan.cluster import ClusterSpec
from hflow.workers.ray import ray_actors
from hflow.workers.ray.ray_actors import RayActors

pytestmark = pytest.mark.ray

SFT = ["steps=6", "batch=32", "data.heldout.limit=40", "nodes.eval_gen.every=3"]


@pytest.mark.long
def test_two_ray_workers_compute_what_one_process_does(no_ray: None, tmp_path: Path) -> None:
    """The CPU twin: data parallel over gloo and Ray, against one process and one shard."""
    apart = run("recipes/sft.py", tmp_path / "ray", *SFT)
    alone = run("recipes/sft.py", tmp_path / "one", *SFT, "workers=inproc", "cluster=cpu-1x1")
    for ours, theirs in zip(steps_of(apart), steps_of(alone), strict=True):
        assert ours["sft_train/loss"] == pytest.approx(theirs["sft_train/loss"], abs=1e-5)
    assert largest_difference(weights_of(apart), weights_of(alone)) < 1e-5


@pytest.mark.long
def test_a_ray_that_does_not_start_at_once_is_started_again(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, failures = ray_actors.reserve, iter([WorkerFailureError("Ray cannot be started: it is late")])

    def late(cluster: ClusterSpec) -> ray_actors.Reservation:
        for failure in failures:
            raise failure
        return reserve(cluster)

    monkeypatch.setattr(ray_actors, "reserve", late)
    short = ["steps=1", "batch=8", "data.heldout.limit=4", "cluster=cpu-1x1"]
    assert run("recipes/sft.py", tmp_path, *short).reason == "done"


def test_trainer_and_engine_on_devices_of_their_own(tmp_path: Path, two_processes: RayActors) -> None:
    """Weights go through the object store; the result is that of sharing the devices."""
    apart = ["models.actor.group=train", "models.actor.gen.group=gen"]
    apart += ["models.actor.layout=d1", "models.actor.gen.layout=d1"]
    grpo = ["steps=2", "batch=4", "data.heldout.limit=20", "models.actor.path=null"]
    separate = run("recipes/grpo.py", tmp_path / "apart", *grpo, *apart, processes=two_processes)
    shared = run("recipes/grpo.py", tmp_path / "shared", *grpo, "workers=inproc", "cluster=cpu-1x1")
    assert separate.values == pytest.approx(shared.values, abs=1e-5)
    assert largest_difference(weights_of(separate), weights_of(shared)) < 1e-5
    addresses = listening_addresses()
    assert len(addresses) >= 4  # Ray's daemons and the workers
    assert {address.is_loopback for address in addresses} == {True}


def listening_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return what this process, its workers and its Ray listen on."""
    found = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for connection in process.net_connections("inet"):
            address = ipaddress.ip_address(connection.laddr.ip)
            if connection.status == psutil.CONN_LISTEN:
                found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=pytest.mark.long)])
def test_ctrl_c_ends_a_run_cleanly(engine: str, tmp_path: Path) -> None:
    """Answers are being drawn. The checkpoint is saved, and no process is left."""
    if find_spec(engine) is None and engine == "vllm":
        pytest.skip("needs hflow-rl[vllm]")
    options = ["models.actor.path=null", f"models.actor.gen.engine={engine}", "batch=4", "steps=100000"]
    command = [sys.executable, "-m", "hflow", "run", "recipes/grpo_async.py", f"out={tmp_path}", *options]
    child = subprocess.Popen(
        [*command, "nodes.eval_gen.after=1000000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if "step 1/" in line:
            break
    processes = psutil.Process(child.pid).children(recursive=True)
    in_process = any("engines.process" in word for process in processes for word in process.cmdline())
    assert in_process == (engine == "vllm")
    os.killpg(child.pid, signal.SIGINT)
    rest = child.stdout.read()
    assert child.wait(120) == 75, rest
    (summary,) = tmp_path.glob("grpo_async/2*/summary.json")
    steps = json.loads(summary.read_text())["steps"]
    assert json.loads(summary.read_text())["reason"] == "stopped"
    assert "Traceback" not in rest
    saved = summary.parent / "checkpoints" / "latest"
    assert saved.resolve().name == f"step-{steps}"
    assert (saved / "actor" / "model.safetensors").exists()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
