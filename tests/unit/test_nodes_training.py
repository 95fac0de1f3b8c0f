"""Losses of the library's train nodes, on numbers worked out by hand."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hflow import Output, Sequences, nodes
from hflow.dsl.body_check import check_of


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_kl_in_the_loss_by_either_estimator():
    theta, ref = tensor(-1.0), tensor(-3.0)
    out = Output(logprobs=theta, entropy=tensor(0.0))
    for estimator, kl in {"k2": 2.0, "k3": math.exp(-2) - 1 + 2}.items():
        loss, metrics = nodes.actor_train(
            out, theta, theta, tensor(0.0), ref, kl_coef=0.5, kl_estimator=estimator
        )
        assert_close(loss, tensor(0.5 * kl))
        assert_close(metrics["ref_kl"], tensor(kl))


def problem(node: Any, reads: Sequence[str] = (), **knobs: Any) -> str | None:
    """Return what the check of a library node says about its knobs, with the defaults of the others."""
    parameters = inspect.signature(node).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return check_of(node)(defaults | knobs, reads)


@pytest.mark.parametrize(
    ("node", "knobs", "expected"),
    [
        (nodes.actor_train, {}, None),
        (nodes.actor_train, {"behav_weight_cap": -1.0}, "behav_weight_cap is -1.0; it must be more than 0"),
        (nodes.gspo_train, {"behav_weight_cap": 0.0}, "behav_weight_cap is 0.0; it must be more than 0"),
        (nodes.actor_train, {"dual_clip": 1.0}, "dual_clip is 1.0; it must be more than 1, or null"),
        (nodes.gspo_train, {"clip": -0.1}, "clip is -0.1; it must be 0 or more"),
        (nodes.actor_train, {"kl_coef": 0.1}, "kl_coef needs ref_logprobs"),
    ],
)
def test_knobs_that_cannot_work_are_refused(node: Any, knobs: dict, expected: str | None):
    found = problem(node, **knobs)
    assert found is None if expected is None else expected in found


def test_clip_higher_clips_increasing_probabilities_later():
    # DAPO, equation 8: 1 - 0.2 and 1 + 0.28.
    prox = torch.zeros(3)
    out = Output(logprobs=tensor(1.25, 1.4, 0.7).log(), entropy=prox)
    loss, metrics = nodes.actor_train(out, prox, prox, tensor(1.0, 1.0, -1.0), clip=0.2, clip_high=0.28)
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


def test_a_reward_model_prefers_the_chosen():
    seqs = Sequences.of([1, 1, 1, 1], group=[0, 0, 1, 1])
    out = Output(scores=tensor(math.log(3), 0.0, 1.0, 1.0))
    loss, metrics = nodes.reward_train(out, seqs)
    # Ouyang et al. 2022, equation 1: -log sigmoid(log 3) = log(4/3), -log sigmoid(0) = log 2.
    assert_close(loss, tensor(math.log(4 / 3), math.log(2)))
    assert metrics["accuracy"].tolist() == [True, False]
    assert_close(metrics["margin"], tensor(math.log(3), 0.0))


def test_dpo_by_hand():
    # Rafailov et al. 2023, equation 7.
    # Chosen: theta - ref = 0.5 + 0.5, rejected: -1; beta 0.1: margin 0.1 (1 + 1) = 0.2.
    seqs = Sequences.of([2, 1], group=[0, 0])
    loss, metrics = nodes.dpo(Output(logprobs=tensor(-0.5, -0.5, -3.0)), tensor(-1.0, -1.0, -2.0), seqs)
    assert_close(loss, tensor(math.log(1 + math.exp(-0.2))))
    assert_close(metrics["margin"], tensor(0.2))


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
