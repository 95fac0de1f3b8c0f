"""Seconds of generating one batch: prefill, then decoding with continuous batching.

An engine with fewer sequences than slots decodes all of them at once, and fewer as they finish. A synchronous
step lasts until the busiest engine has its last sample, which is assumed to be as long as the expected
maximum of the whole batch. In an asynchronous run, samples of later batches fill the free slots.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hflow.planner.forecast.cost.collectives import LinkTime, all_reduce, send
from hflow.planner.forecast.cost.flops import (
    Work,
    head_parameters,
    kv_entries,
    layer_parameters,
    token_flops,
    touched_experts,
    work_of,
)
from hflow.planner.forecast.cost.kernels import attention_rate, elementwise_bytes, pass_seconds, product_rate
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts, expert_exchange
from hflow.planner.forecast.cost.roofline import HOST, Part, main_limit, roofline
from hflow.planner.plan.workload import Workload, expected_max, sample_lengths
from hflow.shapes.model_shape import cached_tokens

PREFILL_TOKENS = 8192
"""Prompt tokens that engines prefill in one step."""


@dataclass(frozen=True)
class RolloutRequest:
    """The batch to generate, and how many batches may be in flight."""

    groups: int
    """Groups of a batch."""
    group_size: int
    max_concurrent: int
    """Samples in flight, over all engines."""
    ahead: int
    """Later batches that may be generated before this one is trained on."""
    seed: int

    def slots(self, replica: ReplicaCosts) -> tuple[int, int]:
        """Return the engines of a replica that have work, and the sequences that each decodes at once."""
        in_flight = min((self.ahead + 1) * self.groups, max(1, self.max_concurrent // self.group_size))
        engines = min(replica.layout.data, in_flight)
        return engines, min(replica.config.gen.max_running, math.ceil(in_flight / engines) * self.group_size)


class DecodePhase(NamedTuple):
    """Consecutive steps in which an engine decodes the same sequences."""

    num_steps: float
    sequences: float
    context: float
    """Tokens that all sequences have together, on average over the steps."""


def generate(replica: ReplicaCosts, workload: Workload, rollout: RolloutRequest) -> list[Part]:
    """Return the seconds of one whole batch on the busiest engine.

    The tail is the part in which fewer than half of the maximum number of sequences run.
    """
    batch = engine_batch(replica, workload, rollout)
    decoding, tail = _decode("decode", replica, batch.full), _decode("tail", replica, batch.tail)
    return [*prefill(replica, batch.prompts), *decoding, *tail]


@dataclass(frozen=True)
class EngineBatch:
    """The busiest engine's part of a batch."""

    prompts: Work
    full: Sequence[DecodePhase]
    """Steps with at least half of the maximum number of sequences."""
    tail: Sequence[DecodePhase]
    """Steps with fewer."""


def engine_batch(replica: ReplicaCosts, workload: Workload, rollout: RolloutRequest) -> EngineBatch:
    """Return the busiest engine's part of a batch."""
    engines, slots = rollout.slots(replica)
    groups: float = math.ceil(rollout.groups / engines)
    phases: Sequence[DecodePhase]
    if rollout.ahead:
        groups = rollout.groups / engines
        phases = (_steady_phase(workload, rollout, engines, slots),)
    else:
        phases = _busiest_engine_phases(workload, rollout, int(groups) * rollout.group_size, slots)
    most = max((phase.sequences for phase in phases), default=0)
    full = [phase for phase in phases if phase.sequences >= most / 2]
    tail = [phase for phase in phases if phase.sequences < most / 2]
    return EngineBatch(_prompts(workload).share(groups), full, tail)


def seconds_per_token(
    replica: ReplicaCosts, workload: Workload, rollout: RolloutRequest, num_running: float
) -> float:
    """Return the seconds in which each running response gets one token, with its part of the prompts' time.

    Prefill makes the first token, so a response of mean length L takes L - 1 steps. `num_running` responses
    run over all engines, which have equally many.
    """
    engines, slots = rollout.slots(replica)
    one = _steady_phase(workload, rollout, engines, slots)
    num = num_running / engines
    context = num * one.context / one.sequences
    step = decode_step(replica, num, context).seconds + decode_collectives(replica, num).seconds
    groups = rollout.groups / engines
    prompts = _prompts(workload).share(groups)
    mean = expected_max(workload, 1)
    filling = sum(part.seconds for part in prefill(replica, prompts)) / (groups * rollout.group_size)
    return ((mean - 1) * step + num * filling) / mean


def _prompts(workload: Workload) -> Work:
    """Return the work of a prompt with its images."""
    return work_of([workload.prompt], workload.prompt, 1, images=workload.images)


