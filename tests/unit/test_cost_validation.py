"""The shipped calibrations against published measurements: `benchmarks/planner/cost_model`."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    """The errors of all rows that nothing was fitted to, by topic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.planner.cost_model import validate
    found = validate.comparisons(validate.OF_PEERS)
    unseen = [row for row in validate.summary(found) if row["rows"] == "held out"]
    return {(row["topic"], row["source"]): row for row in unseen}


TOPICS = ["training", "decode", "RL step", "MoE RL step", "PPO", "weight sync", "gain by staleness"]


@pytest.mark.parametrize("topic", TOPICS)
def test_the_mean_error_on_unseen_measurements_is_below_its_target(topic: str, table):
    one = table[topic, "all held out"]
    assert one["mean error"] <= one["target"]


@pytest.mark.parametrize(
    ("topic", "source", "most"),
    [
        ("weight sync", "verl", 0.4),
        ("gain by staleness", "verl", 0.11),  # two rows
        ("training", "NeMo Framework", 0.11),  # five rows
    ],
)
def test_the_mean_error_of_a_single_source_has_a_limit(topic: str, source: str, most: float, table):
    assert table[topic, source]["mean error"] <= most


@pytest.mark.parametrize(
    ("topic", "number"), [("training", 173), ("decode", 60), ("MoE training", 11), ("weight sync", 22)]
)
def test_unseen_measurements_are_in_the_right_order(topic: str, number: int, table):
    one = table[topic, "all held out"]
    assert one["number"] >= number, "measurements were lost"
    assert one["rank correlation"] >= 0.9
