"""Formulas on a small batch, against the numbers of other projects' own functions.

Each row names a function that was run on this batch, and its results. The versions: verl 0.10 (1dda039b9),
TRL 1.10 (f2cd57710), OpenRLHF 0.11 (3c3be623; its gates are of a later one), AReaL (4aef98d8d), and prime-rl
(559b44772). Programs of authors: VESPO (aa1f3045), MaxRL (c0698eb), SPIRAL (a02d0ed), Delta L (89da5b9), GDPO
(b080e63), Pass@k training (c3ba575), Skywork-OR1 (64e96af), HALOs (4831988), GMPO (205b2bf), PF-PPO
(6b93abf), and GiGPO and HGPO of verl-agent. `test_translated_losses.py` has losses with their reductions.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hflow import Output, Sequences, algo, nodes
from hflow.types import State


@dataclass(frozen=True)
class Batch:
    """Samples with log-probs under four policies."""

    seqs: Sequences
    """Two groups of three."""
    pairs: Sequences
    """The same samples in groups of two."""
    reward: Tensor
    """`[S]`."""
    right: Tensor
    """bool `[S]`."""
    theta: Tensor
    """`[T]`."""
    prox: Tensor
    """`[T]`."""
    behav: Tensor
    """`[T]`."""
    ref: Tensor
    """`[T]`."""
    values: Tensor
    """`[T]`; they also are rewards and norms of tokens."""
    random: Tensor
    """`[T]`, from 0 to 1."""

    def learned(self, x: Tensor) -> Tensor:
        """Return the values `[T]` of learned tokens."""
        return x[self.seqs.loss_mask]


def spread(step: int) -> Tensor:
    """Return numbers `[T]` between 0 and 1 in an order of their own."""
    return ((torch.arange(27) * step) % 29 + 0.5).double() / 29.5


LENGTHS = [5, 3, 4, 6, 5, 4]
LEARNED = [x == "1" for x in "011010110110010111010110101"]
BATCH = Batch(
    seqs=Sequences.of(LENGTHS, LEARNED, [0, 0, 0, 1, 1, 1]),
    pairs=Sequences.of(LENGTHS, LEARNED, [0, 0, 1, 1, 2, 2]),
    reward=torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75, 0.25]).double(),
    right=torch.tensor([True, False, False, True, False, True]),
    theta=spread(7).log(),
    prox=(0.5 * spread(7) + 0.5 * spread(11)).log(),
    behav=(0.5 * spread(7) + 0.2 * spread(11) + 0.3 * spread(4)).log(),
    ref=(0.5 * spread(7) + 0.5 * spread(13)).log(),
    values=spread(5),
    random=spread(9),
)


def loss(node: Any, x: Batch, seqs: Sequences | None = None, **knobs: Any) -> Tensor:
    """Return the sum of a train node's loss, and its gradient by the log-probs of learned tokens."""
    seqs, theta = seqs or x.seqs, x.theta.detach().requires_grad_()
    inputs: dict[str, Any] = {
        "logprobs": theta.detach(),
        "out": Output(logprobs=theta, entropy=x.values),
        "behav_logprobs": x.behav,
        "prox_logprobs": x.prox,
        "ref_logprobs": x.ref,
        "random": x.random,
        "desirable": x.right,
        "seqs": seqs,
    }
    of_tokens = "ref_logprobs" in inspect.signature(node).parameters
    inputs["advantages"] = seqs.widen(x.reward - 0.4) if of_tokens else x.reward - 0.4

    def call(function: Callable[..., Any]) -> Any:
        names = inspect.signature(function).parameters
        return function(**{name: value for name, value in (inputs | knobs).items() if name in names})

    if first := getattr(node, "__hflow_first_pass__", None):
        inputs[first.__name__] = call(first)
    entries = call(node)
    entries = entries[0] if isinstance(entries, tuple) else entries
    total = (x.learned(entries) if entries.shape == theta.shape else entries).sum()
    (gradient,) = torch.autograd.grad(total, theta)
    return torch.cat([total.detach()[None], x.learned(gradient)])


def on_policy(x: Batch) -> Batch:
    """Return the batch as if the policy at the start of the step had generated it."""
    return dataclasses.replace(x, behav=x.prox)


