"""Tiny HF models, packed sequences and the results of transformers, for tests of the megatron backend.

Imports no megatron.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hflow.models.expert_tensors import stacked_views
from hflow.models.heads import ScalarHead, head_prefix, save_head
from hflow.models.packed_attention import PackedLayout
from hflow.models.settings import ModelSettings
from hflow.shapes.model_shape import is_in_fp32
from tests.kits.family_kit import ARCHITECTURES

VOCAB = 300
"""Padded to 384 rows for one rank and to 512 for two or four, of which the last then has none."""
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
UNTIED = {"tie_word_embeddings": False}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 16}
ONE_KV = QWEN3 | {"num_key_value_heads": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA = QWEN2 | {"model_type": "llama", "attention_bias": True, "rope_parameters": LLAMA3_ROPE}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
MIXTRAL = QWEN2 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GLM4_MOE = {"model_type": "glm4_moe", **ARCHITECTURES["glm4_moe"], "vocab_size": VOCAB} | {
    "routed_scaling_factor": 1.5,
    "n_shared_experts": 2,
}
DEEPSEEK = {"model_type": "deepseek_v3", **ARCHITECTURES["deepseek_v3"], "vocab_size": VOCAB} | {
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "attention_bias": True,
    "initializer_range": 0.1,
}
GEMMA3 = {"model_type": "gemma3_text", **ARCHITECTURES["gemma3_text"], "vocab_size": VOCAB} | {
    "query_pre_attn_scalar": 12,
    "initializer_range": 0.1,
}
GLM4 = {"model_type": "glm4", **ARCHITECTURES["glm4"], "vocab_size": VOCAB} | {
    "pad_token_id": None,
    "attention_bias": True,
    "initializer_range": 0.1,
}
QWEN2_MOE = {"model_type": "qwen2_moe", **ARCHITECTURES["qwen2_moe"], "vocab_size": VOCAB} | {
    "initializer_range": 0.1
}
GPT_OSS = {"model_type": "gpt_oss", **ARCHITECTURES["gpt_oss"], "vocab_size": VOCAB} | {
    "rope_parameters": YARN | {"truncate": False},
    "swiglu_limit": 0.5,
    "initializer_range": 0.1,
}
MISTRAL = QWEN2 | {"model_type": "mistral", "sliding_window": None, "rope_parameters": YARN}

LENGTHS = ((5, 9, 3, 1), (12, 2, 5))
"""Sequences of each micro-batch: 18 and 19 tokens, which two ranks cannot share equally."""

RECOMPUTED = {"activation_checkpointing": True}
NO_SP = {"sequence_parallel": False}
SP = {"sequence_parallel": True}
FIRST, SECOND, ALL = (0, 1), (2, 3), (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    name: str
    layout: tuple[int, int, int] = (1, 1, 1)
    """Data, tensor, pipe."""
    architecture: dict[str, Any] = field(default_factory=lambda: QWEN2)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return self.settings.get("head", "lm")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.settings.get("dtype") == "bf16" else torch.float32


ROUNDS: list[list[tuple[tuple[int, ...], Case]]] = [
    [
        (FIRST, Case("qwen2 t2", (1, 2, 1), QWEN2, SP)),
        (SECOND, Case("qwen2 p2", (1, 1, 2))),
    ],
    [
        (FIRST, Case("qwen2 untied t2 without sp", (1, 2, 1), QWEN2 | UNTIED, NO_SP)),
        (SECOND, Case("llama untied p2 recomputed", (1, 1, 2), LLAMA | UNTIED, RECOMPUTED)),
    ],
    [
        (FIRST, Case("qwen3 t2 recomputed", (1, 2, 1), QWEN3, SP | RECOMPUTED)),
        (SECOND, Case("mistral p2", (1, 1, 2), MISTRAL)),
    ],
    [
        (FIRST, Case("value t2", (1, 2, 1), QWEN2, {"head": "value"} | SP)),
        (SECOND, Case("score p2", (1, 1, 2), QWEN2 | UNTIED, {"head": "score"})),
    ],
    [
        (FIRST, Case("bf16 t2", (1, 2, 1), QWEN2, {"dtype": "bf16"} | SP)),
        (SECOND, Case("value t2 without sp", (1, 2, 1), QWEN2, {"head": "value"} | NO_SP)),
    ],
    [
        (FIRST, Case("experts t2", (1, 2, 1), QWEN3_MOE)),
        (SECOND, Case("mixtral p2", (1, 1, 2), MIXTRAL | UNTIED)),
    ],
    [
        (FIRST, Case("mixtral t2", (1, 2, 1), MIXTRAL, RECOMPUTED)),
        (
            SECOND,
            Case(
                "experts after a dense layer p2 recomputed",
                (1, 1, 2),
                QWEN3_MOE | UNTIED | {"mlp_only_layers": [0], "norm_topk_prob": False},
                RECOMPUTED,
            ),
        ),
    ],
    [
        (
            FIRST,
            Case(
                "one expert per token t2 bf16",
                (1, 2, 1),
                QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
                {"dtype": "bf16"},
            ),
        )
    ],
    [(ALL, Case("qwen2 t2p2", (1, 2, 2), QWEN2, SP))],
    [
        (
            ALL,
            Case(
                "llama with all biases t2p2 recomputed",
                (1, 2, 2),
                LLAMA | {"mlp_bias": True},
                SP | RECOMPUTED,
            ),
        )
    ],
    [(ALL, Case("qwen3 untied t2p2 without sp", (1, 2, 2), QWEN3 | UNTIED, NO_SP))],
    [(ALL, Case("two key-value heads t4", (1, 4, 1), QWEN2, SP))],
    [
        (
            ALL,
            Case("one key-value head t4 without sp", (1, 4, 1), ONE_KV, NO_SP),
        )
    ],
    [
        (FIRST, Case("glm4_moe t2", (1, 2, 1), GLM4_MOE)),
        (SECOND, Case("glm4_moe p2 recomputed", (1, 1, 2), GLM4_MOE, RECOMPUTED)),
    ],
    [
        (FIRST, Case("deepseek_v3 t2", (1, 2, 1), DEEPSEEK)),
        (SECOND, Case("deepseek_v3 p2", (1, 1, 2), DEEPSEEK | {"q_lora_rank": None})),
    ],
    [
        (FIRST, Case("gemma3_text t2", (1, 2, 1), GEMMA3, SP)),
        (SECOND, Case("gemma3_text untied p2 recomputed", (1, 1, 2), GEMMA3 | UNTIED, RECOMPUTED)),
    ],
    [
        (FIRST, Case("gemma3_text t2 without sp", (1, 2, 1), GEMMA3, NO_SP)),
        (SECOND, Case("mistral with windows p2", (1, 1, 2), MISTRAL | {"sliding_window": 4})),
    ],
    [
        (FIRST, Case("gpt_oss t2", (1, 2, 1), GPT_OSS)),
        (SECOND, Case("gpt_oss p2 recomputed", (1, 1, 2), GPT_OSS, RECOMPUTED)),
    ],
    [
        (FIRST, Case("qwen2_moe t2", (1, 2, 1), QWEN2_MOE)),
        (SECOND, Case("qwen2_moe p2 recomputed", (1, 1, 2), QWEN2_MOE, RECOMPUTED)),
    ],
    [
        (FIRST, Case("glm4 t2 without sp", (1, 2, 1), GLM4, NO_SP)),
        (SECOND, Case("glm4 p2 recomputed", (1, 1, 2), GLM4, RECOMPUTED)),
    ],
    [(ALL, Case("five layers p4", (1, 1, 4), QWEN2 | {"num_hidden_layers": 5}))],
]
"""What the ranks of the first column compute, one round after the other."""
GRIDS = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)]
"""Layouts of all four ranks: data, tensor, pipe, context."""
CASES = {case.name: case for turn in ROUNDS for _, case in turn}


def settings(case: Case, directory: Path, **changes: Any) -> ModelSettings:
    """Return settings that read the checkpoint from `write_checkpoint`."""
    return ModelSettings(
        name="actor", **({"trainable": True, "path": str(directory / case.name)} | case.settings | changes)
    )


def model(case: Case) -> tuple[PreTrainedModel, ScalarHead | None]:
    """Build the case's model and scalar head with transformers, without weights of 0 or 1."""
    options = {key: value for key, value in case.architecture.items() if key != "model_type"}
    config = AutoConfig.for_model(case.architecture["model_type"], **options)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    head = None if case.head == "lm" else ScalarHead(config.hidden_size, 7, case.head)
    with torch.no_grad():
        biases = (x for name, x in made.named_buffers() if is_in_fp32(name))
        for weight in (*made.parameters(), *biases, *(head.parameters() if head else ())):
            weight.add_(torch.randn(weight.shape), alpha=0.1)
    return made, head


