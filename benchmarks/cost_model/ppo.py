"""Published steps of PPO with four models."""

from __future__ import annotations

from collections.abc import Iterator

from comparison import Comparison, Row, compare, costs, hardware, rows, seconds, whole_sequences
from decoding import decode_seconds

from hflow.planner.cost.flops import Work, work_of
from hflow.planner.cost.generation import prefill
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.training import forward, train
from hflow.planner.layout import Layout

EAGER = 2.65
"""Seconds of DeepSpeed-Chat's steps over those of their kernels, fitted to its fitted rows."""
OFFLOADING = 1.53
"""Seconds of OpenRLHF's training over those of its kernels, fitted to its fitted row: it steps the optimizer
on the host, and runs transformers without fused kernels."""
OPT_PROMPTS, OPT_BATCH, OPT_LENGTH = 131_900, 1024, 256
LLAMA_SAMPLES, LLAMA_LENGTH, LLAMA_UPDATES = 1024, 1024, 8


def deepspeed_chat() -> Iterator[Comparison]:
    """Yield steps of four models that share all devices, with an engine in eager mode."""
    for row in rows("deepspeed_chat"):
        gpus, device = int(row["gpus"]), hardware("a100-80g")
        t = {"30b": 1, "66b": 4, "175b": 8}.get(row["model"], 1)
        engine = costs(f"opt-{row['model']}", device, Layout(gpus // t, t), "embedded")
        num = OPT_BATCH / engine.layout.data
        prompts = whole_sequences(OPT_LENGTH, num)
        spent = seconds(prefill(engine, prompts))
        spent += (OPT_LENGTH - 1) * decode_seconds(engine, num, 1.5 * OPT_LENGTH)
        work = work_of([2 * OPT_LENGTH] * OPT_BATCH, OPT_LENGTH, 1).share(1 / gpus)
        for name, num_forwards in ((row["model"], 2), ("350m", 2)):
            one = _trainer(f"opt-{name}", Layout(gpus), 2 * OPT_LENGTH * OPT_BATCH // gpus)
            spent += num_forwards * seconds(forward(one, work)) + seconds(train(one, work, 1))
        measured = 60 * float(row["minutes"]) / (OPT_PROMPTS / OPT_BATCH)
        name = f"OPT {row['model']} {gpus}xa100"
        yield compare("DeepSpeed-Chat", "PPO", name, measured, EAGER * spent, row)


def openrlhf() -> Iterator[Comparison]:
    """Yield phases of PPO with five groups of devices."""
    for row in rows("openrlhf"):
        predicted = generate_experience(row) if row["phase"] == "generation" else train_actor(row)
        name = f"{row['model']} {row['phase']}"
        yield compare("OpenRLHF", "PPO", name, float(row["seconds"]), predicted, row)


def generate_experience(row: Row) -> float:
    """Return the seconds of generating micro-batches one after the other, each scored by the other models."""
    actor, vllm, t = (int(row[key]) for key in ("actor", "vllm", "engine_gpus"))
    engine = costs(row["model"], hardware("a100-80g"), Layout(vllm // t, t), "vllm")
    together = int(row["micro_rollout"]) * actor
    num = together / engine.layout.data
    spent = seconds(prefill(engine, whole_sequences(LLAMA_LENGTH, num)))
    spent += (LLAMA_LENGTH - 1) * decode_seconds(engine, num, 1.5 * LLAMA_LENGTH)
    scoring = 0.0
    for key in ("reference", "reward", "critic", "actor"):
        gpus = int(row[key])
        one = _trainer(row["model"], Layout(gpus), together * 2 * LLAMA_LENGTH // gpus)
        scoring = max(scoring, seconds(forward(one, _samples(together).share(1 / gpus))))
    return (spent + scoring) * LLAMA_SAMPLES / together


def train_actor(row: Row) -> float:
    """Return the seconds of the actor's minibatches, beside which the critic trains on as many devices."""
    gpus = int(row["actor"])
    one = _trainer(row["model"], Layout(gpus), int(row["micro_train"]) * 2 * LLAMA_LENGTH)
    work = _samples(LLAMA_SAMPLES).share(1 / gpus / LLAMA_UPDATES)
    return OFFLOADING * seconds(train(one, work, LLAMA_UPDATES))


def _samples(num: int) -> Work:
    return work_of([2 * LLAMA_LENGTH] * num, LLAMA_LENGTH, 1)


def _trainer(name: str, layout: Layout, tokens: int) -> ReplicaCosts:
    return costs(
        name,
        hardware("a100-80g"),
        layout,
        "torch",
        tokens_per_microbatch=tokens,
        activation_checkpointing=True,
    )
