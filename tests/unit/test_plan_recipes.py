"""Every recipe that is shipped, and every good graph, can be planned in each kind of deployment."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_configs import model_config
from plan_graphs import request

from hflow.dsl.recipe import load_recipe
from hflow.graph.build import build_graph
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.checks.settings import without_unused_keys
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.communicators import communicators
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_json

ROOT = Path(__file__).parents[2]
CUSTOM = [path for path in sorted(ROOT.glob("recipes/custom/*.py")) if "\nrecipe = " in path.read_text()]
if find_spec("agents") is None:
    CUSTOM.remove(ROOT / "recipes/custom/openai_agents.py")  # its graph is that of openai_agent.py
RECIPES = [*sorted(ROOT.glob("recipes/*.py")), *CUSTOM, *sorted(ROOT.glob("tests/graphs/good/*.py"))]
assert RECIPES, "no recipe found"


def plan_of(path: Path, **changes: object) -> Plan:
    graph = build_graph(load_recipe(path).spec())
    config = model_config("d1t2p2", "d2t2", "train", "gen")
    apart = {model.name: without_unused_keys(graph, model.name, config) for model in graph.models}
    models = apart if changes.pop("apart", False) else {}
    return compile_plan(graph, request(models=models, batch=64, **changes))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_colocated_and_separate_engines(path):
    for plan in (plan_of(path, cluster="cpu-1x2"), plan_of(path, cluster="h100-1x8", apart=True)):
        assert json.loads(json.dumps(to_json(plan)))["digest"] == plan.digest
        batch_nodes = [node.name for node in plan.schedule.nodes if node.level == "batch"]
        arriving = [node.name for node in plan.schedule.nodes if node.level != "batch" and node.groups]
        assert sorted(rule.consumer for rule in plan.rules) == sorted([*batch_nodes, *arriving])
        assert sorted(name for _, names in plan.schedule.orders for name in names) == sorted(batch_nodes)
        assert {p.node for p in plan.placements} >= {node.name for node in plan.graph.nodes}
        joined = communicators(plan, range(plan.cluster.num_devices))
        for worker, several in joined.items():
            assert all(one in joined[other] for one in several for other in {worker, *one.workers})


@pytest.mark.first(10)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_digest_does_not_depend_on_the_recipes_location(path, tmp_path):
    for other in path.parent.glob("*.py"):
        shutil.copy(other, tmp_path)  # what it imports
    moved = tmp_path / path.name
    moved.write_text("\n\n" + path.read_text())
    assert plan_of(moved).digest == plan_of(path).digest


def test_what_a_node_type_states_is_in_the_forecast():
    compiled = compile_recipe(ROOT / "recipes/custom/retrieval.py", ["models.actor.path=null"])
    forecast = compiled.plan.forecast
    (source,) = (row for row in forecast.times if row.node == "answer_gen")
    assert dict(source.parts)["body"] == pytest.approx(1e-4)
    assert forecast.pace.seconds_per_sample == pytest.approx(1e-4)
    for row in forecast.memory:
        held = {item.name: item.num_bytes for item in row.resident}
        assert (held["answer_gen (node)"], held["eval_gen (node)"]) == (2**20, 2**20)
