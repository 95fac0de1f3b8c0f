"""`rewards.rubric`: what a judge says is the reward, by criteria; what it does not say refuses the sample."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import pytest
from chat_stub import ChatStub
from runs import TINY, run, steps_of

import hflow
from hflow import Dataset, Messages, Model, Recipe, Text, nodes, rewards, use
from hflow.base.errors import ConfigError, RecipeError, RunError
from hflow.dsl.nodetype import Definition
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph
from hflow.services.server import read_spending
from hflow.testing import services

SUM = {"name": "correct", "description": "The sum is right.", "weight": 3}
SHORT = {"name": "short", "description": "It is short.", "weight": 1}
RECIPE = """
from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe(
    "rubric",
    data,
    [
        use(nodes.actor_gen, actor, group=2),
        rewards.rubric("judge.yaml", returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
CRITERIA = """
- {name: correct, description: The sum is right., weight: 3}
- {name: short, description: It is short., weight: 1}
"""
SMALL = [*TINY, "workers=inproc", "cluster=cpu-1x1", "batch=2"]


def checked(*criteria: Any, prompt: Any = Text, **changes: Any) -> Graph:
    """The graph of a recipe with this rubric, after the checks that reading it makes."""
    data = Dataset("train", prompt=prompt, answer=Text)
    actor = Model("actor", trainable=True)
    gen = nodes.actor_gen if prompt is Text else nodes.chat_gen
    rubric: Definition[..., Any] = rewards.rubric([*criteria])
    recipe = Recipe("test", data, [use(gen, actor, group=2), use(rubric, **changes)])
    graph = build_graph(recipe.spec())
    recipe.check_bodies(graph)
    return graph


def judged(server: ChatStub, **changes: Any) -> tuple[float, ...]:
    """One call of a rubric's body."""
    rubric = rewards.rubric([SUM, SHORT])
    knobs = {**rubric.knobs, **changes}

    async def call() -> tuple[float, ...]:
        async with services(judge={"url": server.url, "backoff": 0.01}):
            body: Callable[..., Any] = rubric.body
            prompt = [{"role": "user", "content": "17+25="}]
            values: tuple[float, ...] = await body(prompt=prompt, completion="042", answer="042", **knobs)
            return values

    return asyncio.run(call())


def test_the_reward_is_the_weighted_mean_of_the_criteria() -> None:
    with ChatStub(lambda _: 'Thus:\n```json\n{"correct": 8, "short": 4, "more": 1}\n```') as server:
        assert judged(server) == pytest.approx(((3 * 0.8 + 0.4) / 4, 0.8, 0.4))
        assert judged(server, correct_weight=0.0, best=16.0) == pytest.approx((0.25, 0.5, 0.25))
        system, user = server.requests[0]["messages"]
    assert "`correct`: The sum is right." in system["content"]
    assert json.loads(user["content"]) == {
        "prompt": [{"role": "user", "content": "17+25="}],
        "completion": "042",
        "answer": "042",
    }


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("10", "it has no JSON object"),
        ('{"correct": 1, "short"', "it has no JSON object"),
        ('{"correct": 1, "short": }', "it is no JSON"),
        ('{"correct": 1}', "'short' is a required property"),
        ('{"correct": 11, "short": 1}', "correct: 11 is greater than the maximum of 10"),
        ('{"correct": -1, "short": 1}', "correct: -1 is less than the minimum of 0"),
        ('{"correct": true, "short": 1}', "correct: True is not of type 'number'"),
        ('{"correct": "9", "short": 1}', "correct: '9' is not of type 'number'"),
        ('{"correct": NaN, "short": 1}', "correct: nan is not from 0 to 10"),
    ],
)
def test_a_judge_without_a_verdict_is_asked_again_and_then_an_error(reply: str, problem: str) -> None:
    with ChatStub(lambda _: '{"correct": 10, "short": 10}') as server:
        server.first = [reply]
        assert judged(server) == (1.0, 1.0, 1.0)
        *_, before, again = server.requests[1]["messages"]
        assert before == {"role": "assistant", "content": reply}
        assert problem in again["content"]
        server.first = [reply] * 2
        with pytest.raises(ValueError, match=r"the judge gave no verdict, asked 2 times: ") as error:
            judged(server, attempts=2)
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("criteria", "changes", "message"),
    [
        ([], {}, "has no criteria"),
        ([{"name": "a", "description": "A."}], {}, "criterion 1 has no weight"),
        ([SUM, SUM], {}, "the name 'correct' is already used"),
        ([{**SUM, "name": "answer"}], {}, "the name 'answer' is already used"),
        ([{**SUM, "name": "is right"}], {}, "cannot be a field"),
        ([{**SUM, "weight": "2"}], {}, "is '2', not a number"),
        ([{**SUM, "extra": 1}], {}, "has other keys than name, description, weight"),
        ([{**SUM, "weight": 0}], {}, "are all 0"),
        ([SUM, SHORT], {"short_weight": -1.0}, "knob short_weight is -1; it must be 0 or more"),
        ([SUM], {"best": 0.0}, "knob best is 0"),
        ([SUM], {"attempts": 0}, "knob attempts is 0"),
    ],
)
def test_a_wrong_rubric_is_refused_when_the_recipe_is_read(
    criteria: list[Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        checked(*criteria, **changes)


def test_a_rubric_reads_texts_and_messages_and_returns_its_criteria() -> None:
    for prompt in (Text, Messages):
        node = checked(SUM, SHORT, prompt=prompt).node("rubric")
        assert [returned.field for returned in node.spec.returns] == ["rubric", "correct", "short"]
        assert Path(node.spec.where.file).name == Path(__file__).name
    with pytest.raises(RecipeError, match=r"no-such.yaml cannot be read"):
        rewards.rubric("no-such.yaml")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rubric.py").write_text(RECIPE)
    (tmp_path / "judge.yaml").write_text(CRITERIA)
    return tmp_path / "rubric.py"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [],
            r"reward .*rubric.py:11. calls the service .judge., which is not configured",
        ),
        (["services.jugde.url=http://x"], "did you mean 'jugde'"),
        (["services.judge.model=m"], "services.judge has no url"),
        (["services.judge.url=x"], "must begin with http"),
        (["services.judge.url=http://x", "services.judge.budget=1"], "requests cost nothing"),
        (
            ["services.judge.url=http://x", "services.judge.key_variable=NO_KEY"],
            "NO_KEY, but this .* not set",
        ),
    ],
)
def test_a_service_that_is_not_configured_is_refused(
    recipe: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(recipe, tmp_path, *SMALL, *overrides)


@pytest.mark.long
def test_a_budget_that_is_used_up_ends_the_run_which_continues_with_a_larger_one(
    recipe: Path, tmp_path: Path
) -> None:
    """Nothing that waits for the judge is refused, and what was spent counts after the resume."""

    def verdict(messages: list[dict[str, Any]]) -> str:
        completion = json.loads(messages[1]["content"])["completion"]
        return json.dumps({"correct": len(completion), "short": 5})

    def requests() -> int:
        return read_spending(directory / "services.json")["judge"].requests

    with ChatStub(verdict) as server:
        prices = ["services.judge.request_price=0.5", "services.judge.budget=2.9"]
        with pytest.raises(RunError, match=r"services.judge.budget is used up: .* 3 for 6 requests. Raise"):
            run(recipe, tmp_path, *SMALL, "steps=2", f"services.judge.url={server.url}", *prices)
        directory = tmp_path / "rubric" / "latest"
        assert requests() == len(server.requests) == 6
        with pytest.raises(ConfigError, match=r"services.judge.budget is used up"):
            hflow.resume(directory, live=False)
        summary = hflow.resume(directory, ["services.judge.budget=50"], live=False)
        assert (summary.reason, requests()) == ("done", 8)
        assert summary.sample_ends == {"trained": 8}
    rows = steps_of(summary)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["service_cost/judge"] == pytest.approx(4.0)
    for row in rows:
        assert math.isclose(
            row["actor_gen/reward"], (3 * row["actor_gen/correct"] + row["actor_gen/short"]) / 4
        )
        assert row["actor_gen/short"] == 0.5


@pytest.mark.long
def test_what_a_killed_run_has_spent_counts_when_it_resumes(recipe: Path, tmp_path: Path) -> None:
    processes: list[subprocess.Popen[str]] = []

    def verdict(messages: list[dict[str, Any]]) -> str:
        if len(server.requests) == 6:
            processes[0].kill()
        return '{"correct": 5, "short": 5}'

    with ChatStub(verdict) as server:
        options = [*SMALL, "steps=4", f"services.judge.url={server.url}", f"out={tmp_path}"]
        prices = ["services.judge.request_price=0.5", "services.judge.budget=5"]
        command = [sys.executable, "-m", "hflow", "run", str(recipe), *options, *prices]
        processes.append(forked_python.Popen(command, stderr=subprocess.PIPE, text=True))
        error = processes[0].communicate()[1]
        assert processes[0].returncode == -signal.SIGKILL, error
        directory = tmp_path / "rubric" / "latest"
        killed = read_spending(directory / "services.json")["judge"]
        assert killed.requests >= len(server.requests) >= 6
        assert killed.cost == 0.5 * killed.requests
        with pytest.raises(RunError, match=r"services.judge.budget is used up: .* 5 for 10 requests"):
            hflow.resume(directory, live=False)
        assert read_spending(directory / "services.json")["judge"].requests == 10
        assert len(server.requests) <= 10


@pytest.mark.long
def test_a_judge_without_verdicts_refuses_its_samples(recipe: Path, tmp_path: Path) -> None:
    def verdict(messages: list[dict[str, Any]]) -> str:
        prompt = json.loads(messages[1]["content"])["prompt"][0]["content"]
        return '{"correct": 1, "short": 2}' if int(prompt[1]) % 2 else "well done"

    with ChatStub(verdict) as server:
        summary = run(recipe, tmp_path, *SMALL, "steps=1", f"services.judge.url={server.url}")
    assert summary.sample_ends["trained"] == 4
    row = steps_of(summary)[0]
    assert row["actor_gen/reward"] == pytest.approx((3 * 0.1 + 0.2) / 4)
