"""`ModelShape`: the sizes of a decoder-only transformer, which may see, and the list of its tensors.

Names and shapes are those of Hugging Face checkpoints. Plans refer to checkpoint tensors only, even if a
backend fuses or pads them. The experts of a layer are listed as one stacked tensor `[N, ...]` for each of
their matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from hflow.shapes.vision_shape import PREFIXES, VisionShape, tower_tensors

_ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "mlp.shared_expert_gate.weight")
"""Ends of the names of matrices that choose or weigh experts."""
LEFT_OUT_BY_DEFAULT = {"left_out_by_default": True}
"""Metadata of a field that the rows of a plan lack where it has its default (`planner/plan/serialise.py`)."""


@dataclass(frozen=True)
class Experts:
    """Layers whose MLP is a mixture of experts: a router chooses `per_token` of `num` experts."""

    num: int
    per_token: int
    intermediate: int
    """Rows of one expert's matrices."""
    shared: int = 0
    """Rows of the experts that every token passes, all together."""
    first: int = 0
    """The first layer with experts; those before it have a dense MLP."""
    step: int = 1
    """Every `step`-th layer has experts: those with `(layer + 1) % step == 0`."""
    has_bias: bool = False
    """Whether the experts' matrices have biases."""
    has_router_bias: bool = False
    """Whether the router adds a number for each expert, such as DeepSeek's balance correction."""
    has_shared_gate: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether the output of shared experts is multiplied by a gate of each token (Qwen2 MoE)."""

    def are_in(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer >= self.first and (layer + 1) % self.step == 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are projected from one small vector per token.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. The cache holds `kv_rank + rope` entries per token.
    """

    q_rank: int | None
    """Size of the vector that queries are projected from; None: they are projected from the hidden state."""
    kv_rank: int
    nope: int
    """Part of a query's and key's size without a rotary embedding."""
    rope: int
    """Part of it with one, which all heads share in keys."""
    value: int
    """Size of a head's value."""

    @property
    def cached(self) -> int:
        """Entries that the cache holds for a token, in one layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True)
class SlidingWindow:
    """Layers that attend to the last tokens only."""

    tokens: int
    full_every: int
    """Layers with `(layer + 1) % full_every == 0` attend to all tokens."""


@dataclass(frozen=True)
class AdapterShape:
    """Low-rank adapters: a matrix `[r, inputs]` and a matrix `[outputs, r]` for each targeted matrix."""

    r: int
    targets: tuple[str, ...]
    """Names of modules, such as `q_proj`."""
    has_magnitudes: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether there is also a vector `[outputs]` of the lengths of rows (DoRA)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model with its head.

    Axes: D hidden, V vocabulary, F intermediate, H heads, K key-value heads, E head size, N experts.
    """

    family: str
    """`model_type` of the HF config, such as `qwen3`; of a model that sees, that of its language model."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """Whether the output matrix is the embedding."""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    """Whether the attention's output projection has a bias (Llama's `attention_bias`)."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    head: str = "lm"
    """`lm`: an output matrix `[V, D]`; `value` and `score`: a vector `[1, D]` in its place."""
    experts: Experts | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    latent: LatentAttention | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    """None: keys and values of all heads. With it, `head_dim` is the size of a query."""
    window: SlidingWindow | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    has_post_norms: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether the outputs of attention and MLP are normalised as well as their inputs (Gemma)."""
    has_sinks: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether each head has a learned weight for attending to nothing (gpt-oss)."""
    adapter: AdapterShape | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    """If it is set, `tensors` are the model's adapters, and a scalar head, in place of its weights."""
    vision: VisionShape | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    """The tower of a model that sees."""

    def __hash__(self) -> int:
        """Return a hash of what usually differs, as shapes are keys of many caches."""
        return hash((self.family, self.num_layers, self.hidden, self.intermediate, self.vocab, self.head))

    @property
    def prefix(self) -> str:
        """What the names of the language model's tensors begin with."""
        return "model." if self.vision is None else f"model.{PREFIXES[self.vision.family]}."

    @property
    def has_fused_mlp(self) -> bool:
        """Whether checkpoints have the gate and the up projection in one matrix, the gate first."""
        return self.family == "glm4"

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.are_in(layer)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint, and how tensor parallelism may split it."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    """Index of its decoder layer; None for embedding, final norm and head."""
    location: str
    """`layer`, `tower` or `embedding` (first stage), `norm` or `head` (last stage). A tied output matrix is
    the embedding tensor, which both the first and the last stage hold."""
    split_axis: int | None = None
    """The axis that tensor parallelism splits; None: every tensor rank holds the whole tensor."""
    split_units: int = 1
    """Number of equal units of the split axis that must stay whole: heads for q and o, key-value heads for k
    and v, rows for the MLP, tokens for a vocabulary."""
    may_repeat: bool = False
    """Whether several tensor ranks may hold the same unit if there are fewer units than ranks (key-value
    heads)."""
    may_pad: bool = False
    """Whether a backend may pad the axis to a multiple of its ranks (vocabulary)."""
    num_experts: int = 1
    """Number of experts that the first axis stacks; 1: the tensor is not one of experts."""
    split_parts: int = 1
    """Number of equal parts of the split axis, each of which has these units and is split by itself: 2 for
    gate and up in one matrix."""

    @property
    def is_quantizable(self) -> bool:
        """Whether it is a matrix of a layer, or of its experts, but not their router."""
        is_matrix = len(self.shape) > 1 and self.name.endswith(".weight")
        return self.location == "layer" and is_matrix and not self.name.endswith(_ROUTERS)

    @property
    def numel(self) -> int:
        """Number of entries."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def router_path(experts: Experts) -> str:
    """Return the path of the router in an MLP."""
    return "router" if experts.has_bias else "gate"


