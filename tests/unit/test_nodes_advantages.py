"""Library nodes that make rewards and advantages, on numbers worked out by hand."""

import itertools
import json
import math

import pytest
import torch
from knob_checks import knob_problem
from torch.testing import assert_close

from hflow import Output, Sequences, State, algo, nodes
from hflow.base.errors import RunError


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


PAIRS = Sequences.of([1, 3, 2, 2], group=[0, 0, 1, 1])
"""Two groups of two; 1, 3, 2 and 2 learned tokens."""


def test_the_deviation_of_the_batch():
    # Means 2 and 5; the rewards 1, 3, 5, 5 have the variance (6.25 + 0.25 + 2.25 + 2.25) / 3 = 11 / 3.
    got = nodes.group_advantage(tensor(1.0, 3.0, 5.0, 5.0), PAIRS, std_over="batch", eps=1e-9)
    assert_close(got, tensor(-1.0, 1.0, 0.0, 0.0) / (11 / 3) ** 0.5)


def test_gpg_makes_up_for_groups_that_teach_nothing():
    # Chu et al. 2025: two of four samples have a gradient, so alpha = 2.
    assert_close(nodes.gpg_advantage(tensor(1.0, 3.0, 5.0, 5.0), PAIRS), tensor(-2.0, 2.0, 0.0, 0.0))
    assert nodes.gpg_advantage(tensor(1.0, 1.0, 5.0, 5.0), PAIRS).tolist() == [0, 0, 0, 0]


def test_the_best_sample_gets_its_lead():
    # Tang et al. 2025: without the best sample, the best of the group is 2; equal best ones have no lead.
    seqs = Sequences.of([1] * 6, group=[0, 1, 0, 0, 1, 1])
    reward = tensor(1.0, 5.0, 4.0, 2.0, 5.0, 0.0)
    assert nodes.best_advantage(reward, seqs).tolist() == [0, 0, 2, 0, 0, 0]
    by_definition = [max(1.0, 4.0, 2.0) - max(x) for x in ((4.0, 2.0), (1.0, 2.0), (1.0, 4.0))]
    assert nodes.best_advantage(reward, seqs)[[0, 2, 3]].tolist() == by_definition
    # verl's grpo_passk: over the unbiased deviation of 1, 4, 2, whose squares sum to 14 / 3.
    found = nodes.best_advantage(reward, seqs, std=True, eps=1e-6)
    assert_close(found[2], tensor(2 / ((7 / 3) ** 0.5 + 1e-6))[0])
    assert nodes.best_advantage(tensor(3.0, 1.0, 1.0), Sequences.of([1] * 3, group=[0, 1, 1])).sum() == 0


def test_the_best_and_worst_of_a_group_are_kept():
    seqs = Sequences.of([1] * 7, group=[0, 1, 0, 0, 1, 1, 1])
    reward = tensor(1.0, 2.0, 3.0, 2.0, 0.0, 2.0, 1.0)
    kept = nodes.best_worst_mask(reward, seqs)
    assert kept.tolist() == [True, True, True, False, True, False, False]  # of equal ones the first
    kept = nodes.best_worst_mask(reward, seqs, best=0, worst=2)
    assert kept.tolist() == [True, False, False, True, True, False, True]
    with pytest.raises(RunError, match=r"keeps all samples .* best \+ worst = 4"):
        nodes.best_worst_mask(reward, seqs, best=3)


def test_maxrl_divides_by_the_mean():
    # Tajwar et al. 2026: one of four right has 3 and -1, three of four 1/3 and -1; none of four has 0.
    seqs = Sequences.of([1] * 12, group=[g for g in range(3) for _ in range(4)])
    reward = tensor(*[1, 0, 0, 0], *[1, 1, 1, 0], *[0] * 4)
    third = 1 / 3
    expected = tensor(*[3, -1, -1, -1], third, third, third, -1, *[0] * 4)
    assert_close(nodes.maxrl_advantage(reward, seqs), expected)
    with pytest.raises(RunError, match="rewards must be 0 or more"):
        nodes.maxrl_advantage(-reward, seqs)


