"""Rows of the package reasoning-gym: splits without a common question, arguments, and what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from hflow import rewards
from hflow.base.errors import DataError
from hflow.data.rows.datasets import DataSettings, RowSource, open_dataset
from hflow.types import Unit

pytestmark = pytest.mark.skipif(not find_spec("reasoning_gym"), reason="needs reasoning-gym")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
COLUMNS = {"prompt": Unit.TEXT, "answer": Unit.TEXT}


def entry_of(task: str, **arguments: Any) -> dict[str, Any]:
    """The entry of a row, as it is when it was stored as JSON."""
    settings = DataSettings(generator=f"reasoning-gym:{task}", arguments={"size": 3, **arguments})
    entry: dict[str, Any] = json.loads(
        json.dumps(open_dataset(settings, {"entry": Unit.JSON}).row(1)["entry"])
    )
    return entry


def rows(task: str = "chain_sum", split: str = "train", **arguments: Any) -> RowSource:
    settings = DataSettings(generator=f"reasoning-gym:{task}", split=split, arguments={**SUMS, **arguments})
    return open_dataset(settings, COLUMNS)


def test_a_row_has_a_question_and_its_answer() -> None:
    source = rows(size=50)
    assert len(source) == 50
    for row in map(source.row, range(50)):
        question, _, problem = row["prompt"].rpartition(": ")
        assert question == "State the final answer to the following arithmetic problem"
        assert eval(problem.removesuffix("=")) == int(row["answer"])


def test_no_question_is_in_both_splits() -> None:
    train, heldout = rows(size=1000), rows(split="heldout")
    asked = {
        split: [source.row(i)["prompt"] for i in range(len(source))]
        for split, source in (("train", train), ("heldout", heldout))
    }
    assert set(asked["train"]).isdisjoint(asked["heldout"])
    assert len(set(asked["heldout"])) == len(asked["heldout"])
    assert 5 < len(asked["heldout"]) < 60  # a tenth of about 200 sums and differences of one digit


def test_rows_depend_on_the_seed_alone() -> None:
    first, again, other = rows(size=20), rows(size=20), rows(size=20, seed=12345)
    as_lists = [[source.row(i) for i in range(20)] for source in (first, again, other)]
    assert as_lists[0] == as_lists[1] != as_lists[2]


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        ("chain_sum", SUMS),
        pytest.param("arc_agi", {}, marks=pytest.mark.long),  # its scorer compares tuples, no JSON
        ("prime_factorization", {}),  # its scorer raises for what it cannot read
        ("n_queens", {}),  # the answer is a board
    ],
)
def test_the_tasks_own_scorer_scores_a_completion(task: str, arguments: dict[str, Any]) -> None:
    import reasoning_gym

    entry = entry_of(task, **arguments)
    source = reasoning_gym.create_dataset(task, **entry["arguments"])
    known = source[entry["number"]]
    assert known["question"] == entry["question"]
    assert rewards.reasoning_gym(f"so <answer> {known['answer']}\n</answer>, I think", entry) == 1.0
    assert rewards.reasoning_gym(f"<answer>no</answer> <answer>{known['answer']}</answer>", entry) == 1.0
    assert rewards.reasoning_gym(str(known["answer"]), entry) == 0.0
    assert rewards.reasoning_gym(f" {known['answer']} ", entry, tag="") == 1.0
    assert rewards.reasoning_gym("<answer>no</answer>", entry) < 0.5


def test_the_scorer_has_the_arguments_of_the_rows() -> None:
    exact, rounded = (
        entry_of("decimal_arithmetic", min_num_decimal_places=1, max_num_decimal_places=n) for n in (6, 1)
    )
    scores = [
        rewards.reasoning_gym(f"{float(entry['answer']) + 0.01:.6f}", entry, tag="")
        for entry in (exact, rounded)
    ]
    assert scores[0] < 1.0 == scores[1]


def test_another_column_is_no_entry() -> None:
    with pytest.raises(ValueError, match="is not that of a row of reasoning-gym"):
        rewards.reasoning_gym("<answer>3</answer>", {"answer": "3"})
    with pytest.raises(ValueError, match="asks another question"):
        rewards.reasoning_gym("<answer>3</answer>", {**entry_of("chain_sum", **SUMS), "question": "1 + 1 ="})


@pytest.mark.parametrize(
    ("task", "split", "arguments", "message"),
    [
        ("chain_sums", "train", {}, "there is no such task; did you mean 'chain_sum'"),
        ("", "train", {}, "there is no such task"),
        ("chain_sum", "test", {}, "reasoning-gym has no split 'test'"),
        ("chain_sum", "train", {"min_term": 2}, "unexpected keyword argument 'min_term'"),
        ("chain_sum", "train", {"min_terms": 3}, "arguments do not fit reasoning-gym:chain_sum"),
        ("chain_sum", "train", {"size": 0}, "size is 0; set it to a number of rows"),
        ("chain_sum", "train", {"seed": "x", "size": "many"}, "size is 'many'"),
    ],
)
def test_refusals(task: str, split: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(task, split, **arguments)


def test_a_generator_without_tasks_refuses_them() -> None:
    for settings in (
        DataSettings(generator="addition:three"),
        DataSettings(generator="addition", arguments={"digits": 3}),
    ):
        with pytest.raises(DataError, match="takes neither a task nor arguments"):
            open_dataset(settings, COLUMNS)
