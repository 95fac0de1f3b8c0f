"""Pairs of a writer and a reader of sharded checkpoints. Imports no megatron."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import megatron_twins as twins
import torch_kit as kit

from hflow.config.schema import WeightGroupConfig

NUM_WRITTEN = 1
"""Steps of two or four updates before a checkpoint; one more follows."""


@dataclass(frozen=True)
class Side:
    """A backend in a layout, and its ranks."""

    backend: str
    twin: twins.Twin
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.backend} {self.twin.name}"


def sides(node: str, **settings: object) -> dict[str, Side]:
    """Return the layouts in which a node's model is written and read."""
    sp, plain = twins.SP | settings, dict(settings)
    return {
        "torch d1": Side("torch", twins.Twin(node, settings=plain), (0,)),
        "torch d2": Side("torch", twins.Twin(node, data=2, settings=plain), twins.FIRST),
        "torch d4r2": Side("torch", twins.Twin(node, data=4, replicate=2, settings=plain), twins.ALL),
        "megatron d1": Side("megatron", twins.Twin(node, settings=plain), (0,)),
        "megatron d2": Side("megatron", twins.Twin(node, data=2, settings=plain), twins.SECOND),
        "megatron t2": Side("megatron", twins.Twin(node, tensor=2, settings=sp), twins.FIRST),
        "megatron p2": Side("megatron", twins.Twin(node, pipe=2, settings=plain), twins.SECOND),
        "megatron d2t2": Side("megatron", twins.Twin(node, data=2, tensor=2, settings=sp), twins.ALL),
        "megatron t4": Side("megatron", twins.Twin(node, tensor=4, settings=sp), twins.ALL),
    }


def expert_sides(node: str = "experts", **settings: object) -> dict[str, Side]:
    """Return the layouts of a model with experts."""

    def twin(**sizes: int) -> twins.Twin:
        return twins.Twin(node, settings=dict(settings), **sizes)

    return {
        "torch d2": Side("torch", twin(data=2), twins.FIRST),
        "torch d4r2": Side("torch", twin(data=4, replicate=2), twins.ALL),
        "megatron d2e2": Side("megatron", twin(data=2, expert=2), twins.FIRST),
        "megatron t2": Side("megatron", twin(tensor=2), twins.SECOND),
        "megatron d2c2e2": Side("megatron", twin(data=2, context=2, expert=2), twins.ALL),
    }


EXPERTS = expert_sides()
PPO, CRITIC, HALF = sides("ppo"), sides("critic"), sides("ppo", dtype="bf16")
PAIRS = [
    ("torch d1", "torch d2"),
    ("torch d2", "torch d4r2"),
    ("torch d2", "megatron d2t2"),
    ("torch d4r2", "megatron p2"),
    ("megatron d2", "torch d1"),
    ("megatron d2", "megatron t2"),
    ("megatron t2", "torch d4r2"),
    ("megatron t2", "megatron p2"),
    ("megatron p2", "megatron d2"),
    ("megatron d2t2", "torch d2"),
    ("megatron t4", "torch d1"),  # each of two key-value heads was on two ranks
    ("torch d1", "megatron t4"),
]
"""Who writes, and who reads it."""
CRITIC_PAIRS = [("megatron p2", "torch d1"), ("torch d2", "megatron t2"), ("megatron d2", "megatron p2")]
CRITIC_PAIRS.append(("torch d4r2", "megatron t2"))
HALF_PAIRS = [
    ("megatron d2", "torch d2"),
    ("torch d2", "megatron t2"),
    ("megatron t2", "megatron d2"),
    ("torch d4r2", "torch d2"),
    ("torch d2", "torch d4r2"),
]
EXPERT_PAIRS = [
    ("torch d2", "megatron d2e2"),
    ("torch d4r2", "torch d2"),
    ("megatron d2e2", "megatron t2"),
    ("megatron t2", "megatron d2c2e2"),
    ("megatron d2c2e2", "torch d2"),
]
ADAPTERS = sides("adapters")
ADAPTER_PAIRS = [
    ("torch d1", "megatron t2"),
    ("torch d2", "megatron d2t2"),
    ("megatron t2", "megatron p2"),
    ("megatron p2", "torch d2"),
    ("megatron d2t2", "megatron t4"),
    ("megatron t4", "torch d1"),
]
OUTER_PAIRS = [("torch d2", "megatron d2t2"), ("megatron d2t2", "megatron p2"), ("megatron t2", "torch d1")]
Exchange = tuple[dict[str, Side], list[tuple[str, str]]]
EXCHANGES: list[Exchange] = [
    (PPO, PAIRS),
    (CRITIC, CRITIC_PAIRS),
    (EXPERTS, EXPERT_PAIRS),
    (expert_sides("deepseek_v2"), EXPERT_PAIRS[2:]),
    (expert_sides("deepseek_v3"), [("torch d2", "megatron t2"), ("megatron t2", "torch d2")]),
    (sides("glm4"), [("torch d2", "megatron t2"), ("megatron t2", "torch d1")]),
    (ADAPTERS, ADAPTER_PAIRS),
    (sides("outer adapters"), OUTER_PAIRS),
    (expert_sides("adapters of experts"), EXPERT_PAIRS),
    (HALF, HALF_PAIRS),
]


