"""Episodes of all workers, by state."""

from hflow.runtime.records.step_metrics import EpisodeCounts


def states(generating: int, in_tools: int, ended: int) -> dict[str, int]:
    return {"generating": generating, "processing_tools": in_tools, "terminated": ended}


def test_the_last_reports_of_all_workers_are_summed() -> None:
    counts = EpisodeCounts()
    counts.add_report(0, states(4, 1, 10))
    counts.add_report(1, states(2, 0, 5))
    counts.add_report(0, states(3, 2, 12))
    counts.add_report(1, {})  # another index of the same process says nothing
    assert counts.current() == {"generating": 5, "processing_tools": 2, "terminated": 17}


def test_a_row_has_means_over_the_reports_and_those_that_ended_since_the_last_row() -> None:
    counts = EpisodeCounts()
    counts.has_turns = True
    counts.add_report(0, states(4, 0, 1))
    counts.add_report(1, states(2, 1, 2))
    counts.add_report(0, states(0, 3, 5))
    assert counts.finish_step() == {
        "episodes/generating": (4 + 6 + 2) / 3,
        "episodes/processing_tools": (0 + 1 + 4) / 3,
        "episodes/terminated": 7,
    }
    assert counts.finish_step() == {
        "episodes/generating": 2,
        "episodes/processing_tools": 4,
        "episodes/terminated": 0,
    }


def test_episodes_of_one_turn_have_no_row() -> None:
    counts = EpisodeCounts()
    counts.add_report(0, states(4, 0, 1))
    assert counts.finish_step() == {}


def test_a_worker_that_was_replaced_counts_from_zero() -> None:
    counts = EpisodeCounts()
    counts.has_turns = True
    counts.add_report(0, states(4, 0, 10))
    assert counts.finish_step()["episodes/terminated"] == 10
    counts.forget_worker(0)
    counts.add_report(0, states(1, 0, 2))
    assert counts.finish_step()["episodes/terminated"] == 2
