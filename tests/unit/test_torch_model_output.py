"""Packed outputs equal those of the HF model on each sequence alone, entry by entry."""

import numpy as np
import pytest
import torch
import torch_kit as kit
from transformers import AutoConfig, AutoModelForCausalLM

from hflow.base.errors import BackendError, RunError
from hflow.models.packed_attention import PackedLayout, packed_attention
from hflow.training.fsdp.backend import TorchModel
from hflow.types import Unit

LENGTHS = [5, 9, 3, 12, 2, 6]


def reference(backend: TorchModel) -> torch.nn.Module:
    """The plain HF model with the same weights."""
    config = AutoConfig.for_model(**backend.settings.architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(kit.weights(backend), strict=False)
    model.tie_weights()
    return model.eval()


def sequences(batch):
    """Token ids and mask of each sequence."""
    ids, mask = batch.columns["input_ids"].values, batch.columns["loss_mask"].values
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        yield torch.tensor(ids[start:end]), torch.tensor(mask[start:end])


@torch.no_grad()
def expected(backend: TorchModel, batch, per_sequence) -> np.ndarray:
    """`per_sequence(log-probs [L, V], ids)` of each sequence alone, 0 where nothing is learned."""
    model, parts = reference(backend), []
    for ids, mask in sequences(batch):
        logprobs = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
        logprobs = torch.cat([torch.zeros(1, kit.VOCAB), logprobs[:-1]])
        found = per_sequence(logprobs, ids)
        parts.append(found * mask.view(-1, *[1] * (found.dim() - 1)))
    return torch.cat(parts).numpy()


def infer(backend, body, *, unit="token", reads=(), batch=None, **options):
    batch = kit.make_batch(LENGTHS) if batch is None else batch
    (result,) = backend.infer(kit.call(body, unit, list(reads), **options), [batch])
    return result.columns["result"].values


@pytest.mark.parametrize("lengths", [LENGTHS, [7, 7, 7], [1, 4], [40, 3, 3, 20, 19, 2]])
def test_logprobs_are_those_of_each_sequence_alone(lengths):
    backend, batch = kit.model(), kit.make_batch(lengths)
    wanted = expected(backend, batch, lambda logprobs, ids: logprobs.gather(1, ids[:, None])[:, 0])
    np.testing.assert_allclose(infer(backend, kit.logprobs, batch=batch), wanted, atol=1e-5)


def test_entropy():
    backend, batch = kit.model(), kit.make_batch(LENGTHS)
    wanted = expected(backend, batch, lambda logprobs, _: -(logprobs.exp() * logprobs).sum(-1))
    np.testing.assert_allclose(infer(backend, lambda out: out.entropy), wanted, atol=1e-5)


def test_temperature_divides_logits():
    backend, batch = kit.model(), kit.make_batch(LENGTHS)
    wanted = expected(
        backend,
        batch,
        lambda logprobs, ids: torch.log_softmax(logprobs / 0.5, -1).gather(1, ids[:, None])[:, 0],
    )
    np.testing.assert_allclose(infer(backend, kit.logprobs, temperature=0.5), wanted, atol=1e-5)
    with pytest.raises(RunError, match="temperature above 0"):
        infer(backend, kit.logprobs, temperature=0.0)


def test_topk_and_logprobs_of():
    backend, batch = kit.model(), kit.make_batch(LENGTHS)
    wanted = expected(backend, batch, lambda logprobs, _: logprobs.topk(3).values)
    np.testing.assert_allclose(infer(backend, lambda out: out.topk(3)[1]), wanted, atol=1e-5)
    chosen = infer(backend, lambda out: out.logprobs_of(out.topk(3)[0]))
    np.testing.assert_allclose(chosen, wanted, atol=1e-5)


@pytest.mark.parametrize("body", [kit.logprobs, lambda out: out.entropy, lambda out: out.topk(2)[1]])
def test_chunked_logits_give_the_same_outputs(monkeypatch, body):
    backend = kit.model()
    wanted = infer(backend, body)
    monkeypatch.setattr("hflow.training.loop.logprobs.CHUNK_BYTES", 4 * 3 * kit.VOCAB)
    monkeypatch.setattr("hflow.training.loop.logprobs.LOGITS_PER_TILE", 2 * kit.VOCAB)
    np.testing.assert_allclose(infer(backend, body), wanted, atol=1e-6)


def test_chunked_logits_give_the_same_gradients(monkeypatch):
    shards = kit.whole(kit.make_batch(kit.LENGTHS))
    one, other = kit.model(), kit.model()
    wanted = one.train(kit.CALLS["token-mean"], shards, 0)
    monkeypatch.setattr("hflow.training.loop.logprobs.CHUNK_BYTES", 4 * 4 * kit.VOCAB)
    monkeypatch.setattr("hflow.training.loop.logprobs.LOGITS_PER_TILE", 3 * kit.VOCAB)
    assert other.train(kit.CALLS["token-mean"], shards, 0) == pytest.approx(wanted, abs=1e-5)
    for name, tensor in kit.weights(one).items():
        torch.testing.assert_close(kit.weights(other)[name], tensor, atol=1e-5, rtol=0)


def test_values_are_of_the_state_before_the_token():
    backend, batch = kit.model(head="value"), kit.make_batch(LENGTHS)
    backbone = reference(kit.model()).model
    backbone.load_state_dict(
        {k.removeprefix("model."): v for k, v in kit.weights(backend).items() if k.startswith("model.")}
    )
    head = kit.weights(backend)
    before, last = [], []
    with torch.no_grad():
        for ids, mask in sequences(batch):
            hidden = backbone(ids[None]).last_hidden_state[0]
            value = (hidden @ head["value_head.weight"].T + head["value_head.bias"])[:, 0]
            before.append(torch.cat([torch.zeros(1), value[:-1]]) * mask)
            last.append(value[-1])
    np.testing.assert_allclose(infer(backend, lambda out: out.values), torch.cat(before), atol=1e-5)
    after = infer(backend, lambda out: out.bootstrap, unit="sequence")
    np.testing.assert_allclose(after, torch.stack(last), atol=1e-5)
    # A score model with the same seed has the same weights, and reads at the last token too.
    score = kit.model(head="score")
    np.testing.assert_allclose(infer(score, lambda out: out.scores, unit="sequence"), after, atol=1e-5)


def test_fields_of_another_head_are_an_error():
    with pytest.raises(AttributeError, match="no 'values'; a language model has entropy"):
        infer(kit.model(), lambda out: out.values)
    with pytest.raises(AttributeError, match="no 'logprobs'; a value model has bootstrap, values"):
        infer(kit.model(head="value"), kit.logprobs)


def test_the_first_token_is_never_learned():
    batch = kit.make_batch([1, 4])
    batch.columns["loss_mask"].values[:] = True
    got = infer(kit.model(), kit.logprobs, batch=batch)
    assert (got != 0).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("budget", [1, 13, 1000])
def test_infer_keeps_the_order_of_shards_and_samples(budget):
    batch = kit.make_batch(kit.LENGTHS)
    backend = kit.model(tokens_per_microbatch=budget)
    shards = [batch.take([0, 5, 2]), batch.take([]), batch.take([7, 1, 3, 4, 6])]
    results = backend.infer(kit.LOGPROBS, shards)
    (whole,) = kit.model().infer(kit.LOGPROBS, [batch])
    for shard, result in zip(shards, results, strict=True):
        assert result.samples.tolist() == shard.samples.tolist()
        wanted = whole.take(shard.samples).columns["result"].values
        np.testing.assert_allclose(result.columns["result"].values, wanted, atol=1e-5)


def test_infer_bodies_of_groups_get_whole_groups():
    def spread(out, seqs):
        first, second = seqs.members(seqs.sum(out.logprobs))
        return first - second

    backend = kit.model(tokens_per_microbatch=5)
    got = infer(backend, spread, unit="group")
    sums = infer(backend, lambda out, seqs: seqs.sum(out.logprobs), unit="sequence")
    np.testing.assert_allclose(got, np.repeat(sums[::2] - sums[1::2], 2), atol=1e-5)


def test_attention_with_other_arguments_is_rejected():
    x = torch.zeros(1, 1, 2, 4)
    layout = PackedLayout.of(np.array([2]), "cpu", torch.float32)
    with pytest.raises(BackendError, match="needs softcap"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None, packed_layout=layout, softcap=50.0)
    with pytest.raises(BackendError, match="without packed_layout"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None)


def test_fields_of_every_unit_reach_the_body():
    seen = {}

    def look(out, advantages, keep):
        seen.update(advantages=advantages, keep=keep)
        return out.logprobs

    reads = [kit.read("advantages", Unit.SEQUENCE), kit.read("keep", Unit.TOKEN)]
    infer(kit.model(), look, reads=reads)
    assert list(seen["advantages"].shape) == [6]
    assert seen["keep"].dtype == torch.bool
    assert list(seen["keep"].shape) == [sum(LENGTHS)]