GROUPS = (
    WeightGroupConfig("*.q_proj.bias", weight_decay=0.2),
    WeightGroupConfig("*.[kv]_proj.bias", weight_decay=0.2),
    WeightGroupConfig("*norm.weight", lr=0.004),
    WeightGroupConfig("*.mlp.*", lr=0.003),
)
_SHARED = kit.SETTINGS.optim
OPTIMIZERS = {
    "sgd": replace(_SHARED, name="sgd", lr=0.1, eps=1e-8, momentum=0.9, nesterov=True, groups=GROUPS),
    "muon": replace(_SHARED, name="muon", momentum=0.9),
    "adamw_8bit": replace(_SHARED, name="adamw_8bit"),
    "adamw_cpu": replace(_SHARED, name="adamw_cpu"),
}
"""Settings of other optimizers, some with groups of weights."""
ROUNDED = ("adamw_8bit",)
"""Optimizers that round otherwise in each layout, in which other weights share a block."""
OF_OPTIMIZERS: dict[str, Exchange] = {
    name: (
        sides("ppo", optim=optim),
        [
            ("torch d1", "torch d2"),
            ("torch d2", "megatron d2t2"),
            ("torch d4r2", "megatron p2"),
            ("torch d2", "megatron d1"),
            ("megatron d2t2", "torch d4r2"),
            ("megatron p2", "megatron d2"),
            ("megatron t2" if name in ROUNDED else "megatron t4", "megatron t2"),
        ],
    )
    for name, optim in OPTIMIZERS.items()
}
OF_OPTIMIZERS["muon with experts"] = (expert_sides(optim=OPTIMIZERS["muon"]), EXPERT_PAIRS)
OF_OPTIMIZERS["muon with adapters of experts"] = (
    expert_sides("adapters of experts", optim=OPTIMIZERS["muon"]),
    [("torch d2", "megatron d2c2e2"), ("megatron d2c2e2", "megatron t2"), ("megatron t2", "torch d2")],
)
"""Optimizer -> the layouts that train with it, and continue from each other."""


def written(side: Side) -> str:
    """Return the directory of a side's checkpoint."""
    return f"shards of {side.name}"


def division(side: Side) -> str:
    """Return the name of the files that say which boxes the ranks of a side update."""
    return f"division of {side.name}"


def read(writer: Side, reader: Side) -> str:
    """Return the name of a reader's files."""
    return f"{reader.name} from {writer.name}"


def exchange(rank: int, directory: str) -> None:
    """Run a spawned rank."""
    import megatron_twin_ranks
    import shard_ranks

    megatron_twin_ranks.run(rank, Path(directory), shard_ranks.exchange)


def exchange_optimizers(rank: int, directory: str) -> None:
    """Run a spawned rank with other optimizers."""
    import megatron_twin_ranks
    import shard_ranks

    megatron_twin_ranks.run(rank, Path(directory), shard_ranks.exchange_optimizers)
