"""The CPU twin: every shipped recipe divided over data, tensor and pipeline ranks, against one process.

Real megatron-core, Ray and gloo. All runs share their worker processes, as those of `hflow twin` do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT, SharedProcesses, module, run

from hflow.base.errors import ConfigError, PlanError, RunError
from hflow.launch.running.twin import TwinReport, twin
from hflow.report.text.twin import (
    CHANGE_TOLERANCE,
    LEAST_SCALE,
    TOLERANCE,
    MetricPair,
    TwinResult,
    WeightPair,
)
from hflow.workers.ray.ray_actors import RayActors

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SMALL = ["batch=8", "schedule.max_concurrent=64"]
LEARNERS = {"reward_model": ["rm"], "self_play": ["alice", "bob"]}
"""Models that start from the checkpoint; in other recipes the actor does."""
RANDOM = ("tool_agent", "tool_sft", "echo")
"""Recipes with an alphabet of their own: from random weights."""
OWN_ROWS = ("sft", "tool_sft", "dpo", "kto", "reward_model", "self_play", "custom/retrieval")
"""Recipes that need right answers."""
PPO = ["models.critic.optim.warmup_steps=0", "batch=32"]


@pytest.fixture
def processes(request: pytest.FixtureRequest, shared_processes: SharedProcesses) -> RayActors:
    """A process for each rank of the largest layout."""
    return shared_processes.take(8 if request.node.get_closest_marker("long") else 4)


def taught(out: Path, seed: int) -> Path:
    """A checkpoint in HF layout, one step from random weights."""
    alone = ["workers=inproc", "cluster=cpu-1x1", "nodes.eval_gen.after=9"]
    summary = run("recipes/sft.py", out, "steps=1", "batch=8", f"seed={seed}", *alone)
    return (summary.directory / "checkpoints" / "latest" / "actor").resolve()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("actor"), 0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Another model than the checkpoint: from an equal one there is nothing but rounding to learn."""
    return [f"models.teacher.path={taught(tmp_path_factory.mktemp('teacher'), 1)}"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Additions whose right answer is none at all, which such weights give now and then."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{a:02d}+{a:02d}=", "answer": ""}) for a in range(40)))
    return ["data.train.generator=null", f"data.train.path={path}"]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same as messages."""
    path = tmp_path_factory.mktemp("conversations") / "rows.jsonl"
    prompts = [[{"role": "user", "content": f"{a:02d}+{a:02d}"}] for a in range(40)]
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts))
    return ["data.train.generator=null", f"data.train.path={path}"]


@pytest.fixture(scope="module")
def judge() -> Iterator[list[str]]:
    """The shipped judge, but with marks that depend on every character."""
    shipped = module(ROOT / "recipes/custom/judge_server.py")

    class Handler(shipped.Handler):
        def grade(self, question: str) -> str:
            return str(sum(map(ord, question)) % 11)

    server = shipped.JudgeServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield [f"services.judge.url=http://127.0.0.1:{server.server_port}/v1"]
    server.shutdown()
    thread.join()
    server.server_close()


def twin_report(
    recipe: str, overrides: list[str], layouts: list[str] | None, processes: RayActors
) -> TwinReport:
    return twin(ROOT / recipe, overrides, layouts, 3, lambda line: None, processes)


RECIPES: list[tuple[str, str, list[str]]] = [
    ("sft", "d2t2", []),
    ("grpo", "d2t2p2", []),
    ("grpo_chat", "d2p2", []),
    ("ppo", "t2p2", PPO),
    ("ppo", "d2t2p2", PPO),
    ("rloo", "d2c2", []),
    ("remax", "d2t2", ["batch=32"]),
    ("reinforce_pp", "t2c2", ["batch=32"]),
    ("dr_grpo", "d2p2", []),
    ("dapo", "d2t2", []),
    ("gspo", "t2p2", []),
    ("cispo", "d2p2", []),
    ("mis", "d2t2", []),
    ("opd", "t2p2", []),
    ("dpo", "d2p2", []),
    ("reward_model", "p2c2", []),
    ("distill", "d2t2", []),
    ("grpo_async", "d2t2", []),
    ("ppo_async", "t2p2", PPO),
    ("tool_sft", "d2p2", []),
    ("tool_agent", "d2p2", []),
    ("openai_agent", "d2p2", []),
    ("self_play", "d2t2", []),
    ("custom/ema_teacher", "d2p2", []),
    ("custom/llm_judge", "t2p2", []),
    ("custom/retrieval", "d2p2", []),
    ("custom/sft_rl", "t2p2", []),
    ("echo", "d2c2", []),
    ("kto", "d2t2", []),
    ("teachers", "d2p2", []),
]


def test_every_recipe_has_a_twin() -> None:
    # The recipes of gsm8k have the nodes of grpo_async and ppo.
    files = [p for p in (ROOT / "recipes").rglob("*.py") if p.parent.name not in ("gsm8k", "geometry3k")]
    shipped = {str(p.relative_to(ROOT / "recipes").with_suffix("")) for p in files}
    without_recipe = {"custom/judge_server", "custom/text_index", "custom/test_llm_judge"}
    without_recipe |= {"environments/grid_world_text"}
    random = {"custom/replay"}  # which samples are replayed depends on the order in which they finish
    real = {"smollm2"}  # has twins of its own, in test_smollm2.py
    seeing = {"vision", "vision_sft"}  # have twins of their own, in test_vision_runs.py
    # They need packages that are not installed here; their train node is that of grpo.
    needs_package = {"environments/frozen_lake", "environments/arithmetic", "custom/openai_agents"}
    needs_package |= {"environments/grid_world", "environments/calculator"}
    assert {
        name for name, _, _ in RECIPES
    } == shipped - without_recipe - random - real - seeing - needs_package


CORE = [("grpo_chat", "d2p2")]
"""Recipes and layouts that every change is tested with; `make test-long` tests all."""


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [pytest.param(*row, marks=() if row[:2] in CORE else pytest.mark.long) for row in RECIPES],
)
def test_a_divided_recipe_computes_what_one_process_does(
    name: str,
    layout: str,
    changes: list[str],
    checkpoint: Path,
    rows: list[str],
    conversations: list[str],
    judge: list[str],
    teacher: list[str],
    processes: RayActors,
) -> None:
    own = {"grpo_chat": conversations} | {key: [] for key in OWN_ROWS}
    overrides = [*SMALL, *changes, *own.get(name, rows)]
    for model in LEARNERS.get(name, ["actor"]):
        path = "null" if name in RANDOM else checkpoint
        overrides += [f"models.{model}.path={path}", f"models.{model}.optim.warmup_steps=0"]
    _, _, path_of_teacher = teacher[0].partition("=")
    both = [f"models.{one}.path={path_of_teacher}" for one in ("low", "high")]
    given = {"custom/llm_judge": judge, "distill": teacher, "opd": teacher, "teachers": both}
    overrides += given.get(name, [])
    (result,) = twin_report(f"recipes/{name}.py", overrides, [layout], processes).results
    assert result.failed_metrics == ()
    assert result.failed_weights == ()
    assert {pair.model for pair in result.weights} >= set(LEARNERS.get(name, ["actor"]))
    norms = {pair.name: pair.scale for pair in result.metrics if pair.name.endswith("/grad_norm")}
    assert norms
    assert min(norms.values()) > 0, norms


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["d2t2e2", *(pytest.param(name, marks=pytest.mark.long) for name in ("d2e2", "d2p2e2"))]
)
def test_experts_are_divided_over_ranks(layout: str, rows: list[str], processes: RayActors) -> None:
    """From random weights. Each engine of the embedded kind has all experts, gathered from the trainer."""
    overrides = [*SMALL, *rows, "model@models.actor=tiny-qwen3-moe", "models.actor.path=null"]
    (result,) = twin_report("recipes/grpo.py", overrides, [layout], processes).results
    assert result.failed_metrics == ()
    assert result.failed_weights == ()
    assert min(pair.scale for pair in result.metrics if pair.name.endswith("/grad_norm")) > 0


def test_layouts_and_backends_as_configured(checkpoint: Path, rows: list[str], processes: RayActors) -> None:
    """An actor cut in two, and a critic on both of its workers that is not."""
    overrides = [*SMALL, *PPO, *rows, f"models.actor.path={checkpoint}", "cluster=cpu-1x2"]
    overrides += ["models.actor.backend=megatron", "models.actor.layout=t2", "models.critic.layout=d2"]
    engine = ("engine=vllm", "layout=t2", "cache_gib=1")
    overrides += [f"models.actor.gen.{option}" for option in engine]
    found = twin_report("recipes/ppo.py", overrides, None, processes)
    assert [result.layout for result in found.results] == ["as configured"]
    assert found.results[0].is_equal
    assert found.notes == (
        "actor_train trains from the first step on (after=10)",
        "actor generates with the embedded engine (gen.engine=vllm)",
    )


def test_a_body_that_depends_on_its_rank_is_detected(tmp_path: Path, processes: RayActors) -> None:
    recipe = tmp_path / "ranked.py"
    recipe.write_text(RANKED)
    overrides = ["+model@models.actor=tiny-qwen2", "+data@data.train=addition", "batch=8"]
    found = twin(recipe, overrides, ["d2"], 3, lambda line: None, processes)
    (result,) = found.results
    assert not result.is_equal
    assert next(pair.at for pair in result.failed_metrics) == "learn/grad_norm at step 1"
    assert [pair.model for pair in result.failed_weights] == ["actor"]


RANKED = """
import torch
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, Tokenizer, Trajectory, encode, train

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt, answer)


