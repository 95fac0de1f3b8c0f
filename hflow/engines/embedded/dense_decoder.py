"""The forward pass of Llama, Mistral, Qwen2 and Qwen3, without the modules of transformers.

A decode step of a small model has little arithmetic, so its time is that of calls. `DenseDecoder` makes about
20 per layer, a fifth of what the modules of transformers make: queries, keys and values are columns of one
tensor, and so are gate and up. An engine's own parameters are views of one tensor for each of these
(`join_projections`), which is then one product. It uses the parameters of such modules, so new weights take
effect at once, and computes the same up to rounding.

A product of a few rows with a matrix takes most of its time to arrange the matrix in memory. On a CPU in fp32
the decoder keeps arranged copies of large matrices, once a version of the weights has decoded some steps.

Axes: R rows (tokens), D hidden, F intermediate, H query heads, K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from hflow.engines.embedded.attention import PackedStep, attend_rows
from hflow.models.attention_kernels import StoredHeads, triton_kernels

ARRANGED_AFTER = 5
"""Decode steps after which matrices are arranged. That takes as long as about five steps save."""
MIN_ARRANGED = 1 << 18
"""Elements of a matrix from which on that pays."""
MAX_ARRANGED_ROWS = 512
"""Rows up to which it pays."""
ARRANGED_FOR = 32
"""Number of rows for which MKL arranges a matrix."""


def join_projections(module: nn.Module, device: torch.device) -> None:
    """Make the parameters of layers with one input views of one tensor, on the device.

    They keep names and shapes. One layer exists twice meanwhile. The module is one to which
    `families.own_forward_objection` has no objection.
    """
    causal_lm: Any = module
    for layer in causal_lm.model.layers:
        for linears in _joined_layers(layer):
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in linears]
                if parts[0] is None:
                    continue
                sizes = [len(part) for part in parts]
                joined = parts[0].new_empty(sum(sizes), *parts[0].shape[1:], device=device)
                for linear, rows in zip(linears, joined.split(sizes), strict=True):
                    rows.copy_(getattr(linear, name).detach())
                    setattr(linear, name, nn.Parameter(rows))


def _joined_layers(layer: Any) -> tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
    """Return the linear layers of queries, keys and values, and those of gate and up."""
    attention, mlp = layer.self_attn, layer.mlp
    return (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)


class _Arranged:
    """A copy of a matrix in the order in which MKL's products read it."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Copy matrices `[out, in]` of one input as one."""
        weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
        self._copy: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), ARRANGED_FOR)
        self._sizes = weight.new_empty(()).expand(weight.shape)
        """A tensor without memory, as the product reads no more of the original than its sizes."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T`."""
        product: Tensor = torch.ops.mkl._mkl_linear(x, self._copy, self._sizes, None, len(x))
        return product


def can_arrange(weight: Tensor) -> bool:
    """Return whether a model with such weights can use arranged matrices."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and torch.backends.mkl.is_available()


@cache
def _keeps_arrangement(num_rows: int) -> bool:
    """Return whether a product of so many rows can use a matrix that was arranged for `ARRANGED_FOR`.

    MKL promises it for equal numbers only. It is right where results are those of a matrix arranged for it.
    """
    if num_rows > MAX_ARRANGED_ROWS:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(num, 520, generator=generator) for num in (776, num_rows))
    packed = (torch.ops.mkl._mkl_reorder_linear_weight(weight, num) for num in (ARRANGED_FOR, num_rows))
    one, other = (torch.ops.mkl._mkl_linear(rows, copy, weight, None, num_rows) for copy in packed)
    return torch.equal(one, other)


class _Linear:
    """A linear layer: views `[in, out]` and `[out]` of the parameters of its module."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.matrix, self.bias = weight.t(), bias
        self.arranged: _Arranged | None = None

    @classmethod
    def of(cls, module: nn.Linear) -> _Linear:
        return cls(module.weight, module.bias)

    def arrange(self) -> None:
        """Keep an arranged copy of a large matrix."""
        if self.matrix.numel() >= MIN_ARRANGED:
            self.arranged = _Arranged([self.matrix.t()])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the result, in `out` if it is given."""
        if out is None and self.arranged is not None and _keeps_arrangement(len(x)):
            product = self.arranged(x)
            return product if self.bias is None else product.add_(self.bias)
        if self.bias is None:
            return torch.mm(x, self.matrix, out=out)
        return torch.addmm(self.bias, x, self.matrix, out=out)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result to `total`, in the matrix product itself unless the matrix is arranged."""
        if self.arranged is not None and _keeps_arrangement(len(x)):
            total.add_(self.arranged(x))
        else:
            total.addmm_(x, self.matrix)
        if self.bias is not None:
            total.add_(self.bias)


