"""Corrections for samples of another policy, and KL estimators, against their definitions."""

import math

import pytest
import torch
from knob_checks import knob_problem
from torch.testing import assert_close

from hflow import Output, Sequences, algo, nodes


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


SEQS = Sequences.of([3, 2], loss_mask=[False, True, True, True, True])
BEHAV = tensor(0.0, -1.0, -1.0, -2.0, -2.0)
PROX = BEHAV + torch.tensor([1.0, 2.0, 2.0, 0.25, 1.0]).log()
"""Ratios 2, 2 of the first sequence and 0.25, 1 of the second."""


@pytest.mark.parametrize(
    ("knobs", "weights"),
    [
        ({"upper": None}, [2.0, 2.0, 0.25, 1.0]),
        ({"upper": None, "level": "sequence"}, [4.0, 4.0, 0.25, 0.25]),
        ({"upper": None, "level": "geometric"}, [2.0, 2.0, 0.5, 0.5]),
        ({"upper": 1.5}, [1.5, 1.5, 0.25, 1.0]),
        ({"lower": 0.5, "upper": 1.5}, [1.5, 1.5, 0.5, 1.0]),
        ({"lower": 0.5, "upper": 1.5, "outside": "mask"}, [0.0, 0.0, 0.0, 1.0]),  # IcePop
        ({"upper": 1.5, "normalise": True}, [x / (4.25 / 4) for x in (1.5, 1.5, 0.25, 1.0)]),
    ],
)
def test_weights_by_level_bounds_and_normalisation(knobs: dict, weights: list[float]):
    got, metrics = nodes.behav_weights(BEHAV, PROX, SEQS, **knobs)
    assert_close(got, tensor(0.0, *weights))
    total, squares = sum(weights), sum(w**2 for w in weights)
    assert metrics["ess"] == pytest.approx(total**2 / (4 * squares))


def test_the_share_outside_the_bounds_is_reported():
    _, metrics = nodes.behav_weights(BEHAV, PROX, SEQS, lower=0.5, upper=1.5)
    assert metrics["outside"].tolist() == [False, True, True, True, False]
    assert algo.effective_sample_size(tensor(0.0, 0.0)).item() == 0


LOG2, LOG4 = math.log(2), math.log(4)
"""Log-ratios of the four tokens: LOG2, LOG2 | -LOG4, 0."""


@pytest.mark.parametrize(
    ("knobs", "values"),
    [
        ({"statistic": "k1", "extent": "token"}, [LOG2, LOG2, -LOG4, 0]),
        ({"statistic": "k1", "extent": "sequence-mean"}, [LOG2, LOG2, -LOG2, -LOG2]),
        ({"statistic": "k2", "extent": "sequence-sum"}, [LOG2**2, LOG2**2, LOG4**2 / 2, LOG4**2 / 2]),
        ({"statistic": "k3", "extent": "sequence-max"}, [1 - LOG2] * 2 + [LOG4 - 0.75] * 2),
        ({"statistic": "k1", "extent": "sequence-max"}, [LOG2, LOG2, 0, 0]),
    ],
)
def test_divergences_of_tokens_and_sequences(knobs: dict, values: list[float]):
    got = algo.divergence_of(PROX, BEHAV, SEQS, **knobs)
    assert_close(got, tensor(0.0, *values))


def test_far_sequences_and_tokens_are_rejected():
    kept, metrics = nodes.is_trusted(BEHAV, PROX, SEQS, statistic="k1", extent="token", lower=-1.0, upper=1.0)
    assert kept.tolist() == [False, True, True, False, True]
    assert metrics["rejected"].tolist() == [False, False, False, True, False]
    assert metrics["rejected_sequences"].tolist() == [False, True]
    kept, _ = nodes.is_trusted(BEHAV, PROX, SEQS, statistic="k3", extent="sequence-max", upper=0.5)
    assert kept.tolist() == [False, True, True, False, False]


