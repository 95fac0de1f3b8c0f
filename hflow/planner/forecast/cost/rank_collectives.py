"""The collectives of one rank in passes and updates: which, how large, and how often.

The seconds of a train node are the sum of their times, and `tests/unit/test_fake_ranks.py` compares their
numbers and bytes with those that backends issue. The time of a node is that of the first pipeline stage, as
no other has more weights. Not listed are the metrics and the objects that ranks exchange a few times in each
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from hflow.planner.forecast.cost.collectives import (
    LinkTime,
    RankPlacement,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    send,
)
from hflow.planner.forecast.cost.flops import (
    Work,
    attention_parameters,
    head_parameters,
    layer_parameters,
)
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.memory.rank import FP32_BYTES, StageSizes, stage_sizes
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import (
    MAGNITUDE,
    A,
    LatentAttention,
    ModelShape,
    equal_layers,
    expert_layers,
    layer_template,
    undivided_parameters,
)

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
Ranks = Literal[
    "data", "tensor", "pipe", "context", "expert", "expert_data", "shard", "replicate", "ends", "head copies"
]
"""The ranks that exchange: those of a field of `ReplicaCosts`, the first and the last pipeline stage, or the
tensor ranks that hold the same key-value head."""

MIN_UNIT_BYTES = 4 << 20
"""FSDP gathers layers below this size, in fp32, together with the rest of the model."""
MIN_BUCKET_WEIGHTS = 40_000_000
BUCKET_WEIGHTS_PER_RANK = 1_000_000
"""Megatron exchanges weights and gradients in buckets of so many weights, or so many for each data rank."""
COUNT_BYTES = 8
"""Bytes of the number of tokens that a rank sends to an expert."""


class Collectives(NamedTuple):
    """Equal collectives of a rank, one after the other, or messages between two stages."""

    kind: Kind
    ranks: Ranks
    num_bytes: float
    """Bytes of one collective: of the larger one of input and output."""
    times: float
    is_beside_products: bool = False
    """Whether a product of matrices is computed meanwhile, which hides it."""

    def link_time(self, replica: ReplicaCosts) -> LinkTime:
        """Return the time of all of them."""
        hardware = replica.hardware
        if self.kind == "send":
            return send(self.num_bytes, replica.stage_link, hardware).times(self.times)
        time = _TIMES[self.kind](self.num_bytes, _placement(replica, self.ranks), hardware)
        is_hidden = self.is_beside_products and replica.launches_ahead
        return time.times(self.times * (hardware.calibration.overlap_cost if is_hidden else 1.0))


_TIMES = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
}


def total_time(collectives: Iterable[Collectives], replica: ReplicaCosts) -> LinkTime:
    """Return the time of collectives one after the other."""
    times = [one.link_time(replica) for one in collectives]
    return LinkTime(sum(time.transfer for time in times), sum(time.latency for time in times))


class Passes(NamedTuple):
    """The passes of each micro-batch through the layers."""

    num: int
    """Micro-batches."""
    forward: int
    """Forward passes of one: two where the backward pass computes it again."""
    backward: int

    @classmethod
    def of(cls, num: int, num_passes: int) -> Passes:
        """Return the passes of `num` micro-batches: 1 forward, 2 with backward, 3 with recomputation."""
        return cls(num, max(1, num_passes - 1), min(1, num_passes - 1))

    @property
    def both(self) -> int:
        """Passes of all micro-batches."""
        return self.num * (self.forward + self.backward)


def train_collectives(replica: ReplicaCosts, work: Work, passes: Passes, stage: int = 0) -> list[Collectives]:
    """Return all collectives of a rank's part of a minibatch: those of its passes, and of the update."""
    return [
        *tensor_collectives(replica, work, passes, stage),
        *stage_messages(replica, work, passes),
        *context_collectives(replica, work, passes, stage),
        *expert_collectives(replica, work, passes, stage),
        *fsdp_gathers(replica, passes),
        *fsdp_scatters(replica, passes),
        *replicated_gradients(replica, passes),
        *bucket_collectives("reduce-scatter", replica, stage),
        *bucket_collectives("all-gather", replica, stage),
        *shared_gradients(replica, stage),
        gradient_norm(replica),
    ]


