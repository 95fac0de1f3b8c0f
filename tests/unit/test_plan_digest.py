"""The plan as JSON and its digest."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from model_configs import model_config
from plan_graphs import agent, changed, grpo, ppo, request

from hflow.base.errors import PlanError
from hflow.graph.ir import BodyRef, Knob, SourceLocation
from hflow.planner.compile import compile_plan
from hflow.planner.plan.serialise import plan_digest, to_json

KITS = Path(__file__).parents[1] / "kits"


def digest(graph=None, **changes):
    return compile_plan(graph or grpo(), request(**changes)).digest


def test_json_is_plain_and_keeps_its_order():
    plan = compile_plan(agent(), request())
    text = json.dumps(to_json(plan))
    assert json.loads(text) == to_json(plan)
    assert text == json.dumps(to_json(compile_plan(agent(), request())))
    assert json.loads(text)["replicas"][0]["layout"] == "d2t1p1"
    assert json.loads(text)["digest"] == plan.digest


def test_settings_that_json_cannot_hold_are_refused():
    with pytest.raises(PlanError, match="cannot be part of a plan"):
        compile_plan(grpo(), request(settings={"data": object()}))


def test_the_digest_is_that_of_the_plan_without_it():
    plan = compile_plan(grpo(), request())
    assert plan.digest == plan_digest(plan) == plan_digest(replace(plan, digest=""))
    assert len(plan.digest) == 64


def test_the_digest_does_not_depend_on_file_locations():
    graph = grpo()
    moved = tuple(
        replace(n, spec=replace(n.spec, where=SourceLocation("/other/r.py", 90))) for n in graph.nodes
    )
    assert digest(replace(graph, nodes=moved, warnings=("/other/r.py:90: unused",))) == digest()
    at = [digest(settings={"models.actor.path": f"{root}/qwen"}) for root in ("/data", "/mnt/x")]
    assert at[0] == at[1] != digest(settings={"models.actor.path": "/data/llama"})


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 16},
        {"num_steps": 11},
        {"seed": 1},
        {"max_staleness": 1},
        {"sync_every": 2},
        {"save_every": 3},
        {"cluster": "cpu-1x1"},
        {"models": {"actor": model_config(layout="d1")}},
        {"settings": {"models.actor.optim.lr": 1e-3}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_digest_changes_with_a_number(changes):
    assert digest(**changes) != digest()


def test_the_digest_changes_with_a_knob_an_option_or_a_body():
    clip = changed(grpo(), "actor_train", knobs=(Knob("clip", "float", 0.1),))
    body = changed(grpo(), "score", body=BodyRef("recipe", "score", "another digest"))
    digests = {digest(), digest(clip), digest(body), digest(grpo(epochs=2)), digest(grpo(group=5))}
    assert len(digests) == 5


def test_another_process_plans_the_same():
    code = (
        "import sys; from plan_graphs import ppo, request; from hflow.planner.compile import compile_plan; "
        "sys.stdout.write(compile_plan(ppo(), request()).digest)"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=KITS, capture_output=True, text=True, check=True)
    assert child.stdout == digest(ppo())