def test_gates_of_the_event_this_token():
    """OpenRLHF's gates `tv` and `binary_kl`: of Bernoulli distributions, of a token or a sequence's mean."""
    seqs, behav, prox = Sequences.of([2, 1]), tensor(0.5, 0.2, 0.6).log(), tensor(0.4, 0.5, 0.6).log()
    kept, metrics = nodes.is_trusted(behav, prox, seqs, statistic="tv", extent="token", upper=0.2)
    assert kept.tolist() == [True, False, True]
    assert_close(metrics["divergence"], tensor(0.1, 0.3, 0.0))
    kept, _ = nodes.is_trusted(behav, prox, seqs, statistic="tv", extent="sequence-mean", upper=0.19)
    assert kept.tolist() == [False, False, True]
    kl = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in ((0.5, 0.4), (0.2, 0.5))]
    kept, metrics = nodes.is_trusted(behav, prox, seqs, statistic="binary_kl", extent="token", upper=0.1)
    assert kept.tolist() == [True, False, True]
    assert_close(metrics["divergence"], tensor(*kl, 0.0))


def test_m2po_drops_the_fewest_tokens():
    # Squares of the log-ratios: 0, 0.48, 0.48 and 1.92. Means of the smallest: 0, 0.24, 0.32 and 0.72.
    for limit, kept in ((0.3, 2), (0.33, 3), (0.73, 4), (1e-9, 1)):
        mask, metrics = nodes.m2po_mask(BEHAV, PROX, SEQS, max_second_moment=limit)
        assert mask.sum() == kept
        assert not mask[0]
        assert metrics["rejected"].sum() == 4 - kept


def test_weights_of_a_node_take_the_place_of_the_cap():
    out = Output(logprobs=PROX, entropy=torch.zeros(5))
    weights, advantages = tensor(0.0, 10.0, 0.0, 0.5, 1.0), torch.ones(5)
    loss, metrics = nodes.actor_train(out, BEHAV, PROX, advantages, SEQS, behav_weights=weights)
    assert_close(loss, -weights)
    assert "over_cap" not in metrics


@pytest.mark.parametrize(
    ("node", "knobs", "reads", "expected"),
    [
        (nodes.behav_weights, {"lower": 2.0}, (), "lower is 2.0 and upper is 2.0; lower must be less"),
        (nodes.behav_weights, {"upper": 0.0}, (), "upper is 0.0; it must be more than 0, or null"),
        (nodes.behav_weights, {"upper": None, "outside": "mask"}, (), "outside=mask has no effect"),
        (nodes.is_trusted, {"lower": 0.1}, (), "lower has no effect with statistic=k3"),
        (nodes.is_trusted, {"statistic": "k1"}, (), "statistic=k1 has both signs and needs lower"),
        (nodes.is_trusted, {"statistic": "k1", "lower": 1.0}, (), "lower must be less than upper"),
        (
            nodes.is_trusted,
            {"statistic": "tv", "upper": 1.0},
            (),
            "upper=1.0 has no effect with statistic=tv",
        ),
        (nodes.vespo_train, {}, ("behav_weights",), "list no node that returns behav_weights"),
        (nodes.m2po_mask, {"max_second_moment": 0.0}, (), "max_second_moment is 0.0; it must be more"),
        (nodes.actor_train, {"over_cap": "truncate"}, ("behav_weights",), "over_cap has no effect beside"),
        (nodes.actor_train, {"kl_importance": True}, (), "kl_importance has no effect while kl_coef is 0"),
        (
            nodes.actor_train,
            {"kl_importance": True, "kl_coef": 0.1, "kl_estimator": "k2"},
            ("ref_logprobs",),
            "kl_importance needs kl_estimator=k3",
        ),
    ],
)
def test_knobs_that_cannot_work_are_refused(node, knobs, reads, expected):
    assert expected in knob_problem(node, reads, **knobs)


LOGITS = tensor(0.3, -0.5, 1.1)
REF = torch.log_softmax(tensor(-0.2, 0.4, 0.1), -1)


def kl_gradient(of: str) -> torch.Tensor:
    """Return the gradient of an exact KL over three tokens with respect to the logits of theta."""
    logits = LOGITS.clone().requires_grad_()
    theta = torch.log_softmax(logits, -1)
    p, q = (theta, REF) if of == "theta || ref" else (REF, theta)
    (p.exp() * (p - q)).sum().backward()
    return logits.grad


