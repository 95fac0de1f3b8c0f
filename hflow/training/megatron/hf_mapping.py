"""Mapping from each parameter of a rank to blocks of Hugging Face checkpoint tensors.

All reading and writing of weights uses this mapping: loading reads a rank's blocks, export assembles the
blocks of all ranks. It follows from the model's dimensions, the rank's position and the kernels of the
layers, so every rank knows what every other rank holds. Pipeline stages have whole layers, the first stages
one more if they do not divide evenly. Tensor ranks split attention heads, MLP rows and the padded vocabulary.
Expert ranks split the experts, which hflow stacks in one tensor for each of their matrices
(`models/expert_tensors.py`).

Transformer Engine has other modules, so its parameters have other names: the norm before a linear layer is
part of it, and each expert has parameters of its own. What it keeps beside parameters (`_extra_state`) is for
FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    MAGNITUDE,
    SCORE_BIAS,
    A,
    AdapterShape,
    B,
    Experts,
    LatentAttention,
    ModelShape,
    is_in_fp32,
    layer_norms,
    router_path,
    shared_path,
)
from hflow.types.kernels import LayerKernels

VOCAB_MULTIPLE = 128
"""Each tensor rank's part of the vocabulary has a multiple of this many rows."""

Span = tuple[int, int]
"""`[start, stop)`."""


@dataclass(frozen=True)
class TensorPart:
    """A block of a checkpoint tensor, and its position in a parameter.

    It is whole on all axes but one. A block of stacked experts is a part of the first axis too.
    """

    tensor: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    axis: int
    """The axis on which the tensor is cut."""
    span: Span
    """The block's range on that axis of the tensor."""
    offset: int
    """The block's start on that axis of the parameter."""
    experts: Span | None = None
    """The block's range on the first axis of stacked experts, which is the parameter's whole first axis."""

    @property
    def length(self) -> int:
        """Length of the block on its axis."""
        return self.span[1] - self.span[0]

    @property
    def box(self) -> tuple[Span, ...]:
        """The block's range on every axis of the tensor."""
        whole = [(0, size) for size in self.shape]
        box = [*whole[: self.axis], self.span, *whole[self.axis + 1 :]]
        return tuple(box if self.experts is None else (self.experts, *box[1:]))

    @property
    def shift(self) -> tuple[int, ...]:
        """What to add to a place in the parameter, on every axis, to get the place in the tensor."""
        starts = [0] * len(self.shape)
        starts[self.axis] = self.span[0] - self.offset
        return tuple(starts if self.experts is None else (self.experts[0], *starts[1:]))


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of a rank and the blocks that it consists of. Rows that no block covers are padding."""

    name: str
    """Name in the stage's `named_parameters`, where layers count from 0."""
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    is_copy: bool = False
    """Whether another rank holds the original of these weights. Copies are tied output matrices on the last
    stage, and key-value heads that several tensor ranks hold."""
    is_expert: bool = False
    """Whether expert ranks have different parts of it."""
    is_one_expert: bool = False
    """Whether it is a matrix of a single expert, which has no axis of experts in the module."""

    @property
    def module_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the module."""
        return self.shape[1:] if self.is_one_expert else self.shape

    @property
    def is_score_bias(self) -> bool:
        """Whether routers choose by it. It has no gradient, and is in fp32 in models of any dtype."""
        return is_in_fp32(self.parts[0].tensor)

    @property
    def has_padding(self) -> bool:
        """Whether the parts leave some rows uncovered."""
        return sum(part.length for part in self.parts) < self.shape[self.parts[0].axis]


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of a rank, and the adapters of the HF matrices that it computes together."""

    name: str
    """Name of the module in the stage."""
    outputs: tuple[tuple[str, int], ...]
    """HF module, such as `k_proj` -> this rank's outputs, of all that the layer computes, in their order."""
    divides_inputs: bool
    """Whether tensor ranks divide its inputs; else its outputs."""
    num_blocks: int
    """Number of equal blocks of its outputs, each of which has a part of each HF matrix."""
    parameters: tuple[MappedParameter, ...]
    """The parameters of `LinearAdapters`: of each HF module that has an adapter, A and B, and the magnitudes
    if it has any."""


