"""The forward pass of Llama, Mistral, Qwen2 and Qwen3, without the modules of transformers.

A decode step of a small model has little arithmetic, so its time is that of calls. `DenseDecoder` makes about
30 per layer, a third of what the modules of transformers make. It uses the parameters of such modules, so
new weights take effect at once, and computes the same up to rounding.

Axes: R rows (tokens), D hidden, H query heads, K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from hflow.backends.embedded_engine.attention import PackedStep, attend_rows


class _Linear(NamedTuple):
    """Parameters of a linear layer, `[out, in]` and `[out]`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Linear) -> _Linear:
        return cls(module.weight, module.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result to `total`, in the matrix product itself."""
        total.addmm_(x, self.weight.t())
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


class _Layer(NamedTuple):
    """Parameters of one layer."""

    input_norm: _Norm
    q: _Linear
    k: _Linear
    v: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
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
        self._cos = self._sin = torch.empty(0)
        """The rotary table: `[positions, 1, d]` each, see `_rotated`."""

    def logits(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, step: PackedStep) -> Tensor:
        """Run the step, which stores its keys and values in the cache.

        Args:
            input_ids: int64 `[R]`.
            positions: int64 `[R]`.
            logit_rows: int64: rows whose logits are computed.
            step: of these rows.

        Returns:
            `[len(logit_rows), V]`.
        """
        hidden = self._embedding.index_select(0, input_ids)
        cos, sin = self._rotary(positions, hidden, step.max_length)
        heads = (len(input_ids), -1, self._head_dim)
        for index, layer in enumerate(self._layers):
            x = layer.input_norm(hidden)
            q, k, v = layer.q(x).view(heads), layer.k(x).view(heads), layer.v(x).view(heads)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = layer.q_norm(q), layer.k_norm(k)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            attended = attend_rows(step, index, q, k, v, self._scaling)
            layer.o.add_to(hidden, attended.flatten(1))
            x = layer.mlp_norm(hidden)
            layer.down.add_to(hidden, silu(layer.gate(x), inplace=True).mul_(layer.up(x)))
        return self._head(self._norm(hidden.index_select(0, logit_rows)))

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
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=_Norm.of(layer.input_layernorm),
        q=_Linear.of(attention.q_proj),
        k=_Linear.of(attention.k_proj),
        v=_Linear.of(attention.v_proj),
        q_norm=_Norm.of(attention.q_norm) if has_head_norms else None,
        k_norm=_Norm.of(attention.k_norm) if has_head_norms else None,
        o=_Linear.of(attention.o_proj),
        mlp_norm=_Norm.of(layer.post_attention_layernorm),
        gate=_Linear.of(mlp.gate_proj),
        up=_Linear.of(mlp.up_proj),
        down=_Linear.of(mlp.down_proj),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of each head (Su et al. 2021): `[R, heads, d]`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
