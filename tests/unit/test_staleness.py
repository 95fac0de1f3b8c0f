"""The capacity formula and the age rule, by hand."""

from __future__ import annotations

import pytest

from hflow.planner.plan.staleness import admission_limit, certified_lag
from hflow.runtime.state.rules import capacity, is_stale, look_ahead_limit


@pytest.mark.parametrize(
    ("max_staleness", "sync_every", "lag"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 4), (0, 3, 2), (2, 3, 8), (0.5, 1, 1), (0.5, 4, 5), (0.1, 10, 10)],
)
def test_certified_lag(max_staleness: float, sync_every: int, lag: int):
    assert certified_lag(max_staleness, sync_every) == lag


def test_synchronous_admission_is_one_batch_a_version():
    assert [admission_limit(version, 8, 0) for version in range(4)] == [8, 16, 24, 32]


def test_staleness_admits_batches_ahead():
    assert admission_limit(version=3, batch=8, max_staleness=2) == (2 + 3 + 1) * 8


def test_sync_every_reads_syncs_for_versions_and_scales_the_batch():
    limits = [admission_limit(version, 8, 1, sync_every=2) for version in range(5)]
    assert limits == [32, 32, 48, 48, 64]


def test_a_fraction_admits_that_share_of_a_sync():
    assert [admission_limit(version, 8, 0.5) for version in range(3)] == [12, 20, 28]
    assert admission_limit(4, 8, 0.5, sync_every=4) == 64 + 16


def test_a_fraction_counts_whole_groups_only():
    assert admission_limit(0, 4, 0.3) == 5
    assert admission_limit(0, 100, 0.29) == 129  # which in binary is a little below 29


def test_an_empty_batch_counts_as_one():
    assert admission_limit(0, 0, 0) == 1


@pytest.mark.parametrize("max_staleness", [0, 0.25, 0.5, 1, 1.75, 2, 3])
@pytest.mark.parametrize("sync_every", range(1, 4))
def test_the_last_group_admitted_trains_within_the_certified_lag(max_staleness: float, sync_every: int):
    batch = 4
    for version in range(0, 12, sync_every):
        last = admission_limit(version, batch, max_staleness, sync_every) - 1
        assert last // batch - version == certified_lag(max_staleness, sync_every)


def test_unversioned_sources_look_one_batch_ahead():
    assert look_ahead_limit(0, 8) == 16
    assert look_ahead_limit(5, 8) == 56


@pytest.mark.parametrize(
    ("free_samples", "group_size", "limit", "admitted", "expected"),
    [
        (100, 4, 10, 3, 7),  # the formula binds
        (11, 4, 10, 3, 2),  # concurrency binds, floored to groups
        (3, 4, 10, 3, 0),  # no room for a whole group
        (-5, 4, 10, 3, 0),
        (100, 4, 10, 12, 0),
    ],
)
def test_capacity(free_samples: int, group_size: int, limit: int, admitted: int, expected: int):
    assert capacity(free_samples, group_size, limit, admitted) == expected


def test_a_refusal_gives_its_place_back():
    limit = admission_limit(0, 4, 0)
    assert capacity(99, 1, limit, admitted=4) == 0
    assert capacity(99, 1, limit, admitted=3) == 1


@pytest.mark.parametrize(
    ("oldest", "step", "lag", "stale"),
    [(5, 5, 0, False), (4, 5, 0, True), (3, 5, 2, False), (2, 5, 2, True), (0, 2, 2, False)],
)
def test_age_rule(oldest: int, step: int, lag: int, stale: bool):
    assert is_stale(oldest, step, lag) is stale


def test_samples_without_versions_never_age():
    assert not is_stale(-1, 10**6, 0)