class AdaptedExperts(NamedTuple):
    """The adapters of a parameter of a rank's experts."""

    module: str
    """Name in the stage of the module that has the parameter."""
    name: str
    """Name of the parameter in it, `gate_up` or `down`."""
    parameters: tuple[MappedParameter, MappedParameter]
    """A and B of all its experts. That of axis 0 is whole on all tensor ranks."""


@dataclass(frozen=True)
class ShardPosition:
    """A rank's tensor index, pipeline stage and expert index, which determine its weights."""

    tensor: int = 0
    num_tensor: int = 1
    stage: int = 0
    num_stages: int = 1
    expert: int = 0
    num_expert: int = 1

    def local_span(self, units: int) -> Span:
        """Return this tensor rank's range of units that are split equally."""
        size = units // self.num_tensor
        return self.tensor * size, (self.tensor + 1) * size


def copies_key_value_heads(model: ModelShape, num_tensor: int) -> bool:
    """Return whether there are fewer key-value heads than tensor ranks, so that several ranks hold each."""
    return model.num_kv_heads < num_tensor


def padded_vocab_size(vocab: int, num_tensor: int) -> int:
    """Return the rows of the embedding on all tensor ranks together, padding included."""
    multiple = VOCAB_MULTIPLE * num_tensor
    return -(-vocab // multiple) * multiple


def rank_parameters(
    model: ModelShape, position: ShardPosition, kernels: LayerKernels = LayerKernels.TORCH
) -> tuple[MappedParameter, ...]:
    """Return the parameters of a rank that training changes: adapters and a scalar head, or all.

    The model has the sizes of the trained part (`trained_shape`).
    """
    if model.adapter is None:
        return tuple(_stage_parameters(model, position, kernels))
    linears = (x for linear in adapted_linears(model, position, kernels) for x in linear.parameters)
    experts = (x for one in adapted_experts(model, position, kernels) for x in one.parameters)
    is_last = position.stage == position.num_stages - 1
    return (*linears, *experts, *(_scalar_head(model) if is_last else ()))


def adapted_linears(
    model: ModelShape, position: ShardPosition, kernels: LayerKernels
) -> Iterator[AdaptedLinear]:
    """Yield the linear layers of a rank that have adapters; the arguments are those of `rank_parameters`.

    The embedding is one whose inputs are tokens.
    """
    assert model.adapter is not None
    weights = _stage_parameters(replace(model, adapter=None), position, kernels)
    matrices = (row for row in weights if not row.is_expert and len(row.shape) == 2)
    for name, rows in groupby(matrices, lambda row: row.name.rpartition(".")[0]):
        linear = _adapted_linear(name, list(rows), model.adapter)
        if linear.parameters:
            yield linear


def _adapted_linear(name: str, rows: list[MappedParameter], adapter: AdapterShape) -> AdaptedLinear:
    """Return a linear layer that consists of some parameters, with its adapters, if any are targeted."""
    parts: dict[str, list[TensorPart]] = {}
    copied = {part.tensor for row in rows if row.is_copy for part in row.parts}
    for part in (part for row in rows for part in row.parts):
        parts.setdefault(part.tensor, []).append(part)
    outputs, parameters = [], []
    for tensor, blocks in parts.items():
        path, module = tensor.removesuffix("weight"), tensor.split(".")[-2]
        axis, (num_outputs, num_inputs), (end_a, end_b) = blocks[0].axis, blocks[0].shape, (A, B)
        if module == EMBEDDING:
            axis, num_outputs, num_inputs, end_a, end_b = 1, num_inputs, num_outputs, EMBEDDING_A, EMBEDDING_B
        num_held = sum(block.length for block in blocks)
        padding = rows[0].shape[0] - num_held if rows[0].has_padding else 0
        outputs.append((module, num_held if axis == 0 else num_outputs))
        if module not in adapter.targets:
            continue
        kinds: list[tuple[str, str, int, tuple[int, ...]]] = [
            ("A", end_a, 1, (adapter.r, num_inputs)),
            ("B", end_b, 0, (num_outputs, adapter.r)),
        ]
        if adapter.has_magnitudes:
            kinds.append(("magnitude", MAGNITUDE, 0, (num_outputs,)))
        for kind, end, split_axis, whole in kinds:
            ours, theirs = f"{name}.adapters.{module}_{kind}", path + end
            if axis != split_axis:
                parameters.append(_whole(ours, theirs, whole))
                continue
            spans = _joined(blocks)
            starts = accumulate((stop - start for start, stop in spans), initial=0)
            held = tuple(
                TensorPart(theirs, whole, axis, *place) for place in zip(spans, starts, strict=False)
            )
            shape = _with(whole, axis, num_held + padding)
            parameters.append(MappedParameter(ours, shape, held, tensor in copied))
    return AdaptedLinear(name, tuple(outputs), axis == 1, len(blocks), tuple(parameters))


def _joined(blocks: list[TensorPart]) -> list[Span]:
    """Return the ranges of blocks, with neighbours in one."""
    spans = [blocks[0].span]
    for start, stop in (block.span for block in blocks[1:]):
        if start == spans[-1][1]:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans


def adapted_experts(
    model: ModelShape, position: ShardPosition, kernels: LayerKernels
) -> Iterator[AdaptedExperts]:
    """Yield the adapters of a rank's experts; the arguments are those of `rank_parameters`.

    Tensor ranks divide the rows F of B or the columns F of A, as those of the matrices beside them.
    """
    assert model.adapter is not None
    for row in _stage_parameters(replace(model, adapter=None), position, kernels):
        module, _, name = row.name.rpartition(".")
        if row.is_expert and f"experts.{name}_proj" in model.adapter.targets:
            yield AdaptedExperts(module, name, _expert_adapter(row, module, name, model.adapter.r))


def _expert_adapter(
    row: MappedParameter, module: str, name: str, r: int
) -> tuple[MappedParameter, MappedParameter]:
    """Return A and B of a parameter of experts. Each has r in the place of one axis of the matrices."""
    first, axis = row.parts[0], row.parts[0].axis
    assert first.experts is not None, "experts are stacked"
    whole_end, divided_end = (A, B) if axis == 1 else (B, A)
    tensor = f"{first.tensor.rpartition('experts.')[0]}experts.{name}_proj.{whole_end}"
    of_whole = [TensorPart(tensor, _with(first.shape, axis, r), 0, first.experts, 0)]
    of_divided = [
        replace(
            part,
            tensor=part.tensor.removesuffix("weight") + divided_end,
            shape=_with(part.shape, 3 - axis, r),
        )
        for part in row.parts
    ]
    whole, divided = (
        MappedParameter(
            f"{module}.adapters.{name}.{end.removesuffix('.weight')}",
            _with(row.shape, replaced, r),
            tuple(parts),
            is_expert=True,
        )
        for end, replaced, parts in ((whole_end, axis, of_whole), (divided_end, 3 - axis, of_divided))
    )
    return (whole, divided) if axis == 1 else (divided, whole)


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Return a shape with another size of one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def backbone_shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every HF tensor of the model but a scalar head's, in the order of the layers."""
    rows = rank_parameters(
        replace(model, head="lm", is_tied=model.is_tied or model.head != "lm"), ShardPosition()
    )
    return {part.tensor: part.shape for row in rows for part in row.parts}


def _stage_parameters(
    model: ModelShape, position: ShardPosition, kernels: LayerKernels
) -> Iterator[MappedParameter]:
    embedding = "model.embed_tokens.weight"
    if position.stage == 0:
        yield _vocabulary("embedding.word_embeddings.weight", embedding, model, position)
    first, last = stage_layers(model.num_layers, position.num_stages)[position.stage]
    for layer in range(first, last):
        ours, theirs = f"decoder.layers.{layer - first}.", f"model.layers.{layer}."
        yield from _layer_parameters(model, position, ours, theirs, layer, kernels)
    if position.stage < position.num_stages - 1:
        return
    yield _whole("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden,))
    if model.head != "lm":
        yield from _scalar_head(model)
    elif not model.is_tied:
        yield _vocabulary("output_layer.weight", "lm_head.weight", model, position)
    elif position.num_stages > 1:
        yield _vocabulary("output_layer.weight", embedding, model, position, is_copy=True)


def _scalar_head(model: ModelShape) -> Iterator[MappedParameter]:
    if model.head == "score":
        yield _whole("output_layer.weight", "score.weight", (1, model.hidden))
    elif model.head == "value":
        yield _whole("output_layer.weight", "value_head.weight", (1, model.hidden))
        yield _whole("output_layer.bias", "value_head.bias", (1,))


def _layer_parameters(
    model: ModelShape,
    position: ShardPosition,
    ours: str,
    theirs: str,
    layer: int,
    kernels: LayerKernels,
) -> Iterator[MappedParameter]:
    attention, theirs_attention = f"{ours}self_attention.", f"{theirs}self_attn."
    has_experts, of_te = model.has_experts(layer), kernels is LayerKernels.TRANSFORMER_ENGINE
    is_fused = of_te and not copies_key_value_heads(model, position.num_tensor)
    norm = f"{attention}linear_qkv.layer_norm_weight" if is_fused else f"{ours}input_layernorm.weight"
    yield _whole(norm, f"{theirs}input_layernorm.weight", (model.hidden,))
    if model.latent is None:
        yield from _queries_keys_values(model, position, attention, theirs_attention)
    else:
        yield from _latents(model, model.latent, position, attention, theirs_attention)
    width = model.num_heads * (model.latent.value if model.latent else model.head_dim)
    o_proj = f"{theirs_attention}o_proj."
    yield _columns(f"{attention}linear_proj.weight", f"{o_proj}weight", model, width, position)
    if model.has_out_bias:
        yield _whole(f"{attention}linear_proj.bias", f"{o_proj}bias", (model.hidden,))
    is_fused = of_te and not has_experts
    norm = f"{ours}mlp.linear_fc1.layer_norm_weight" if is_fused else f"{ours}pre_mlp_layernorm.weight"
    norms = layer_norms(model)
    for name, after in (("self_attn", norms.after_attention), ("mlp", norms.after_mlp)):
        if after is not None:
            yield _whole(f"{ours}{name}_bda.norm.weight", f"{theirs}{after}.weight", (model.hidden,))
    yield _whole(norm, f"{theirs}{norms.before_mlp}.weight", (model.hidden,))
    if has_experts:
        yield from _experts(model, position, f"{ours}mlp.", f"{theirs}mlp.", kernels)
    else:
        yield from _mlp(model, model.intermediate, position, f"{ours}mlp.", f"{theirs}mlp.")


def _queries_keys_values(
    model: ModelShape, position: ShardPosition, ours: str, theirs: str
) -> Iterator[MappedParameter]:
    if model.has_sinks:
        span = position.local_span(model.num_heads)
        part = TensorPart(f"{theirs}sinks", (model.num_heads,), 0, span, 0)
        yield MappedParameter(f"{ours}core_attention.sinks", (part.length,), (part,))
    yield from _qkv(model, position, f"{ours}linear_qkv.", theirs, "weight", (model.hidden,))
    if model.has_qkv_bias:
        yield from _qkv(model, position, f"{ours}linear_qkv.", theirs, "bias", ())
    if model.has_qk_norm:
        for x in "qk":
            yield _whole(f"{ours}{x}_layernorm.weight", f"{theirs}{x}_norm.weight", (model.head_dim,))


def _latents(
    model: ModelShape, sizes: LatentAttention, position: ShardPosition, ours: str, theirs: str
) -> Iterator[MappedParameter]:
    """Map the projections of latent attention. Tensor ranks divide the rows of heads."""

    def small(name: str, tensor: str, rows: int) -> Iterator[MappedParameter]:
        yield _whole(f"{ours}{name}.weight", f"{theirs}{tensor}.weight", (rows, model.hidden))
        if model.has_qkv_bias:
            yield _whole(f"{ours}{name}.bias", f"{theirs}{tensor}.bias", (rows,))

    def heads(name: str, tensor: str, size: int, inputs: int) -> MappedParameter:
        span = position.local_span(model.num_heads)
        rows = (span[0] * size, span[1] * size)
        part = TensorPart(f"{theirs}{tensor}.weight", (model.num_heads * size, inputs), 0, rows, 0)
        return MappedParameter(f"{ours}{name}.weight", (part.length, inputs), (part,))

    if sizes.q_rank is None:
        yield heads("linear_q", "q_proj", sizes.nope + sizes.rope, model.hidden)
    else:
        yield from small("linear_q_down", "q_a_proj", sizes.q_rank)
        yield _whole(f"{ours}q_norm.weight", f"{theirs}q_a_layernorm.weight", (sizes.q_rank,))
        yield heads("linear_q", "q_b_proj", sizes.nope + sizes.rope, sizes.q_rank)
    yield from small("linear_kv_down", "kv_a_proj_with_mqa", sizes.cached)
    yield _whole(f"{ours}kv_norm.weight", f"{theirs}kv_a_layernorm.weight", (sizes.kv_rank,))
    yield heads("linear_kv", "kv_b_proj", sizes.nope + sizes.value, sizes.kv_rank)


def _mlp(
    model: ModelShape, intermediate: int, position: ShardPosition, ours: str, theirs: str
) -> Iterator[MappedParameter]:
    for kind, rest in (("weight", (model.hidden,)), *([("bias", ())] if model.has_mlp_bias else [])):
        yield _gate_up(model, intermediate, position, f"{ours}linear_fc1.", theirs, kind, rest)
    down = f"{theirs}down_proj."
    yield _columns(f"{ours}linear_fc2.weight", f"{down}weight", model, intermediate, position)
    if model.has_mlp_bias:
        yield _whole(f"{ours}linear_fc2.bias", f"{down}bias", (model.hidden,))


def _experts(
    model: ModelShape, position: ShardPosition, ours: str, theirs: str, kernels: LayerKernels
) -> Iterator[MappedParameter]:
    """Map the router, and the matrices of this rank's experts and the shared ones, whose rows ranks split.

    They are stacked, but for Transformer Engine, which has a parameter for each expert.
    """
    experts, hidden = model.experts, model.hidden
    assert experts is not None
    router = f"{theirs}{router_path(experts)}."
    yield _whole(f"{ours}router.weight", f"{router}weight", (experts.num, hidden))
    if experts.has_router_bias:
        name, bias = ("bias", "bias") if experts.has_bias else ("score_bias", SCORE_BIAS)
        yield _whole(f"{ours}router.{name}", f"{router}{bias}", (experts.num,))
    if experts.shared:
        shared = f"{ours}shared_experts.", f"{theirs}{shared_path(experts)}."
        yield from _mlp(model, experts.shared, position, *shared)
        if experts.has_shared_gate:
            gate = f"{theirs}shared_expert_gate.weight"
            yield _whole(f"{ours}shared_experts.gate_weight", gate, (1, hidden))
    size = experts.num // position.num_expert
    local = (position.expert * size, (position.expert + 1) * size)
    span = position.local_span(experts.intermediate)
    if experts.has_bias:
        yield from _biased_experts(experts, hidden, local, span, f"{ours}experts.", f"{theirs}experts.")
        return
    rows = span[1] - span[0]
    wide, tall = (experts.num, experts.intermediate, hidden), (experts.num, hidden, experts.intermediate)
    of_te = kernels is LayerKernels.TRANSFORMER_ENGINE

    def gate_up(name: str, stack: Span) -> MappedParameter:
        gate, up = (
            TensorPart(f"{theirs}experts.{x}_proj.weight", wide, 1, span, offset, stack)
            for x, offset in (("gate", 0), ("up", rows))
        )
        shape = (stack[1] - stack[0], 2 * rows, hidden)
        return MappedParameter(
            f"{ours}experts.{name}", shape, (gate, up), is_expert=True, is_one_expert=of_te
        )

    def down(name: str, stack: Span) -> MappedParameter:
        part = TensorPart(f"{theirs}experts.down_proj.weight", tall, 2, span, 0, stack)
        shape = (stack[1] - stack[0], hidden, rows)
        return MappedParameter(f"{ours}experts.{name}", shape, (part,), is_expert=True, is_one_expert=of_te)

    if of_te:
        each = [(expert, expert + 1) for expert in range(*local)]
        yield from (gate_up(f"linear_fc1.weight{i}", one) for i, one in enumerate(each))
        yield from (down(f"linear_fc2.weight{i}", one) for i, one in enumerate(each))
    else:
        yield gate_up("gate_up", local)
        yield down("down", local)


def _biased_experts(
    experts: Experts, hidden: int, local: Span, span: Span, ours: str, theirs: str
) -> Iterator[MappedParameter]:
    """Map experts with biases, whose parameters are those of transformers.

    `local` are the rank's experts, of those with sizes `experts`, and `span` its rows of one; `ours` is the
    path of the module, and `theirs` that in the checkpoint.
    """
    n, f, pairs = experts.num, experts.intermediate, (2 * span[0], 2 * span[1])
    for name, whole, axis, held in (
        ("gate_up_proj", (n, hidden, 2 * f), 2, pairs),
        ("gate_up_proj_bias", (n, 2 * f), 1, pairs),
        ("down_proj", (n, f, hidden), 1, span),
        ("down_proj_bias", (n, hidden), 0, local),
    ):
        part = TensorPart(theirs + name, whole, axis, held, 0, local)
        shape = _with((local[1] - local[0], *whole[1:]), axis, part.length)
        yield MappedParameter(ours + name, shape, (part,), is_expert=True)


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> MappedParameter:
    """Map a parameter that every tensor rank has whole."""
    return MappedParameter(name, shape, (TensorPart(tensor, shape, 0, (0, shape[0]), 0),))


def _vocabulary(
    name: str, tensor: str, model: ModelShape, position: ShardPosition, is_copy: bool = False
) -> MappedParameter:
    """Map a matrix `[V, D]` whose padded rows are split over the tensor ranks."""
    start, stop = position.local_span(padded_vocab_size(model.vocab, position.num_tensor))
    span = (min(start, model.vocab), min(stop, model.vocab))
    part = TensorPart(tensor, (model.vocab, model.hidden), 0, span, 0)
    return MappedParameter(name, (stop - start, model.hidden), (part,), is_copy)


def _columns(
    name: str, tensor: str, model: ModelShape, width: int, position: ShardPosition
) -> MappedParameter:
    """Map a matrix `[D, width]` whose columns are split over the tensor ranks."""
    part = TensorPart(tensor, (model.hidden, width), 1, position.local_span(width), 0)
    return MappedParameter(name, (model.hidden, part.length), (part,))


def _gate_up(
    model: ModelShape,
    intermediate: int,
    position: ShardPosition,
    ours: str,
    theirs: str,
    kind: str,
    rest: tuple[int, ...],
) -> MappedParameter:
    """Map rows of the gate, then the same rows of the up projection; `rest` is the shape of a row."""
    first, last = position.local_span(intermediate)
    num_fused = 2 if model.has_fused_mlp else 1
    gate, up = (
        TensorPart(
            f"{theirs}{'gate_up' if model.has_fused_mlp else name}_proj.{kind}",
            (num_fused * intermediate, *rest),
            0,
            (first + skipped, last + skipped),
            offset,
        )
        for name, skipped, offset in (
            ("gate", 0, 0),
            ("up", (num_fused - 1) * intermediate, last - first),
        )
    )
    return MappedParameter(ours + kind, (2 * gate.length, *rest), (gate, up))


def _qkv(
    model: ModelShape, position: ShardPosition, ours: str, theirs: str, kind: str, rest: tuple[int, ...]
) -> Iterator[MappedParameter]:
    """Map q, k and v to one parameter: for each key-value head its query heads, its k and its v.

    With fewer key-value heads than tensor ranks, each rank has one key-value head, in a parameter separate
    from its query heads.
    """
    size, num_heads, num_kv = model.head_dim, model.num_heads, model.num_kv_heads

    def block(x: str, units: int, first: int, last: int, offset: int) -> TensorPart:
        span = (first * size, last * size)
        return TensorPart(f"{theirs}{x}_proj.{kind}", (units * size, *rest), 0, span, offset * size)

    if copies_key_value_heads(model, position.num_tensor):
        copies = position.num_tensor // num_kv
        first, last = position.local_span(num_heads)
        group = position.tensor // copies
        k, v = (block(x, num_kv, group, group + 1, i) for i, x in enumerate("kv"))
        yield MappedParameter(
            f"{ours}q_{kind}", ((last - first) * size, *rest), (block("q", num_heads, first, last, 0),)
        )
        yield MappedParameter(f"{ours}kv_{kind}", (2 * size, *rest), (k, v), position.tensor % copies > 0)
        return
    queries = num_heads // num_kv
    first, last = position.local_span(num_kv)
    parts: list[TensorPart] = []
    for i, group in enumerate(range(first, last)):
        start = i * (queries + 2)
        parts.append(block("q", num_heads, group * queries, (group + 1) * queries, start))
        parts.append(block("k", num_kv, group, group + 1, start + queries))
        parts.append(block("v", num_kv, group, group + 1, start + queries + 1))
    yield MappedParameter(ours + kind, ((last - first) * (queries + 2) * size, *rest), tuple(parts))
