"""Published steps of reinforcement learning: of GRPO and PPO, in turns and ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from benchmarks.planner.cost_model.comparison import (
    Comparison,
    PeerFigures,
    Row,
    compare,
    costs,
    engine_host,
    hardware,
    model,
    rows,
    seconds,
)
from benchmarks.planner.cost_model.weights import Update, exported_tensors, from_pageable, to_pageable
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
LOGPROBS_US = 20.0
"""Microseconds by which log-probs lengthen a decode step for each sequence, where vLLM's API returns them: 64
sequences of a model of 0.5B have 18,645 tokens a second without and 13,583 with them (`gen` and `logprobs0`
of `native` in github.com/vllm-project/vllm/pull/57442). NeMo RL and verl ask for them (`logprobs=0`). hflow
reads those of a step at once, before they are made objects of Python."""


def nemo_rl(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield steps of GRPO, their phases, and what generating ahead gains over taking turns."""
    in_turns: dict[tuple[str, str, str], tuple[float, float]] = {}
    for row in rows("nemo_rl"):
        phases, measured, ahead = grpo_phases(row, figures), float(row["seconds"]), row["ahead"] != "0"
        predicted = step_seconds(phases, ahead=ahead)
        mark = "" if model(row["model"]).experts is None else "MoE "
        is_divided = mark and int(row["generate_tensor"]) > DEVICES[row["device"]]
        mode = f"{row['ahead']} ahead" if ahead else "in turns"
        name = f"{row['release']} {row['model']} {row['gpus']}x{row['device']} {mode}"
        topic = DIVIDED if is_divided else f"{mark}RL step"
        yield compare("NeMo RL", topic, name, row["device"], measured, predicted, row)
        for phase in filter(row.get, phases):
            seconds_of_phase = float(row[phase]), phases[phase]
            yield compare(
                "NeMo RL", f"{mark}phase", f"{name}: {phase}", row["device"], *seconds_of_phase, row
            )
        key = row["release"], row["model"], row["device"]
        rate = int(row["gpus"]) * predicted, int(row["gpus"]) * measured
        if ahead:
            before = in_turns[key]
            name += ": GPU seconds in turns over those ahead"
            gains = before[1] / rate[1], before[0] / rate[0]
            yield compare("NeMo RL", f"{mark}gain by staleness", name, row["device"], *gains, row)
        else:
            in_turns.setdefault(key, rate)


def step_seconds(phases: Mapping[str, float], *, ahead: bool) -> float:
    """Return the seconds of a step, whose phases take turns, or of which generation runs beside training."""
    if not ahead:
        return sum(phases.values())
    return max(phases["generation"], phases["logprobs"] + phases["training"]) + phases["refit"]


