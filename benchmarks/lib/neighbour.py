"""A process that keeps one core busy until it is ended, to measure work on the other core of a busy machine.

Cores share caches and memory, so that two independent programs slow each other down. A run on both cores
is therefore also compared with each of its parts while the other core is busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

Work = Literal["training", "generation"]
NUM_SEQUENCES, NUM_TOKENS, MOST_TOKENS = 64, 48, 160


@contextmanager
def busy(core: int, work: Work, layers: int, hidden: int) -> Iterator[None]:
    """Keep a core busy at low priority, with a model of these sizes."""
    command = [sys.executable, "-m", __spec__.name, str(core), work, str(layers), str(hidden)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == b"at work\n"
        yield
    finally:
        started.kill()
        started.wait()


def architecture(layers: int, hidden: int, num_positions: int = 2 * MOST_TOKENS) -> dict[str, Any]:
    """Return a random Qwen2 with a vocabulary of 32."""
    sizes = {"vocab_size": 32, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": layers}
    return {"model_type": "qwen2", **sizes, **heads, "max_position_embeddings": num_positions}


def train(layers: int, hidden: int) -> Iterator[None]:
    """Run forward and backward passes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = architecture(layers, hidden)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes))
    ids = torch.randint(0, 32, (NUM_SEQUENCES, NUM_TOKENS))
    while True:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        yield


def generate(layers: int, hidden: int) -> Iterator[None]:
    """Run steps of an engine whose slots are full."""
    from hflow.engines.embedded.engine import EmbeddedEngine
    from hflow.engines.interface import SamplingParams
    from hflow.models.settings import ModelSettings

    settings = ModelSettings(name="neighbour", architecture=architecture(layers, hidden))
    engine, random = EmbeddedEngine(settings, {"max_running": NUM_SEQUENCES}), Random(0)
    while True:
        while engine.num_unfinished < 2 * NUM_SEQUENCES:
            length = min(MOST_TOKENS, 1 + int(random.expovariate(1 / NUM_TOKENS)))
            engine.add(0, [1, 5, 9], SamplingParams(max_tokens=length, seed=random.randrange(2**31)))
        engine.step()
        yield


def main() -> None:
    core, work, *sizes = sys.argv[1:]
    import torch

    os.sched_setaffinity(0, {int(core)})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    steps = (train if work == "training" else generate)(*map(int, sizes))
    next(steps)
    print("at work", flush=True)
    for _ in steps:
        pass


if __name__ == "__main__":
    main()
