"""Measurements beside predictions, and what every source needs: rows of a table, models, and replicas."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

from hflow.base.shipped import shipped_directory
from hflow.config.schema import ModelConfig
from hflow.launch.planning.request import device_calibration, known_devices, known_links
from hflow.planner.forecast.cost.collectives import RankPlacement
from hflow.planner.forecast.cost.flops import Work, work_of
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.roofline import Part
from hflow.planner.plan.calibration import HostTimes, TrainerTimes
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.traits import traits
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape

HERE = Path(__file__).parent
Row = Mapping[str, str]

MPT = {  # layers, hidden, heads: scripts/train/yamls/pretrain of LLM Foundry; its counts of parameters agree
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
OPT = {  # layers, hidden, heads: metaseq/launcher/opt_job_constants.py
    "opt-350m": (24, 1024, 16),
    "opt-1.3b": (24, 2048, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
    "opt-175b": (96, 12288, 96),
}
NAMES = {"llama-3.3-70b": "llama-3.1-70b", "llama-3-70b": "llama-3.1-70b", "llama-3-8b": "llama-3.1-8b"}
OTHERS = {
    "llama-3.1-405b": ModelShape("llama", 126, 16384, 53248, 128, 8, 128, 128256, is_tied=False),
    "gpt3-175b": ModelShape("llama", 96, 12288, 8 * 12288 // 3, 96, 96, 128, 51200, is_tied=True),
}
MACHINE = {"gb200": 64}
"""Devices that NVLink connects, where they are not 8: Megatron's runs use 64 of a rack's 72."""
FAMILIES = {
    "A100": ("a100-40g", "a100-80g"),
    "H100": ("h100", "h100-pcie", "h800"),
    "H20": ("h20",),
    "H200": ("h200",),
    "Blackwell": ("b200", "gb200", "b300"),
}
"""Families of devices -> their names in hflow."""


@dataclass(frozen=True)
class PeerFigures:
    """Figures of the measured programs that hflow's calibrations have not, each fitted to fitted rows.

    Without values, the planner is as it ships.
    """

    step_us: float | None = None
    """Microseconds that the host takes for a decode step of engines in trainers of 2025: vLLM before it
    scheduled ahead, and processes around it. It is not that of vLLM alone, which hflow ships."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Device -> fraction of the data sheet that LLM Foundry's own attention kernels reach."""
    handover_gb_per_s: float | None = None
    """Rate at which verl hands weights to SGLang, which runs in another process: 15.2 GB in 1.2 s ("full
    apply" in a comment of 2026-07-10 on github.com/verl-project/verl/pull/6974). A whole copy of the weights
    goes to each engine rank, bucket by bucket over HTTP and CUDA IPC, after it was received."""
    layer_us: float | None = None
    """Microseconds of DeepSpeed-Chat's host for one layer of a decode step, in which kernels are launched one
    by one."""
    passes: float | None = None
    """Seconds of DeepSpeed-Chat's other passes over those of their kernels. A program without such a factor
    is a trainer as hflow knows them (`Calibration.trainer`)."""
    unfused: float | None = None
    """Seconds of OpenRLHF's training passes over those of their kernels: it runs transformers without fused
    kernels, and steps AdamW on the host."""


AS_SHIPPED = PeerFigures()
OF_PEERS = PeerFigures(
    step_us=6000,
    attention={"h100": 0.158, "a100-40g": 0.283, "a100-80g": 0.283},
    handover_gb_per_s=12.7,
    layer_us=1935,
    passes=2.21,
    unfused=1.39,
)


