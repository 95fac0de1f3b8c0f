"""Training by megatron equals the torch backend in one process: metrics of two steps, and weights."""

from __future__ import annotations

from pathlib import Path

import megatron_twins as twins
import pytest
import ranks
import torch
from safetensors.torch import load_file

from hflow.models.expert_tensors import file_tensors
from hflow.training.optimizers.adamw.optimizer import GroupAdamW

pytestmark = (
    pytest.mark.long
)  # four processes compute for minutes; `test_twin.py` trains by megatron in every run
FP32 = [name for name, twin in twins.TWINS.items() if twin.dtype == "fp32"]
BF16 = [name for name, twin in twins.TWINS.items() if twin.dtype == "bf16"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twins")
    twins.save_checkpoint(path / "checkpoint")
    ranks.start(twins.train, (str(path),), 4)
    return path


def results(directory: Path, name: str) -> list[tuple[list[dict], dict]]:
    """Metrics and weights of each rank."""
    twin = twins.TWINS[name]
    num_ranks = twin.num_ranks
    return [torch.load(directory / f"{name}.{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", FP32)
def test_equals_one_process(directory, name):
    twin = twins.TWINS[name]
    wanted = twins.expected(twin.node, twin.dtype, directory / "checkpoint")
    for rank, (metrics, weights) in enumerate(results(directory, name)):
        if rank in twin.heads:
            for got, expected in zip(metrics, wanted.metrics, strict=True):
                assert twins.comparable(got) == pytest.approx(expected, rel=2e-5, abs=1e-6)
        else:
            assert metrics == [{}] * len(twins.STEPS)
        assert weights.keys() == wanted.weights.keys()
        for key, tensor in wanted.weights.items():
            torch.testing.assert_close(weights[key], tensor, atol=5e-6, rtol=1e-5)


def test_weights_move(directory):
    """By much more than the tolerance of the comparisons."""
    for node in {twin.node for twin in twins.TWINS.values()}:
        wanted = twins.expected(node, "fp32", directory / "checkpoint").weights
        start = twins.initial_weights(node, directory / "checkpoint")
        moves = [(wanted[name] - tensor).abs().max() for name, tensor in start.items()]
        assert sorted(moves)[len(moves) // 2] > 1e-3


def test_group_adamw_is_adamw():
    """It updates as torch's AdamW does, with one step count per group and moments of updated weights only."""
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5), torch.randn(2)]
    mine, wanted = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    optimizers = [
        kind([{"params": w[:1], "weight_decay": 0.3}, {"params": w[1:], "weight_decay": 0.0}], **options)
        for kind, w in ((GroupAdamW, mine), (torch.optim.AdamW, wanted))
    ]
    for _ in range(4):
        for one, other in zip(mine[:2], wanted[:2], strict=True):
            one.grad = other.grad = torch.randn_like(one)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    state = optimizers[0].state_dict()
    assert [group["step"] for group in state["param_groups"]] == [4, 4]
    assert {number: set(moments) for number, moments in state["state"].items()} == {
        0: {"exp_avg", "exp_avg_sq"},
        1: {"exp_avg", "exp_avg_sq"},
    }
    again = GroupAdamW([{"params": mine[:1]}, {"params": mine[1:]}])
    again.load_state_dict(state)
    assert again.param_groups[1]["step"] == 4
    assert torch.equal(again.state[mine[1]]["exp_avg"], optimizers[0].state[mine[1]]["exp_avg"])


@pytest.mark.parametrize("name", BF16)
def test_bf16_equals_one_process_up_to_its_precision(directory, name):
    twin = twins.TWINS[name]
    wanted = twins.expected(twin.node, "bf16", directory / "checkpoint")
    start = twins.initial_weights(twin.node, directory / "checkpoint")
    for rank, (metrics, weights) in enumerate(results(directory, name)):
        if rank in twin.heads:
            assert metrics[-1]["loss"] == pytest.approx(wanted.metrics[-1]["loss"], abs=5e-3)
            assert metrics[0]["grad_norm"] == pytest.approx(wanted.metrics[0]["grad_norm"], rel=0.05)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        there, here = (
            torch.cat([(x[n].float() - start[n]).flatten() for n in start]) for x in (weights, wanted.weights)
        )
        assert torch.cosine_similarity(there, here, dim=0) > 0.95


@pytest.mark.parametrize("name", BF16)
def test_bf16_models_are_saved_in_bf16(directory, name):
    saved = load_file(directory / f"{name} saved" / "model.safetensors")
    for _, weights in results(directory, name):
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        assert all(
            torch.equal(saved[key], tensor) for key, tensor in file_tensors("qwen3_moe", weights).items()
        )


def test_a_checkpoint_goes_through_bf16_with_one_rounding(directory):
    start = load_file(directory / "checkpoint" / "model.safetensors")
    saved = load_file(directory / "untouched" / "model.safetensors")
    assert saved.keys() == start.keys()
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in start.items())


def test_one_process_accepts_all_shards(directory):
    wanted = twins.expected("ppo", "fp32", directory / "checkpoint")
    metrics, weights = torch.load(directory / "alone.pt", weights_only=False)
    assert twins.comparable(metrics[-1]) == pytest.approx(wanted.metrics[-1], rel=2e-5, abs=1e-6)
    for key, tensor in wanted.weights.items():
        torch.testing.assert_close(weights[key], tensor, atol=5e-6, rtol=1e-5)


def test_minibatches_without_learned_tokens_are_skipped(directory):
    """After two train steps of four updates, the step count is 8 where fused kernels keep it."""
    metrics, num_updates, is_same = torch.load(directory / "nothing.pt", weights_only=False)
    assert metrics == {"num_tokens": 0.0, "computed_tokens": 0.0}
    assert num_updates == 8
    assert is_same


def test_every_rank_names_the_input_that_is_not_finite(directory):
    for rank in (0, 1):
        message = (directory / f"nan.{rank}").read_text()
        assert "the gradient's norm is nan at update 1 of step 8" in message
        assert "its input 'advantages' is not finite in sample" in message


def test_every_rank_skips_the_update_that_is_not_finite(directory):
    (metrics, weights), (others, same) = (
        torch.load(directory / f"skipped.{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert metrics == others
    assert metrics["skipped_updates"] >= 1
    for name, tensor in weights.items():
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, same[name])