def of_behav(x: Batch) -> Batch:
    """Return the batch with ratios relative to the policy that generated it."""
    return dataclasses.replace(x, prox=x.behav)


def kl_weights(x: Batch) -> Tensor:
    """Return the weights after one measured KL after the other."""
    weights = [0.1]
    for kl in (x.reward * 10).tolist():
        weights.append(algo.adapted_kl_weight(weights[-1], kl, target=4.0, gain=0.5))
    return torch.tensor(weights)


def entropy_weights(x: Batch) -> Tensor:
    """Return the weights that count, and those that are kept, after one entropy after the other."""
    state, found = State(), []
    knobs = {"target": 0.45, "change": 0.1, "initial": 0.15, "upper": 0.25}
    for entropy in x.reward:
        weights, _ = nodes.adaptive_entropy(entropy.expand(3), Sequences.of([3]), state, **knobs)
        found += [float(weights[0]), state["weight"]]
    return torch.tensor(found)


def hierarchical(x: Batch, power: float) -> Tensor:
    ids = torch.zeros(len(x.values), dtype=torch.int64)  # observations differ in their lengths
    return x.learned(algo.hierarchical_advantage(x.values, ids, x.seqs, 1, power, 0.9, std=True, eps=1e-7))


def resampling(x: Batch, method: Any) -> Tensor:
    weights = algo.resampling_weights(x.reward, method, 1.5)
    return weights / weights.sum()


def trusted(x: Batch, **knobs: Any) -> Tensor:
    kept, _ = nodes.is_trusted(x.behav, x.prox, x.seqs, **knobs)
    return x.learned(kept)


def prox_logprobs(x: Batch) -> Tensor:
    versions = 3 + torch.arange(len(x.theta)) % 5
    return x.learned(algo.loglinear_prox(x.theta, x.behav, versions, 5, 6))


def kl_estimates(x: Batch) -> Tensor:
    """Return sums of estimates over all tokens, each with the gradient of the first four."""
    theta, found = x.theta.detach().requires_grad_(), []
    for name in ("k1", "k2", "k3", "k1+", "k3+"):
        total = algo.kl_estimate(theta, x.ref, name).sum()
        found += [total.detach()[None], torch.autograd.grad(total, theta)[0][:4]]
    return torch.cat(found)


def value_loss(x: Batch, **knobs: float) -> Tensor:
    values = x.values.detach().requires_grad_()
    entries, _ = nodes.critic_train(Output(values=values), x.random, x.seqs.widen(x.reward), **knobs)
    total = x.learned(entries).sum()
    return torch.cat([total.detach()[None], x.learned(torch.autograd.grad(total, values)[0])])


def sample_size(x: Batch) -> Tensor:
    _, metrics = nodes.behav_weights(x.behav, x.prox, x.seqs, upper=1.15)
    return torch.tensor([metrics["ess"]])


def reward_loss(x: Batch) -> Tensor:
    scores = x.reward.detach().requires_grad_()
    entries, _ = nodes.reward_train(Output(scores=scores), x.pairs, x.values[:3], centring_coef=0.1)
    return torch.cat([entries.detach().sum()[None], *torch.autograd.grad(entries.sum(), scores)])


def divergences(x: Batch) -> Tensor:
    """Return divergences from a teacher on three tokens, with gradients at the first two positions."""
    student, teacher = (torch.stack([y, y / 2, -y], -1) for y in (x.theta.detach(), x.ref))
    student.requires_grad_()
    found = []
    for beta in (0.0, 0.3, 1.0):
        total = algo.topk_divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta).sum()
        found += [total.detach()[None], torch.autograd.grad(total, student)[0][:2].flatten()]
    return torch.cat(found)


