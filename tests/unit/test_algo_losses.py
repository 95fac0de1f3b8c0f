"""Losses and divergences against numbers worked out by hand."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hflow import algo

FLOATS = st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=5).map(torch.tensor)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def test_clipped_surrogate():
    theta, behav = logs(1.5, 1.5, 0.5, 0.5, 1.1), logs(1, 1, 1, 1, 1)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    got = algo.clipped_surrogate(theta, behav, advantages, 0.2)
    # min(1.5, 1.2), min(-1.5, -1.2), min(0.5, 0.8), min(-0.5, -0.8), min(2.2, 2.2)
    torch.testing.assert_close(got, torch.tensor([-1.2, 1.5, -0.5, 0.8, -2.2]))
    got = algo.clipped_surrogate(theta, behav, advantages, 0.2, clip_high=0.4)
    torch.testing.assert_close(got, torch.tensor([-1.4, 1.5, -0.5, 0.8, -2.2]))


def test_the_weight_multiplies_both_branches():
    # theta = prox, w = 3, A = 1: the ratio is 1 and the loss -3.
    theta = logs(0.3)
    assert algo.decoupled_surrogate(theta, logs(0.3), logs(0.1), torch.ones(1), 0.2).item() == pytest.approx(
        -3
    )
    # ratio 2 is clipped to 1.2, and the clipped branch is weighted too.
    loss = algo.decoupled_surrogate(logs(0.6), logs(0.3), logs(0.1), torch.ones(1), 0.2)
    assert loss.item() == pytest.approx(-3.6)


def test_the_weight_has_no_gradient():
    prox = logs(0.3).requires_grad_()
    theta = logs(0.3).requires_grad_()
    algo.decoupled_surrogate(theta, prox, logs(0.1), torch.ones(1), 0.2).sum().backward()
    # d(-w r A) = -3 r for theta and +3 r for prox through the ratio alone.
    assert theta.grad.item() == pytest.approx(-3)
    assert prox.grad.item() == pytest.approx(3)


@given(theta=FLOATS, behav=FLOATS, advantages=FLOATS, clip=st.sampled_from([0.0, 0.1, 0.5]))
def test_decoupled_with_prox_equal_to_behav_is_ppo(theta, behav, advantages, clip):
    ppo = algo.clipped_surrogate(theta, behav, advantages, clip)
    decoupled = algo.decoupled_surrogate(theta, behav, behav, advantages, clip, behav_weight_cap=1.0)
    assert torch.equal(ppo, decoupled)


def test_loglinear_prox():
    theta = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0], requires_grad=True)
    behav = torch.zeros(5)
    versions = torch.tensor([5, 6, 7, 3, -1])
    # v_prox 6, v_theta 6.5: alpha is 1 / 1.5, 0 / 0.5, clamped (theta not newer) 0, 3 / 3.5, prompt 0.
    got = algo.loglinear_prox(theta, behav, versions, 6, 6.5)
    torch.testing.assert_close(got, torch.tensor([2 / 3, 0.0, 0.0, 6 / 7, 0.0]))
    assert not got.requires_grad


def test_loglinear_prox_is_exact_at_the_first_update():
    theta, behav = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -2.0])
    # Before the first update theta is prox; a token of this very version was made by it.
    got = algo.loglinear_prox(theta, behav, torch.tensor([4, 5]), 5, 5)
    torch.testing.assert_close(got, torch.tensor([-1.0, -2.0]))


def test_kl_estimators_average_to_the_divergence():
    p, ref = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.3, 0.4])
    exact = (p * (p / ref).log()).sum()
    for estimator in (algo.kl_k1, algo.kl_k3):
        torch.testing.assert_close((p * estimator(p.log(), ref.log())).sum(), exact)


def test_k3_is_bounded():
    # Unbounded it would be e^24 - 25 = 2.6e10. With p far above ref it is the log-ratio less 1.
    p, ref = torch.tensor([-30.0, -1.0, -3.0]), torch.tensor([-6.0, -9.0, -3.0])
    torch.testing.assert_close(algo.kl_k3(p, ref), torch.tensor([10.0, 7 + math.exp(-8), 0.0]))


def test_gradients_of_far_policies_are_finite():
    """At 100 nats exp overflows in float32, and the product with a zero gradient is NaN."""
    theta = torch.tensor([0.0, -100.0, 0.0], requires_grad=True)
    behav = torch.tensor([-100.0, 0.0, 0.0])
    loss = algo.decoupled_surrogate(theta, behav, behav, torch.tensor([1.0, 1.0, 1.0]), 0.2, 5.0)
    (loss.sum() + algo.kl_k3(theta, behav).sum()).backward()
    assert theta.grad.tolist() == [0, 0, -1]
    assert algo.is_bounded(theta, behav).tolist() == [True, True, False]
    assert algo.policy_ratio(theta, behav).tolist() == pytest.approx([math.exp(20), math.exp(-20), 1])
    assert torch.isfinite(algo.decoupled_surrogate(theta, theta, behav, torch.ones(3), 0.2)).all()


def test_entropy():
    assert algo.entropy(torch.zeros(4)).item() == pytest.approx(math.log(4))
    assert algo.entropy(torch.tensor([0.0, math.log(3)])).item() == pytest.approx(
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    )


def test_cross_entropy():
    assert algo.cross_entropy(torch.tensor([-2.0, -0.5])).tolist() == [2.0, 0.5]


def test_value_loss_without_clipping_is_half_the_squared_error():
    values, old, targets = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])
    torch.testing.assert_close(algo.clipped_value_loss(values, old, targets, None), torch.tensor([0.5, 4.5]))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 0.1)),  # 10 % above: e = 0.1
        (5.4, 0.1 * (1 - 0.1 * 0.1)),
        (60.0, 0.1 * (1 + 0.1 * 0.2)),  # the error is clipped at 0.2
        (0.0, 0.1 * (1 - 0.1 * 0.2)),
    ],
)
def test_the_kl_controller_is_proportional_and_clipped(kl, expected):
    # Ziegler et al. 2019, section 2.2, with K = 0.1: beta (1 + K clip((KL - target) / target, -0.2, 0.2)).
    assert algo.adapted_kl_weight(0.1, kl, target=6.0, gain=0.1) == pytest.approx(expected)


def test_the_kl_controller_settles_where_kl_meets_its_target():
    weight = 1.0
    for _ in range(2000):
        weight = algo.adapted_kl_weight(weight, 2.0 / weight, target=4.0, gain=0.1)  # more weight, less KL
    assert weight == pytest.approx(0.5, rel=1e-6)


def test_cispo_without_a_range_is_the_policy_gradient():
    """What verl calls gpg: `-A log p`; with TRL's epsilon_high of 5 the weight is at most 5."""
    theta, prox, advantages = (
        torch.tensor([-1.0, -5.0]),
        torch.tensor([-4.0, -1.0]),
        torch.tensor([2.0, -3.0]),
    )
    torch.testing.assert_close(algo.cispo_surrogate(theta, prox, advantages, 0.0), -advantages * theta)
    ratio = (theta - prox).exp()
    capped = algo.cispo_surrogate(theta, prox, advantages, 1.0, clip_high=4.0)
    torch.testing.assert_close(capped, -ratio.clamp(max=5.0) * advantages * theta)
