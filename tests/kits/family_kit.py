"""Tiny architectures of families whose attention, norms or experts are not Llama's, and plain HF models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 37
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
}
_HEADS = {**_SIZES, "head_dim": 8}
_EXPERTS = {
    **_SIZES,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {**_HEADS, "sliding_window": 4, "sliding_window_pattern": 2},
    "glm4": _HEADS,
    "qwen2_moe": {
        **_SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "glm4_moe": {**_EXPERTS, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_HEADS, "sliding_window": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {**_SIZES, "sliding_window": 4},
    "qwen2": {**_SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "olmo3": {**_SIZES, "sliding_window": 4},
}
"""`model_type` -> a config. Windows are shorter than most sequences of the tests."""


def architecture(family: str) -> dict[str, Any]:
    return {"model_type": family, **ARCHITECTURES[family]}


def vary(model: nn.Module) -> None:
    """Change weights and buffers that are 0 or 1 in a new model, in which errors would not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        named = [*model.named_parameters(), *(x for x in model.named_buffers() if "correction" in x[0])]
        for name, x in named:
            if x.dim() == 1 or "norm" in name:
                x.add_(torch.randn(x.shape, generator=generator) * 0.3)


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' own model with equal weights, which computes attention eagerly."""
    config = copy.deepcopy(model.config)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    made.load_state_dict(model.state_dict())
    return made.eval()


@torch.no_grad()
def logprobs(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return the log-prob of each token but the first, by one forward pass over the sequence alone."""
    x = torch.tensor([ids])
    found = model(input_ids=x).logits[0, :-1].log_softmax(-1)
    return found.gather(1, x[0, 1:, None])[:, 0]
