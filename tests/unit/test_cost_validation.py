"""The shipped calibrations against published measurements: `benchmarks/cost_model`."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "cost_model" / "validate.py"


@pytest.fixture(scope="module")
def table():
    """The errors of all rows that nothing was fitted to, by topic."""
    spec = importlib.util.spec_from_file_location("cost_model_validation", FILE)
    validate = sys.modules["cost_model_validation"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(validate)
    found = [one for source in validate.SOURCES for one in source()]
    return {row["topic"]: row for row in validate.summary(found) if row["source"] == "all held out"}


@pytest.mark.parametrize("topic", ["training", "decode", "RL step", "weight sync", "gain by staleness"])
def test_the_mean_error_on_unseen_measurements_is_below_its_target(topic: str, table):
    assert table[topic]["mean error"] <= table[topic]["target"]


@pytest.mark.parametrize(("topic", "number"), [("training", 173), ("decode", 60), ("MoE training", 11)])
def test_unseen_measurements_are_in_the_right_order(topic: str, number: int, table):
    assert table[topic]["number"] == number
    assert table[topic]["rank correlation"] >= 0.9
