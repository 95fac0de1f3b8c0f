"""The largest micro-batch of a train or infer node, from the bounds of its batch.

Bounds and not means are used, so that a plan that is accepted fits for the longest samples that the run
allows. A prompt that a group shares counts for every sample, as the group may be split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Node
from hflow.planner.data.data_rules import keeps_groups_whole
from hflow.planner.graph_queries import root_stream
from hflow.planner.ir import BatchCut, Plan
from hflow.planner.workload import Workload
from hflow.types import Unit


@dataclass(frozen=True)
class MicroBatch:
    """What a dp rank computes at once."""

    tokens: int
    """T, packed."""
    num_learned: int
    """N: the tokens whose logits are needed."""
    num: int
    """Micro-batches of a minibatch."""
    pads: bool
    """Whether its sequences may have different lengths."""

    def divided(self, num_ranks: int) -> MicroBatch:
        """Return the part of one of several context ranks, which divide the tokens of every sequence."""
        tokens, num_learned = -(-self.tokens // num_ranks), -(-self.num_learned // num_ranks)
        return replace(self, tokens=tokens, num_learned=num_learned)


def largest_microbatch(
    plan: Plan, node: Node, workload: Workload, config: ModelConfig, data: int
) -> MicroBatch:
    """Return the largest micro-batch of a dp rank at a node.

    It fills the token budget. It has at least one unit of the greatest length (a sequence, or a group that is
    not split), and at most the rank's share of a minibatch.

    Args:
        plan: gives the node's minibatches and the size of groups.
        node: trains or infers.
        workload: lengths of the node's root stream.
        config: gives the token budget.
        data: dp ranks that share a minibatch.
    """
    stream = plan.schedule.streams[0]
    group_size = root_stream(plan.graph, node).group
    cut = dict(plan.cuts).get(node.name, BatchCut(1, 1, keeps_groups_whole(node)))
    num_groups = -(-(stream.batch or 1) // cut.minibatches)
    unit_size = group_size if cut.by_group else 1
    num_samples = -(-num_groups * group_size // (data * unit_size)) * unit_size
    longest = workload.prompt + workload.max_response
    share = num_samples * longest
    unit = longest * (group_size if _packs_groups(node) else 1)
    tokens = min(max(config.tokens_per_microbatch, unit), share)
    return MicroBatch(
        tokens=tokens,
        num_learned=-(-tokens * workload.max_response // longest),
        num=-(-share // tokens),
        pads=workload.response_cv > 0,
    )


def _packs_groups(node: Node) -> bool:
    """Return whether a group is never split over micro-batches, as its body returns or reads groups."""
    returns_groups = any(returned.unit is Unit.GROUP for returned in node.spec.returns)
    return returns_groups or any(read.field == "group" for read in node.reads)
