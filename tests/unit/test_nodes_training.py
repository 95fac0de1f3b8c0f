"""Losses of the library's train nodes, on numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch
from knob_checks import knob_problem
from torch.testing import assert_close

from hflow import Output, Sequences, algo, nodes


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


ONE, THREE = Sequences.of([1]), Sequences.of([3])


def test_kl_in_the_loss_by_either_estimator():
    theta, ref = tensor(-1.0), tensor(-3.0)
    out = Output(logprobs=theta, entropy=tensor(0.0))
    for estimator, kl in {"k2": 2.0, "k3": math.exp(-2) - 1 + 2}.items():
        loss, metrics = nodes.actor_train(
            out, theta, theta, tensor(0.0), ONE, ref, kl_coef=0.5, kl_estimator=estimator
        )
        assert_close(loss, tensor(0.5 * kl))
        assert_close(metrics["ref_kl"], tensor(kl))
    loss, metrics = nodes.actor_train(out, theta, theta, tensor(0.0), ONE, ref)
    assert_close(loss, tensor(0.0))
    assert_close(metrics["ref_kl"], tensor(math.exp(-2) - 1 + 2))  # k3, where it is only reported


@pytest.mark.parametrize(
    ("node", "knobs", "expected"),
    [
        (nodes.actor_train, {}, None),
        (nodes.actor_train, {"behav_weight_cap": -1.0}, "behav_weight_cap is -1.0; it must be more than 0"),
        (nodes.gspo_train, {"behav_weight_cap": 0.0}, "behav_weight_cap is 0.0; it must be more than 0"),
        (nodes.actor_train, {"dual_clip": 1.0}, "dual_clip is 1.0; it must be more than 1, or null"),
        (nodes.gspo_train, {"clip": -0.1}, "clip is -0.1; it must be 0 or more"),
        (nodes.actor_train, {"kl_coef": 0.1}, "kl_coef needs ref_logprobs"),
        (nodes.kl_cov_train, {"share": 0.1}, "its penalty has no effect with one update per step"),
        (nodes.kl_cov_train, {"share": 0.1, "minibatches": 2}, None),
        (
            nodes.kl_cov_train,
            {"share": 0.0, "epochs": 2},
            "share is 0.0; it must be more than 0 and at most 1",
        ),
        (nodes.kl_cov_train, {"cov_kl_coef": 0.0}, "cov_kl_coef is 0.0; it must be more than 0"),
        (
            nodes.clip_cov_train,
            {"lower": 5.0},
            "lower is 5.0 and upper is 5.0; lower must be less than upper",
        ),
        (nodes.actor_train, {"kl_estimator": "k2"}, "kl_estimator has no effect while kl_coef is 0"),
        (nodes.sapo_train, {"tau_negative": 0.0}, "tau_negative is 0.0; it must be more than 0"),
        (nodes.dppo_train, {}, "it needs max_divergence"),
        (nodes.dppo_train, {"max_divergence": 1.0}, "max_divergence=1.0 drops nothing, as tv is at most 1"),
        (nodes.vespo_train, {}, None),
        (nodes.vespo_train, {"prox": "recompute"}, "other weights would count twice. Set prox=none"),
        (nodes.vespo_train, {"lambda_negative": 0.0}, "lambda_negative is 0.0; it must be more than 0"),
        (nodes.high_entropy_train, {"share": 1.2}, "share is 1.2; it must be more than 0 and at most 1"),
        (nodes.actor_train, {"off_policy_limit": 0.0}, "off_policy_limit is 0.0; it must be more than 0"),
        (nodes.gmpo_train, {"off_policy_limit": -1.0}, "off_policy_limit is -1.0; it must be more than 0"),
        (nodes.dro_train, {}, "it needs dro_beta"),
        (nodes.dro_train, {"dro_beta": 0.0}, "dro_beta is 0.0; it must be more than 0"),
        (nodes.dro_train, {"dro_beta": 0.1}, "its penalty has no effect with one update per step"),
        (nodes.dro_train, {"dro_beta": 0.1, "epochs": 2}, None),
        (nodes.dro_train, {"dro_beta": 0.1, "prox": "none"}, None),
        (nodes.cispo_train, {"clip": 1.0, "clip_high": 4.0}, None),
        (nodes.actor_train, {"over_cap": "truncate", "behav_weight_cap": None}, "no effect without a cap"),
        (nodes.actor_train, {"prox": "none", "behav_weight_cap": 2.0}, "behav_weight_cap has no effect with"),
        (nodes.actor_train, {"behav_weight_cap": 2.0, "over_cap": "truncate"}, None),
        (nodes.gspo_train, {"prox": "none", "over_cap": "truncate"}, "over_cap has no effect with prox=none"),
        (nodes.gmpo_train, {"prox": "none", "behav_weight_cap": 2.0}, None),
        (nodes.critic_train, {"huber_delta": 0.0}, "huber_delta is 0.0; it must be more than 0, or null"),
        (nodes.dpo, {"label_smoothing": 0.5}, "label_smoothing is 0.5; it must be from 0 to less than 0.5"),
        (nodes.dpo, {"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing has no effect with loss=ipo"),
        (nodes.dpo, {"label_smoothing": 0.1, "loss": "hinge"}, "no effect with loss=hinge"),
        (nodes.dpo, {"loss": "robust"}, "loss=robust without label_smoothing is loss=sigmoid"),
        (nodes.dpo, {"loss": "exo_pair"}, "loss=exo_pair needs label_smoothing"),
        (nodes.dpo, {"loss": "exo_pair", "label_smoothing": 0.1}, None),
        (nodes.kto, {"undesirable_weight": 0.0}, "undesirable_weight is 0.0; it must be more than 0"),
        (nodes.orpo, {"odds_coef": 0.0}, "odds_coef is 0.0; it must be more than 0"),
        (nodes.reward_train, {"centring_coef": -1.0}, "centring_coef is -1.0; it must be 0 or more"),
        (nodes.distill_train, {"beta": 1.5}, "beta is 1.5; it must be from 0 to 1"),
        (nodes.gspo_train, {"dual_clip": 0.5}, "dual_clip is 0.5; it must be more than 1, or null"),
    ],
)
def test_knobs_that_cannot_work_are_refused(node: Any, knobs: dict, expected: str | None):
    found = knob_problem(node, **knobs)
    assert found is None if expected is None else expected in found


def test_clip_higher_clips_increasing_probabilities_later():
    # DAPO, equation 8: 1 - 0.2 and 1 + 0.28.
    prox = torch.zeros(3)
    out = Output(logprobs=tensor(1.25, 1.4, 0.7).log(), entropy=prox)
    loss, metrics = nodes.actor_train(
        out, prox, prox, tensor(1.0, 1.0, -1.0), THREE, clip=0.2, clip_high=0.28
    )
    assert_close(loss, tensor(-1.25, -1.28, 0.8))
    assert metrics["clip_fraction"].tolist() == [False, True, True]
    assert metrics["clip_fraction_low"].tolist() == [False, False, True]


def test_gspo_takes_the_ratio_of_sequences():
    seqs = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
    behav = tensor(0, -1.0, -1.0, -2.0, -2.0)
    # GSPO, equations 5 and 7.
    # Products of the ratios 1.1 * 1.3 and 0.5 * 0.8; geometric means sqrt(1.43) = 1.196, sqrt(0.4) = 0.632.
    theta = behav + torch.log(tensor(1.0, 1.1, 1.3, 0.5, 0.8))
    out = Output(logprobs=theta, entropy=behav)
    loss, metrics = nodes.gspo_train(out, behav, behav, tensor(2.0, -1.0), seqs, clip=0.3, clip_high=0.1)
    # min(1.196 * 2, 1.1 * 2) and min(-0.632, -0.7).
    assert_close(loss, tensor(-2.2, 0.7))
    assert metrics["clip_fraction"].tolist() == [True, True]
    inside, _ = nodes.gspo_train(out, behav, behav, tensor(2.0, -1.0), seqs, clip=0.5, clip_high=None)
    assert_close(inside, tensor(-2 * math.sqrt(1.43), math.sqrt(0.4)))


def test_gspo_with_dual_clip_and_by_length():
    seqs = Sequences.of([2, 3, 2], loss_mask=[True] * 6 + [False])
    # Geometric means 2, 8 and 8, of 2, 3 and 1 learned tokens. Ye et al. 2020, equation 5, bounds A < 0.
    theta = tensor(1.0, 4.0, 8.0, 8.0, 8.0, 8.0, 5.0).log()
    out, zeros, advantages = Output(logprobs=theta, entropy=theta), torch.zeros(7), tensor(-1.0, -1.0, 1.0)
    loss, metrics = nodes.gspo_train(out, zeros, zeros, advantages, seqs, dual_clip=3.0)
    assert_close(loss, tensor(2.0, 3.0, -1.0004))
    assert metrics["dual_clip_fraction"].tolist() == [False, True, False]
    loss, _ = nodes.gspo_train(out, zeros, zeros, advantages, seqs, by_length=True)
    assert_close(loss, tensor(2 * 2.0, 3 * 8.0, -1.0004))


def test_sapo_of_sequences():
    # One ratio, sqrt(0.5 * 1.5), for both tokens. Their mean is the loss of the sequence.
    seqs = Sequences.of([3], loss_mask=[True, True, False])
    theta, prox = tensor(0.5, 1.5, 7.0).log().requires_grad_(), torch.zeros(3)
    out = Output(logprobs=theta, entropy=prox)
    loss, _ = nodes.sapo_train(out, prox, prox, torch.ones(3), seqs, tau_positive=2.0, level="sequence")
    ratio = math.sqrt(0.75)
    s = 1 / (1 + math.exp(-2 * (ratio - 1)))
    assert_close(loss[:2], -2 * tensor(s, s))
    (gradient,) = torch.autograd.grad(loss[:2].mean(), theta)
    assert_close(gradient, -4 * s * (1 - s) * ratio * tensor(0.5, 0.5, 0.0))


def test_a_reward_model_prefers_the_chosen():
    seqs = Sequences.of([1, 1, 1, 1], group=[0, 0, 1, 1])
    out = Output(scores=tensor(math.log(3), 0.0, 1.0, 1.0))
    loss, metrics = nodes.reward_train(out, seqs)
    # Ouyang et al. 2022, equation 1: -log sigmoid(log 3) = log(4/3), -log sigmoid(0) = log 2.
    assert_close(loss, tensor(math.log(4 / 3), math.log(2)))
    assert metrics["accuracy"].tolist() == [True, False]
    assert_close(metrics["margin"], tensor(math.log(3), 0.0))
    assert_close(metrics["score"], tensor(math.log(3) / 2, 1.0))


def test_dpo_by_hand():
    # Rafailov et al. 2023, equation 7.
    # Chosen: theta - ref = 0.5 + 0.5, rejected: -1; beta 0.1: margin 0.1 (1 + 1) = 0.2.
    seqs = Sequences.of([2, 1], group=[0, 0])
    loss, metrics = nodes.dpo(Output(logprobs=tensor(-0.5, -0.5, -3.0)), tensor(-1.0, -1.0, -2.0), seqs)
    assert_close(loss, tensor(math.log(1 + math.exp(-0.2))))
    assert_close(metrics["margin"], tensor(0.2))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_robust_dpo_is_unbiased_and_exo_is_least_at_the_labels():
    margin = tensor(0.7)
    right, wrong = (algo.robust_loss(x, 0.2) for x in (margin, -margin))
    assert_close(0.8 * right + 0.2 * wrong, algo.pairwise_loss(margin))
    assert_close(algo.exo_loss(tensor(math.log(0.8 / 0.2)), 0.2), tensor(0.0))
    assert not algo.hinge_loss(tensor(1.5)).any()


def test_orpo_by_hand():
    # Hong et al. 2024, equations 4 to 7. Geometric means 1/2 and 1/4: odds 1 and 1/3. TRL (1.8): 0.8369882.
    seqs = Sequences.of([3, 1], loss_mask=[False, True, True, True], group=[0, 0])
    logprobs = tensor(0.0, 0.25, 1.0, 0.25).log()
    loss, metrics = nodes.orpo(Output(logprobs=logprobs), seqs, odds_coef=0.5)
    assert_close(loss, tensor(math.log(2) + 0.5 * math.log(1 + 1 / 3)))
    assert_close(metrics["margin"], tensor(math.log(2)))
    certain = torch.zeros(1, requires_grad=True)  # p = 1
    algo.orpo_loss(certain, tensor(-1.0), 0.5).sum().backward()
    assert torch.isfinite(certain.grad).all()


def test_kto_by_hand():
    # Ethayarajh et al. 2024, equation 8. Log-ratios 1 and 2; the unrelated answers' are 3 and -2: z = 0.5.
    seqs = Sequences.of([2, 1, 1, 1], group=[0, 0, 1, 1])
    ref = torch.zeros(5)
    theta = tensor(0.5, 0.5, 3.0, 2.0, -2.0).requires_grad_()
    point = nodes.kto.__hflow_first_pass__(theta.detach(), ref, seqs)
    assert point.tolist() == [0.5] * 4
    knobs = {"beta": 0.2, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    loss, metrics = nodes.kto(Output(logprobs=theta), ref, tensor(1, 1, 0, 0), point, seqs, **knobs)
    good, bad = sigmoid(0.2 * (1 - 0.5)), sigmoid(0.2 * (0.5 - 2))
    assert_close(loss, tensor(2 * (1 - good), 0.5 * (1 - bad)))
    assert metrics["accuracy"].tolist() == [True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    slopes = [-2 * 0.2 * good * (1 - good)] * 2 + [0, 0.5 * 0.2 * bad * (1 - bad), 0]
    assert_close(gradient, tensor(*slopes))
    assert not nodes.kto.__hflow_first_pass__(-theta.detach(), ref, seqs).any()  # a mean of -0.5 counts as 0


@pytest.mark.parametrize(
    ("clip", "loss", "clipped"),
    # Old value 0, new 0.5, return 1: clipped at 0.2 the error is 0.64, else 0.25, and half of it counts.
    [(0.2, 0.32, True), (0.6, 0.125, False), (None, 0.125, None)],
)
def test_value_clipping_can_be_set_and_turned_off(clip, loss, clipped):
    got, metrics = nodes.critic_train(Output(values=tensor(0.5)), tensor(0.0), tensor(1.0), clip=clip)
    assert_close(got, tensor(loss))
    assert_close(metrics["error"], tensor(0.25))
    assert metrics.get("clip_fraction", tensor()).tolist() == ([] if clipped is None else [clipped])


def surrogate(
    node: Any, theta: torch.Tensor, prox: torch.Tensor, advantages: torch.Tensor, **knobs: Any
) -> tuple:
    """Return the entries of a train node, their gradients, and its metrics, with prox = behav."""
    theta = theta.clone().requires_grad_()
    out = Output(logprobs=theta, entropy=torch.zeros_like(theta))
    loss, metrics = node(out, prox, prox, advantages, Sequences.of([len(theta)]), **knobs)
    loss.sum().backward()
    return loss.detach(), theta.grad, metrics


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # MiniMax-M1, equations 4 and 5: the gradient is minus the clipped ratio times A.
    theta = tensor(0.3, 0.3, 0.3).log()
    prox = tensor(0.1, 0.3, 0.6).log()
    loss, gradient, metrics = surrogate(
        nodes.cispo_train, theta, prox, tensor(2.0, -1.0, 1.0), clip=1.0, clip_high=1.0
    )
    assert_close(gradient, tensor(-2 * 2.0, 1.0, -0.5))
    assert_close(loss, tensor(-4.0, 1.0, -0.5) * math.log(0.3))
    assert metrics["clip_fraction_high"].tolist() == [True, False, False]
    low = surrogate(nodes.cispo_train, theta, prox, tensor(1.0, 1.0, 1.0), clip=0.2)
    assert_close(low[1], tensor(-1.2, -1.0, -0.8))
    assert low[2]["clip_fraction_low"].tolist() == [False, False, True]


def test_sapo_closes_its_gate_softly():
    # Gao et al. 2025: f(r) = 4 / tau sigmoid(tau (r - 1)), whose slope is 4 s (1 - s) with s the sigmoid.
    theta, prox = tensor(0.2, 0.2, 0.4).log(), tensor(0.2, 0.2, 0.2).log()
    knobs = {"tau_positive": 1.0, "tau_negative": 2.0}
    loss, gradient, _ = surrogate(nodes.sapo_train, theta, prox, tensor(1.0, -1.0, 1.0), **knobs)
    s = 1 / (1 + math.exp(-1))
    assert_close(loss, tensor(-2.0, 1.0, -4 * s))
    assert_close(gradient, tensor(-1.0, 1.0, -4 * s * (1 - s) * 2))


def test_dppo_drops_tokens_that_leave_the_trust_region():
    # Qi et al. 2026. Changes of probability 0.3, 0.3, 0.01 (a ratio of 11) and -0.3, at most 0.1.
    theta, prox = tensor(0.6, 0.6, 0.011, 0.3).log(), tensor(0.3, 0.3, 0.001, 0.6).log()
    advantages = tensor(1.0, -1.0, 1.0, -2.0)
    loss, gradient, metrics = surrogate(nodes.dppo_train, theta, prox, advantages, max_divergence=0.1)
    assert_close(loss, tensor(0.0, 2.0, -11.0, 0.0))
    assert gradient.tolist() == pytest.approx([0.0, 2.0, -11.0, 0.0])
    assert metrics["clip_fraction_high"].tolist() == [True, False, False, False]
    assert metrics["clip_fraction_low"].tolist() == [False, False, False, True]
    # KL of the events: 0.3 log(1/2) + 0.7 log(0.7 / 0.4) = 0.184, and 0.008 for the rare token.
    kl = algo.binary_divergence(theta, prox, "kl")
    assert_close(kl[0], torch.tensor(0.3 * math.log(0.5) + 0.7 * math.log(0.7 / 0.4)))
    loss, *_ = surrogate(nodes.dppo_train, theta, prox, advantages, divergence="kl", max_divergence=0.05)
    assert_close(loss, tensor(0.0, 2.0, -11.0, 0.0))


def test_a_symmetric_region_also_drops_what_would_come_back():
    # Changes of probability 0.3 with A < 0, which the gradient reverses, and 0.05.
    theta, prox = tensor(0.6, 0.35).log(), tensor(0.3, 0.3).log()
    knobs = {"max_divergence": 0.1, "symmetric": True}
    loss, _, metrics = surrogate(nodes.dppo_train, theta, prox, tensor(-1.0, 1.0), **knobs)
    assert_close(loss, tensor(0.0, -0.35 / 0.3))
    assert metrics["clip_fraction"].tolist() == [True, False]


def test_vespo_weighs_sequences_by_its_kernel():
    # Shen et al. 2026: W = 0.5 * 3 = 1.5 of two learned tokens with A > 0, and 0.5 of one with A < 0.
    seqs = Sequences.of([3, 1], loss_mask=[False, True, True, True])
    behav = tensor(1.0, 0.4, 0.1, 0.8).log()
    theta = (behav + tensor(9.0, 0.5, 3.0, 0.5).log()).requires_grad_()
    advantages = tensor(0.0, 2.0, 2.0, -1.0)
    out = Output(logprobs=theta, entropy=behav)
    loss, metrics = nodes.vespo_train(out, behav, behav, advantages, seqs)
    high, low = 1.5**2 * math.exp(3 * (1 - 1.5)), 0.5**3 * math.exp(2 * (1 - 0.5))
    assert_close(metrics["phi"][1:], tensor(high, high, low))
    (gradient,) = torch.autograd.grad(loss[1:].sum(), theta)
    assert_close(gradient, tensor(0.0, -2 * high, -2 * high, low))  # -phi A, and none through phi
    assert_close(loss[3], low * theta.detach()[3])
    _, far = algo.vespo_surrogate(tensor(0.0, 0.0), tensor(-90.0, 0.0), torch.ones(2), Sequences.of([2]))
    assert far.tolist() == [0.0, 0.0]


def test_bad_answers_that_the_policy_left_are_masked():
    # DeepSeek-V3.2: means of log(behav / theta) of 0.5 (A < 0), 0.5 (A > 0) and 0.1 (A < 0), with delta 0.2.
    seqs = Sequences.of([2, 2, 3], loss_mask=[True] * 6 + [False])
    theta = tensor(-2.0, -1.0, -2.0, -1.0, -1.2, -1.0, -9.0)
    behav, advantages = -torch.ones(7), tensor(-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 0.0)
    ref, out = theta - 1, Output(logprobs=theta, entropy=behav)
    kept = tensor(0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    both = [
        nodes.reinforce_train(out, behav, behav, advantages, seqs, ref, off_policy_limit=limit)
        for limit in (0.2, None)
    ]
    assert_close(both[0][0][:6], kept * both[1][0][:6])
    assert both[0][1]["off_policy"][:6].tolist() == (kept == 0).tolist()
    assert "off_policy" not in both[1][1]
    # The KL to the reference still holds masked tokens.
    knobs = {"kl_coef": 0.5, "off_policy_limit": 0.2}
    loss, _ = nodes.reinforce_train(out, behav, behav, advantages, seqs, ref, **knobs)
    assert_close(loss[0], tensor(0.5 * algo.kl_k3(theta[0], ref[0]).item())[0])
    whole = tensor(-1.0, 1.0, -1.0)
    loss, metrics = nodes.gspo_train(out, behav, behav, whole, seqs, off_policy_limit=0.2)
    assert metrics["off_policy"].tolist() == [True, False, False]
    assert loss.tolist()[0] == 0 != loss.tolist()[2]


def test_the_loss_of_uncertain_tokens_alone():
    # Wang et al. 2025: the top half of four learned tokens by entropy.
    seqs = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
    entropy = tensor(9.0, 0.1, 2.0, 0.5, 0.0)
    chosen = nodes.high_entropy_train.__hflow_first_pass__(entropy, seqs, share=0.5)
    assert chosen.tolist() == [False, False, True, True, False]
    theta = tensor(1.0, 1.5, 1.5, 0.9, 0.9).log().requires_grad_()
    prox, out = torch.zeros(5), Output(logprobs=theta, entropy=entropy)
    loss, metrics = nodes.high_entropy_train(out, prox, prox, torch.ones(5), seqs, chosen)
    assert_close(loss, tensor(0.0, 0.0, -1.2, -0.9, 0.0))
    assert int(metrics["trained.sum"].sum()) == 2


def test_reinforce_and_dro_have_the_gradients_of_their_papers():
    theta, prox = tensor(0.9, 0.1).log(), tensor(0.3, 0.4).log()
    _, gradient, metrics = surrogate(nodes.reinforce_train, theta, prox, tensor(1.0, -2.0))
    assert_close(gradient, tensor(-3.0, 0.5))  # -ratio A, whatever the ratio
    assert "clip_fraction" not in metrics
    # DRO: -A + beta (theta - prox), which is 0 at theta = prox + A / beta.
    _, gradient, _ = surrogate(
        nodes.dro_train, tensor(-1.0, -1.0), tensor(-2.0, -1.5), tensor(0.5, 2.0), dro_beta=0.5
    )
    assert_close(gradient, tensor(0.0, -1.75))


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # Zhao et al. 2025, equation 4: log-ratios 1 and -1 with A > 0 become 0.4 and -1; with A < 0, 1 and -0.4.
    seqs = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
    prox = tensor(0.0, -2.0, -2.0, -2.0, -2.0)
    out = Output(logprobs=prox + tensor(0.0, 1.0, -1.0, 1.0, -1.0), entropy=prox)
    loss, metrics = nodes.gmpo_train(out, prox, prox, tensor(2.0, -1.0), seqs, clip=0.4)
    assert_close(loss, tensor(-2 * math.exp(-0.3), math.exp(0.3)))
    assert metrics["clip_fraction_high"].tolist() == [False, True, False, False, False]
    assert metrics["clip_fraction_low"].tolist() == [False, False, False, False, True]
    # A behaviour weight of exp(0.5) for both sequences.
    loss, _ = nodes.gmpo_train(out, prox - 0.5, prox, tensor(2.0, -1.0), seqs, behav_weight_cap=None)
    assert_close(loss, math.exp(0.5) * tensor(-2 * math.exp(-0.3), math.exp(0.3)))


def test_covariance_counts_the_learned_tokens_of_a_minibatch():
    # Learned log-probs -1, -3, -2 around -2; advantages 2, -1, -1 around 0: (1)(2), (-1)(-1), (0)(-1).
    seqs = Sequences.of([2, 2], loss_mask=[False, True, True, True])
    logprobs, advantages = tensor(0.0, -1.0, -3.0, -2.0), tensor(9.0, 2.0, -1.0, -1.0)
    covariance = algo.token_covariance(logprobs, advantages, seqs)
    assert covariance.tolist() == [0.0, 2.0, 1.0, 0.0]
    kl_cov = nodes.kl_cov_train.__hflow_first_pass__
    assert kl_cov(logprobs, advantages, seqs, share=0.67).tolist() == [False, True, True, False]
    assert kl_cov(logprobs, advantages, seqs).tolist() == [False, True, False, False]  # one at least
    clip_cov, random = nodes.clip_cov_train.__hflow_first_pass__, tensor(0.1, 0.5, 0.2, 0.0)
    found = clip_cov(logprobs, advantages, random, seqs, share=0.4, lower=0.5)
    assert found.tolist() == [False, False, True, False]  # one of the two between the bounds
    assert not clip_cov(logprobs, advantages, random, seqs, lower=2.0).any()  # 2 is not above 2


def test_losses_of_the_entropy_mechanism():
    # Cui et al. 2025: Clip-Cov has no gradient on its tokens, KL-Cov adds a penalty on its own. Ratio 1.5.
    prox = tensor(0.2, 0.2, 0.2).log()
    theta, chosen = (prox + math.log(1.5)).requires_grad_(), torch.tensor([True, False, False])
    out, advantages = Output(logprobs=theta, entropy=prox), tensor(-1.0, -1.0, 1.0)
    loss, metrics = nodes.clip_cov_train(out, prox, prox, advantages, THREE, chosen)
    assert_close(loss, tensor(0.0, 1.5, -1.2))
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    assert gradient.tolist() == pytest.approx([0.0, 1.5, 0.0])
    assert (int(metrics["dropped.sum"].sum()), metrics["clip_fraction"].tolist()) == (1, [False, False, True])
    loss, metrics = nodes.kl_cov_train(
        out, prox - math.log(2), prox, advantages, THREE, chosen, cov_kl_coef=0.5
    )
    assert_close(loss, 2 * tensor(1.5 + 0.5 * math.log(1.5), 1.5, -1.5))
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    assert gradient.tolist() == pytest.approx([2 * (1.5 + 0.5), 3.0, -3.0])


def test_ipo_smoothing_and_a_margin():
    seqs = Sequences.of([1, 1], group=[0, 0])
    out, ref = Output(logprobs=tensor(-1.0, -3.0)), tensor(-2.0, -2.0)
    # h = 1 - (-1) = 2. Azar et al. 2023, equation 17: (2 - 1 / (2 * 0.1))^2.
    assert_close(nodes.dpo(out, ref, seqs, beta=0.1, loss="ipo")[0], tensor(9.0))
    # Conservative DPO: 0.9 softplus(-0.2) + 0.1 softplus(0.2).
    smoothed, _ = nodes.dpo(out, ref, seqs, beta=0.1, label_smoothing=0.1)
    assert_close(smoothed, tensor(0.9 * math.log(1 + math.exp(-0.2)) + 0.1 * math.log(1 + math.exp(0.2))))
    # Llama 2, equation 2: -log sigmoid(3 - 1 - 2).
    loss, _ = nodes.reward_train(Output(scores=tensor(3.0, 1.0)), seqs, tensor(2.0))
    assert_close(loss, tensor(math.log(2)))


def test_a_huber_loss_grows_linearly():
    # Errors 0.5 and 4 with delta 1: 0.125 and 1 * (4 - 0.5).
    values = Output(values=tensor(0.5, 4.0))
    loss, _ = nodes.critic_train(values, tensor(0.5, 4.0), tensor(0.0, 0.0), huber_delta=1.0)
    assert_close(loss, tensor(0.125, 3.5))
