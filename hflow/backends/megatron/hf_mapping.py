"""Which blocks of which checkpoint tensors each parameter of a rank consists of.

All reading and writing of weights goes through these rows: loading takes a rank's blocks, export puts the
blocks of all ranks together. They follow from dims and coordinates alone, so every rank knows what every
other holds. Pipeline stages own whole layers, the remainder going to the first stages; tensor ranks share
heads, MLP rows and the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hflow.backends.megatron.model_dims import ModelDims

VOCAB_MULTIPLE = 128
"""A tensor rank's part of the vocabulary is padded to a multiple of this."""

Span = tuple[int, int]
"""`[start, stop)`."""


@dataclass(frozen=True)
class TensorPart:
    """A block of a checkpoint tensor, whole on all axes but one, and its place in a parameter."""

    tensor: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    axis: int
    span: Span
    """The block, on that axis of the tensor."""
    at: int
    """Where the block begins on that axis of the parameter."""

    @property
    def length(self) -> int:
        """Of the block on its axis."""
        return self.span[1] - self.span[0]

    @property
    def box(self) -> tuple[Span, ...]:
        """The block on every axis."""
        whole = [(0, size) for size in self.shape]
        return (*whole[: self.axis], self.span, *whole[self.axis + 1 :])


@dataclass(frozen=True)
class MappedParameter:
    """One parameter of a rank; what no part covers is padding."""

    name: str
    """As in `named_parameters` of the stage, whose layers count from 0."""
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    is_copy: bool = False
    """Whether the same weights are counted on another rank: a tied output matrix on the last stage, a
    key-value head that several tensor ranks hold."""

    @property
    def has_padding(self) -> bool:
        """Whether the parts leave something uncovered."""
        return sum(part.length for part in self.parts) < self.shape[self.parts[0].axis]


@dataclass(frozen=True)
class ShardPosition:
    """A rank's place among the tensor ranks and the pipeline stages."""

    tensor: int = 0
    num_tensor: int = 1
    stage: int = 0
    num_stages: int = 1

    def share(self, units: int) -> Span:
        """What this tensor rank has of units that all ranks share equally."""
        size = units // self.num_tensor
        return self.tensor * size, (self.tensor + 1) * size


def stage_layers(num_layers: int, num_stages: int) -> tuple[Span, ...]:
    """`[first, last)` layer of each stage."""
    size, remainder = divmod(num_layers, num_stages)
    edges = [stage * size + min(stage, remainder) for stage in range(num_stages + 1)]
    return tuple(pairwise(edges))