def estimated_gradient(behav: torch.Tensor, estimator: str, **knobs) -> torch.Tensor:
    """Return the mean gradient of the loss's KL over all tokens that behav draws."""
    logits = LOGITS.clone().requires_grad_()
    theta = torch.log_softmax(logits, -1)
    out, zeros, seqs = Output(logprobs=theta, entropy=torch.zeros(3)), torch.zeros(3), Sequences.of([3])
    knobs |= {"kl_coef": 1.0, "kl_estimator": estimator}
    loss, _ = nodes.actor_train(out, behav, behav, zeros, seqs, REF, **knobs)
    (behav.exp() * loss).sum().backward()
    return logits.grad


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_unbiased_gradients_on_fresh_tokens(estimator: str):
    fresh = torch.log_softmax(LOGITS, -1)
    assert_close(estimated_gradient(fresh, estimator), kl_gradient("theta || ref"))


def test_k3_has_the_gradient_of_the_other_direction():
    fresh = torch.log_softmax(LOGITS, -1)
    assert_close(estimated_gradient(fresh, "k3"), kl_gradient("ref || theta"))


def test_an_importance_weighted_kl_is_unbiased_on_old_tokens():
    old = torch.log_softmax(tensor(1.0, 0.2, -0.3), -1)
    assert_close(estimated_gradient(old, "k3", kl_importance=True), kl_gradient("theta || ref"))


def test_the_forward_kl_over_all_tokens_is_exact_and_over_some_a_lower_bound():
    theta = torch.log_softmax(LOGITS, -1)
    exact = (REF.exp() * (REF - theta)).sum()
    # Two tokens and "the other" are all three tokens of this vocabulary.
    ids = torch.tensor([[2, 0]])
    out = Output(logprobs_of=lambda chosen: theta[chosen])
    loss, metrics = nodes.distill_train(out, ids, REF[ids])
    assert_close(loss, exact[None])
    assert_close(metrics["covered"], REF[ids].exp().sum(-1))
    assert 0 < algo.topk_divergence(theta[:1], REF[:1]) < exact
    equal = REF.clone().requires_grad_()
    algo.topk_divergence(equal[:2], REF[:2]).backward()
    assert_close(equal.grad, torch.zeros(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_generalised_jsd_is_that_of_gkd(beta: float):
    """Agarwal et al. 2023, equation 1, over a vocabulary of three; two tokens and the rest are all of it."""
    student = torch.log_softmax(LOGITS, -1)
    p, q = (x.double() for x in (student, REF))
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    ends = {0.0: (q.exp() * (q - p)).sum(), 1.0: (p.exp() * (p - q)).sum()}
    between = beta * (q.exp() * (q - m)).sum() + (1 - beta) * (p.exp() * (p - m)).sum()
    expected = ends.get(beta, between)
    ids = torch.tensor([[2, 0]])
    loss, _ = nodes.distill_train(
        Output(logprobs_of=lambda chosen: student[chosen]), ids, REF[ids], beta=beta
    )
    assert_close(loss, expected.float()[None])
    assert 0 < algo.topk_divergence(student[:1], REF[:1], beta) < expected
    assert_close(algo.topk_divergence(REF[:2], REF[:2], beta), tensor(0.0)[0], atol=1e-6, rtol=0)


def test_one_far_token_among_a_thousand_is_seen_by_every_statistic():
    """`recipes/mis.py` asks for a mean of k3 of 0.1 at most: the cap of `kl_k3` is one of losses."""
    seqs = Sequences.of([1000])
    behav, prox = torch.zeros(1000), torch.zeros(1000)
    prox[7] = 8.0
    kept, metrics = nodes.is_trusted(behav, prox, seqs, statistic="k3", extent="sequence-mean", upper=0.1)
    assert not kept.any()
    assert_close(metrics["divergence"][0], torch.tensor((math.exp(8) - 9) / 1000))
    far = algo.divergence_of(tensor(-30.0), tensor(0.0), Sequences.of([1]), "k3", "token")
    assert_close(far, tensor(29.0))
    far = algo.divergence_of(tensor(30.0), tensor(0.0), Sequences.of([1]), "k3", "token")
    assert_close(far, tensor(math.exp(20) - 21))
    assert algo.kl_k3(tensor(0.0, 0.0), tensor(-30.0, 8.0)).tolist() == [algo.MAX_KL] * 2


def test_measured_kl_is_not_capped():
    out = Output(logprobs=tensor(8.0).requires_grad_(), entropy=torch.zeros(1))
    _, metrics = nodes.actor_train(out, tensor(0.0), tensor(0.0), tensor(1.0), Sequences.of([1]))
    assert_close(metrics["kl"].detach(), tensor(math.exp(8) - 9))
