"""Published steps of reinforcement learning: of GRPO and PPO, in turns and ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

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
)
from benchmarks.planner.cost_model.weights import Update, exported_tensors, unpinned
from hflow.config.schema import GenConfig, OptimConfig
from hflow.planner.forecast.cost.collectives import send
from hflow.planner.forecast.cost.flops import kv_entries, work_of
from hflow.planner.forecast.cost.generation import RolloutRequest, generate
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.training import forward, local_weights, train
from hflow.planner.plan.calibration import HostTimes
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.workload import Workload
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import cached_tokens, num_parameters

PROMPT = 128
"""Assumed tokens of a prompt of OpenMathInstruct-2, which the source does not give."""
DEVIATION = 0.6
"""Assumed deviation of response lengths over their mean; hflow's default."""
RUNNING = 1024
"""Sequences that vLLM runs at once by default on devices of 70 GiB or more, other than A100."""
DEVICES = {"h100": 8, "gb200": 4}
"""Devices of a machine."""
DIVIDED = "MoE RL step, divided engines"
"""Steps with engines that span machines, which no plan of hflow has."""
STATE_BYTES = 12
"""Master weight and two moments of AdamW."""


def nemo_rl(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield steps of GRPO, and what generating ahead gains over taking turns."""
    in_turns: dict[tuple[str, str, str], tuple[float, float]] = {}
    for row in rows("nemo_rl"):
        predicted, measured = grpo_step(row, figures), float(row["seconds"])
        is_dense = model(row["model"]).experts is None
        is_divided = int(row["generate_tensor"]) > DEVICES[row["device"]]
        mode = "in turns" if row["ahead"] == "0" else f"{row['ahead']} ahead"
        name = f"{row['release']} {row['model']} {row['gpus']}x{row['device']} {mode}"
        topic = "RL step" if is_dense else DIVIDED if is_divided else "MoE RL step"
        yield compare("NeMo RL", topic, name, row["device"], measured, predicted, row)
        key = row["release"], row["model"], row["device"]
        rate = int(row["gpus"]) * predicted, int(row["gpus"]) * measured
        if row["ahead"] == "0":
            in_turns.setdefault(key, rate)
        else:
            before = in_turns[key]
            topic = "gain by staleness" if is_dense else "MoE gain by staleness"
            name += ": GPU seconds in turns over those ahead"
            gains = before[1] / rate[1], before[0] / rate[0]
            yield compare("NeMo RL", topic, name, row["device"], *gains, row)


def grpo_step(row: Row, figures: PeerFigures) -> float:
    """Return the seconds of a step: generation, two forward passes, and the minibatches."""
    device, ahead = hardware(row["device"]), int(row["ahead"])
    training, groups, size = (int(row[key]) for key in ("train_gpus", "prompts", "answers"))
    generating = int(row["gpus"]) - (training if ahead else 0)
    longest, g = int(row["max_length"]), int(row["generate_tensor"])
    workload = cut_workload(int(row["length"]) - PROMPT, longest - PROMPT)
    config, layout = GenConfig(max_running=RUNNING), Layout(generating // g, g)
    engine = costs(row["model"], device, layout, "vllm", host=figures.host, gen=config)
    engine = limit_running(engine, int(row["length"]), float(row["memory"]))
    # Answers for a step are generated with the weights of at most `ahead` steps before, so that as many
    # batches are in flight (`_calculate_target_weights` of NeMo RL's `async_utils`).
    batches = max(1, ahead)
    rollout = RolloutRequest(groups, size, groups * size * batches, batches - 1, 0)
    generation = seconds(generate(engine, workload, rollout))
    t, c, e, p = (int(row[f"train_{axis}"]) for axis in ("tensor", "context", "expert", "pipe"))
    kind = "dense" if engine.shape.experts is None else "experts"
    trainer = costs(
        row["model"],
        device,
        Layout(training // (t * c * p), t, p, c, min(e, training // (t * p))),
        "megatron",
        is_overlapping=True,
        is_trainer=(is_trainer := (row["device"], kind) not in figures.learning),
        # Its releases send copies by NCCL: `moe_token_dispatcher_type` is Megatron-Bridge's `alltoall` in
        # v0.4 and v0.5, as no recipe sets it, and that of examples/configs/grpo_math_1B.yaml in v0.6.
        has_exchange_kernels=False,
        tokens_per_microbatch=longest,
        activation_checkpointing=row["recompute"] == "true",
    )
    trainer = replace(trainer, is_uneven=is_trainer)
    num = int(row["minibatches"])
    work = work_of([int(row["length"])] * groups * size, PROMPT, size).share(1 / trainer.layout.num_copies)
    passes = 2 * seconds(forward(trainer, work)) + seconds(train(trainer, work.share(1 / num), num))
    learning = passes * figures.learning.get((row["device"], kind), 1.0)
    refit = refit_seconds(row, training, generating)
    if ahead:
        return max(generation, learning) + refit
    return generation + learning + refit + switch_seconds(trainer, engine, figures)


def refit_seconds(row: Row, training: int, generating: int) -> float:
    """Return the seconds of new weights, during which nothing is generated or trained.

    Training ranks gather whole tensors. In turns, each hands them to the engine on its device while it
    gathers the next ones; ahead, one broadcasts them to all. Sources: `refit_policy_generation` and
    `async_grpo_train` in nemo_rl/algorithms/grpo.py; its recipes set `in_flight_weight_updates`.
    """
    shape = model(row["model"])
    num_bytes = 2.0 * num_parameters(shape)
    num = exported_tensors(shape)
    update = Update(row["device"], num_bytes, num_bytes, num, training, generating)
    return update.gather() if row["ahead"] == "0" else max(update.gather(), *update.from_one_machine())


def limit_running(engine: ReplicaCosts, length: int, utilization: float) -> ReplicaCosts:
    """Return an engine that runs as many sequences as its cache holds in vLLM's share of the memory."""
    device = engine.hardware.device
    weights = engine.stage_weights * engine.weight_bytes
    room = utilization * device.memory_bytes - device.overhead_gib * GIB - weights
    per_token = kv_entries(engine.shape, engine.layout.tensor) * engine.weight_bytes
    slots = max(1, int(room / per_token / cached_tokens(engine.shape, length)))
    running = min(engine.config.gen.max_running, slots)
    return replace(engine, config=replace(engine.config, gen=replace(engine.config.gen, max_running=running)))


def switch_seconds(trainer: ReplicaCosts, engine: ReplicaCosts, figures: PeerFigures) -> float:
    """Return the seconds of moving state to the host and back: weights are pinned, the optimizer's are not.

    Sources: `offload_after_refit` and `move_optimizer` in NeMo RL's Megatron worker, `offload_to_cpu` in
    Megatron's `param_and_grad_buffer.py`, and vLLM's sleep of level 1.
    """
    held = trainer.stage_weights * trainer.itemsize + engine.stage_weights * engine.weight_bytes
    pinned = send(2 * held, trainer.hardware.host, trainer.hardware).seconds
    return pinned + unpinned(2 * local_weights(trainer) * STATE_BYTES, trainer.hardware, figures)


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
    microbatch: int = 0
    """Samples of a micro-batch; 0: as many as the longest response has tokens, or 32,768."""
    is_eager: bool = False
    """Whether the engine launches kernels one by one, without CUDA graphs."""
    memory: float = 0.8
    """The engine's share of a device's memory."""
    optimizer: str = "adamw"
    host: HostTimes | None = None
    """The host of the engine; None: as hflow ships it."""

    def generation(self, gpus: int, mean: float, ahead: int) -> float:
        """Return the seconds of generating a batch, with the batches that are in flight."""
        config = GenConfig(max_running=RUNNING, cuda_graphs=not self.is_eager)
        layout = Layout(gpus // self.engine_tensor, self.engine_tensor)
        engine = costs(self.model, hardware(self.device), layout, "vllm", host=self.host, gen=config)
        workload = cut_workload(round(mean), self.max_response)
        engine = limit_running(engine, PROMPT + round(mean), self.memory)
        batches = max(1, ahead)
        in_flight = self.groups * self.group_size * batches
        rollout = RolloutRequest(self.groups, self.group_size, in_flight, batches - 1, 0)
        return seconds(generate(engine, workload, rollout))

    def learning(self, gpus: int, mean: float) -> tuple[float, float]:
        """Return the seconds of a forward pass over the batch, and of its minibatches."""
        data = gpus // (self.tensor * self.pipe)
        tokens = self.microbatch * (PROMPT + round(mean)) or max(32_768, self.max_response + PROMPT)
        trainer = costs(
            self.model,
            hardware(self.device),
            Layout(data, self.tensor, self.pipe),
            self.backend,
            attention="flash-attn",
            is_trainer=True,
            tokens_per_microbatch=tokens,
            activation_checkpointing=True,
            optim=OptimConfig(self.optimizer),
        )
        num = self.groups * self.group_size
        work = work_of([PROMPT + round(mean)] * num, PROMPT, self.group_size).share(1 / data)
        updates = train(trainer, work.share(1 / self.minibatches), self.minibatches)
        return seconds(forward(trainer, work)), seconds(updates)


def verl_async(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield what one step ahead gains, at the length that explains the seconds of training in turns.

    In turns, parameters go to the host and back three times, for generation, log-probs, and training, and
    optimizer states once, with training (verl/workers/fsdp_workers.py and megatron_workers.py). What goes
    with training is part of its published seconds.
    """
    for row in rows("verl_async"):
        in_turns, ahead = (
            replace(_verl_step(row, f"answers_{mode}"), host=figures.host) for mode in ("in_turns", "ahead")
        )
        num = num_parameters(model(in_turns.model))
        params, states = (num * float(row[key]) for key in ("parameter_bytes", "state_bytes"))
        device = hardware(in_turns.device)
        updating = float(row["update"]) - unpinned(2 * (params + states), device, figures)
        mean = bisect(lambda x, s=in_turns: s.learning(16, x)[1], updating, in_turns.max_response)
        switching = unpinned(2 * (3 * params + states), device, figures)
        together = in_turns.generation(16, mean, 0) + sum(in_turns.learning(16, mean)) + switching
        apart = max(ahead.generation(4, mean, 1), sum(ahead.learning(12, mean)))
        measured = float(row["in_turns"]) / float(row["ahead"])
        name = f"qwen2.5-7b 16xh20 {row['engine']} 1 ahead: seconds in turns over those ahead"
        yield compare("verl", "gain by staleness", name, "h20", measured, together / apart, row)


def _verl_step(row: Row, answers: str) -> Step:
    """Return the step of a row. verl's engines launch kernels one by one: `enforce_eager` is its default."""
    backend = {"fsdp": "torch", "megatron": "megatron"}[row["engine"]]
    t, p = int(row["tensor"]), int(row["pipe"])
    longest, samples = int(row["max_response"]), int(row["microbatch"])
    return Step(
        "qwen2.5-7b", "h20", 512, int(row[answers]), longest, 16, 2, backend, t, p, samples, is_eager=True
    )


def verl_deepseek(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield generation and step of DeepSeek-V3, with log-probs of the policy and of a reference model.

    The experts are on tensor ranks, which are as many.
    """
    for row in rows("verl_deepseek"):
        groups, size, longest, minibatches, gpus, engine, t, p = (
            int(row[key])
            for key in (
                *("prompts", "answers", "max_response", "minibatches"),
                *("gpus", "engine_gpus", "tensor", "pipe"),
            )
        )
        step = Step(
            *("deepseek-v3", "h20", groups, size, longest, minibatches, engine, "megatron", t, p),
            is_eager=True,
            host=figures.host,
            memory=float(row["memory"]),
            optimizer="adamw_cpu",
        )
        mean, num_bytes = float(row["mean"]), 2 * num_parameters(model(step.model)) / gpus
        generation, (forward_pass, updates) = step.generation(gpus, mean, 0), step.learning(gpus, mean)
        # The policy goes to the host and back for generation, log-probs and training, the reference once.
        switching = unpinned(2 * 4 * num_bytes, hardware("h20"), figures)
        whole = generation + 2 * forward_pass + updates + switching
        for name, measured, predicted in (
            ("generation", row["generation"], generation),
            ("step", row["step"], whole),
        ):
            name = f"deepseek-v3 {gpus}xh20 in turns, {name}"
            yield compare("verl", DIVIDED, name, "h20", float(measured), predicted, row)


def areal(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield what steps ahead gain, at the length that explains the seconds of a step in turns.

    In turns, engines and trainers have a half of the GPUs each, and wait for each other.
    """
    for row in rows("areal"):
        gpus = 8 * int(row["machines"])
        in_turns = Step(
            *(row["model"], "h800", 512, 16, 27_000, 4, 1, "megatron", 1, int(row["pipe_in_turns"])),
            host=figures.host,
        )
        ahead = replace(in_turns, pipe=int(row["pipe_ahead"]))

        def together(mean: float, step: Step = in_turns, half: int = gpus // 2) -> float:
            return step.generation(half, mean, 0) + sum(step.learning(half, mean))

        mean = bisect(together, 3600 * float(row["in_turns"]) / int(row["steps"]), in_turns.max_response)
        apart = max(ahead.generation(gpus // 4 * 3, mean, 4), sum(ahead.learning(gpus // 4, mean)))
        measured = float(row["in_turns"]) / float(row["ahead"])
        name = f"{row['model']} {gpus}xh800 4 ahead: seconds in turns over those ahead"
        yield compare("AReaL", "gain by staleness", name, "h800", measured, together(mean) / apart, row)


def bisect(rising: Callable[[float], float], target: float, longest: int) -> float:
    """Return the mean length for which a rising function of it has a value."""
    low, high = 16.0, 0.95 * longest
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return low
