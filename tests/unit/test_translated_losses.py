"""Translated losses are those of the other library: value and gradient, by its formulas on padded tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hflow import Output, nodes
from hflow.data.batches.batch import Batch, Column
from hflow.training.loop.inputs import count_valid, pack_batch, prepare_batch
from hflow.training.loop.loss import entry_weights
from hflow.translate import RecipeDraft, peers
from hflow.types import Unit

VERL, TRL = peers()
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
PROMPT, LENGTHS = 2, [3, 5, 1, 4, 2, 6]
"""Tokens of every prompt, and of the answers: three prompts with two answers each."""
LONGEST = 8
"""The largest number of tokens of an answer."""
NUM_ANSWERS = len(LENGTHS)


@dataclass(frozen=True)
class Step:
    """Padded `[S, R]` log-probs of one minibatch, its rewards `[S]`, and its entropy."""

    theta: Tensor
    prox: Tensor
    behav: Tensor
    ref: Tensor
    entropy: Tensor
    rewards: Tensor
    mask: Tensor


@pytest.fixture
def step() -> Step:
    """Return random log-probs, whose ratios reach both ends of the clip range."""
    generator = torch.Generator().manual_seed(3)

    def near(x: Tensor, distance: float) -> Tensor:
        return x + distance * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    prox = -torch.rand(NUM_ANSWERS, max(LENGTHS), generator=generator, dtype=torch.float64) - 0.5
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    theta = near(prox, 0.4).requires_grad_()
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.75], dtype=torch.float64)
    return Step(theta, prox, near(prox, 0.2), near(prox, 0.5), prox.abs(), rewards, mask)


def hflow_loss(draft: RecipeDraft, step: Step) -> Tensor:
    """Return the loss of a minibatch by the nodes of a recipe and their settings."""
    total = sum(LENGTHS) + PROMPT * NUM_ANSWERS
    lengths = np.array(LENGTHS) + PROMPT
    is_answer = np.concatenate([np.arange(length) >= PROMPT for length in lengths])
    columns = {
        "input_ids": Column(Unit.TOKEN, np.ones(total, dtype=np.int64)),
        "loss_mask": Column(Unit.TOKEN, is_answer),
    }
    batch = prepare_batch(Batch(np.arange(NUM_ANSWERS), np.arange(NUM_ANSWERS) // 2, lengths, columns), "lm")
    packed = pack_batch(batch, torch.device("cpu"), torch.float32)

    def tokens(padded: Tensor) -> Tensor:
        return torch.zeros(total, dtype=torch.float64).masked_scatter(
            torch.tensor(is_answer), padded[step.mask]
        )

    def knobs(name: str, of: Any = None) -> dict[str, Any]:
        prefix, own = f"nodes.{name}.", inspect.signature(of or getattr(nodes, name)).parameters
        given = {key.removeprefix(prefix): x for key, x in draft.settings.items() if key.startswith(prefix)}
        return {key: x for key, x in given.items() if key in own}

    seqs = packed.seqs
    behav = tokens(step.behav)
    prox = behav if draft.settings[f"nodes.{draft.loss}.prox"] == "none" else tokens(step.prox)
    node = getattr(nodes, draft.loss)
    advantages = nodes.group_advantage(step.rewards, seqs, **knobs("group_advantage"))
    inputs: dict[str, Any] = {
        "out": Output(logprobs=tokens(step.theta), entropy=tokens(step.entropy)),
        "behav_logprobs": behav,
        "prox_logprobs": prox,
        "ref_logprobs": tokens(step.ref),
        "advantages": advantages,
        "seqs": seqs,
    }
    if "ref_logprobs" in inspect.signature(node).parameters:
        inputs["advantages"] = advantages[seqs.index]
        if draft.weights == "unweighted":
            inputs["behav_weights"] = prox.new_ones(prox.shape)
        elif draft.weights == "behav_weights":
            inputs["behav_weights"] = nodes.behav_weights(behav, prox, seqs, **knobs("behav_weights"))[0]
    if hasattr(node, "__hflow_first_pass__"):
        first = node.__hflow_first_pass__
        inputs[first.__name__] = first(inputs["out"].entropy, seqs, **knobs(draft.loss, of=first))
    inputs = {name: x for name, x in inputs.items() if name in inspect.signature(node).parameters}
    entries, _ = node(**inputs, **knobs(draft.loss))
    valid = packed.valid[Unit.SEQUENCE if entries.shape == (NUM_ANSWERS,) else Unit.TOKEN]
    weights = entry_weights(draft.settings[f"nodes.{draft.loss}.reduce"], packed, count_valid(batch))
    return (entries.masked_fill(~valid, 0) * weights).sum()


def check_equal(draft: RecipeDraft, step: Step, expected: Tensor, numbers: tuple[float, float]) -> None:
    """Compare value and gradient, and the expected ones with the numbers of the library."""
    found = hflow_loss(draft, step)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(loss, step.theta)[0] for loss in (found, expected)]
    assert bool(gradients[1].abs().sum() > 0)
    assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert (expected.item(), gradients[1].abs().sum().item()) == pytest.approx(numbers, abs=1e-6)


def group_scores(step: Step, eps: float, *, has_std: bool) -> Tensor:
    """Return the advantages `[S, 1]` of GRPO, with the unbiased deviation of each group."""
    pairs = step.rewards.reshape(-1, 2)
    scores = pairs - pairs.mean(dim=1, keepdim=True)
    if has_std:
        scores = scores / (pairs.std(dim=1, keepdim=True) + eps)
    return scores.reshape(-1, 1)


VERL_BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": NUM_ANSWERS // 2,
    f"{ACTOR}.ppo_mini_batch_size": NUM_ANSWERS // 2,
    "actor_rollout_ref.rollout.n": 2,
    "data.max_response_length": LONGEST,
}
VERL_LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "clip-higher": {f"{ACTOR}.clip_ratio_high": 0.28, "algorithm.norm_adv_by_std_in_grpo": False},
    "dual clip": {f"{ACTOR}.clip_ratio_c": 1.2},
    "clip_ratio": {
        f"{ACTOR}.clip_ratio_low": None,
        f"{ACTOR}.clip_ratio_high": None,
        f"{ACTOR}.clip_ratio": 0.1,
    },
    "kl and entropy": {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.3,
        f"{ACTOR}.entropy_coeff": 0.2,
    },
    "k2": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.3, f"{ACTOR}.kl_loss_type": "mse"},
    "token-sum": {f"{ACTOR}.loss_agg_mode": "token-sum"},
    "seq-mean-token-sum": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-mean": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "norm": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 50},
    "bypass": {f"{CORRECTION}.bypass_mode": True},
    "truncated": {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 1.1},
    "icepop": {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "0.8_1.3"},
    "normalised": {
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": 1.1,
        f"{CORRECTION}.rollout_is_batch_normalize": True,
    },
    "sapo": {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.3},
    "cispo": {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_high": 0.3},
    "gpg": {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
    "dro": {f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.2},
    "gspo": {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{CORRECTION}.bypass_mode": True,
    },
    "geo_mean": {f"{ACTOR}.policy_loss.loss_mode": "geo_mean", f"{CORRECTION}.bypass_mode": True},
}


VERL_NUMBERS = {
    "vanilla": (-0.0814615, 0.5762413),
    "clip-higher": (-0.0398154, 0.306146),
    "dual clip": (-0.1320778, 0.3235949),
    "clip_ratio": (-0.0605431, 0.508594),
    "kl and entropy": (-0.2060789, 0.6614425),
    "k2": (-0.0261607, 0.651364),
    "token-sum": (-1.7106914, 12.1010672),
    "seq-mean-token-sum": (-0.2851152, 2.0168445),
    "seq-mean-token-mean": (0.1670494, 0.6953282),
    "norm": (-0.0057023, 0.0403369),
    "bypass": (-0.0646709, 0.484976),
    "truncated": (-0.087385, 0.5385664),
    "icepop": (-0.052753, 0.3160424),
    "normalised": (-0.095037, 0.5857268),
    "sapo": (-0.0634912, 0.7937567),
    "cispo": (0.1656855, 0.7415528),
    "gpg": (0.1909532, 0.7071054),
    "dro": (0.2072678, 0.7146801),
    "gspo": (0.1076512, 0.6200654),
    "geo_mean": (0.1291523, 0.5733432),
}
"""The loss and the sum of absolute gradients of this batch, by the functions of `core_algos` and
`rollout_corr_helper` of verl 0.10 (1dda039b9) themselves."""


def verl_loss(values: dict[str, Any], step: Step) -> Tensor:
    """Return verl's loss of a minibatch, by the formulas of its `core_algos`."""

    def actor(key: str) -> Any:
        return values[f"{ACTOR}.{key}"]

    old = step.behav if values[f"{CORRECTION}.bypass_mode"] else step.prox
    scores = group_scores(step, 1e-6, has_std=values["algorithm.norm_adv_by_std_in_grpo"])
    both, low, high = (actor(key) for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    low, high = both if low is None else low, both if high is None else high
    log_ratio, mode = step.theta - old, actor("policy_loss.loss_mode")
    if mode == "geo_mean":
        sign, count = scores.sign(), step.mask.sum(1, keepdim=True)
        kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
        return (-scores * ((kept * step.mask).sum(1, keepdim=True) / count).exp()).mean()
    if mode == "gspo":
        mean = (log_ratio * step.mask).sum(1, keepdim=True) / step.mask.sum(1, keepdim=True)
        log_ratio = step.theta - step.theta.detach() + mean.detach()
    ratio = log_ratio.exp()
    clipped = torch.maximum(-scores * ratio, -scores * ratio.clamp(1 - low, 1 + high))
    tau = torch.where(scores > 0, actor("tau_pos"), actor("tau_neg"))
    losses = {
        "vanilla": torch.where(scores < 0, torch.minimum(-scores * actor("clip_ratio_c"), clipped), clipped),
        "gspo": clipped,
        "sapo": -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * scores,
        "cispo": -ratio.clamp(1 - low, 1 + high).detach() * scores * step.theta,
        "gpg": -step.theta * scores,
        "dro": -(step.theta * scores - 0.5 * (actor("policy_loss.dro_beta") or 0) * log_ratio.square()),
    }
    loss = losses[mode] * verl_weights(values, step)
    how = "seq-mean-token-mean" if mode == "sapo" else actor("loss_agg_mode")
    result = aggregated(loss, step, how, actor("loss_scale_factor"))
    result = result - actor("entropy_coeff") * aggregated(step.entropy, step, actor("loss_agg_mode"))
    if not actor("use_kl_loss"):
        return result
    gap = step.ref - step.theta
    kl = gap.square() / 2 if actor("kl_loss_type") == "mse" else (gap.exp() - gap - 1).clamp(-10, 10)
    return result + actor("kl_loss_coef") * aggregated(kl, step, actor("loss_agg_mode"))


def verl_weights(values: dict[str, Any], step: Step) -> Tensor:
    """Return the importance weights of rollout correction, 1 without it."""
    level, threshold = values[f"{CORRECTION}.rollout_is"], values[f"{CORRECTION}.rollout_is_threshold"]
    if level is None:
        return torch.ones_like(step.prox)
    gap = (step.prox - step.behav) * step.mask
    raw = (gap.sum(1, keepdim=True).expand_as(gap) if level == "sequence" else gap).exp() * step.mask
    bounds = [float(part) for part in str(threshold).split("_")]
    weights = raw.clamp(max=bounds[0])
    if len(bounds) == 2:
        weights = torch.where((raw >= bounds[0]) & (raw <= bounds[1]), raw, 0)
    return (
        weights / weights[step.mask].mean() if values[f"{CORRECTION}.rollout_is_batch_normalize"] else weights
    )


def aggregated(loss: Tensor, step: Step, how: str, factor: float | None = None) -> Tensor:
    """Return verl's `agg_loss`."""
    sums = (loss * step.mask).sum(1)
    if how == "token-mean":
        return sums.sum() / step.mask.sum()
    if how == "token-sum":
        return sums.sum()
    if how == "seq-mean-token-mean":
        return (sums / step.mask.sum(1)).mean()
    return sums.mean() / (factor if how.endswith("norm") and factor else 1)


@pytest.mark.parametrize("name", VERL_LOSSES)
def test_the_loss_is_that_of_verl(name: str, step: Step) -> None:
    values = {**VERL.defaults, **VERL_BASE, **VERL_LOSSES[name]}
    draft = VERL.translate(VERL.given(values), "cpu-1x2")
    check_equal(draft, step, verl_loss(values, step), VERL_NUMBERS[name])


TRL_BASE = {
    "per_device_train_batch_size": NUM_ANSWERS,
    "num_generations": 2,
    "max_completion_length": LONGEST,
}
TRL_LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "batch": {"scale_rewards": "batch", "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo", "scale_rewards": False},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "two-sided": {"delta": 1.3},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False, "entropy_coef": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 1.3},
    "sapo of sequences": {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "vespo_k_neg": 2.5},
    "off-policy mask": {"use_vllm": True, "off_policy_mask_threshold": 0.05},
    "uncertain tokens": {"top_entropy_quantile": 8 / 21},
    "vllm": {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.1},
    "token_truncate": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.9,
        "vllm_importance_sampling_clip_max": 1.1,
    },
    "token_mask": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_cap": 1.1,
    },
}


