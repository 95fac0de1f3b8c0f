"""The balance of a mixture's experts: its loss, gradients and metrics, and biases that follow the load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from late_megatron import megatron
from torch import Tensor

from hflow.config.schema import BalanceConfig, OptimConfig
from hflow.data.batches.batch import Batch, Column
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.models.expert_balance import ExpertBalance
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.architectures import ROUTERS
from hflow.shapes.model_shape import SCORE_BIAS
from hflow.training.interface import TrainShard
from hflow.types import Unit
from hflow.weights.incoming import IncomingWeights
from tests.kits import family_kit, torch_kit
from tests.kits.torch_kit import call, make_batch, model, weights

SFT = call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
DEVICE = torch.device("cpu")


def formula(logits: Tensor, per_token: int, score: str) -> Tensor:
    """The loss of a sequence, term by term: equations 17 to 20 of DeepSeek-V3 without alpha."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    num_tokens, num_experts = scores.shape
    loss = torch.zeros(())
    for expert in range(num_experts):
        top = [expert in row.topk(per_token).indices.tolist() for row in scores]
        f = num_experts / (per_token * num_tokens) * sum(top)
        p = sum(row[expert] / row.sum() for row in scores) / num_tokens
        loss = loss + f * p
    return loss


def test_the_formula_of_a_layer_whose_answer_is_known() -> None:
    """Two of three tokens choose the first of two experts: f = (4/3, 2/3), P = (1/2, 1/2)."""
    logits = torch.tensor([[3.0, -1.0], [1.0, 0.0], [0.0, 5.0]])
    p = torch.tensor([1 / (1 + np.exp(-4)), 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(5))])
    wanted = (4 * p.mean() + 2 * (1 - p).mean()) / 3
    assert float(formula(logits, 1, "softmax")) == pytest.approx(float(wanted))
    assert float(formula(torch.eye(4) * 9, 1, "sigmoid")) == pytest.approx(1.0)  # the same load for all


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_loss_and_gradient_are_those_of_the_formula(score: str, over: Any) -> None:
    """For two sequences that train and one that does not, chosen by biased scores."""
    torch.manual_seed(0)
    config = BalanceConfig(coefficient=0.5, over=over)
    balance = ExpertBalance(config, 1, 5, 2, DEVICE)
    lengths, shares = np.array([4, 3, 2]), np.array([0.5, 0.0, 0.5])
    batch = Batch(np.arange(3), np.arange(3), lengths, {})
    logits, weights = torch.randn(9, 5, requires_grad=True), torch.randn(9, 2, requires_grad=True)
    index = (logits + torch.randn(5)).topk(2).indices
    counted = None
    if balance.counts_first:
        tokens = balance.tokens(batch, None, shares)
        assert tokens.balance(0, weights, logits, index, score) is weights
        counted = balance.total([tokens])
    tokens = balance.tokens(batch, None, shares, counted)
    passed = tokens.balance(0, weights, logits, index, score)
    (passed * 2).sum().backward()
    assert torch.equal(passed, weights)
    assert weights.grad is not None
    assert torch.equal(weights.grad, torch.full((9, 2), 2.0))
    trained = [logits[:4], logits[7:]]
    parts = [torch.cat(trained)] if over == "batch" else trained
    wanted = sum(formula(part, 2, score) for part in parts) / len(parts)
    (gradient,) = torch.autograd.grad(0.5 * wanted, logits)
    torch.testing.assert_close(logits.grad, gradient)
    total = balance.total([tokens])
    loss, largest = balance.figures(total)
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    chosen = torch.bincount(torch.cat([index[:4], index[7:]]).flatten(), minlength=5)
    assert torch.equal(total[0, :5], chosen.double())
    assert float(largest) == pytest.approx(float(chosen.max() / (12 / 5)))


def test_biases_move_by_the_sign_of_the_difference_from_the_mean_load() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    balance = ExpertBalance(BalanceConfig(bias_rate=0.25), 1, 4, 2, DEVICE, biases={0: bias})
    balance.move_biases(torch.tensor([[6.0, 2.0, 3.0, 1.0, 0, 0, 0, 0, 0]]).double())
    assert bias.tolist() == [0.25, 0.25, -0.5, 0.25]


def shared(batch: Batch) -> Batch:
    """The batch with equal beginnings of the two members of each group."""
    ids, offsets = np.array(batch.columns["input_ids"].values), batch.offsets
    for first in range(0, len(batch), 2):
        length = min(batch.lengths[first : first + 2]) // 2
        ids[offsets[first + 1] :][:length] = ids[offsets[first] :][:length]
    return batch.with_columns({"input_ids": Column(Unit.TOKEN, ids)})


def megatron_model(**changes: Any) -> Any:
    """Return a model of the megatron backend in this process."""
    settings = replace(torch_kit.SETTINGS, **changes)
    return megatron("backend").MegatronModel(settings, RankPosition())


@pytest.fixture
def same_world() -> Iterator[None]:
    """Leave torch.distributed as it was found: megatron makes a group of this process."""
    had_world = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_world:
        dist.destroy_process_group()


