"""Seconds of generating one batch: prompts, then token by token with continuous batching.

An engine that has fewer sequences than slots decodes all of them at once, and ever fewer as they
finish. A synchronous step lasts until the busiest engine has its last sample, which is taken to be as
long as the longest of the whole batch is on average. Where further batches may be under way, their
samples fill the slots that become free, and nobody waits.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hflow.planner.cost.collectives import Wire, all_reduce, send
from hflow.planner.cost.flops import (
    Work,
    head_parameters,
    kv_entries,
    layer_parameters,
    stage_flops,
    token_flops,
    work_of,
)
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import COMPUTE, LATENCY, MEMORY, Part, bound
from hflow.planner.workload import Workload, expected_max, sample_lengths

PREFILL_TOKENS = 8192
"""Prompt tokens that engines compute in one step."""


@dataclass(frozen=True)
class Rollout:
    """What generation is asked for."""

    groups: int
    """Groups of a batch."""
    group_size: int
    max_concurrent: int
    """Samples in flight, over all engines."""
    ahead: int
    """Further batches whose samples may be under way before this one is trained on."""
    seed: int

    def slots(self, side: ReplicaCosts) -> tuple[int, int]:
        """Engines of a replica that have something to do, and the sequences that each decodes at once."""
        in_flight = min((self.ahead + 1) * self.groups, max(1, self.max_concurrent // self.group_size))
        engines = min(side.layout.data, in_flight)
        return engines, min(side.asked.gen.max_running, math.ceil(in_flight / engines) * self.group_size)


class Phase(NamedTuple):
    """Steps in which an engine's batch stays the same."""

    num_steps: float
    sequences: float
    context: float
    """Tokens that all of them have so far, on average over the steps."""


def generate(side: ReplicaCosts, workload: Workload, rollout: Rollout) -> list[Part]:
    """Seconds of one whole batch on the busiest engine.

    The tail is the part in which less than half as many sequences run as at most.
    """
    engines, slots = rollout.slots(side)
    groups: float = math.ceil(rollout.groups / engines)
    if rollout.ahead:
        groups = rollout.groups / engines
        phases = [_steady(workload, rollout, engines, slots)]
    else:
        lengths = _lengths(workload, rollout, int(groups) * rollout.group_size)
        phases = list(replay(lengths, workload.prompt, slots))
    prompts = work_of([workload.prompt], workload.prompt, 1).share(groups)
    most = max((phase.sequences for phase in phases), default=0)
    full = [phase for phase in phases if phase.sequences >= most / 2]
    tail = [phase for phase in phases if phase.sequences < most / 2]
    return [*_prefill(side, prompts), *_decode("decode", side, full), *_decode("tail", side, tail)]


def batch_tokens(side: ReplicaCosts, workload: Workload, rollout: Rollout) -> float:
    """Tokens, drawn one after the other, that a batch takes as long as on the busiest engine."""
    engines, slots = rollout.slots(side)
    num = rollout.groups * rollout.group_size
    if rollout.ahead:
        lengths = sample_lengths(workload, num, rollout.seed)
        return (sum(lengths) - num * workload.prompt) / engines / slots
    lengths = _lengths(workload, rollout, math.ceil(rollout.groups / engines) * rollout.group_size)
    return sum(phase.num_steps for phase in replay([n + 1 for n in lengths], workload.prompt, slots))


def replay(responses: Iterable[int], prompt: int, slots: int) -> Iterator[Phase]:
    """Continuous batching: a sequence enters when a slot is free, and leaves with its last token.

    The first token of a response comes with its prompt's forward, so L tokens take L - 1 steps.

    Args:
        responses: tokens of each response, in the order of entering.
        prompt: tokens of each prompt.
        slots: sequences that are decoded at once.
    """
    waiting = deque(responses)
    running: list[tuple[int, int]] = []
    now, context = 0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            response = waiting.popleft()
            heapq.heappush(running, (now + response - 1, prompt + response))
            context += prompt + 1
        num_steps, batch = running[0][0] - now, len(running)
        if num_steps:
            yield Phase(num_steps, batch, context + batch * (num_steps - 1) / 2)
        now, context = now + num_steps, context + batch * num_steps
        while running and running[0][0] == now:
            context -= heapq.heappop(running)[1]


