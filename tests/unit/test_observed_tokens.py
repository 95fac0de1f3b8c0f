"""Losses of tokens that a policy observed, and samples that count more than once, against numbers by hand."""

import dataclasses

import numpy as np
import pytest
import torch
import torch_kit as kit
from torch.testing import assert_close

from hflow import Output, Sequences, algo, nodes
from hflow.base.errors import RecipeError, RunError
from hflow.data.batches.batch import Batch, Column
from hflow.dsl import load_recipe
from hflow.graph.build import build_graph
from hflow.training.interface import TrainShard
from hflow.types import Unit

BATCH = kit.make_batch(kit.LENGTHS)


def with_mask(batch: Batch, mask: np.ndarray) -> Batch:
    return batch.with_columns({"loss_mask": Column(Unit.TOKEN, mask)})


def values(batch: Batch, name: str) -> np.ndarray:
    return np.asarray(batch.columns[name].values)


def observed_of(batch: Batch) -> np.ndarray:
    observed = values(batch, "is_observed") & ~values(batch, "loss_mask")
    observed[batch.offsets[:-1]] = False  # nothing predicts a first token
    return observed


def test_the_loss_of_observed_tokens_by_hand():
    learned, observed = values(BATCH, "loss_mask").copy(), observed_of(BATCH)
    learned[BATCH.offsets[:-1]] = False
    backend = kit.model()
    (fields,) = backend.infer(kit.LOGPROBS, [with_mask(BATCH, np.ones_like(learned))])
    logprobs = values(fields, "result")
    surrogate = -np.repeat(values(BATCH, "advantages"), BATCH.lengths) * logprobs
    rows = list(zip(BATCH.offsets, BATCH.offsets[1:], strict=False))
    means = [surrogate[a:b][learned[a:b]].mean() for a, b in rows if learned[a:b].any()]
    wanted = np.mean(means) - 0.5 * logprobs[observed].mean()
    call = dataclasses.replace(kit.CALLS["observed"], options=kit.CALLS["observed"].options | {"epochs": 1})
    metrics = backend.train(call, [TrainShard((BATCH,))], 0)
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["observed_nll"] == pytest.approx(-logprobs[observed].mean(), rel=1e-5)
    assert metrics["num_tokens"] == learned.sum(), "metrics are those of learned tokens"


def test_observed_tokens_alone_teach_what_supervised_learning_does():
    def observations(out, advantages):
        return -out.observed_logprobs

    def sft(out, advantages):
        return -out.logprobs

    reads = [kit.read("advantages", Unit.TOKEN)]
    echo = kit.call(observations, "token", reads, reduce="token-mean", observed="is_observed")
    taught = kit.call(sft, "token", reads, reduce="token-mean")
    here, there = kit.model(tokens_per_microbatch=13), kit.model()
    here.train(echo, [TrainShard((BATCH,))], 0)
    there.train(taught, [TrainShard((with_mask(BATCH, observed_of(BATCH)),))], 0)
    assert_close(kit.weights(here), kit.weights(there), atol=1e-6, rtol=0)


def test_a_minibatch_of_observed_tokens_only_is_trained():
    nothing = with_mask(BATCH, np.zeros(BATCH.num_tokens, dtype=bool))
    metrics = kit.model().train(kit.CALLS["observed"], [TrainShard((nothing,))], 0)
    assert metrics["loss"] == pytest.approx(0.5 * metrics["observed_nll"], rel=0.2)  # two updates
    assert metrics["grad_norm"] > 0


def test_observed_tokens_that_no_loss_reads_are_refused():
    call = kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean", observed="keep")
    with pytest.raises(RunError, match=r"observed='keep' has no effect, .* not read out\.observed_logprobs"):
        kit.model().train(call, [TrainShard((BATCH,))], 0)
    blind = dataclasses.replace(kit.CALLS["observed"], options={"reduce": "token-mean"})
    with pytest.raises(AttributeError, match='set observed="is_observed"'):
        kit.model().train(blind, [TrainShard((BATCH,))], 0)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean"])
def test_a_sample_that_counts_twice_is_like_two(name):
    call = kit.CALLS[name]
    counted = dataclasses.replace(call, options=call.options | {"mask": "draws"})
    rows = np.repeat(np.arange(len(BATCH)), values(BATCH, "draws"))
    taken = BATCH.take(rows)
    repeated = Batch(np.arange(len(rows)), taken.groups, taken.lengths, taken.columns)
    results = [
        (backend := kit.model()).train(asked, [TrainShard((batch,))], 5) | {"weights": kit.weights(backend)}
        for asked, batch in ((counted, BATCH), (call, repeated))
    ]
    for key in ("loss", "num_tokens"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-5)
    assert_close(results[0]["weights"], results[1]["weights"], atol=1e-6, rtol=0)


def test_a_loss_of_groups_cannot_count_samples():
    call = kit.CALLS["group-mean"]
    counted = dataclasses.replace(call, options=call.options | {"mask": "draws"})
    with pytest.raises(RunError, match="whole numbers counts samples, so the loss cannot be per group"):
        kit.model().train(counted, [TrainShard((BATCH,))], 5)


