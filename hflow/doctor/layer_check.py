"""Compares layers of Transformer Engine, forward and backward, with those of torch on the same device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from hflow.data.batches.batch import Batch, Column
from hflow.models.settings import ModelSettings, RankPosition
from hflow.training.loop.inputs import pack_tokens
from hflow.training.megatron.device import prepare
from hflow.types import Unit
from hflow.types.kernels import Fp8Recipe
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.tensor_slices import Block, box_slices

DENSE: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
)
"""A model with norms of queries and keys."""
EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        **DENSE,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
)
"""A model with experts."""
LENGTHS = (1, 7, 64, 129, 33)
"""Tokens of the sequences."""


class LayerError(NamedTuple):
    """How far results of two kernels are apart, relative to the largest entry of each tensor."""

    output: float
    """The difference of the logits."""
    gradient: float
    """The difference of the weight whose gradients differ most."""


def layer_error(
    device: str,
    dtype: Literal["fp32", "bf16"],
    architecture: Mapping[str, Any],
    fp8: Fp8Recipe | None = None,
) -> LayerError:
    """Compute a tiny model with random weights by both kernels.

    Its experts are given, as two that are nearly equal could be chosen differently.

    Args:
        architecture: `DENSE` or `EXPERTS`.
        fp8: the recipe of Transformer Engine's products; None: they are in the dtype.

    Raises:
        BackendError: if Transformer Engine or megatron cannot be imported.
        RuntimeError: what the kernels raise where they do not run.
    """
    prepare(device)
    settings = ModelSettings(
        name="model", trainable=True, architecture=dict(architecture), device=device, dtype=dtype
    )
    of_te: dict[str, Any] = {"kernels": "transformer_engine", "fp8": fp8}
    (logits, gradients), (wanted, wanted_gradients) = (
        _results(chosen) for chosen in (replace(settings, **of_te), settings)
    )
    errors = [_error(gradients[name], exact) for name, exact in wanted_gradients.items()]
    return LayerError(_error(logits, wanted), max(errors))


def fp8_recipes(device: str) -> list[Fp8Recipe]:
    """Return the recipes that Transformer Engine computes on a device.

    Raises:
        BackendError: if Transformer Engine or megatron cannot be imported.
    """
    prepare(device)
    from hflow.training.megatron.te_layers import recipe_problem

    return [recipe for recipe in Fp8Recipe if not recipe_problem(recipe)]


def _results(settings: ModelSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits, and gradients of whole weights by HF name, in float64 on the host."""
    # They import megatron, which has been prepared for the device.
    from hflow.training.megatron.model import build_stage
    from hflow.training.megatron.optimizer import wrap_for_gradient_sums
    from hflow.training.megatron.parallel_state import ParallelState
    from hflow.training.megatron.schedule import PipelineSchedule, StageTokens
    from hflow.training.megatron.weight_export import held_blocks, named_weights

    stage = build_stage(settings, ParallelState.of(RankPosition()))
    with torch.no_grad():
        for block in held_blocks(stage):
            if len(block.shape) == 1:
                block.values.add_(_noise(block).to(stage.device))
    module = wrap_for_gradient_sums(stage)
    module.zero_grad_buffer()
    has_experts = stage.shape.experts is not None
    tokens = pack_tokens(_batch(has_experts), stage.device, stage.dtype, replays=has_experts)
    found: list[Tensor] = []

    def loss(of: StageTokens, hidden: Tensor) -> Tensor:
        logits = stage.logits(hidden).whole()[:, : stage.shape.vocab].float()
        found.append(logits.detach())
        generator = torch.Generator().manual_seed(1)
        return (logits * torch.randn(logits.shape, generator=generator).to(logits.device)).sum()

    schedule = PipelineSchedule(stage, module, offload_activations=False, finish_gather=lambda: None)
    replayed = None if tokens.replayed is None else stage.replayed_here(tokens.replayed, None)
    schedule.backward([StageTokens(tokens, None, replayed)], loss)
    sums = {name: weight.main_grad for name, weight in stage.module.named_parameters()}
    gradients = {name: x.double().cpu() for name, x in named_weights(stage, torch.float32, sums)}
    return found[0].double().cpu(), gradients


def _noise(block: Block) -> Tensor:
    """Return the noise of a norm's weight, as a weight of 1 would hide that another one is used."""
    generator = torch.Generator().manual_seed(crc32(block.tensor.encode()))
    return 0.1 * torch.randn(block.shape, generator=generator)[box_slices(block.box)]


def _batch(has_experts: bool) -> Batch:
    """Return random tokens, with two experts in each of two layers; one expert gets none of them."""
    rng, num_tokens = np.random.default_rng(0), sum(LENGTHS)
    columns = {"input_ids": Column(Unit.TOKEN, rng.integers(0, DENSE["vocab_size"], num_tokens))}
    if has_experts:
        order = rng.permuted(np.tile(np.arange(1, EXPERTS["num_experts"]), (2 * num_tokens, 1)), axis=1)
        chosen = order[:, :2].reshape(num_tokens, 4).astype(np.uint8)
        columns[ROUTED_EXPERTS] = Column(Unit.TOKEN, chosen)
    ids = np.arange(len(LENGTHS))
    return Batch(ids, ids, np.array(LENGTHS), columns)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
