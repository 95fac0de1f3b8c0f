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
def errors(validate, shipped):
    """The errors of all rows that nothing was fitted to, by kind of figure and group of rows."""
    with_peers = validate.comparisons(validate.OF_PEERS)
    return {(row["kind"], row["of"]): row for row in validate.error_table(shipped, with_peers)}


KINDS = [
    *("training pass", "decode", "RL step", "RL step, experts"),
    *("memory", "memory, experts", "weight update"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_as_it_ships_is_within_its_targets(kind: str, errors):
    one = errors[kind, "all"]
    assert one["as shipped"] <= one["target"]


@pytest.mark.parametrize(
    ("kind", "source", "column", "most"),
    [
        ("weight update, other roads", "verl", "with peers' figures", 0.5),
        ("RL step", "NeMo RL", "with peers' figures", 0.1),
        ("RL step", "NeMo RL", "as shipped", 0.15),
        ("RL step, experts, engines on several machines", "NeMo RL", "with peers' figures", 0.25),
        ("gain by staleness", "NeMo RL", "as shipped", 0.1),
        ("training pass", "NeMo Framework", "as shipped", 0.11),  # five rows
    ],
)
def test_the_mean_error_of_a_single_source_has_a_limit(
    kind: str, source: str, column: str, most: float, errors
):
    assert errors[kind, source][column] <= most


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("training pass", 209),
        ("decode", 60),
        ("training pass, experts", 73),
        ("weight update", 15),
        ("RL step", 25),
        ("RL step, experts", 20),
    ],
)
def test_unseen_measurements_are_in_the_right_order(kind: str, number: int, errors):
    one = errors[kind, "all"]
    assert one["held out"] >= number, "measurements were lost"
    assert one["rank correlation"] >= 0.9


def test_what_plans_print_is_what_was_measured_and_committed(validate, shipped, errors):
    printed = json.loads((ROOT / "configs" / "hardware" / "accuracy.json").read_text())
    assert printed == validate.accuracy(shipped)
    newest = max((ROOT / "benchmarks" / "results").glob("*-cost-model.json"))
    assert json.loads(newest.read_text())["table"] == list(errors.values())


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
