"""Advantages against numbers worked out by hand, and against their definitions."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hflow import algo
from hflow.types import Sequences


def test_group_advantage_without_spread_is_zero():
    seqs = Sequences.of([1, 1, 1], group=[0, 1, 1])
    assert algo.group_advantage(torch.tensor([7.0, 2.0, 2.0]), seqs).tolist() == [0, 0, 0]


def test_equal_large_rewards_have_no_advantage():
    """Their mean in float32 is another number, whose distance from them is not small beside eps."""
    seqs = Sequences.of([1, 1, 1], group=[0, 0, 0])
    reward = torch.full((3,), 1000.1)
    assert algo.group_advantage(reward, seqs).tolist() == [0, 0, 0]
    assert algo.leave_one_out(reward, seqs).tolist() == [0, 0, 0]
    assert algo.whiten(reward, seqs).tolist() == [0, 0, 0]
    assert algo.explained_variance(reward - 1, reward, seqs).item() == 0


def naive_gae(reward, values, seqs, gamma, lam, bootstrap):
    out = torch.zeros_like(values)
    for s in range(len(seqs)):
        span = range(int(seqs.offsets[s]), int(seqs.offsets[s + 1]))
        following, advantage = bootstrap[s], 0.0
        for t in reversed([t for t in span if seqs.loss_mask[t]]):
            advantage = reward[t] + gamma * following - values[t] + gamma * lam * advantage
            out[t], following = advantage, values[t]
    return out


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_is_its_recursion(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    seqs = Sequences.of(lengths, loss_mask=mask.tolist())
    reward, values = (torch.randn(total, generator=generator).double() * mask for _ in range(2))
    bootstrap = torch.randn(len(lengths), generator=generator).double()
    got = algo.gae(reward, values, seqs, gamma, lam, bootstrap)
    torch.testing.assert_close(got, naive_gae(reward, values, seqs, gamma, lam, bootstrap))


def test_whiten():
    seqs = Sequences.of([2, 3], loss_mask=[False, True, True, True, False])
    got = algo.whiten(torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0]), seqs)
    torch.testing.assert_close(got, torch.tensor([0.0, -1.0, 0.0, 1.0, 0.0]))


def test_whiten_of_one_token_is_zero():
    assert algo.whiten(torch.tensor([3.0]), Sequences.of([1])).tolist() == [pytest.approx(0)]


@given(
    rewards=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8),
)
def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1(rewards):
    seqs = Sequences.of([1] * len(rewards), group=[0] * len(rewards))
    reward = torch.tensor(rewards, dtype=torch.float64)
    size = len(rewards)
    centred = algo.group_advantage(reward, seqs, std=False)
    torch.testing.assert_close(algo.leave_one_out(reward, seqs), size / (size - 1) * centred)


def test_whiten_each_group():
    seqs = Sequences.of([1, 2, 2], loss_mask=[True, True, False, True, True], group=[0, 0, 1])
    got = algo.whiten(torch.tensor([1.0, 3.0, 9.0, 10.0, 30.0]), seqs, eps=0.0, by_group=True)
    # Group 0 holds 1 and 3: mean 2, deviation sqrt(2). Group 1 holds 10 and 30: mean 20, 10 sqrt(2).
    half = 2**-0.5
    torch.testing.assert_close(got, torch.tensor([-half, half, 0.0, -half, half]))


@given(values=st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=12), seed=st.integers(0, 100))
def test_whitened_tokens_have_mean_0_and_variance_1(values, seed):
    x = torch.tensor(values, dtype=torch.float64) + torch.arange(len(values))
    mask = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[:2] = True
    seqs = Sequences.of([len(values)], loss_mask=mask.tolist())
    learned = algo.whiten(x, seqs)[mask]
    assert learned.mean().item() == pytest.approx(0, abs=1e-6)
    assert x[mask].var() < 1e-3 or learned.var().item() == pytest.approx(1, abs=1e-4)


def test_explained_variance():
    seqs = Sequences.of([4], loss_mask=[True, True, True, False])
    targets = torch.tensor([1.0, 2.0, 3.0, 50.0])
    assert algo.explained_variance(targets, targets, seqs).item() == 1
    # Errors -1, 0, 1 have the variance of the targets: nothing is explained. Half of them: a quarter is left.
    assert algo.explained_variance(torch.full((4,), 2.0), targets, seqs).item() == pytest.approx(0)
    half = torch.tensor([1.5, 2.0, 2.5, 0.0])
    assert algo.explained_variance(half, targets, seqs).item() == pytest.approx(0.75)
    assert algo.explained_variance(half, torch.ones(4), seqs).item() == 0


FOUR = Sequences.of([2, 3, 1, 2], group=[0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize(
    "advantage",
    [
        algo.group_advantage,
        algo.leave_one_out,
        algo.length_weighted_advantage,
        algo.rescaled_advantage,
        lambda reward, seqs: algo.decoupled_advantage([reward, reward], [1.0, 1.0], seqs),
        lambda reward, seqs: algo.whiten(reward[seqs.index], seqs),
        lambda reward, seqs: algo.turn_advantage(reward[seqs.index], seqs, 0.9, std=True),
        lambda reward, seqs: algo.gae(reward[seqs.index], reward[seqs.index], seqs, 0.9, 0.5),
        lambda reward, seqs: algo.explained_variance(reward[seqs.index], 2 * reward[seqs.index], seqs),
    ],
)
def test_whole_rewards_have_the_advantages_of_floats(advantage, dtype):
    """Not those cut to integers, nor to booleans."""
    reward = torch.tensor([1, 0, 0, 0])
    expected = advantage(reward.float(), FOUR)
    got = advantage(reward.to(dtype), FOUR)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    assert ((expected != expected.round()).any()) or expected.dim() == 0, "or the test shows nothing"


@pytest.mark.parametrize(
    ("reward_dtype", "value_dtype", "expected_dtype"),
    [
        (torch.float64, torch.float32, torch.float64),
        (torch.int64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_gae_of_mixed_dtypes_is_added_up_in_fp32(reward_dtype, value_dtype, expected_dtype):
    """512 rewards of 1 without discount: in bf16 the sum would stop at 256."""
    seqs = Sequences.of([512])
    reward, values = torch.ones(512, dtype=reward_dtype), torch.zeros(512, dtype=value_dtype)
    got = algo.gae(reward, values, seqs, gamma=1.0, lam=1.0, bootstrap=torch.zeros(1))
    assert got.dtype == expected_dtype
    torch.testing.assert_close(got, torch.arange(512, 0, -1).to(expected_dtype))


def test_a_sequence_without_learned_tokens_has_no_length():
    mask = [True, True, False, False, False, *[True] * 4]
    seqs = Sequences.of([2, 3, 4], loss_mask=mask)
    # Weights 1/2 and 1/4 of the two that learn, times 2 over their sum of 3/4.
    torch.testing.assert_close(algo.length_scale(seqs, 1.0), torch.tensor([4 / 3, 0.0, 2 / 3]))
    torch.testing.assert_close(algo.length_scale(seqs, 0.0), torch.tensor([1.0, 0.0, 1.0]))
    assert algo.length_scale(Sequences.of([2], loss_mask=[False, False]), 0.5).tolist() == [0.0]
    assert algo.length_scale(Sequences.of([]), 0.5).tolist() == []


def test_sums_of_sequences_and_groups_have_room():
    """In bf16 the sum of ones stops at 256, and booleans have no sum but their number."""
    seqs = Sequences.of([1000, 24], group=[0, 0])
    ones = torch.ones(1024, dtype=torch.bfloat16)
    assert seqs.sum(ones).tolist() == [1000, 24]
    assert seqs.mean(ones).tolist() == [1, 1]
    assert seqs.mean(ones).dtype == seqs.sum(ones).dtype == torch.bfloat16
    assert seqs.sum(ones.bool()).tolist() == [1000, 24]
    assert seqs.mean(ones.bool()).tolist() == [1, 1]
    assert seqs.sum(ones.to(torch.uint8)).tolist() == [1000, 24]
    assert seqs.group_sum(torch.tensor([True, True])).tolist() == [2]
    many = Sequences.of([1] * 1000, group=[0] * 1000)
    assert many.group_sum(torch.ones(1000, dtype=torch.bfloat16)).tolist() == [1000]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=8),
    seed=st.integers(0, 99),
)
def test_the_optimal_token_baseline_is_that_of_verl(lengths, seed):
    """The loop of `compute_optimal_token_baseline_advantage`, for answers without a gap."""
    draw = torch.Generator().manual_seed(seed)
    group = [index % 2 for index in range(len(lengths))]
    reward, norms = torch.rand(len(lengths), generator=draw), torch.rand(sum(lengths), generator=draw) + 0.1
    found = algo.optimal_token_advantage(reward, norms, Sequences.of(lengths, group=group)).split(lengths)
    energies = [part.double().cumsum(0) for part in norms.split(lengths)]
    for own, length in enumerate(lengths):
        for t in range(length):
            peers = [i for i in range(len(lengths)) if group[i] == group[own] and lengths[i] > t]
            total = sum(energies[i][t] for i in peers)
            baseline = sum(energies[i][t] * reward[i] for i in peers) / total
            torch.testing.assert_close(found[own][t].double(), reward[own] - baseline, atol=1e-5, rtol=0)
