"""Staleness of samples, by hand."""

from hflow.runtime.records.step_metrics import StalenessMetrics


def test_a_lag_has_a_part_in_flight_and_one_in_the_queue() -> None:
    staleness = StalenessMetrics()
    staleness.add_sample(0, 3, 3)
    staleness.add_sample(1, 2, 4)
    staleness.add_sample(2, 5, 5)
    staleness.add_sample(3, -1, -1)  # nothing of it was generated
    assert staleness.take_batch((0, 1, 2, 3), 5) == {
        "staleness/mean": (2 + 3 + 0) / 3,
        "staleness/in_flight": (0 + 2 + 0) / 3,
        "staleness/in_queue": (2 + 1 + 0) / 3,
        "staleness/max": 3.0,
        "staleness/lag_0": 1 / 3,
        "staleness/lag_2": 1 / 3,
        "staleness/lag_3": 1 / 3,
        "staleness/in_flight_0": 2 / 3,
        "staleness/in_flight_2": 1 / 3,
        "staleness/in_queue_0": 1 / 3,
        "staleness/in_queue_1": 1 / 3,
        "staleness/in_queue_2": 1 / 3,
    }
    assert staleness.take_batch((0, 1, 2), 6) == {}


def test_ended_samples_are_forgotten() -> None:
    staleness = StalenessMetrics()
    staleness.add_sample(0, 0, 0)
    staleness.forget((0, 7))
    assert staleness.take_batch((0,), 1) == {}
