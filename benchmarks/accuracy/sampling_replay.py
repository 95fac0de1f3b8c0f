"""Sampling replay: log-probs of engine and trainer, over all tokens and over those that were drawn from.

python -m benchmarks.accuracy.sampling_replay

SmolLM2-135M-Instruct draws 8 samples of 16 tokens in fp32, with several limits. The trainer, of the same
weights, computes their log-probs over all tokens, and over those that sampling left.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.graph.ir import Read
from hflow.models.settings import ModelSettings, RankPosition
from hflow.models.smollm2 import directory
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall
from hflow.types import Output, Unit
from hflow.types.recorded import RowFormat
from hflow.types.sampling_mask import RECORDED, SAMPLING_MASK, unpack_ids

PROMPT = (504, 3575, 282, 260, 905, 314)
NUM_SAMPLES, NUM_TOKENS = 8, 16
LIMITS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.95, "top_k": 100},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.9, "temperature": 1.5},
)


def logprobs(out: Output) -> torch.Tensor:
    """Return the outputs of an infer node."""
    return out.logprobs


REPLAY = Read(f"@{SAMPLING_MASK}", SAMPLING_MASK, "gen", "gen", Unit.TOKEN, Unit.TOKEN, "tensor")


def generate(engine: EmbeddedEngine, limits: dict[str, Any]) -> list[GenerationResult]:
    """Return the samples."""
    for number in range(NUM_SAMPLES):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, record=(SAMPLING_MASK,), **limits)
        engine.add(number, PROMPT, params)
    results: dict[int, GenerationResult] = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return [results[number] for number in range(NUM_SAMPLES)]


def batch_of(samples: list[GenerationResult]) -> Batch:
    """Return samples as a batch, with the tokens that they were drawn from."""
    length, form = len(PROMPT) + NUM_TOKENS, RowFormat.varying(1)
    token = {
        "input_ids": np.array([PROMPT + sample.ids for sample in samples]).ravel(),
        "loss_mask": np.tile(np.arange(length) >= len(PROMPT), len(samples)),
        SAMPLING_MASK: np.concatenate(
            [RECORDED.pack(s.recorded[SAMPLING_MASK], length, form) for s in samples]
        ),
    }
    index = np.arange(len(samples))
    columns = {name: Column(Unit.TOKEN, values) for name, values in token.items()}
    return Batch(index, index, np.full(len(samples), length), columns)


def measure(engine: EmbeddedEngine, trainer: TorchModel, limits: dict[str, Any]) -> dict[str, Any]:
    """Compare engine and trainer on samples drawn with these limits."""
    samples = generate(engine, limits)
    batch = batch_of(samples)
    behav = np.concatenate([sample.logprobs for sample in samples])
    entries = [entry for s in samples for entry in s.recorded[SAMPLING_MASK] if entry]
    sizes = [len(unpack_ids(entry)) for entry in entries]
    found: dict[str, Any] = {
        "set": {"mean": float(np.mean(sizes)), "median": float(np.median(sizes)), "max": max(sizes)},
        "bytes_per_token": float(np.mean(list(map(len, entries)))),
    }
    for name, reads in (("all tokens", ()), ("replayed", (REPLAY,))):
        columns = batch if reads else batch.select(["input_ids", "loss_mask"])
        call = NodeCall(
            "node",
            logprobs,
            reads,
            (("out", "output"),),
            (("logprobs", "token"),),
            False,
            {},
            {},
            limits.get("temperature", 1.0),
        )
        (result,) = trainer.infer(call, [columns])
        gap = (
            np.asarray(result.columns["logprobs"].values)[np.asarray(batch.columns["loss_mask"].values)]
            - behav
        )
        found[name] = {
            "mean": float(np.abs(gap).mean()),
            "max": float(np.abs(gap).max()),
            "kl": float((np.exp(gap) - 1 - gap).mean()),
        }
    return found


def main() -> None:
    """Measure all limits."""
    torch.set_num_threads(1)
    settings = ModelSettings(name="actor", path=str(directory()))
    engine, trainer = (
        EmbeddedEngine(settings, {"max_running": NUM_SAMPLES}),
        TorchModel(settings, RankPosition()),
    )
    results: dict[str, Any] = {}
    for limits in LIMITS:
        results[json.dumps(limits)] = found = measure(engine, trainer, limits)
        print(limits, json.dumps(found), flush=True)
    print(harness.write("sampling-replay", {"what": __doc__, "results": results}))


if __name__ == "__main__":
    main()
