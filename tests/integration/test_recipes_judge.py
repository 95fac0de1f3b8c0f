"""A language model as the judge, over real HTTP: what it says is the reward, what it fails at is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, module, run, steps_of

from hflow.dsl import load_recipe
from hflow.testing import services

RECIPE = ROOT / "recipes" / "custom" / "llm_judge.py"
SERVER = ROOT / "recipes" / "custom" / "judge_server.py"
SMALL = ["workers=inproc", "cluster=cpu-1x1", "models.actor.path=null", "steps=2", "batch=4"]
SMALL += ["nodes.eval_gen.after=1000", "nodes.actor_gen.group=2"]


class Judging:
    """The shipped server, with what to do instead of answering, request by request."""

    def __init__(self) -> None:
        shipped = module(SERVER)
        self.num_asked = 0
        self.replies: list[str | int] = []
        """Texts to say, or statuses to fail with, before it grades."""
        self.grade: Callable[[str], str | int] = shipped.grade
        lock, judging = threading.Lock(), self

        class Handler(shipped.Handler):
            def grade(self, question: str) -> str | int:
                with lock:
                    judging.num_asked += 1
                    return judging.replies.pop(0) if judging.replies else judging.grade(question)

            def reply(self, text: str | int, model: str) -> None:
                if isinstance(text, int):
                    self.send_error(text)
                else:
                    super().reply(text, model)

        self.server = shipped.JudgeServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def judging() -> Iterator[Judging]:
    made = Judging()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def ask(url: str, completion: str, **settings: Any) -> float:
    """One call of the node's body, as a worker makes it."""
    body = load_recipe(RECIPE).bodies()["judge"]

    async def call() -> float:
        async with services(judge={"url": url, "backoff": 0.01, **settings}):
            score: float = await body(prompt="17+25=", completion=completion)
            return score

    return asyncio.run(call())


@pytest.mark.parametrize(("completion", "score"), [("042", 1.0), ("043", 0.0), ("42", 0.0), ("", 0.0)])
def test_a_score_is_read_from_the_reply(judging: Judging, completion: str, score: float) -> None:
    assert ask(judging.url, completion) == score


@pytest.mark.parametrize(
    ("reply", "score"), [("I'd say 7.5 of 10.", 0.75), ("Score: -3", 0.0), ("12", 1.0), ("about 1", 0.1)]
)
def test_replies_in_words(judging: Judging, reply: str, score: float) -> None:
    judging.replies = [reply]
    assert ask(judging.url, "042") == score


def test_a_busy_judge_is_asked_again(judging: Judging) -> None:
    judging.replies = [503, 429, 500]
    assert ask(judging.url, "042") == 1.0
    assert judging.num_asked == 4


def test_a_reply_without_a_number_fails_the_sample(judging: Judging) -> None:
    judging.replies = ["no idea"]
    with pytest.raises(ValueError, match="the judge's reply has no number: 'no idea'"):
        ask(judging.url, "042")


def test_a_run_is_rewarded_by_the_judge_and_refuses_what_it_cannot_judge(
    judging: Judging, tmp_path: Path
) -> None:
    def grade(question: str) -> str | int:
        """By the second number's last digit: a mark, words, or an error."""
        digit = int(question[question.index("=") - 1])
        return "about 9" if digit > 4 else ("no idea", 404)[digit % 2]

    judging.grade = grade
    rows = steps_of(run(RECIPE, tmp_path, *SMALL, f"services.judge.url={judging.url}"))
    assert [row["batch/samples"] for row in rows] == [8, 8]
    assert [row["actor_gen/reward"] for row in rows] == pytest.approx([0.9, 0.9])
    assert sum(row.get("refused/failed", 0) for row in rows) > 0
    assert judging.num_asked >= 16
    assert sum(row["service_requests/judge"] for row in rows) >= 16
    assert sum(row["service_failures/judge"] for row in rows) > 0
