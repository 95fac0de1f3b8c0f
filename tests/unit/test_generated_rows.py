"""Rows that a function of the recipe yields: by index, without end, the same in each call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hflow import RecipeError, rows
from hflow.base.errors import DataError
from hflow.data.rows import generated
from hflow.data.rows.datasets import DataSettings, RowSource, check_rows, open_dataset
from hflow.types import Unit

COLUMNS = {"prompt": Unit.TEXT}


@rows
def numbers(split: str, first: int = 0) -> Iterator[dict[str, Any]]:
    for number in itertools.count(first):
        yield {"prompt": f"{split} {number}"}


def three() -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {"prompt": str(number)}


def drawn() -> Iterator[dict[str, Any]]:
    while True:
        yield {"prompt": str(random.random())}


def not_rows() -> Iterator[Any]:
    yield "a text"


def failing() -> Iterator[dict[str, Any]]:
    yield {"prompt": "a"}
    raise ValueError("no more")


def opened(function: Callable[..., Any], **options: Any) -> tuple[DataSettings, RowSource]:
    settings = DataSettings(generator=function.__name__, function=function, key="data.train", **options)
    return settings, open_dataset(settings, COLUMNS)


def test_a_row_depends_on_its_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "NUM_KEPT", 10)
    _, source = opened(numbers, arguments={"first": 5}, split="heldout")
    for index in (0, 100, 99, 91, 3, 100):  # 3 is not kept any more
        assert source.row(index) == {"prompt": f"heldout {5 + index}"}


def test_a_limit_makes_a_function_a_dataset_with_an_end() -> None:
    settings, source = opened(three, limit=3)
    check_rows(settings, source)
    assert [source.row(index)["prompt"] for index in range(len(source))] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (three, {}, "three() has ended after 3 rows; set data.train.limit=3"),
        (three, {"limit": 4}, "three() has ended after 3 rows; set data.train.limit=3"),
        (three, {"arguments": {"x": 1}}, "data.train.arguments do not fit three()"),
        (drawn, {}, "drawn(), row 0 is another one in each call"),
        (not_rows, {}, "not_rows(), row 0 is a str; yield a dict"),
        (failing, {}, "failing(), row 1: ValueError: no more"),
        (numbers, {"map": {"prompt": "question"}}, "no column 'question' (it has 'prompt')"),
    ],
)
def test_what_is_refused_before_a_run(
    function: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as refused:
        check_rows(*opened(function, **options))
    assert message in str(refused.value)


def test_only_generator_functions_make_rows() -> None:
    with pytest.raises(RecipeError, match=r"<lambda>: @rows needs a generator function"):
        rows(lambda: [{"prompt": "a"}])
