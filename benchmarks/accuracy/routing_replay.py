"""Routing replay: how far an engine's log-probs are from the trainer's, with and without it.

python -m benchmarks.accuracy.routing_replay

Random mixtures of experts (6 layers, hidden size 128) draw 64 samples of 60 tokens in bf16. The trainer, of
the same weights, computes their log-probs in fp32 and in bf16, with its own routing and with the engine's.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.graph.ir import Read
from hflow.models.settings import ModelSettings, RankPosition
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall
from hflow.types import Output, Unit
from hflow.types.recorded import RowFormat
from hflow.types.routed_experts import RECORDED, ROUTED_EXPERTS, routing_format

PROMPT = (3, 9, 30, 7, 7, 1)
NUM_SAMPLES, NUM_TOKENS, NUM_LAYERS = 64, 60, 6
EXPERTS = ((8, 2), (64, 8), (128, 8))
"""(experts of a layer, experts of a token)."""


def logprobs(out: Output) -> torch.Tensor:
    """Return what an infer node keeps."""
    return out.logprobs


REPLAY = Read("@routed_experts", "routed_experts", "gen", "gen", Unit.TOKEN, Unit.TOKEN, "tensor")
OWN = NodeCall("node", logprobs, (), (("out", "output"),), (("logprobs", "token"),), False, {}, {})
REPLAYED = NodeCall("node", logprobs, (REPLAY,), OWN.provided, OWN.returns, False, {}, {})


def settings(num: int, per_token: int, seed: int, dtype: str) -> ModelSettings:
    """Return a model with random weights."""
    architecture = {
        "model_type": "qwen3_moe",
        "vocab_size": 40,
        "hidden_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": num,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    }
    return ModelSettings(name="actor", architecture=architecture, seed=seed, dtype=dtype)


def generate(model: ModelSettings, records: bool) -> tuple[list[GenerationResult], float]:
    """Return the samples, and the tokens per second."""
    engine = EmbeddedEngine(model)
    for number in range(NUM_SAMPLES):
        engine.add(
            number,
            PROMPT,
            SamplingParams(max_tokens=NUM_TOKENS, seed=number, record=(ROUTED_EXPERTS,) if records else ()),
        )
    results: dict[int, GenerationResult] = {}
    start = time.perf_counter()
    while engine.num_unfinished:
        results.update(engine.step())
    seconds = time.perf_counter() - start
    return [results[number] for number in range(NUM_SAMPLES)], NUM_SAMPLES * NUM_TOKENS / seconds


def batch_of(samples: list[GenerationResult], form: RowFormat) -> Batch:
    """Return samples as a batch, with the experts that computed them."""
    length = len(PROMPT) + NUM_TOKENS
    token = {
        "input_ids": np.array([PROMPT + sample.ids for sample in samples]).ravel(),
        "loss_mask": np.tile(np.arange(length) >= len(PROMPT), len(samples)),
        ROUTED_EXPERTS: np.concatenate(
            [RECORDED.pack(s.recorded[ROUTED_EXPERTS], length, form) for s in samples]
        ),
    }
    index = np.arange(len(samples))
    columns = {name: Column(Unit.TOKEN, values) for name, values in token.items()}
    return Batch(index, index, np.full(len(samples), length), columns)


def gaps(trainer: TorchModel, call: NodeCall, batch: Batch, behav: np.ndarray) -> dict[str, float]:
    """Return mean and largest gap, and the KL, as `NODE/engine_gap` and `NODE/engine_kl` do."""
    (result,) = trainer.infer(call, [batch])
    theta = np.asarray(result.columns["logprobs"].values)[np.asarray(batch.columns["loss_mask"].values)]
    gap = theta - behav
    return {
        "mean": float(np.abs(gap).mean()),
        "max": float(np.abs(gap).max()),
        "kl": float((np.exp(gap) - 1 - gap).mean()),
    }


def measure(num: int, per_token: int, seed: int) -> dict[str, Any]:
    """Compare one model with its engine."""
    form = routing_format(NUM_LAYERS, per_token, num)
    samples, recording = generate(settings(num, per_token, seed, "bf16"), records=True)
    _, plain = generate(settings(num, per_token, seed, "bf16"), records=False)
    batch, behav = batch_of(samples, form), np.concatenate([sample.logprobs for sample in samples])
    found: dict[str, Any] = {"tokens_per_second": {"recording": recording, "plain": plain}}
    for dtype in ("fp32", "bf16"):
        trainer = TorchModel(settings(num, per_token, seed, dtype), RankPosition())
        found[dtype] = {
            "own": gaps(trainer, OWN, batch, behav),
            "replayed": gaps(trainer, REPLAYED, batch, behav),
        }
    return found


def main() -> None:
    """Measure three models of each size."""
    torch.set_num_threads(1)
    results = {f"{num} experts, {k} of them": [measure(num, k, s) for s in range(3)] for num, k in EXPERTS}
    path = harness.write("routing-replay", {"what": __doc__, "results": results})
    for name, runs in results.items():
        for dtype in ("fp32", "bf16"):
            rows = {
                kind: {
                    key: float(np.mean([run[dtype][kind][key] for run in runs]))
                    for key in ("mean", "max", "kl")
                }
                for kind in ("own", "replayed")
            }
            print(name, dtype, json.dumps(rows))
    print(path)


if __name__ == "__main__":
    main()
