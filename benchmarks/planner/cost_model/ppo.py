"""Published steps of PPO with four models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.planner.cost_model.comparison import (
    Comparison,
    PeerFigures,
    Row,
    compare,
    costs,
    hardware,
    rows,
    seconds,
    spread,
    whole_sequences,
)
from benchmarks.planner.cost_model.decoding import decode_seconds
from hflow.config.schema import LoraConfig
from hflow.planner.forecast.cost.collectives import all_gather, send
from hflow.planner.forecast.cost.flops import Work, work_of
from hflow.planner.forecast.cost.generation import prefill
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.training import forward, local_weights, train
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import num_parameters

OPT_PROMPTS, OPT_LENGTH = 131_900, 256
LLAMA_SAMPLES, LLAMA_LENGTH, LLAMA_UPDATES = 1024, 1024, 8


def deepspeed_chat(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield steps of four models that share all devices, with an engine in eager mode.

    The engine gathers the weights that ZeRO-3 shards once for each batch (`DeepSpeedHybridEngine.generate`).
    """
    for row in rows("deepspeed_chat"):
        gpus, t, batch = (int(row[key]) for key in ("gpus", "tensor", "batch"))
        device = hardware("a100-80g")
        engine = costs(f"opt-{row['model']}", device, Layout(gpus // t, t), "embedded")
        if figures.layer_us is not None:
            engine = replace(engine, host=replace(engine.host, layer_us=figures.layer_us))
        num = batch / engine.layout.data
        spent = seconds(prefill(engine, whole_sequences(OPT_LENGTH, num)))
        spent += (OPT_LENGTH - 1) * decode_seconds(engine, num, 1.5 * OPT_LENGTH)
        if row["zero"] == "3":
            num_bytes = engine.itemsize * num_parameters(engine.shape)
            spent += all_gather(num_bytes, spread(gpus, 1), device).seconds
        work = work_of([2 * OPT_LENGTH] * batch, OPT_LENGTH, 1).share(1 / gpus)
        lora = LoraConfig(r=int(row["lora"])) if row["lora"] else None
        for name, adapters in ((row["model"], lora), ("350m", None)):
            tokens, is_trainer = 2 * OPT_LENGTH * batch // gpus, figures.passes is None
            one = _trainer(f"opt-{name}", Layout(gpus), tokens, adapters, is_trainer)
            spent += (figures.passes or 1) * (2 * seconds(forward(one, work)) + seconds(train(one, work, 1)))
        measured = 60 * float(row["minutes"]) / (OPT_PROMPTS / batch)
        name = f"OPT {row['model']} {gpus}xa100"
        yield compare("DeepSpeed-Chat", "PPO", name, "a100-80g", measured, spent, row)


def openrlhf(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield phases of PPO with five groups of devices."""
    for row in rows("openrlhf"):
        predicted = generate_experience(row) if row["phase"] == "generation" else train_actor(row, figures)
        name = f"{row['model']} {row['phase']}"
        yield compare("OpenRLHF", "PPO", name, "a100-80g", float(row["seconds"]), predicted, row)


def generate_experience(row: Row) -> float:
    """Return the seconds of generating micro-batches one after the other, each scored by the other models.

    An engine answers one actor rank at a time. Sharded models (ZeRO-3) compute for all actor ranks at once;
    otherwise, ranks do not wait for each other, and a model scores for one while the other generates. Source:
    `RemoteExperienceMaker` and `LLMRayActor` (openrlhf/trainer).
    """
    actor, vllm, t, num = (int(row[key]) for key in ("actor", "vllm", "engine_gpus", "micro_rollout"))
    engine = costs(row["model"], hardware("a100-80g"), Layout(1, t), "vllm")
    spent = seconds(prefill(engine, whole_sequences(LLAMA_LENGTH, num)))
    spent += (LLAMA_LENGTH - 1) * decode_seconds(engine, num, 1.5 * LLAMA_LENGTH)
    spent *= math.ceil(actor / (vllm // t))
    scoring = 0.0
    for key in ("reference", "reward", "critic", "actor"):
        gpus = int(row[key])
        layout, samples = (Layout(gpus), num * actor / gpus) if row["zero"] == "3" else (Layout(1), num)
        one = _trainer(row["model"], layout, round(samples) * 2 * LLAMA_LENGTH)
        scoring = max(scoring, seconds(forward(one, _samples(1).share(samples))))
    return (spent + scoring) * LLAMA_SAMPLES / num / actor


def train_actor(row: Row, figures: PeerFigures) -> float:
    """Return the seconds of the actor's minibatches, beside which the critic trains on as many devices."""
    gpus, micro = int(row["actor"]), int(row["micro_train"])
    tokens, is_trainer = micro * 2 * LLAMA_LENGTH, figures.unfused is None
    one = _trainer(row["model"], Layout(gpus), tokens, is_trainer=is_trainer)
    per_update = LLAMA_SAMPLES / gpus / LLAMA_UPDATES
    work = _samples(1).share(per_update)
    copies = LLAMA_UPDATES * gradient_copies(one, row["zero"], per_update / micro)
    return (figures.unfused or 1) * seconds(train(one, work, LLAMA_UPDATES)) + copies


def gradient_copies(one: ReplicaCosts, zero: str, num: float) -> float:
    """Return the seconds in which gradients go to the host, where the optimizer steps, and weights come back.

    Each micro-batch adds its gradients to sums on the host: in bf16 with ZeRO-2, in fp32 with ZeRO-3. Source:
    `async_accumulate_grad_in_cpu_via_gpu` and `partition_grads` of DeepSpeed 0.13.2.
    """
    width = 4 if zero == "3" else 2
    per_weight = 2 * (num - 1) * width + 4 + 2
    return send(local_weights(one) * per_weight, one.hardware.host, one.hardware).seconds


def _samples(num: int) -> Work:
    return work_of([2 * LLAMA_LENGTH] * num, LLAMA_LENGTH, 1)


def _trainer(
    name: str, layout: Layout, tokens: int, lora: LoraConfig | None = None, is_trainer: bool = True
) -> ReplicaCosts:
    return costs(
        name,
        hardware("a100-80g"),
        layout,
        "torch",
        attention="flash-attn",
        is_trainer=is_trainer,
        tokens_per_microbatch=tokens,
        activation_checkpointing=True,
        lora=lora,
    )
