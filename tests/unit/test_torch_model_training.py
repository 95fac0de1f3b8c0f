"""Training results depend on the data alone, not on micro-batches; and what training rejects."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch_kit as kit

from hflow.base.errors import BackendError, RecipeError, RunError
from hflow.config.schema import OptimConfig
from hflow.data.batches.batch import Column
from hflow.training.interface import TrainShard
from hflow.training.optimizers.learning_rate import learning_rate
from hflow.types import Unit

BATCH = kit.make_batch(kit.LENGTHS)


def trained(call, shards, *, step=5, **changes):
    """Return metrics, but for the tokens that pass through the model, and weights."""
    backend = kit.model(len(shards), **changes)
    metrics = backend.train(call, shards, step)
    del metrics["computed_tokens"]
    return metrics, kit.weights(backend)


def assert_same(got, wanted, atol=1e-5):
    assert got[0] == pytest.approx(wanted[0], abs=10 * atol)
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(got[1][name], tensor, atol=atol, rtol=0)


@pytest.mark.first(4)
@pytest.mark.parametrize("name", kit.CALLS)
def test_micro_batches_do_not_change_the_result(name):
    wanted = trained(kit.CALLS[name], kit.whole(BATCH))
    assert_same(trained(kit.CALLS[name], kit.whole(BATCH), tokens_per_microbatch=1), wanted)
    assert_same(trained(kit.CALLS[name], kit.halves(BATCH), tokens_per_microbatch=13), wanted)
    checkpointed = {"activation_checkpointing": True, "tokens_per_microbatch": 20}
    assert_same(trained(kit.CALLS[name], kit.whole(BATCH), **checkpointed), wanted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputed_layers_change_no_bit(dtype):
    call = kit.CALLS["token-mean"]
    wanted = trained(call, kit.whole(BATCH), dtype=dtype)
    got = trained(call, kit.whole(BATCH), dtype=dtype, activation_checkpointing=True)
    assert got[0] == wanted[0]
    assert all(torch.equal(got[1][name], tensor) for name, tensor in wanted[1].items())


def test_the_padding_token_is_trained_like_others():
    """HF gives its embedding no gradient. Here nothing is padded, so every occurrence is a real token."""
    token = int(BATCH.columns["input_ids"].values[0])
    padding = {"architecture": kit.ARCHITECTURE | {"pad_token_id": token, "tie_word_embeddings": False}}
    backend = kit.model(**padding)
    before = kit.weights(backend)["model.embed_tokens.weight"][token]
    backend.train(kit.CALLS[next(iter(kit.CALLS))], kit.whole(BATCH), 5)
    after = kit.weights(backend)["model.embed_tokens.weight"][token]
    assert (after - before).abs().max() > 1e-4  # decay moves it by less


def one_update(reduce, body=None, unit="token", **options):
    """Return the loss of one update on the first six sequences, and its entries."""
    seen = {}

    def nll(out, seqs):
        seen.update(loss=-out.logprobs.detach(), seqs=seqs)
        return -out.logprobs

    call = kit.call(body or nll, unit, [], reduce=reduce, **options)
    metrics = kit.model().train(call, [TrainShard((BATCH.take(range(6)),))], 0)
    return metrics, seen


def test_reductions_by_hand():
    metrics, seen = one_update("token-mean")
    loss, seqs = seen["loss"], seen["seqs"]
    parts = [loss[a:b][seqs.loss_mask[a:b]] for a, b in zip(seqs.offsets, seqs.offsets[1:], strict=False)]
    sums = [part.sum().item() for part in parts]
    assert metrics["loss"] == pytest.approx(sum(sums) / sum(len(part) for part in parts), rel=1e-5)
    assert one_update("token-sum/50")[0]["loss"] == pytest.approx(sum(sums) / 50, rel=1e-5)
    assert one_update("seq-mean-token-sum")[0]["loss"] == pytest.approx(sum(sums) / 6, rel=1e-5)
    means = [part.mean().item() for part in parts]
    assert one_update("seq-mean-token-mean")[0]["loss"] == pytest.approx(sum(means) / 6, rel=1e-5)
    by_sequence = one_update("seq-mean", lambda out, seqs: -seqs.sum(out.logprobs), "sequence")
    assert by_sequence[0]["loss"] == pytest.approx(sum(sums) / 6, rel=1e-5)
    by_group = one_update("group-mean", lambda out, seqs: -seqs.group_sum(seqs.sum(out.logprobs)), "group")
    assert by_group[0]["loss"] == pytest.approx(sum(sums) / 3, rel=1e-5)


def centred(out, seqs, reward):
    mean = (seqs.group_sum(reward) / seqs.group_count())[seqs.group]
    return -out.logprobs * seqs.widen(reward - mean)


def test_a_body_with_sums_over_groups_gets_whole_groups():
    """Every group is larger than a micro-batch. A body that does not say that it needs groups gets no sum."""
    rewards = np.arange(len(BATCH), dtype=np.float32) ** 2
    batch = BATCH.with_columns({"reward": Column(Unit.SEQUENCE, rewards)})
    reads = [kit.read("reward", Unit.SEQUENCE)]
    call = kit.call(
        centred, "token", [*reads, kit.read("@group", Unit.SEQUENCE, "group")], reduce="token-mean"
    )
    assert_same(trained(call, kit.whole(batch), tokens_per_microbatch=1), trained(call, kit.whole(batch)))
    with pytest.raises(ValueError, match="group: PerSequence"):
        trained(dataclasses.replace(call, reads=tuple(reads)), kit.whole(batch))


def test_masked_sequences_do_not_count():
    kept = [row for row in range(len(BATCH)) if BATCH.columns["keep"].values[row]]
    call = kit.CALLS["mask"]
    plain = dataclasses.replace(call, options={"reduce": "token-mean"})
    masked = trained(call, [TrainShard((BATCH,))])
    assert_same(masked, trained(plain, [TrainShard((BATCH.take(kept),))]))
    learned = BATCH.take(kept).columns["loss_mask"].values.sum()
    assert masked[0]["num_tokens"] == learned


def test_metrics_are_means_over_valid_entries():
    def body(out, seqs):
        ones = torch.ones_like(out.logprobs)
        return -out.logprobs, {
            "token": torch.where(seqs.loss_mask, 2.0, 1e9),
            "length": seqs.lengths,
            "length.max": seqs.lengths,
            "length.min": seqs.lengths,
            "learned.sum": ones,
            "number": 3,
            "flag": seqs.loss_mask,
        }

    call = kit.call(body, "token", [], metrics=True, reduce="token-mean")
    metrics = kit.model(tokens_per_microbatch=13).train(call, kit.halves(BATCH), 0)
    assert metrics["token"] == pytest.approx(2)
    assert metrics["length"] == pytest.approx(np.mean(kit.LENGTHS))
    assert (metrics["length.max"], metrics["length.min"]) == (12, 2)
    assert metrics["learned.sum"] == metrics["num_tokens"] == BATCH.columns["loss_mask"].values.sum()
    assert (metrics["number"], metrics["flag"]) == (3, 1)


def test_a_minibatch_without_learned_tokens_is_skipped():
    nothing = BATCH.take([2, 3])
    nothing = nothing.with_columns({"loss_mask": Column(Unit.TOKEN, np.zeros(nothing.num_tokens, bool))})
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
    first, last = BATCH.take([0, 1]), BATCH.take([4, 5])
    got = trained(call, [TrainShard((first, nothing, last))])
    assert_same(got, trained(call, [TrainShard((first, last))]))
    metrics, weights = trained(call, [TrainShard((nothing, nothing.take([])))])
    assert metrics == {"num_tokens": 0.0}
    start = kit.weights(kit.model())
    assert all(torch.equal(weights[name], start[name]) for name in start)


def test_loglinear_prox_moves_with_the_updates():
    seen = []

    def body(out, prox_logprobs, behav_logprobs, versions):
        seen.append((prox_logprobs, behav_logprobs, versions, out.logprobs.detach()))
        return (out.logprobs - prox_logprobs).square()

    reads = [kit.read(name, Unit.TOKEN) for name in ("prox_logprobs", "behav_logprobs", "versions")]
    call = kit.call(body, "token", reads, reduce="token-mean", prox="loglinear", epochs=2)
    kit.model().train(call, [TrainShard((BATCH.take([0, 1]), BATCH.take([2, 3])))], 5)
    assert len(seen) == 4
    for update, (prox, behav, versions, theta) in enumerate(seen):
        # Tokens of versions 3, 4 and 5; the step's start is 5 and this update 5 + update / 4.
        age = (5 + update / 4) - versions
        alpha = torch.where((age > 0) & (versions >= 0), ((5 - versions) / age).clamp(0, 1), 0.0)
        torch.testing.assert_close(prox, behav + alpha * (theta - behav))


def test_prox_metrics_report_the_approximation():
    def body(out, prox_logprobs):
        return (out.logprobs - prox_logprobs).square()

    reads = [kit.read("prox_logprobs", Unit.TOKEN)]
    call = kit.call(body, "token", reads, reduce="token-mean", prox="metrics")
    (exact,) = kit.model().infer(kit.LOGPROBS, [BATCH])
    prox = Column(Unit.TOKEN, exact.columns["result"].values)
    old = Column(Unit.TOKEN, np.where(BATCH.columns["loss_mask"].values, 3, -1))
    batch = BATCH.with_columns({"prox_logprobs": prox, "versions": old})
    metrics = kit.model().train(call, [TrainShard((batch,))], 5)
    # All tokens are two versions old and theta is prox: the library's rule is exact, the fixed
    # one goes 2 / 3 of the way.
    mask = BATCH.columns["loss_mask"].values
    gap = np.abs(prox.values - BATCH.columns["behav_logprobs"].values)[mask].mean()
    assert metrics["prox_error"] == pytest.approx(0, abs=1e-5)
    assert metrics["prox_error_fixed"] == pytest.approx(gap / 3, rel=1e-3)


def test_bf16_learns():
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean", epochs=15)
    for changes in ({}, {"activation_checkpointing": True}):
        backend = kit.model(dtype="bf16", **changes)
        first = backend.train(
            dataclasses.replace(call, options={"reduce": "token-mean"}), kit.whole(BATCH), 0
        )
        last = backend.train(call, kit.whole(BATCH), 1)
        assert last["loss"] < 0.95 * first["loss"]
        assert {tensor.dtype for tensor in kit.weights(backend).values()} == {torch.bfloat16}
        assert {p.dtype for p in backend._runner.module.parameters()} == {torch.float32}


def test_clipping_and_decay_follow_adamw():
    """One update equals torch's own clipping and AdamW on the HF model's gradient."""
    optim = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.5)
    backend, other = kit.model(optim=optim), kit.model(optim=optim)
    batch = BATCH.take([0, 1])
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
    metrics = backend.train(call, [TrainShard((batch,))], 0)
    model, ids = other._model, torch.tensor(batch.columns["input_ids"].values)
    model.set_attn_implementation("eager")
    losses = []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        logprobs = torch.log_softmax(model(ids[None, start:end]).logits[0, :-1], -1)
        mask = torch.tensor(batch.columns["loss_mask"].values[start + 1 : end])
        losses.append(-logprobs.gather(1, ids[start + 1 : end, None])[mask, 0])
    torch.cat(losses).mean().backward()
    parameters = list(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    decays = [[p for p in parameters if (p.dim() >= 2) is matrix] for matrix in (True, False)]
    groups = [{"params": decays[0], "weight_decay": 0.1}, {"params": decays[1], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, eps=1e-3).step()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(kit.weights(backend)[name], tensor.detach(), atol=1e-5, rtol=0)


def test_learning_rates():
    settings = OptimConfig(lr=2.0, warmup_steps=4, schedule="linear", min_lr_ratio=0.5)
    assert [learning_rate(settings, n, 14) for n in (0, 3, 4, 9, 14, 99)] == [0.5, 2.0, 2.0, 1.5, 1.0, 1.0]
    cosine = dataclasses.replace(settings, schedule="cosine", min_lr_ratio=0.0)
    assert learning_rate(cosine, 4 + 5, 14) == pytest.approx(1 + math.cos(math.pi / 2))
    assert learning_rate(OptimConfig(lr=3.0), 1000, 1000) == 3.0
    assert [learning_rate(settings, n, 3) for n in (2, 3, 4, 5)] == [1.5, 2.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("unit", "reduce"),
    [("token", None), ("token", "seq-mean"), ("sequence", "token-mean"), ("token", "token-sum/0")],
)
def test_a_reduction_of_another_unit_is_rejected(unit, reduce):
    with pytest.raises(RecipeError, match=f"a loss per {unit} cannot be reduced by"):
        one_update(reduce, unit=unit)


def test_invalid_losses_are_rejected():
    with pytest.raises(RunError, match="does not depend on the model's output"):
        one_update("token-mean", lambda out: out.logprobs.detach())
    with pytest.raises(RunError, match="is per token, so its shape must start with"):
        one_update("token-mean", lambda out: -out.logprobs.mean())
    with pytest.raises(RunError, match=r"the gradient's norm is nan at update 1 of step 1"):
        one_update("token-mean", lambda out: out.logprobs * math.nan)


def test_an_update_that_is_not_finite_is_skipped():
    """As if its minibatch were not there, for the weights, the learning rate and the metrics."""
    optim = dataclasses.replace(kit.SETTINGS.optim, on_nonfinite="skip")
    first, last = BATCH.take([0, 1]), BATCH.take([4, 5])
    poor = BATCH.take([2, 3])
    nan = Column(Unit.SEQUENCE, np.array([1, np.nan], np.float32))
    ones = Column(Unit.SEQUENCE, np.ones(2, np.float32))
    first, last = (batch.with_columns({"weights": ones}) for batch in (first, last))
    poor = poor.with_columns({"weights": nan})

    def body(out, weights):
        return -out.logprobs * weights.mean(), {"seen": out.logprobs.detach() * weights.mean()}

    call = kit.call(body, "token", [kit.read("weights", Unit.SEQUENCE)], metrics=True, reduce="token-mean")
    runs = {}
    skipped: list[int] = []
    call = dataclasses.replace(call, on_skipped=skipped.extend)
    for name, minibatches in {"skip": (first, poor, last), "without": (first, last)}.items():
        backend = kit.model(optim=optim)
        runs[name] = backend.train(call, [TrainShard(minibatches)], 0), kit.weights(backend)
    (metrics, weights), (wanted, wanted_weights) = runs["skip"], runs["without"]
    assert metrics.pop("skipped_updates") == 1
    assert sorted(skipped) == sorted(poor.samples.tolist())
    assert metrics.pop("num_tokens") > wanted.pop("num_tokens")
    assert metrics == wanted
    assert all(torch.equal(weights[name], wanted_weights[name]) for name in weights)
    reason = r"norm is nan at update 2 of step 1; its input 'weights' is not finite in sample 3, so"
    with pytest.raises(RunError, match=reason):
        kit.model().train(call, [TrainShard((first, poor, last))], 0)


def test_a_frozen_model_is_not_trained():
    with pytest.raises(BackendError, match="'actor' is frozen"):
        kit.model(trainable=False).train(kit.CALLS["token-mean"], kit.whole(BATCH), 0)


def test_a_frozen_model_may_have_a_decaying_schedule():
    kit.model(optim=OptimConfig(schedule="cosine"), num_updates=0)