TRL_NUMBERS = {
    "dapo": (-0.0814408, 0.5761205),
    "batch": (-0.0839206, 0.6452763),
    "grpo": (0.0864371, 0.3871756),
    "dr_grpo": (-0.0149192, 0.1339389),
    "two-sided": (-0.1172445, 0.3652608),
    "kl": (-0.2060582, 0.6613218),
    "cispo": (0.1498323, 0.6910151),
    "sapo": (-0.0634866, 0.7936085),
    "sequence": (0.1076241, 0.6199428),
    "luspo": (-0.3735381, 1.355005),
    "sapo of sequences": (0.0701518, 0.8158445),
    "vespo": (0.0387412, 0.3766065),
    "off-policy mask": (-0.2209477, 0.3478295),
    "uncertain tokens": (-0.093862, 0.2147403),
    "vllm": (0.2441739, 0.3276853),
    "token_truncate": (-0.0935624, 0.5588977),
    "token_mask": (-0.0105861, 0.3517936),
}
"""The same by `GRPOTrainer._compute_loss` of TRL 1.10 (f2cd57710), called with the advantages and vLLM's
importance weights that this file computes."""


def trl_loss(values: dict[str, Any], step: Step) -> Tensor:
    """Return TRL's loss of a minibatch, by the formulas of `GRPOTrainer`."""
    scale, kind = values["scale_rewards"], values["loss_type"]
    if scale == "batch":
        pairs = step.rewards.reshape(-1, 2)
        scores = ((pairs - pairs.mean(1, keepdim=True)) / (step.rewards.std() + 1e-4)).reshape(-1, 1)
    else:
        scores = group_scores(step, 1e-4, has_std=scale == "group")
    is_sequence = values["importance_sampling_level"] == "sequence"
    old = step.behav if (is_sequence and kind != "sapo") or kind == "vespo" else step.prox
    log_ratio = step.theta - old
    log_sequence_ratio = (log_ratio * step.mask).sum(1, keepdim=True).detach()
    if is_sequence:
        log_ratio = (log_ratio * step.mask).sum(1, keepdim=True) / step.mask.sum(1, keepdim=True)
    ratio, low = log_ratio.exp(), values["epsilon"]
    high = low if values["epsilon_high"] is None else values["epsilon_high"]
    if kind == "cispo":
        loss = -ratio.clamp(max=high).detach() * scores * step.theta
    elif kind == "sapo":
        tau = torch.where(scores > 0, values["sapo_temperature_pos"], values["sapo_temperature_neg"])
        loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * scores
    elif kind == "vespo":
        ends = [
            torch.where(scores >= 0, values[f"vespo_{x}_pos"], values[f"vespo_{x}_neg"])
            for x in ("k", "lambda")
        ]
        phi = (ends[1] + ends[0] * log_sequence_ratio - ends[1] * log_sequence_ratio.exp()).exp()
        loss = -phi * scores * step.theta
    else:
        bounded = ratio if values["delta"] is None else ratio.clamp(max=values["delta"])
        loss = -torch.minimum(bounded * scores, ratio.clamp(1 - low, 1 + high) * scores)
    if values["off_policy_mask_threshold"] is not None:
        drift = ((step.behav - step.theta.detach()) * step.mask).sum(1, keepdim=True)
        is_near = drift / step.mask.sum(1, keepdim=True) <= values["off_policy_mask_threshold"]
        assert 0 < is_near.sum() < NUM_ANSWERS
        loss = loss * ((scores >= 0) | is_near)
    if values["top_entropy_quantile"] < 1:
        loss = loss * (step.entropy >= step.entropy[step.mask].quantile(1 - values["top_entropy_quantile"]))
    if values["use_vllm"]:
        loss = loss * trl_weights(values, step)
    gap = step.ref - step.theta
    loss = loss + values["beta"] * (gap.exp() - gap - 1)
    sums, entropy = (loss * step.mask).sum(1), (step.entropy * step.mask).sum() / step.mask.sum()
    reduced = {
        "grpo": (sums / step.mask.sum(1)).mean(),
        "sapo": (sums / step.mask.sum(1)).mean(),
        "luspo": sums.mean(),
        "dr_grpo": sums.sum() / (NUM_ANSWERS * LONGEST),
    }
    return reduced.get(kind, sums.sum() / step.mask.sum()) - values["entropy_coef"] * entropy


def trl_weights(values: dict[str, Any], step: Step) -> Tensor:
    """Return TRL's importance weights of vLLM's log-probs."""
    level, _, outside = values["vllm_importance_sampling_mode"].partition("_")
    gap = (step.prox - step.behav) * step.mask
    ratio = (gap.sum(1, keepdim=True) if level == "sequence" else gap).exp()
    low = values["vllm_importance_sampling_clip_min"]
    high = values["vllm_importance_sampling_cap"] or values["vllm_importance_sampling_clip_max"]
    if outside == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < (low or 0)) | (ratio > high), 0)


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_the_loss_is_that_of_trl(name: str, step: Step) -> None:
    values = {**TRL.defaults, **TRL_BASE, **TRL_LOSSES[name]}
    draft = TRL.translate(TRL.given(values), "cpu-1x1")
    check_equal(draft, step, trl_loss(values, step), TRL_NUMBERS[name])
