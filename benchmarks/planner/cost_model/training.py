"""Published training throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.planner.cost_model.comparison import (
    Comparison,
    compare,
    costs,
    hardware,
    model,
    rows,
    seconds,
    whole_sequences,
)
from hflow.planner.forecast.cost.training import train
from hflow.shapes.layout import Layout

TRITON_ATTENTION = {"h100": 0.158, "a100": 0.283}
"""Fraction of the data sheet that LLM Foundry's own attention kernels reach, fitted to its fitted rows."""

HIDES_EXCHANGE = {("qwen3-235b-a22b", "h100"), ("gpt-oss-120b", "gb200")}
"""Runs whose tokens cross to experts beside another micro-batch: `moe_a2a_overlap=True` in
scripts/performance/configs of Megatron-Bridge v0.4.0."""


def llm_foundry() -> Iterator[Comparison]:
    """Yield FSDP of MPT models."""
    for row in rows("llm_foundry"):
        device, gpus = row["device"], int(row["gpus"])
        one = costs(
            row["model"],
            hardware(device, "ib-ndr" if device == "h100" else "ib-hdr"),
            Layout(gpus),
            "torch",
            tokens_per_microbatch=int(row["microbatch"]) * int(row["sequence"]),
            activation_checkpointing=row["checkpointing"] == "true",
        )
        one = replace(one, host=replace(one.host, attention=TRITON_ATTENTION[device[:4]]))
        if row["precision"] == "amp_fp8":
            one = replace(one, low_dtype="fp8")
        sequences = int(row["microbatch"]) * int(row["accumulation"])
        work = whole_sequences(int(row["sequence"]), sequences)
        measured = work.tokens / float(row["tokens_per_second_per_gpu"])
        name = f"{row['model']} {row['sequence']} {row['gpus']}x{row['device']} {row['precision']}"
        yield compare("LLM Foundry", "training", name, measured, seconds(train(one, work, 1)), row)


def megatron_bridge() -> Iterator[Comparison]:
    """Yield Megatron-core with FP8."""
    yield from _megatron("Megatron-Bridge", "megatron_bridge")


def nemo_framework() -> Iterator[Comparison]:
    """Yield Megatron-core with FP8, an earlier release."""
    yield from _megatron("NeMo Framework", "nemo_framework")


def _megatron(source: str, file: str) -> Iterator[Comparison]:
    for row in rows(file):
        t, p, c, gpus = (int(row[key]) for key in ("tensor", "pipe", "context", "gpus"))
        d = gpus // (t * p * c)
        # Experts are divided over the ranks of tensors, too, where they are more than data ranks.
        e = min(int(row["expert"]), d * c)
        backend = "torch" if int(row["fsdp"]) > 1 else "megatron"
        # A context rank has a part of each sequence; its exchange of keys and values is hidden.
        one = costs(
            row["model"],
            hardware(row["device"]),
            Layout(d * c, t, p, expert=e),
            backend,
            is_overlapping=True,
            tokens_per_microbatch=int(row["microbatch"]) * int(row["sequence"]) // c,
        )
        low_dtype = None if row["precision"] == "bf16" else "fp8"
        # Its recipes for performance set `grad_reduce_in_fp32=False` and `fp8_params` or `fp8_param_gather`
        # (nemo/collections/llm/recipes of NeMo v2.2.0, scripts/performance of Megatron-Bridge v0.2.0).
        one = replace(one, low_dtype=low_dtype, gathers_low=low_dtype is not None, gradient_bytes=2)
        one = replace(one, virtual_stages=int(row["virtual"]))
        sequences = int(row["batch"]) / d
        work = whole_sequences(int(row["sequence"]), sequences).share(1 / c)
        measured = work.tokens / (t * p) / float(row["tokens_per_second_per_gpu"])
        parts = train(one, work, 1)
        if (row["model"], row["device"]) in HIDES_EXCHANGE:
            seen = one.hardware.calibration.overlap_cost
            parts = [part.times(seen if part.name == "tokens to experts" else 1) for part in parts]
        topic = "training" if model(row["model"]).experts is None else "MoE training"
        name = f"{row['model']} {gpus}x{row['device']} {row['precision']} t{t}p{p}c{c}e{row['expert']}"
        yield compare(source, topic, name, measured, seconds(parts), row)
