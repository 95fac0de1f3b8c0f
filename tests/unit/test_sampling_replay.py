"""Sampling replay: engines record the tokens that sampling leaves, and trainers compute over the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cost_kit import SMALL
from torch_kit import ARCHITECTURE, ENGINE_READS, SETTINGS, call, model, read, weights

from hflow.base.errors import RecipeError, RunError
from hflow.data.batches.batch import Batch, Column
from hflow.dsl import load_recipe
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.sampling import SamplingRows, draw
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.episodes.journal import Journal, JournalEntry
from hflow.episodes.trajectories import append_messages, append_turn, prompt_trajectory
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph
from hflow.planner.forecast.traffic import field_size
from hflow.training.interface import TrainShard
from hflow.training.loop import logprobs as loop_logprobs
from hflow.training.loop.kept_sets import KeptSets
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix
from hflow.types import Metrics, Output, PerToken, Unit
from hflow.types.recorded import RowFormat
from hflow.types.sampling_mask import RECORDED, SAMPLING_MASK, pack_ids, unpack_ids
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore

CPU = torch.device("cpu")
FORM = RowFormat.varying(16)
PEAKED = {**ARCHITECTURE, "initializer_range": 0.3}
"""A model whose distributions are not flat."""
ENGINE = replace(SETTINGS, architecture=PEAKED)
PROMPT = [3, 9, 30, 7, 7, 1]
LIMITS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.8, "temperature": 0.7},
]


def logprobs(out: Output) -> torch.Tensor:
    return out.logprobs


def entropy(out: Output) -> torch.Tensor:
    return out.entropy


def ratio_loss(out: Output, behav_logprobs: PerToken) -> tuple[torch.Tensor, Metrics]:
    ratio = (out.logprobs - behav_logprobs).exp()
    return -ratio, {"ratio": ratio, "off": (ratio - 1).abs()}


REPLAY = read("@sampling_mask", Unit.TOKEN, SAMPLING_MASK)


def test_a_set_is_ids_or_bits() -> None:
    assert pack_ids(np.array([7, 300])) == bytes([2, 7, 0, 44, 1])
    assert pack_ids(np.array([1 << 16])) == bytes([4, 0, 0, 1, 0])
    assert pack_ids(np.array([2, 0, 1, 9])) == bytes([0, 0b11100000, 0b01000000])
    for ids in ([5], [70000, 3], list(range(100)), list(range(0, 99, 3)), [65535, 65536]):
        assert sorted(unpack_ids(pack_ids(np.array(ids))).tolist()) == sorted(ids)
    assert unpack_ids(b"").tolist() == []


def test_a_known_answer_of_the_sampler() -> None:
    """0.4 and 0.3 are left of four tokens: 4/7 and 3/7."""
    logits = torch.tensor([0.4, 0.05, 0.3, 0.25]).log().expand(4, 4)
    some = SamplingParams(top_k=2, record=(SAMPLING_MASK,))
    params = [some, replace(some, record=()), replace(some, top_k=0), replace(some, temperature=0.0)]
    found = draw(logits, SamplingRows.of(params, 4, CPU), np.zeros(4, np.int64))
    assert [sorted(unpack_ids(entry).tolist()) for entry in found.kept] == [[0, 2], [], [], []]
    token, logprob = found.values[:, 0].tolist()
    assert logprob == pytest.approx(math.log({0: 4 / 7, 2: 3 / 7}[int(token)]))
    assert found.values[1, 3].item() == pytest.approx(math.log(0.4))


@pytest.mark.parametrize("rows_at_once", [11, 4])
def test_results_and_gradients_are_those_of_the_sets(rows_at_once: int, monkeypatch: Any) -> None:
    """By torch's own log-softmax of the logits of each set."""
    monkeypatch.setattr(loop_logprobs, "CHUNK_BYTES", 4 * 13 * rows_at_once)
    monkeypatch.setattr(loop_logprobs, "LOGITS_PER_TILE", 2 * 13)
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(11, 6, generator=generator), torch.randn(13, 6, generator=generator)
    sets = [torch.randperm(13, generator=generator)[:size] for size in (0, 1, 2, 3, 4, 5, 13, 1, 2, 3, 7)]
    drawn = torch.tensor([3, *(of[0] for of in sets[1:])])
    factors = torch.linspace(-1, 2, 11)

    def gradients(values: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (rows, weight)]
        entropies, found = values(*leaves)
        loss = (factors * found).sum() + (factors.square() * entropies).sum()
        return entropies.detach(), found.detach(), *torch.autograd.grad(loss, leaves)

    def whole(x: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entropies, found = [], []
        for row, ids, token in zip(x, sets, drawn, strict=True):
            kept = ids if len(ids) else torch.arange(13)
            of_set = torch.log_softmax(row @ matrix[kept].T / 0.7, -1)
            entropies.append(-(of_set.exp() * of_set).sum())
            found.append(of_set[kept == token].sum())
        return torch.stack(entropies), torch.stack(found)

    kept = KeptSets.of_ids([of.int().numpy() for of in sets], CPU)

    def chunked(x: torch.Tensor, matrix: torch.Tensor) -> Any:
        return MatrixLogits(x, OutputMatrix(matrix), 0.7, kept).measure(["entropy", "logprobs"], drawn)

    for got, wanted in zip(gradients(chunked), gradients(whole), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    order = np.array([10, 0, 4])
    some = MatrixLogits(rows[order], OutputMatrix(weight), 0.7, kept.take(order))
    (found,) = some.measure(["logprobs"], drawn[order])
    torch.testing.assert_close(found, whole(rows, weight)[1][order])


def generate(num: int = 12, **limits: Any) -> list[GenerationResult]:
    engine = EmbeddedEngine(ENGINE)
    for seed in range(num):
        params = SamplingParams(max_tokens=9, seed=seed, record=(SAMPLING_MASK,), **limits)
        engine.add(seed, PROMPT, params)
    return [result for _, result in sorted(finish(engine).items())]


def finish(engine: EmbeddedEngine) -> dict[int, GenerationResult]:
    results: dict[int, GenerationResult] = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return results


def batch_of(results: list[GenerationResult]) -> Batch:
    """Return what an engine drew as a batch."""
    lengths = np.array([len(PROMPT) + len(result.ids) for result in results])
    token = {
        "input_ids": [[*PROMPT, *result.ids] for result in results],
        "loss_mask": [[False] * len(PROMPT) + [True] * len(result.ids) for result in results],
        "behav_logprobs": [[0.0] * len(PROMPT) + list(result.logprobs) for result in results],
        "versions": [[-1] * len(PROMPT) + list(result.versions) for result in results],
        SAMPLING_MASK: [
            RECORDED.pack(result.recorded[SAMPLING_MASK], length, FORM)
            for result, length in zip(results, lengths, strict=True)
        ],
    }
    columns = {name: Column(Unit.TOKEN, np.concatenate(values)) for name, values in token.items()}
    return Batch(np.arange(len(results)), np.arange(len(results)) // 4, lengths, columns)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_trainer_has_the_log_probs_of_the_engine(limits: dict[str, Any]) -> None:
    results = generate(**limits)
    batch, temperature = batch_of(results), limits.get("temperature", 1.0)
    behav, mask = (np.asarray(batch.columns[name].values) for name in ("behav_logprobs", "loss_mask"))
    sets = [
        unpack_ids(entry) for result in results for entry in result.recorded[SAMPLING_MASK][len(PROMPT) :]
    ]
    assert all(token in ids for token, ids in zip((t for r in results for t in r.ids), sets, strict=True))
    assert any(1 < len(ids) < 37 for ids in sets)
    trainer = model(architecture=PEAKED)
    node = call(logprobs, "token", [REPLAY], temperature=temperature)
    (result,) = trainer.infer(node, [batch])
    np.testing.assert_allclose(np.asarray(result.columns["result"].values)[mask], behav[mask], atol=1e-5)
    # Without the sets they are those of all tokens, which are less likely.
    without = batch.select([name for name in batch.columns if name != SAMPLING_MASK])
    (result,) = trainer.infer(replace(node, reads=()), [without])
    assert (np.asarray(result.columns["result"].values)[mask] < behav[mask] - 1e-3).mean() > 0.5
    (result,) = trainer.infer(replace(node, body=entropy), [batch])
    assert (
        np.asarray(result.columns["result"].values)[mask] <= np.log([len(ids) for ids in sets]) + 1e-5
    ).all()
    assert np.asarray(result.columns["result"].values)[mask].mean() > 0.1


def test_ratios_of_own_samples_are_1_and_a_step_makes_them_larger() -> None:
    batch, trainer = batch_of(generate(top_p=0.8)), model(architecture=PEAKED)
    reads = [*ENGINE_READS, REPLAY]
    node = call(ratio_loss, "token", reads, metrics=True, reduce="token-mean", epochs=1)
    before = weights(trainer)
    metrics = trainer.train(node, [TrainShard((batch,))], step=0)
    assert metrics["off"] < 1e-5
    assert metrics["engine_kl"] < 1e-9
    assert any(not torch.equal(x, before[name]) for name, x in weights(trainer).items())
    assert trainer.train(node, [TrainShard((batch,))], step=1)["ratio"] > 1


def test_a_token_outside_its_set_is_refused() -> None:
    batch = batch_of(generate(num=1, top_k=3))
    ids = np.asarray(batch.columns["input_ids"].values).copy()
    inside = set(unpack_ids(np.asarray(batch.columns[SAMPLING_MASK].values)[-1]).tolist())
    ids[-1] = min({*range(37)} - inside)
    changed = batch.with_columns({"input_ids": Column(Unit.TOKEN, ids)})
    with pytest.raises(RunError, match=f"token {ids[-1]} of a sample is not among those"):
        model(architecture=PEAKED).infer(call(logprobs, "token", [REPLAY]), [changed])


def test_turns_and_interruptions_keep_the_sets() -> None:
    (whole,) = generate(num=1, top_p=0.7)
    engine = EmbeddedEngine(ENGINE)
    params = SamplingParams(max_tokens=9, top_p=0.7, record=(SAMPLING_MASK,))
    engine.add(0, PROMPT, params)
    for _ in range(4):
        engine.step()
    ((_, part),) = engine.interrupt()
    assert part.recorded[SAMPLING_MASK] == whole.recorded[SAMPLING_MASK][: len(PROMPT) + 4]
    engine.add(1, [*PROMPT, *part.ids], replace(params, max_tokens=5, num_resumed=4))
    rest = finish(engine)[1]
    start = prompt_trajectory(PROMPT, ())
    turn = append_turn(append_turn(start, part, ""), rest, "")
    assert turn.recorded == whole.recorded
    two = append_messages(turn, [11, 12])
    engine.add(2, two.input_ids, replace(params, max_tokens=3))
    recorded = append_turn(two, finish(engine)[2], "").recorded[SAMPLING_MASK]
    assert [bool(entry) for entry in recorded] == [False] * 6 + [True] * 9 + [False] * 2 + [True] * 3


def test_checkpoints_keep_the_sets_of_samples_and_journals(tmp_path: Any) -> None:
    (result,) = generate(num=1, top_p=0.7)
    store = SampleStore()
    batch = batch_of([result, *generate(num=2, top_k=3)])
    store.put("gen", batch)
    entry = JournalEntry("complete", "actor", {"prompt": "a"}, replace(result, stop_reason="abort"), False)
    other = JournalEntry("complete", "actor", {"prompt": "b"}, GenerationResult((1,), (0.0,), (2,), "stop"))
    journals = {"gen": {7: Journal((entry, other, entry))}}
    SampleFiles(tmp_path, "x", {"gen": {"gen": store.stored("gen", [2, 0])}}, journals).write()
    reader = SampleFilesReader(tmp_path, "x")
    assert reader.journal("gen", 7) == Journal((entry, other, entry))
    found = SampleStore()
    found.put_stored("gen", reader.samples(["gen"], [0, 2])["gen"])
    for sample in (0, 2):
        assert found.values("gen", SAMPLING_MASK, [sample]) == store.values("gen", SAMPLING_MASK, [sample])
    both = found.gather("gen", [f"gen/{SAMPLING_MASK}"], [2, 0]).columns[SAMPLING_MASK]
    wanted = batch.take([2, 0]).columns[SAMPLING_MASK]
    assert np.array_equal(both.values, wanted.values)
    assert both.nbytes == sum(map(len, wanted.values))


# -------------------------------------------------------------------------------------------- graph
def graph(**options: Any) -> Graph:
    """Return the graph of a recipe whose samples are drawn with these options."""
    spec = load_recipe(Path(__file__).parents[2] / "recipes" / "ppo.py").spec()
    nodes = [
        replace(node, options=tuple({**dict(node.options), **options}.items()))
        if node.name == "actor_gen"
        else node
        for node in spec.nodes
    ]
    return build_graph(replace(spec, nodes=tuple(nodes)))


def readers(of: Graph) -> set[str]:
    return {node.name for node in of.nodes if any(read.field == SAMPLING_MASK for read in node.reads)}


def test_language_models_read_the_sets_where_log_probs_are_compared() -> None:
    found = graph(top_p=0.9)
    assert readers(found) == {"ref_inf", "actor_train"}
    assert found.node("actor_gen").spec.option("sampling_replay") is True
    assert not readers(graph())
    assert not readers(graph(top_p=0.9, sampling_replay=False))
    with pytest.raises(RecipeError, match="sampling_replay has no effect, as tokens are drawn from all"):
        graph(sampling_replay=True)


def test_a_plan_counts_the_bytes_of_the_sets() -> None:
    """An id of 100,000 has 4 bytes; a bit for each of them are 12,501."""
    shape = replace(SMALL, vocab=100_000)
    cases = (
        ({"top_k": 5}, 20),
        ({"top_p": 0.9}, 256),
        ({"top_k": 500}, 2000),
        ({"top_k": 9, "min_p": 0.1}, 36),
        ({"top_k": 5000}, 12_501),
    )
    for limits, num_bytes in cases:
        size = field_size(graph(**limits), f"actor_gen/{SAMPLING_MASK}", {"actor": shape})
        assert size.of(prompt=0, response=10) == 10 * (1 + num_bytes)