# ------------------------------------------------------------------------------- passes
def tensor_collectives(
    replica: ReplicaCosts, work: Work, passes: Passes, stage: int = 0
) -> Iterator[Collectives]:
    """Yield the exchanges of tensor ranks: twice in each layer and pass, and at the ends of the model.

    Either sums of hidden states, or with sequence parallelism an all-gather in front of a pair of matrices
    and a reduce-scatter behind it. The backward pass then gathers inputs again, beside a product. Source:
    Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
    """
    if replica.layout.tensor == 1:
        return
    num_layers, latent = _num_layers(replica, stage), replica.shape.latent
    num_pairs = 2 * num_layers
    experts = replica.shape.experts
    if replica.traits.sends_expert_copies and not (experts and experts.shared):  # others are no such pair
        num_pairs -= _num_expert_layers(replica, stage)
    hidden = work.rows / passes.num * replica.shape.hidden * replica.itemsize
    overlaps = replica.traits.overlaps_tensor
    embeds = passes.num if stage == 0 else 0
    heads = passes.num if stage == replica.layout.pipe - 1 else 0
    backward = passes.num * passes.backward
    adapts = replica.trains_adapters
    # Every tensor rank computes the whole of a value or score head, and thus its whole gradient.
    summed_heads = heads * passes.backward if replica.shape.head == "lm" else 0
    if replica.token_share == 1:
        yield Collectives("all-reduce", "tensor", hidden, num_pairs * passes.both, overlaps)
        yield Collectives("all-reduce", "tensor", hidden, embeds + summed_heads)
    else:
        if latent is not None:
            num_pairs -= num_layers
            yield from _latent_exchanges(replica, latent, hidden, passes, num_layers)
        yield Collectives("all-gather", "tensor", hidden, num_pairs * passes.both, overlaps)
        yield Collectives("reduce-scatter", "tensor", hidden, num_pairs * passes.both, overlaps)
        if not adapts:  # frozen matrices need no inputs in the backward pass, and embeddings no gradients
            yield Collectives("all-gather", "tensor", hidden, num_pairs * backward, is_beside_products=True)
            yield Collectives("all-gather", "tensor", hidden, embeds * passes.backward)
        yield Collectives("all-gather", "tensor", hidden, heads)
        yield Collectives("reduce-scatter", "tensor", hidden, embeds + summed_heads)
    if heads and replica.shape.head == "lm":
        yield from _vocabulary_sums(replica, work, passes)
    if adapts:
        yield from _adapter_exchanges(replica, work, passes, stage)
    elif _num_head_copies(replica) > 1:  # gradients of the weights, and of the biases, of keys and values
        weights = 2 * replica.shape.head_dim * replica.itemsize
        yield Collectives("all-reduce", "head copies", weights * replica.shape.hidden, backward * num_layers)
        if replica.shape.has_qkv_bias:
            yield Collectives("all-reduce", "head copies", weights, backward * num_layers)


def _latent_exchanges(
    replica: ReplicaCosts, latent: LatentAttention, hidden: float, passes: Passes, num_layers: int
) -> Iterator[Collectives]:
    """Yield the exchanges of latent attention, whose small vectors are gathered in place of hidden states.

    The backward pass gathers those again that matrices multiply, all but the rotated ones.
    """
    overlaps, row = replica.traits.overlaps_tensor, hidden / replica.shape.hidden
    forward, backward = (num_layers * passes.num * x for x in (passes.forward, passes.backward))
    yield Collectives("reduce-scatter", "tensor", hidden, forward, overlaps)
    yield Collectives("all-gather", "tensor", hidden, backward, overlaps)
    multiplied = (replica.shape.hidden if latent.q_rank is None else latent.q_rank, latent.kv_rank)
    for size in (*multiplied, latent.rope):
        yield Collectives("all-gather", "tensor", row * size, forward, overlaps)
        yield Collectives("reduce-scatter", "tensor", row * size, backward, overlaps)
    for size in multiplied:
        yield Collectives("all-gather", "tensor", row * size, backward, is_beside_products=True)


