"""Ranks, plans and measured peaks for tests of the memory model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import plan_graphs as graphs
import torch_kit as kit
from model_configs import model_config
from torch.profiler import ProfilerActivity, profile

from hflow.config.schema import OptimConfig
from hflow.data.batches.batch import Batch, Column
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.forecast.memory.parts import Items, MicroBatch
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.plan.forecast import MemoryItem
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import ENGINES
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import TrainShard
from hflow.types import Unit

LLAMA_7B = ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000, is_tied=False)
"""6,738,415,616 parameters: a layer has 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 = 202,383,360, the rest
2 x 32000 x 4096 + 4096 = 262,148,096."""
SMALL = ModelShape("llama", 4, 64, 128, 4, 2, 16, 100, is_tied=False)
"""A layer has 2 x 64 x (4 + 2) x 16 + 3 x 64 x 128 + 2 x 64 = 36,992 parameters, the rest
2 x 100 x 64 + 64 = 12,864: 160,832 in all."""
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
WIDE = ARCHITECTURE | {
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": False,
}
MIXED = ARCHITECTURE | {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LATENT = ARCHITECTURE | {
    "model_type": "deepseek_v3",
    "hidden_size": 448,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
BIASED = ARCHITECTURE | {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "intermediate_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "tie_word_embeddings": False,
}
TRAIN = dataclasses.replace(kit.CALLS["token-mean"], options={"reduce": "token-mean"})


def rank(
    shape: ModelShape = SMALL,
    layout: str = "d1",
    backend: str = "torch",
    role: Any = None,
    stage: int = 0,
    on_cpu: bool = True,
    **asked: Any,
) -> Rank:
    """A rank of a replica on neighbouring devices; rank 0 on the first stage."""
    made = role or ("gen" if backend in ENGINES else "train")
    axes = Layout.parse(layout)
    replica = Replica(f"m@{made}", "m", made, backend, axes, "all", tuple(range(axes.world)), (0,))
    return Rank(replica, shape, model_config(**asked), stage, stage == 0, on_cpu)


def microbatch(tokens: int, learned: int = 0, num: int = 1, pads: bool = False) -> MicroBatch:
    return MicroBatch(tokens, learned, num, pads)


def named(items: Items | Iterable[MemoryItem]) -> dict[str, int]:
    """Name -> bytes."""
    rows = [(key.name, size) for key, size in items.items()] if isinstance(items, Items) else items
    return {name: size for name, size, *_ in rows}


# ----------------------------------------------------------------------------- real peaks
def peak(work: Callable[[], Any]) -> int:
    """The most bytes that torch had allocated at once while `work` ran, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def batch_of(
    num_sequences: int, length: int, vocab: int, seed: int = 0, group_size: int = 1, prompt: int | None = None
) -> Batch:
    """Sequences of one length, whose first quarter is prompt by default. Groups share their prompts."""
    rng, total = np.random.default_rng(seed), num_sequences * length
    prompt = length // 4 if prompt is None else prompt
    mask = np.tile(np.arange(length), num_sequences) >= prompt
    tokens = rng.integers(0, vocab, (num_sequences // group_size, group_size, length))
    tokens[:, :, :prompt] = tokens[:, :1, :prompt]
    tokens[:, :, prompt] = np.arange(group_size)
    token = {
        "input_ids": tokens.reshape(-1),
        "loss_mask": mask,
        "behav_logprobs": np.where(mask, -8.0, 0.0).astype(np.float32),
        "versions": np.zeros(total, np.int32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
    }
    ids = np.arange(num_sequences)
    columns = {name: Column(Unit.TOKEN, values) for name, values in token.items()}
    return Batch(ids, ids // group_size, np.full(num_sequences, length), columns)


def real_peaks(
    architecture: dict[str, Any],
    num_sequences: int,
    length: int,
    position: RankPosition | None = None,
    groups: Mapping[str, int] | None = None,
    **changes: Any,
) -> tuple[int, int]:
    """Bytes of a second training step and of an inference, beyond weights and optimizer state.

    `groups` are arguments of `batch_of`.
    """
    settings = ModelSettings(
        name="m", trainable=True, architecture=architecture, optim=OptimConfig(lr=1e-4), **changes
    )
    model, batch = (
        TorchModel(settings, position or RankPosition()),
        batch_of(num_sequences, length, architecture["vocab_size"], **(groups or {})),
    )
    shard = TrainShard((batch,))
    model.train(TRAIN, [shard], 0)
    trained = max(peak(lambda: model.train(TRAIN, [shard], 1)) for _ in range(2 if position else 1))
    infers = dataclasses.replace(kit.LOGPROBS, node="infers")
    return trained, peak(lambda: model.infer(infers, [batch]))


def shape_of(architecture: dict[str, Any]) -> ModelShape:
    found = read_shape(architecture)
    assert found is not None
    return found


def request(cluster: str = "cpu-1x2", **changes: Any) -> Any:
    return graphs.request(cluster, **changes)
