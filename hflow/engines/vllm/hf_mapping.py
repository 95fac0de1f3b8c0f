"""Where the weights of a Hugging Face checkpoint are in a vLLM model.

vLLM fuses the projections of queries, keys and values, and those of gate and up, into one parameter each. Its
tensor ranks hold slices, and its vocabulary is padded. For every tensor of the checkpoint, `held_tensors`
finds the box that a rank holds, and the view of vLLM's parameter that holds it. Experts have hflow's names
(`models.expert_tensors`), which stack those of a layer as vLLM does. Of a layer that vLLM quantises
(`quantized_layers`), the view is one of the parameter that is loaded, on the meta device. What vLLM computes
from weights when they are loaded, such as the matrices of latent attention, has no place of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.gpt_oss import OAIAttention

from hflow.base.errors import BackendError, nearest
from hflow.engines.vllm.quantized_layers import loaded_parameters
from hflow.models.expert_tensors import path_of
from hflow.shapes.model_shape import SCORE_BIAS
from hflow.types.tensor_slices import Block, whole_box

_WHOLE = (RMSNorm, GemmaRMSNorm, nn.LayerNorm, nn.Embedding, ConvLayerBase, ReplicatedLinear)
"""Modules whose parameters every rank holds whole."""
_FUSED_IN_CHECKPOINTS: Mapping[str, tuple[str, ...]] = {"glm4": ("gate_up_proj",)}
"""Family -> modules that checkpoints fuse as vLLM does, although `packed_modules_mapping` has their parts."""
_RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt_oss": ((".attn", ".self_attn"), (".embedding", ".embed_tokens"))
}
"""Family -> parts of paths in vLLM, and in checkpoints."""
Packed = dict[str, list[str]]
"""Module of vLLM -> the modules of the checkpoint that it consists of."""


def held_tensors(model: nn.Module) -> dict[str, Block]:
    """Return a rank's part of each checkpoint tensor, under each of its names, the checkpoint's first.

    Raises:
        BackendError: if the model has a parameter whose place in the checkpoint is unknown.
    """
    packed = packed_modules(model)
    held: dict[str, Block] = {}
    for vllm_path, module in model.named_modules(remove_duplicate=False):
        path = checkpoint_path(model, vllm_path)
        blocks = held_by_module(module, path, loaded_parameters(module), packed)
        held.update((block.tensor, block) for block in blocks)
    return held


def family_of(model: Any) -> str:
    """Return the `model_type` of vLLM's model."""
    family: str = model.config.model_type
    return family


def packed_modules(model: Any) -> Packed:
    """Return the modules of the checkpoint that each fused module of a model consists of."""
    packed: Packed = getattr(model, "packed_modules_mapping", {})
    fused = [name for name in packed if name in _FUSED_IN_CHECKPOINTS.get(family_of(model), ())]
    return {**packed, **{name: [name] for name in fused}}


def held_by_module(
    module: nn.Module, path: str, parameters: Mapping[str, Tensor], packed: Packed
) -> Iterator[Block]:
    """Yield a rank's part of each checkpoint tensor in the parameters of a module without its submodules.

    `path` is the module's path in the checkpoint, and the parameters are in the form in which they are
    loaded.

    Raises:
        BackendError: if the place of a parameter in the checkpoint is unknown.
    """
    if isinstance(module, RoutedExperts):
        yield from _held_experts(module, path, parameters)
        return
    if isinstance(module, MLAAttention):  # what it has is computed from `kv_b_proj`
        return
    for name, parameter in parameters.items():
        if isinstance(module, OAIAttention):  # sinks
            first, size = module.qkv_proj.tp_rank * len(parameter), module.num_attention_heads
            yield Block(f"{path}.{name}", (size,), ((first, first + len(parameter)),), parameter)
            continue
        parts = list(_parts(module, path, parameter, packed))
        if not parts:
            raise _unknown(f"{path}.{name} ({type(module).__name__})")
        for part_path, num_rows, first_row, view in parts:
            yield _held(module, f"{part_path}.{name}", num_rows, first_row, view)