def grpo_phases(row: Row, figures: PeerFigures) -> dict[str, float]:
    """Return the seconds of the phases of a step.

    In turns, a `refit` begins with the trainer's state on its way to the host, and the state is `loaded`
    before training.
    """
    device, ahead = hardware(row["device"]), int(row["ahead"])
    training, groups, size = (int(row[key]) for key in ("train_gpus", "prompts", "answers"))
    generating = int(row["gpus"]) - (training if ahead else 0)
    longest, g = int(row["max_length"]), int(row["generate_tensor"])
    workload = cut_workload(int(row["length"]) - PROMPT, longest - PROMPT)
    config, layout = GenConfig(max_running=RUNNING), Layout(generating // g, g)
    host = engine_host(row["device"], figures, LOGPROBS_US)
    engine = costs(row["model"], device, layout, "vllm", host=host, gen=config)
    engine = limit_running(engine, int(row["length"]), float(row["memory"]))
    # Answers for a step are generated with the weights of at most `ahead` steps before, so that as many
    # batches are in flight (`_calculate_target_weights` of NeMo RL's `async_utils`).
    batches = max(1, ahead)
    rollout = RolloutRequest(groups, size, groups * size * batches, batches - 1, 0)
    t, c, e, p = (int(row[f"train_{axis}"]) for axis in ("tensor", "context", "expert", "pipe"))
    trainer = costs(
        row["model"],
        device,
        Layout(training // (t * c * p), t, p, c, min(e, training // (t * p))),
        row["backend"] or "megatron",
        is_overlapping=True,
        is_trainer=True,
        # Where recipes set no `moe_token_dispatcher_type`, it is `alltoall`: Megatron-Bridge's in v0.4 and
        # v0.5, and that of examples/configs/grpo_math_1B.yaml later.
        has_exchange_kernels=bool(row["exchange"]),
        tokens_per_microbatch=longest,
        activation_checkpointing=row["recompute"] == "true",
    )
    num, forwards = int(row["minibatches"]), int(row["forwards"] or 2)
    work = work_of([int(row["length"])] * groups * size, PROMPT, size).share(1 / trainer.layout.num_copies)
    scored = longest * int(row["logprob_batch"])
    scorer = replace(trainer, config=replace(trainer.config, tokens_per_microbatch=scored))
    leaving, loaded = (0.0, 0.0) if ahead else switch_seconds(trainer, engine)
    return {
        "generation": seconds(generate(engine, workload, rollout)),
        "logprobs": forwards * seconds(forward(scorer, work)),
        "training": seconds(train(trainer, work.share(1 / num), num)),
        "refit": leaving + refit_seconds(row, training, generating),
        "loaded": loaded,
    }


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


def switch_seconds(trainer: ReplicaCosts, engine: ReplicaCosts) -> tuple[float, float]:
    """Return the seconds of moving state to the host, and back: weights are pinned, the optimizer's are not.

    Sources: `offload_after_refit` and `move_optimizer` in NeMo RL's Megatron worker, `offload_to_cpu` in
    Megatron's `param_and_grad_buffer.py`, and vLLM's sleep of level 1.
    """
    held = trainer.stage_weights * trainer.itemsize + engine.stage_weights * engine.weight_bytes
    pinned = send(held, trainer.hardware.host, trainer.hardware).seconds
    states = local_weights(trainer) * STATE_BYTES
    return pinned + to_pageable(states), pinned + from_pageable(states)


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
    context: int = 1
    expert: int = 1
    microbatch: int = 0
    """Samples of a micro-batch; 0: as many as the longest response has tokens, or 32,768."""
    is_eager: bool = False
    """Whether the engine launches kernels one by one, without CUDA graphs."""
    memory: float = 0.8
    """The engine's share of a device's memory."""
    optimizer: str = "adamw"
    host: HostTimes | None = None
    """The host of the engine; None: as hflow ships it."""

    def generation(self, gpus: int, mean: float, batches: float = 1) -> float:
        """Return the seconds of generating a batch, with the batches that are in flight."""
        config = GenConfig(max_running=RUNNING, cuda_graphs=not self.is_eager)
        layout = Layout(gpus // self.engine_tensor, self.engine_tensor)
        engine = costs(self.model, hardware(self.device), layout, "vllm", host=self.host, gen=config)
        workload = cut_workload(round(mean), self.max_response)
        engine = limit_running(engine, PROMPT + round(mean), self.memory)
        in_flight = round(self.groups * self.group_size * batches)
        rollout = RolloutRequest(self.groups, self.group_size, in_flight, math.ceil(batches) - 1, 0)
        return seconds(generate(engine, workload, rollout))

    def learning(self, gpus: int, mean: float) -> tuple[float, float]:
        """Return the seconds of a forward pass over the batch, and of its minibatches."""
        layout = Layout(
            gpus // (self.tensor * self.pipe * self.context),
            *(self.tensor, self.pipe, self.context, self.expert),
        )
        tokens = self.microbatch * (PROMPT + round(mean)) or max(32_768, self.max_response + PROMPT)
        trainer = costs(
            self.model,
            hardware(self.device),
            layout,
            self.backend,
            attention="flash-attn",
            is_trainer=True,
            tokens_per_microbatch=tokens,
            activation_checkpointing=True,
            optim=OptimConfig(self.optimizer),
        )
        num = self.groups * self.group_size
        work = work_of([PROMPT + round(mean)] * num, PROMPT, self.group_size).share(1 / layout.num_copies)
        updates = train(trainer, work.share(1 / self.minibatches), self.minibatches)
        return seconds(forward(trainer, work)), seconds(updates)


def verl_async(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield phases in turns, and what generating ahead gains, at lengths that explain training's seconds.

    In turns, parameters go to the host and back three times, for generation, log-probs, and training, and
    optimizer states once, with training (verl/workers/fsdp_workers.py and megatron_workers.py). What goes
    with training is part of its published seconds.
    """
    for row in rows("verl_async"):
        in_turns, ahead = _verl_step(row, "t_answers", figures), _verl_step(row, "answers", figures)
        shape = model(in_turns.model)
        num = num_parameters(shape)
        params, states = num * float(row["parameter_bytes"]), num * float(row["state_bytes"])
        gpus, training = int(row["gpus"]), int(row["train_gpus"])
        updating = float(row["t_update"]) - to_pageable(params + states) - from_pageable(params + states)
        mean = bisect(lambda x, s=in_turns, n=gpus: s.learning(n, x)[1], updating, in_turns.max_response)
        moving = to_pageable(params) + from_pageable(params)
        generation = moving + in_turns.generation(gpus, mean)
        logprobs = moving + int(row["t_forwards"]) * in_turns.learning(gpus, mean)[0]
        together = generation + logprobs + float(row["t_update"])
        updating = float(row["update"])
        mean = bisect(lambda x, s=ahead, n=training: s.learning(n, x)[1], updating, ahead.max_response)
        learning = int(row["forwards"]) * ahead.learning(training, mean)[0] + updating
        apart = max(ahead.generation(gpus - training, mean, float(row["in_flight"])), learning)
        mark = "" if shape.experts is None else "MoE "
        name = f"{row['model']} {gpus}xh20 {row['engine']}"
        for phase, predicted in (("generation", generation), ("logprobs", logprobs)):
            spent = float(row[phase]), predicted
            yield compare("verl", f"{mark}phase", f"{name} in turns: {phase}", "h20", *spent, row)
        gains = float(row["t_step"]) / float(row["step"]), together / apart
        name += f" {row['in_flight']} ahead: seconds in turns over those ahead"
        yield compare("verl", f"{mark}gain by staleness", name, "h20", *gains, row)


def _verl_step(row: Row, answers: str, figures: PeerFigures) -> Step:
    """Return the step of a row. verl's engines of July 2025 launch kernels one by one (`enforce_eager`)."""
    keys = "max_response", "minibatches", "engine_tensor", "tensor", "pipe", "context", "expert", "microbatch"
    return Step(
        model=row["model"],
        device="h20",
        groups=512,
        group_size=int(row[answers]),
        backend={"fsdp": "torch", "megatron": "megatron"}[row["engine"]],
        is_eager=row["is_eager"] == "true",
        host=engine_host("h20", figures, LOGPROBS_US),
        **{key: int(row[key]) for key in keys},
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
            host=engine_host("h20", figures, LOGPROBS_US),
            memory=float(row["memory"]),
            optimizer="adamw_cpu",
        )
        mean, num_bytes = float(row["mean"]), 2 * num_parameters(model(step.model)) / gpus
        generation, (forward_pass, updates) = step.generation(gpus, mean), step.learning(gpus, mean)
        # The policy goes to the host and back for generation, log-probs and training, the reference once.
        switching = to_pageable(4 * num_bytes) + from_pageable(4 * num_bytes)
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
            host=engine_host("h800", figures),
        )
        ahead = replace(in_turns, pipe=int(row["pipe_ahead"]))

        def together(mean: float, step: Step = in_turns, half: int = gpus // 2) -> float:
            return step.generation(half, mean) + sum(step.learning(half, mean))

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