ROWS: dict[str, tuple[Callable[[Batch], Tensor], str]] = {
    "verl core_algos.compute_grpo_outcome_advantage": (
        lambda x: algo.group_advantage(x.reward, x.seqs, eps=1e-6),
        "0.999998 -0.999998 0 -0.577348 1.1547 -0.577348",
    ),
    "verl core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False": (
        lambda x: algo.group_advantage(x.reward, x.seqs, std=False),
        "0.5 -0.5 0 -0.166667 0.333333 -0.166667",
    ),
    "verl core_algos.compute_rloo_outcome_advantage": (
        lambda x: algo.leave_one_out(x.reward, x.seqs),
        "0.75 -0.75 0 -0.25 0.5 -0.25",
    ),
    "verl core_algos.compute_opo_outcome_advantage": (
        lambda x: algo.length_weighted_advantage(x.reward, x.seqs),
        "0.428571 -0.571429 -0.071429 -0.166667 0.333333 -0.166667",
    ),
    "verl core_algos.compute_grpo_passk_outcome_advantage": (
        lambda x: algo.best_advantage(x.reward, x.seqs, std=True, eps=1e-6),
        "0.999998 0 0 0 1.73205 0",
    ),
    "verl core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage": (
        lambda x: x.learned(nodes.reinforce_pp_baseline(x.reward, x.seqs)),
        "1.37853 1.37853 1.37853 -1.56233 -1.56233 -0.091902 -0.091902 -0.582045 -0.582045 -0.582045 "
        "-0.582045 0.888384 0.888384 0.888384 -0.582045 -0.582045",
    ),
    "verl core_algos.compute_reinforce_plus_plus_outcome_advantage": (
        lambda x: x.learned(nodes.returns_to_go(x.seqs.at_end(x.reward), x.seqs, gamma=0.9)),
        "1.16488 1.44762 1.76177 -1.37978 -1.37978 0.033919 0.190996 -0.80723 -0.743614 -0.672929 "
        "-0.59439 0.528712 0.740767 0.976383 -0.672929 -0.59439",
    ),
    "verl core_algos.compute_gae_advantage_return": (
        lambda x: x.learned(
            algo.whiten(algo.gae(x.seqs.at_end(x.reward), x.values, x.seqs, 0.9, 0.8), x.seqs)
        ),
        "1.55663 1.56618 0.992813 0.007644 -0.643856 -0.16975 -0.670254 0.452689 -0.597691 -1.24995 "
        "-2.08254 1.02926 0.217771 -0.1027 0.403612 -0.709851",
    ),
    "verl core_algos.compute_multi_turn_optimal_token_baseline_advantage, handle_zero_tail=False": (
        lambda x: x.learned(algo.optimal_token_advantage(x.reward, x.values, x.seqs)),
        "0.414894 0.435484 0 -0.585106 -0.564516 -0.085106 -0.064516 -0.207317 -0.190141 -0.257653 0 "
        "0.292683 0.309859 0.242347 -0.207317 -0.190141",
    ),
    "Delta L core_algos.compute_grpo_outcome_advantage, alpha=0.75": (
        lambda x: nodes.group_advantage(x.reward, x.seqs, eps=1e-6, length_power=0.75),
        "0.873089 -1.18339 0 -0.40625 1.00815 -0.683228",
    ),
    "MaxRL core_algos.compute_maxrl_outcome_advantage": (
        lambda x: algo.mean_normalised_advantage(x.reward, x.seqs),
        "1 -1 0 -0.4 0.8 -0.4",
    ),
    "Pass@k training passk_adv.compute_advantage, K=2": (
        lambda x: algo.pass_at_k_advantage(x.right, x.seqs, 2),
        "0.707105 -0.353553 -0.353553 0 0 0",
    ),
    "GDPO GRPOTrainer of trl-0.18.0-gdpo, normalisation of rewards": (
        lambda x: algo.decoupled_advantage([x.reward, x.right.double()], [1.0, 0.5], x.seqs),
        "1.62129 -1.32456 -0.296721 -0.296618 0.593236 -0.296618",
    ),
    "SPIRAL utils.EMA, baselines of roles": (
        lambda x: nodes.role_advantage(x.reward, [str(r) for r in x.right.tolist()], State(), decay=0.9)[0],
        "1 0 0.5 0.15 0.7 0.135",
    ),
    "GiGPO core_gigpo.step_norm_reward, groups of turns": (
        lambda x: x.learned(algo.turn_advantage(x.values, x.seqs, 0.9, std=True)),
        "0.3113 0.3113 0 -1.11852 -1.11852 0.80722 0.80722 0.919284 0.987077 0.987077 0.987077 0.145312 "
        "0.025148 0.025148 -1.0646 -1.01223",
    ),
    "HGPO core_hgpo.hgpo_advantage_estimate, length_weight_alpha=0": (
        lambda x: hierarchical(x, power=0.0),
        "0.63076 0.63076 -0.67625 -1.23101 -1.23101 1.2765 1.2765 1.39496 1.01455 1.01455 1.01455 "
        "0.485959 -0.127782 -0.127782 -0.935037 -1.35971",
    ),
    "HGPO core_hgpo.hgpo_advantage_estimate, with L = k": (
        lambda x: hierarchical(x, power=1.0),
        "0.63076 0.63076 -0.67625 -1.23101 -1.23101 1.2765 1.2765 1.39496 1.07939 1.07939 1.07939 "
        "0.485959 -0.07492 -0.07492 -0.935037 -1.31976",
    ),
    "verl core_algos.AdaptiveKLController, n_steps 0.5 of the horizon": (
        kl_weights,
        "0.1 0.11 0.099 0.1089 0.09801 0.107811 0.09703",
    ),
    "Skywork-OR1 core_algos.EntController": (
        entropy_weights,
        "0 0.05 0.05 0.15 0 0.05 0.05 0.15 0 0.05 0.05 0.15",
    ),
    "PF-PPO PPOTrainer.select_max_random, the best sample": (
        lambda x: algo.is_best_or_worst(x.reward, x.seqs, 1, 0).double(),
        "1 0 0 0 1 0",
    ),
    "verl core_algos.compute_pf_ppo_reweight_data, pow": (
        lambda x: resampling(x, "pow"),
        "0.443838 0 0.156921 0.05548 0.288281 0.05548",
    ),
    "verl core_algos.compute_pf_ppo_reweight_data, max_min": (
        lambda x: resampling(x, "max_min"),
        "0.5 0.5 0 0 0 0",
    ),
    "verl core_algos.compute_pf_ppo_reweight_data, max_random": (
        lambda x: resampling(x, "max_random"),
        "0.444444 0.111111 0.111111 0.111111 0.111111 0.111111",
    ),
    "AReaL actor._apply_m2po_masking": (
        lambda x: x.learned(algo.second_moment_mask(x.prox, x.behav, x.seqs, 0.025)).double(),
        "1 1 1 0 1 1 1 1 0 1 1 0 1 0 1 1",
    ),
    "AReaL actor.compute_prox_logp_approximations, loglinear": (
        prox_logprobs,
        "-1.3762 -0.724131 -0.279804 -0.70304 -0.262025 -1.36949 -0.811495 -0.689763 -0.557152 -0.404403 "
        "-1.35624 -0.637119 -1.57556 -1.39652 -0.656537 -0.973846",
    ),
    "OpenRLHF loss.PolicyLoss, gating binary_kl of token": (
        lambda x: trusted(x, statistic="binary_kl", extent="token", upper=0.019),
        "1 0 1 0 0 1 0 1 0 1 1 0 1 0 1 1",
    ),
    "OpenRLHF loss.PolicyLoss, gating tv of token": (
        lambda x: trusted(x, statistic="tv", extent="token", upper=0.08),
        "1 0 1 0 0 1 0 1 0 1 1 0 1 0 1 0",
    ),
    "OpenRLHF loss.PolicyLoss, gating binary_kl of seq": (
        lambda x: trusted(x, statistic="binary_kl", extent="sequence-mean", upper=0.019),
        "1 1 1 0 0 1 1 0 0 0 0 1 1 1 1 1",
    ),
    "OpenRLHF loss.PolicyLoss, gating tv of seq": (
        lambda x: trusted(x, statistic="tv", extent="sequence-mean", upper=0.08),
        "1 1 1 0 0 0 0 1 1 1 1 1 1 1 1 1",
    ),
    "OpenRLHF loss.PolicyLoss, gating ratio of seq": (
        lambda x: trusted(
            x, statistic="k1", extent="sequence-mean", lower=math.log(0.95), upper=math.log(1.15)
        ),
        "0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1",
    ),
    "verl rollout_corr_helper.compute_rollout_rejection_mask, token_k2": (
        lambda x: trusted(x, statistic="k2", extent="token", upper=0.05),
        "1 1 1 0 1 1 1 1 0 1 1 1 1 1 1 1",
    ),
    "verl rollout_corr_helper.compute_rollout_rejection_mask, seq_sum_k3": (
        lambda x: trusted(x, statistic="k3", extent="sequence-sum", upper=0.08),
        "1 1 1 1 1 1 1 1 1 1 1 0 0 0 1 1",
    ),
    "verl rollout_corr_helper.compute_rollout_rejection_mask, seq_mean_k2": (
        lambda x: trusted(x, statistic="k2", extent="sequence-mean", upper=0.025),
        "1 1 1 0 0 1 1 1 1 1 1 0 0 0 1 1",
    ),
    "verl rollout_corr_helper.compute_rollout_rejection_mask, seq_max_k3": (
        lambda x: trusted(x, statistic="k3", extent="sequence-max", upper=0.045),
        "1 1 1 0 0 1 1 0 0 0 0 0 0 0 1 1",
    ),
    "verl rollout_corr_helper.compute_rollout_rejection_mask, token_k1 0.8_1.1": (
        lambda x: trusted(x, statistic="k1", extent="token", lower=-math.log(1.1), upper=-math.log(0.8)),
        "0 0 1 0 0 1 1 1 0 1 1 0 1 0 0 1",
    ),
    "verl core_algos.kl_penalty": (
        kl_estimates,
        "-3.60865 1 1 1 1 3.53507 0 -0.336472 -0.346276 0.295464 4.75375 0 -0.4 -0.413793 0.255814 "
        "-3.60865 0 -0.336472 -0.346276 0.295464 4.75375 0 -0.336472 -0.346276 0.295464",
    ),
    "AReaL functional.ppo_actor_loss_fn, decoupled, mask above 1.2": (
        lambda x: loss(nodes.actor_train, x, clip=0.2, clip_high=0.28, behav_weight_cap=1.2),
        "0.354367 0 0 0 0.341772 0.361233 -0.073333 0 0 0 0.251645 0 0 -0.058725 0 0.230392 0",
    ),
    "AReaL functional.ppo_actor_loss_fn, decoupled, clamp at 1.2": (
        lambda x: loss(
            nodes.actor_train, x, clip=0.2, clip_high=0.28, behav_weight_cap=1.2, over_cap="truncate"
        ),
        "-1.08994 -0.568421 -0.564324 0 0.341772 0.361233 -0.073333 -0.083333 0 0.170769 0.251645 0 0 "
        "-0.058725 -0.399 0.230392 0",
    ),
    "OpenRLHF loss.PolicyLoss, dual_clip=1.5": (
        lambda x: loss(nodes.actor_train, on_policy(x), clip=0.2, clip_high=0.28, dual_clip=1.5),
        "-0.826245 -0.473684 -0.47027 0 0.490909 0.41 -0.061111 -0.069444 0 0.142308 0 0 0 -0.056452 "
        "-0.3325 0 0",
    ),
    "OpenRLHF loss.PolicyLoss, gspo with dual_clip=1.5": (
        lambda x: loss(nodes.gspo_train, on_policy(x), clip=0.1, clip_high=0.2, dual_clip=1.5),
        "-0.111319 -0.185787 -0.185787 -0.185787 0.224317 0.224317 -0.032572 -0.032572 0 0 0 0 -0.070796 "
        "-0.070796 -0.070796 0.06997 0.06997",
    ),
    "verl core_algos.compute_policy_loss_dppo_tv": (
        lambda x: loss(nodes.dppo_train, on_policy(x), max_divergence=0.12)[1:],
        "-0.473684 -0.47027 0 0.490909 0.41 -0.061111 -0.069444 0 0.142308 0.273214 0 0 -0.056452 -0.3325 "
        "0.261111 0",
    ),
    "verl core_algos.compute_policy_loss_dppo_kl": (
        lambda x: loss(nodes.dppo_train, on_policy(x), divergence="kl", max_divergence=0.01)[1:],
        "-0.473684 -0.47027 0 0.490909 0.41 -0.061111 -0.069444 0 0.142308 0.273214 0 0 -0.056452 -0.3325 "
        "0.261111 0",
    ),
    "prime-rl loss.default_loss_fn": (
        lambda x: loss(nodes.dppo_train, of_behav(x), max_divergence=0.12),
        "-0.90162 -0.608108 -0.608392 0 0.341772 0.361233 -0.073333 -0.086806 0 0.196809 0.251645 0 "
        "-0.392628 -0.058725 -0.455479 0.230392 0",
    ),
    "prime-rl loss.ipo_loss_fn": (
        lambda x: loss(nodes.dppo_train, of_behav(x), max_divergence=0.12, symmetric=True),
        "-1.52174 -0.608108 -0.608392 0 0.341772 0.361233 -0.073333 -0.086806 0 0 0 0 -0.392628 0 "
        "-0.455479 0 0",
    ),
    "verl core_algos.compute_policy_loss_kl_cov": (
        lambda x: loss(nodes.kl_cov_train, on_policy(x), share=0.3, cov_kl_coef=0.7),
        "0.866152 -0.473684 -1.17027 -0.077273 0.490909 0.41 -0.061111 -0.069444 -0.657812 0.142308 "
        "0.273214 -0.638235 -0.510417 -0.056452 -0.3325 0.261111 0.075",
    ),
    "verl core_algos.compute_policy_loss_clip_cov, all tokens between the bounds": (
        lambda x: loss(nodes.clip_cov_train, on_policy(x), clip=9.0, share=1.0, lower=0.1, upper=0.4),
        "-0.117922 -0.473684 0 -0.777273 0.490909 0.41 -0.061111 -0.069444 0 0.142308 0.273214 0 0 "
        "-0.056452 -0.3325 0.261111 0.075",
    ),
    "VESPO core_algos.compute_policy_loss_vespo": (
        lambda x: loss(nodes.vespo_train, of_behav(x)),
        "1.38621 -0.404215 -0.404215 -0.404215 0.290162 0.290162 -0.120559 -0.120559 0.01752 0.01752 "
        "0.01752 0.01752 -0.20228 -0.20228 -0.20228 0.132526 0.132526",
    ),
    "GMPO train_zero_math_gmpo, the loss of a sample": (
        lambda x: loss(nodes.gmpo_train, on_policy(x)),
        "-0.083423 -0.185787 -0.185787 -0.185787 0.224317 0.224317 -0.032572 -0.032572 0 0.035201 "
        "0.035201 0 -0.070796 -0.070796 -0.070796 0.081016 0",
    ),
    "prime-rl EchoAlgorithm._weight_observations": (
        lambda x: algo.is_observed(x.seqs),
        "0 0 0 1 0 0 0 0 0 0 0 1 0 0 1 0 0 0 0 0 1 0 0 0 0 1 0",
    ),
    "AReaL functional.ppo_critic_loss_fn, huber with delta 0.2": (
        lambda x: value_loss(x, clip=0.3, huber_delta=0.2),
        "0.826849 -0.2 -0.2 0 0 0.2 0.059322 0.2 0.004237 0.2 0.2 0.2 -0.2 -0.122881 0.04661 -0.097458 0.2",
    ),
    "verl rollout_corr_helper.compute_is_metrics, effective sample size": (
        sample_size,
        "0.979763",
    ),
    "verl core_algos.compute_value_loss": (
        value_loss,
        "1.53712 -0.813559 -0.644068 0 0 0.220339 0 0.228814 0.004237 0.34322 0 0.682203 -0.461864 "
        "-0.122881 0.04661 -0.097458 0.241525",
    ),
    "TRL DPOTrainer._compute_loss, sigmoid": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="sigmoid"),
        "2.12364 -0.169135 -0.169135 -0.169135 0.169135 0.169135 -0.100804 -0.100804 0.100804 0.100804 "
        "0.100804 0.100804 -0.176128 -0.176128 -0.176128 0.176128 0.176128",
    ),
    "TRL DPOTrainer._compute_loss, hinge": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="hinge"),
        "2.92739 -0.3 -0.3 -0.3 0.3 0.3 -0.3 -0.3 0.3 0.3 0.3 0.3 -0.3 -0.3 -0.3 0.3 0.3",
    ),
    "TRL DPOTrainer._compute_loss, ipo": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="ipo"),
        "8.90671 -1.33049 -1.33049 -1.33049 1.99573 1.99573 -1.00532 -1.00532 0.502661 0.502661 0.502661 "
        "0.502661 -1.31877 -1.31877 -1.31877 1.97815 1.97815",
    ),
    "TRL DPOTrainer._compute_loss, exo_pair": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="exo_pair", label_smoothing=0.1),
        "1.58187 -0.181037 -0.181037 -0.181037 0.181037 0.181037 -0.101478 -0.101478 0.101478 0.101478 "
        "0.101478 0.101478 -0.185388 -0.185388 -0.185388 0.185388 0.185388",
    ),
    "TRL DPOTrainer._compute_loss, nca_pair": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="nca_pair"),
        "4.21612 -0.094892 -0.094892 -0.094892 0.07797 0.07797 -0.062356 -0.062356 0.054234 0.054234 "
        "0.054234 0.054234 -0.129599 -0.129599 -0.129599 0.069637 0.069637",
    ),
    "TRL DPOTrainer._compute_loss, robust": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="robust", label_smoothing=0.1),
        "2.11457 -0.206635 -0.206635 -0.206635 0.206635 0.206635 -0.138304 -0.138304 0.138304 0.138304 "
        "0.138304 0.138304 -0.213628 -0.213628 -0.213628 0.213628 0.213628",
    ),
    "TRL DPOTrainer._compute_loss, apo_zero": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="apo_zero")[1:],
        "-0.074414 -0.074414 -0.074414 0.074882 0.074882 -0.074763 -0.074763 0.06925 0.06925 0.06925 "
        "0.06925 -0.070584 -0.070584 -0.070584 0.074617 0.074617",
    ),
    "TRL DPOTrainer._compute_loss, apo_down": (
        lambda x: loss(nodes.dpo, x, x.pairs, beta=0.3, loss="apo_down")[1:],
        "0.000634 0.000634 0.000634 0.073779 0.073779 0.007831 0.007831 0.066933 0.066933 0.066933 "
        "0.066933 -0.002141 -0.002141 -0.002141 0.072724 0.072724",
    ),
    "TRL KTOTrainer._compute_loss": (
        lambda x: loss(nodes.kto, x, x.pairs, beta=0.2, desirable_weight=2.0, undesirable_weight=0.5),
        "1.5275 -0.099652 -0.099652 -0.099652 0 0 0.024965 0.024965 0 0 0 0 0.024331 0.024331 0.024331 0 0",
    ),
    "HALOs KTOTrainer.loss": (
        lambda x: loss(nodes.kto, x, x.pairs, beta=0.2, desirable_weight=2.0, undesirable_weight=0.5),
        "1.5275 -0.099652 -0.099652 -0.099652 0 0 0.024965 0.024965 0 0 0 0 0.024331 0.024331 0.024331 0 0",
    ),
    "TRL ORPOTrainer.odds_ratio_loss": (
        lambda x: loss(nodes.orpo, x, x.pairs, odds_coef=0.5),
        "4.81462 -0.521032 -0.521032 -0.521032 0.326541 0.326541 -0.687838 -0.687838 0.098531 0.098531 "
        "0.098531 0.098531 -0.4964 -0.4964 -0.4964 0.350778 0.350778",
    ),
    "TRL RewardTrainer.compute_loss, center_rewards_coefficient=0.1": (
        reward_loss,
        "1.85968 -0.072287 0.472287 -0.334116 0.634116 -0.264045 0.664045",
    ),
    "TRL sft_trainer.dft_loss": (
        lambda x: loss(nodes.sft_train, x, loss="dft"),
        "4.40006 -0.254237 -0.491525 -0.966102 -0.457627 -0.694915 -0.186441 -0.423729 -0.152542 "
        "-0.627119 -0.864407 -0.118644 -0.59322 -0.084746 -0.322034 -0.79661 -0.288136",
    ),
    "TRL GKDTrainer.generalized_jsd_loss": (
        divergences,
        "1.49982 0 0 0 -0.040423 -0.051115 0.091539 0.280603 0 0 0 -0.007761 -0.010233 0.017994 1.18921 0 "
        "0 0 -0.03155 -0.044492 0.076042",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_numbers_are_those_of_other_projects(name: str) -> None:
    call, expected = ROWS[name]
    assert_close(
        call(BATCH).double(),
        torch.tensor([float(x) for x in expected.split()]).double(),
        rtol=1e-5,
        atol=2e-6,
    )
