"""The largest micro-batch that a batch node puts through a model, from the batch's bounds.

Bounds, not means: what is refused or let pass must hold for the longest samples that the run allows.
Prompts that a group shares are counted for every member, as its members may be apart.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Whether its sequences may be of different lengths."""


def largest_microbatch(
    plan: Plan, node: Node, lengths: Workload, asked: ModelConfig, data: int
) -> MicroBatch:
    """The largest micro-batch of a dp rank at a node.

    It fills the budget of tokens, but is never less than one longest unit (a sequence, or a group that
    has to stay together), and never more than the rank's share of a minibatch.

    Args:
        plan: says how the node cuts its batch, and how large groups are.
        node: trains or infers.
        lengths: of the node's root stream.
        asked: the budget of tokens.
        data: dp ranks that share a minibatch.
    """
    stream = plan.schedule.streams[0]
    size = root_stream(plan.graph, node).group
    cut = dict(plan.cuts).get(node.name, BatchCut(1, 1, keeps_groups_whole(node)))
    num_groups = -(-(stream.batch or 1) // cut.minibatches)
    num_samples = -(-num_groups // data) * size if cut.by_group else -(-num_groups * size // data)
    longest = lengths.prompt + lengths.max_response
    share = num_samples * longest
    unit = longest * (size if _packs_groups(node) else 1)
    tokens = min(max(asked.tokens_per_microbatch, unit), share)
    return MicroBatch(
        tokens=tokens,
        num_learned=-(-tokens * lengths.max_response // longest),
        num=-(-share // tokens),
        pads=lengths.response_cv > 0,
    )


def _packs_groups(node: Node) -> bool:
    """Whether a group is never split over micro-batches: its body makes or reads groups."""
    makes = any(returned.unit is Unit.GROUP for returned in node.spec.returns)
    return makes or any(read.field == "group" for read in node.reads)