@dataclass(frozen=True)
class Comparison:
    """One measurement beside what the cost model says."""

    source: str
    topic: str
    name: str
    device: str
    measured: float
    predicted: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Return the relative error."""
        return abs(self.predicted / self.measured - 1)

    @property
    def family(self) -> str:
        """The family of its device."""
        return next(name for name, devices in FAMILIES.items() if self.device in devices)


Source = Callable[[PeerFigures], Iterator[Comparison]]
"""Yields the comparisons of a source, as the planner ships or with the figures of the measured programs."""


def compare(
    source: str, topic: str, name: str, device: str, measured: float, predicted: float, row: Row
) -> Comparison:
    """Return the comparison of a row."""
    return Comparison(source, topic, name, device, measured, predicted, is_held_out(row))


def is_held_out(row: Row) -> bool:
    """Return whether nothing may be fitted to a row: as its file says, or two of three by their text.

    A run of several releases is one text, as the releases say nearly the same: what was measured, and the
    release, are not part of it.
    """
    if "split" in row:
        return row["split"] == "held out"
    text = ",".join(value for name, value in row.items() if name not in MEASURED)
    return hashlib.sha256(text.encode()).digest()[0] >= 256 // 3


MEASURED = ("release", "seconds", "peak_gib", "tokens_per_second_per_gpu")
"""Columns that are not part of the text by which a row is held out."""


def rows(name: str) -> Iterator[Row]:
    """Yield the rows of a source, without its comments."""
    lines = (HERE / "data" / f"{name}.csv").read_text().splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


@cache
def hardware(device: str, network: str | None = None) -> Hardware:
    """Return the figures of a device with its shipped calibration."""
    links, known = known_links(__file__), known_devices(__file__)[device]
    inter = links[network or known.network]
    calibration = device_calibration(known, __file__)
    return Hardware(known, links[known.link], inter, links[known.host_link], calibration)


@cache
def model(name: str) -> ModelShape:
    """Return the sizes of a model. An MLP of two matrices does the same work as a narrower one of three."""
    if name in MPT or name in OPT:
        layers, hidden, heads = MPT[name] if name in MPT else OPT[name]
        size = hidden // heads
        return ModelShape("llama", layers, hidden, 8 * hidden // 3, heads, heads, size, 50368, is_tied=True)
    if name in OTHERS:
        return OTHERS[name]
    file = shipped_directory("configs") / "model" / f"{NAMES.get(name, name)}.yaml"
    shape = read_shape(yaml.safe_load(file.read_text())["architecture"])
    assert shape is not None
    return shape


def costs(
    name: str,
    hardware: Hardware,
    layout: Layout,
    backend: str,
    is_overlapping: bool = False,
    attention: str = "",
    is_trainer: bool = False,
    has_exchange_kernels: bool = True,
    host: HostTimes | None = None,
    **settings: object,
) -> ReplicaCosts:
    """Return a replica on neighbouring devices; tensor ranks are innermost, then context, data, stages.

    What a run was set to is that of the run: its layout, what overlaps, how its engine schedules.
    """
    t, d, p, c, e = layout.tensor, layout.data, layout.pipe, layout.context, layout.expert
    kind = replace(
        traits(backend),
        overlaps_optimizer=is_overlapping,
        overlaps_tensor=is_overlapping,
        # Published runs dispatch with DeepEP's kernels or their like, and tensor ranks have experts of their
        # own (`expert_tensor_parallel_size=1`), so that the ranks of experts are neighbours.
        sends_expert_copies=False,
        has_exchange_kernels=has_exchange_kernels,
        schedules_ahead_on=(),  # their engines scheduled and decoded in turns
        # Those through the modules of transformers launched each kernel.
        captured_families=() if backend == "embedded" else traits(backend).captured_families,
    )
    config = ModelConfig(dtype="bf16", **settings)  # type: ignore[arg-type]
    per_machine = MACHINE.get(hardware.device.name, 8)
    return ReplicaCosts(
        model(name),
        config,
        layout,
        kind,
        host or hardware.calibration.host[backend],
        hardware,
        data=spread(d * c, t, per_machine),
        tensor=spread(t, 1, per_machine),
        pipe=spread(p, t * d * c, per_machine),
        context=spread(c, t, per_machine),
        expert=spread(e, 1, per_machine),
        expert_data=spread(d * c // e, t * e, per_machine),
        attention_kernel=attention,
        trainer=hardware.calibration.trainer if is_trainer else TrainerTimes(),
    )


def engine_host(device: str, figures: PeerFigures, logprobs_us: float = 0.0) -> HostTimes:
    """Return the host of a trainer's engine, which takes more for each sequence if it returns log-probs."""
    host = hardware(device).calibration.host["vllm"]
    step_us = host.step_us if figures.step_us is None else figures.step_us
    return replace(host, step_us=step_us, sequence_us=host.sequence_us + logprobs_us)


def spread(num: int, stride: int, per_machine: int = 8) -> RankPlacement:
    """Return the placement of ranks that are `stride` devices apart."""
    within = max(1, min(num, per_machine // stride))
    return RankPlacement(within, num // within)


def seconds(parts: list[Part]) -> float:
    """Return the sum of the parts."""
    return sum(part.seconds for part in parts)


def whole_sequences(length: int, num: float) -> Work:
    """Return the work of sequences whose tokens are all learned from."""
    return work_of([length], 0, 1).share(num)
