"""Agents and self-play for real: tokens as they were drawn, both policies learn, workers agree."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file

from hflow.base.errors import NotYetError
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import GenerationResult
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_setup, model_settings
from hflow.models.settings import RankPosition
from hflow.training.fsdp.backend import TorchModel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import GroupTask, SampleReady
from hflow.workers.ray.ray_actors import RayActors

ALONE = ["workers=inproc", "cluster=cpu-1x1"]
SMALL = ["steps=2", "batch=8", "data.heldout.limit=6", "save_every=1", "keep_checkpoints=null"]
AGENT = [*SMALL, "models.actor.path=null", "models.actor.optim.warmup_steps=0", "models.actor.optim.lr=1e-3"]
DUEL = [*SMALL, "models.alice.path=null", "models.bob.path=null"]
DUEL += [
    f"models.{name}.optim.{change}" for name in ("alice", "bob") for change in ("lr=1e-3", "warmup_steps=0")
]


def test_both_policies_learn_from_their_duels(tmp_path: Path) -> None:
    summary = run("recipes/self_play.py", tmp_path, *ALONE, *DUEL)
    for row in steps_of(summary):
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
        assert row["alice_play/reward"] == -row["bob_play/reward"]
    settings = model_settings(compile_recipe(ROOT / "recipes" / "self_play.py", [*ALONE, *DUEL]))
    moved = {}
    for name in ("alice", "bob"):
        before = dict(TorchModel(settings[name], RankPosition()).weights())
        after = weights_of(summary, name)
        moved[name] = {key: after[key] - before[key] for key in before.keys() & after.keys()}
        assert max(float(change.abs().max()) for change in moved[name].values()) > 1e-4
    assert largest_difference(moved["alice"], moved["bob"]) > 1e-4


@pytest.mark.long
@pytest.mark.ray
def test_duels_on_two_workers_equal_one_process(two_processes: RayActors, tmp_path: Path) -> None:
    alone = run("recipes/self_play.py", tmp_path / "alone", *ALONE, *DUEL)
    apart = run("recipes/self_play.py", tmp_path / "apart", *DUEL, "cluster=cpu-1x2", processes=two_processes)
    for ours, theirs in zip(steps_of(alone), steps_of(apart), strict=True):
        assert ours["alice_play/outcome"] == theirs["alice_play/outcome"]
    for name in ("alice", "bob"):
        # Adam divides the rounding of tiny gradients by their size: 2 % of an update of 1e-3.
        assert largest_difference(weights_of(alone, name), weights_of(apart, name)) < 2e-5


def test_engines_in_different_groups_are_refused(tmp_path: Path) -> None:
    apart = ["cluster=cpu-1x2", "models.bob.gen.layout=d1"]
    with pytest.raises(
        NotYetError, match=r"duel .* needs its engines on the same workers, .* Give models.bob.gen the layout"
    ):
        run("recipes/self_play.py", tmp_path, *DUEL, *apart)
    assert list(tmp_path.iterdir()) == []


REWARDS = {
    "tool_agent": "return talk, num_calls, 0.0",
    "openai_agent": "return endpoint.trajectory, num_calls, float(message.content == answer)",
}
"""Recipe -> the line that returns the reward."""


@pytest.fixture(params=REWARDS)
def paid(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An agent that is paid for each call, as a model of random weights is never right."""
    name, line = request.param, REWARDS[request.param]
    source = (ROOT / "recipes" / f"{name}.py").read_text()
    paid = source.replace(line, f"{line.rpartition(', ')[0]}, float(num_calls)")
    assert paid != source
    recipe = tmp_path / f"{name}.py"
    recipe.write_text(paid)
    (tmp_path / f"{name}.yaml").write_text((ROOT / "recipes" / f"{name}.yaml").read_text())
    return recipe