# ------------------------------------------------------------------------------- samples of an infer node
def test_an_infer_node_computes_the_samples_of_its_mask_only():
    def likeliest(out, seqs):
        return (*out.topk(3), out.logprobs, seqs.mean(out.entropy))

    units = {"ids": "token", "likeliest": "token", "result": "token", "entropy": "sequence"}
    call = dataclasses.replace(kit.call(likeliest, "token", []), returns=tuple(units.items()))
    chosen = dataclasses.replace(call, options={"mask": "keep"})
    keep = values(BATCH, "keep")
    nothing = BATCH.take(np.flatnonzero(~keep)[:2])
    backend = kit.model(tokens_per_microbatch=20)
    seen = []
    backend._runner.module.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    wanted, _ = backend.infer(call, [BATCH, nothing])
    seen.clear()
    got, empty = backend.infer(chosen, [BATCH, nothing])
    assert sum(seen) == BATCH.lengths[keep].sum() + nothing.lengths[0], "one sample where none is chosen"
    tokens = np.repeat(keep, BATCH.lengths)
    for name, unit in units.items():
        rows = tokens if unit == "token" else keep
        np.testing.assert_allclose(values(got, name)[rows], values(wanted, name)[rows], atol=1e-5)
        left = values(got, name)[~rows]
        assert (left == -1).all() if name == "ids" else np.isnan(left).all()
        assert values(empty, name).shape[1:] == values(got, name).shape[1:]
        assert (values(empty, name) == -1).all() if name == "ids" else np.isnan(values(empty, name)).all()


# ------------------------------------------------------------------------------------------ nodes
def test_observed_tokens_follow_the_first_learned_one():
    mask = [False, True, False, True, False, False, False, False, True, False]
    seqs = Sequences.of([5, 2, 3], loss_mask=mask)
    assert nodes.observed_tokens(seqs).tolist() == [False, False, True, False, True, *[False] * 4, True]
    # The first sample has two trajectories, of 3 and 2 tokens: the prompt of the second is not observed.
    trajectory = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 0, 0])
    seqs.loss_mask[3] = False
    seqs.loss_mask[4] = True
    observed = nodes.observed_tokens(seqs, trajectory)
    assert observed.tolist() == [False, False, True, *[False] * 6, True]
    assert nodes.observed_tokens(Sequences.of([])).tolist() == []


def test_a_policy_loss_with_observations():
    seqs = Sequences.of([3], loss_mask=[False, True, False])
    out = Output(
        logprobs=torch.tensor([0.0, -1.0, 0.0]),
        entropy=torch.zeros(3),
        observed_logprobs=torch.tensor([0.0, 0.0, -3.0]),
    )
    prox = out.logprobs
    loss, _ = nodes.actor_train(out, prox, prox, torch.tensor([0.0, 2.0, 0.0]), seqs, observation_coef=0.1)
    assert_close(loss, torch.tensor([0.0, -2.0, 0.3]))


RECIPE = """
from hflow import *
data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("echo", data, [use(nodes.actor_gen, actor, group=4), use(rewards.exact, returns="reward"),
    nodes.group_advantage,
    nodes.observed_tokens, use(nodes.{node}, actor{options})])
"""


@pytest.mark.parametrize(
    ("node", "options", "message"),
    [
        ("actor_train", ", observed='is_observed'", "observed has no effect while observation_coef is 0"),
        ("actor_train", ", observation_coef=0.1", "observation_coef needs observed"),
        ("sapo_train", ", observed='is_observed', observation_coef=-1.0", "it must be 0 or more"),
        ("gspo_train", ", observed='is_observed'", "observed needs a loss PerToken, not one per"),
        ("actor_train", ", observed='reward', observation_coef=0.1", "must be bool, not float"),
    ],
)
def test_wrong_uses_of_observed_tokens_are_refused(tmp_path, node, options, message):
    path = tmp_path / "echo.py"
    path.write_text(RECIPE.format(node=node, options=options))
    recipe = load_recipe(path)
    with pytest.raises(RecipeError, match=message):
        recipe.check_bodies(build_graph(recipe.spec()))


GROUPED = """
from hflow import *
data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
@compute(per="sample")
def chosen(prompt: str) -> bool:
    return True
@infer(actor, mask="chosen")
def grouped(out: Output, seqs: Sequences) -> PerGroup:
    return seqs.group_sum(seqs.sum(out.logprobs))
recipe = Recipe("grouped", data, [use(nodes.actor_gen, actor, group=4), chosen, grouped])
"""


def test_a_mask_of_samples_for_a_body_of_groups_is_refused(tmp_path):
    path = tmp_path / "grouped.py"
    path.write_text(GROUPED)
    with pytest.raises(RecipeError, match="mask chooses samples, but the body needs whole groups"):
        build_graph(load_recipe(path).spec())


def test_resampling_weights():
    reward = torch.tensor([0.0, 1.0, -2.0, 1.0])
    assert_close(algo.resampling_weights(reward), torch.tensor([1e-8, 1.0, 4.0, 1.0], dtype=torch.float64))
    cubed = algo.resampling_weights(reward, power=3.0)
    assert_close(cubed, torch.tensor([1e-8, 1.0, 8.0, 1.0], dtype=torch.float64))
    extremes = algo.resampling_weights(reward, "max_min")
    assert_close(extremes, torch.tensor([1e-8, 1.0, 1.0, 1.0], dtype=torch.float64))
    best = algo.resampling_weights(reward, "max_random")
    assert_close(best, torch.tensor([0.1, 0.4, 0.1, 0.4], dtype=torch.float64))


def test_samples_are_drawn_by_weight():
    reward, seqs = torch.tensor([0.0, 1.0, 3.0]), Sequences.of([1, 1, 1])
    torch.manual_seed(0)
    draws = torch.stack([nodes.resample(reward, seqs, weights="pow", power=1.0)[0] for _ in range(2_000)])
    assert draws.dtype == torch.int64
    wanted = torch.tensor([0.0, 0.75, 2.25], dtype=torch.float64)
    assert (draws.sum(1) == 3).all()
    assert_close(draws.double().mean(0), wanted, atol=0.05, rtol=0)
