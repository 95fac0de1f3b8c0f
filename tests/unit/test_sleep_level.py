"""What engines keep while they sleep: everything, a copy of their weights, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import worker_kit as kit
from state_script import ENGINE, Script, batch, changed, generated, grpo, schedule
from torch_kit import ARCHITECTURE

from hflow.base.errors import BackendError, RunError
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.models.settings import ModelSettings
from hflow.planner.plan.rows import Schedule, ScheduledStream
from hflow.runtime import events as ev
from hflow.types.engine import SleepLevel
from hflow.weights.incoming import IncomingWeights
from hflow.workers.inproc import InprocWorkers
from hflow.workers.worker import Worker

KEEP, DROP = "KEEP_WEIGHTS", "DROP_WEIGHTS"


def levels(what: Schedule, rows: dict[str, int] | None = None) -> list[str]:
    """Run a schedule and return the level of each sleep."""
    script = Script(what, rows)
    assert script.run()[-1] == "done"
    return script.sleep_levels


def evaluated(every: int, **rules: Any) -> Schedule:
    side = ScheduledStream("eval", "eval", 1, None, (ENGINE,), ("actor",), every=every)
    nodes = [batch("train", "g", writes=("actor",))]
    return schedule([generated(size=1), side], nodes, shared="g", **rules)


# In the state machine


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_engine_drops_the_weights_that_a_sync_replaces(max_staleness: int):
    assert set(levels(grpo(shared=True, num_steps=5, max_staleness=max_staleness))) == {DROP}


def test_weights_are_kept_between_two_syncs():
    """Sample 4, of the second batch, takes long. It continues after the first batch is trained."""
    script = Script(grpo(shared=True, num_steps=4, sync_every=2), hold={"gen#4", "gen#12"})
    script.run()
    assert script.sleep_levels == [KEEP]
    released = script.release("gen#4")
    assert next(line for line in released if line.startswith("wake")) == f"wake {ENGINE} 2"
    assert script.sleep_levels == [KEEP, DROP, KEEP]


def test_an_evaluation_between_two_syncs_loads_new_weights():
    """It is due at every second version, and a sync at every fourth."""
    held = [f"gen#{sample}" for sample in range(2, 8)]
    script = Script(evaluated(every=2, num_steps=4, sync_every=4), {"eval": 1}, hold=set(held))
    script.run()
    assert script.sleep_levels == [KEEP]
    script.release("gen#2")
    assert "wake actor@gen 2" in script.release("gen#3")
    assert script.sleep_levels == [KEEP, DROP]


def test_an_evaluation_of_every_version_is_like_a_sync():
    assert levels(evaluated(every=1, num_steps=3, sync_every=3), {"eval": 1}) == [DROP] * 4


def test_weights_of_a_frozen_model_are_kept():
    nodes = [batch("train", "g", writes=("student",))]
    assert levels(schedule([generated(size=1)], nodes, shared="g", num_steps=3)) == [KEEP] * 2


def test_a_model_that_changes_on_other_devices_may_come_back_unchanged():
    nodes = [batch("ref", "g"), batch("train", "h", "ref", writes=("actor",))]
    assert KEEP in levels(schedule([generated(size=1)], nodes, shared="g", num_steps=3))


@pytest.mark.parametrize(("shared", "level"), [(True, DROP), (False, "PAUSE")])
def test_no_engine_keeps_a_copy_when_the_run_is_stopped(shared: bool, level: str):
    """An engine that wakes with the same version would, as here between two syncs."""
    script = Script(grpo(shared=shared, num_steps=4, sync_every=4), hold={"gen#0"})
    script.run()
    assert script.send(ev.StopRequested()) == [f"sleep {ENGINE}", "stopped"]
    assert script.sleep_levels[-1] == level


def test_an_engine_with_its_own_devices_keeps_everything():
    what = changed(grpo(shared=False, max_staleness=1), num_steps=4)
    assert set(levels(what)) == {"PAUSE"}


# In the engine


def settings() -> ModelSettings:
    return ModelSettings(name="actor", architecture=ARCHITECTURE, seed=3)


def answer(engine: EmbeddedEngine) -> tuple[int, ...]:
    engine.add(0, [1, 2, 3], SamplingParams(max_tokens=5, seed=1))
    while not (results := engine.step()):
        pass
    return results[0][1].ids


def test_weights_that_were_kept_come_back():
    engine = EmbeddedEngine(settings())
    before = answer(engine)
    engine.sleep(SleepLevel.KEEP_WEIGHTS)
    engine.wake_weights()
    engine.wake_cache()
    assert answer(engine) == before


def test_an_engine_refuses_to_draw_without_weights():
    engine = EmbeddedEngine(settings())
    weights = {name: tensor.clone() for name, tensor in engine._module.state_dict().items()}
    before = answer(engine)
    engine.sleep(SleepLevel.DROP_WEIGHTS)
    engine.wake_weights()
    engine.wake_cache()
    engine.add(0, [1], SamplingParams())
    with pytest.raises(BackendError, match="dropped its weights"):
        engine.step()
    engine.interrupt()
    engine.load_weights([IncomingWeights.of_tensors(weights.items)], 1)
    assert answer(engine) == before


def test_an_engine_with_the_trainers_weights_keeps_them():
    module = EmbeddedEngine(settings())._module
    engine = EmbeddedEngine(settings(), module=module)
    before = answer(engine)
    engine.sleep(SleepLevel.DROP_WEIGHTS)
    engine.wake_weights()
    engine.wake_cache()
    assert answer(engine) == before


# In the worker


def test_an_engine_loads_then_what_was_sent_is_freed_then_it_wakes(monkeypatch):
    """Its cache may need the memory that the published weights take on its device."""
    received = []

    def note(name, receive):
        def noted(worker, *arguments):
            received.append(name)
            return receive(worker, *arguments)

        monkeypatch.setattr(Worker, name, noted)

    for name in ("publish", "load_weights", "free_weights", "wake", "sleep"):
        note(name, getattr(Worker, name))

    async def work(workers: InprocWorkers) -> None:
        await workers.wake("actor@gen", 0)
        await workers.sleep("actor@gen", SleepLevel.PAUSE)
        await workers.wake("actor@gen", 1)

    kit.with_workers(kit.setup_of("cluster=cpu-1x2", "placement=actor=0 actor.gen=1"), work)
    update = ["publish", "load_weights", "free_weights", "wake"]
    assert received == [*update, "sleep", *update]


def test_an_engine_that_has_no_weights_does_not_wake():
    """As after the process that loaded them has died."""

    async def work(workers: InprocWorkers) -> None:
        with pytest.raises(RunError, match="actor@gen has no weights yet"):
            workers._worker.wake("actor@gen")

    kit.with_workers(kit.setup_of(), work)


def test_a_worker_does_not_wake_an_engine_without_weights():
    async def work(workers: InprocWorkers) -> None:
        await workers.wake("actor@gen", 0)
        await workers.sleep("actor@gen", SleepLevel.DROP_WEIGHTS)
        with pytest.raises(RunError, match="dropped its weights of version 0"):
            await workers.wake("actor@gen", 0)
        await workers.wake("actor@gen", 1)
        await workers.open_groups(0, kit.group_tasks("actor_gen", range(1)))
        await kit.collect(workers, 0, 2)

    kit.with_workers(kit.setup_of(), work)