def _adapter_exchanges(
    replica: ReplicaCosts, work: Work, passes: Passes, stage: int
) -> Iterator[Collectives]:
    """Yield the exchanges of tensor ranks between the two matrices of adapters, r numbers for each token.

    Those of matrices that have the same input are exchanged together. Where ranks divide outputs, gradients
    are summed; where they divide inputs, the numbers themselves, and with DoRA the squares of rows.
    """
    row = work.rows / passes.num * replica.itemsize
    layers = stage_layers(replica.shape.num_layers, replica.layout.pipe)[stage]
    for first, last in equal_layers(replica.trained_shape, *layers):
        forward = passes.num * passes.forward * (last - first)
        backward = passes.num * passes.backward * (last - first)
        sizes: dict[tuple[str, bool], int] = {}
        """(Attention or MLP, whether ranks divide inputs) -> numbers of a token."""
        for spec in layer_template(replica.trained_shape, first):
            if spec.num_experts > 1:  # what tensor ranks exchange of experts is summed with it
                continue
            if spec.name.endswith(A):
                linear = spec.name.split(".")[-4], spec.split_axis is not None
                sizes[linear] = sizes.get(linear, 0) + spec.shape[0]
            elif spec.may_repeat and _num_head_copies(replica) > 1:
                head = spec.numel // spec.split_units * replica.itemsize
                yield Collectives("all-reduce", "head copies", head, backward)
            if spec.name.endswith(MAGNITUDE) and spec.split_axis is None:
                yield Collectives("all-reduce", "tensor", FP32_BYTES * spec.numel, forward)
        for (_, divides_inputs), size in sizes.items():
            scatters, gathers = (forward, backward) if divides_inputs else (backward, forward)
            if replica.token_share == 1:
                yield Collectives("all-reduce", "tensor", row * size, scatters)
            else:
                yield Collectives("all-gather", "tensor", row * size, gathers)
                yield Collectives("reduce-scatter", "tensor", row * size, scatters)


def _vocabulary_sums(replica: ReplicaCosts, work: Work, passes: Passes) -> Iterator[Collectives]:
    """Yield the exchanges of a vocabulary's parts for each learned token: a maximum, and three sums."""
    row = FP32_BYTES * work.learned / passes.num
    yield Collectives("all-reduce", "tensor", row, passes.num)
    yield Collectives("all-reduce", "tensor", 3 * row, passes.num)


def stage_messages(replica: ReplicaCosts, work: Work, passes: Passes) -> Iterator[Collectives]:
    """Yield hidden states that pass one boundary between stages, and their gradients on the way back."""
    if replica.layout.pipe > 1:
        hidden = work.rows / passes.num * replica.shape.hidden * replica.itemsize / replica.token_share
        yield Collectives("send", "pipe", hidden, passes.num * (1 + passes.backward))


def context_collectives(
    replica: ReplicaCosts, work: Work, passes: Passes, stage: int = 0
) -> Iterator[Collectives]:
    """Yield the exchanges of the ranks that divide each sequence.

    A forward pass gathers keys and values of the whole sequence, and a backward pass scatters the sums of
    their gradients. Source: Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2.
    """
    shape, layout = replica.shape, replica.layout
    if layout.context == 1:
        return
    value = shape.head_dim if shape.latent is None else shape.latent.value
    entries = max(shape.num_kv_heads, layout.tensor) * (shape.head_dim + value) / layout.tensor
    sequence = work.rows / passes.num * layout.context * entries * replica.itemsize
    num = passes.num * _num_layers(replica, stage)
    yield Collectives("all-gather", "context", sequence, num * passes.forward)
    yield Collectives("reduce-scatter", "context", sequence, num * passes.backward)
    if stage == layout.pipe - 1:  # log-probs of the learned tokens
        learned = FP32_BYTES * work.learned / passes.num * layout.context
        yield Collectives("all-reduce", "context", learned, passes.num)


