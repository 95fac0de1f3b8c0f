"""New adapters for a vLLM engine on a CPU: beside its weights, merged with them, and all weights instead.

    python -m benchmarks.speed.adapter_sync [--dtypes fp32 bf16] [--rounds 5]

SmolLM2-135M (`models.actor.path=hflow:smollm2`), adapters of rank 16 of all matrices of its layers, shared
memory, one core. `load` is how long the engine pauses for new weights that are published; `memory` is that
of the engine's process afterwards. `engine_kl` is the estimator k3 of KL(engine ‖ trainer) for answers, where
the trainer is transformers with peft's adapters in the same dtype.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.lib import harness
from hflow.config.schema import LoraConfig
from hflow.engines.interface import EngineSetup, GenerationResult, SamplingParams
from hflow.engines.process.engine import ProcessEngine
from hflow.models import smollm2
from hflow.models.adapter import adapter_weights, add_adapter
from hflow.models.dtypes import DTYPES
from hflow.models.settings import ModelSettings
from hflow.planner.models.descriptors import engine_kind
from hflow.weights.buckets import pack_buckets
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.incoming import IncomingWeights
from hflow.weights.outgoing import whole_slices

WAYS = ("beside", "merged", "weights")
PROMPTS = [[1, *range(40 + i, 70 + i)] for i in range(32)]
ANSWER = 24
UPDATE = 0.02
"""Standard deviation of B, that of a few dozen steps of Adam with a learning rate of 1e-3."""


def trainer(settings: ModelSettings) -> nn.Module:
    """Return the model as it trains, with adapters that an update has changed."""
    dtype = DTYPES[settings.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(settings.path, dtype=dtype).eval()
    if settings.lora is not None:
        add_adapter(model, settings)
        torch.manual_seed(1)
        for name, weight in adapter_weights(model).items():
            weight.data = weight.data.to(dtype)
            if "lora_B" in name:
                weight.data.normal_(std=UPDATE)
    module: nn.Module = model.requires_grad_(False)
    return module


def sent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a trainer sends of a model."""
    return iter((adapter_weights(module) or dict(module.named_parameters())).items())


def load(engine: ProcessEngine, module: nn.Module, version: int) -> tuple[int, float]:
    """Publish and load a version; return the bytes and the seconds that the engine pauses."""
    settings = ChannelSettings("shared", f"trainer-{version}", "")
    channel = make_channel(settings)
    handles = [channel.send((0,), bucket) for bucket in pack_buckets(whole_slices(sent(module)))]
    start = time.perf_counter()
    loaded = engine.load_weights([IncomingWeights(settings, 0, streams=[handles])], version)
    seconds = time.perf_counter() - start
    channel.free(handles)
    channel.close()
    return loaded.num_bytes[0], seconds


def generate(engine: ProcessEngine) -> list[GenerationResult]:
    """Return answers to all prompts."""
    for number, prompt in enumerate(PROMPTS):
        engine.add(number, prompt, SamplingParams(max_tokens=ANSWER, seed=number))
    results: dict[int, GenerationResult] = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return [results[number] for number in range(len(PROMPTS))]


@torch.inference_mode()
def engine_kl(module: nn.Module, results: list[GenerationResult]) -> float:
    """Return the mean of exp(d) - 1 - d, where d is the trainer's log-prob minus the engine's."""
    ids = torch.tensor([[*prompt, *result.ids] for prompt, result in zip(PROMPTS, results, strict=True)])
    logits: Tensor = module(ids).logits[:, -ANSWER - 1 : -1].float()
    of_trainer = logits.log_softmax(-1).gather(-1, ids[:, -ANSWER:, None])[..., 0]
    d = of_trainer - torch.tensor([result.logprobs for result in results])
    return float((d.exp() - 1 - d).mean())


def measure(way: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Measure one way on an engine of its own."""
    lora = None if way == "weights" else LoraConfig(r=16)
    path = str(smollm2.fetch("models.actor.path"))
    settings = ModelSettings(name="actor", trainable=True, path=path, lora=lora, dtype=dtype)
    module = trainer(settings)
    options = {"max_running": 64, "max_model_len": 128, "cache_bytes": 1 << 28}
    options |= {"merges_adapters": True} if way == "merged" else {}
    engine: ProcessEngine = engine_kind("vllm").factory(
        EngineSetup(settings, options, receives_weights=True, cores=((0,),))
    )
    loads = [load(engine, module, version) for version in range(1, rounds + 2)][1:]
    memory = psutil.Process(engine._process._process.pid).memory_full_info().uss
    results = generate(engine)
    engine.close()
    return {
        "way": way,
        "dtype": dtype,
        "sent_bytes": loads[0][0],
        "load_seconds": statistics.median(seconds for _, seconds in loads),
        "memory_bytes": memory,
        "engine_kl": engine_kl(module, results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in options.dtypes:
        for way in WAYS:
            rows.append(measure(way, dtype, options.rounds))
            print(rows[-1], flush=True)
    harness.write("adapter-sync", {"rows": rows})


if __name__ == "__main__":
    main()
