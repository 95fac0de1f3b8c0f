"""Which blocks of which checkpoint tensors each parameter of a rank consists of.

All reading and writing of weights goes through these rows: loading takes a rank's blocks, export puts the
blocks of all ranks together. They follow from sizes and coordinates alone, so every rank knows what every
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
class Part:
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
class Parameter:
    """One parameter of a rank; what no part covers is padding."""

    name: str
    """As in `named_parameters` of the stage, whose layers count from 0."""
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_copy: bool = False
    """Whether the same weights are counted on another rank: a tied output matrix on the last stage, a
    key-value head that several tensor ranks hold."""

    @property
    def has_padding(self) -> bool:
        """Whether the parts leave something uncovered."""
        return sum(part.length for part in self.parts) < self.shape[self.parts[0].axis]


@dataclass(frozen=True)
class Place:
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


def parameters(sizes: ModelDims, place: Place) -> tuple[Parameter, ...]:
    """The parameters of a rank."""
    return tuple(_stage(sizes, place))


def backbone_shapes(sizes: ModelDims) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape, in the order of the layers, but for a scalar head's."""
    rows = parameters(replace(sizes, head="lm", is_tied=sizes.is_tied or sizes.head != "lm"), Place())
    return {part.tensor: part.shape for row in rows for part in row.parts}


def _stage(sizes: ModelDims, place: Place) -> Iterator[Parameter]:
    embedding = "model.embed_tokens.weight"
    if place.stage == 0:
        yield _vocabulary("embedding.word_embeddings.weight", embedding, sizes, place)
    first, last = stage_layers(sizes.num_layers, place.num_stages)[place.stage]
    for layer in range(first, last):
        yield from _layer(sizes, place, f"decoder.layers.{layer - first}.", f"model.layers.{layer}.")
    if place.stage < place.num_stages - 1:
        return
    yield _whole("decoder.final_layernorm.weight", "model.norm.weight", (sizes.hidden,))
    if sizes.head != "lm":
        yield _whole("output_layer.weight", f"{sizes.head}_head.weight", (1, sizes.hidden))
        yield _whole("output_layer.bias", f"{sizes.head}_head.bias", (1,))
    elif not sizes.is_tied:
        yield _vocabulary("output_layer.weight", "lm_head.weight", sizes, place)
    elif place.num_stages > 1:
        yield _vocabulary("output_layer.weight", embedding, sizes, place, is_copy=True)


def _layer(sizes: ModelDims, place: Place, ours: str, theirs: str) -> Iterator[Parameter]:
    heads, attention, mlp = sizes.num_heads * sizes.head_dim, f"{ours}self_attention.", f"{ours}mlp."
    yield _whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (sizes.hidden,))
    yield from _qkv(sizes, place, f"{attention}linear_qkv.", f"{theirs}self_attn.", "weight", (sizes.hidden,))
    if sizes.has_qkv_bias:
        yield from _qkv(sizes, place, f"{attention}linear_qkv.", f"{theirs}self_attn.", "bias", ())
    if sizes.has_qk_norm:
        for x in "qk":
            norm = f"{theirs}self_attn.{x}_norm.weight"
            yield _whole(f"{attention}{x}_layernorm.weight", norm, (sizes.head_dim,))
    yield _columns(f"{attention}linear_proj.weight", f"{theirs}self_attn.o_proj.weight", sizes, heads, place)
    if sizes.has_out_bias:
        yield _whole(f"{attention}linear_proj.bias", f"{theirs}self_attn.o_proj.bias", (sizes.hidden,))
    norm = f"{theirs}post_attention_layernorm.weight"
    yield _whole(f"{ours}pre_mlp_layernorm.weight", norm, (sizes.hidden,))
    yield _gate_up(sizes, place, f"{mlp}linear_fc1.", f"{theirs}mlp.", "weight", (sizes.hidden,))
    if sizes.has_mlp_bias:
        yield _gate_up(sizes, place, f"{mlp}linear_fc1.", f"{theirs}mlp.", "bias", ())
    down = f"{theirs}mlp.down_proj."
    yield _columns(f"{mlp}linear_fc2.weight", f"{down}weight", sizes, sizes.intermediate, place)
    if sizes.has_mlp_bias:
        yield _whole(f"{mlp}linear_fc2.bias", f"{down}bias", (sizes.hidden,))


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> Parameter:
    """A parameter that every tensor rank has whole."""
    return Parameter(name, shape, (Part(tensor, shape, 0, (0, shape[0]), 0),))


def _vocabulary(name: str, tensor: str, sizes: ModelDims, place: Place, is_copy: bool = False) -> Parameter:
    """A matrix `[V, D]`, its padded rows shared."""
    start, stop = place.share(padded_vocabulary(sizes.vocab, place.num_tensor))
    span = (min(start, sizes.vocab), min(stop, sizes.vocab))
    part = Part(tensor, (sizes.vocab, sizes.hidden), 0, span, 0)
    return Parameter(name, (stop - start, sizes.hidden), (part,), is_copy)


def _columns(name: str, tensor: str, sizes: ModelDims, width: int, place: Place) -> Parameter:
    """A matrix `[D, width]`, its columns shared."""
    part = Part(tensor, (sizes.hidden, width), 1, place.share(width), 0)
    return Parameter(name, (sizes.hidden, part.length), (part,))


def _gate_up(
    sizes: ModelDims, place: Place, ours: str, theirs: str, kind: str, rest: tuple[int, ...]
) -> Parameter:
    """Rows of the gate, then the same rows of the up projection; `rest` is the shape of a row."""
    share = place.share(sizes.intermediate)
    gate = Part(f"{theirs}gate_proj.{kind}", (sizes.intermediate, *rest), 0, share, 0)
    up = Part(f"{theirs}up_proj.{kind}", (sizes.intermediate, *rest), 0, share, gate.length)
    return Parameter(ours + kind, (2 * gate.length, *rest), (gate, up))


def _qkv(
    sizes: ModelDims, place: Place, ours: str, theirs: str, kind: str, rest: tuple[int, ...]
) -> Iterator[Parameter]:
    """For each key-value head its query heads, its k and its v, in one parameter.

    Ranks that repeat a key-value head have it in a parameter apart from their query heads.
    """
    size, num_heads, num_kv = sizes.head_dim, sizes.num_heads, sizes.num_kv_heads

    def block(x: str, units: int, first: int, last: int, at: int) -> Part:
        span = (first * size, last * size)
        return Part(f"{theirs}{x}_proj.{kind}", (units * size, *rest), 0, span, at * size)

    if num_kv < place.num_tensor:
        copies = place.num_tensor // num_kv
        first, last = place.share(num_heads)
        group = place.tensor // copies
        k, v = (block(x, num_kv, group, group + 1, i) for i, x in enumerate("kv"))
        yield Parameter(
            f"{ours}q_{kind}", ((last - first) * size, *rest), (block("q", num_heads, first, last, 0),)
        )
        yield Parameter(f"{ours}kv_{kind}", (2 * size, *rest), (k, v), place.tensor % copies > 0)
        return
    queries = num_heads // num_kv
    first, last = place.share(num_kv)
    parts: list[Part] = []
    for i, group in enumerate(range(first, last)):
        at = i * (queries + 2)
        parts.append(block("q", num_heads, group * queries, (group + 1) * queries, at))
        parts.append(block("k", num_kv, group, group + 1, at + queries))
        parts.append(block("v", num_kv, group, group + 1, at + queries + 1))
    yield Parameter(ours + kind, ((last - first) * (queries + 2) * size, *rest), tuple(parts))