def expert_collectives(
    replica: ReplicaCosts, work: Work, passes: Passes, stage: int = 0
) -> Iterator[Collectives]:
    """Yield the exchanges of ranks where a token is sent once for each of its experts.

    Copies go to the ranks of their experts with the router's weights, and their results return. Tensor ranks,
    which divide each expert, gather all copies in between, and sum the results. A backward pass does the
    same with gradients. Ranks also exchange how many tokens each expert gets.
    """
    shape, layout = replica.shape, replica.layout
    if shape.experts is None or not replica.traits.sends_expert_copies:
        return
    num = passes.num * _num_expert_layers(replica, stage)
    copies = work.rows / passes.num * shape.experts.per_token * replica.itemsize
    counts = COUNT_BYTES * shape.experts.num * layout.expert * layout.tensor
    both = num * (passes.forward + passes.backward)
    if layout.expert > 1:
        sent = copies / replica.token_share
        yield Collectives("all-to-all", "expert", sent * shape.hidden, 2 * both)
        yield Collectives("all-to-all", "expert", sent, both)
    if layout.tensor > 1:
        yield Collectives("all-gather", "tensor", copies, num * passes.forward)
        yield Collectives("reduce-scatter", "tensor", copies, num * passes.backward)
        yield Collectives("all-gather", "tensor", copies * shape.hidden, both)
        yield Collectives("reduce-scatter", "tensor", copies * shape.hidden, both)
    if layout.expert > 1 or layout.tensor > 1:
        counted: Ranks = "expert" if layout.expert > 1 else "tensor"
        yield Collectives("all-gather", counted, counts, num * passes.forward)


def _num_layers(replica: ReplicaCosts, stage: int) -> int:
    first, last = stage_layers(replica.shape.num_layers, replica.layout.pipe)[stage]
    return last - first


def _num_expert_layers(replica: ReplicaCosts, stage: int) -> int:
    shape = replica.shape
    return expert_layers(shape, *stage_layers(shape.num_layers, replica.layout.pipe)[stage])


# ------------------------------------------------------------------------ FSDP's weights
def num_units(replica: ReplicaCosts) -> int:
    """Return the number of units that FSDP gathers one after the other."""
    is_unit = _layer_weights(replica) * FP32_BYTES >= MIN_UNIT_BYTES
    return 1 + replica.shape.num_layers // replica.layout.pipe if is_unit else 1


def _layer_weights(replica: ReplicaCosts) -> float:
    """Return the mean elements of a layer that FSDP divides, with adapters, without matrices in 4 bits."""
    lora, shape = replica.config.lora, replica.shape
    if lora is None:
        return layer_parameters(shape)
    adapters = _trained_sizes(replica).layers / shape.num_layers
    return adapters if lora.base is not None else layer_parameters(shape) + adapters


def _trained_sizes(replica: ReplicaCosts) -> StageSizes:
    return stage_sizes(replica.trained_shape, replica.traits, replica.layout, 0)


def _trained_units(replica: ReplicaCosts) -> int:
    """Return the number of units whose gradients are summed: adapters may be in layers alone."""
    units = num_units(replica)
    is_frozen = replica.config.lora is not None and _trained_sizes(replica).rest == 0
    return units - 1 if units > 1 and is_frozen else units


def fsdp_gathers(replica: ReplicaCosts, passes: Passes) -> Iterator[Collectives]:
    """Yield the gathers of weights that are sharded over data ranks.

    A layer's weights are gathered in the forward and in the backward pass, where recomputation uses them too.
    Those outside of layers stay gathered until the backward pass has ended, or in inference after the first
    micro-batch. Below ZeRO stage 3, training gathers all of them once for all micro-batches.
    """
    if not is_sharded(replica, "everything"):
        return
    units, in_layers, ranks = num_units(replica), 0.0, _fsdp_ranks(replica)
    is_once = passes.backward and replica.config.zero_stage < 3
    times = 1 if is_once else passes.num * (1 + passes.backward)
    of_layer = _layer_weights(replica)
    if units > 1:
        layer = of_layer * replica.gathered_bytes
        in_layers = layer * (units - 1)
        yield Collectives("all-gather", ranks, layer, (units - 1) * times)
    whole = replica.stage_weights - replica.shape.num_layers * (layer_parameters(replica.shape) - of_layer)
    rest = whole * replica.gathered_bytes - in_layers
    yield Collectives("all-gather", ranks, rest, passes.num if passes.backward and not is_once else 1)


