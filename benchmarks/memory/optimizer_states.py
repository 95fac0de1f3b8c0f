"""Bytes of each optimizer's states, and most bytes beside them in a step: planned, and allocated on a CPU.

python -m benchmarks.memory.optimizer_states
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from hflow.config.schema import ModelConfig, OptimConfig
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.optimizers import OPTIMIZERS
from hflow.planner.plan.rows import Replica
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.training.fsdp.backend import TorchModel
from hflow.training.fsdp.memory import model_state

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
OPTIONS = {"sgd": {"momentum": 0.9}}


def peak_of_step(model: TorchModel) -> int:
    """Return the most bytes that a step allocates beside weights, gradients and states."""
    optimizer = model._optimizer
    assert optimizer is not None
    for shard in optimizer._shards:
        shard.grad = torch.randn_like(shard)
    optimizer._optimizer.step()  # makes tables that are kept
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer._update_matrices([optimizer._optimizer])
        optimizer._optimizer.step()
    held = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def main() -> None:
    """Print a row for each optimizer, in MB."""
    shape = read_shape(ARCHITECTURE)
    assert shape is not None
    replica = Replica("m@train", "m", "train", "torch", Layout(), "all", (0,), (0,))
    print("| optimizer | states planned | allocated | step planned | allocated |\n|-|-|-|-|-|")
    for name in OPTIMIZERS:
        optim = OptimConfig(name=name, **OPTIONS.get(name, {}))  # type: ignore[arg-type]
        rank = Rank(replica, shape, ModelConfig(optim=optim), 0, True, True)
        settings = ModelSettings(name="m", trainable=True, architecture=ARCHITECTURE, optim=optim)
        model = TorchModel(settings, RankPosition())
        assert model._optimizer is not None
        items = model_state(rank).items()
        planned = sum(size for key, size in items if key.category is MemoryCategory.OPTIMIZER)
        states = sum(x.nbytes for x in model._optimizer.states())
        numbers = (planned, states, rank.update_buffers, peak_of_step(model))
        print(f"| `{name}` | " + " | ".join(f"{number / 1e6:.2f}" for number in numbers) + " |")


if __name__ == "__main__":
    main()
