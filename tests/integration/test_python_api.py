"""hflow called from Python: by the name of a shipped recipe, and inside of an event loop, as in notebooks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import hflow
from hflow import RecipeError

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
