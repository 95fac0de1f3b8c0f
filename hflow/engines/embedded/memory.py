"""Memory formulas of the embedded engine.

On a CPU its cache has a slot for each sequence that may run, and all slots are as long as the longest
sequence so far. On an accelerator it is a pool of pages, of a fixed size.
"""

from __future__ import annotations

import math

from hflow.planner.forecast.memory import activations, parts
from hflow.planner.forecast.memory.parts import (
    GRAPH_BYTES,
    MEMORY_BUDGET,
    PREFILL_TOKENS,
    EngineLoad,
    Items,
    fitting_cache,
    item,
    largest,
)
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.traits import traits

LENGTH_STEP = 16
"""Slot lengths are multiples of this (`engines/embedded/cache.py`)."""
PAGE_TOKENS = 16
"""Tokens of a page (`engines/embedded/pages.py`)."""
SAMPLING_BYTES = 24
"""Bytes that sampling needs for each logit, beyond the logit: log-probs and probabilities in fp32, cumulative
sums and their input in fp64."""
MIN_ARRANGED = 1 << 18
"""Elements of a matrix from which on a CPU keeps an arranged copy (`engines/embedded/dense_decoder.py`)."""
_ROWS_STEP = 32
"""Beyond this, numbers of rows of captured steps are multiples of it."""
_FEWEST_ROWS = (4, 8, 16)


def cache_bytes(rank: Rank, load: EngineLoad, capacity: int, used: int) -> int:
    """Return the size of the KV cache.

    Pages take `cache_gib`, or what the load needs within the budget; slots what the load needs.
    """
    if not rank.on_cpu:
        configured = rank.config.gen.cache_gib
        if configured is not None:
            return round(configured * GIB)
        wanted, available = (
            load.num_running * _num_pages(load.longest),
            round(MEMORY_BUDGET * capacity) - used,
        )
        return fitting_cache(page_bytes(rank), wanted, available, smallest_cache(rank))
    return cache_bytes_per_token(rank) * load.num_running * slot_length(load.prompt, load.longest)


def cache_bytes_per_token(rank: Rank) -> int:
    """Return the bytes of one token's keys and values.

    The modules of transformers make those of all heads from the vectors of latent attention, and layers with
    a window keep all tokens.
    """
    if (latent := rank.shape.latent) is None:
        return parts.cache_bytes_per_token(rank)
    per_head = latent.nope + latent.rope + latent.value
    return rank.width * rank.sizes.num_layers * rank.shape.num_heads * per_head


def page_bytes(rank: Rank) -> int:
    """Return the bytes of a page on an accelerator."""
    return PAGE_TOKENS * cache_bytes_per_token(rank)


def smallest_cache(rank: Rank) -> int:
    """Return the bytes of the smallest cache of pages: one sequence of `max_model_len`, and a spare page."""
    return page_bytes(rank) * (1 + _num_pages(rank.config.gen.max_model_len))


