"""Training steps of models of real sizes on one GPU, beside the plan and beside public figures.

python -m benchmarks.speed.training_cells [--only TEXT] [--shape tiny] [--out FILE]

Four cells: Qwen3-0.6B with all of its weights, and Qwen3-4B with adapters of rank 16, each with sequences of
16,384 and of 65,536 tokens. Two more compile the layers of the shorter ones (`compile=true`). A step trains
on two micro-batches of one sequence, and recomputes activations. Weights are random: nothing is fetched. The
torch backend trains each cell in a process of its own, and its first step is not counted. The public figures
are those of another trainer, on one H100 with FlashAttention 3. Its MFU counts other operations than hflow's,
so compare seconds.

`--shape tiny` trains a tiny model, also on a CPU. Every result is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.lib import harness
from hflow import Dataset, Model, Recipe, Text, nodes, use
from hflow.base.errors import ConfigError, HflowError
from hflow.config.schema import GenConfig, LoraConfig, ModelConfig, OptimConfig, RunConfig, WorkloadConfig
from hflow.data.batches.batch import Batch, Column
from hflow.dsl import apply_overrides
from hflow.graph.build import build_graph
from hflow.launch.planning.request import cluster_hardware
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.cost.flops import training_flops, work_of
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest
from hflow.profiling.calibrate import device_at_hand
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import ModelShape
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit
from hflow.types.kernels import LayerKernels

MODELS = Path(__file__).parents[2] / "configs" / "model"
NUM_SEQUENCES = 2
NUM_STEPS = 2
SECONDS = 400.0
"""Longest time of a cell, whose model is built on the CPU."""
ADAPTERS = LoraConfig(r=16, alpha=32)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model, what of it is trained, and the tokens of a sequence."""

    model: str
    tokens: int
    lora: bool
    public: dict[str, float] = dataclasses.field(default_factory=dict)
    """Another trainer's seconds of a step, MFU and peak GiB."""
    compiles: bool = False
    """Whether layers are compiled, which the plan does not count on."""

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        kind = f"{'LoRA' if self.lora else 'full'}{' compiled' if self.compiles else ''}"
        return f"{self.model} {kind} {self.tokens:,}"

    @property
    def config(self) -> ModelConfig:
        """The model's configuration. Positions are as many as the cell's tokens."""
        values = yaml.safe_load((MODELS / f"{self.model}.yaml").read_text())
        return ModelConfig(
            architecture={**values["architecture"], "max_position_embeddings": self.tokens},
            dtype="bf16",
            tokens_per_microbatch=self.tokens,
            activation_checkpointing=True,
            compile=self.compiles,
            lora=ADAPTERS if self.lora else None,
            optim=OptimConfig(lr=1e-5),
            gen=GenConfig(max_model_len=self.tokens),  # the plan's longest sample
        )

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        shape = read_shape(self.config.architecture)
        assert shape is not None
        return shape


CELLS = {
    "real": (
        Cell("qwen3-0.6b", 16384, False, {"seconds": 1.99, "mfu": 0.111, "peak_gib": 12.5}),
        Cell("qwen3-0.6b", 65536, False, {"seconds": 12.18, "mfu": 0.268, "peak_gib": 19.6}),
        Cell("qwen3-4b", 16384, True, {"seconds": 5.26, "mfu": 0.217, "peak_gib": 23.3}),
        Cell("qwen3-4b", 65536, True, {"seconds": 31.49, "mfu": 0.374, "peak_gib": 42.0}),
        Cell("qwen3-0.6b", 16384, False, compiles=True),
        Cell("qwen3-4b", 16384, True, compiles=True),
    ),
    "tiny": (Cell("tiny-qwen2", 64, False), Cell("tiny-qwen2", 64, True)),
}

data, actor = Dataset("train", prompt=Text, answer=Text), Model("actor", trainable=True)
RECIPE = Recipe("cell", data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor)])


def planned(cell: Cell, device: str) -> dict[str, float]:
    """The plan's seconds and peak GiB of the training replica, on one device."""
    config = RunConfig(name="cell", cluster=f"{device}-1x1")
    cluster, hardware = cluster_hardware(config, __file__)
    request = PlanRequest(
        cluster,
        hardware,
        batch=NUM_SEQUENCES,
        num_steps=NUM_STEPS,
        models={"actor": cell.config},
        shapes={"actor": cell.shape},
        workload=WorkloadConfig(1, float(cell.tokens - 1), 0.0),
    )
    forecast = compile_plan(build_graph(apply_overrides(RECIPE.spec(), {})), request).forecast
    seconds = next(row.seconds for row in forecast.times if row.node == "sft_train")
    phase = next(row for row in forecast.memory if row.phase == "sft_train")
    own = [item for item in phase.resident if item.name.startswith("actor@train")]
    peak = sum(item.num_bytes for item in (*own, *phase.transient))
    return {"seconds": seconds, "mfu": mfu(cell, seconds, device), "peak_gib": peak / GIB}


