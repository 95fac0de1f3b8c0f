"""The shipped calibrations against published measurements: `benchmarks/planner/cost_model`."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def validate():
    """The module of the comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.planner.cost_model import validate
    return validate


@pytest.fixture(scope="module")
def shipped(validate):
    """All comparisons with the planner as it ships."""
    return validate.comparisons(validate.AS_SHIPPED)


@pytest.fixture(scope="module")
def table(validate):
    """The errors of all rows that nothing was fitted to, by topic."""
    found = validate.comparisons(validate.OF_PEERS)
    unseen = [row for row in validate.summary(found) if row["rows"] == "held out"]
    return {(row["topic"], row["source"]): row for row in unseen}


TOPICS = ["training", "decode", "RL step", "MoE RL step", "PPO", "weight sync"]


@pytest.mark.parametrize("topic", TOPICS)
def test_the_mean_error_on_unseen_measurements_is_below_its_target(topic: str, table):
    one = table[topic, "all held out"]
    assert one["mean error"] <= one["target"]


@pytest.mark.parametrize(
    ("topic", "source", "most"),
    [
        ("weight sync, other roads", "verl", 0.45),
        ("gain by staleness", "verl", 0.11),  # two rows
        ("gain by staleness", "NeMo RL", 0.1),
        ("training", "NeMo Framework", 0.11),  # five rows
    ],
)
def test_the_mean_error_of_a_single_source_has_a_limit(topic: str, source: str, most: float, table):
    assert table[topic, source]["mean error"] <= most


@pytest.mark.parametrize(
    ("topic", "number"), [("training", 173), ("decode", 60), ("MoE training", 11), ("weight sync", 15)]
)
def test_unseen_measurements_are_in_the_right_order(topic: str, number: int, table):
    one = table[topic, "all held out"]
    assert one["number"] >= number, "measurements were lost"
    assert one["rank correlation"] >= 0.9


# ----------------------------------------------------------------------------------- as shipped
@pytest.mark.parametrize("kind", ["training pass", "decode", "RL step, experts", "memory", "weight update"])
def test_the_planner_as_it_ships_is_within_its_targets(kind: str, validate, shipped):
    (one,) = (
        row
        for row in validate.shipped_table(shipped, shipped)
        if (row["kind"], row["family"]) == (kind, "all")
    )
    assert one["as shipped"] <= validate.SHIPPED_TARGETS[kind]


def test_what_plans_print_is_what_was_measured_and_committed(validate, shipped):
    printed = json.loads((ROOT / "configs" / "hardware" / "accuracy.json").read_text())
    assert printed == validate.accuracy(shipped)
    newest = max((ROOT / "benchmarks" / "results").glob("*-cost-model.json"))
    committed = json.loads(newest.read_text())
    with_peers = validate.comparisons(validate.OF_PEERS)
    assert committed["as shipped"] == validate.shipped_table(shipped, with_peers)
    assert committed["summary"] == validate.summary(with_peers)


def test_new_rows_are_held_out_by_their_text(validate):
    """Two of three, and all releases of a run alike."""
    from benchmarks.planner.cost_model.comparison import is_held_out, rows

    later = list(rows("megatron_bridge_later"))
    new = [*later, *rows("prime_rl"), *rows("automodel")]
    assert len(new) > 140
    assert 0.5 < sum(map(is_held_out, new)) / len(new) < 0.8
    parts = {}
    for row in later:
        key = tuple(
            value for name, value in row.items() if name not in ("release", "tokens_per_second_per_gpu")
        )
        assert parts.setdefault(key, is_held_out(row)) == is_held_out(row)