def test_maxrl_sums_pass_at_k():
    """Its mean is the gradient of log p up to the term N - 1: the sum of (1 - p)^(k - 1), k = 1 ... N - 1."""
    p, size, total = 0.3, 3, 0.0
    for right in range(size + 1):
        reward = tensor(*[1.0] * right, *[0.0] * (size - right))
        advantages = algo.mean_normalised_advantage(reward, Sequences.of([1] * size, group=[0] * size))
        score = reward / p - (1 - reward) / (1 - p)  # d log-prob / d p of one Bernoulli sample
        total += math.comb(size, right) * p**right * (1 - p) ** (size - right) * (advantages * score).mean()
    assert float(total) == pytest.approx(1 + (1 - p))


def test_the_weight_of_the_entropy_follows_its_target():
    # Skywork-OR1: it counts at the target or below, and grows there; above, it shrinks to 0 at least.
    state, knobs = State(), {"target": 1.0, "change": 0.25, "upper": 0.5}
    low, high = tensor(9.0, 0.5, 1.5, 1.0, 1.0), tensor(0.0, 2.0, 2.0, 2.0, 2.0)
    found = []
    for entropy in (low, low, low, high, high, high, low):
        weights, metrics = nodes.adaptive_entropy(entropy, SEQS, state, **knobs)
        assert weights.tolist() == [metrics["weight"]] * 5
        found.append((metrics["weight"], state["weight"]))
    assert found == [(0, 0.25), (0.25, 0.5), (0.5, 0.5), (0, 0.25), (0, 0), (0, 0), (0, 0.25)]
    out = Output(logprobs=BEHAV, entropy=low)
    loss, _ = nodes.actor_train(out, BEHAV, BEHAV, torch.zeros(5), SEQS, entropy_weights=tensor(*[0.25] * 5))
    assert_close(loss, -low / 4)


def test_roles_have_moving_baselines():
    # SPIRAL, its code: r - b, then b = 0.5 b + 0.5 r, from 0. White: 0.5, then 0.25 - 0.5; black: -0.5.
    state = State()
    found, metrics = nodes.role_advantage(
        tensor(1.0, -1.0, -1.0), ["white", "black", "white"], state, decay=0.5
    )
    assert_close(found, tensor(1.0, -1.0, -1.5))
    assert state == {"white": -0.25, "black": -0.5}
    assert metrics["baseline"] == -0.375
    state = State(json.loads(json.dumps(state)))
    found, _ = nodes.role_advantage(tensor(0.0), ["white"], state, decay=0.5)
    assert_close(found, tensor(0.25))


def test_the_optimal_token_baseline_weighs_by_energy():
    # Li et al. 2026. Rewards 1 and 0; energies 1, 1 + 3 and 3, 3 + 1, 4 + 4, without a tool's token.
    seqs = Sequences.of([2, 4, 1, 1], loss_mask=[1, 1, 1, 0, 1, 1, 1, 1], group=[0, 0, 1, 1])
    gradient = tensor(1.0, 3.0, 3.0, 9.0, 1.0, 4.0, 1.0, 1.0)
    found = nodes.optimal_token_advantage(tensor(1.0, 0.0, 2.0, 4.0), gradient, seqs)
    # Baselines 1/4 and 4/8 at the first two positions, and the second sample's own reward at its third.
    assert_close(found, tensor(0.75, 0.5, -0.25, 0.0, -0.5, 0.0, -1.0, 1.0))
    probabilities = tensor(0.5, 0.3, 0.2)
    logits = probabilities.log().requires_grad_()
    (slope,) = torch.autograd.grad(torch.log_softmax(logits, 0)[1], logits)
    out = Output(logprobs=probabilities[1:2].log(), topk=(torch.arange(3)[None], probabilities[None].log()))
    assert_close(nodes.logit_gradient_inf(out, k=3), slope.square().sum()[None])