def decode_step(rank: Rank, load: EngineLoad) -> Items:
    """Return the peak of a step beyond weights and cache.

    It is at the prefill, at the logits, or on a CPU at the growth of a layer's cache, or at the attention
    scores in fp32. A cache of pages may be full, and sequences are prefilled again with the tokens they have.
    Captured steps are there until the engine sleeps.
    """
    most = min(max(PREFILL_TOKENS, load.longest), load.num_running * load.longest)
    prefill = activations.layer_without_gradient(rank, load.prefill if rank.on_cpu else most, pads=True)
    tower = activations.tower_without_gradient(rank, load.patches)
    moments = [item(MemoryCategory.ACTIVATIONS, max(prefill, tower))]
    if rank.on_cpu:
        layer_bytes_per_token = cache_bytes_per_token(rank) // max(rank.sizes.num_layers, 1)
        num_slot_tokens = load.num_running * slot_length(load.prompt, load.longest)
        grown_cache = layer_bytes_per_token * num_slot_tokens * 4 // 5
        moments.append(item(MemoryCategory.KV_CACHE, grown_cache, "grown cache"))
    if rank.on_cpu and rank.width == FP32_BYTES:
        scores = 2 * FP32_BYTES * rank.shape.num_heads // rank.tensor * load.num_running * load.longest
        moments.append(item(MemoryCategory.ACTIVATIONS, scores))
    if rank.is_last_stage:
        num_logits = load.num_running * -(-rank.shape.vocab // rank.tensor)
        logits = (rank.width + SAMPLING_BYTES) * num_logits
        moments.append(item(MemoryCategory.LOGITS, logits + activations.reordered_output(rank)))
    features = activations.image_features(rank, load.image_tokens)
    copies = item(MemoryCategory.WEIGHTS, arranged_weights(rank), "arranged weights")
    features_held = item(MemoryCategory.ACTIVATIONS, features, "embeddings of images")
    return largest(moments) + features_held + copies + captured_steps(rank)


def arranged_weights(rank: Rank) -> int:
    """Return the bytes of the copies that decoding in fp32 on a CPU keeps of large matrices."""
    shape, layers = rank.shape, rank.sizes.num_layers
    if not rank.on_cpu or rank.width != FP32_BYTES:
        return 0
    of_layer = (
        rank.query_size + 2 * rank.key_value_size,
        rank.query_size,
        2 * shape.intermediate,
        shape.intermediate,
    )
    rows = [(layers, num) for num in of_layer] + [(1, shape.vocab)]
    return rank.width * sum(num * m * shape.hidden for num, m in rows if m * shape.hidden >= MIN_ARRANGED)


def layer_being_loaded(rank: Rank, num_parts: int) -> Items:
    """Return nothing: slices are copied into the engine's own tensors."""
    return Items()


def process_state(rank: Rank, overhead: int) -> Items:
    """Return nothing: the engine is in the process of its worker."""
    return Items()


def captured_steps(rank: Rank) -> Items:
    """Return the memory of captured decode steps: kernels, results, and what they compute in between."""
    captures = traits(rank.replica.backend).captures(rank.shape.family, rank.config.lora is not None)
    if rank.on_cpu or not captures or not rank.config.gen.cuda_graphs:
        return Items()
    rows = graph_rows(rank.config.gen.max_running)
    kernels = len(rows) * rank.shape.num_layers * GRAPH_BYTES
    results = sum(rows) * rank.shape.hidden * rank.width
    between = activations.layer_without_gradient(rank, rows[-1], pads=False)
    return item(MemoryCategory.RUNTIME, kernels + results + between, "CUDA graphs")


def graph_rows(max_running: int) -> tuple[int, ...]:
    """Return the numbers of rows that have a graph: 4, 8, 16, multiples of 32, and the largest."""
    multiples = range(_ROWS_STEP, max_running, _ROWS_STEP)
    smaller = [rows for rows in (*_FEWEST_ROWS, *multiples) if rows < max_running]
    return (*smaller, max(max_running, _FEWEST_ROWS[0]))


def max_sequences(rank: Rank, cache: int, length: float) -> int | None:
    """Return the sequences of a length that a cache of pages holds, if they share none; None for slots."""
    if rank.on_cpu:
        return None
    return max(1, (cache // page_bytes(rank) - 1) // _num_pages(length))


def _num_pages(length: float) -> int:
    return math.ceil(length / PAGE_TOKENS)


def slot_length(prompt: int, longest: int) -> int:
    """Return the tokens of a slot once sequences with that prompt have reached the longest length.

    A cache that is too short grows to what is needed, or by a quarter where that is more.
    """
    length = _padded(prompt)
    while length < longest - 1:
        length = _padded(max(length + 1, length * 5 // 4))
    return length


def _padded(num_tokens: int) -> int:
    return max(2 * LENGTH_STEP, -(-num_tokens // LENGTH_STEP) * LENGTH_STEP)
