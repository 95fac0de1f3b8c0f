"""The library's bodies on small tensors, with results worked out by hand."""

import asyncio
import math
import pickle
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hflow import Output, Sequences, State, Trajectory, algo, nodes
from hflow.base.errors import DataError
from hflow.dsl.lazy import LazyModule
from hflow.testing import CharacterTokenizer, ScriptedEngine


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_kl_reward_pays_at_the_last_learned_token():
    seqs = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
    behav, ref = tensor(0, -1.0, -1.0, -2.0, -2.0), tensor(0, -2.0, -1.0, -2.0, -1.0)
    reward, metrics = nodes.kl_reward(tensor(1.0, 2.0), behav, ref, seqs, State(), beta=0.1)
    assert_close(reward, tensor(0, -0.1, 1.0, 0.0, 2.1))
    assert_close(metrics["kl"], tensor(0, 1.0, 0, 0, -1.0))


USER, SYSTEM = {"role": "user", "content": "1+1"}, {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    ("prompt", "system", "messages"),
    [
        ([USER], None, [USER]),
        ([USER], "Add.", [SYSTEM, USER]),
        ([{**SYSTEM, "content": "Its own."}, USER], "Add.", [{**SYSTEM, "content": "Its own."}, USER]),
    ],
)
def test_a_system_message_is_put_in_front(prompt: list, system: str | None, messages: list):
    talk = asyncio.run(nodes.chat_gen(ScriptedEngine(["2"]), prompt, system=system))
    assert [*talk.messages] == [*messages, {"role": "assistant", "content": "2"}]


def test_a_written_conversation_learns_what_the_assistant_says():
    written = nodes.chat_view(CharacterTokenizer(), [USER, {"role": "assistant", "content": "2"}])
    assert written.loss_mask == (False,) * 3 + (True,) * 2
    with pytest.raises(DataError, match="there is nothing to learn; add a message of the assistant"):
        nodes.chat_view(CharacterTokenizer(), [USER])


@pytest.mark.parametrize(
    ("prompt", "tools", "message"),
    [
        ([USER, {"role": "assistant", "content": "2"}], None, "the last message is the assistant's"),
        ([{"role": "human", "content": "1+1"}], None, "did you mean 'user'"),
        (Trajectory((), (), (), ()).add("environment", "1"), None, "role must be one of"),
        ([USER], "[]", r"tools must be a list of functions, but it is '\[\]'"),
        (
            [USER],
            [{"name": "f", "parameters": {"properties": {"a": None}}}],
            "describes the parameter 'a' as",
        ),
    ],
)
def test_the_test_double_refuses_what_an_engine_refuses(prompt: Any, tools: Any, message: str):
    with pytest.raises(DataError, match=message):
        asyncio.run(ScriptedEngine(["2"]).complete(prompt, tools=tools))


def test_gae_bootstraps_only_truncated_sequences():
    seqs = Sequences.of([1, 1])
    zero = tensor(0.0, 0.0)
    _, targets, _ = nodes.gae(zero, zero, ["length", "stop"], seqs, tensor(3.0, 3.0))
    assert_close(targets, tensor(3.0, 0.0))
    advantages, targets, _ = nodes.gae(tensor(1.0, 3.0), zero, ["stop", "stop"], seqs)
    assert_close(targets, tensor(1.0, 3.0))
    assert_close(advantages, tensor(-1.0, 1.0) / math.sqrt(2), rtol=1e-5, atol=1e-6)


def test_group_advantage_is_centred_in_each_group():
    seqs = Sequences.of([1] * 4, group=[0, 0, 1, 1])
    assert_close(nodes.group_advantage(tensor(1.0, 0, 5.0, 5.0), seqs, std=False), tensor(0.5, -0.5, 0, 0))


def test_the_behaviour_weight_multiplies_both_branches():
    theta = tensor(-1.0)
    loss, metrics = nodes.actor_train(
        Output(logprobs=theta, entropy=tensor(0.5)),
        theta - math.log(3),
        theta,
        tensor(1.0),
        Sequences.of([1]),
    )
    assert_close(loss, tensor(-3.0))
    assert not metrics["clip_fraction"].any()
    assert_close(metrics["kl"], tensor(0.0))


def test_clipping_is_counted_where_it_is_active():
    """Schulman et al. 2017, figure 1: low ratios are clipped for A < 0, high ones for A > 0."""
    prox = torch.zeros(6)
    out = Output(logprobs=tensor(0.7, 0.85, 1.25, 1.35, 0.7, 1.35).log(), entropy=prox)
    advantages = tensor(-1.0, -1.0, 1.0, 1.0, 1.0, -1.0)
    _, metrics = nodes.actor_train(out, prox, prox, advantages, Sequences.of([6]), clip=0.2, clip_high=0.3)
    assert metrics["clip_fraction_low"].tolist() == [True] + [False] * 5
    assert metrics["clip_fraction_high"].tolist() == [False] * 3 + [True, False, False]
    assert metrics["clip_fraction"].tolist() == [True, False, False, True, False, False]


def test_the_kl_of_the_update_is_that_of_the_policy_that_drew_the_tokens():
    """KL(prox || theta) by its definition: the mean of the metric over tokens drawn from prox."""
    prox, theta = tensor(0.1, 0.2, 0.7), tensor(0.3, 0.3, 0.4)
    out = Output(logprobs=theta.log(), entropy=prox)
    _, metrics = nodes.actor_train(out, prox.log(), prox.log(), torch.ones(3), Sequences.of([3]))
    assert_close((prox * metrics["kl"]).sum(), (prox * (prox / theta).log()).sum())


def test_kl_and_entropy_join_the_loss():
    theta = tensor(-1.0)
    out = Output(logprobs=theta, entropy=tensor(2.0))
    loss, _ = nodes.actor_train(
        out, theta, theta, tensor(0.0), Sequences.of([1]), tensor(-2.0), kl_coef=0.5, entropy_coef=0.1
    )
    assert_close(loss, tensor(0.5 * (math.exp(-1) - 1 + 1) - 0.2))


def test_dpo_of_equal_policies_is_log_two():
    seqs = Sequences.of([2, 2], group=[0, 0])
    ref = tensor(-1.0, -1.0, -2.0, -2.0)
    loss, _ = nodes.dpo(Output(logprobs=ref), ref, seqs)
    assert_close(loss, tensor(math.log(2)))
    loss, metrics = nodes.dpo(Output(logprobs=ref + tensor(1.0, 1.0, 0, 0)), ref, seqs, beta=0.5)
    assert_close(loss, tensor(math.log(1 + math.exp(-1.0))))
    assert metrics["accuracy"].tolist() == [True]


def test_critic_and_sft_losses():
    out = Output(values=tensor(1.0), logprobs=tensor(-0.25))
    assert_close(nodes.critic_train(out, tensor(0.0), tensor(1.0), clip=0.2)[0], tensor(0.32))
    assert_close(nodes.sft_train(out), tensor(0.25))


def test_algo_pickles_by_name():
    lazy = pickle.loads(pickle.dumps(LazyModule("hflow.algo")))
    assert lazy.kl_k1 is algo.kl_k1
