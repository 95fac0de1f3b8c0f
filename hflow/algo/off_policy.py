"""Corrections for samples of another policy: weights, and masks of what is too far away.

**behav** generated the tokens, and **prox** is the policy for which the loss is right: the one at the start
of the step, computed by the trainer. They differ because an engine computes other log-probs than the trainer,
and because samples are older than the weights. Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hflow.algo.kl import kl_k2, kl_k3
from hflow.algo.ratios import bounded
from hflow.types import Sequences

WeightLevel = Literal["token", "sequence", "geometric"]
Statistic = Literal["k1", "k2", "k3", "binary_kl", "tv"]
Extent = Literal["token", "sequence-sum", "sequence-mean", "sequence-max"]


def importance_weights(prox: Tensor, behav: Tensor, seqs: Sequences, level: WeightLevel = "token") -> Tensor:
    """Return the weight of each token, `exp(prox - behav)`, of the token or of its sequence.

    Args:
        prox: `[T]`.
        behav: `[T]`.
        seqs: the layout of the batch.
        level: `token`: the token's own ratio, biased with low variance. `sequence`: the product over the
            sequence, unbiased with a variance that grows with its length. `geometric`: the geometric mean
            over the sequence.

    Returns:
        `[T]`, bounded as all ratios, and 0 where `loss_mask` is 0.

    Source: Espeholt et al. 2018 (token); Precup et al. 2000, "Eligibility traces for off-policy policy
    evaluation" (sequence); Zheng et al. 2025, GSPO, equation 7 (geometric).
    """
    log_ratio = prox - behav
    if level != "token":
        log_ratio = seqs.widen(seqs.sum(log_ratio) if level == "sequence" else seqs.mean(log_ratio))
    return bounded(log_ratio).exp().masked_fill(~seqs.loss_mask, 0)


def limit_weights(
    weights: Tensor, lower: float | None, upper: float | None, outside: Literal["truncate", "mask"]
) -> tuple[Tensor, Tensor]:
    """Return weights within bounds, and which ones were outside.

    Args:
        weights: any shape.
        lower: smallest weight. None: no limit.
        upper: largest weight. None: no limit.
        outside: move the others to the nearest bound (`truncate`: truncated importance sampling), or set them
            to 0 (`mask`: masked importance sampling, and with both bounds IcePop).

    Source: Ionides 2008, "Truncated importance sampling"; Ling team 2025, "Every step evolves" (IcePop).
    """
    is_outside = torch.zeros_like(weights, dtype=torch.bool)
    if lower is None and upper is None:
        return weights, is_outside
    if lower is not None:
        is_outside = is_outside | (weights < lower)
    if upper is not None:
        is_outside = is_outside | (weights > upper)
    if outside == "mask":
        return weights.masked_fill(is_outside, 0), is_outside
    return weights.clamp(lower, upper), is_outside


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return `(sum w)^2 / (N sum w^2)`: the share of N samples that are worth as much without weights.

    It is 1 for equal weights, 1 / N if one weight is all, and 0 for weights of 0.

    Source: Kong 1992, "A note on importance sampling using standardized weights".
    """
    exact = weights.double()
    square = exact.square().sum() * max(len(exact), 1)
    return torch.where(square > 0, exact.sum().square() / square.clamp(min=1e-300), 0.0)


def binary_divergence(theta: Tensor, behav: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence of theta from behav on the event "this token": total variation or KL.

    `tv` is `|p_behav - p_theta|`, and `kl` is `p_behav log(p_behav / p_theta) + (1 - p_behav)
    log((1 - p_behav) / (1 - p_theta))`, both of single tokens and without gradient. They are lower bounds of
    the divergences over the whole vocabulary.

    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", the binary
    approximation.
    """
    p, q = behav.double().exp(), theta.detach().double().exp()
    if kind == "tv":
        return (p - q).abs().to(theta.dtype)
    tiny = torch.finfo(torch.float64).eps
    other = (1 - p) * (torch.log((1 - p).clamp(min=tiny)) - torch.log((1 - q).clamp(min=tiny)))
    return (p * (behav.double() - theta.detach().double()) + other).to(theta.dtype)


def divergence_of(
    prox: Tensor, behav: Tensor, seqs: Sequences, statistic: Statistic, extent: Extent
) -> Tensor:
    """Return by how much prox differs from behav at each token, or over its sequence.

    Args:
        prox: `[T]`.
        behav: `[T]`, log-probs of the policy that drew the tokens.
        seqs: the layout of the batch.
        statistic: in nats, `k1` is the log-ratio `prox - behav`, negative or positive. The others are never
            negative: `k2` and `k3` (`algo.kl_k2`, and `algo.kl_k3` without its cap: one token that is far off
            must count as far off), `binary_kl` in nats and `tv` from 0 to 1 (`algo.binary_divergence`).
        extent: the token itself, or the sum, mean or largest value over its sequence.

    Returns:
        `[T]`, 0 where `loss_mask` is 0.
    """
    if statistic == "k1":
        values = prox - behav
    elif statistic in ("binary_kl", "tv"):
        values = binary_divergence(prox, behav, "tv" if statistic == "tv" else "kl")
    else:
        values = kl_k2(behav, prox) if statistic == "k2" else kl_k3(behav, prox, cap=None)
    values = values.masked_fill(~seqs.loss_mask, 0)
    if extent == "sequence-sum":
        values = seqs.sum(values)[seqs.index]
    elif extent == "sequence-mean":
        values = seqs.mean(values)[seqs.index]
    elif extent == "sequence-max":
        lowest = values.masked_fill(~seqs.loss_mask, -torch.inf)
        largest = lowest.new_full((len(seqs),), -torch.inf).scatter_reduce(0, seqs.index, lowest, "amax")
        values = largest[seqs.index]
    return values.masked_fill(~seqs.loss_mask, 0)


def second_moment_mask(prox: Tensor, behav: Tensor, seqs: Sequences, max_second_moment: float) -> Tensor:
    """Return a mask of tokens over which the mean of `(prox - behav)^2` is within a limit: M2PO.

    It drops the tokens with the largest squares, and as few as possible.

    Args:
        prox: `[T]`.
        behav: `[T]`.
        seqs: the layout of the batch.
        max_second_moment: the limit in squared nats; the paper uses 0.04.

    Returns:
        bool `[T]`, False where `loss_mask` is 0.

    Source: Zheng et al. 2025, "Prosperity before collapse: how far can off-policy RL reach with stale data on
    LLMs?", the mask of M2PO.
    """
    squares = (prox - behav)[seqs.loss_mask].double().square()
    ordered, order = squares.sort(stable=True)
    count = torch.arange(1, len(ordered) + 1, device=ordered.device)
    fits = _running_sum(ordered) <= max_second_moment * count  # means of sorted values only grow
    kept = torch.zeros_like(squares, dtype=torch.bool).index_put((order,), fits)
    return torch.zeros_like(seqs.loss_mask).masked_scatter(seqs.loss_mask, kept)


def _running_sum(x: Tensor) -> Tensor:
    """Return the running sums of `[T]`, in a fixed order where torch must keep one.

    A GPU has no kernel that does, so the host adds them then.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(0)
    return x.cpu().cumsum(0).to(x.device)  # waits: once per micro-batch of deterministic runs