class _JoinedLinear:
    """Linear layers of one input, whose results are columns of one tensor."""

    def __init__(self, parts: Sequence[_Linear], sizes: Sequence[int]) -> None:
        self.parts = tuple(parts)
        """One, if the parameters are views of one tensor (`join_projections`)."""
        self.sizes = tuple(sizes)
        """Columns of each layer."""
        self.arranged: _Arranged | None = None

    @classmethod
    def of(cls, modules: Sequence[nn.Linear]) -> _JoinedLinear:
        sizes = tuple(module.out_features for module in modules)
        weight = _whole([module.weight for module in modules])
        if weight is None:
            return cls([_Linear.of(module) for module in modules], sizes)
        bias = None if modules[0].bias is None else _whole([module.bias for module in modules])
        return cls([_Linear(weight, bias)], sizes)

    def arrange(self) -> None:
        """Keep an arranged copy of all matrices together, if they are large."""
        if sum(part.matrix.numel() for part in self.parts) >= MIN_ARRANGED:
            self.arranged = _Arranged([part.matrix.t() for part in self.parts])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the results, `[R, sum of sizes]`."""
        if self.arranged is not None and _keeps_arrangement(len(x)):
            joined = self.arranged(x)
            columns = joined.split([part.matrix.shape[1] for part in self.parts], dim=1)
            for part, of_part in zip(self.parts, columns, strict=True):
                if part.bias is not None:
                    of_part.add_(part.bias)
            return joined
        if len(self.parts) == 1:
            return self.parts[0](x)
        joined = x.new_empty(x.shape[0], sum(self.sizes))
        for part, of_part in zip(self.parts, joined.split(self.sizes, dim=1), strict=True):
            part(x, of_part)
        return joined


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows some tensors are, in order; None if they are not views of one."""
    first = parts[0].detach()
    starts = [part.storage_offset() for part in parts]
    ends = [part.storage_offset() + part.numel() for part in parts]
    is_one = all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts)
    if not is_one or starts[1:] != ends[:-1]:
        return None
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