def shared_path(experts: Experts) -> str:
    """Return the path of the shared experts in an MLP."""
    return "shared_expert" if experts.has_shared_gate else "shared_experts"


SCORE_BIAS = "e_score_correction_bias"
"""Name of the bias by which routers of some families choose."""


def is_in_fp32(tensor: str) -> bool:
    """Return whether trainers and engines keep a tensor in fp32 in models of any dtype."""
    return tensor.endswith(f".{SCORE_BIAS}")


def torch_only(shape: ModelShape | None) -> str:
    """Return the part of a model that layers of Transformer Engine do not compute; empty if there is none."""
    if shape is None:
        return ""
    if shape.latent is not None:
        return "latent attention"
    if shape.experts is not None and shape.experts.has_bias:
        return "experts with biases"
    return "norms behind attention and MLP" if shape.has_post_norms else ""


EMBEDDING, OUTPUT = "embed_tokens", "lm_head"
"""The modules of the embedding and of the output matrix."""
EXPERT_TARGETS = GATES_AND_UPS, DOWNS = ("experts.gate_up_proj", "experts.down_proj")
"""The parameters of a layer's experts that adapters can be added to, as in transformers: the gates and ups,
`[N, 2F, D]`, and the downs, `[N, D, F]`."""
A, B = "lora_A.weight", "lora_B.weight"
"""Ends of the names of an adapter's two matrices, `[r, inputs]` and `[outputs, r]`; those of experts are
stacked."""
MAGNITUDE = "lora_magnitude_vector.weight"
"""End of the name of the lengths of a matrix's rows, `[outputs]`, which DoRA learns."""
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
"""Ends of the names of an embedding's two matrices, `[r, V]` and `[D, r]`: their product is its transpose."""
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
"""Numbers in 4 bits with one factor, and factors in 8 bits with one of their own."""
ADAPTER_ENDS = (A, B, MAGNITUDE, EMBEDDING_A, EMBEDDING_B)

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
CACHE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "fp8": 1}
"""Bytes of one entry by dtype."""


