"""Published steps of reinforcement learning: of GRPO and PPO, in turns and ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from comparison import Comparison, Row, compare, costs, hardware, model, rows, seconds

from hflow.config.schema import GenConfig
from hflow.planner.cost.flops import kv_entries, work_of
from hflow.planner.cost.generation import RolloutRequest, generate
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.training import forward, local_weights, train
from hflow.planner.hardware import GIB
from hflow.planner.layout import Layout
from hflow.planner.model_shape import cached_tokens, num_parameters
from hflow.planner.workload import Workload

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
    low, high = 1.0, 20.0 * mean
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle, longest) < mean else (low, middle)
    return Workload(PROMPT, round(low, 1), DEVIATION, longest)


def cut_mean(mean: float, longest: int) -> float:
    """Return the mean of a lognormal variable of a mean, and of `DEVIATION`, that is cut at `longest`."""
    variance = math.log1p(DEVIATION**2)
    deviation, normal = math.sqrt(variance), NormalDist()
    distance = (math.log(longest / mean) + variance / 2) / deviation
    return mean * normal.cdf(distance - deviation) + longest * (1 - normal.cdf(distance))


@dataclass(frozen=True)
class Step:
    """A step whose lengths are not published, but for a part of the time that they take."""

    model: str
    device: str
    groups: int
    group_size: int
    max_response: int
    minibatches: int
    engine_tensor: int
    backend: str
    tensor: int
    pipe: int

    def generation(self, gpus: int, mean: float, ahead: int) -> float:
        """Return the seconds of generating a batch, with the batches that are in flight."""
        config = GenConfig(max_running=RUNNING)
        layout = Layout(gpus // self.engine_tensor, self.engine_tensor)
        engine = costs(self.model, hardware(self.device), layout, "vllm", gen=config)
        workload = cut_workload(round(mean), self.max_response)
        engine = limit_running(engine, PROMPT + round(mean), 0.8)
        batches = max(1, ahead)
        in_flight = self.groups * self.group_size * batches
        rollout = RolloutRequest(self.groups, self.group_size, in_flight, batches - 1, 0)
        return seconds(generate(engine, workload, rollout))

    def learning(self, gpus: int, mean: float) -> tuple[float, float]:
        """Return the seconds of a forward pass over the batch, and of its minibatches."""
        data = gpus // (self.tensor * self.pipe)
        trainer = costs(
            self.model,
            hardware(self.device),
            Layout(data, self.tensor, self.pipe),
            self.backend,
            tokens_per_microbatch=max(32_768, self.max_response + PROMPT),
            activation_checkpointing=True,
        )
        num = self.groups * self.group_size
        work = work_of([PROMPT + round(mean)] * num, PROMPT, self.group_size).share(1 / data)
        updates = train(trainer, work.share(1 / self.minibatches), self.minibatches)
        return seconds(forward(trainer, work)), seconds(updates)


def verl_async() -> Iterator[Comparison]:
    """Yield what one step ahead gains, at the length that explains the seconds of training in turns."""
    for row in rows("verl_async"):
        backend = {"fsdp": "torch", "megatron": "megatron"}[row["engine"]]
        t, p = int(row["tensor"]), int(row["pipe"])
        step = Step("qwen2.5-7b", "h20", 512, 12, int(row["max_response"]), 16, 2, backend, t, p)
        mean = bisect(lambda x, s=step: s.learning(16, x)[1], float(row["update"]), step.max_response)
        # In turns, parameters and optimizer states go to the host: 12 bytes a weight, over `shards` devices.
        held = 12 * num_parameters(model("qwen2.5-7b")) / int(row["shards"])
        switching = 2 * held / (SWITCH_GB_PER_S["h100"] * 1e9)
        in_turns = step.generation(16, mean, 0) + sum(step.learning(16, mean)) + switching
        ahead = max(step.generation(4, mean, 1), sum(step.learning(12, mean)))
        measured = float(row["in_turns"]) / float(row["ahead"])
        name = f"qwen2.5-7b 16xh20 {row['engine']} 1 ahead: seconds in turns over those ahead"
        yield compare("verl", "gain by staleness", name, measured, in_turns / ahead, row)


def areal() -> Iterator[Comparison]:
    """Yield what steps ahead gain, at the length that explains the seconds of a step in turns."""
    for row in rows("areal"):
        gpus = 8 * int(row["machines"])
        step = Step(row["model"], "h800", 512, 16, 27_000, 4, 1, "megatron", 1, int(row["pipe"]))

        def in_turns(mean: float, step: Step = step, gpus: int = gpus) -> float:
            return step.generation(gpus, mean, 0) + sum(step.learning(gpus, mean))

        mean = bisect(in_turns, 3.6 * float(row["in_turns"]), step.max_response)
        ahead = max(step.generation(gpus // 4 * 3, mean, 4), sum(step.learning(gpus // 4, mean)))
        measured = float(row["in_turns"]) / float(row["ahead"])
        name = f"{row['model']} {gpus}xh800 4 ahead: seconds in turns over those ahead"
        yield compare("AReaL", "gain by staleness", name, measured, in_turns(mean) / ahead, row)


def bisect(rising: Callable[[float], float], target: float, longest: int) -> float:
    """Return the mean length for which a rising function of it has a value."""
    low, high = 16.0, 0.95 * longest
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return low
