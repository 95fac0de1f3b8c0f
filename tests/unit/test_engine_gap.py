"""The difference between the engine's log-probs and the trainer's is measured, warned of and corrected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch_kit as kit
from torch.testing import assert_close

from hflow import Output, Sequences, nodes
from hflow.data.batches.batch import Batch, Column
from hflow.training.interface import TrainShard
from hflow.types import Unit

STEP = 5
BATCH = kit.make_batch(kit.LENGTHS)
MASK = np.asarray(BATCH.columns["loss_mask"].values)
NAMES = ("engine_gap", "engine_gap.max", "engine_kl", "engine_tokens")
OF_ALL = ("behav_gap", "behav_gap.max", "behav_kl")
READS = [kit.read(f"@{field}", Unit.TOKEN, field) for field in ("behav_logprobs", "versions")]
SFT = kit.call(lambda out: -out.logprobs, "token", READS, reduce="token-mean", epochs=2)
"""A body that does not use what the engine recorded, so that the gap changes nothing else."""


def trainer_logprobs(batch: Batch) -> np.ndarray:
    """Return the model's log-probs at the start of the step."""
    (result,) = kit.model().infer(kit.LOGPROBS, [batch])
    return np.asarray(result.columns["result"].values)


def recorded(gap: np.ndarray, versions: np.ndarray) -> Batch:
    """Return the batch with an engine's log-probs that are `gap` below the trainer's."""
    values = {"behav_logprobs": (trainer_logprobs(BATCH) - gap).astype(np.float32), "versions": versions}
    return BATCH.with_columns({name: Column(Unit.TOKEN, value) for name, value in values.items()})


def measured(
    call: Any, batch: Batch, rows: list[list[int]] | None = None, **changes: Any
) -> dict[str, float]:
    """Run a train step; return what it measured of the engine, by the last part of the name."""
    shard = TrainShard(tuple(batch.take(part) for part in rows or [list(range(len(batch)))]))
    metrics = kit.model(**changes).train(call, [shard], STEP)
    return {name: metrics[name] for name in (*NAMES, *OF_ALL) if name in metrics}


def differences(gap: np.ndarray) -> list[float]:
    return [float(np.abs(gap).mean()), float(np.abs(gap).max()), float((np.exp(gap) - 1 - gap).mean())]


def expected(gap: np.ndarray, of_all: np.ndarray | None = None) -> dict[str, float]:
    """Return what is measured of tokens with the step's version, and of all; None: they are the same."""
    same = dict(zip(NAMES, [*differences(gap), len(gap)], strict=True))
    return same | dict(zip(OF_ALL, differences(gap if of_all is None else of_all), strict=True))


def random_gap(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, BATCH.num_tokens)


NOW = np.where(MASK, STEP, -1)
MIXED = np.where(MASK, np.random.default_rng(1).integers(3, STEP + 1, BATCH.num_tokens), -1)
MINIBATCHES = [[0, 1, 4, 5, 6, 7], [2, 3], [8, 9, 10, 11]]


def tokens_of(rows: list[int]) -> np.ndarray:
    """Return which tokens are those of some sequences."""
    return np.repeat(np.isin(np.arange(len(BATCH)), rows), BATCH.lengths)


@pytest.mark.parametrize("max_tokens", [16384, 13], ids=["one micro-batch", "several"])
def test_tokens_of_the_steps_version_are_compared(max_tokens: int):
    gap = random_gap()
    got = measured(SFT, recorded(gap, MIXED), tokens_per_microbatch=max_tokens)
    assert got == pytest.approx(expected(gap[MASK & (MIXED == STEP)], gap[MASK]), rel=1e-4)


def test_only_passes_before_the_first_update_are_compared():
    gap = random_gap()
    got = measured(SFT, recorded(gap, NOW), MINIBATCHES)
    assert got == pytest.approx(expected(gap[MASK & tokens_of(MINIBATCHES[0])]), rel=1e-4)


def test_a_minibatch_without_learned_tokens_changes_nothing():
    gap, batch = random_gap(), recorded(random_gap(), NOW)
    nothing = Column(Unit.TOKEN, MASK & ~tokens_of(MINIBATCHES[0]))
    got = measured(SFT, batch.with_columns({"loss_mask": nothing}), MINIBATCHES)
    assert got == pytest.approx(expected(gap[MASK & tokens_of(MINIBATCHES[1])]), rel=1e-4)


def test_recomputed_log_probs_are_compared_in_every_minibatch():
    """Once each, though the step has two epochs."""
    gap = random_gap()
    prox = Column(Unit.TOKEN, trainer_logprobs(BATCH))
    call = kit.call(
        lambda out, prox_logprobs: (out.logprobs - prox_logprobs).square(),
        "token",
        [*READS, kit.read("prox_logprobs", Unit.TOKEN)],
        reduce="token-mean",
        prox="recompute",
        epochs=2,
    )
    got = measured(call, recorded(gap, MIXED).with_columns({"prox_logprobs": prox}), MINIBATCHES)
    assert got == pytest.approx(expected(gap[MASK & (MIXED == STEP)], gap[MASK]), rel=1e-4)


