"""Published training throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.planner.cost_model.comparison import (
    Comparison,
    PeerFigures,
    Row,
    compare,
    costs,
    hardware,
    model,
    rows,
    seconds,
    whole_sequences,
)
from hflow.config.schema import ALL_LINEAR, LoraConfig
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.training import train
from hflow.planner.forecast.memory.parts import MicroBatch, largest
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.rows import Replica
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training.fsdp.memory import ShardedStep, model_state

HIDES_EXCHANGE = {("qwen3-235b-a22b", "h100"), ("gpt-oss-120b", "gb200")}
"""Runs whose tokens cross to experts beside another micro-batch: `moe_a2a_overlap=True` in
scripts/performance/configs of Megatron-Bridge v0.4.0."""


def llm_foundry(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield FSDP of MPT models."""
    for row in rows("llm_foundry"):
        device, gpus = row["device"], int(row["gpus"])
        one = costs(
            row["model"],
            hardware(device, "ib-ndr" if device == "h100" else "ib-hdr"),
            Layout(gpus),
            "torch",
            attention="flash-attn",  # its kernels are none of hflow's; they were made of FlashAttention
            tokens_per_microbatch=int(row["microbatch"]) * int(row["sequence"]),
            activation_checkpointing=row["checkpointing"] == "true",
        )
        one = replace(one, host=replace(one.host, attention=figures.attention.get(device)))
        if row["precision"] == "amp_fp8":
            one = replace(one, low_dtype="fp8")
        sequences = int(row["microbatch"]) * int(row["accumulation"])
        work = whole_sequences(int(row["sequence"]), sequences)
        measured = work.tokens / float(row["tokens_per_second_per_gpu"])
        name = f"{row['model']} {row['sequence']} {row['gpus']}x{row['device']} {row['precision']}"
        yield compare("LLM Foundry", "training", name, device, measured, seconds(train(one, work, 1)), row)


