"""What a body may return: one table of values, and what each kind of body makes of a wrong one."""

from __future__ import annotations

import dataclasses
import enum
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from hflow.base.errors import ReturnError
from hflow.data.batches.returned_values import DeclaredReturns, checked_trajectory
from hflow.types import Trajectory

NUM_TOKENS = 3
UNITS = {
    "float": "sequence",
    "int": "sequence",
    "bool": "sequence",
    "str": "text",
    "list[float]": "token",
    "list[int]": "token",
    "list[bool]": "token",
    "dict": "json",
    "list[dict]": "json",
    "list[dict] of messages": "messages",
}


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    HIGH = "high"


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


itself: list[Any] = []
itself.append(itself)


def read(declared: str, value: Any) -> Any:
    returns = DeclaredReturns("score", (("field", UNITS[declared]),), {"field": declared})
    (values, metrics) = returns.read(value, (NUM_TOKENS,))
    assert metrics == {}
    return values[0]


GRADED = torch.tensor(0.5, requires_grad=True) * 1
"""Not a leaf: numpy does not take it, and pickle keeps its gradient."""


@pytest.mark.parametrize(
    ("declared", "value", "kept"),
    [
        ("float", 0.7, 0.7),
        ("float", 1, 1.0),
        ("float", True, 1.0),
        ("float", np.float64(0.7), 0.7),
        ("float", np.array(0.5), 0.5),
        ("float", np.int32(2), 2.0),
        ("float", torch.tensor(0.5), 0.5),
        ("float", torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        ("float", GRADED, 0.5),
        ("int", 12345678901234, 12345678901234),
        ("int", 2**63 - 1, 2**63 - 1),
        ("int", 3.0, 3),
        ("int", np.uint8(3), 3),
        ("int", Level.HIGH, 3),
        ("int", torch.tensor(3), 3),
        ("bool", True, True),
        ("bool", 0, False),
        ("bool", np.bool_(True), True),
        ("bool", torch.tensor(False), False),
        ("str", "a", "a"),
        ("str", np.str_("a"), "a"),
        ("str", Name.HIGH, "high"),
        ("list[float]", [0.5, 1, True], [0.5, 1.0, 1.0]),
        ("list[float]", (0.5, 0.5, 0.5), [0.5, 0.5, 0.5]),
        ("list[float]", np.ones(3), [1.0] * 3),
        ("list[float]", torch.ones(3, requires_grad=True), [1.0] * 3),
        ("list[int]", [1, 2, 3], [1, 2, 3]),
        ("list[bool]", torch.tensor([True, False, True]), [True, False, True]),
        ("dict", {"a": (1, np.float32(0.5)), "b": None}, {"a": [1, 0.5], "b": None}),
        ("list[dict]", [{"a": torch.tensor([1, 2])}], [{"a": [1, 2]}]),
        ("list[dict] of messages", [{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
    ],
)
def test_what_may_be_returned(declared: str, value: Any, kept: Any):
    got = read(declared, value)
    assert got == kept
    assert types_of(got) == types_of(kept)


def types_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    return (type(value), types_of(list(value.values()))) if isinstance(value, dict) else type(value)


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        ("float", None, "must be a number, the body returned None"),
        ("float", "0.5", "must be a number, the body returned '0.5'"),
        ("float", [0.5], r"must be a number, the body returned \[0.5\]"),
        ("float", torch.tensor([0.5]), r"must be a number, the body returned \[0.5\]"),
        ("float", {}, "must be a number, the body returned {}"),
        ("float", 1j, "must be a number, the body returned complex"),
        ("float", torch.tensor(1j), r"must be a number, the body returned Tensor of shape \[\]"),
        ("float", Decimal(1), "must be a number, the body returned Decimal"),
        ("float", b"1", "must be a number, the body returned bytes"),
        ("float", Unprintable(), "must be a number, the body returned Unprintable"),
        ("float", [Unprintable()], "must be a number, the body returned list"),
        ("float", lambda: 1, "must be a number, the body returned function"),
        ("float", itself, r"must be a number, the body returned \[\[...\]\]"),
        ("float", math.nan, "is nan, not a finite number"),
        ("float", torch.tensor(-torch.inf), "is -inf, not a finite number"),
        ("float", 2**53 + 1, "declared as float, which cannot hold 9007199254740993; declare it as int"),
        ("int", 0.5, "must be a whole number, the body returned 0.5"),
        ("int", 2**63, "a number of more than 64 bits"),
        ("int", 1e300, "a number of more than 64 bits"),
        ("bool", 0.3, "must be True or False, the body returned 0.3"),
        ("bool", "no", "must be a number, the body returned 'no'"),
        ("bool", None, "must be a number, the body returned None"),
        ("str", None, "must be a string, the body returned None"),
        ("str", b"a", "must be a string, the body returned bytes"),
        ("str", "\ud800", "has half of a surrogate pair"),
        ("str", ["a"], r"must be a string, the body returned \['a'\]"),
        ("list[float]", 0.5, "must be a list of 3 numbers; the body returned 0.5"),
        ("list[float]", [0.5], "must be a list of 3 numbers; the body returned 1 of them"),
        ("list[float]", [0.5, None, 1], "must be a number, the body returned None"),
        ("list[float]", [0.5, math.inf, 1.0], "is inf, not a finite number"),
        ("list[float]", [[0.5]] * 3, r"must be a number, the body returned \[0.5\]"),
        ("list[int]", [1, 2, 0.5], "must be a whole number, the body returned 0.5"),
        ("dict", None, "must be JSON.*the body returned None"),
        ("dict", [], r"must be JSON.*the body returned \[\]"),
        ("dict", {1: 2}, "must be JSON.*the body returned {1: 2}"),
        ("dict", {"a": math.nan}, "has NaN, which is no JSON value"),
        ("dict", {"a": {1, 2}}, "must be JSON.*the body returned {'a': {1, 2}}"),
    ],
)  # fmt: skip
def test_what_is_refused(declared: str, value: Any, message: str):
    with pytest.raises(ReturnError, match=f"^node 'score': 'field' .*{message}"):
        read(declared, value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "field must be a list with at least one message, but it is empty"),
        (None, "field must be a list with at least one message, but it is None"),
        ([{"role": "human", "content": "a"}], r"field\[0\].role must be one of .*did you mean 'user'"),
    ],
)
def test_messages_are_those_of_datasets(value: Any, message: str):
    with pytest.raises(ReturnError, match=f"^node 'score': {message}"):
        read("list[dict] of messages", value)


