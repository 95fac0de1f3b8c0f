"""Library nodes that make rewards and advantages, on numbers worked out by hand."""

import json
import math

import pytest
import torch
from torch.testing import assert_close

from hflow import Sequences, State, nodes


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


SEQS = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
BEHAV, REF = tensor(0, -1.0, -1.0, -2.0, -2.0), tensor(0, -2.0, -1.0, -2.0, -1.0)
"""Log-ratios 1, 0 | 0, -1: a KL of 1 and -1 nats a sequence."""
DOUBLED = tensor(0, -2.0, -2.0, -2.0, -4.0)
"""Log-ratios 1, 1 | 0, 2: 2 nats a sequence on average."""


def test_a_fixed_kl_weight_remembers_nothing():
    state = State()
    for _ in range(2):
        reward, metrics = nodes.kl_reward(tensor(1.0, 2.0), BEHAV, REF, SEQS, state, beta=0.1)
    assert_close(reward, tensor(0, -0.1, 1.0, 0.0, 2.1))
    assert (metrics["beta"], metrics["sequence_kl"], state) == (0.1, 0.0, {})


def test_an_adaptive_kl_weight_follows_its_target():
    state, knobs = State(), {"beta": 0.1, "target": 1.6, "horizon": 20.0}
    reward, metrics = nodes.kl_reward(tensor(0.0, 0.0), BEHAV, DOUBLED, SEQS, state, **knobs)
    assert_close(reward, tensor(0, -0.1, -0.1, 0.0, -0.2))
    assert (metrics["beta"], metrics["sequence_kl"]) == (0.1, 2.0)
    # The KL is 25 % above its target, clipped to 0.2; 2 sequences of a horizon of 20: 0.1 (1 + 0.1 * 0.2).
    assert state == {"beta": pytest.approx(0.102)}
    state = State(json.loads(json.dumps(state)))
    reward, metrics = nodes.kl_reward(tensor(0.0, 0.0), BEHAV, REF, SEQS, state, **knobs)
    assert metrics["beta"] == pytest.approx(0.102)
    assert_close(reward, tensor(0, -0.102, 0.0, 0.0, 0.102))
    # A KL of 0 is 100 % below: 0.102 (1 - 0.1 * 0.2).
    assert state == {"beta": pytest.approx(0.09996)}


def test_the_kl_in_the_reward_by_another_estimator():
    reward, _ = nodes.kl_reward(tensor(0.0, 0.0), BEHAV, REF, SEQS, State(), beta=1.0, estimator="k3")
    # (r - 1) - log r with r = ref / behav: e^-1 for the log-ratio 1, e for -1.
    assert_close(reward, tensor(0, -math.exp(-1), 0.0, 0.0, -(math.e - 2)))


@pytest.mark.parametrize(
    ("whiten", "expected"),
    [
        # lambda = gamma = 1 and V = 0: the return to go, 1 at both tokens of the first, then 4 and 6.
        ("none", [1.0, 1.0, 4.0, 6.0]),
        # Mean 3, deviations -2, -2, 1, 3: variance 18 / 3.
        ("batch", [-2 / 6**0.5, -2 / 6**0.5, 1 / 6**0.5, 3 / 6**0.5]),
        # Group 0 has no spread; group 1 holds 4 and 6: mean 5, variance 2.
        ("group", [0.0, 0.0, -(2**-0.5), 2**-0.5]),
    ],
)
def test_advantages_are_whitened_on_request(whiten, expected):
    seqs = Sequences.of([2, 1, 1], group=[0, 1, 1])
    token_reward = tensor(0, 1.0, 4.0, 6.0)
    stops = ["stop"] * 3
    got, targets, _ = nodes.gae(token_reward, torch.zeros(4), stops, seqs, whiten=whiten, lam=1.0)
    assert_close(got, tensor(*expected))
    assert_close(targets, tensor(1.0, 1.0, 4.0, 6.0))
    assert_close(nodes.returns_to_go(token_reward, seqs, whiten=whiten), tensor(*expected))


def test_gae_reports_what_the_critic_explains():
    seqs = Sequences.of([1, 1, 1])
    _, targets, metrics = nodes.gae(tensor(1.0, 2.0, 3.0), tensor(1.5, 2.0, 2.5), ["stop"] * 3, seqs)
    assert_close(targets, tensor(1.0, 2.0, 3.0))
    # Errors -0.5, 0, 0.5 have a quarter of the returns' variance.
    assert metrics["explained_variance"].item() == pytest.approx(0.75)


def test_reinforce_pp_discounts_the_kl_that_is_still_to_come():
    # Hu et al. 2025: A_t = r - beta sum of the KL from t on; here r = 2, beta = 0.5, KL 1, 0, 3.
    seqs = Sequences.of([4], loss_mask=[False, True, True, True])
    behav, ref = tensor(0, -1.0, -1.0, -1.0), tensor(0, -2.0, -1.0, -4.0)
    token_reward, _ = nodes.kl_reward(tensor(2.0), behav, ref, seqs, State(), beta=0.5)
    advantages = nodes.returns_to_go(token_reward, seqs, whiten="none")
    assert_close(advantages, tensor(0, 2 - 0.5 * 4, 2 - 0.5 * 3, 2 - 0.5 * 3))


def test_dr_grpo_and_rloo_keep_the_spread():
    seqs = Sequences.of([1] * 4, group=[0, 0, 0, 0])
    reward = tensor(1.0, 0.0, 0.0, 1.0)
    assert_close(nodes.group_advantage(reward, seqs, std=False), tensor(0.5, -0.5, -0.5, 0.5))
    # RLOO: the mean of the three others, 1/3 or 2/3.
    assert_close(nodes.leave_one_out(reward, seqs), tensor(2 / 3, -2 / 3, -2 / 3, 2 / 3))