class Norm(NamedTuple):
    """Root-mean-square normalisation of the last axis, in fp32 as transformers does it."""

    weight: Tensor
    eps: Tensor

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Return the norm of a module of transformers."""
        return cls(module.weight, torch.tensor(module.variance_epsilon, device=module.weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """Return `weight * x / sqrt(mean(x^2) + eps)`."""
        if (kernels := triton_kernels(x.device)) is not None:
            normed: Tensor = kernels.rms_norm(x, self.weight, self.eps)
            return normed
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class _Projections(NamedTuple):
    """Parameters that make queries, keys and values."""

    joined: _JoinedLinear
    norms: tuple[Norm, Norm] | None
    """The norms of queries and of keys, which have one eps."""

    def __call__(
        self, x: Tensor, head_dim: int, cos: Tensor, sin: Tensor, stored: StoredHeads | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[R, H, d]`, and keys and values `[R, K, d]`, of inputs `[R, D]`.

        Cosines are `[R, 1, d]`, sines as `rotated` takes them. Triton's kernel stores keys and values in
        `stored`; None if they are stored later.
        """
        sizes = [size // head_dim for size in self.joined.sizes]
        heads = self.joined(x).view(x.shape[0], -1, head_dim)
        queries, keys, values = heads.split(sizes, dim=1)
        both, norms = heads[:, : -sizes[2]], None
        if (kernels := triton_kernels(x.device)) is not None:
            if self.norms is not None:
                norms = *(norm.weight for norm in self.norms), self.norms[0].eps
            kernels.rotate_heads(heads, sizes[1], cos, sin, norms, stored)
            return queries, keys, values
        if self.norms is not None:
            both = torch.cat((self.norms[0](queries), self.norms[1](keys)), dim=1)
        queries, keys = rotated(both, cos, sin).split(sizes[:2], dim=1)
        return queries, keys, values


class _Layer(NamedTuple):
    """Parameters of one layer."""

    input_norm: Norm
    projections: _Projections
    o: _Linear
    mlp_norm: Norm
    gate_up: _JoinedLinear
    down: _Linear


class DenseDecoder:
    """Computes logits of packed rows from the parameters of a causal LM of transformers."""

    def __init__(self, module: nn.Module) -> None:
        """Look up the modules of a model to which `families.own_forward_objection` has no objection."""
        causal_lm: Any = module
        body = causal_lm.model
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotary_of: Any = body.rotary_emb
        self._layers = [_layer(layer) for layer in body.layers]
        self._norm, self._head = Norm.of(body.norm), _Linear.of(causal_lm.lm_head)
        attention = body.layers[0].self_attn
        self._head_dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        self._cos = self._sin = torch.empty(0)
        """The rotary table: `[positions, 1, d]` each, see `rotated`."""
        self._num_decoded = 0
        """Decode steps with these weights."""
        self._can_arrange = can_arrange(self._embedding)

    @property
    def address(self) -> int:
        """Where the weights are. They have one memory each, but all of it is freed and allocated together."""
        return self._embedding.data_ptr()

    def reset(self) -> None:
        """Take note that the weights are about to change, or have changed."""
        self._num_decoded = 0
        for linear in self._linears():
            linear.arranged = None

    def count_decode(self) -> None:
        """Take note of a decode step, and arrange the matrices if that pays by now."""
        self._num_decoded += 1
        if self._num_decoded == ARRANGED_AFTER and self._can_arrange:
            for linear in self._linears():
                linear.arrange()

    def _linears(self) -> Iterator[_Linear | _JoinedLinear]:
        for layer in self._layers:
            yield from (layer.projections.joined, layer.o, layer.gate_up, layer.down)
        yield self._head

    def new_hidden(self, num_rows: int) -> Tensor:
        """Return an uninitialised result of `hidden`, `[num_rows, D]`."""
        return self._embedding.new_empty(num_rows, self._embedding.shape[1])

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[R, V]` of the last layer's output `[R, D]`."""
        return self._head(self._norm(hidden))

    def logits(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, step: PackedStep) -> Tensor:
        """Run the step and return the logits `[len(logit_rows), V]` of some rows, int64; see `hidden`."""
        return self.head(self.hidden(input_ids, positions, step).index_select(0, logit_rows))

    def hidden(self, input_ids: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        """Run a step of ids and positions, int64 `[R]`; return the last layer's output, `[R, D]`.

        The step stores its keys and values in the cache.
        """
        hidden = self._embedding.index_select(0, input_ids)
        cos, sin = self._rotary(positions, hidden, step.max_length)
        has_kernels = triton_kernels(hidden.device) is not None
        for index, layer in enumerate(self._layers):
            stored = step.stored_heads(index) if has_kernels else None
            heads = layer.projections(layer.input_norm(hidden), self._head_dim, cos, sin, stored)
            attended = attend_rows(step, index, *heads, self._scaling, is_stored=stored is not None)
            layer.o.add_to(hidden, attended.flatten(1))
            layer.down.add_to(hidden, gated(layer.gate_up(layer.mlp_norm(hidden))))
        return hidden

    def _rotary(self, positions: Tensor, hidden: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[R, 1, d]`, the sines of the first half negated."""
        if len(self._cos) < max_length or self._cos.device != hidden.device:
            num_positions = max(max_length, 2 * len(self._cos))
            cos, sin = self._rotary_of(hidden, torch.arange(num_positions, device=hidden.device)[None])
            half = self._head_dim // 2
            self._cos = cos[0, :, None]
            self._sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), dim=-1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def gated(joined: Tensor) -> Tensor:
    """Return `silu(gate) * up` of both `[R, 2 F]`, in place. The caller does not hold them any longer."""
    if (kernels := triton_kernels(joined.device)) is not None:
        gated: Tensor = kernels.gate(joined)
        return gated
    gate, up = joined.chunk(2, dim=1)
    return silu(gate, inplace=True).mul_(up)


def _layer(layer: Any) -> _Layer:
    attention = layer.self_attn
    has_norms = hasattr(attention, "q_norm")
    projections, gate_up = (_JoinedLinear.of(linears) for linears in _joined_layers(layer))
    return _Layer(
        input_norm=Norm.of(layer.input_layernorm),
        projections=_Projections(
            joined=projections,
            norms=(Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if has_norms else None,
        ),
        o=_Linear.of(attention.o_proj),
        mlp_norm=Norm.of(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=_Linear.of(layer.mlp.down_proj),
    )


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of each head (Su et al. 2021): `[R, heads, d]`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