@train(actor, reduce="token-mean")
def learn(out: Output) -> PerToken:
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return -out.logprobs * (1.0 if is_first else 1.01)


recipe = Recipe("ranked", data, [view, learn])
"""


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["models.actor.path=null"], "actor_train had no gradient"),  # no sample gets a reward
        (["models.actor.optim.lr=0", "models.actor.optim.warmup_steps=0"], "weights of actor did not change"),
    ],
)
def test_a_twin_without_anything_to_compare_is_refused(
    changes: list[str], problem: str, rows: list[str], processes: RayActors
) -> None:
    own = rows if "lr" in changes[0] else []
    overrides = [*SMALL, *own, "models.actor.path=null", *changes, "nodes.actor_gen.max_tokens=4"]
    with pytest.raises(RunError, match=problem):
        twin_report("recipes/grpo.py", overrides, ["d2"], processes)


FROZEN = """
from hflow import Dataset, Model, Recipe, Text, nodes, use

actor = Model("actor")
recipe = Recipe("frozen", Dataset("train", prompt=Text, answer=Text), [use(nodes.actor_gen, actor)])
"""


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, processes: RayActors) -> None:
    sft = ROOT / "recipes/sft.py"
    frozen = tmp_path / "frozen.py"
    frozen.write_text(FROZEN)
    overrides = ["+model@models.actor=tiny-qwen2", "+data@data.train=addition"]
    with pytest.raises(ConfigError, match=r"frozen.py trains no model, so a twin would compare nothing"):
        twin(frozen, overrides, ["d2"], 3, lambda line: None, processes)
    with pytest.raises(ConfigError, match=r"--steps is 1; it must be at least 2"):
        twin(sft, [], ["d2"], 1, lambda line: None, processes)
    with pytest.raises(PlanError, match=r"layout 'x2' is not understood"):
        twin(sft, [], ["x2"], 2, lambda line: None, processes)


def test_the_tolerance_of_equal_values() -> None:
    def pair(reference: float, twin: float, scale: float) -> MetricPair:
        return MetricPair("train/loss", 1, reference, twin, scale)

    def result(metric: MetricPair, change: float = 0.0) -> TwinResult:
        return TwinResult("d2t1p1", (metric,), (WeightPair("actor", change),))

    near = 1.0 + 0.9 * TOLERANCE
    assert result(pair(1.0, near, 1.0)).is_equal
    assert not result(pair(1.0, 1.0 + 1.1 * TOLERANCE, 1.0)).is_equal
    # Of a metric near zero, what it was relative to.
    assert result(pair(0.0, 0.9 * TOLERANCE * LEAST_SCALE, 1e-9)).is_equal
    assert not result(pair(0.0, 1.1 * TOLERANCE * LEAST_SCALE, 1e-9)).is_equal
    for broken in (float("nan"), float("inf")):
        assert not result(pair(broken, 1.0, 1.0)).is_equal
        assert not result(pair(1.0, broken, 1.0)).is_equal
        assert not result(pair(1.0, 1.0, 1.0), broken).is_equal
    assert result(pair(1.0, 1.0, 1.0), 0.9 * CHANGE_TOLERANCE).is_equal
    assert not result(pair(1.0, 1.0, 1.0), 1.1 * CHANGE_TOLERANCE).is_equal
