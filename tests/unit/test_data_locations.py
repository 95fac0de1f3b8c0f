"""Which workers hold which fields while batches of two steps are in use."""

from __future__ import annotations

from hflow.data_plane.locations import DataLocations
from hflow.data_plane.redistribute import NO_WORKER

FIRST, SECOND = (0, 1, 2, 3), (4, 5, 6, 7)


def two_batches() -> DataLocations:
    """Samples on workers 5 (even ones) and 6; worker 0 made `ref` of all of them."""
    holdings = DataLocations()
    for sample in (*FIRST, *SECOND):
        holdings.add_sample(sample, 5 + sample % 2, length=10 * sample)
    for batch in (FIRST, SECOND):
        holdings.add_copies(["ids"], batch, 0)
        holdings.add_outputs(["ref"], batch, 0)
    return holdings


def holders(
    holdings: DataLocations, fields: list[str], samples: tuple[int, ...]
) -> dict[str, list[set[int]]]:
    """Return field -> the workers of each sample."""
    return {
        field: [set(workers) - {NO_WORKER} for workers in group.workers.T.tolist()]
        for group in holdings.holders(fields, samples).groups
        for field in group.fields
    }


def test_moved_fields_have_two_holders_and_batch_outputs_one() -> None:
    at = holders(two_batches(), ["ids", "ref", "reward"], FIRST)
    assert at == {"ids": [{5, 0}, {6, 0}] * 2, "ref": [{0}] * 4, "reward": [{5}, {6}] * 2}


def test_fields_with_the_same_holders_share_a_column() -> None:
    holdings = two_batches()
    holdings.add_outputs(["a", "b"], FIRST, 1)
    at = holdings.holders(["a", "b", "reward", "ids"], reversed(FIRST))
    assert [group.fields for group in at.groups] == [("a", "b"), ("reward",), ("ids",)]
    assert at.groups[0].workers.tolist() == [[1] * 4]
    assert at.samples.tolist() == list(FIRST)
    assert at.tokens.tolist() == [0, 10, 20, 30]


def test_fields_that_moved_together_can_part() -> None:
    holdings = two_batches()
    holdings.add_outputs(["a", "b"], FIRST, 1)
    holdings.add_copies(["b"], (1, 2), 3)
    holdings.add_copies(["b", "reward"], (2,), 5)
    at = holders(holdings, ["a", "b", "reward"], FIRST)
    assert at["a"] == [{1}] * 4
    assert at["b"] == [{1}, {1, 3}, {1, 3, 5}, {1}]
    assert at["reward"] == [{5}, {6}, {5}, {6}]


def test_dropping_a_field_of_one_step_leaves_that_of_the_next() -> None:
    """Nodes of the next step may have run before the last reader of this one."""
    holdings = two_batches()
    assert holdings.drop_fields(["ref"], FIRST) == {5: [0, 2], 6: [1, 3], 0: [0, 1, 2, 3]}
    assert holders(holdings, ["ref"], FIRST + SECOND) == {"ref": [set()] * 4 + [{0}] * 4}
    assert holdings.workers_of(SECOND) == {5: [4, 6], 6: [5, 7], 0: [4, 5, 6, 7]}


def test_a_sample_that_leaves_does_not_take_its_batch_along() -> None:
    holdings = two_batches()
    holdings.forget([0])
    assert holdings.workers_of([0]) == {}
    assert holdings.workers_of(FIRST) == {5: [2], 6: [1, 3], 0: [1, 2, 3]}
    holdings.forget(FIRST)
    assert holdings.workers_of(FIRST) == {}
    assert holdings.lengths(SECOND) == [40, 50, 60, 70]


def test_a_row_that_another_sample_had_is_empty() -> None:
    holdings = two_batches()
    holdings.forget(FIRST)
    for sample in range(8, 200):
        holdings.add_sample(sample, 3, length=1)
    assert holders(holdings, ["ids", "ref"], tuple(range(8, 200))) == {
        "ids": [{3}] * 192,
        "ref": [set()] * 192,
    }
    assert holders(holdings, ["ids", "ref"], SECOND) == {"ids": [{5, 0}, {6, 0}] * 2, "ref": [{0}] * 4}
    assert holdings.by_home((8, 4, 6)) == {3: [8], 5: [4, 6]}
