"""Samples of several trajectories: what is learned of them, and how models and losses see them."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reduction_cases as cases
import torch_kit as kit

from hflow import Trajectory
from hflow.base.errors import ReturnError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.trajectory_rows import cut_trajectories
from hflow.graph.ir import EPISODE_FIELDS, Read
from hflow.runtime.ledger.ledger import rewind
from hflow.runtime.ledger.schema import TABLES, open_ledger
from hflow.testing import ScriptedEngine
from hflow.training.interface import TrainShard
from hflow.types import Unit
from hflow.workers.interface import NodeProgram, TrajectoryCounts
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.sample_writer import SampleWriter
from hflow.workers.storage.trajectory_list import without_repeated_draws

CUT = Read("@trajectory", "trajectory", "gen", "gen", Unit.TOKEN, Unit.TOKEN, "tensor")
TRAJECTORIES = [[5], [4, 5], [3], [1], [5, 3, 4], [4], [3, 4], [2], [1, 5], [6]]
"""Tokens of each trajectory of the samples of `reduction_cases`."""


def with_trajectories(batch: Batch, lengths: list[list[int]]) -> Batch:
    """Return samples cut into trajectories, in which no first token is learned, as none has a prediction."""
    assert [sum(each) for each in lengths] == batch.lengths.tolist()
    index = [number for each in lengths for number, length in enumerate(each) for _ in range(length)]
    mask = np.array(batch.columns["loss_mask"].values, dtype=bool)
    mask[np.cumsum([0, *(length for each in lengths for length in each)])[:-1]] = False
    return batch.with_columns(
        {"trajectory": Column(Unit.TOKEN, np.array(index)), "loss_mask": Column(Unit.TOKEN, mask)}
    )


def test_a_sample_is_cut_into_rows():
    batch = with_trajectories(cases.make_batch(), TRAJECTORIES).take([4, 3, 8])
    rows = cut_trajectories(batch)
    assert rows.lengths.tolist() == [5, 3, 4, 1, 1, 5]
    assert rows.samples.tolist() == [4, 4, 4, 3, 8, 8]
    assert rows.groups.tolist() == [1, 1, 1, 1, 3, 3]
    assert (
        rows.columns["sequence_entry"].values.tolist()
        == batch.columns["sequence_entry"].values[[0, 0, 0, 1, 2, 2]].tolist()
    )
    assert rows.columns["token_entry"] == batch.columns["token_entry"]


@pytest.mark.first(5)
@pytest.mark.parametrize("mask", ["none", "samples", "tokens"])
@pytest.mark.parametrize("reduction", [name for name in cases.REDUCTIONS if name != "group-mean"])
def test_losses_count_an_episode_once_however_many_trajectories_it_has(reduction, mask):
    """The known answers are those of samples that are one sequence each."""
    batch = with_trajectories(cases.make_batch(), TRAJECTORIES)
    call = cases.call_of(reduction, mask)
    call = replace(call, reads=(*call.reads, CUT))
    for num_minibatches in (1, 3):
        wanted = cases.loss_by_hand(batch, reduction, mask, num_minibatches)
        for size in (1, 5, 1000):  # trajectories of a sample are in different micro-batches, or in one
            backend = kit.model(tokens_per_microbatch=size)
            for num_shards in (1, 2):
                loss = backend.train(call, cases.shards_of(batch, num_minibatches, num_shards), 0)["loss"]
                assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_model_computes_each_trajectory_by_itself():
    """Log-probs are those of samples that have one trajectory each, and so are the weights of a step."""
    lengths = [[7, 4], [9], [3, 5, 6]]
    episodes = with_trajectories(kit.make_batch([sum(each) for each in lengths]), lengths)
    rows = cut_trajectories(episodes)
    alone = replace(rows, samples=np.arange(len(rows)))
    call = kit.call(lambda out: out.logprobs, "token", [CUT])
    (found,) = kit.model(tokens_per_microbatch=8).infer(call, [episodes])
    (wanted,) = kit.model().infer(replace(call, reads=()), [alone])
    assert found.samples.tolist() == [0, 1, 2]
    assert found.lengths.tolist() == [11, 9, 14]
    np.testing.assert_allclose(found.columns["result"].values, wanted.columns["result"].values, atol=1e-6)

    reads = [kit.read("advantages", Unit.SEQUENCE)]
    train = kit.call(
        lambda out, seqs, advantages: -out.logprobs * advantages[seqs.index],
        "token",
        reads,
        reduce="token-mean",
    )
    backends = [kit.model(tokens_per_microbatch=8), kit.model()]
    backends[0].train(replace(train, reads=(*train.reads, CUT)), [TrainShard((episodes,))], 0)
    backends[1].train(train, [TrainShard((alone,))], 0)
    for name, weight in kit.weights(backends[0]).items():
        np.testing.assert_allclose(weight, kit.weights(backends[1])[name], atol=1e-5)


def scripted(*replies: str) -> ScriptedEngine:
    return ScriptedEngine(list(replies), version=3)


async def branches() -> list[Trajectory]:
    """Return a conversation, another end of its first turn, and one that only looks alike."""
    engine = scripted("ab", "cd", "cde", "ab")
    first = await engine.complete("x")
    return [
        await engine.complete(first.add("user", "y")),
        await engine.complete(first.add("user", "y")),
        await engine.complete("x"),
    ]


def learned_texts(trajectory: Trajectory) -> str:
    pairs = zip(trajectory.input_ids, trajectory.loss_mask, strict=True)
    return "".join(chr(token) if learned else "." for token, learned in pairs)


def test_draws_that_trajectories_share_are_learned_in_the_first_one():
    long, branch, lookalike = without_repeated_draws(asyncio.run(branches()))
    assert learned_texts(long) == ".ab\3.cd\3"
    assert learned_texts(branch) == ".....cde\3"  # "ab" is the same draw; "cd" is another one
    assert learned_texts(lookalike) == ".ab\3"
    assert [x.num_turns for x in (long, branch, lookalike)] == [2, 1, 1]
    assert branch.versions == (-1,) * 5 + (3,) * 4
    assert branch.behav_logprobs == (0.0,) * 5 + (-1.0,) * 4
    again = without_repeated_draws([long, long])
    assert learned_texts(again[1]) == "." * 8
    assert again[1].num_turns == 0


def test_a_turn_that_the_first_trajectory_does_not_learn_is_learned_in_the_next():
    long, branch, _ = asyncio.run(branches())
    masked = replace(long, loss_mask=(False,) * 5 + long.loss_mask[5:])
    assert learned_texts(without_repeated_draws([masked, branch])[1]) == ".ab\3.cde\3"


def writer() -> SampleWriter:
    returns = (("bonus", "sequence"), *((made.field, str(made.unit)) for made in EPISODE_FIELDS))
    program = NodeProgram(
        "agent", "generate", "sample", "agent", "agent", branches, (), (), returns, True, (), {}, {}
    )
    return SampleWriter(program, ("agent",), SampleStore(), returns_list=True)


def test_the_sample_of_a_list():
    sources, writes = asyncio.run(branches()), writer()
    result = writes.read((tuple(sources), 0.5, {"depth": 2}))
    event = writes.write(7, 1, result, {})
    names = ("agent/trajectory", "agent/input_ids", "agent/num_tokens", "agent/num_turns", "agent/completion")
    batch = writes.store.gather("agent", names, [7])
    columns = {name: column.values for name, column in batch.columns.items()}
    assert columns["trajectory"].tolist() == [0] * 8 + [1] * 9 + [2] * 4
    assert columns["input_ids"].tolist() == [token for x in sources for token in x.input_ids]
    assert (columns["num_tokens"], columns["num_turns"], columns["completion"]) == ([13], [4], ["ab"])
    assert event.length == 21
    assert event.segments == ((3, 13),)
    assert event.trajectories == (
        TrajectoryCounts(8, 6, 2, 3, 3),
        TrajectoryCounts(9, 4, 1, 3, 3),
        TrajectoryCounts(4, 3, 1, 3, 3),
    )
    (described,) = writes.store.values("agent", "trajectories", [7])
    assert [x["completion"] for x in described] == ["cd", "cde", "ab"]
    assert [x["num_tokens"] for x in described] == [6, 4, 3]
    assert described[1]["messages"][-1] == {"role": "assistant", "content": "cde"}


@pytest.mark.parametrize(("returned", "problem"), [([], "an empty one"), ("ab", "str"), ([1], "not 1")])
def test_what_is_no_list_of_trajectories_refuses_the_sample(returned, problem):
    with pytest.raises(ReturnError, match=problem):
        writer().read((returned, 0.5, {}))


def test_a_ledger_of_version_0_1_is_read_and_continued(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(TABLES)
        database.executescript(
            "INSERT INTO about VALUES ('format', 3), ('started_at', 0.0), ('max_lag', 0);"
            "INSERT INTO streams VALUES (0, 'gen', 'gen', 'train', 2, 1, 1, NULL)"
        )
    for _ in range(2):  # without the table of trajectories, and with it
        database = open_ledger(path)
        assert database.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
        database.close()
        rewind(path, 0, 0)
