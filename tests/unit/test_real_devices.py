"""Machines that are not what a plan assumes are refused in one line, before models load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.errors import RunError
from hflow.planner.hardware import GIB
from hflow.planner.ir import ClusterSpec
from hflow.workers.ray.machines import Machine, choose_machines
from hflow.workers.real_devices import ProcessDevices, check_devices, cuda_problem, find_devices

H100 = ClusterSpec("h100-2x2", "cuda", 2, 2, 80 * 10**9)
VERSIONS = (("hflow", "0.1"), ("torch", "2.13"))
GOOD = ProcessDevices("node-a", ("0",), "NVIDIA H100 80GB HBM3", int(79.2 * GIB), "", VERSIONS)
L4 = replace(GOOD, kind="NVIDIA L4")


def test_devices_that_are_as_planned_are_accepted() -> None:
    check_devices(H100, [GOOD] * 4, VERSIONS)
    cpus = ClusterSpec("cpu-1x2", "cpu", 1, 2, 1 << 30)
    here = find_devices()
    check_devices(cpus, [here, replace(here, kind="other", memory_bytes=0)], here.versions)


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        (
            [GOOD, replace(GOOD, memory_bytes=40 * GIB)],
            "worker 1 on node-a has NVIDIA H100 .* with 40.0 GiB",
        ),
        ([GOOD, GOOD, L4, L4], "different GPUs .*HBM3: worker 0-1; NVIDIA L4: worker 2-3"),
        (
            [replace(GOOD, problem="driver too old")],
            "worker 0 on node-a cannot use a GPU: driver too old",
        ),
        (
            [GOOD, replace(GOOD, versions=(("hflow", "0.1"), ("torch", "2.11")))],
            "worker 1 on node-a has torch 2.11, but this process has torch 2.13",
        ),
        ([replace(GOOD, versions=VERSIONS[:1])], "worker 0 on node-a has no torch, but this process has"),
    ],
)
def test_what_differs_is_named(devices: list[ProcessDevices], line: str) -> None:
    with pytest.raises(RunError, match=line):
        check_devices(H100, devices, VERSIONS)


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert cuda_problem().endswith("is a build without CUDA")
    assert find_devices().names == ()


HEAD = Machine("h", "10.0.0.1", cpus=64, gpus=0)
A, B, HALF = (
    Machine(n, f"10.0.0.{i}", cpus=12, gpus=g) for n, i, g in (("a", 2, 2), ("b", 3, 2), ("c", 4, 1))
)
LARGE = Machine("l", "10.0.0.5", cpus=10, gpus=8)


@pytest.mark.parametrize(
    ("machines", "nodes", "cpus"),
    [
        ([HEAD, B, A], ("a", "b"), 6),
        ([HEAD, HALF, LARGE], ("l", "l"), 2),
        ([LARGE, A], ("a", "l"), 5),
    ],
)
def test_a_machine_of_the_plan_is_on_one_real_machine(
    machines: list[Machine], nodes: tuple[str, ...], cpus: int
) -> None:
    """The CPUs of a head without GPUs are not counted."""
    chosen = choose_machines(H100, machines)
    assert (chosen.nodes, chosen.cpus_per_worker) == (nodes, cpus)


def test_machines_of_a_plan_on_cpus_are_spread() -> None:
    chosen = choose_machines(replace(H100, device="cpu"), [HEAD, A, LARGE])
    assert (chosen.nodes, chosen.cpus_per_worker) == (("l", "a"), 5)


def test_too_few_machines_are_listed() -> None:
    with pytest.raises(RunError) as error:
        choose_machines(H100, [HEAD, HALF, A])
    assert str(error.value) == (
        "cluster=h100-2x2 needs 2 machines with 2 GPUs and 2 CPUs each, but the Ray cluster has "
        "10.0.0.2 (2 GPUs, 12 CPUs), 10.0.0.4 (1 GPUs, 12 CPUs), 10.0.0.1 (0 GPUs, 64 CPUs)"
    )