def write_checkpoint(case: Case, path: Path, shard: str = "1GB") -> None:
    """Write the case's model in HF layout, to a directory with its name."""
    made, head = model(case)
    tensors = dict(made.state_dict())
    if case.head == "score":
        tensors |= {"score.weight": head.weight.detach()}
    made.save_pretrained(path / case.name, max_shard_size=shard, state_dict=tensors)
    if case.head == "value":
        save_head(path / case.name, head.state_dict())


@dataclass(frozen=True)
class Pack:
    """A micro-batch of token ids."""

    lengths: tuple[int, ...]
    ids: Tensor
    positions: Tensor

    def layout(self, dtype: torch.dtype) -> PackedLayout:
        return PackedLayout.of(np.array(self.lengths), "cpu", dtype)


def packs() -> list[Pack]:
    generator = torch.Generator().manual_seed(0)
    return [
        Pack(
            lengths,
            torch.randint(0, VOCAB, (sum(lengths),), generator=generator),
            torch.cat([torch.arange(length) for length in lengths]),
        )
        for lengths in LENGTHS
    ]


def with_other_tokens(pack: Pack, sequence: int) -> Pack:
    """Return the micro-batch with other tokens in one of its sequences."""
    parts = list(pack.ids.split(pack.lengths))
    parts[sequence] = (parts[sequence] + 1) % VOCAB
    return replace(pack, ids=torch.cat(parts))


