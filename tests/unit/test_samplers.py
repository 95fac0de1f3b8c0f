"""The ready-made samplers of rows: which row is next after known results."""

from __future__ import annotations

from hflow.data.rows.row_order import RowOrder
from hflow.data.rows.samplers import difficulty_pools, skip_settled
from hflow.types import State
from hflow.types.group_result import GroupResult

ORDER = RowOrder(3, seed=0, shuffle=False)


def test_rows_that_are_always_right_or_wrong_return_after_some_epochs() -> None:
    state, finished, drawn = State(), [], []
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 0.0)}
    for position in range(12):
        row, reason = skip_settled(state, finished, position, ORDER, rest=2)
        finished = [GroupResult(row, rewards[row])]
        drawn.append(row)
    assert drawn[:8] == [0, 1, 2, 1, 1, 0, 1, 2]
    assert "epoch" in reason


def test_rows_are_drawn_again_when_all_rest() -> None:
    state = State()
    settled = [GroupResult(row, (0.0, 0.0)) for row in range(3)]
    assert skip_settled(state, settled, 0, ORDER, rest=1) == (0, "epoch 3, again after 1 epochs without it")


def test_easy_and_hard_rows_are_in_pools() -> None:
    results = [GroupResult(0, (1.0, 1.0)), GroupResult(1, (0.0, 1.0)), GroupResult(2, (0.0, 0.0))]
    draws = [
        difficulty_pools(State(), results, position, ORDER, easy_share=easy, hard_share=hard)[0]
        for position in range(9)
        for easy, hard in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0))
    ]
    assert draws == [0, 2, 1] * 9


def test_a_row_changes_its_pool_with_its_results() -> None:
    state = State()
    results = [GroupResult(row, (0.0, 0.0)) for row in range(3)]
    assert (
        difficulty_pools(state, results, 0, ORDER, easy_share=0, hard_share=0)[1]
        == "hard pool, mean reward 0"
    )
    assert difficulty_pools(state, [GroupResult(0, (1.0, 1.0))], 1, ORDER, easy_share=0, hard_share=0)[0] == 1
    refused = [GroupResult(1, (), is_refused=True)]  # it has no result, so it returns to its pool
    draws = [difficulty_pools(state, refused if i == 2 else [], i, ORDER, hard_share=1)[0] for i in (2, 3)]
    assert draws == [2, 1]