def test_several_results_and_metrics():
    returns = DeclaredReturns("score", (("a", "sequence"), ("b", "text")), {"a": "float"}, metrics=True)
    assert returns.read((1, "x", {"m": np.int8(2), "n": True}), (3,)) == ((1.0, "x"), {"m": 2.0, "n": 1.0})
    for result, message in (
        ((1, "x"), "returned 2 results, but declares 3: a, b, metrics"),
        (None, "returned 1 results, but declares 3"),
        (torch.ones(3), "returned 1 results, but declares 3"),
        ((1, "x", None), "its last result is a NoneType, not a dict"),
        ((1, "x", {"m": None}), "metric 'm' must be a number, not None"),
        ((1, "x", {"m": "0.5"}), "metric 'm' must be a number, not '0.5'"),
        ((1, "x", {"m": torch.ones(2)}), r"metric 'm' must be a number, not Tensor of shape \[2\]"),
        ((1, "x", {"m": 10**400}), "metric 'm' is larger than any float"),
        ((1, "x", {3: 0.5}), "metric 3 must be a number"),
    ):
        with pytest.raises(ReturnError, match=message):
            returns.read(result, (3,))


def test_results_of_a_group():
    returns = DeclaredReturns(
        "spread", (("keep", "group"), ("a", "sequence"), ("b", "token")), {"keep": "bool"}, level="group"
    )
    read = returns.read((True, torch.tensor([0.5, 1.0]), [[1], [2, 3]]), (1, 2))
    assert read == ((True, [0.5, 1.0], [[1], [2, 3]]), {})
    for result, message in (
        ((0.5, [1, 2], [[1], [2, 3]]), "'keep' must be True or False, the body returned 0.5"),
        ((True, [1], [[1], [2, 3]]), "'a' must be a list of 2 values, the body returned 1 values"),
        ((True, 0.5, [[1], [2, 3]]), "'a' must be a list of 2 values, the body returned 0.5"),
        (
            (True, {0: 1, 1: 2}, [[1], [2, 3]]),
            "'a' must be a list of 2 values, the body returned {0: 1, 1: 2}",
        ),
        ((True, [1, None], [[1], [2, 3]]), "'a' must be a number, the body returned None"),
        ((True, [1, 2], [[1], [2]]), "'b' is per token, so it must be a list of 2 numbers.* 1 of them"),
    ):
        with pytest.raises(ReturnError, match=message):
            returns.read(result, (1, 2))


TRAJECTORY = Trajectory((5, 6), (False, True), (0.0, -0.5), (-1, 0), ({"role": "user", "content": "a"},))


def test_trajectories():
    assert checked_trajectory("talk", TRAJECTORY) is TRAJECTORY
    arrays = dataclasses.replace(
        TRAJECTORY, input_ids=torch.tensor([5, 6]), loss_mask=[0, 1], behav_logprobs=np.array([0.0, -0.5])
    )
    assert checked_trajectory("talk", arrays) == TRAJECTORY
    for changes, message in (
        ({"input_ids": (5, 6.5)}, "'input_ids of the trajectory' must be a whole number.*6.5"),
        ({"input_ids": (5, -6)}, "input_ids of the trajectory has -6; the lowest is 0"),
        ({"loss_mask": (False, 2)}, "'loss_mask of the trajectory' must be True or False"),
        ({"behav_logprobs": (0.0, None)}, "'behav_logprobs of the trajectory' must be a number.*None"),
        ({"behav_logprobs": (0.0, math.nan)}, "behav_logprobs of the trajectory has a value that is not fin"),
        ({"versions": (-2, 0)}, "versions of the trajectory has -2; the lowest is -1"),
        ({"messages": ({"role": object()},)}, "'messages of the trajectory' must be JSON"),
        ({"completion": None}, "'completion of the trajectory' must be a string"),
    ):  # fmt: skip
        with pytest.raises(ReturnError, match=message):
            checked_trajectory("talk", dataclasses.replace(TRAJECTORY, **changes))
    for wrong, got in ((None, "None"), (Trajectory((), (), (), ()), "an empty one"), ("a", "'a'")):
        with pytest.raises(ReturnError, match=f"must return a trajectory with tokens, not {got}"):
            checked_trajectory("talk", wrong)
