"""Which workers hold which fields while batches of two steps are in use."""

from __future__ import annotations

from hflow.data_plane.locations import DataLocations

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


def test_moved_fields_have_two_holders_and_batch_outputs_one() -> None:
    at = two_batches().holders(["ids", "ref", "reward"], FIRST)
    assert at["ids"][2] == {5, 0}
    assert at["ref"][2] == {0}
    assert at["reward"][2] == {5}


def test_fields_with_the_same_holders_share_a_mapping() -> None:
    holdings = two_batches()
    holdings.add_outputs(["a", "b"], FIRST, 1)
    at = holdings.holders(["a", "b", "reward", "ids"], FIRST)
    assert at["a"] is at["b"]
    assert at["a"][0] == {1}
    assert at["reward"] is not at["ids"]


def test_dropping_a_field_of_one_step_leaves_that_of_the_next() -> None:
    """Nodes of the next step may have run before the last reader of this one."""
    holdings = two_batches()
    assert holdings.drop_fields(["ref"], FIRST) == {5: [0, 2], 6: [1, 3], 0: [0, 1, 2, 3]}
    assert holdings.holders(["ref"], SECOND)["ref"][4] == {0}
    assert holdings.workers_of(SECOND) == {5: [4, 6], 6: [5, 7], 0: [4, 5, 6, 7]}


def test_a_sample_that_leaves_does_not_take_its_batch_along() -> None:
    holdings = two_batches()
    holdings.forget([0])
    assert holdings.workers_of([0]) == {}
    assert holdings.workers_of(FIRST) == {5: [2], 6: [1, 3], 0: [1, 2, 3]}
    holdings.forget(FIRST)
    assert holdings.workers_of(FIRST) == {}
    assert holdings.lengths(SECOND) == {4: 40, 5: 50, 6: 60, 7: 70}
