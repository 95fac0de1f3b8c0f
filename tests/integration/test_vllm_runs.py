"""Runs on Ray workers whose engines are vLLM's: with two tensor ranks, and over each transport of a CPU."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from runs import ROOT, run, steps_of

from hflow.base.errors import RunError
from hflow.launch.planning.compile import compile_recipe
from hflow.models.settings import ModelSettings, RankPosition
from hflow.runtime.ledger import audit
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import ENGINE_GAP_MAX
from hflow.workers.ray.ray_actors import RayActors

pytestmark = pytest.mark.ray

GRPO = ["models.actor.gen.engine=vllm", "models.actor.path=null", "nodes.eval_gen.after=99"]
GRPO += ["models.actor.optim.warmup_steps=0", "models.actor.optim.lr=1e-3"]
GRPO += ["models.actor.optim.weight_decay=50"]
"""Each step makes all weights 5 % smaller."""
LONG = [*GRPO, "batch=2", "models.actor.architecture.vocab_size=512", "nodes.actor_gen.max_tokens=120"]
LONG += ["models.actor.architecture.max_position_embeddings=128", "models.actor.gen.max_model_len=128"]
LONG += ["models.actor.gen.max_running=4"]
"""Few and long answers at once: random weights end one in 512 tokens, and a batch takes the engine longer
than the trainer. So answers wait and run at every sync."""


def rows_of(directory: Path, query: str) -> Sequence[tuple[Any, ...]]:
    database = sqlite3.connect(directory / "ledger.sqlite")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def save_base(path: Path, options: Sequence[str]) -> Path:
    """Save the random weights of the configured model."""
    architecture = compile_recipe(ROOT / "recipes/grpo_async.py", options).config.models["actor"].architecture
    TorchModel(ModelSettings(name="actor", architecture=architecture), RankPosition()).save(str(path))()
    return path


def assert_versions(directory: Path) -> None:
    """The engine held other weights in each version that it loaded."""
    assert audit(directory / "ledger.sqlite") == []
    digests = dict(rows_of(directory, "SELECT version, digest FROM commits ORDER BY seq"))
    assert len(set(digests.values())) == len(digests) > 1
    assert list(digests) == sorted(digests)


def assert_continued(directory: Path) -> None:
    """Interrupted answers kept their tokens and continued with the new weights; they were trained."""
    mixed = rows_of(
        directory,
        """
        SELECT samples.id, samples.tokens, sum(segments.tokens) FROM samples
        JOIN segments ON segments.sample = samples.id
        JOIN streams ON segments.stream = streams.id AND streams.name = samples.stream
        WHERE samples.stream = 'actor_gen' AND samples.end = 'trained' AND oldest < newest
        GROUP BY samples.id""",
    )
    assert mixed
    assert all(tokens == kept for _, tokens, kept in mixed)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["store", "gather"])
def test_two_tensor_ranks_on_the_trainers_devices(
    transport: str, tmp_path: Path, four_processes: RayActors
) -> None:
    """The engines' log-probs are the trainer's in every step, so they hold the weights that were trained.

    Ranks that pull are on the devices that hold the most of what they need, so they are no neighbours. They
    take that from shared memory, and the rest from the object store. Others take everything from the worker
    on their device, which gathers it.
    """
    options = [*GRPO, "batch=4", "steps=3", "cluster=cpu-1x4", "models.actor.layout=d4"]
    options += ["models.actor.gen.layout=d2t2", f"models.actor.gen.transport={transport}"]
    summary = run("recipes/grpo.py", tmp_path, *options, processes=four_processes)
    assert (summary.reason, summary.steps) == ("done", 3)
    plan = json.loads((summary.directory / "plan.json").read_text())["plan"]
    order = {"store": [0, 2, 1, 3], "gather": [0, 1, 2, 3]}[transport]
    assert (plan["replicas"][1]["name"], plan["replicas"][1]["workers"]) == ("actor@gen", order)
    way = tuple(plan["weights"][0][key] for key in ("how", "transport", "near"))
    assert way == {"store": ("pull", "store", "shared"), "gather": ("gather", "", "shared")}[transport]
    assert_versions(summary.directory)
    for row in steps_of(summary):
        assert 0 < row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] < 1e-4


@pytest.mark.long
def test_tensor_ranks_merge_the_adapters_of_megatrons(tmp_path: Path, two_processes: RayActors) -> None:
    """Each rank of the engine takes its part of the adapters, which are the trainer's in every step."""
    options = [*GRPO, "batch=4", "steps=3", "cluster=cpu-1x2", "models.actor.backend=megatron"]
    options += ["models.actor.layout=t2", "models.actor.gen.layout=t2", "models.actor.gen.transport=store"]
    options += [f"models.actor.path={save_base(tmp_path / 'base', GRPO)}", "models.actor.optim.lr=1e-2"]
    options += ["models.actor.lora={r: 4, alpha: 8}"]
    summary = run("recipes/grpo.py", tmp_path, *options, processes=two_processes)
    assert (summary.reason, summary.steps) == ("done", 3)
    assert_versions(summary.directory)
    for row in steps_of(summary):
        assert 0 < row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] < 1e-4


