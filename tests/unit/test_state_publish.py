"""Publishing weights to separate engines: when it happens, and which nodes wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from state_script import ENGINE, Script, batch, generated, schedule

from hflow.planner.plan.rows import Schedule, ScheduledStream
from hflow.runtime import events as ev
from hflow.runtime.state.weight_updates import can_lose


def recomputed(**rules: int) -> Schedule:
    """`prox`, `train` and `save` on the trainer's devices, groups of one sample."""
    nodes = [
        batch("prox", "g", reads=("actor",)),
        batch("train", "g", "prox", writes=("actor",)),
        batch("save", "g", "train"),
    ]
    return schedule([generated(size=1)], nodes, **{"num_steps": 6, "max_staleness": 2, **rules})


def about(trace: list[str], *words: str) -> list[str]:
    return [line for line in trace if line.startswith(words)]


def test_weights_are_published_before_other_work_on_their_devices():
    """Neither the checkpoint nor the next step's first node comes before; the engine has no rest yet."""
    script = Script(recomputed(), hold={"train"})
    script.run()
    released = script.release("train 0")
    assert about(released, "publish", "save", "prox", "sleep", "wake") == [
        f"publish {ENGINE} 1",
        "save 0",
        f"sleep {ENGINE}",
        "prox 1",
        f"wake {ENGINE} 1",
    ]


def test_the_engine_continues_until_its_weights_are_published():
    script = Script(recomputed(max_staleness=1), hold={f"publish {ENGINE} 1", "gen#2"})
    script.run()
    assert about(script.trace, "sleep") == []
    assert about(script.release("gen#2"), "form") == ["form gen 1: 2 3"]
    assert script.release(f"publish {ENGINE} 1")[0] == f"sleep {ENGINE}"


def test_no_node_waits_for_an_engine_that_loads():
    """Except for the version after it: at most one published version is pending per engine."""
    script = Script(recomputed(), hold={f"wake {ENGINE} 1"})
    script.run()
    assert about(script.trace, "publish", "wake", "train") == [
        f"publish {ENGINE} 0",
        f"wake {ENGINE} 0",
        "train 0",
        f"publish {ENGINE} 1",
        f"wake {ENGINE} 1",
        "train 1",
    ]
    assert about(script.trace, "prox")[-1] == "prox 2", "what reads weights does not wait"
    assert about(script.release(f"wake {ENGINE} 1"), "publish", "train", "wake")[:2] == [
        f"publish {ENGINE} 2",
        "train 2",
    ]


@pytest.mark.parametrize("publishers", [(), ((ENGINE, ("g",)),)])
def test_an_engine_without_a_publisher_takes_weights_when_it_wakes(
    publishers: tuple[tuple[str, tuple[str, ...]], ...],
):
    script = Script(recomputed(publishers=publishers, num_steps=2, max_staleness=0))
    assert script.run()[-1] == "done"
    assert bool(about(script.trace, "publish")) == bool(publishers)


def test_a_published_version_is_evaluated_after_training_continued():
    """Every second version is evaluated; version 2 changes before the engine has loaded it."""
    side = ScheduledStream("eval", "eval", 1, None, (ENGINE,), ("actor",), every=2)
    nodes = [batch("train", "g", writes=("actor",))]
    what = schedule([generated(size=1), side], nodes, num_steps=8, max_staleness=2)
    script = Script(what, rows={"eval": 1}, hold={f"wake {ENGINE} 2"})
    script.run()
    assert about(script.trace, "publish", "train")[-2:] == [f"publish {ENGINE} 2", "train 2"]
    released = script.release(f"wake {ENGINE} 2")
    assert about(released, "form eval 2", "publish")[0].startswith("form eval 2")
    assert script.trace[-1] == "done"


def test_a_stopped_run_waits_for_its_publications():
    script = Script(recomputed(), hold={f"publish {ENGINE} 0"})
    script.run()
    assert script.send(ev.StopRequested()) == []
    assert script.release(f"publish {ENGINE} 0") == ["stopped"]


def test_training_continues_without_a_lost_engine_which_gets_the_newest_weights():
    script = Script(recomputed(), hold={"train"})
    script.run()
    assert script.send(ev.EngineLost(ENGINE)) == []
    assert about(script.release("train 0"), "publish", "wake", "train") == [f"publish {ENGINE} 1", "train 1"]
    assert about(script.release("train 1"), "publish", "train") == [], "it is at most one version behind"
    assert script.send(ev.EngineBack(ENGINE))[0] == f"wake {ENGINE} 1"
    assert about(script.trace, "publish")[-1] == f"publish {ENGINE} 2"


def test_weights_that_a_lost_engine_was_loading_are_published_again():
    script = Script(recomputed(), hold={f"wake {ENGINE} 1"})
    script.run()
    script.held.clear()
    assert script.send(ev.EngineLost(ENGINE))[0] == f"publish {ENGINE} 2", "the newest, in its place"
    assert script.send(ev.EngineBack(ENGINE))[0] == f"wake {ENGINE} 2"
    assert script.trace[-1] == "done"


def test_an_engine_of_several_in_an_episode_cannot_be_lost():
    alone, shared = generated(), replace(generated(), replicas=(ENGINE, "critic@gen"))
    for stream, is_possible in ((alone, True), (shared, False)):
        script = Script(schedule([stream], [batch("train", "g", writes=("actor",))]))
        parts = script.state.parts
        assert can_lose(parts.engines[ENGINE], parts) == is_possible
