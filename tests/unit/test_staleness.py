"""The capacity formula and the age rule, by hand."""

from __future__ import annotations

import pytest

from hflow.config.schema import ScheduleConfig
from hflow.runtime.state.rules import capacity, is_stale, look_ahead_limit


@pytest.mark.parametrize(
    ("max_staleness", "sync_every", "lag"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 4), (0, 3, 2), (2, 3, 8), (0.5, 1, 1), (0.5, 4, 5), (0.1, 10, 10)],
)
def test_certified_lag(max_staleness: float, sync_every: int, lag: int):
    assert ScheduleConfig(max_staleness=max_staleness, sync_every=sync_every).certified_lag == lag


def test_synchronous_admission_is_one_batch_a_version():
    schedule = ScheduleConfig()
    assert [schedule.admission_limit(version, 8) for version in range(4)] == [8, 16, 24, 32]


def test_staleness_admits_batches_ahead():
    assert ScheduleConfig(max_staleness=2).admission_limit(version=3, batch=8) == (2 + 3 + 1) * 8


def test_sync_every_reads_syncs_for_versions_and_scales_the_batch():
    schedule = ScheduleConfig(max_staleness=1, sync_every=2)
    assert [schedule.admission_limit(version, 8) for version in range(5)] == [32, 32, 48, 48, 64]


def test_a_fraction_admits_that_share_of_a_sync():
    schedule = ScheduleConfig(max_staleness=0.5)
    assert [schedule.admission_limit(version, 8) for version in range(3)] == [12, 20, 28]
    assert ScheduleConfig(max_staleness=0.5, sync_every=4).admission_limit(4, 8) == 64 + 16


def test_a_fraction_counts_whole_groups_only():
    assert ScheduleConfig(max_staleness=0.3).admission_limit(0, 4) == 5
    # 0.29 * 100 is a little below 29 in binary
    assert ScheduleConfig(max_staleness=0.29).admission_limit(0, 100) == 129


def test_an_empty_batch_counts_as_one():
    assert ScheduleConfig().admission_limit(0, 0) == 1


@pytest.mark.parametrize("max_staleness", [0, 0.25, 0.5, 1, 1.75, 2, 3])
@pytest.mark.parametrize("sync_every", range(1, 4))
def test_the_last_group_admitted_trains_within_the_certified_lag(max_staleness: float, sync_every: int):
    batch, schedule = 4, ScheduleConfig(max_staleness=max_staleness, sync_every=sync_every)
    for version in range(0, 12, sync_every):
        last = schedule.admission_limit(version, batch) - 1
        assert last // batch - version == schedule.certified_lag


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
    limit = ScheduleConfig().admission_limit(0, 4)
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