@lru_cache
def tensors(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return every tensor of the model's checkpoint, in the order in which transformers lists them."""
    layers = (spec for layer in range(shape.num_layers) for spec in layer_tensors(shape, layer))
    if shape.adapter is not None:
        return (*_embedding_adapter(shape), *layers, *_output_adapter(shape))
    return (
        *_tower(shape),
        TensorSpec(
            f"{shape.prefix}embed_tokens.weight",
            (shape.vocab, shape.hidden),
            None,
            "embedding",
            0,
            shape.vocab,
            may_pad=True,
        ),
        *layers,
        TensorSpec(f"{shape.prefix}norm.weight", (shape.hidden,), None, "norm"),
        *_head(shape),
    )


def layer_tensors(shape: ModelShape, layer: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of one decoder layer."""
    return tuple(_layer(shape, str(layer), layer))


@lru_cache
def layer_template(shape: ModelShape, layer: int = 0) -> tuple[TensorSpec, ...]:
    """Return the tensors of a layer, with `{}` for its index in their names."""
    return tuple(replace(spec, layer=0) for spec in _layer(shape, "{}", layer))


@lru_cache
def equal_layers(shape: ModelShape, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return `[first, last)` of each run of layers with the same tensors, as far as they are in a range."""
    runs = [list(run) for _, run in groupby(range(first, last), key=shape.has_experts)]
    return tuple((layers[0], layers[-1] + 1) for layers in runs)


@lru_cache
def kinds_of_layers(shape: ModelShape) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the different templates of the model's layers."""
    first_of_kind = {shape.has_experts(layer): layer for layer in reversed(range(shape.num_layers))}
    return tuple(layer_template(shape, layer) for layer in sorted(first_of_kind.values()))


@lru_cache
def other_tensors(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return the tensors outside the decoder layers: tower, embedding, final norm, head."""
    return tensors(replace(shape, num_layers=0))


@lru_cache
def expert_layers(shape: ModelShape, first: int, last: int) -> int:
    """Return the number of layers in `[first, last)` that have experts."""
    return sum(shape.has_experts(layer) for layer in range(first, last))


def mlp_rows(shape: ModelShape, layer: int) -> int:
    """Return the rows of F that one token passes in a layer's MLP, over all experts that compute with it."""
    experts = shape.experts
    if experts is None or not experts.are_in(layer):
        return shape.intermediate
    return experts.per_token * experts.intermediate + experts.shared


@lru_cache
def mean_mlp_rows(shape: ModelShape) -> float:
    """Return the rows of F that a token passes in a layer, as the mean over layers."""
    return sum(mlp_rows(shape, layer) for layer in range(shape.num_layers)) / shape.num_layers


@lru_cache
def mean_active_experts(shape: ModelShape) -> float:
    """Return the routed experts that a token passes in a layer, as the mean over layers."""
    if shape.experts is None:
        return 0.0
    return shape.experts.per_token * expert_layers(shape, 0, shape.num_layers) / shape.num_layers


def cached_tokens(shape: ModelShape, length: float) -> float:
    """Return the tokens of a sequence whose keys and values a layer's cache holds, as the mean over layers.

    A layer with a window keeps the last tokens only.
    """
    if shape.window is None:
        return length
    num_full = shape.num_layers // shape.window.full_every
    windowed = min(length, shape.window.tokens)
    return (num_full * length + (shape.num_layers - num_full) * windowed) / shape.num_layers


@lru_cache
def adapter_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that adapters can be added to: matrices of layers, without routers and experts."""
    specs = [spec for kind in kinds_of_layers(replace(shape, adapter=None)) for spec in kind]
    return tuple(dict.fromkeys(_module(spec) for spec in specs if _is_linear(spec)))


@lru_cache
def nf4_bytes(shape: ModelShape) -> int:
    """Return the bytes of the matrices of all layers in 4 bits.

    Half a byte for each number, a byte for each of their blocks, 4 for each block of these, 4 of an offset,
    and the tables of values, 16 and 256 numbers.
    """
    num_bytes = 0
    for first, last in equal_layers(shape, 0, shape.num_layers):
        for spec in layer_template(shape, first):
            if spec.is_quantizable:
                blocks = -(-spec.numel // NF4_BLOCK)
                nested = -(-blocks // NF4_NESTED_BLOCK)
                num_bytes += (last - first) * (-(-spec.numel // 2) + blocks + 4 * nested + 4 + 4 * (16 + 256))
    return num_bytes


@lru_cache
def measured_matrices(shape: ModelShape) -> tuple[int, ...]:
    """Return the elements of each matrix of a layer whose rows have magnitudes, given adapters' shape."""
    specs = layer_template(shape)
    columns = {spec.name.removesuffix(A): spec.shape[1] for spec in specs if spec.name.endswith(A)}
    return tuple(
        x.numel * columns[x.name.removesuffix(MAGNITUDE)] for x in specs if x.name.endswith(MAGNITUDE)
    )


def expert_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the parameters of experts that adapters can be added to: those without biases."""
    return () if shape.experts is None or shape.experts.has_bias else EXPERT_TARGETS


def outer_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules outside the layers that adapters can be added to.

    A tied matrix cannot have two, one for each use. A model that sees puts other embeddings between.
    """
    if shape.is_tied or shape.vision is not None:
        return ()
    return (EMBEDDING, OUTPUT) if shape.head == "lm" else (EMBEDDING,)


def adapted_shape(
    shape: ModelShape, r: int, targets: Sequence[str], *, has_magnitudes: bool = False
) -> ModelShape:
    """Return the shape whose tensors are a model's adapters of rank `r`.

    Targets are some of `adapter_targets`, `expert_targets` and `outer_targets`. With `has_magnitudes` the
    lengths of rows are learned, too.
    """
    return replace(shape, adapter=AdapterShape(r, tuple(targets), has_magnitudes))


def _is_linear(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.name.endswith(".weight") and not spec.name.endswith(_ROUTERS)


def _module(spec: TensorSpec) -> str:
    return spec.name.split(".")[-2]


@lru_cache
def num_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole model."""
    layers = sum(
        (last - first) * sum(spec.numel for spec in layer_template(shape, first))
        for first, last in equal_layers(shape, 0, shape.num_layers)
    )
    return layers + sum(spec.numel for spec in other_tensors(shape))


@lru_cache
def num_tensors(shape: ModelShape) -> int:
    """Return the number of tensors of the whole model; the experts of a layer count as one."""
    layers = equal_layers(shape, 0, shape.num_layers)
    return len(other_tensors(shape)) + sum(
        (last - first) * len(layer_template(shape, first)) for first, last in layers
    )


@lru_cache
def expert_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that expert ranks divide."""
    return sum(
        (last - first) * spec.numel
        for first, last in equal_layers(shape, 0, shape.num_layers)
        for spec in layer_template(shape, first)
        if spec.num_experts > 1
    )


@lru_cache
def undivided_parameters(shape: ModelShape, first: int, last: int, num_expert: int) -> int:
    """Return the parameters with gradients of some layers that all tensor ranks have whole.

    Expert ranks divide experts.
    """
    return sum(
        (stop - start) * spec.numel // (num_expert if spec.num_experts > 1 else 1)
        for start, stop in equal_layers(shape, first, last)
        for spec in layer_template(shape, start)
        if spec.split_axis is None and not is_in_fp32(spec.name)
    )


def active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that compute with one token: of the experts, those chosen for it.

    The output matrix counts, even if it is the embedding. The embedding does not, as a token reads one row.
    """
    embedding = 0 if shape.is_tied else shape.vocab * shape.hidden
    return num_parameters(shape) - inactive_parameters(shape) - embedding


@lru_cache
def inactive_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the experts that are not chosen for a token."""
    return sum(
        (last - first) * spec.numel // spec.num_experts * (spec.num_experts - shape.experts.per_token)
        for first, last in equal_layers(shape, 0, shape.num_layers)
        for spec in layer_template(shape, first)
        if shape.experts is not None and spec.num_experts > 1
    )


def _layer(shape: ModelShape, index: str, layer: int) -> Iterator[TensorSpec]:
    if shape.adapter is None:
        yield from _weights_of_layer(shape, index, layer)
        return
    for spec in _weights_of_layer(shape, index, layer):
        if _is_linear(spec) and _module(spec) in shape.adapter.targets:
            yield from _adapter(spec, shape.adapter)
    if shape.has_experts(layer):
        yield from _expert_adapters(shape, f"{shape.prefix}layers.{index}.mlp.", layer)


def _expert_adapters(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    """Yield the tensors of experts' adapters. Tensor ranks divide the rows F of B, or the columns F of A.

    Gates and ups share A, and have rows of B of their own.
    """
    adapter, experts, d = shape.adapter, shape.experts, shape.hidden
    assert adapter is not None
    assert experts is not None
    n, r, f = experts.num, adapter.r, experts.intermediate
    gate_up, down = (target in adapter.targets for target in EXPERT_TARGETS)
    if gate_up:
        yield TensorSpec(f"{prefix}experts.gate_up_proj.{A}", (n, r, d), layer, "layer", num_experts=n)
        for name in ("gate", "up"):
            at = f"{prefix}experts.{name}_proj.{B}"
            yield TensorSpec(at, (n, f, r), layer, "layer", 1, f, num_experts=n)
    if down:
        at = f"{prefix}experts.down_proj."
        yield TensorSpec(at + A, (n, r, f), layer, "layer", 2, f, num_experts=n)
        yield TensorSpec(at + B, (n, d, r), layer, "layer", num_experts=n)


class AdapterPaths(NamedTuple):
    """The names of the adapter that changes a tensor, up to `ADAPTER_ENDS`."""

    of_a: str
    of_b: str
    """The name of all its other tensors."""


def adapter_paths(name: str) -> AdapterPaths:
    """Return the adapter that changes a tensor, if there is one, given the tensor's name here or in torch."""
    of_experts = re.fullmatch(r"(.*\.experts\.(?:gate|up|gate_up|down)_proj)(?:\.weight)?", name)
    if of_experts is None:
        path = name.removesuffix("weight")
        return AdapterPaths(path, path)
    path = f"{of_experts[1]}."
    return AdapterPaths(re.sub(r"\.(gate|up)_proj\.$", ".gate_up_proj.", path), path)


class AdapterWidths(NamedTuple):
    """Sizes of the adapters that a token passes in a layer, all together, as the mean over layers."""

    inputs: float
    low: float
    """Numbers between the two matrices."""
    outputs: float
    magnitudes: float
    """Outputs that are scaled (DoRA)."""
    split_magnitudes: float
    """Scaled outputs that tensor ranks divide."""


@lru_cache
def adapter_widths(shape: ModelShape) -> AdapterWidths:
    """Return the sizes of the adapters of a layer, given their shape."""
    sums = [0.0] * len(AdapterWidths._fields)
    for first, last in equal_layers(shape, 0, shape.num_layers):
        for spec in layer_template(shape, first):
            num = (last - first) / shape.num_layers
            if shape.experts is not None and spec.num_experts > 1:
                num *= shape.experts.per_token
            for place, (end, axis) in enumerate(((A, -1), (A, -2), (B, -2), (MAGNITUDE, -1))):
                sums[place] += num * spec.shape[axis] if spec.name.endswith(end) else 0.0
            if spec.name.endswith(MAGNITUDE) and spec.split_axis is not None:
                sums[-1] += num * spec.numel
    return AdapterWidths(*sums)


def _adapter(spec: TensorSpec, adapter: AdapterShape) -> Iterator[TensorSpec]:
    """Yield the tensors of a matrix's adapter. Tensor ranks divide inputs or outputs as the matrix's."""
    r = adapter.r
    path, (rows, columns) = spec.name.removesuffix(".weight"), spec.shape
    whole = replace(spec, split_axis=None, split_units=1, split_parts=1, may_repeat=False, may_pad=False)
    a, b = (spec if spec.split_axis == axis else whole for axis in (1, 0))
    yield replace(a, name=f"{path}.{A}", shape=(r, columns))
    yield replace(b, name=f"{path}.{B}", shape=(rows, r))
    if adapter.has_magnitudes:
        yield replace(b, name=f"{path}.{MAGNITUDE}", shape=(rows,))


def _embedding_adapter(shape: ModelShape) -> Iterator[TensorSpec]:
    assert shape.adapter is not None
    if EMBEDDING in shape.adapter.targets:
        path, r = f"{shape.prefix}{EMBEDDING}", shape.adapter.r
        of_tokens = (r, shape.vocab)
        yield TensorSpec(f"{path}.{EMBEDDING_A}", of_tokens, None, "embedding", 1, shape.vocab, may_pad=True)
        yield TensorSpec(f"{path}.{EMBEDDING_B}", (shape.hidden, r), None, "embedding")


def _output_adapter(shape: ModelShape) -> Iterator[TensorSpec]:
    """Yield the adapter of the output matrix, or a scalar head, which is trained itself."""
    assert shape.adapter is not None
    if shape.head != "lm":
        yield from _head(shape)
    elif OUTPUT in shape.adapter.targets:
        (output,) = _head(shape)
        yield from _adapter(output, shape.adapter)


def _weights_of_layer(shape: ModelShape, index: str, layer: int) -> Iterator[TensorSpec]:
    prefix = f"{shape.prefix}layers.{index}."
    yield from _latent_attention(shape, prefix, layer) if shape.latent else _attention(shape, prefix, layer)
    if shape.has_experts(layer):
        yield from _expert_mlp(shape, f"{prefix}mlp.", layer)
    elif shape.has_fused_mlp:
        yield from _fused_mlp(shape, f"{prefix}mlp.", layer)
    else:
        yield from _mlp(shape, f"{prefix}mlp.", shape.intermediate, layer)
    for name in layer_norms(shape):
        if name is not None:
            yield TensorSpec(f"{prefix}{name}.weight", (shape.hidden,), layer, "layer")


class LayerNorms(NamedTuple):
    """Names of the norms of hidden states in a layer."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


def layer_norms(shape: ModelShape) -> LayerNorms:
    """Return the names of the norms that a model's layers have."""
    if not shape.has_post_norms:
        return LayerNorms()
    if shape.family == "glm4":
        return LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return LayerNorms(
        before_mlp="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    )


def _attention(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    d, e = shape.hidden, shape.head_dim
    heads, kv = shape.num_heads, shape.num_kv_heads
    for name, units, may_repeat in (("q", heads, False), ("k", kv, True), ("v", kv, True)):
        at = f"{prefix}self_attn.{name}_proj."
        yield TensorSpec(at + "weight", (units * e, d), layer, "layer", 0, units, may_repeat)
        if shape.has_qkv_bias:
            yield TensorSpec(at + "bias", (units * e,), layer, "layer", 0, units, may_repeat)
    yield TensorSpec(f"{prefix}self_attn.o_proj.weight", (d, heads * e), layer, "layer", 1, heads)
    if shape.has_out_bias:
        yield TensorSpec(f"{prefix}self_attn.o_proj.bias", (d,), layer, "layer")
    if shape.has_sinks:
        yield TensorSpec(f"{prefix}self_attn.sinks", (heads,), layer, "layer", 0, heads)
    if shape.has_qk_norm:
        yield TensorSpec(f"{prefix}self_attn.q_norm.weight", (e,), layer, "layer")
        yield TensorSpec(f"{prefix}self_attn.k_norm.weight", (e,), layer, "layer")


def _latent_attention(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    """Yield DeepSeek's matrices. Tensor ranks divide those that have heads, and repeat the others."""
    latent, d, heads = shape.latent, shape.hidden, shape.num_heads
    assert latent is not None
    at, queries = f"{prefix}self_attn.", heads * (latent.nope + latent.rope)
    if latent.q_rank is None:
        yield TensorSpec(f"{at}q_proj.weight", (queries, d), layer, "layer", 0, heads)
    else:
        yield TensorSpec(f"{at}q_a_proj.weight", (latent.q_rank, d), layer, "layer")
        if shape.has_qkv_bias:
            yield TensorSpec(f"{at}q_a_proj.bias", (latent.q_rank,), layer, "layer")
        yield TensorSpec(f"{at}q_a_layernorm.weight", (latent.q_rank,), layer, "layer")
        yield TensorSpec(f"{at}q_b_proj.weight", (queries, latent.q_rank), layer, "layer", 0, heads)
    yield TensorSpec(f"{at}kv_a_proj_with_mqa.weight", (latent.cached, d), layer, "layer")
    if shape.has_qkv_bias:
        yield TensorSpec(f"{at}kv_a_proj_with_mqa.bias", (latent.cached,), layer, "layer")
    yield TensorSpec(f"{at}kv_a_layernorm.weight", (latent.kv_rank,), layer, "layer")
    keys_and_values = heads * (latent.nope + latent.value)
    yield TensorSpec(f"{at}kv_b_proj.weight", (keys_and_values, latent.kv_rank), layer, "layer", 0, heads)
    yield TensorSpec(f"{at}o_proj.weight", (d, heads * latent.value), layer, "layer", 1, heads)
    if shape.has_out_bias:
        yield TensorSpec(f"{at}o_proj.bias", (d,), layer, "layer")


def _mlp(shape: ModelShape, prefix: str, intermediate: int, layer: int) -> Iterator[TensorSpec]:
    d, f = shape.hidden, intermediate
    for name in ("gate", "up"):
        yield TensorSpec(f"{prefix}{name}_proj.weight", (f, d), layer, "layer", 0, f)
        if shape.has_mlp_bias:
            yield TensorSpec(f"{prefix}{name}_proj.bias", (f,), layer, "layer", 0, f)
    yield TensorSpec(f"{prefix}down_proj.weight", (d, f), layer, "layer", 1, f)
    if shape.has_mlp_bias:
        yield TensorSpec(f"{prefix}down_proj.bias", (d,), layer, "layer")


def _fused_mlp(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    """Yield an MLP whose gate and up are one matrix, of whose halves each tensor rank has a part."""
    d, f = shape.hidden, shape.intermediate
    yield TensorSpec(f"{prefix}gate_up_proj.weight", (2 * f, d), layer, "layer", 0, f, split_parts=2)
    yield TensorSpec(f"{prefix}down_proj.weight", (d, f), layer, "layer", 1, f)


def _expert_mlp(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    """Yield the router, the experts and the shared experts. Tensor ranks divide the rows of every expert.

    Experts with biases (gpt-oss) have the names and shapes of transformers, and of checkpoints: matrices
    `[N, inputs, outputs]`, in which a column of the gate is followed by that of the up projection.
    """
    experts, d = shape.experts, shape.hidden
    assert experts is not None
    n, f = experts.num, experts.intermediate
    router = router_path(experts)
    yield TensorSpec(f"{prefix}{router}.weight", (n, d), layer, "layer")
    if experts.has_router_bias:
        bias = "bias" if experts.has_bias else SCORE_BIAS
        yield TensorSpec(f"{prefix}{router}.{bias}", (n,), layer, "layer")
    if experts.has_bias:
        for name, sizes, axis in (
            ("gate_up_proj", (n, d, 2 * f), 2),
            ("gate_up_proj_bias", (n, 2 * f), 1),
            ("down_proj", (n, f, d), 1),
            ("down_proj_bias", (n, d), None),
        ):
            units = 1 if axis is None else f
            yield TensorSpec(f"{prefix}experts.{name}", sizes, layer, "layer", axis, units, num_experts=n)
        return
    for name in ("gate", "up"):
        at = f"{prefix}experts.{name}_proj.weight"
        yield TensorSpec(at, (n, f, d), layer, "layer", 1, f, num_experts=n)
    yield TensorSpec(f"{prefix}experts.down_proj.weight", (n, d, f), layer, "layer", 2, f, num_experts=n)
    if experts.shared:
        yield from _mlp(shape, f"{prefix}{shared_path(experts)}.", experts.shared, layer)
    if experts.has_shared_gate:
        yield TensorSpec(f"{prefix}shared_expert_gate.weight", (1, d), layer, "layer")


def _tower(shape: ModelShape) -> Iterator[TensorSpec]:
    """Yield the tower's tensors. Every tensor rank has them whole."""
    if shape.vision is not None and not shape.vision.is_frozen:
        for name, sizes in tower_tensors(shape.vision):
            yield TensorSpec(name, sizes, None, "tower")


def _head(shape: ModelShape) -> Iterator[TensorSpec]:
    if shape.head == "score":
        yield TensorSpec("score.weight", (1, shape.hidden), None, "head")
    elif shape.head == "value":
        yield TensorSpec("value_head.weight", (1, shape.hidden), None, "head")
        yield TensorSpec("value_head.bias", (1,), None, "head")
    elif not shape.is_tied:
        yield TensorSpec(
            "lm_head.weight", (shape.vocab, shape.hidden), None, "head", 0, shape.vocab, may_pad=True
        )
