"""What the executor asks of each worker, sent as one message each."""

from __future__ import annotations

from collections import defaultdict

from hflow.plan.redistribute import Shards
from hflow.workers.base import ComputeOrder, GroupOrder, NodeTask, ShardInput


class Orders:
    """What one round of instructions asks of each worker."""

    def __init__(self) -> None:
        self.groups: dict[int, list[GroupOrder]] = defaultdict(list)
        self.computes: dict[int, list[ComputeOrder]] = defaultdict(list)


def node_tasks(node: str, step: int, heads: tuple[int, ...], assignment: Shards) -> dict[int, NodeTask]:
    """One task a worker, with the shards that the plan maps onto it."""
    inputs: dict[int, list[ShardInput]] = defaultdict(list)
    for dp, (head, minibatches) in enumerate(zip(heads, assignment, strict=True)):
        inputs[head].append(ShardInput(dp, minibatches))
    return {worker: NodeTask(node, step, tuple(held)) for worker, held in inputs.items()}
