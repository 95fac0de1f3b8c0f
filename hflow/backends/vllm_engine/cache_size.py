"""The size of vLLM's KV cache on a CPU without a plan, where vLLM does not choose it by itself."""

from __future__ import annotations

import os
from typing import Any

from hflow.backends.vllm_engine.memory import CPU_BLOCK_TOKENS

_ENTRY_BYTES = {"fp32": 4, "bf16": 2}
_MEMORY_FRACTION = 0.25
"""Fraction of the machine's memory that the caches of an engine take at most, beyond one sequence."""


def cache_bytes(config: Any, dtype: str, max_running: int, max_length: int, tensor: int) -> int:
    """Return the bytes of each rank's cache: whole blocks for `max_running` of the longest sequences.

    Args:
        config: the model's HF config.
        dtype: `fp32` or `bf16`.
        max_running: sequences that run at once.
        max_length: tokens of the longest.
        tensor: tensor ranks, which share the key-value heads.
    """
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    heads = -(-(getattr(config, "num_key_value_heads", None) or num_heads) // tensor)
    block: int = CPU_BLOCK_TOKENS * 2 * config.num_hidden_layers * heads * head_size * _ENTRY_BYTES[dtype]
    blocks = -(-max_length // CPU_BLOCK_TOKENS)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _MEMORY_FRACTION / tensor
    wanted = min(max_running * blocks, int(available) // block)
    return block * (max(wanted, blocks) + 1)  # vLLM keeps one block empty