def checkpoint_path(model: Any, path: str) -> str:
    """Return hflow's path of a module, which is that in the checkpoint, but for experts.

    vLLM has the language model and the tower of a model that sees in other places.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes: Mapping[str, str | None] = {} if mapper is None else mapper.orig_to_new_prefix
    for prefix, of_vllm in prefixes.items():
        if of_vllm is not None and f"{path}.".startswith(of_vllm):
            return prefix.removesuffix(".") + path.removeprefix(of_vllm.removesuffix("."))
    for of_vllm, of_checkpoint in _RENAMED.get(family_of(model), ()):
        path = f"{path}.".replace(f"{of_vllm}.", f"{of_checkpoint}.", 1).removesuffix(".")
    return path_of(family_of(model), path)


def _unknown(what: str) -> BackendError:
    return BackendError(
        f"the vllm engine cannot update {what}; set models.NAME.gen.engine=embedded, or choose another "
        "architecture"
    )


def _parts(
    module: Any, path: str, parameter: Tensor, packed: Packed
) -> Iterator[tuple[str, int, int, Tensor]]:
    """Yield the tensors of the checkpoint that are in a parameter; nothing for an unknown module.

    Of each: the path of its module, its number of rows, the first row that is held, and the view that holds
    it.
    """
    parent, _, own = path.rpartition(".")
    if packed.get(own) == [own]:  # fused in the checkpoint too
        if module.tp_size == 1:  # otherwise a rank has several parts of it
            yield path, parameter.shape[0], 0, parameter
    elif isinstance(module, QKVParallelLinear):
        query_rows, key_rows = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        value_rows = module.num_kv_heads * module.v_head_size
        queries, keys, values = parameter.split((query_rows, key_rows, value_rows))
        rank, kv_rank = module.tp_rank, module.tp_rank // module.num_kv_head_replicas
        q, k, v = (f"{parent}.{part}" for part in packed[own])
        yield q, module.total_num_heads * module.head_size, rank * query_rows, queries
        yield k, module.total_num_kv_heads * module.head_size, kv_rank * key_rows, keys
        yield v, module.total_num_kv_heads * module.v_head_size, kv_rank * value_rows, values
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        for part, size, view in zip(packed[own], sizes, parameter.split(sizes), strict=True):
            yield f"{parent}.{part}", size * module.tp_size, size * module.tp_rank, view
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        view = parameter[: indices.num_org_elements]
        yield path, module.org_vocab_size, indices.org_vocab_start_index, view
    elif isinstance(module, ColumnParallelLinear):
        num_rows = parameter.shape[0]
        yield path, num_rows * module.tp_size, num_rows * module.tp_rank, parameter
    elif isinstance(module, (RowParallelLinear, *_WHOLE)):
        yield path, parameter.shape[0], 0, parameter


def _held_experts(module: Any, path: str, parameters: Mapping[str, Tensor]) -> Iterator[Block]:
    """Yield what is held of a layer's experts: a slice of the rows of each.

    Raises:
        BackendError: for experts that are stored in another way than the checkpoint's.
    """
    config = module.moe_config
    gates_and_ups, downs = parameters["w13_weight"], parameters["w2_weight"]
    num, hidden, size = downs.shape
    names = parameters.keys() - {SCORE_BIAS}  # the router's, which `GateLinear` has too
    biases = {"w13_bias", "w2_bias"} & names
    is_known = len(names) in (2, 4) and len(biases) == len(names) - 2
    if not is_known or gates_and_ups.shape != (num, 2 * size, hidden) or num != config.num_experts:
        raise _unknown(f"{path}, whose experts are stored in another way")
    parallel, parent = config.moe_parallel_config, path.removesuffix(".routed_experts")
    whole, first = size * parallel.tp_size, size * parallel.tp_rank
    experts, columns, rows = (0, num), (0, hidden), (first, first + size)
    if biases:
        pairs, of_downs = (2 * rows[0], 2 * rows[1]), parameters["w2_bias"].detach()
        if first:  # ranks add up what downs make, so one alone adds biases
            of_downs = torch.empty_like(of_downs.zero_())
        for name, shape, box, view in (
            ("gate_up_proj", (num, hidden, 2 * whole), (experts, columns, pairs), gates_and_ups.mT),
            ("gate_up_proj_bias", (num, 2 * whole), (experts, pairs), parameters["w13_bias"]),
            ("down_proj", (num, whole, hidden), (experts, rows, columns), downs.mT),
            ("down_proj_bias", (num, hidden), (experts, columns), of_downs),
        ):
            yield Block(f"{parent}.{name}", shape, box, view)
        return
    for name, view in zip(("gate_proj", "up_proj"), gates_and_ups.split(size, dim=1), strict=True):
        yield Block(f"{parent}.{name}.weight", (num, whole, hidden), (experts, rows, columns), view)
    yield Block(f"{parent}.down_proj.weight", (num, hidden, whole), (experts, columns, rows), downs)


def _held(module: Any, tensor: str, num_rows: int, first_row: int, view: Tensor) -> Block:
    """Return the held block of a tensor, with the columns that a row-parallel matrix splits."""
    rows, columns = (first_row, first_row + view.shape[0]), view.shape[1:]
    if isinstance(module, RowParallelLinear) and view.ndim == 2:
        (size,) = columns
        first = size * module.tp_rank
        return Block(tensor, (num_rows, size * module.tp_size), (rows, (first, first + size)), view)
    return Block(tensor, (num_rows, *columns), (rows, *whole_box(tuple(columns))), view)


def checked(weights: Iterable[tuple[str, Tensor]], held: dict[str, Block]) -> Iterator[tuple[str, Tensor]]:
    """Pass new weights on, and check that they are those of the model.

    Raises:
        BackendError: if a name is unknown, a shape differs, or a tensor is missing.
    """
    # vLLM's modules of attention and experts also have those of their layer, under longer paths.
    missing = {_place(block): name for name, block in reversed(held.items()) if block.values.numel()}
    for name, tensor in weights:
        if name not in held:
            raise BackendError(
                f"new weights hold {name!r}, which the engine's model lacks{nearest(name, held)}"
            )
        if held[name].shape != tensor.shape:
            raise BackendError(
                f"new weights have {name!r} of shape {tuple(tensor.shape)}, but the engine's model has "
                f"{held[name].shape}; give both the same architecture"
            )
        missing.pop(_place(held[name]), None)
        yield name, tensor
    if missing:
        names = sorted(missing.values())
        raise BackendError(
            f"new weights lack {len(names)} tensors of the engine's model, the first is {names[0]!r}; "
            "give both the same architecture"
        )


def _place(block: Block) -> int | str:
    """Return the key of a tensor's place, which tied tensors have in common."""
    return block.tensor if block.values.is_meta else block.values.data_ptr()