def megatron_bridge(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield Megatron-core with FP8."""
    yield from _megatron("Megatron-Bridge", "megatron_bridge")
    yield from _megatron("Megatron-Bridge", "megatron_bridge_later")


def nemo_framework(figures: PeerFigures) -> Iterator[Comparison]:
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
            lora=LoraConfig(r=16) if row.get("phase") == "lora" else None,
        )
        low_dtype = None if row["precision"] == "bf16" else "fp8"
        # Its recipes for performance set `grad_reduce_in_fp32=False` and `fp8_params` or `fp8_param_gather`
        # (nemo/collections/llm/recipes of NeMo v2.2.0, scripts/performance of Megatron-Bridge v0.2.0).
        one = replace(one, low_dtype=low_dtype, gathers_low=low_dtype is not None, gradient_bytes=2)
        # From 26.06 on, its recipes for Blackwell in MXFP8 have whole iterations in CUDA graphs
        # (`_enable_hybridep_full_iteration_mxfp8` and its like in perf_recipes).
        is_captured = row["release"] >= "26.06" and row["device"] != "h100" if "release" in row else False
        one = replace(one, virtual_stages=int(row["virtual"]), counts_tokens=not is_captured)
        one = replace(one, is_uneven=False)
        sequences = int(row["batch"]) / d
        work = whole_sequences(int(row["sequence"]), sequences).share(1 / c)
        measured = work.tokens / (t * p) / float(row["tokens_per_second_per_gpu"])
        parts = train(one, work, 1)
        if (row["model"], row["device"]) in HIDES_EXCHANGE:
            seen = one.hardware.calibration.overlap_cost
            parts = [part.times(seen if part.name == "tokens to experts" else 1) for part in parts]
        topic = "training" if model(row["model"]).experts is None else "MoE training"
        name = f"{row['model']} {gpus}x{row['device']} {row['precision']} t{t}p{p}c{c}e{row['expert']}"
        name += f" {row.get('release', '')} {row.get('phase', '')}".rstrip()
        yield compare(source, topic, name, row["device"], measured, seconds(parts), row)


def prime_rl(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield FSDP2 of Qwen3 and GLM 4.5 Air, with seconds and peak memory."""
    for row in rows("prime_rl"):
        sequence, device = int(row["sequence"]), row["device"]
        one = costs(
            row["model"],
            hardware(device),
            Layout(int(row["gpus"])),
            "torch",
            attention=row["attention"],
            is_trainer=True,
            tokens_per_microbatch=sequence,
            activation_checkpointing=True,
            offload_activations=row["offload"] == "true",
            lora=_adapters(row),
        )
        mark = "" if one.shape.experts is None else "MoE "
        name = f"{row['model']} {row['gpus']}x{device} {row['phase']} {row['lora'] and 'lora '}{sequence} "
        name += row["attention"] + (" offload" if row["offload"] == "true" else "")
        # It leaves torch's grouped product to Hopper (github.com/PrimeIntellect-ai/prime-rl/issues/1535).
        one = replace(one, has_grouped_product=device != "b200")
        spent = seconds(train(one, whole_sequences(sequence, 2), 1))
        yield compare("prime-rl", f"{mark}training", name, device, float(row["seconds"]), spent, row)
        if row["phase"] == "rl":  # the others have all logits at once, which hflow's losses never do
            peak = _peak_gib(one, sequence)
            yield compare("prime-rl", f"{mark}memory", name, device, float(row["peak_gib"]), peak, row)


def _adapters(row: Row) -> LoraConfig | None:
    """Return the adapters of prime-rl, which those of experts are part of."""
    targets = (ALL_LINEAR,) if model(row["model"]).experts is None else (ALL_LINEAR, *EXPERT_TARGETS)
    return LoraConfig(r=int(row["lora"]), targets=targets) if row["lora"] else None


def _peak_gib(one: ReplicaCosts, tokens: int) -> float:
    """Return the GiB of a training step of two micro-batches, without CUDA's context and communicators.

    prime-rl shards on one device as well, and has weights that are not trained in fp32, as it has those that
    are. Its benchmark has four adapters, of which one is used; only those of experts have no gradients then.
    As it starts no run, it makes no optimizer for them (`MAX_LORAS`, `FakeDataLoader`, `MultiLoRALinear`,
    `MultiLoRAGroupedExperts` and `MultiLoRAOptimizer` of commit d8f290ef). It weights the outputs of experts
    in fp32, as the family of Mixtral does (`MoE.forward`).
    """
    workers = tuple(range(one.layout.world))
    replica = Replica("m", "m", "train", "torch", one.layout, ("all",), workers, workers, dtype="bf16")
    shape = one.shape if one.shape.experts is None else replace(one.shape, family="mixtral")
    rank = Rank(replica, shape, one.config, 0, True, False)
    items = model_state(rank)
    items += largest(ShardedStep(rank, MicroBatch(tokens, tokens, 2, False)).train_moments())
    num_bytes = items.total()
    if rank.adapts:
        unused = 3 * (1 if one.shape.experts else 2) * FP32_BYTES * rank.trained.total_shard
        states = sum(size for key, size in items.items() if key.category is MemoryCategory.OPTIMIZER)
        num_bytes += (FP32_BYTES - rank.width) * rank.sizes.total_shard + unused - states
    return num_bytes / GIB


def automodel(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield FSDP2, or what is nearest to it with tensor or expert ranks: weights whole on data ranks."""
    for row in rows("automodel"):
        t, p, c, e, gpus = (int(row[key]) for key in ("tensor", "pipe", "context", "expert", "gpus"))
        d, sequence = gpus // (t * p * c), int(row["sequence"])
        backend = "torch" if t * p * e == 1 else "megatron"
        one = costs(
            row["model"],
            hardware("h100"),
            Layout(d * c, t, p, expert=e),
            backend,
            is_overlapping=True,
            tokens_per_microbatch=int(row["microbatch"]) * sequence // c,
            activation_checkpointing=row["recompute"] == "true",
            lora=LoraConfig(r=int(row["lora"])) if row["lora"] else None,
        )
        # DeepEP counts on the GPU.
        one = replace(one, virtual_stages=int(row["virtual"]), counts_tokens=False)
        one = replace(one, is_uneven=False)
        work = whole_sequences(sequence, int(row["batch"]) / d).share(1 / c)
        topic = "training" if one.shape.experts is None else "MoE training"
        name = f"{row['model']} {gpus}xh100 t{t}p{p}c{c}e{e} {row['lora'] and 'lora'}".rstrip()
        spent = seconds(train(one, work, 1))
        yield compare("NeMo AutoModel", topic, name, "h100", float(row["seconds"]), spent, row)