def continuous_batching(responses: Iterable[int], prompt: int, slots: int) -> Iterator[DecodePhase]:
    """Yield the phases of continuous batching: a sequence starts when a slot is free.

    Prefill makes the first token of a response, so L tokens take L - 1 steps. `responses` has the tokens of
    each in the order in which they start, `prompt` those of every prompt.
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
            yield DecodePhase(num_steps, batch, context + batch * (num_steps - 1) / 2)
        now, context = now + num_steps, context + batch * num_steps
        while running and running[0][0] == now:
            context -= heapq.heappop(running)[1]


@lru_cache
def _busiest_engine_phases(
    workload: Workload, rollout: RolloutRequest, num: int, slots: int
) -> tuple[DecodePhase, ...]:
    """Return the phases of the busiest engine with `num` responses, one of which is the batch's longest."""
    lengths = [total - workload.prompt for total in sample_lengths(workload, num, rollout.seed)]
    longest = expected_max(workload, rollout.groups * rollout.group_size)
    lengths[lengths.index(max(lengths))] = max(max(lengths), round(longest))
    return tuple(continuous_batching(lengths, workload.prompt, slots))


def _steady_phase(workload: Workload, rollout: RolloutRequest, engines: int, slots: int) -> DecodePhase:
    """Return one engine's part of a batch, decoded with all slots in use."""
    num = rollout.groups * rollout.group_size
    steps = [total - workload.prompt - 1 for total in sample_lengths(workload, num, rollout.seed)]
    seen = sum(n * (n + 1) / 2 for n in steps) / max(1, sum(steps))
    return DecodePhase(sum(steps) / engines / slots, slots, slots * (workload.prompt + seen))


def prefill(replica: ReplicaCosts, prompts: Work) -> list[Part]:
    """Return the seconds of prompts, each computed once for its group, with all pipeline stages busy."""
    layout, num = replica.layout, math.ceil(prompts.rows / PREFILL_TOKENS)
    compute = pass_seconds(replica, prompts, num, 1, 1, 1)
    weights = num * _weight_bytes(replica, prompts.rows / num) / layout.pipe
    message = prompts.rows / num * replica.shape.hidden * replica.itemsize
    link_time = all_reduce(message, replica.tensor, replica.hardware)
    num_reduces = 2 * replica.shape.num_layers / layout.pipe * num if layout.tensor > 1 else 0
    return [
        roofline(
            "prefill",
            compute,
            weights / replica.rates.memory,
            num * replica.host_seconds,
            is_ahead=replica.launches_ahead,
        ),
        Part("experts' host", num * replica.expert_seconds, HOST),
        (link_time.times(num_reduces) + expert_exchange(replica, prompts.rows / num).times(num)).part(
            "prefill collectives"
        ),
    ]


def _decode(name: str, replica: ReplicaCosts, phases: Sequence[DecodePhase]) -> list[Part]:
    """Return the seconds of decoding, with the limit of most of them."""
    step_of = DecodeStep(replica)
    steps = [step_of(phase.sequences, phase.context).times(phase.num_steps) for phase in phases]
    num_steps = sum(phase.num_steps for phase in phases)
    # The time of collectives is linear in the sequences, so that their mean is enough.
    sequences = sum(phase.sequences * phase.num_steps for phase in phases) / num_steps if num_steps else 0.0
    link_time = decode_collectives(replica, sequences).times(num_steps)
    decoding = Part(name, sum(step.seconds for step in steps), main_limit(steps))
    return [decoding, link_time.part(f"{name} collectives")]


def decode_step(replica: ReplicaCosts, num_sequences: float, context: float) -> Part:
    """Return the seconds of one token for every running sequence: products, attention, and gaps.

    With p stages, p parts of the batch are in the pipeline. A stage reads its weights for each of them, so
    stages divide the arithmetic and the cache, but not the reading of weights. `context` are the tokens that
    all running sequences have together.
    """
    return DecodeStep(replica)(num_sequences, context)


class DecodeSeconds(NamedTuple):
    """Seconds of a decode step by kind. Not all of them add up: the host may work beside the device."""

    products: Part
    attention: Part
    others: float
    """Element-wise kernels, and draws."""
    gaps: float
    """Between the kernels of a CUDA graph."""
    launching: float
    """The host launches kernels that are in no CUDA graph."""
    scheduling: float
    """The host schedules, prepares inputs and handles tokens."""
    experts: float
    """The device waits for the host in layers with experts."""


