"""Routing replay: what engines record, and what trainers make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch_kit import (
    MIXED,
    REPLAY,
    SETTINGS,
    TOKEN_READS,
    call,
    logprobs,
    make_batch,
    model,
    ppo,
    weights,
    with_experts,
)

from hflow.base.errors import BackendError, ReturnError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.episodes.trajectories import append_messages, append_turn, prompt_trajectory
from hflow.models.expert_replay import ReplayedExperts, choose_experts, routers_of
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit
from hflow.types.routed_experts import RECORDED, ROUTED_EXPERTS, is_recorded, routing_format

FORM = routing_format(2, 2, 6)
INFER = call(logprobs, "token", [])
TRAIN = call(ppo, "token", TOKEN_READS, metrics=True, reduce="token-mean")


def replaying(node: NodeCall) -> NodeCall:
    return replace(node, reads=(*node.reads, REPLAY))


def mixed(**changes: Any) -> TorchModel:
    return model(architecture=MIXED, **changes)


def own_experts(backend: TorchModel, batch: Batch) -> np.ndarray:
    """Return the experts that the routers choose for a batch of one sequence."""
    chosen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda *of: chosen.append(of[2][2]))
        for router in routers_of(backend._model)
    ]
    backend.infer(INFER, [batch])
    for hook in hooks:
        hook.remove()
    return torch.cat(chosen, 1).to(torch.uint8).numpy()


def infer(backend: TorchModel, node: NodeCall, batch: Batch) -> np.ndarray:
    (result,) = backend.infer(node, [batch])
    return np.asarray(result.columns["result"].values)


def train(backend: TorchModel, node: NodeCall, batch: Batch) -> dict[str, float]:
    return backend.train(node, [TrainShard((batch,))], step=0)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=["kept", "recomputed"])
def test_the_own_choice_changes_nothing(options: dict[str, Any]) -> None:
    batch = make_batch([24])
    plain, replayed = mixed(**options), mixed(**options)
    own = with_experts(batch, own_experts(plain, batch))
    assert np.array_equal(infer(replayed, replaying(INFER), own), infer(plain, INFER, batch))
    metrics, other = train(plain, TRAIN, batch), train(replayed, replaying(TRAIN), own)
    assert other.pop("rerouted") == 0
    assert metrics == other
    for (name, one), two in zip(weights(plain).items(), weights(replayed).values(), strict=True):
        assert torch.equal(one, two), name


def test_a_layer_computes_with_the_experts_that_it_is_told() -> None:
    backend = mixed()
    layer: Any = backend._model.model.layers[2]
    router, experts = layer.mlp.gate, layer.mlp.experts
    torch.manual_seed(0)
    hidden, index = torch.randn(5, 32), torch.tensor([[4, 1], [0, 5], [2, 3], [3, 0], [255, 255]])
    rows = torch.cat((torch.zeros_like(index), index), 1).to(torch.uint8)
    num_tokens = torch.tensor([1, 3, 1, 1, 0])  # the second row is that of three tokens
    replayed = ReplayedExperts(rows, num_tokens)

    probabilities = linear(hidden, router.weight).softmax(-1)
    own = probabilities.topk(2).indices
    index[4] = own[4]
    expected = torch.zeros(5, 32)
    for token, chosen in enumerate(index.tolist()):
        total = sum(probabilities[token, e] for e in chosen)
        for e in chosen:
            gate, up = linear(hidden[token], experts.gate_up_proj[e]).chunk(2)
            result = linear(silu(gate) * up, experts.down_proj[e])
            expected[token] += probabilities[token, e] / total * result
    router.replayed = replayed
    found = layer.mlp(hidden[None])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found.square().sum(), router.weight)
    (by_hand,) = torch.autograd.grad(expected.square().sum(), router.weight)
    assert by_hand.abs().sum() > 0
    torch.testing.assert_close(gradient, by_hand, atol=1e-4, rtol=1e-4)
    differs = [set(own[t].tolist()) != set(index[t].tolist()) for t in range(5)]
    num_rerouted = sum(n for n, other in zip(num_tokens.tolist(), differs, strict=True) if other)
    assert replayed.counts().tolist() == [num_rerouted, 6]
    assert num_rerouted > 0


def test_experts_keep_the_order_of_the_engine() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.4, 0.3]] * 3)
    rows = torch.tensor([[2, 3], [3, 2], [0, 1]], dtype=torch.uint8)
    index = choose_experts(probabilities, 2, ReplayedExperts(rows, torch.ones(3).long()), 0)
    assert index.tolist() == rows.tolist()


def test_recomputed_layers_and_small_microbatches_replay_the_same() -> None:
    batch = make_batch([9, 14, 7, 20])
    batch = with_experts(batch)
    found = []
    for options in ({}, {"activation_checkpointing": True}, {"tokens_per_microbatch": 10}):
        backend = mixed(**options)
        before = infer(backend, replaying(INFER), batch)
        found.append((before, train(backend, replaying(TRAIN), batch), weights(backend)))
    (before, metrics, after), *others = found
    assert metrics["rerouted"] > 0.5
    assert not np.allclose(before, infer(mixed(), INFER, batch), atol=1e-2)
    for other_before, other_metrics, other_after in others:
        np.testing.assert_allclose(before, other_before, atol=1e-5)
        assert metrics == pytest.approx(other_metrics, abs=1e-5)
        for name, weight in after.items():
            torch.testing.assert_close(weight, other_after[name], atol=1e-5, rtol=1e-4)


def test_prompts_are_shared_as_far_as_their_experts_are_equal() -> None:
    batch = make_batch([12, 12])
    ids = np.asarray(batch.columns["input_ids"].values).copy()
    ids[12:20] = ids[:8]
    batch = batch.with_columns({"input_ids": Column(Unit.TOKEN, ids)})
    rows = np.asarray(with_experts(batch).columns["routed_experts"].values).copy()
    rows[12:20] = rows[:8]
    rows[17] = 255
    batch = with_experts(batch, rows)
    whole, part = share_prefixes(batch), share_prefixes(batch, ("input_ids", "routed_experts"))
    assert whole is not None
    assert part is not None
    assert (len(whole.token_of_row), len(part.token_of_row)) == (16, 19)
    shared, apart = mixed(), mixed()
    alone = replace(batch, groups=np.arange(2))
    np.testing.assert_allclose(
        infer(shared, replaying(INFER), batch), infer(apart, replaying(INFER), alone), atol=1e-5
    )


def test_packed_rows_of_recorded_and_other_tokens() -> None:
    rows = RECORDED.pack((bytes([1, 2, 3, 4]), bytes([5, 0, 5, 0])), 3, FORM)
    assert rows.tolist() == [[1, 2, 3, 4], [5, 0, 5, 0], [255] * 4]
    assert is_recorded(rows).tolist() == [True, True, False]
    large = routing_format(2, 2, 300)
    assert (large.dtype, large.num_bytes) == ("int16", 8)
    rows = RECORDED.pack((np.array([256, 299, 0, 1], np.int16).tobytes(),), 2, large)
    assert rows.tolist() == [[256, 299, 0, 1], [-1] * 4]
    assert is_recorded(rows).tolist() == [True, False]
    with pytest.raises(ReturnError, match="has 3 bytes for 1 tokens, not 4 each"):
        RECORDED.pack((b"abc",), 2, FORM)


def test_a_later_pass_adds_what_an_earlier_one_did_not_record() -> None:
    first, later = (b"a", b"b"), (b"x", b"y", b"z")
    turn = append_turn(
        prompt_trajectory([4, 5], ()),
        GenerationResult((6,), (-1.0,), (0,), "stop", {ROUTED_EXPERTS: first}),
        "",
    )
    assert turn.recorded == {ROUTED_EXPERTS: first}
    added = append_messages(turn, [7])
    assert added.recorded == {ROUTED_EXPERTS: first}
    again = append_turn(
        added, GenerationResult((8,), (-1.0,), (1,), "stop", {ROUTED_EXPERTS: (*later, b"w")}), ""
    )
    assert again.recorded == {ROUTED_EXPERTS: (b"a", b"b", b"z", b"w")}
    with pytest.raises(ValueError, match="routed_experts has 6 entries"):
        replace(again, recorded={ROUTED_EXPERTS: (b"a",) * 6})


# ------------------------------------------------------------------------------------------ engines
PARAMS = SamplingParams(max_tokens=12, seed=5, record=(ROUTED_EXPERTS,))
PROMPT = [3, 9, 30, 7, 7, 1]


def experts(result: GenerationResult) -> tuple[bytes, ...]:
    return result.recorded[ROUTED_EXPERTS]


def engine(dtype: str = "fp32") -> EmbeddedEngine:
    return EmbeddedEngine(replace(SETTINGS, architecture=MIXED, dtype=dtype))


def finish(of: EmbeddedEngine) -> dict[int, GenerationResult]:
    results: dict[int, GenerationResult] = {}
    while of.num_unfinished:
        results.update(of.step())
    return results


def test_members_of_a_group_share_the_record_of_their_prompt() -> None:
    subject = engine()
    for number in range(3):
        subject.add(number, PROMPT, replace(PARAMS, seed=number, record=PARAMS.record if number < 2 else ()))
    results = finish(subject)
    assert results[2].recorded == {}
    assert all(len(experts(results[number])) == len(PROMPT) + 11 for number in (0, 1))
    assert all(one is two for one, two in zip(experts(results[0])[:6], experts(results[1])[:6], strict=True))


def test_an_engine_records_what_a_whole_forward_pass_chooses() -> None:
    subject, trainer = engine(), mixed()
    prompts = [PROMPT, PROMPT, [5], list(range(20))]
    for number, prompt in enumerate(prompts[:3]):
        subject.add(number, prompt, replace(PARAMS, seed=number, max_tokens=4 + number))
    subject.step()
    subject.add(3, prompts[3], PARAMS)  # enters while others decode
    for number, result in finish(subject).items():
        ids = np.array([*prompts[number], *result.ids])
        columns = {"input_ids": Column(Unit.TOKEN, ids), "loss_mask": Column(Unit.TOKEN, ids >= 0)}
        batch = Batch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(ids)]), columns)
        rows = RECORDED.pack(experts(result), len(ids), FORM)
        assert rows[:-1].tolist() == own_experts(trainer, batch)[:-1].tolist()
        assert is_recorded(rows).tolist() == [True] * (len(ids) - 1) + [False]


@torch.no_grad()
def test_new_weights_do_not_change_what_older_ones_chose() -> None:
    subject, plain = engine(), engine()
    subject.add(0, PROMPT, PARAMS)
    plain.add(0, PROMPT, PARAMS)
    for _ in range(5):
        subject.step()
    for router in routers_of(subject._module):
        router.weight.copy_(-router.weight)
    subject.set_version(1)
    found, before = finish(subject)[0], finish(plain)[0]
    num_old = len(PROMPT) + 4  # the last of five drawn tokens was computed by the new weights
    assert found.versions == (0,) * 5 + (1,) * 7
    assert experts(found)[:num_old] == experts(before)[:num_old]
    assert len(experts(found)) == len(PROMPT) + 11
    assert experts(found)[num_old:] != experts(before)[num_old:]


def test_an_interrupted_request_returns_what_it_has() -> None:
    subject = engine()
    subject.add(0, PROMPT, PARAMS)
    assert subject.interrupt()[0][1].recorded == {}
    subject.add(0, PROMPT, PARAMS)
    for _ in range(4):
        subject.step()
    ((_, part),) = subject.interrupt()
    assert (len(part.ids), len(experts(part))) == (4, len(PROMPT) + 3)
    subject.add(1, [*PROMPT, *part.ids], replace(PARAMS, max_tokens=8, num_resumed=4))
    rest = finish(subject)[1]
    assert experts(rest)[: len(experts(part))] == experts(part)
    assert len(experts(rest)) == len(PROMPT) + 11


def test_a_dense_model_has_nothing_to_record() -> None:
    with pytest.raises(BackendError, match="does not record routed_experts of its model"):
        EmbeddedEngine(SETTINGS).add(0, PROMPT, PARAMS)


def sampled(results: Sequence[GenerationResult]) -> Batch:
    """Return what an engine drew as a batch."""
    lengths = np.array([len(PROMPT) + len(result.ids) for result in results])
    columns = {
        "input_ids": [[*PROMPT, *result.ids] for result in results],
        "loss_mask": [[False] * len(PROMPT) + [True] * len(result.ids) for result in results],
        "behav": [[0.0] * len(PROMPT) + list(result.logprobs) for result in results],
    }
    packed = {name: Column(Unit.TOKEN, np.concatenate(values)) for name, values in columns.items()}
    rows = [RECORDED.pack(experts(r), length, FORM) for r, length in zip(results, lengths, strict=True)]
    packed[ROUTED_EXPERTS] = Column(Unit.TOKEN, np.concatenate(rows))
    return Batch(np.arange(len(results)), np.zeros(len(results), np.int64), lengths, packed)


def test_the_trainer_agrees_better_with_an_engine_of_other_arithmetic() -> None:
    subject = engine("bf16")
    for number in range(32):
        subject.add(number, PROMPT, replace(PARAMS, seed=number))
    results = finish(subject)
    batch = sampled([results[number] for number in range(32)])
    behav, mask = (np.asarray(batch.columns[name].values) for name in ("behav", "loss_mask"))
    gaps = [np.abs(infer(mixed(), node, batch) - behav)[mask].mean() for node in (INFER, replaying(INFER))]
    assert gaps[1] < 0.9 * gaps[0]