def output_weights(pack: Pack, head: str) -> Tensor:
    """Return weights whose products with the logits `[T, V]` or scalars `[T]` add up to the loss."""
    shape = (len(pack.ids), VOCAB) if head == "lm" else (len(pack.ids),)
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(pack.ids))) / 10


@dataclass(frozen=True)
class Expected:
    """Expected outputs, gradients and weights of a model, by HF name."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@functools.cache
def expected(name: str) -> Expected:
    """Compute a case with transformers, sequence by sequence, in the case's dtype."""
    case = CASES[name]
    made, head = model(case)
    made.to(case.dtype)
    named = dict(made.named_parameters())
    if head:
        named.pop("lm_head.weight", None)
        named |= {head_prefix(case.head) + n: weight for n, weight in head.named_parameters()}
    outputs, loss = [], torch.zeros(())
    for pack in packs():
        results = [made(ids[None], output_hidden_states=True) for ids in pack.ids.split(pack.lengths)]
        parts = [head(x.hidden_states[-1][0]) if head else x.logits[0].float() for x in results]
        outputs.append(torch.cat(parts))
        loss = loss + (outputs[-1] * output_weights(pack, case.head)).sum()
    loss.backward()
    family = case.architecture["model_type"]
    biases = {name: x for name, x in made.named_buffers() if is_in_fp32(name)}
    return Expected(
        [output.detach() for output in outputs],
        dict(stacked_views(family, ((n, weight.grad.float()) for n, weight in named.items()))),
        biases | dict(stacked_views(family, ((n, weight.detach()) for n, weight in named.items()))),
    )


def run(rank: int, directory: str) -> None:
    """Run a spawned rank."""
    import megatron_ranks

    megatron_ranks.run(rank, Path(directory))
