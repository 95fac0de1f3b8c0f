"""Balanced experts: a loss on the load of each layer's experts, and biases of routers that follow it.

For the tokens t of a sequence, or of a minibatch, with routing probabilities p, the loss of a layer is

    sum_e f_e P_e,   f_e = N / (K T) * |{t: p_te is one of the K largest p_t}|,   P_e = sum_t p_te / T

It is 1 if f is the same for all experts (Fedus et al. 2021, "Switch Transformers", equations 4 to 6). The
mean over sequences is that of DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20, where sigmoids are divided
by their sum, and where neither biases nor groups of experts change f. Losses of layers are added.

Only P has a gradient. It is known as soon as f is, so ranks that divide the tokens exchange counts alone, and
no result depends on micro-batches or ranks.

A bias moves by `bias_rate` after each update, up for an expert that was chosen less often than the mean, down
for one that was chosen more often (DeepSeek-V3, section 2.1.2; Wang et al. 2024, arXiv:2408.15664).

Axes: T packed tokens, U computed tokens of this rank, S sequences, L layers with experts, K experts of a
token, N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hflow.config.schema import BalanceConfig
from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import to_tensor
from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.shapes.architectures import RouterKind


@dataclass(frozen=True)
class BalancedTokens:
    """Which rows of a rank are which tokens of a micro-batch, and what the routers of its layers found."""

    row: Tensor
    """int64 `[T]`: the row of each token among the U; 0 for tokens of other ranks."""
    sequence: Tensor
    """int64 `[T]`: the sequence, below S, whose f it has. S is 1 over a minibatch."""
    counts: Tensor
    """float32 `[T]`: 1 for tokens of this rank whose sequence is learned, else 0."""
    weights: Tensor
    """float32 `[T]`: their shares of the minibatch's loss, which add up to 1 over all ranks."""
    scale: Tensor
    """float32 `[S]`: what counts of a sequence are multiplied by: 1 / T."""
    load: Tensor | None
    """`[L, N]`: f of the whole minibatch; None: each sequence has its own."""
    coefficient: float
    """Factor of the loss; 0: tokens are only counted."""
    group: ProcessGroup | None = None
    """The ranks that divide the tokens; None for one."""
    found: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> float64 `[2 N + 1]`: how often each expert was chosen on this rank, how often it was one of
    the K most probable ones, and this rank's part of the loss. A layer that is computed again in a backward
    pass sets it again."""

    def balance(self, layer: int, weights: Tensor, logits: Tensor, index: Tensor, score: str) -> Tensor:
        """Count the experts of a layer, and return its router's weights.

        Their backward pass adds the gradient of the layer's loss to that of the logits.

        Args:
            weights: the router's weights `[U, K]`.
            logits: what it computes them from, `[U, N]`.
            score: what makes probabilities of logits: `softmax`, or `sigmoid`, divided by their sum.
        """
        gradient = self._observe(layer, logits.detach(), index, score)
        if gradient is None:
            return weights
        return _add_gradient(weights, logits, gradient)

    @torch.no_grad()
    def _observe(self, layer: int, logits: Tensor, index: Tensor, score: str) -> Tensor | None:
        """Return the gradient of a layer's loss with respect to the logits; None if tokens are counted."""
        num_experts, per_token = logits.shape[1], index.shape[1]
        chosen, top = (self._counted(x, num_experts) for x in (index, logits.topk(per_token).indices))
        found, loss, gradient = [chosen.sum(0), top.sum(0)], top.new_zeros(1), None
        if self.coefficient:
            if self.load is not None:
                load = self.load[layer][None]
            else:
                if self.group is not None:
                    dist.all_reduce(top, group=self.group)
                load = top * self.scale[:, None] * (num_experts / per_token)
            of_tokens = load[self.sequence] * self.weights[:, None]
            factors = of_tokens.new_zeros(logits.shape).index_add(0, self.row, of_tokens)
            p, slope = _probabilities(logits.float(), score)
            of_rows = (factors * p).sum(-1, keepdim=True)
            loss = of_rows.sum().view(1)
            gradient = (self.coefficient * slope * (factors - of_rows)).to(logits.dtype)
        self.found[layer] = torch.cat([*found, loss]).double()
        return gradient

    def _counted(self, index: Tensor, num_experts: int) -> Tensor:
        """Return the number of tokens of each sequence that have each expert: float32 `[S, N]`."""
        places = self.sequence[:, None] * num_experts + index[self.row]
        each = self.counts[:, None].expand_as(places)
        flat = each.new_zeros(len(self.scale) * num_experts)
        return flat.index_add(0, places.flatten(), each.flatten()).view(-1, num_experts)


