"""The forward pass of Llama, Mistral, Qwen2 and Qwen3, without the modules of transformers.

A decode step of a small model has little arithmetic, so its time is that of calls. `DenseDecoder` makes about
25 per layer, a quarter of what the modules of transformers make: queries, keys and values are columns of one
tensor, so that they are rotated together. It uses the parameters of such modules, so new weights take effect
at once, and computes the same up to rounding.

Axes: R rows (tokens), D hidden, H query heads, K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from hflow.engines.embedded.attention import PackedStep, attend_rows


class _Linear(NamedTuple):
    """Parameters of a linear layer: views `[in, out]` and `[out]` of those of its module."""

    matrix: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Linear) -> _Linear:
        return cls(module.weight.t(), module.bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the result, in `out` if it is given."""
        if self.bias is None:
            return torch.mm(x, self.matrix, out=out)
        return torch.addmm(self.bias, x, self.matrix, out=out)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result to `total`, in the matrix product itself."""
        total.addmm_(x, self.matrix)
        if self.bias is not None:
            total.add_(self.bias)


class _Norm(NamedTuple):
    """Root-mean-square normalisation of the last axis, in fp32 as transformers does it."""

    weight: Tensor
    eps: Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight, torch.tensor(module.variance_epsilon, device=module.weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """Return `weight * x / sqrt(mean(x^2) + eps)`."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class _Projections(NamedTuple):
    """Parameters that make queries, keys and values."""

    q: _Linear
    k: _Linear
    v: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None

    @classmethod
    def of(cls, attention: Any) -> _Projections:
        has_norms = hasattr(attention, "q_norm")
        return cls(
            q=_Linear.of(attention.q_proj),
            k=_Linear.of(attention.k_proj),
            v=_Linear.of(attention.v_proj),
            q_norm=_Norm.of(attention.q_norm) if has_norms else None,
            k_norm=_Norm.of(attention.k_norm) if has_norms else None,
        )

    def __call__(self, x: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys `[R, H + K, d]`, and values `[R, K, d]`, columns of one tensor."""
        num_q, num_k = self.q.matrix.shape[1], self.k.matrix.shape[1]
        q_end, k_end, end = num_q, num_q + num_k, num_q + 2 * num_k
        joined = x.new_empty(x.shape[0], end)
        self.q(x, joined[:, :q_end])
        self.k(x, joined[:, q_end:k_end])
        self.v(x, joined[:, k_end:])
        heads = joined.view(x.shape[0], -1, head_dim)
        rotated, values = heads[:, : k_end // head_dim], heads[:, k_end // head_dim :]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = rotated.split((num_q // head_dim, num_k // head_dim), dim=1)
            rotated = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=1)
        return rotated, values


class _Layer(NamedTuple):
    """Parameters of one layer."""

    input_norm: _Norm
    projections: _Projections
    o: _Linear
    mlp_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear


class DenseDecoder:
    """Computes logits of packed rows from the parameters of a causal LM of transformers."""

    def __init__(self, module: nn.Module) -> None:
        """Look up the modules.

        Args:
            module: a model to which `families.own_forward_objection` has no objection.
        """
        causal_lm: Any = module
        body = causal_lm.model
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotary_of: Any = body.rotary_emb
        self._layers = [_layer(layer) for layer in body.layers]
        self._norm, self._head = _Norm.of(body.norm), _Linear.of(causal_lm.lm_head)
        attention = body.layers[0].self_attn
        self._head_dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._cos = self._sin = torch.empty(0)
        """The rotary table: `[positions, 1, d]` each, see `_rotated`."""

    @property
    def address(self) -> int:
        """Where the weights are. They have one memory each, but all of it is freed and allocated together."""
        return self._embedding.data_ptr()

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
        """Run the step, which stores its keys and values in the cache.

        Args:
            input_ids: int64 `[R]`.
            positions: int64 `[R]`.
            step: the step of these rows.

        Returns:
            The last layer's output, `[R, D]`.
        """
        hidden = self._embedding.index_select(0, input_ids)
        cos, sin = self._rotary(positions, hidden, step.max_length)
        for index, layer in enumerate(self._layers):
            heads, values = layer.projections(layer.input_norm(hidden), self._head_dim)
            heads = _rotated(heads, cos, sin)
            queries, keys = heads[:, : self._num_heads], heads[:, self._num_heads :]
            attended = attend_rows(step, index, queries, keys, values, self._scaling)
            layer.o.add_to(hidden, attended.flatten(1))
            x = layer.mlp_norm(hidden)
            layer.down.add_to(hidden, silu(layer.gate(x), inplace=True).mul_(layer.up(x)))
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


def _layer(layer: Any) -> _Layer:
    mlp = layer.mlp
    return _Layer(
        input_norm=_Norm.of(layer.input_layernorm),
        projections=_Projections.of(layer.self_attn),
        o=_Linear.of(layer.self_attn.o_proj),
        mlp_norm=_Norm.of(layer.post_attention_layernorm),
        gate=_Linear.of(mlp.gate_proj),
        up=_Linear.of(mlp.up_proj),
        down=_Linear.of(mlp.down_proj),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of each head (Su et al. 2021): `[R, heads, d]`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
