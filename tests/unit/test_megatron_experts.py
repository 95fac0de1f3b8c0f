"""The router and the experts of megatron's layers, worked out by hand and against a loop."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch_kit as kit
from late_megatron import megatron
from torch.nn.functional import silu

from hflow.models.expert_replay import ReplayedExperts
from hflow.models.settings import RankPosition
from hflow.shapes.model_shape import Experts, ModelShape
from hflow.training.megatron.supported_models import Routing

if TYPE_CHECKING:
    from hflow.training.megatron.experts import GroupedExperts, Router


def router(per_token: int, normalizes: bool, has_bias: bool = False, **routing: Any) -> Router:
    """Return a router whose logits are log 1, log 3, log 4 for the hidden state (1, 0)."""
    config = SimpleNamespace(hidden_size=2, params_dtype=torch.float32, sequence_parallel=False)
    experts = Experts(3, per_token, 4, has_router_bias=has_bias)
    model = ModelShape("qwen3_moe", 1, 2, 4, 1, 1, 2, 8, is_tied=False, experts=experts)
    how = Routing(**{"score": "softmax", "normalizes": normalizes} | routing)
    made = megatron("experts").Router(model, how, config=config)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 3.0, 4.0], [0.0, 0.0, 0.0]]).T)
        made.weight[:, 0].log_()
    return made


@pytest.mark.parametrize(
    ("per_token", "normalizes", "wanted"),
    [
        (2, False, [0, 3 / 8, 4 / 8]),
        (2, True, [0, 3 / 7, 4 / 7]),
        (1, False, [0, 0, 4 / 8]),
        (1, True, [0, 0, 1]),
    ],
)
def test_weights_of_a_tokens_experts(per_token, normalizes, wanted):
    weights, is_chosen = router(per_token, normalizes)(torch.tensor([[[1.0, 0.0]]]))
    torch.testing.assert_close(weights, torch.tensor([wanted], dtype=torch.float32))
    assert is_chosen.tolist() == [[weight > 0 for weight in wanted]]


def test_a_bias_changes_what_is_chosen_and_no_weight():
    """Sigmoids of log n are n / (n + 1). The bias lifts the first expert over the second."""
    made = router(2, True, has_bias=True, score="sigmoid", scaling=3.0)
    with torch.no_grad():
        made.score_bias.copy_(torch.tensor([0.3, 0.0, 0.0]))
    weights, _ = made(torch.tensor([[[1.0, 0.0]]]))
    torch.testing.assert_close(weights, 3 * torch.tensor([[1 / 2, 0, 4 / 5]]) / (1 / 2 + 4 / 5))


@pytest.mark.parametrize(("best", "kept"), [(1, slice(2, 4)), (2, slice(4, 6))])
def test_experts_are_chosen_in_the_best_groups(best, kept):
    """One of three groups of two experts is kept, by its best score or by the sum of both."""
    scores = torch.tensor([[3.0, 2.0, 6.0, 1.0, 4.0, 3.5]])
    ranks = router(2, False, num_groups=3, num_kept_groups=1, best_of_group=best)._ranks(scores)
    assert torch.equal(ranks[:, kept], scores[:, kept])
    assert ranks.isfinite().sum() == 2


def test_weights_of_experts_that_the_engine_chose():
    """The first token has the engine's choice, the last of two layers; the router chooses for the second."""
    made = router(2, True)
    made._layers = [0, 3]
    made.set_layer_number(4)
    made.replayed = replayed = ReplayedExperts(
        torch.tensor([[2, 2, 1, 0], [255] * 4], dtype=torch.uint8), torch.tensor([5, 0])
    )
    hidden = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    weights, is_chosen = made(hidden)
    wanted = torch.tensor([[1 / 4, 3 / 4, 0], [0, 3 / 7, 4 / 7]])
    torch.testing.assert_close(weights, wanted)
    assert is_chosen.tolist() == (wanted > 0).tolist()
    assert replayed.counts().tolist() == [5, 5]
    torch.testing.assert_close(made(hidden)[0], wanted[[1, 1]])  # a choice is for one pass


def experts(num: int, hidden: int, rows: int, dtype: torch.dtype) -> GroupedExperts:
    config = SimpleNamespace(hidden_size=hidden, moe_ffn_hidden_size=2 * rows, params_dtype=dtype)
    two, one = (SimpleNamespace(size=lambda size=size: size) for size in (2, 1))
    groups: Any = SimpleNamespace(expt_tp=two, ep=one)
    made = megatron("experts").GroupedExperts(num, config, groups)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 5])  # 5 rows are not aligned, so there is no grouped product
@pytest.mark.parametrize("per_expert", [[2, 0, 3], [0, 0, 0]])
def test_experts_compute_with_their_own_rows(dtype, rows, per_expert):
    """Of two tensor ranks each has half of the rows of every expert."""
    made = experts(3, 16, rows, dtype)
    assert made.gate_up.shape == (3, 2 * rows, 16)
    x = torch.randn(sum(per_expert), 16, dtype=dtype, requires_grad=True)
    weights = torch.rand(len(x), dtype=dtype, requires_grad=True)
    out, bias = made(x, torch.tensor(per_expert), weights)
    assert bias is None
    wanted = []
    for expert, (part, scale) in enumerate(zip(x.split(per_expert), weights.split(per_expert), strict=True)):
        gate, up = (part @ made.gate_up[expert].T).chunk(2, dim=-1)
        wanted.append((silu(gate) * up * scale[:, None]) @ made.down[expert].T)
    part = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out, torch.cat(wanted), atol=part, rtol=part)
    got, expected = ([*made.parameters(), x, weights], [out, torch.cat(wanted)])
    if len(x) and dtype == torch.float32:
        factor = torch.randn_like(out)
        found, known = (torch.autograd.grad((one * factor).sum(), got, retain_graph=True) for one in expected)
        for one, other in zip(found, known, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    (out * torch.randn_like(out)).sum().backward()  # without rows too, as the exchange of tokens needs it
    assert x.grad is not None


def test_a_gated_activation_has_the_bits_of_torchs_own():
    torch.manual_seed(0)
    x, factor = torch.randn(5, 12, requires_grad=True), torch.randn(5, 6)
    gate, up = x.chunk(2, dim=-1)
    results = [megatron("layers").gated_silu(x, None), silu(gate) * up]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad((one * factor).sum(), x)[0] for one in results))
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        megatron("layers").gated_silu, (x.detach().double().requires_grad_(), weights)
    )


def test_one_process_replays_as_the_torch_backend_does():
    batch = kit.with_experts(kit.make_batch(kit.LENGTHS))
    settings = dataclasses.replace(kit.SETTINGS, architecture=kit.MIXED)
    wanted = kit.model(architecture=kit.MIXED).train(kit.REPLAYED, kit.whole(batch), 5)
    had_world = dist.is_initialized()
    try:
        found = (
            megatron("backend")
            .MegatronModel(settings, RankPosition())
            .train(kit.REPLAYED, kit.whole(batch), 5)
        )
    finally:
        if not had_world:
            dist.destroy_process_group()
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert wanted["rerouted"] > 0.5