def fsdp_scatters(replica: ReplicaCosts, passes: Passes) -> Iterator[Collectives]:
    """Yield the sums of gradients in backward passes, where weights are sharded over data ranks.

    At ZeRO stage 1 there is one for all micro-batches.
    """
    if is_sharded(replica, "everything") and passes.backward:
        units = _trained_units(replica)
        gradients = replica.trained_weights / units * replica.gradient_bytes
        times = units if replica.config.zero_stage == 1 else passes.num * units
        yield Collectives("reduce-scatter", _fsdp_ranks(replica), gradients, times)


def replicated_gradients(replica: ReplicaCosts, passes: Passes) -> Iterator[Collectives]:
    """Yield the sums of each shard's gradients over a replicate axis, once for all micro-batches."""
    if replica.layout.replicate > 1 and is_sharded(replica, "everything") and passes.backward:
        units = _trained_units(replica)
        shard = replica.trained_weights / units / replica.layout.fsdp_size
        yield Collectives("all-reduce", "replicate", shard * replica.gradient_bytes, units)


def _fsdp_ranks(replica: ReplicaCosts) -> Ranks:
    return "data" if replica.layout.replicate == 1 else "shard"


def is_sharded(replica: ReplicaCosts, what: Literal["everything", "optimizer"]) -> bool:
    """Return whether ranks with equal parts of a model each keep a share of all, or of the optimizer."""
    return replica.traits.sharded_over_data == what and replica.layout.num_copies > 1


# --------------------------------------------------------------- a distributed optimizer
def bucket_collectives(
    kind: Literal["reduce-scatter", "all-gather"], replica: ReplicaCosts, stage: int = 0
) -> Iterator[Collectives]:
    """Yield the sums of gradients for a sharded optimizer state, or the gathers of new weights from it."""
    if not is_sharded(replica, "optimizer"):
        return
    layout, shape = replica.layout, replica.shape
    width = replica.gradient_bytes if kind == "reduce-scatter" else replica.gathered_bytes
    sizes = stage_sizes(replica.trained_shape, replica.traits, layout, stage)
    if replica.trains_adapters:
        limit = max(MIN_BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_RANK * layout.data)
        num = 1 if stage > 0 else max(1, math.ceil(sizes.total / limit))
        of_experts = sizes.experts if layout.expert > 1 else 0
        if of_experts and layout.num_expert_copies > 1:
            yield Collectives(kind, "expert_data", of_experts * width, 1)
        yield Collectives(kind, "data", (sizes.total - of_experts) * width / num, num)
        return
    num, num_of_experts = num_buckets(shape, layout, stage)
    divided = sizes.experts if layout.expert > 1 else 0
    if divided and layout.num_expert_copies > 1:
        yield Collectives(kind, "expert_data", divided * width / num_of_experts, num_of_experts)
    yield Collectives(kind, "data", (sizes.total - divided) * width / num, num)