def mfu(cell: Cell, seconds: float, device: str) -> float:
    """The part of a device's bf16 operations that a step needs, recomputation not counted."""
    work = work_of([cell.tokens] * NUM_SEQUENCES, 1, 1)
    flops = training_flops(cell.shape, work, has_adapters=cell.lora)
    hardware = cluster_hardware(RunConfig(name="cell", cluster=f"{device}-1x1"), __file__)[1]
    return flops / (seconds * hardware.device.tflops["bf16"] * 1e12)


def measure(cell: Cell) -> dict[str, Any]:
    """Train the cell's model in this process: seconds of the steps, and their peak GiB on a GPU."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = {"name": "actor", "trainable": True, "device": kind, "kernels": LayerKernels.TORCH}
    settings = ModelSettings(**vars(cell.config) | resolved)
    begin = time.monotonic()
    model = TorchModel(settings, RankPosition())
    built = time.monotonic() - begin
    call = NodeCall(
        "sft_train",
        nodes.sft_train,
        (),
        (("out", "output"),),
        (("loss", "token"),),
        False,
        {},
        {"reduce": "token-mean"},
    )
    shard = TrainShard((batch(cell),))
    seconds = []
    for step in range(1 + NUM_STEPS):
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        metrics = model.train(call, [shard], step)
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
    step_seconds = statistics.median(seconds[1:])
    found = {"seconds": step_seconds}
    with contextlib.suppress(ConfigError):  # hflow may have no figures of this device
        found["mfu"] = mfu(cell, step_seconds, device_at_hand())
    if kind == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return {**found, "all_seconds": seconds, "build_seconds": built, "loss": metrics["loss"]}


def batch(cell: Cell) -> Batch:
    """Random sequences of which all tokens but the first are trained."""
    total = NUM_SEQUENCES * cell.tokens
    ids = np.random.default_rng(0).integers(0, cell.config.architecture["vocab_size"], total)
    columns = {"input_ids": ids, "loss_mask": np.arange(total) % cell.tokens > 0}
    samples = np.arange(NUM_SEQUENCES)
    lengths = np.full(NUM_SEQUENCES, cell.tokens)
    return Batch(samples, samples, lengths, {name: Column(Unit.TOKEN, v) for name, v in columns.items()})


def in_child(shape: str, index: int) -> dict[str, Any]:
    """Measure a cell in a process of its own; return its figures, or the last line of its error."""
    command = [sys.executable, "-m", __spec__.name, "--shape", shape, "--cell", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(kind: str, figures: dict[str, Any]) -> str:
    """A row of figures for people."""
    if "error" in figures:
        return f"    {kind:9s} {figures['error']}"
    peak = f"{figures['peak_gib']:6.1f} GiB" if "peak_gib" in figures else ""
    share = f"{figures['mfu']:7.1%} MFU" if "mfu" in figures else ""
    return f"    {kind:9s} {figures['seconds']:7.2f} s {share} {peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--shape", choices=CELLS, default="real", help="the models' sizes")
    parser.add_argument("--out", type=Path, help="default: a dated file in benchmarks/results")
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shape == "real" and not torch.cuda.is_available():
        parser.error("these cells need a GPU; --shape tiny trains a tiny model on the CPU")
    cells = CELLS[options.shape]
    if options.cell is not None:
        print(json.dumps(measure(cells[options.cell])))
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    what = (
        "a step of two micro-batches of one sequence, with recomputation, by the torch backend in one process"
    )
    rows: list[dict[str, Any]] = []
    for index, cell in enumerate(cells):
        if options.only not in cell.name:
            continue
        try:
            plan: dict[str, Any] = planned(cell, device_at_hand())
        except HflowError as error:
            plan = {"error": str(error)}
        figures = {"plan": plan, "measured": in_child(options.shape, index), "public": cell.public}
        rows.append({"cell": cell.name, "tokens": cell.tokens, **figures})
        print(
            cell.name, *(line(kind, found) for kind, found in figures.items() if found), sep="\n", flush=True
        )
        written = {"what": what, "device": name, "torch": torch.__version__, "cells": rows}
        file = harness.write("training-cells", written, options.out)
    print(file)
    sys.exit(any("error" in row["measured"] for row in rows))


if __name__ == "__main__":
    main()
