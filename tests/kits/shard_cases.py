"""Pairs of a writer and a reader of sharded checkpoints. Imports no megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import megatron_twins as twins

NUM_WRITTEN = 2
"""Steps before a checkpoint; one more follows."""


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
        "megatron d2": Side("megatron", twins.Twin(node, data=2, settings=plain), twins.SECOND),
        "megatron t2": Side("megatron", twins.Twin(node, tensor=2, settings=sp), twins.FIRST),
        "megatron p2": Side("megatron", twins.Twin(node, pipe=2, settings=plain), twins.SECOND),
        "megatron d2t2": Side("megatron", twins.Twin(node, data=2, tensor=2, settings=sp), twins.ALL),
        "megatron t4": Side("megatron", twins.Twin(node, tensor=4, settings=sp), twins.ALL),
    }


EXPERTS = {
    "torch d2": Side("torch", twins.Twin("experts", data=2), twins.FIRST),
    "torch d4r2": Side("torch", twins.Twin("experts", data=4, replicate=2), twins.ALL),
    "megatron d2e2": Side("megatron", twins.Twin("experts", data=2, expert=2), twins.FIRST),
    "megatron t2": Side("megatron", twins.Twin("experts", tensor=2), twins.SECOND),
    "megatron d2c2e2": Side("megatron", twins.Twin("experts", data=2, context=2, expert=2), twins.ALL),
}
PPO, CRITIC, HALF = sides("ppo"), sides("critic"), sides("ppo", dtype="bf16")
PAIRS = [
    ("torch d1", "torch d2"),
    ("torch d1", "megatron p2"),
    ("torch d2", "torch d1"),
    ("torch d2", "torch d4r2"),
    ("torch d2", "megatron t2"),
    ("torch d2", "megatron d2t2"),
    ("torch d4r2", "torch d1"),
    ("torch d4r2", "megatron p2"),
    ("megatron d2", "torch d1"),
    ("megatron d2", "megatron t2"),
    ("megatron t2", "torch d2"),
    ("megatron t2", "torch d4r2"),
    ("megatron t2", "megatron p2"),
    ("megatron p2", "torch d1"),
    ("megatron p2", "megatron d2"),
    ("megatron d2t2", "torch d2"),
    ("megatron d2t2", "megatron d2"),
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
EXCHANGES = [
    (PPO, PAIRS),
    (CRITIC, CRITIC_PAIRS),
    (EXPERTS, EXPERT_PAIRS),
    (ADAPTERS, ADAPTER_PAIRS),
    (HALF, HALF_PAIRS),
]


def written(side: Side) -> str:
    """Return the directory of a side's checkpoint."""
    return f"shards of {side.name}"


def read(writer: Side, reader: Side) -> str:
    """Return the name of a reader's files."""
    return f"{reader.name} from {writer.name}"


def exchange(rank: int, directory: str) -> None:
    """Run a spawned rank."""
    import megatron_twin_ranks
    import shard_ranks

    megatron_twin_ranks.run(rank, Path(directory), shard_ranks.exchange)
