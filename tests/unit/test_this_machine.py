"""`cluster=here`: a machine's GPUs as `nvidia-smi` names them, or its cores and memory."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import CommandLine

from hflow.base.errors import ConfigError
from hflow.base.machine_gpus import visible_gpus
from hflow.base.machine_memory import machine_memory
from hflow.base.shipped import find_recipe, shipped_directory
from hflow.config import RunConfig, load_config
from hflow.launch.planning.compile import plan
from hflow.launch.planning.request import known_devices
from hflow.launch.planning.this_machine import device_of_product, fewer_workers, with_this_machine
from hflow.planner.plan.hardware import GIB
from hflow.profiling.calibrate import device_at_hand

RECIPE = find_recipe("grpo")
H100 = "NVIDIA H100 80GB HBM3, 570.86, 81559, 4, Default"
L4 = "NVIDIA L4, 570.86, 23034, 4, Default"


def listed(*gpus: str) -> str:
    return "".join(f"{index}, GPU-{index}f31, {gpu}\n" for index, gpu in enumerate(gpus))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program in place of `nvidia-smi` that prints the lines of a file, which has none yet."""
    program, lines = tmp_path / "nvidia-smi", tmp_path / "lines"
    lines.write_text("")
    program.write_text(f"#!/bin/sh\ncat {lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lines


def here(**changes: object) -> RunConfig:
    return with_this_machine(replace(load_config(RECIPE), cluster="here", **changes), RECIPE)


def test_cores_and_memory_without_gpus(machine: Path) -> None:
    cores = min(len(os.sched_getaffinity(0)), 8)
    config = here()
    assert config.cluster == f"cpu-1x{cores}"
    assert config.device_memory_gib is not None
    assert 0.85 * machine_memory() < cores * config.device_memory_gib * GIB <= 0.9 * machine_memory()
    alone = here(workers="inproc")
    assert alone.cluster == "cpu-1x1"
    assert alone.device_memory_gib == pytest.approx(cores * config.device_memory_gib, abs=0.1 * cores)
    assert here(device_memory_gib=3.0).device_memory_gib == 3.0


def test_workers_with_more_of_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clusters(num: int, **changes: object) -> list[tuple[str, tuple[int, ...] | None]]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num)))
        return [(config.cluster, config.cores) for config in fewer_workers(here(**changes))]

    assert clusters(1) == []
    assert clusters(2) == [("cpu-1x1", (2,))]
    assert clusters(6) == [("cpu-1x3", (2,)), ("cpu-1x2", (3,)), ("cpu-1x1", (6,))]
    assert clusters(64)[:2] == [("cpu-1x8", (8,)), ("cpu-1x4", (16,))]
    assert clusters(2, workers="inproc") == [("cpu-1x1", (2,))]
    assert clusters(2, cores=(1,)) == []
    whole, (alone,) = here(), fewer_workers(here())
    assert alone.device_memory_gib == pytest.approx(2 * whole.device_memory_gib)
    machine.write_text(listed(H100))
    assert clusters(2) == []


def test_the_planner_chooses_workers_or_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})

    def workers(*settings: str) -> tuple[str, tuple[int, ...]]:
        made = plan(RECIPE, ["cluster=here", "models.actor.path=null", *settings])
        return made.cluster.name, made.cluster.cores

    figures = yaml.safe_load((shipped_directory("configs") / "hardware/calibrations/cpu.yaml").read_text())
    file = machine.with_name("alone.yaml")
    file.write_text(yaml.safe_dump(figures | {"devices": ["cpu"], "parallel": 0.0}))
    assert workers() == ("cpu-1x2", ())
    assert workers("placement=auto") == ("cpu-1x1", (2,))
    assert workers("placement=auto", f"calibration={file}") == ("cpu-1x2", ())
    assert workers("placement=auto", "cores=[1]") == ("cpu-1x2", (1, 1))


def test_gpus_by_the_names_of_their_products(machine: Path) -> None:
    machine.write_text(listed(*[H100] * 8))
    config = here()
    assert (config.cluster, config.device_memory_gib) == ("h100-1x8", None)
    machine.write_text(listed("NVIDIA A100-SXM4-80GB, 570.86, 40960, 4, Default"))
    config = here()
    assert (config.cluster, config.device_memory_gib) == ("a100-80g-1x1", 40.0)  # such as half of a GPU


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 96GB HBM3", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A800-SXM4-80GB", None),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA L4", "l4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_devices_of_products(monkeypatch: pytest.MonkeyPatch, product: str, device: str | None) -> None:
    assert device_of_product(product, known_devices(RECIPE)) == device
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: product)
    if device is not None:
        assert device_at_hand() == device
        return
    with pytest.raises(ConfigError, match=f"no figures of {product}; describe it"):
        device_at_hand()


def test_the_gpus_that_processes_may_use(machine: Path) -> None:
    machine.write_text(listed(H100, L4, H100))

    def chosen(visible: str, **variables: str) -> list[int]:
        return [gpu.index for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": visible, **variables})]

    assert [gpu.index for gpu in visible_gpus({})] == [0, 1, 2]
    assert chosen("2,1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [2, 1]
    assert chosen("GPU-2f31, GPU-0") == [2, 0]
    assert chosen("") == []
    for wrong in ("3", "GPU-", "MIG-2f31", "0,-1"):
        with pytest.raises(ConfigError, match="does not name GPUs of this machine, by numbers below 3"):
            chosen(wrong)
    with pytest.raises(ConfigError, match=r"counts GPUs that differ, .* set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        chosen("2,1")
    machine.write_text(listed(H100, H100, H100))
    assert chosen("2,1") == [2, 1]


def test_refusals(machine: Path) -> None:
    machine.write_text(listed(H100, L4))
    with pytest.raises(
        ConfigError, match="has NVIDIA H100 80GB HBM3 and NVIDIA L4; choose some of the same kind"
    ):
        here()
    machine.write_text(listed("Tesla V100-SXM2-32GB, 570.86, 32768, 4, Default"))
    with pytest.raises(ConfigError, match=r"no figures of Tesla V100-SXM2-32GB; .* in \S+/v100-32g.yaml"):
        here()


def test_the_named_file_is_found(machine: Path, tmp_path: Path) -> None:
    machine.write_text(listed("NVIDIA H200 NVL, 570.86, 143771, 4, Default"))
    recipe = tmp_path / "mine.py"
    config = replace(load_config(RECIPE), cluster="here")
    with pytest.raises(ConfigError, match=r"describe it in (\S+) beside") as refusal:
        with_this_machine(config, recipe)
    file = tmp_path / str(refusal.value).split(" describe it in ")[1].split()[0]
    file.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "configs" / "hardware" / "devices" / "h200.yaml", file)
    assert with_this_machine(config, recipe).cluster == "h200-nvl-1x1"


def test_a_plan_names_the_machine(machine: Path, hflow: CommandLine) -> None:
    machine.write_text(listed(H100, H100))
    assert "grpo on h100-1x2" in hflow.prints("plan", "grpo", "cluster=here")
