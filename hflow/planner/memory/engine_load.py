"""The largest load of a generation engine, which its memory is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.ir import Plan
from hflow.planner.memory.rank import Rank
from hflow.planner.traits import traits
from hflow.planner.weights.sharding import padded_units
from hflow.planner.workload import Workload

PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill. A longer prompt is prefilled alone."""


@dataclass(frozen=True)
class EngineLoad:
    """The most that one engine has to hold and compute at once."""

    num_running: int
    """Sequences that decode together."""
    prompt: int
    """Tokens of a prompt."""
    longest: int
    """Tokens of the longest sequence."""
    prefill: int
    """Tokens of the largest prefill."""


def engine_load(plan: Plan, rank: Rank, workloads: dict[str, Workload]) -> EngineLoad:
    """Return the largest load of each engine of a generation replica, from the streams that use it."""
    streams = [stream for stream in plan.schedule.streams if rank.replica.name in stream.replicas]
    group_size = max(stream.group_size for stream in streams)
    num_groups = -(-plan.schedule.settings.max_concurrent // group_size)
    num_running = min(rank.config.gen.max_running, -(-num_groups // rank.data) * group_size)
    prompt = max(workloads[stream.name].prompt for stream in streams)
    longest = max(workloads[stream.name].prompt + workloads[stream.name].max_response for stream in streams)
    if (
        plan.schedule.settings.max_staleness
    ):  # interrupted sequences are prefilled with the tokens that they have
        num_tokens = num_running * longest
    else:  # a group's prompt is prefilled once
        num_tokens = -(-num_running // group_size) * prompt
    return EngineLoad(num_running, prompt, longest, min(max(PREFILL_TOKENS, longest), num_tokens))


def engine_weights(rank: Rank) -> int:
    """Return the bytes of the engine's own weights on one rank, with the padding of the vocabulary.

    Adapters are beside them in an engine that does not merge them.
    """
    shape = rank.shape
    rows = padded_units(shape.vocab, rank.traits, rank.tensor) // rank.tensor
    num_matrices = 1 if shape.is_tied else 2
    padding = (rows - min(shape.vocab, rows)) * shape.hidden * num_matrices
    keeps_adapters = rank.config.lora is not None and not traits(rank.replica.backend).merges_adapters
    adapters = rank.trained.total if keeps_adapters else 0
    return rank.width * (rank.sizes.total + padding + adapters)


def cache_bytes_per_token(rank: Rank) -> int:
    """Return the bytes of one token's keys and values on one rank, in layers without a window.

    The vectors of latent attention are those of all heads, so every tensor rank holds them.
    """
    if rank.shape.latent is not None:
        return rank.width * rank.sizes.num_layers * rank.shape.latent.cached
    return 2 * rank.width * rank.sizes.num_layers * rank.key_value_size // rank.tensor
