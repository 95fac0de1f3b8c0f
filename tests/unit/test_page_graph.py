"""The drawing of a plan's graph: few crossings, straight edges, nothing on top of anything."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import request

from hflow.dsl.recipe import load_recipe
from hflow.graph.build import build_graph
from hflow.planner.compile import compile_plan
from hflow.report.html.plan.cards import VERBS, arrows, outline
from hflow.report.html.plan.graph_layout import (
    Pull,
    curve,
    make_chain,
    num_crossings,
    order_columns,
    place_tops,
    rounded,
)
from hflow.report.html.plan.graph_view import GraphView, NodeView, graph_view

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.py")) + sorted(ROOT.glob("tests/graphs/good/*.py"))


def drawing(path: Path) -> GraphView:
    plan = compile_plan(build_graph(load_recipe(path).spec()), request(batch=64))
    return graph_view(plan, {node.name: "1 s" for node in plan.graph.nodes})


@st.composite
def layered_graphs(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Nodes in up to five layers, and edges from lower to higher ones."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    layers = {f"n{layer}.{i}": layer for layer, size in enumerate(sizes) for i in range(size)}
    forward = [(a, b) for a in layers for b in layers if layers[a] < layers[b]]
    return layers, draw(st.lists(st.sampled_from(forward), unique=True, max_size=12))


def test_two_edges_that_would_cross_do_not():
    layers = {"a": 0, "b": 0, "c": 1, "d": 1}
    chains = (make_chain("a", "d", layers), make_chain("b", "c", layers))
    assert num_crossings((("a", "b"), ("c", "d")), [("a", "d"), ("b", "c")]) == 1
    columns = order_columns(layers, chains)
    assert num_crossings(columns, [("a", "d"), ("b", "c")]) == 0


def test_long_edges_of_one_source_share_their_way():
    layers = {"a": 0, "b": 1, "c": 2, "d": 3}
    far, farther = make_chain("a", "c", layers), make_chain("a", "d", layers)
    assert far.places == ("a", "a over 1", "c")
    assert farther.places == ("a", "a over 1", "a over 2", "d")
    assert order_columns(layers, (far, farther))[1].count("a over 1") == 1


@given(layered_graphs())
def test_columns_hold_every_place_once_and_cross_no_more_than_at_first(graph):
    layers, edges = graph
    chains = tuple(make_chain(src, dst, layers) for src, dst in edges)
    columns = order_columns(layers, chains)
    placed = [name for column in columns for name in column]
    dummies = {name for chain in chains for name in chain.dummies}
    assert sorted(placed) == sorted({*layers, *dummies})
    assert all(name in columns[layer] for name, layer in layers.items())
    arcs = sorted({arc for chain in chains for arc in pairwise(chain.places)})
    at_first = [[name for name in layers if layers[name] == layer] for layer in range(len(columns))]
    for chain in chains:
        for layer, dummy in enumerate(chain.dummies, layers[chain.places[0]] + 1):
            at_first[layer] += [dummy] if dummy not in at_first[layer] else []
    assert num_crossings(columns, arcs) <= num_crossings(tuple(map(tuple, at_first)), arcs)
    assert order_columns(layers, chains) == columns


def test_a_chain_runs_level():
    """Ports 10 below a's top, 30 below b's and 5 below c's are level: b is 20 above a, c 25 below b."""
    pulls = [Pull("a", "b", 10, 30), Pull("b", "c", 30, 5)]
    tops = place_tops([["a"], ["b"], ["c"]], {"a": 40, "b": 60, "c": 20}, pulls, gap=10)
    assert tops == pytest.approx({"a": 20, "b": 0, "c": 25}, abs=0.5)


def test_two_that_want_one_place_share_it_out():
    """Both want to be level with a; of height 20 with a gap of 10, they are 15 above and 15 below it."""
    pulls = [Pull("a", "b", 10, 10), Pull("a", "c", 10, 10)]
    tops = place_tops([["a"], ["b", "c"]], dict.fromkeys("abc", 20), pulls, gap=10)
    assert tops["c"] - tops["b"] == pytest.approx(30)
    assert tops["a"] - tops["b"] == pytest.approx(15, abs=0.5)


