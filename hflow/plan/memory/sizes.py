"""How many entries of a model one rank holds, stage by stage.

All numbers are those of data rank 0 and tensor rank 0, as no other rank of the stage holds more: equal
blocks leave only the last ranks less, and a padded vocabulary's padding takes memory all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from hflow.plan.layout import Layout
from hflow.plan.shape import ModelShape, TensorSpec, layer_template, other_tensors
from hflow.plan.sharding import box_of, is_on_stage, stage_layers
from hflow.plan.traits import BackendTraits
from hflow.types.boxes import numel


@dataclass(frozen=True)
class StageSizes:
    """Entries of a model on one rank of a pipeline stage."""

    num_layers: int
    """Decoder layers of the stage."""
    layer: int
    """One decoder layer, whole over the data axis."""
    layer_shard: int
    """The data rank's part of it."""
    rest: int
    """Embedding, final norm and head, as far as the stage has them, whole over the data axis."""
    rest_shard: int
    """The data rank's part of it."""
    embedding: int
    """The embedding where the stage looks tokens up, else 0."""
    output: int
    """The matrix that makes logits (a tied embedding too) where the stage does, else 0."""

    @property
    def whole(self) -> int:
        """All entries of the stage, whole over the data axis."""
        return self.num_layers * self.layer + self.rest

    @property
    def shard(self) -> int:
        """The data rank's part of them."""
        return self.num_layers * self.layer_shard + self.rest_shard


@lru_cache
def stage_sizes(shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int) -> StageSizes:
    """The entries of a stage.

    Raises:
        PlanError: when the tensor axis does not divide what it cuts.
    """
    first, last = stage_layers(shape.num_layers, layout.pipe)[stage]
    rest = [spec for spec in other_tensors(shape) if is_on_stage(spec, shape, stage, layout.pipe)]
    undivided = replace(layout, data=1)
    is_last = stage == layout.pipe - 1
    makes_logits = "embedding" if shape.is_tied else "head"
    return StageSizes(
        num_layers=last - first,
        layer=_entries(layer_template(shape), traits, undivided),
        layer_shard=_entries(layer_template(shape), traits, layout),
        rest=_entries(rest, traits, undivided),
        rest_shard=_entries(rest, traits, layout),
        embedding=_entries([s for s in rest if s.place == "embedding" and stage == 0], traits, undivided),
        output=_entries([s for s in rest if s.place == makes_logits and is_last], traits, undivided)
        if shape.head == "lm"
        else 0,
    )


def _entries(specs: Iterable[TensorSpec], traits: BackendTraits, layout: Layout) -> int:
    boxes = (box_of(spec, traits, layout, (0, 0, 0)) for spec in specs)
    return sum(numel(box) for box in boxes if box is not None)