@pytest.mark.first(1)
def test_an_agent_with_a_tool_learns(paid: Path, tmp_path: Path) -> None:
    summary = run(paid, tmp_path / "runs", *ALONE, *AGENT)
    rows = steps_of(summary)
    assert sum(row["agent/tool_calls"] for row in rows) > 0
    for row in rows:
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
        assert row["agent/tool_errors"] <= row["agent/tool_calls"] == row["agent/num_calls"]
        assert row["actor_train/grad_norm"] > 0
    first, second = (
        load_file(summary.directory / "checkpoints" / f"step-{k}" / "actor" / "model.safetensors")
        for k in (1, 2)
    )
    assert largest_difference(first, second) > 1e-5


@pytest.mark.first(1)
@pytest.mark.ray
def test_an_agent_on_two_workers_equals_one_process(
    paid: Path, two_processes: RayActors, tmp_path: Path
) -> None:
    alone = run(paid, tmp_path / "alone", *ALONE, *AGENT)
    apart = run(paid, tmp_path / "apart", *AGENT, "cluster=cpu-1x2", processes=two_processes)
    for ours, theirs in zip(steps_of(alone), steps_of(apart), strict=True):
        for name in ("num_calls", "reward", "num_turns", "tool_errors", "malformed_calls"):
            assert ours[f"agent/{name}"] == theirs[f"agent/{name}"]
    assert largest_difference(weights_of(alone), weights_of(apart)) < 1e-4


@pytest.mark.long
def test_agents_start_from_written_examples(tmp_path: Path) -> None:
    taught = run("recipes/tool_sft.py", tmp_path, *ALONE, "steps=2", "batch=8")
    checkpoint = (taught.directory / "checkpoints" / "latest" / "actor").resolve()
    for name in REWARDS:
        summary = run(f"recipes/{name}.py", tmp_path, *ALONE, *SMALL, f"models.actor.path={checkpoint}")
        assert (summary.reason, summary.steps) == ("done", 2)
        assert weights_of(taught).keys() == weights_of(summary).keys()


@pytest.mark.parametrize("name", REWARDS)
def test_stored_tokens_are_the_generated_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stored sample is what its engine answered, turn for turn, and all else in it is masked."""
    heard: list[tuple[tuple[int, ...], GenerationResult]] = []
    submit = EngineDriver.submit

    async def overheard(driver: EngineDriver, prompt_ids: Any, *rest: Any) -> GenerationResult:
        drawn = await submit(driver, prompt_ids, *rest)
        heard.append((tuple(prompt_ids), drawn))
        return drawn

    monkeypatch.setattr(EngineDriver, "submit", overheard)
    setup = make_setup(compile_recipe(ROOT / "recipes" / f"{name}.py", [*ALONE, *AGENT]))
    names = ("input_ids", "loss_mask", "behav_logprobs", "versions", "num_turns", "num_calls")

    async def work() -> list[list[Any]]:
        workers = InprocWorkers()
        try:
            await workers.start(setup)
            tasks = [GroupTask("agent", g, g, tuple(range(8 * g, 8 * g + 8))) for g in range(8)]
            await workers.open_groups(0, tasks)
            await workers.wake("actor@gen", 0)
            events: list[Any] = []
            while len(events) < 64:
                events += (await workers.poll(0)).events
            assert all(isinstance(event, SampleReady) for event in events), events
            store = workers._worker._store
            return [store.values("agent", name, range(64)) for name in names]
        finally:
            await workers.close()

    columns = asyncio.run(asyncio.wait_for(work(), 120))
    num_turns = num_calls = 0
    for ids, mask, logprobs, versions, turns, calls in zip(*columns, strict=True):
        mine = [(p, d) for p, d in heard if tuple(ids[: len(p) + len(d.ids)]) == p + d.ids]
        longest: dict[int, GenerationResult] = {len(prompt): drawn for prompt, drawn in mine}
        assert len(longest) == turns
        expected = [(False, 0.0, -1)] * len(ids)
        for start, drawn in longest.items():
            rows = zip([True] * len(drawn.ids), drawn.logprobs, drawn.versions, strict=True)
            expected[start : start + len(drawn.ids)] = list(rows)
        assert list(zip(mask, logprobs, versions, strict=True)) == expected
        num_turns, num_calls = num_turns + turns, num_calls + calls
    assert num_turns > 64
    assert num_calls > 0