def padded_vocabulary(vocab: int, num_tensor: int) -> int:
    """Rows of the embedding on all tensor ranks together."""
    multiple = VOCAB_MULTIPLE * num_tensor
    return -(-vocab // multiple) * multiple


def parameters(dims: ModelDims, place: ShardPosition) -> tuple[MappedParameter, ...]:
    """The parameters of a rank."""
    return tuple(_stage(dims, place))


def backbone_shapes(dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape, in the order of the layers, but for a scalar head's."""
    rows = parameters(replace(dims, head="lm", is_tied=dims.is_tied or dims.head != "lm"), ShardPosition())
    return {part.tensor: part.shape for row in rows for part in row.parts}


def _stage(dims: ModelDims, place: ShardPosition) -> Iterator[MappedParameter]:
    embedding = "model.embed_tokens.weight"
    if place.stage == 0:
        yield _vocabulary("embedding.word_embeddings.weight", embedding, dims, place)
    first, last = stage_layers(dims.num_layers, place.num_stages)[place.stage]
    for layer in range(first, last):
        yield from _layer(dims, place, f"decoder.layers.{layer - first}.", f"model.layers.{layer}.")
    if place.stage < place.num_stages - 1:
        return
    yield _whole("decoder.final_layernorm.weight", "model.norm.weight", (dims.hidden,))
    if dims.head != "lm":
        yield _whole("output_layer.weight", f"{dims.head}_head.weight", (1, dims.hidden))
        yield _whole("output_layer.bias", f"{dims.head}_head.bias", (1,))
    elif not dims.is_tied:
        yield _vocabulary("output_layer.weight", "lm_head.weight", dims, place)
    elif place.num_stages > 1:
        yield _vocabulary("output_layer.weight", embedding, dims, place, is_copy=True)


def _layer(dims: ModelDims, place: ShardPosition, ours: str, theirs: str) -> Iterator[MappedParameter]:
    heads, attention, mlp = dims.num_heads * dims.head_dim, f"{ours}self_attention.", f"{ours}mlp."
    yield _whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (dims.hidden,))
    yield from _qkv(dims, place, f"{attention}linear_qkv.", f"{theirs}self_attn.", "weight", (dims.hidden,))
    if dims.has_qkv_bias:
        yield from _qkv(dims, place, f"{attention}linear_qkv.", f"{theirs}self_attn.", "bias", ())
    if dims.has_qk_norm:
        for x in "qk":
            norm = f"{theirs}self_attn.{x}_norm.weight"
            yield _whole(f"{attention}{x}_layernorm.weight", norm, (dims.head_dim,))
    yield _columns(f"{attention}linear_proj.weight", f"{theirs}self_attn.o_proj.weight", dims, heads, place)
    if dims.has_out_bias:
        yield _whole(f"{attention}linear_proj.bias", f"{theirs}self_attn.o_proj.bias", (dims.hidden,))
    norm = f"{theirs}post_attention_layernorm.weight"
    yield _whole(f"{ours}pre_mlp_layernorm.weight", norm, (dims.hidden,))
    yield _gate_up(dims, place, f"{mlp}linear_fc1.", f"{theirs}mlp.", "weight", (dims.hidden,))
    if dims.has_mlp_bias:
        yield _gate_up(dims, place, f"{mlp}linear_fc1.", f"{theirs}mlp.", "bias", ())
    down = f"{theirs}mlp.down_proj."
    yield _columns(f"{mlp}linear_fc2.weight", f"{down}weight", dims, dims.intermediate, place)
    if dims.has_mlp_bias:
        yield _whole(f"{mlp}linear_fc2.bias", f"{down}bias", (dims.hidden,))


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> MappedParameter:
    """A parameter that every tensor rank has whole."""
    return MappedParameter(name, shape, (TensorPart(tensor, shape, 0, (0, shape[0]), 0),))


def _vocabulary(
    name: str, tensor: str, dims: ModelDims, place: ShardPosition, is_copy: bool = False
) -> MappedParameter:
    """A matrix `[V, D]`, its padded rows shared."""
    start, stop = place.share(padded_vocabulary(dims.vocab, place.num_tensor))
    span = (min(start, dims.vocab), min(stop, dims.vocab))
    part = TensorPart(tensor, (dims.vocab, dims.hidden), 0, span, 0)
    return MappedParameter(name, (stop - start, dims.hidden), (part,), is_copy)


def _columns(name: str, tensor: str, dims: ModelDims, width: int, place: ShardPosition) -> MappedParameter:
    """A matrix `[D, width]`, its columns shared."""
    part = TensorPart(tensor, (dims.hidden, width), 1, place.share(width), 0)
    return MappedParameter(name, (dims.hidden, part.length), (part,))


def _gate_up(
    dims: ModelDims, place: ShardPosition, ours: str, theirs: str, kind: str, rest: tuple[int, ...]
) -> MappedParameter:
    """Rows of the gate, then the same rows of the up projection; `rest` is the shape of a row."""
    share = place.share(dims.intermediate)
    gate = TensorPart(f"{theirs}gate_proj.{kind}", (dims.intermediate, *rest), 0, share, 0)
    up = TensorPart(f"{theirs}up_proj.{kind}", (dims.intermediate, *rest), 0, share, gate.length)
    return MappedParameter(ours + kind, (2 * gate.length, *rest), (gate, up))


def _qkv(
    dims: ModelDims, place: ShardPosition, ours: str, theirs: str, kind: str, rest: tuple[int, ...]
) -> Iterator[MappedParameter]:
    """For each key-value head its query heads, its k and its v, in one parameter.

    Ranks that repeat a key-value head have it in a parameter apart from their query heads.
    """
    size, num_heads, num_kv = dims.head_dim, dims.num_heads, dims.num_kv_heads

    def block(x: str, units: int, first: int, last: int, at: int) -> TensorPart:
        span = (first * size, last * size)
        return TensorPart(f"{theirs}{x}_proj.{kind}", (units * size, *rest), 0, span, at * size)

    if num_kv < place.num_tensor:
        copies = place.num_tensor // num_kv
        first, last = place.share(num_heads)
        group = place.tensor // copies
        k, v = (block(x, num_kv, group, group + 1, i) for i, x in enumerate("kv"))
        yield MappedParameter(
            f"{ours}q_{kind}", ((last - first) * size, *rest), (block("q", num_heads, first, last, 0),)
        )
        yield MappedParameter(f"{ours}kv_{kind}", (2 * size, *rest), (k, v), place.tensor % copies > 0)
        return
    queries = num_heads // num_kv
    first, last = place.share(num_kv)
    parts: list[TensorPart] = []
    for i, group in enumerate(range(first, last)):
        at = i * (queries + 2)
        parts.append(block("q", num_heads, group * queries, (group + 1) * queries, at))
        parts.append(block("k", num_kv, group, group + 1, at + queries))
        parts.append(block("v", num_kv, group, group + 1, at + queries + 1))
    yield MappedParameter(ours + kind, ((last - first) * (queries + 2) * size, *rest), tuple(parts))