@pytest.mark.long
def test_an_engine_rounds_weights_as_its_trainer(tmp_path: Path, two_processes: RayActors) -> None:
    """Two data ranks have all weights in 4 bits. An engine merges DoRA with its copy of them."""
    pytest.importorskip("bitsandbytes")
    options = [*GRPO, "batch=4", "steps=3", "cluster=cpu-1x2", "models.actor.layout=d2"]
    options += ["nodes.actor_gen.max_tokens=8"]
    options += [f"models.actor.path={save_base(tmp_path / 'base', GRPO)}", "models.actor.optim.lr=1e-2"]
    options += ["models.actor.lora={r: 4, alpha: 8, dora: true, base: nf4}"]
    summary = run("recipes/grpo.py", tmp_path, *options, processes=two_processes)
    assert (summary.reason, summary.steps) == ("done", 3)
    assert_versions(summary.directory)
    for row in steps_of(summary):
        assert 0 < row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("transport", ["collective", "shared", "disk"])
def test_a_sync_in_the_middle_of_answers(transport: str, tmp_path: Path, two_processes: RayActors) -> None:
    """New versions are whole weights, or files of adapters that the engine has beside its weights."""
    options = [*LONG, "steps=5", f"models.actor.gen.transport={transport}"]
    if transport == "disk":
        options += [
            f"models.actor.path={save_base(tmp_path / 'base', options)}",
            "models.actor.optim.lr=1e-2",
        ]
        options += ["models.actor.lora={r: 4, alpha: 8}"]
    summary = run("recipes/grpo_async.py", tmp_path, *options, processes=two_processes)
    assert (summary.reason, summary.steps) == ("done", 5)
    assert_versions(summary.directory)
    assert_continued(summary.directory)
    for row in steps_of(summary):  # tokens of other weights, which are 5 % apart, are not compared
        assert row.get(f"actor_train/{ENGINE_GAP_MAX.suffix}", 0) < 1e-4


@pytest.mark.long
def test_a_killed_engine_ends_its_run(tmp_path: Path, two_processes: RayActors) -> None:
    """With one line, and nothing of vLLM is left. Until then its weights came through the object store."""
    options = [*LONG, "steps=50", "models.actor.gen.transport=store"]
    killed: list[psutil.Process] = []

    def kill() -> None:
        """Wait for some steps, then kill the engine."""
        while not any(path.read_text().count("\n") >= 4 for path in tmp_path.rglob("metrics.jsonl")):
            time.sleep(0.1)
        (engine,) = engines(two_processes)
        killed.extend([engine, *engine.children(recursive=True)])
        engine.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(RunError) as error:
        run("recipes/grpo_async.py", tmp_path, *options, processes=two_processes)
    thread.join()
    assert re.fullmatch(
        r"(the generation engine stopped: )?the vLLM engine of 'actor' \(process \d+\) was killed by "
        r"SIGKILL; start the run again from its last checkpoint",
        str(error.value),
    )
    _, alive = psutil.wait_procs(killed, timeout=30)
    assert alive == engines(two_processes) == []
    (directory,) = tmp_path.glob("grpo_async/2*")
    assert_versions(directory)
    assert_continued(directory)


def engines(processes: RayActors) -> list[psutil.Process]:
    """The processes of vLLM's engines below the workers."""
    workers = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in processes.actors(2)])
    children = [child for worker in workers for child in psutil.Process(worker).children()]
    return [child for child in children if any("engines.process" in word for word in child.cmdline())]
