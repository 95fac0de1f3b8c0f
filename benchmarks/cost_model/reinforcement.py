"""Published steps of reinforcement learning: of GRPO and PPO, in turns and ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from comparison import Comparison, Row, compare, costs, hardware, model, rows, seconds

from hflow.config.schema import GenConfig
from hflow.planner.cost.flops import kv_entries, work_of
from hflow.planner.cost.generation import RolloutRequest, generate
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.training import forward, local_weights, train
from hflow.planner.hardware import GIB
from hflow.planner.layout import Layout
from hflow.planner.model_shape import cached_tokens
from hflow.planner.workload import Workload, expected_max

LEARNING = {
    ("h100", "dense"): 1.43,
    ("h100", "experts"): 1.75,
    ("gb200", "dense"): 1.80,
    ("gb200", "experts"): 2.20,
}
"""Seconds of NeMo RL's forward and training passes over those of their kernels: it pads packed sequences,
computes logits in fp32, and swaps the reference model in. The first three are fitted to its fitted rows, the
last follows from them."""
SWITCH_GB_PER_S = {"h100": 1.5, "gb200": 2.2}
"""Rate at which NeMo RL moves weights and optimizer states of a device to the host and back when engines and
trainer take turns, fitted to its fitted rows: pageable memory, which the processes of a machine share."""
PROMPT = 128
"""Assumed tokens of a prompt of OpenMathInstruct-2, which the source does not give."""
DEVIATION = 0.6
"""Assumed deviation of response lengths over their mean; hflow's default."""
RUNNING = 1024
"""Sequences that vLLM runs at once by default on devices of 70 GiB or more, other than A100."""
STATE_BYTES = 12
"""Master weight and two moments of AdamW."""


def nemo_rl() -> Iterator[Comparison]:
    """Yield steps of GRPO, and what generating ahead gains over taking turns."""
    in_turns: dict[tuple[str, str, str], tuple[float, float]] = {}
    for row in rows("nemo_rl"):
        predicted, measured = grpo_step(row), float(row["seconds"])
        is_dense = model(row["model"]).experts is None
        mode = "in turns" if row["ahead"] == "0" else f"{row['ahead']} ahead"
        name = f"{row['release']} {row['model']} {row['gpus']}x{row['device']} {mode}"
        topic = "RL step" if is_dense else "MoE RL step"
        yield compare("NeMo RL", topic, name, measured, predicted, row)
        key = row["release"], row["model"], row["device"]
        rate = int(row["gpus"]) * predicted, int(row["gpus"]) * measured
        if row["ahead"] == "0":
            in_turns.setdefault(key, rate)
        else:
            before = in_turns[key]
            topic = "gain by staleness" if is_dense else "MoE gain by staleness"
            name += ": GPU seconds in turns over those ahead"
            yield compare("NeMo RL", topic, name, before[1] / rate[1], before[0] / rate[0], row)


def grpo_step(row: Row) -> float:
    """Return the seconds of a step: generation, two forward passes, and the minibatches."""
    device, ahead = hardware(row["device"]), int(row["ahead"])
    training, groups, size = (int(row[key]) for key in ("train_gpus", "prompts", "answers"))
    generating = int(row["gpus"]) - (training if ahead else 0)
    longest, g = int(row["max_length"]), int(row["generate_tensor"])
    workload = cut_workload(int(row["length"]) - PROMPT, longest - PROMPT)
    engine = costs(
        row["model"], device, Layout(generating // g, g), "vllm", gen=GenConfig(max_running=RUNNING)
    )
    engine = limit_running(engine, int(row["length"]), float(row["memory"]))
    # Answers for a step are generated with the weights of at most `ahead` steps before, so that as many
    # batches are in flight (`_calculate_target_weights` of NeMo RL's `async_utils`).
    batches = max(1, ahead)
    rollout = RolloutRequest(groups, size, groups * size * batches, batches - 1, 0)
    generation = seconds(generate(engine, workload, rollout))
    t, c, e, p = (int(row[f"train_{axis}"]) for axis in ("tensor", "context", "expert", "pipe"))
    trainer = costs(
        row["model"],
        device,
        Layout(training // (t * c * p), t, p, c, min(e, training // (t * p))),
        "megatron",
        is_overlapping=True,
        tokens_per_microbatch=longest,
        activation_checkpointing=row["recompute"] == "true",
    )
    num = int(row["minibatches"])
    work = work_of([int(row["length"])] * groups * size, PROMPT, size).share(1 / trainer.layout.num_copies)
    passes = 2 * seconds(forward(trainer, work)) + seconds(train(trainer, work.share(1 / num), num))
    kind = "dense" if trainer.shape.experts is None else "experts"
    learning = LEARNING[row["device"], kind] * passes
    if ahead:
        return max(generation, learning)
    return generation + learning + switch_seconds(trainer, SWITCH_GB_PER_S[row["device"]])


def limit_running(engine: ReplicaCosts, length: int, utilization: float) -> ReplicaCosts:
    """Return an engine that runs as many sequences as its cache holds in vLLM's share of the memory."""
    device = engine.hardware.device
    weights = engine.stage_weights * engine.weight_bytes
    room = utilization * device.memory_bytes - device.overhead_gib * GIB - weights
    per_token = kv_entries(engine.shape, engine.layout.tensor) * engine.weight_bytes
    slots = max(1, int(room / per_token / cached_tokens(engine.shape, length)))
    running = min(engine.config.gen.max_running, slots)
    return replace(engine, config=replace(engine.config, gen=replace(engine.config.gen, max_running=running)))


def switch_seconds(trainer: ReplicaCosts, gb_per_s: float) -> float:
    """Return the seconds of moving a trainer's weights and optimizer states to the host and back."""
    held = trainer.stage_weights * trainer.itemsize + local_weights(trainer) * STATE_BYTES
    return 2 * held / (gb_per_s * 1e9)


@cache
def cut_workload(mean: float, longest: int) -> Workload:
    """Return the lengths whose mean after the cut is as measured."""
    low, high = 1.0, 8.0 * mean
    for _ in range(40):
        middle = (low + high) / 2
        if expected_max(Workload(PROMPT, middle, DEVIATION, longest), 1) < mean:
            low = middle
        else:
            high = middle
    return Workload(PROMPT, round(low, 1), DEVIATION, longest)