def test_a_batch_of_older_tokens_has_no_gap_of_the_engine():
    """It is absent, not 0, and the count says why."""
    gap = random_gap()
    got = measured(SFT, recorded(gap, np.where(MASK, STEP - 1, -1)))
    assert got.pop("engine_tokens") == 0
    assert got == pytest.approx(dict(zip(OF_ALL, differences(gap[MASK]), strict=True)), rel=1e-4)


def test_a_node_after_another_writer_of_its_model_is_not_compared():
    call = dataclasses.replace(SFT, is_first_writer=False)
    assert measured(call, recorded(random_gap(), NOW)) == {}


def test_nodes_that_do_not_read_the_engines_log_probs_have_no_gap():
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
    assert measured(call, recorded(random_gap(), NOW)) == {}


def test_a_masked_sequence_is_not_compared():
    gap = random_gap()
    call = dataclasses.replace(SFT, options={**SFT.options, "mask": "keep"})
    kept = np.repeat(np.asarray(BATCH.columns["keep"].values), BATCH.lengths)
    got = measured(call, recorded(gap, NOW))
    assert got == pytest.approx(expected(gap[MASK & kept]), rel=1e-4)


# Correction

TOKENS = 6


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a trainer and log-probs of an engine that differs, over a small vocabulary."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, generator=generator)
    engine = torch.log_softmax(logits + 0.4 * torch.randn(TOKENS, generator=generator), dim=0)
    return logits, engine


def expected_gradient(weights: torch.Tensor, behav: torch.Tensor, **knobs: Any) -> torch.Tensor:
    """Return the gradient of the loss over all tokens, each with the probability of being drawn."""
    logits = policies()[0].requires_grad_()
    theta = torch.log_softmax(logits, dim=0)
    advantages = torch.linspace(-1, 1, TOKENS)
    out = Output(logprobs=theta, entropy=theta.detach())
    loss, _ = nodes.actor_train(out, behav, theta.detach(), advantages, Sequences.of([TOKENS]), **knobs)
    (weights * loss).sum().backward()
    return logits.grad


def test_the_weight_corrects_a_synchronous_step_for_the_engine():
    """prox is theta at the step's start. Drawn by the engine, the tokens give the trainer's gradient."""
    logits, engine = policies()
    trainer = torch.log_softmax(logits, dim=0)
    wanted = expected_gradient(trainer.exp(), trainer)
    assert_close(expected_gradient(engine.exp(), engine, behav_weight_cap=None), wanted)
    uncorrected = expected_gradient(engine.exp(), trainer)  # as if the trainer had drawn them
    assert float((uncorrected - wanted).norm() / wanted.norm()) > 0.1


@pytest.mark.parametrize(("over_cap", "weight"), [("truncate", 1.1), ("mask", 0.0)])
def test_a_weight_above_the_cap_is_truncated_or_masked(over_cap: str, weight: float):
    logits, engine = policies()
    trainer = torch.log_softmax(logits, dim=0)
    ratio = (trainer - engine).exp()
    assert 0 < int((ratio > 1.1).sum()) < TOKENS
    weights = torch.where(ratio > 1.1, torch.tensor(weight), ratio)
    got = expected_gradient(engine.exp(), engine, behav_weight_cap=1.1, over_cap=over_cap)
    assert_close(got, expected_gradient(engine.exp() * weights, trainer))


@pytest.mark.parametrize(("over_cap", "weight"), [("truncate", 1.2), ("mask", 0.0)])
def test_gspo_corrects_whole_sequences(over_cap: str, weight: float):
    """Weights are geometric means: sqrt(1.5 * 1.5) = 1.5 is above the cap, sqrt(0.5 * 0.72) = 0.6 is not."""
    seqs = Sequences.of([2, 2])
    behav = torch.tensor([-1.0, -1.0, -2.0, -2.0])
    prox = behav + torch.tensor([1.5, 1.5, 0.5, 0.72]).log()
    out = Output(logprobs=prox, entropy=prox)
    loss, metrics = nodes.gspo_train(
        out, behav, prox, torch.tensor([1.0, -1.0]), seqs, behav_weight_cap=1.2, over_cap=over_cap
    )
    assert_close(loss, torch.tensor([-weight, 0.6]))
    assert metrics["over_cap"].tolist() == [True, False]
    whole, _ = nodes.gspo_train(out, behav, prox, torch.tensor([1.0, -1.0]), seqs, behav_weight_cap=None)
    assert_close(whole, torch.tensor([-1.5, math.sqrt(0.36)]))
