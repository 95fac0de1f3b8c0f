"""hflow called from Python: by the name of a shipped recipe, and inside of an event loop, as in notebooks."""

from __future__ import annotations

import asyncio
import json
import linecache
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hflow
from hflow import (
    ConfigError,
    Dataset,
    Model,
    Observer,
    Recipe,
    RecipeError,
    RunInfo,
    Text,
    nodes,
    rewards,
    use,
)

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"

SMALL = ["workers=inproc", "batch=4", "steps=1", "nodes.eval_gen.every=9", "data.heldout.limit=8"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_shipped_recipe_by_its_name() -> None:
    assert [node.name for node in hflow.check("grpo").nodes][:2] == ["actor_gen", "score"]
    assert hflow.plan("grpo", ["cluster=h100-1x2"]).cluster.num_devices == 2
    with pytest.raises(RecipeError, match="did you mean 'grpo'"):
        hflow.check("grpoo")


def test_a_run_inside_of_an_event_loop() -> None:
    async def notebook() -> hflow.RunSummary:
        return hflow.run("grpo", SMALL)

    summary = asyncio.run(notebook())
    assert (summary.steps, summary.reason) == (1, "done")


def test_an_interrupt_of_the_notebook_saves_the_run_and_ends_it() -> None:
    async def notebook() -> hflow.RunSummary:
        return hflow.run("grpo", [*SMALL, "steps=100000"])

    def interrupt() -> None:
        metrics = Path("runs/grpo/latest/metrics.jsonl")
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # A notebook's loop leaves SIGINT to Python, which raises KeyboardInterrupt.
    thread = threading.Thread(target=interrupt)
    thread.start()
    loop = asyncio.new_event_loop()
    try:
        summary = loop.run_until_complete(notebook())
    finally:
        loop.close()
    thread.join()
    assert summary.reason == "stopped"
    assert 1 <= summary.steps < 100000
    assert (Path("runs/grpo/latest/checkpoints") / f"step-{summary.steps}").is_dir()


def run_cells(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the cells of a notebook in order, inside of an event loop, and return their names."""
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]

    async def run() -> None:
        for number, cell in enumerate(cells):
            source, name = "".join(cell["source"]), f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # as a kernel does
            exec(compile(source, name, "exec"), vars(module))

    asyncio.run(run())
    return vars(module)


def test_the_notebook_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_cells(NOTEBOOK, monkeypatch)
    summary = names["summary"]
    assert (summary.reason, summary.steps) == ("done", 5)
    metrics = summary.metrics()
    assert list(metrics.index) == [1, 2, 3, 4, 5]
    assert metrics["actor_gen/reward"].between(0, 1).all()
    best = names["best"]
    assert set(best["reward"]) == {1.0}
    assert len(summary.samples()) == sum(summary.sample_ends.values()) > len(best)
    with pytest.raises(RecipeError, match=r"hflow\.resume\(.*, recipe=recipe\)"):
        hflow.resume(summary.directory, ["steps=6"])
    with pytest.raises(ConfigError, match=r"write \['steps=6'\]"):
        hflow.check(names["recipe"], "steps=6")


def test_data_frames_without_pandas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    summary = hflow.RunSummary("grpo", Path("runs"), 0, 0.0, "done", "", {})
    with pytest.raises(ConfigError, match="pip install pandas"):
        summary.metrics()


class Interrupt(Observer):
    """Interrupts the notebook while the run starts, when nothing can be saved yet."""

    def start(self, run: RunInfo) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)


def test_an_interrupt_of_the_notebook_before_the_run_has_begun_ends_it() -> None:
    actor, data = Model("actor", trainable=True), Dataset("train", prompt=Text, answer=Text)
    listed = [
        use(nodes.actor_gen, actor, group=4, max_tokens=4),
        use(rewards.exact, name="score", returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ]
    recipe = Recipe("mine", data, listed, observers=[Interrupt()])
    overrides = ["model@models.actor=tiny-qwen2", "data@data.train=addition", "workers=inproc", "steps=1"]

    async def notebook() -> None:
        hflow.run(recipe, overrides)

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(notebook())
    finally:
        loop.close()
    (run,) = Path("runs").glob("*/*")
    assert not (run / "ledger.sqlite").exists()
