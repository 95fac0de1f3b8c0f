"""Tests of llm_judge.py with the server of judge_server.py: `pytest` runs them in seconds, without a GPU."""

import math
import threading
from pathlib import Path

from judge_server import Handler, JudgeServer

import hflow
from hflow.testing import try_recipe

RECIPE = Path(__file__).with_name("llm_judge.py")


def test_the_graph_has_no_mistakes() -> None:
    graph = hflow.check(RECIPE)
    assert any(node.spec.verb == "train" for node in graph.nodes)


def test_two_steps_of_training(tmp_path: Path) -> None:
    with JudgeServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"services.judge.url=http://127.0.0.1:{server.server_port}/v1"
        summary = try_recipe(RECIPE, tmp_path, [url])
        server.shutdown()
    assert (summary.reason, summary.steps) == ("done", 2)
    assert all(math.isfinite(value) for value in summary.values.values())