def test_gdpo_keeps_rewards_apart():
    # Each reward of group 0 is +-1/sqrt(2) after its own normalisation; their sums are 0, those with weights
    # 2 and 1 are not. Group 1 has equal rewards.
    first, second = tensor(1.0, 0.0, 1.0, 1.0), tensor(0.0, 1.0, 3.0, 3.0)
    assert_close(nodes.gdpo_advantage(first, second, PAIRS), torch.zeros(4))
    got = nodes.gdpo_advantage(first, second, PAIRS, weights=(2.0, 1.0))
    # Sums (2 - 1) / sqrt(2) and its negative, 0, 0: the batch's variance is 1 / 3.
    assert_close(got, tensor(1.0, -1.0, 0.0, 0.0) * 1.5**0.5, rtol=1e-3, atol=1e-4)


def test_pass_at_k_by_enumeration():
    """Chen et al. 2025, equations 14 and 15, against all subsets of k samples."""
    seqs = Sequences.of([1] * 9, group=[0] * 5 + [1] * 4)
    reward = tensor(1, 0, 0, 0, 1, 1, 1, 1, 1)
    subsets = list(itertools.combinations(range(5), 2))
    best = {subset: max(reward[i].item() for i in subset) for subset in subsets}
    mean = sum(best.values()) / len(subsets)
    deviation = (mean * (1 - mean)) ** 0.5
    wanted = [sum(best[s] - mean for s in subsets if i in s) / 4 / deviation for i in range(5)]
    got = nodes.pass_at_k_advantage(reward, seqs, k=2)
    assert_close(got, tensor(*wanted, 0, 0, 0, 0))
    with pytest.raises(RunError, match="a prompt has 4 samples, fewer than k=5"):
        nodes.pass_at_k_advantage(reward, seqs, k=5)


def test_turns_are_compared_with_the_same_turn_of_other_samples():
    # Two turns, then one, then three. A reward on a tool's token belongs to the turn before it.
    mask = [bool(int(learned)) for learned in "010110110101"]
    seqs = Sequences.of([5, 2, 5], loss_mask=mask, group=[0, 0, 0])
    reward = tensor(9.0, 1, 1, 0, 4, 0, 3, 0, 0, 2, 0, 8)
    got = nodes.turn_advantage(reward, seqs, gamma=0.5, std=False)
    # Returns: 2 + 2, 4 | 3 | 0 + 1 + 2, 2 + 4, 8. Means 10/3 of the first turns, 5 of the second, 8.
    assert_close(got, tensor(0, 2 / 3, 0, -1, -1, 0, -1 / 3, -1 / 3, 0, 1, 0, 0))
    scaled = nodes.turn_advantage(reward, seqs, gamma=0.5, eps=1e-9)
    assert_close(scaled[[3, 9, 11]], tensor(-(2**-0.5), 2**-0.5, 0))


@pytest.mark.parametrize(
    "node", [nodes.group_advantage, nodes.leave_one_out, nodes.opo_advantage, nodes.gpg_advantage]
)
def test_groups_of_one_are_refused(node):
    with pytest.raises(RunError, match="each prompt of the batch has one sample"):
        node(tensor(1.0, 2.0), Sequences.of([1, 1]))