def _probabilities(logits: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """Return p `[U, N]`, and s where the gradient of `sum(c * p)` is `s * (c - sum(c * p))`."""
    if score == "softmax":
        p = logits.softmax(-1)
        return p, p
    scores = logits.sigmoid()
    p = scores / scores.sum(-1, keepdim=True)
    return p, p * (1 - scores)


class _AddGradient(torch.autograd.Function):
    """Pass weights on; in the backward pass, give the logits a gradient that is known."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None


_add_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _AddGradient.apply


@dataclass(frozen=True)
class ExpertBalance:
    """The balance of a trained model's experts, as one of its ranks computes it."""

    config: BalanceConfig
    num_layers: int
    """L."""
    num_experts: int
    """N."""
    per_token: int
    """K."""
    device: torch.device
    group: ProcessGroup | None = None
    """All ranks of the replica; None for one."""
    divided_over: ProcessGroup | None = None
    """The ranks that divide the tokens of a micro-batch; None for one."""
    biases: Mapping[int, Tensor] = field(default_factory=dict)
    """Layer -> `[N]`, what its router adds to scores before it chooses, of each layer that the rank has."""

    @property
    def counts_first(self) -> bool:
        """Whether all tokens of a minibatch must be counted before its loss is known."""
        return self.config.coefficient > 0 and self.config.over == "batch"

    def tokens(
        self,
        batch: Batch,
        sharing: PrefixSharing | None,
        shares: npt.NDArray[np.float64],
        counted: Tensor | None = None,
        here: Tensor | None = None,
    ) -> BalancedTokens:
        """Lay out a micro-batch.

        Args:
            sharing: which of its tokens are computed once; None: every token is computed.
            shares: `[S]`, the share of each sequence in means over sequences; 0 where nothing is learned.
            counted: what `total` returned for the minibatch, if `counts_first` and it has been counted.
            here: int64 `[U]`: the computed token of each row of this rank, -1 for padding; None: all of them.
        """
        lengths = batch.lengths
        sequence, scale = np.repeat(np.arange(len(lengths)), lengths), 1 / lengths
        if self.counts_first:
            sequence, scale = np.zeros_like(sequence), np.ones(1)
        rows = np.arange(batch.num_tokens) if sharing is None else sharing.row_of_token
        row = to_tensor(rows, self.device)
        counts = to_tensor(np.repeat(shares > 0, lengths).astype(np.float32), self.device)
        weights, load = to_tensor(np.repeat(shares / lengths, lengths), self.device), None
        if here is not None:
            place = row.new_full((int(rows.max()) + 2,), -1)  # host: numpy
            place[here + 1] = torch.arange(len(here), device=self.device)
            row = place[row + 1]
            counts, weights, row = counts * (row >= 0), weights * (row >= 0), row.clamp(min=0)
        if counted is not None:
            top = counted[:, self.num_experts : -1].float()
            num_pairs = top.sum(1, keepdim=True)
            load, weights = top * self.num_experts / num_pairs, counts * self.per_token / num_pairs[0]
        is_counting = self.counts_first and counted is None
        return BalancedTokens(
            row,
            to_tensor(sequence, self.device),
            counts,
            weights,
            to_tensor(scale, self.device),
            load,
            0.0 if is_counting else self.config.coefficient,
            self.divided_over,
        )

    def total(self, parts: Iterable[BalancedTokens]) -> Tensor:
        """Return the sums of what each layer found on all ranks, float64 `[L, 2 N + 1]`; a collective."""
        total = torch.zeros(
            self.num_layers, 2 * self.num_experts + 1, dtype=torch.float64, device=self.device
        )
        for part in parts:
            for layer, found in part.found.items():
                total[layer] += found
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def figures(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a layer, and the largest load of an expert relative to its layer's mean.

        Both are float32 `[1]`.
        """
        chosen = total[:, : self.num_experts]
        largest = (chosen.amax(1) / chosen.mean(1)).max()
        return total[:, -1].mean().float().view(1), largest.float().view(1)

    @torch.no_grad()
    def move_biases(self, total: Tensor) -> None:
        """Move each bias by `bias_rate`, up where an expert was chosen less often than the mean."""
        for layer, bias in self.biases.items():
            chosen = total[layer, : self.num_experts]
            bias += self.config.bias_rate * (chosen.mean() - chosen).sign()


BALANCED = "balanced_tokens"
"""Keyword argument with which a model's forward passes `BalancedTokens` to its layers."""


def routers_of(layers: Iterable[nn.Module], kind: RouterKind) -> list[tuple[nn.Module, Any]]:
    """Return the decoder layers with experts, each with its router."""
    return [(layer, x) for layer in layers for x in layer.modules() if type(x).__name__ == kind.module]


def let_routers_balance(layers: Iterable[nn.Module], kind: RouterKind) -> None:
    """Let the routers of decoder layers count and balance where the argument `BALANCED` is passed.

    Each layer passes it to its router when its forward runs, in a recomputation too.
    """
    for number, (layer, router) in enumerate(routers_of(layers, kind)):
        router.balanced = None
        router.register_forward_hook(partial(_balance, number, kind.score))
        layer.forward = partial(_pass_to_router, layer.forward, router)


def _pass_to_router(forward: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
    router.balanced = kwargs.get(BALANCED)
    return forward(*args, **kwargs)


def _balance(number: int, score: str, router: Any, args: object, routed: Any) -> Any:
    """Return logits, weights and experts as a router of transformers does, with balanced weights."""
    tokens: BalancedTokens | None = router.balanced
    router.balanced = None
    if tokens is None:
        return routed
    logits, weights, index = routed
    return logits, tokens.balance(number, weights, logits, index, score), index
