"""The rows of `routed_experts`, from the arrays with which vLLM returns experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hflow.base.errors import BackendError
from hflow.engines.vllm.expert_rows import ExpertRows
from hflow.types.routed_experts import routing_format

EXPERTS: npt.NDArray[np.uint8] = np.array([[[9, 9], [4, 1], [0, 5]], [[9, 9], [2, 3], [3, 0]]], np.uint8)
"""Of two tokens. The first of three layers has none, so vLLM does not write its entries."""
ROWS = ExpertRows((1, 2), 2, routing_format(num_layers=2, per_token=2, num_experts=6))


def test_a_row_has_the_experts_of_the_layers_that_have_some() -> None:
    assert ROWS.pack(EXPERTS, 2) == [bytes([4, 1, 0, 5]), bytes([2, 3, 3, 0])]
    assert ROWS.pack(EXPERTS[:0], 0) == []


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (300, np.uint16)])
def test_numbers_of_many_experts_take_two_bytes(num_experts: int, dtype: type) -> None:
    """vLLM returns one byte for 256 experts, of which hflow needs all bits for tokens without a record."""
    rows = ExpertRows((0,), 2, routing_format(num_layers=1, per_token=2, num_experts=num_experts))
    experts = np.array([[[num_experts - 1, 0]]], dtype)
    assert rows.pack(experts, 1) == [np.array([num_experts - 1, 0], np.int16).tobytes()]


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (None, "returned no experts for 2 tokens"),
        (EXPERTS[:1], r"of shape \[1, 3, 2\] for 2 tokens"),
        (np.concatenate([EXPERTS, EXPERTS]), r"of shape \[4, 3, 2\] for 2 tokens"),
        (EXPERTS[:, :2], r"of shape \[2, 2, 2\] for 2 tokens, 3 layers"),
        (EXPERTS[:, :, :1], r"of shape \[2, 3, 1\] for 2 tokens, 3 layers and 2 experts"),
        (np.zeros_like(EXPERTS), "the same expert twice, so a layer was not recorded"),
    ],
    ids=["none", "too few", "too many", "layers", "experts", "zeros"],
)
def test_missing_experts_are_an_error(experts: npt.NDArray[Any] | None, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        ROWS.pack(experts, 2)