def _lengths(workload: Workload, rollout: Rollout, num: int) -> list[int]:
    """Responses of the busiest engine, of which one is the longest of the whole batch."""
    lengths = [total - workload.prompt for total in sample_lengths(workload, num, rollout.seed)]
    longest = expected_max(workload, rollout.groups * rollout.group_size)
    lengths[lengths.index(max(lengths))] = max(max(lengths), round(longest))
    return lengths


def _steady(workload: Workload, rollout: Rollout, engines: int, slots: int) -> Phase:
    """One engine's share of a batch's tokens, decoded with its slots always full."""
    num = rollout.groups * rollout.group_size
    steps = [total - workload.prompt - 1 for total in sample_lengths(workload, num, rollout.seed)]
    seen = sum(n * (n + 1) / 2 for n in steps) / max(1, sum(steps))
    return Phase(sum(steps) / engines / slots, slots, slots * (workload.prompt + seen))


def _prefill(side: ReplicaCosts, prompts: Work) -> list[Part]:
    """Prompts, each computed once for its group; pipeline stages are kept busy."""
    layout, num = side.layout, math.ceil(prompts.rows / PREFILL_TOKENS)
    flops = stage_flops(side.shape, prompts, layout.pipe, 1, 1) / layout.tensor
    weights = num * _weight_bytes(side) / layout.pipe
    message = prompts.rows / num * side.shape.hidden * side.itemsize
    wire = all_reduce(message, side.tensor, side.hardware)
    num_reduces = 2 * side.shape.num_layers / layout.pipe * num if layout.tensor > 1 else 0
    return [
        bound("prefill", flops, weights, side.rates, num * side.host_seconds),
        wire.times(num_reduces).part("prefill collectives"),
    ]


def _decode(name: str, side: ReplicaCosts, phases: Sequence[Phase]) -> list[Part]:
    """Steps of the same kind, by what bounds most of them."""
    seconds = {COMPUTE: 0.0, MEMORY: 0.0, LATENCY: 0.0}
    wire = Wire()
    for phase in phases:
        step = decode_step(side, phase.sequences, phase.context)
        seconds[step.limit] += step.seconds * phase.num_steps
        wire += _step_wire(side, phase.sequences).times(phase.num_steps)
    limit = max(seconds, key=seconds.__getitem__)
    return [Part(name, sum(seconds.values()), limit), wire.part(f"{name} collectives")]


def decode_step(side: ReplicaCosts, num_sequences: float, context: float) -> Part:
    """One token for every running sequence.

    With p stages, p parts of the batch are under way: a stage reads its weights for each of them, so
    that stages share the work and the keys and values, but not the reading of weights.

    Args:
        side: the engine's replica.
        num_sequences: how many run.
        context: tokens that they have together.
    """
    t, p = side.layout.tensor, side.layout.pipe
    flops = token_flops(side.shape, num_sequences, context) / (t * p)
    cached = kv_entries(side.shape, t) * side.itemsize * context / p
    step = bound("decode", flops, _weight_bytes(side) + cached, side.rates, p * side.host_seconds)
    between = side.backend.step_host_ms * 1e-3
    return Part(step.name, step.seconds + between, step.limit if step.seconds >= between else LATENCY)


def _step_wire(side: ReplicaCosts, num_sequences: float) -> Wire:
    """What a step's parts of the batch send: two all-reduces a layer, and hidden states between stages."""
    t, p = side.layout.tensor, side.layout.pipe
    message = num_sequences / p * side.shape.hidden * side.itemsize
    wire = Wire()
    if t > 1:
        wire += all_reduce(message, side.tensor, side.hardware).times(2 * side.shape.num_layers)
    if p > 1:
        wire += send(message / t, side.stage_link, side.hardware).times(p)
    return wire


def _weight_bytes(side: ReplicaCosts) -> float:
    """Bytes of all stages' matrices on a tensor rank; of the embedding only a few rows are read."""
    matrices = side.shape.num_layers * layer_parameters(side.shape) + head_parameters(side.shape)
    return matrices * side.itemsize / side.layout.tensor