@given(layered_graphs(), st.integers(5, 60))
def test_nothing_in_a_column_overlaps(graph, height):
    layers, edges = graph
    chains = tuple(make_chain(src, dst, layers) for src, dst in edges)
    columns = order_columns(layers, chains)
    heights = {name: float(height) for column in columns for name in column}
    pulls = [Pull(a, b, 3, 4) for chain in chains for a, b in pairwise(chain.places)]
    tops = place_tops(columns, heights, pulls, gap=7)
    assert min(tops.values()) == pytest.approx(0)
    for column in columns:
        assert all(tops[b] - tops[a] >= height + 7 - 1e-6 for a, b in pairwise(column))


def points(path: str) -> list[float]:
    """All coordinates of a path, in order."""
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def test_a_curve_starts_and_ends_at_its_stops_and_is_level_at_each():
    path = curve([(0, 0, 5), (20, 30, 9), (40, 40, 1)])
    assert points(path)[:2] == [0, 5]
    assert points(path)[-2:] == [40, 1]
    assert "20.0 9.0H30.0" in path


def test_a_rounded_path_keeps_its_ends_and_passes_its_corner():
    path = rounded([(0, 0), (20, 0), (20, 4)])
    assert points(path)[:2] == [0, 0]
    assert points(path)[-2:] == [20, 4]
    assert "Q20.0 0.0" in path


def test_every_verb_has_an_outline_of_its_own():
    outlines = [outline(verb, 100, 50) for verb in VERBS if verb not in ("compute", "own")]
    assert len({*outlines, outline("compute", 100, 50)}) == len(outlines) + 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_drawings_of_real_graphs(path):
    plan = compile_plan(build_graph(load_recipe(path).spec()), request(batch=64))
    view = drawing(path)
    assert {node.card.name for node in view.nodes} == {node.name for node in plan.graph.nodes}
    assert [arrow for arrow, _ in view.edges] == list(arrows(plan))
    assert len(view.edges) >= len(plan.graph.edges)
    for one, other in combinations(view.nodes, 2):
        assert not overlap(one, other), f"{one.card.name} overlaps {other.card.name}"
    for node in view.nodes:
        assert node.x >= 0
        assert node.x + node.width <= view.width
        assert 0 <= node.y <= node.y + node.card.height <= view.height
    low, high = min(n.y for n in view.nodes), max(n.y + n.card.height for n in view.nodes)
    assert [label.text for label in view.labels if low < label.y < high] == []


def overlap(one: NodeView, other: NodeView) -> bool:
    is_beside = one.x + one.width <= other.x or other.x + other.width <= one.x
    is_above = one.y + one.card.height <= other.y or other.y + other.card.height <= one.y
    return not (is_beside or is_above)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_rows_stay_in_their_card_and_name_every_field_that_arrives(path):
    view = drawing(path)
    arriving = {arrow.id: arrow for arrow, _ in view.edges if arrow.kind in ("data", "weights")}
    rows = {row.arrow: node.card.name for node in view.nodes for row in node.card.rows if row.arrow}
    assert set(rows) == set(arriving)
    for arrow, name in rows.items():
        assert arriving[arrow].dst == name
    for node in view.nodes:
        baselines = [y for row in node.rows for _, y in row.lines]
        assert baselines == sorted(set(baselines))
        assert all(46 < y < node.card.height for y in baselines)


def test_state_returns_right_below_its_card():
    view = drawing(ROOT / "recipes" / "ppo.py")
    node = next(node for node in view.nodes if node.card.name == "kl_reward")
    loops = [path for a, path in view.edges if a.src == a.dst == "kl_reward" and a.kind == "data"]
    heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", loops[0])]
    assert max(heights) == pytest.approx(node.y + node.card.height + 11, abs=0.1)
    assert "state" not in [label.text for label in view.labels]


def test_weight_lags_are_shown_in_the_reading_node():
    view = drawing(ROOT / "recipes" / "grpo.py")
    notes = {
        (node.card.name, row.note) for node in view.nodes for row in node.card.rows if row.kind == "weights"
    }
    assert {("actor_train", "lag 1"), ("actor_gen", "lag ≤ 1"), ("eval_gen", "lag ≤ 1")} <= notes