def mixed(**changes: Any) -> Any:
    return model(architecture=torch_kit.MIXED, **changes)


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_no_result_depends_on_micro_batches_or_recomputation(over: Any) -> None:
    batch = shared(make_batch([10, 14, 8, 8, 16, 9, 12, 7]))
    mask = np.array(batch.columns["loss_mask"].values)
    mask[batch.offsets[2] : batch.offsets[3]] = False
    shard = TrainShard((batch.with_columns({"loss_mask": Column(Unit.TOKEN, mask)}),))
    config = BalanceConfig(coefficient=0.5, over=over)
    whole, plain = mixed(balance=config), mixed()
    wanted, without = whole.train(SFT, [shard], 0), plain.train(SFT, [shard], 0)
    assert wanted["loss"] == without["loss"], "the metric is the recipe's loss"
    assert wanted["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-2)
    assert wanted["balance_loss"] > 1
    assert not {"balance_loss", "max_load"} & without.keys()
    for changes in ({"tokens_per_microbatch": 1}, {"activation_checkpointing": True}):
        other = mixed(balance=config, **changes)
        metrics = other.train(SFT, [shard], 0)
        for name in ("grad_norm", "balance_loss", "max_load"):
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-5), name
        for (name, one), two in zip(weights(whole).items(), weights(other).values(), strict=True):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("family", [name for name in ROUTERS if name in family_kit.ARCHITECTURES])
def test_the_gradient_of_a_model_is_that_of_the_formula_in_every_layer(family: str) -> None:
    settings = {"architecture": family_kit.architecture(family), "balance": BalanceConfig(coefficient=0.5)}
    backend = model(**settings)
    family_kit.vary(backend._model)
    plain, kind = family_kit.plain(backend._model), ROUTERS[family]
    lengths = [9, 13, 6]
    batch = make_batch(lengths)
    routed: list[tuple[Tensor, int]] = []
    routers = [router for router in plain.modules() if type(router).__name__ == kind.module]
    for router in routers:
        router.register_forward_hook(lambda _, __, out: routed.append((out[0], out[1].shape[-1])))
    total = torch.zeros(())
    for i, length in enumerate(lengths):
        first = int(batch.offsets[i])
        x = torch.tensor(batch.columns["input_ids"].values[first : first + length])[None]
        found = plain(input_ids=x).logits[0, :-1].log_softmax(-1).gather(1, x[0, 1:, None])[:, 0]
        mask = torch.from_numpy(batch.columns["loss_mask"].values[first + 1 : first + length])
        total = total - found[mask].sum() / int(batch.columns["loss_mask"].values.sum())
    for logits, per_token in routed:
        total = total + 0.5 * formula(logits, per_token, kind.score) / len(lengths)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    metrics = backend.train(SFT, [TrainShard((batch,))], 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert len(routers) > 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [model, megatron_model])
@pytest.mark.usefixtures("same_world")
def test_biases_are_moved_saved_and_sent_as_they_are(make: Any, dtype: Any, tmp_path: Path) -> None:
    """Also in bf16, in which a step of 0.001 would be lost."""
    architecture = family_kit.architecture("glm4_moe")
    backend = make(architecture=architecture, dtype=dtype, balance=BalanceConfig(bias_rate=1e-3))
    shard = TrainShard((make_batch([9, 13, 6, 8]),))
    for step in range(3):
        assert backend.train(SFT, [shard], step)["max_load"] > 1
    found = {name: x.clone() for name, x in backend.weights() if name.endswith(SCORE_BIAS)}
    assert len(found) == 3
    assert all(bias.abs().max() > 2.9e-3 and bias.dtype == torch.float32 for bias in found.values())
    backend.save(str(tmp_path))()
    again = model(path=str(tmp_path), architecture=None, dtype=dtype)
    engine = EmbeddedEngine(ModelSettings(name="actor", architecture=architecture, seed=9, dtype=dtype))
    engine.load_weights([IncomingWeights.of_tensors(backend.weights)], 1)
    for other in (again._model, engine._module):
        assert all(map(torch.equal, found.values(), biases(other)))
    for block in backend.blocks():
        if block.tensor.endswith(SCORE_BIAS):
            block.values.add_(1)  # as update nodes do
    assert all(torch.equal(x, found[name] + 1) for name, x in backend.weights() if name in found)


def biases(module: Any) -> list[Tensor]:
    return [x for name, x in module.named_buffers() if name.endswith("e_score_correction_bias")]


def test_a_skipped_update_leaves_the_biases() -> None:
    optim = replace(torch_kit.SETTINGS.optim, on_nonfinite="skip")
    assert isinstance(optim, OptimConfig)
    config = BalanceConfig(bias_rate=1e-3)
    backend = model(architecture=family_kit.architecture("glm4_moe"), optim=optim, balance=config)
    infinite = call(lambda out: out.logprobs * float("inf"), "token", [], reduce="token-mean")
    metrics = backend.train(infinite, [TrainShard((make_batch([9, 13]),))], 0)
    assert metrics["skipped_updates"] == 1
    assert not any(bias.any() for bias in biases(backend._model))
