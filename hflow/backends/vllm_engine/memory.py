"""Memory formulas of the vLLM engine: a cache of blocks, as large as the budget allows and the load needs."""

from __future__ import annotations

from hflow.planner.forecast import MemoryCategory
from hflow.planner.memory import activations
from hflow.planner.memory.engine_load import EngineLoad, cache_bytes_per_token
from hflow.planner.memory.items import Items, item, largest
from hflow.planner.memory.rank import FP32_BYTES, Rank

MEMORY_BUDGET = 0.9
"""Fraction of a device's memory that vLLM uses at most (its `gpu_memory_utilization`)."""
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache on a CPU."""


def cache_bytes(rank: Rank, load: EngineLoad, capacity: int, used: int) -> int:
    """Return the size of the KV cache: what the load needs, within the budget, but at least one sequence."""
    per_token = cache_bytes_per_token(rank)
    available = round(MEMORY_BUDGET * capacity) - used
    return max(min(per_token * load.num_running * load.longest, available), per_token * load.longest)


def decode_step(rank: Rank, load: EngineLoad) -> Items:
    """Return the peak of a step beyond weights and cache: the prefill, or the logits."""
    prefill = activations.layer_without_gradient(rank, load.prefill, pads=True)
    moments = [item(MemoryCategory.ACTIVATIONS, prefill)]
    if rank.is_last_stage:
        num_logits = load.num_running * -(-rank.shape.vocab // rank.tensor)
        logits = (rank.width + 2 * FP32_BYTES) * num_logits
        moments.append(item(MemoryCategory.LOGITS, logits + activations.reordered_output(rank)))
    return largest(moments)
