"""Check that layouts can split their models, and name the nearest layout that can."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from hflow.base.errors import PlanError
from hflow.base.text import format_ranges
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.optimizers import OPTIMIZERS, states_of
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.planner.weights.sharding import can_split, is_on_stage
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import ModelShape, TensorSpec, kinds_of_layers, layer_tensors, other_tensors

_SPLIT_TENSORS = {
    "model.layers.{}.self_attn.q_proj.weight": "{} heads",
    "model.layers.{}.self_attn.q_b_proj.weight": "{} heads",
    "model.layers.{}.self_attn.k_proj.weight": "{} key-value heads",
    "model.layers.{}.mlp.gate_proj.weight": "an intermediate size of {}",
    "model.layers.{}.mlp.experts.gate_proj.weight": "experts with an intermediate size of {}",
    "model.layers.{}.mlp.shared_experts.gate_proj.weight": "shared experts with an intermediate size of {}",
    "model.embed_tokens.weight": "a vocabulary of {}",
}
"""One tensor for each kind of unit that the tensor axis splits, and the text for its units."""


def check_layouts(replicas: Iterable[Replica], request: PlanRequest) -> None:
    """Check that the tensor and pipeline axes divide every model of known sizes.

    The tensor size must divide the heads, the key-value heads (or be a multiple of them), the intermediate
    size and, unless the backend pads it, the vocabulary. Every stage needs a layer.

    Raises:
        PlanError: naming the replica, the axis, sizes that fit and the nearest layout that works.
    """
    for replica in replicas:
        _check_kind(replica, request.cluster)
        if replica.role == "gen" and replica.layout.context > 1:
            raise PlanError(
                f"{replica.name}: layout {replica.layout} has a context axis, but generation does not divide "
                f"sequences; {_with_data(replace(replica.layout, context=1, expert=1), replica)}"
            )
        shape = request.shapes.get(replica.model)
        if shape is not None:
            _check(replica, shape, traits(replica.backend))
            _check_experts(replica, shape)
            _check_adapters(replica, request)
            _check_quantized_states(replica, shape, request)


def _check_kind(replica: Replica, cluster: ClusterSpec) -> None:
    """Refuse ranks of a replica on devices of several kinds: all would be as slow as the slowest."""
    if len({cluster.part_index(worker) for worker in replica.workers}) > 1:
        parts = zip(cluster.kinds, cluster.first_devices, strict=True)
        listed = " and ".join(
            f"{format_ranges(range(first, first + part.num_devices))} ({part.name})" for part, first in parts
        )
        raise PlanError(f"{replica.name} has devices of several kinds; place it on those of one: {listed}")


def _with_data(layout: Layout, replica: Replica) -> str:
    """Return the layout with as many data ranks as the replica has devices for, and its expert axis."""
    data = replica.layout.world // (layout.tensor * layout.pipe)
    return f"{replace(layout, data=data, expert=math.gcd(data, replica.layout.expert))} fits"


def _check_adapters(replica: Replica, request: PlanRequest) -> None:
    """Refuse a pipeline stage that has nothing to train, as adapters are in other layers."""
    shape, layout = request.trained_shape(replica.model), replica.layout
    if replica.role != "train" or shape is None or shape.adapter is None:
        return
    for stage, layers in enumerate(stage_layers(shape.num_layers, layout.pipe)):
        of_stage = (spec for spec in other_tensors(shape) if is_on_stage(spec, shape, stage, layout.pipe))
        if not any(".lora_" in spec.name for spec in of_stage) and not any(
            layer_tensors(shape, layer) for layer in range(*layers)
        ):
            raise PlanError(
                f"{replica.name}: stage {stage} of layout {layout} has no matrix of "
                f"models.{replica.model}.lora.targets, so it has nothing to train; set fewer stages, or more "
                "targets"
            )


def _check_quantized_states(replica: Replica, shape: ModelShape, request: PlanRequest) -> None:
    """Refuse copies of key-value heads whose states share blocks with different heads, and would differ."""
    layout, optim = replica.layout, request.model(replica.model).optim
    has_copies = layout.tensor > shape.num_kv_heads and not traits(replica.backend).shards_weights
    is_quantized = any(state.num_bytes < state.saved_bytes for state in states_of(optim, True))
    if replica.role == "train" and has_copies and is_quantized:
        fitting = math.gcd(layout.tensor, shape.num_kv_heads)
        raise PlanError(
            f"{replica.name}: layout {layout} has copies of {shape.num_kv_heads} key-value heads, which "
            f"{optim.name} would quantise differently on each rank; {fitting} tensor ranks fit, or set "
            f"models.{replica.model}.optim.name={OPTIMIZERS.default}"
        )


def _check_experts(replica: Replica, shape: ModelShape) -> None:
    layout = replica.layout
    if layout.expert == 1:
        return
    if shape.experts is None:
        raise PlanError(
            f"{replica.name}: layout {layout} has an expert axis, but a model of family {shape.family} has "
            f"no experts; {replace(layout, expert=1)} fits"
        )
    if shape.experts.num % layout.expert:
        fitting = math.gcd(layout.expert, shape.experts.num)
        raise PlanError(
            f"{replica.name}: {shape.experts.num} experts cannot be split over {layout.expert} expert ranks; "
            f"{fitting} fits: {replace(layout, expert=fitting)}"
        )


def _check(replica: Replica, shape: ModelShape, backend: BackendTraits) -> None:
    layout, split_tensors = replica.layout, _split_tensors(shape)
    fits_pipe = range(1, shape.num_layers + 1)
    if layout.pipe in fits_pipe and all(can_split(spec, backend, layout.tensor) for spec, _ in split_tensors):
        return
    fits_tensor = [
        size
        for size in range(1, layout.world + 1)
        if all(can_split(spec, backend, size) for spec, _ in split_tensors)
    ]
    best = _nearest_layout(layout, fits_tensor, fits_pipe)
    for spec, units in split_tensors:
        if not can_split(spec, backend, layout.tensor):
            max_size = layout.stage_size
            fitting = _fitting([size for size in fits_tensor if size <= max_size], layout.tensor, best.tensor)
            raise PlanError(
                f"{replica.name}: {units.format(spec.split_units)} cannot be split over {layout.tensor} "
                f"tensor ranks; {fitting}: {best}"
            )
    raise PlanError(
        f"{replica.name}: {shape.num_layers} layers cannot be split over {layout.pipe} pipeline stages; "
        f"{_fitting(fits_pipe, layout.pipe, best.pipe)}: {best}"
    )


def _split_tensors(shape: ModelShape) -> list[tuple[TensorSpec, str]]:
    kinds = kinds_of_layers(shape)
    specs = {spec.name: spec for spec in (*chain.from_iterable(kinds), *other_tensors(shape))}
    return [(specs[name], units) for name, units in _SPLIT_TENSORS.items() if name in specs]


def _nearest_layout(layout: Layout, fits_tensor: Sequence[int], fits_pipe: Sequence[int]) -> Layout:
    """Return the nearest layout on as many devices: the pipeline axis changes least, then the tensor axis."""
    world = layout.world // layout.context
    pairs = [(t, p) for t in fits_tensor for p in fits_pipe if world % (t * p) == 0]
    t, p = min(pairs, key=lambda pair: (abs(pair[1] - layout.pipe), abs(pair[0] - layout.tensor), pair))
    data = world // (t * p)
    return replace(layout, data=data, tensor=t, pipe=p, expert=math.gcd(layout.expert, data * layout.context))


def _fitting(sizes: Sequence[int], wanted: int, chosen: int) -> str:
    """Name the nearest size that fits, and the size that the proposed layout has."""
    nearest = min(sizes, key=lambda size: (abs(size - wanted), size))
    return f"{nearest} fits" if nearest == chosen else f"{nearest} and {chosen} fit"