@lru_cache(maxsize=4096)
def num_buckets(shape: ModelShape, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the buckets of a stage's weights, and those of experts that expert ranks divide.

    A bucket ends with the weight with which it has its size. An embedding that two stages share has its own.
    Stages after the first have one bucket for everything else, as nothing waits for it.
    """
    layers = stage_layers(shape.num_layers, layout.pipe)[stage]
    is_shared = shape.is_tied and layout.pipe > 1
    if stage > 0:
        has_experts = layout.expert > 1 and expert_layers(shape, *layers) > 0
        return 1 + (is_shared and stage == layout.pipe - 1), int(has_experts)
    limit = max(MIN_BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_RANK * layout.data)
    is_whole, d, t = layout.pipe == 1, shape.hidden, layout.tensor
    embedding = shape.vocab * d // t
    others: list[float] = [head_parameters(shape) // t] if is_whole and not shape.is_tied else []
    others += [d] if is_whole else []  # the last norm
    experts: list[float] = []
    out = shape.num_heads * (shape.head_dim if shape.latent is None else shape.latent.value) * d // t
    qkv = (attention_parameters(shape) + _copied_heads(shape, t)) // t - out
    for layer in reversed(range(*layers)):
        if shape.experts is None or not shape.experts.are_in(layer):
            others += [d * shape.intermediate // t, 2 * d * shape.intermediate // t]
        else:
            if shape.experts.shared:
                others += [d * shape.experts.shared // t, 2 * d * shape.experts.shared // t]
            one = d * shape.experts.intermediate // t * shape.experts.num // layout.expert
            (others if layout.expert == 1 else experts).extend((one, 2 * one))
            others.append(d * shape.experts.num)
        others += [d, qkv, out, d]  # norms: the last weight may have a bucket of its own
    num = _num_filled(others if is_shared else [*others, embedding], limit)
    return num + is_shared, _num_filled(experts, limit)


def _copied_heads(shape: ModelShape, num_tensor_ranks: int) -> int:
    """Return the weights of a layer's copies of key-value heads, on tensor ranks that are more than heads."""
    num_copied = max(shape.num_kv_heads, num_tensor_ranks) - shape.num_kv_heads
    return 0 if shape.latent else 2 * num_copied * shape.head_dim * shape.hidden


def _num_filled(sizes: Iterable[float], limit: int) -> int:
    num, filled = 0, 0.0
    for size in sizes:
        filled += size
        if filled >= limit:
            num, filled = num + 1, 0.0
    return num + (filled > 0)


def shared_gradients(replica: ReplicaCosts, stage: int = 0) -> Iterator[Collectives]:
    """Yield the sums of gradients over ranks that have the same weights but divide tokens or layers.

    Tensor ranks divide the tokens that norms, routers and other weights see that each of them has whole, or
    heads at least. The first and the last stage share a tied embedding. Beside adapters all of these are
    frozen; tensor ranks have one matrix of each adapter whole.
    """
    shape, layout = replica.shape, replica.layout
    if not replica.traits.is_model_parallel:
        return
    layers = stage_layers(shape.num_layers, layout.pipe)[stage]
    whole = undivided_parameters(replica.trained_shape, *layers, layout.expert)
    if replica.trains_adapters:
        if replica.token_share > 1 and whole:
            yield Collectives("all-reduce", "tensor", FP32_BYTES * whole, 1)
        return
    if layout.tensor > 1:
        of_heads = _num_layers(replica, stage) * 2 * shape.head_dim if shape.has_qk_norm else 0
        of_tokens = whole + (stage == layout.pipe - 1) * shape.hidden
        if weights := of_tokens if replica.token_share > 1 else of_heads:
            yield Collectives("all-reduce", "tensor", FP32_BYTES * weights, 1)
    is_end = stage in (0, layout.pipe - 1)
    if layout.pipe > 1 and is_end and shape.is_tied and shape.head == "lm":
        embedding = FP32_BYTES * shape.vocab * shape.hidden / layout.tensor
        yield Collectives("all-reduce", "ends", embedding, 1)


def gradient_norm(replica: ReplicaCosts) -> Collectives:
    """Return the sum of the squares of all ranks' gradients."""
    return Collectives("all-reduce", "data", FP32_BYTES, 1)


def _placement(replica: ReplicaCosts, ranks: Ranks) -> RankPlacement:
    if ranks == "ends":
        pipe = replica.pipe
        return RankPlacement(1, 2, min(pipe.racks, 2)) if pipe.machines > 1 else RankPlacement(2)
    if ranks == "head copies":  # neighbours
        size, per_machine = _num_head_copies(replica), replica.tensor.per_machine
        return RankPlacement(size) if size <= per_machine else RankPlacement(per_machine, size // per_machine)
    placement: RankPlacement = getattr(replica, ranks)
    return placement


def _num_head_copies(replica: ReplicaCosts) -> int:
    """Return the number of tensor ranks that hold the same key-value head."""
    return max(1, replica.layout.tensor // replica.shape.num_kv_heads)
