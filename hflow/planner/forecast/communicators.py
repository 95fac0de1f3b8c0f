"""The process groups of a rank. Each one that it uses is a communicator, with buffers on its device."""

from __future__ import annotations

import itertools

from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.layout import Layout, RankOrder
from hflow.shapes.model_shape import ModelShape


def rank_groups(
    layout: Layout, traits: BackendTraits, shape: ModelShape | None, rank: int
) -> frozenset[frozenset[int]]:
    """Return the sets of ranks of a training replica that have a group with a rank, without sets of one.

    Groups with the same ranks are one. Without model parallelism there is one, of all ranks, and with a
    replicate axis also those that FSDP shards weights over and that hold the same ones.

    Args:
        layout: the replica's layout.
        traits: the traits of the replica's backend.
        shape: the model's shape; None if the planner does not know its sizes.
        rank: the rank's index in the replica.
    """
    if not traits.is_model_parallel:
        return _several([range(layout.world), layout.fsdp_ranks(rank), layout.replicate_ranks(rank)])
    d, t, p, c = layout.coords(RankOrder.TRAIN, rank)
    copy = layout.copy_index(d, c)
    copies, tensor, stages = range(layout.num_copies), range(layout.tensor), range(layout.pipe)
    same_context = [layout.copy_index(other, c) for other in range(layout.data)]
    same_data = [layout.copy_index(d, other) for other in range(layout.context)]
    block = copy // layout.expert * layout.expert
    experts = range(block, block + layout.expert)
    ends = [0, layout.pipe - 1] if p in (0, layout.pipe - 1) else []
    sets = [
        (copies, tensor, stages),
        ([copy], tensor, [p]),
        (same_context, [t], [p]),
        (copies, [t], [p]),
        (same_data, [t], [p]),
        ([copy], [t], stages),
        ([copy], [t], ends),
        ([copy], tensor, stages),
        (same_data, tensor, [p]),
        (copies, tensor, [p]),
        (same_data, tensor, stages),
        (experts, [t], [p]),
        (range(copy % layout.expert, layout.num_copies, layout.expert), [t], [p]),
        (experts, tensor, [p]),
        (experts, tensor, stages),
    ]
    if shape is not None and layout.tensor > shape.num_kv_heads:  # ranks with the same key-value head
        size = layout.tensor // shape.num_kv_heads
        sets.append(([copy], range(t // size * size, (t // size + 1) * size), [p]))
    return _several(
        [
            {_rank(layout, at, tensor_index, stage) for at, tensor_index, stage in itertools.product(*axes)}
            for axes in sets
        ]
    )


def _rank(layout: Layout, copy: int, tensor: int, stage: int) -> int:
    """Return the rank with a copy index, a tensor index and a stage."""
    return (stage * layout.num_copies + copy) * layout.tensor + tensor


def _several(sets: list[range] | list[set[int]]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(ranks) for ranks in sets if len(ranks) > 1)