class DecodeStep:
    """The seconds of `decode_step` for one replica.

    A batch has hundreds of different steps. What does not depend on the sequences is computed once, and what
    does not depend on the context once for each number of sequences.
    """

    def __init__(self, replica: ReplicaCosts) -> None:
        shape, (t, p) = replica.shape, (replica.layout.tensor, replica.layout.pipe)
        self._replica = replica
        flops = token_flops(shape, 1, 0)
        self._head_flops = 2 * head_parameters(shape) / (t * p)
        self._layer_flops = flops / (t * p) - self._head_flops
        self._pair_seconds = (token_flops(shape, 1, 1) - flops) / (t * p) / attention_rate(replica)
        self._cache_seconds = kv_entries(shape, t) * replica.cache_bytes / p / replica.rates.memory
        self._weight_bytes = None if shape.experts else _weight_bytes(replica, 1)
        self._sharpness = replica.hardware.calibration.memory.sharpness
        self._launching = 0.0 if replica.captures_decode else p * replica.host_seconds
        self._gaps = replica.host.gap_us * 1e-6 * shape.num_layers
        has_passes = replica.host.passes is not None
        others = shape.num_layers * elementwise_bytes(replica, 1) / p if has_passes else 0.0
        if replica.launches_ahead:
            others += replica.traits.logit_passes * replica.itemsize * shape.vocab / t
        self._other_seconds = others / replica.rates.stream
        self._expert_seconds = p * replica.expert_seconds
        self._products: dict[float, Part] = {}

    def seconds(self, num_sequences: float, context: float) -> DecodeSeconds:
        """Return the seconds of a step by kind; the arguments are those of `decode_step`."""
        replica, host = self._replica, self._replica.host
        if num_sequences not in self._products:
            self._products[num_sequences] = self._products_of(num_sequences)
        tokens = num_sequences * cached_tokens(replica.shape, context / num_sequences)
        return DecodeSeconds(
            self._products[num_sequences],
            roofline("attention", self._pair_seconds * tokens, self._cache_seconds * tokens),
            self._other_seconds * num_sequences,
            self._gaps,
            self._launching,
            (host.step_us + host.sequence_us * num_sequences) * 1e-6,
            self._expert_seconds,
        )

    def __call__(self, num_sequences: float, context: float) -> Part:
        """Return the seconds of a step; the arguments are those of `decode_step`."""
        replica, step = self._replica, self.seconds(num_sequences, context)
        products, attention, launching, experts = step.products, step.attention, step.launching, step.experts
        largest = products if products.seconds >= attention.seconds else attention
        device = products.seconds + attention.seconds + step.others
        launched = device + step.gaps
        seconds = max(launched, launching) if replica.launches_ahead else launched + launching
        added, beside = step.scheduling, 0.0
        if replica.schedules_ahead:  # the host does one after the other
            added, beside = 0.0, step.scheduling + launching
        is_waiting = max(step.gaps + experts + added, beside, launching) > device
        limit = HOST if is_waiting else largest.limit
        return Part("decode", max(replica.expert_wait * (seconds + experts) + added, beside), limit)

    def _products_of(self, num_sequences: float) -> Part:
        """Return the seconds of a step's products of matrices."""
        replica, rows = self._replica, num_sequences / self._replica.layout.pipe
        weights = _weight_bytes(replica, rows) if self._weight_bytes is None else self._weight_bytes
        compute = self._layer_flops * num_sequences / product_rate(replica, rows, is_captured=True)
        rate = product_rate(replica.unquantized, rows, is_captured=True)
        compute += self._head_flops * num_sequences / rate
        return roofline("decode", compute, weights / replica.rates.memory, sharpness=self._sharpness)


def decode_collectives(replica: ReplicaCosts, num_sequences: float) -> LinkTime:
    """Return the time of a step's collectives: two all-reduces per layer, and sends between stages."""
    t, p = replica.layout.tensor, replica.layout.pipe
    message = num_sequences / p * replica.shape.hidden * replica.itemsize
    link_time = LinkTime()
    if t > 1:
        link_time += all_reduce(message, replica.tensor, replica.hardware).times(2 * replica.shape.num_layers)
    if p > 1:
        link_time += send(message / t, replica.stage_link, replica.hardware).times(p)
    link_time += expert_exchange(replica, num_sequences / p).times(p)
    return link_time.times(replica.expert_wait)


def _weight_bytes(replica: ReplicaCosts, num_tokens: float) -> float:
    """Return the bytes of all stages' matrices on a tensor rank that some tokens need.

    Few rows of the embedding are read. Of the experts those are that any token is routed to: where ranks
    divide them, of the tokens of all of these.
    """
    shape = replica.shape
    ranks = replica.layout.expert
    touched = touched_experts(shape, num_tokens * ranks)
    layers = shape.num_layers * layer_parameters(shape, None if touched is None else touched / ranks)
    num_bytes = layers * replica.weight_bytes + head_parameters(shape) * replica.other_bytes
    return num_bytes / replica.layout.tensor
