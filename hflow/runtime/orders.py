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


def node_tasks(
    node: str, step: int, heads: tuple[int, ...], workers: tuple[int, ...], assignment: Shards
) -> dict[int, NodeTask]:
    """One task a worker, with the shards that the plan maps onto it.

    Args:
        node: the node that fires.
        step: for this step.
        heads: dp index -> worker that is given its shard.
        workers: all workers of the node's replica; those that are no heads take part without a shard.
        assignment: dp index -> minibatches of samples.
    """
    inputs: dict[int, list[ShardInput]] = {worker: [] for worker in workers}
    for dp, (head, minibatches) in enumerate(zip(heads, assignment, strict=True)):
        inputs.setdefault(head, []).append(ShardInput(dp, minibatches))
    return {worker: NodeTask(node, step, tuple(held)) for worker, held in inputs.items()}
