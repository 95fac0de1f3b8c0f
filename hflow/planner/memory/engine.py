"""Bytes of a generation engine: its weights, its KV cache, and what a step computes.

`embedded` has a cache of slots, as many as sequences may run and as long as the longest has grown. `vllm`
has a cache of blocks, for which it takes what its budget leaves, up to the demand.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.ir import Plan
from hflow.planner.memory import activations
from hflow.planner.memory.byte_counts import Items, largest
from hflow.planner.memory.rank import Rank
from hflow.planner.workload import Workload

TOKENS_PER_STEP = 8192
"""Prompt tokens that enter at one step; a longer prompt enters alone."""
LENGTH_STEP = 16
"""The embedded engine pads lengths to a multiple of this (`embedded_engine/cache.py`)."""
SAMPLING_BYTES = 24
"""Bytes a logit beside the logit: log-probs and probabilities in fp32, sums and their input in fp64."""
VLLM_BUDGET = 0.9
"""Share of a device's memory that vLLM takes at most (its `gpu_memory_utilization`)."""
FP32 = 4


@dataclass(frozen=True)
class Load:
    """The most that one engine is asked for at once."""

    num_running: int
    """Sequences that decode together."""
    prompt: int
    """Tokens of a prompt."""
    longest: int
    """Tokens of the longest sequence."""
    entering: int
    """Tokens that enter at one step."""


def engine_load(plan: Plan, rank: Rank, lengths: dict[str, Workload]) -> Load:
    """What the streams of a generation replica ask of each of its engines."""
    streams = [stream for stream in plan.schedule.streams if rank.replica.name in stream.replicas]
    size = max(stream.group_size for stream in streams)
    num_groups = -(-plan.schedule.settings.max_concurrent // size)
    num_running = min(rank.asked.max_running, -(-num_groups // rank.data) * size)
    prompt = max(lengths[stream.name].prompt for stream in streams)
    longest = max(lengths[stream.name].prompt + lengths[stream.name].max_response for stream in streams)
    # Interrupted sequences enter again with what they have.
    distinct = (
        num_running * longest if plan.schedule.settings.max_staleness else -(-num_running // size) * prompt
    )
    return Load(num_running, prompt, longest, min(max(TOKENS_PER_STEP, longest), distinct))


def weights(rank: Rank) -> int:
    """Bytes of the engine's own weights on one of its ranks."""
    return rank.width * rank.sizes.whole


def cache_per_token(rank: Rank) -> int:
    """Bytes of one token's keys and values on one rank."""
    return 2 * rank.width * rank.sizes.num_layers * rank.key_value_size // rank.tensor


def cache(rank: Rank, load: Load, room: int) -> int:
    """Bytes of the KV cache.

    Args:
        rank: of the engine.
        load: what is asked of it.
        room: bytes that are left on the device: the most that vLLM takes, but for one sequence.
    """
    if rank.replica.backend == "embedded":
        return cache_per_token(rank) * load.num_running * reserved_length(load.prompt, load.longest)
    demand = cache_per_token(rank) * load.num_running * load.longest
    return max(min(demand, room), cache_per_token(rank) * load.longest)


def step(rank: Rank, load: Load) -> Items:
    """What a step needs beside weights and cache: prompts that enter, attention scores, or logits."""
    entering = activations.passing_layer(rank, load.entering, pads=True)
    is_embedded = rank.replica.backend == "embedded"
    moments = [Items(activations=entering)]
    if is_embedded:
        reserved = reserved_length(load.prompt, load.longest)
        per_layer = cache_per_token(rank) // max(rank.sizes.num_layers, 1)
        moments.append(Items({"grown cache": per_layer * load.num_running * reserved * 4 // 5}))
        if rank.width == FP32:
            scores = 2 * FP32 * rank.shape.num_heads // rank.tensor * load.num_running * load.longest
            moments.append(Items(activations=scores))
    if rank.is_last_stage:
        rows = load.num_running * -(-rank.shape.vocab // rank.tensor)
        sampled = rank.width + (SAMPLING_BYTES if is_embedded else 2 * FP32)
        moments.append(Items(logits=sampled * rows + activations.reordered_output(rank)))
    return largest(moments)


def reserved_length(prompt: int, longest: int) -> int:
    """Tokens a slot of the embedded engine when sequences of that prompt have reached the longest length.

    A cache that is too short grows to what is needed, or by a quarter where that is more.
    """
    length = _padded(prompt)
    while length < longest - 1:
        length = _padded(max(length + 1, length * 5 // 4))
    return length


def _padded(num_tokens: int) -> int:
    return max(2 * LENGTH_STEP, -(-num_tokens // LENGTH_STEP) * LENGTH_STEP)