@pytest.mark.parametrize(
    ("node", "knobs", "reads", "expected"),
    [
        (nodes.group_advantage, {"std": False, "std_over": "batch"}, (), "std_over has no effect"),
        (nodes.group_advantage, {"eps": 0.0}, (), "eps is 0.0; it must be more than 0"),
        (nodes.best_worst_mask, {"best": 0, "worst": 0}, (), "one of them more than 0"),
        (nodes.best_advantage, {"eps": 0.1}, (), "eps has no effect with std=false"),
        (nodes.adaptive_entropy, {"change": 0.0}, (), "change is 0.0; it must be more than 0"),
        (nodes.adaptive_entropy, {"initial": 2.0}, (), "initial is 2.0 and upper is 1.0"),
        (nodes.adaptive_entropy, {"upper": 0.0}, (), "upper is 0.0; it must be more than 0"),
        (nodes.actor_train, {"entropy_coef": 0.1}, ("entropy_weights",), "entropy_coef has no effect beside"),
        (nodes.role_advantage, {"decay": 1.0}, (), "decay is 1.0; it must be from 0 to less than 1"),
        (nodes.group_advantage, {"length_power": 2.0}, (), "length_power is 2.0; it must be from 0 to 1"),
        (
            nodes.gdpo_advantage,
            {"weights": (1.0,)},
            ("reward", "second_reward"),
            "weights has 1 number(s)",
        ),
        (nodes.group_advantage, {"std": False, "eps": 0.1}, (), "eps has no effect with std=false"),
        (nodes.turn_advantage, {"std": False, "eps": 0.1}, (), "eps has no effect with std=false"),
        (nodes.turn_advantage, {"gamma": 2.0}, (), "gamma is 2.0; it must be from 0 to 1"),
        (nodes.returns_to_go, {"gamma": -1.0}, (), "gamma is -1.0; it must be from 0 to 1"),
        (nodes.gae, {"lam": 2.0}, (), "lam is 2.0; it must be from 0 to 1"),
        (nodes.gae, {"lam": 0.5, "gamma": 0.0}, (), "lam has no effect with gamma=0"),
        (nodes.kl_reward, {"horizon": 5.0}, (), "horizon has no effect without a target"),
        (nodes.kl_reward, {"target": 0.0}, (), "target is 0.0; it must be more than 0"),
        (nodes.kl_reward, {"target": 1.0, "beta": 0.0}, (), "beta=0 stays 0"),
        (nodes.kl_reward, {"beta": -1.0}, (), "beta is -1.0; it must be 0 or more"),
        (nodes.pass_at_k_advantage, {"k": 0}, (), "k is 0; it must be at least 1"),
    ],
)
def test_knobs_that_cannot_work_are_refused(node, knobs, reads, expected):
    assert expected in knob_problem(node, reads, **knobs)


def test_hierarchical_advantage_compares_turns_that_observed_the_same():
    # Four samples of one prompt, P; capitals are observations, dots turns.
    texts = ["P.A.C.", "P.B.C.", "P.A.C.", "P.B.C."]
    ids = torch.tensor([ord(letter) for letter in "".join(texts)])
    mask = [x == ord(".") for x in ids]
    reward = torch.zeros(len(ids))
    reward[5::6] = tensor(4.0, 2.0, 8.0, 2.0)

    def advantages(group, **knobs):
        seqs = Sequences.of([6] * 4, loss_mask=mask, group=group)
        got = nodes.hierarchical_advantage(reward, ids, seqs, **knobs)
        assert not got[::2].any()
        return got[1::2].view(4, 3)

    # Without discount each turn has its sample's reward. The same observation: P {4, 2, 8, 2}, A {4, 8},
    # B {2, 2} and C {4, 2, 8, 2}; with one before it PA {4, 8}, PB {2, 2}, AC {4, 8} and BC {2, 2}; with two
    # PAC and PBC, as AC and BC. What is 0 has no weight: in C 0, -2, 4, -2; in AC and PAC -2, 2; in BC 0.
    knobs = {"gamma": 1.0, "std": False, "depth": 2}
    for power, last in {0.0: (4 + 2 + 2) / 3, 1.0: (4 + 2 * 2 + 3 * 2) / 6}.items():
        got = advantages([0] * 4, power=power, **knobs)
        wanted = [[0.0, -2.0, -2.0], [-2.0, 0.0, -2.0], [4.0, 2.0, last], [-2.0, 0.0, -2.0]]
        assert_close(got, torch.tensor(wanted))
    # Of another prompt's samples nothing is compared.
    got = advantages([0, 1, 0, 1], power=1.0, **knobs)
    assert_close(got, tensor(-2.0, 0.0, 2.0, 0.0)[:, None].expand(4, 3))
    # Discounted, turns of P have 1, 0.5, 2 and 0.5, of which the squares deviate by 0.375 in the mean.
    got = advantages([0] * 4, gamma=0.5)
    assert_close(got[1, 0], tensor(-0.5 / (math.sqrt(0.375) + 1e-4))[0])
