"""The state machine on well-known recipes: exact traces, and what happens when something goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from state_script import ENGINE, Script, batch, changed, encoded, generated, group, grpo, sample, schedule

from hflow.graph.ir import Level
from hflow.planner.plan.rows import SAVE_PREFIX, Schedule, ScheduledNode, ScheduledStream
from hflow.runtime import events as ev
from hflow.runtime.state.checkpoints import make_snapshot
from hflow.runtime.state.run_state import RunState
from hflow.runtime.state.trained_stream import MIN_FAILED_GROUPS


def side(every: int = 1, after: int = 0, engine: str | None = ENGINE, size: int = 1) -> ScheduledStream:
    replicas, models = ((engine,), ("actor",)) if engine else ((), ())
    return ScheduledStream("eval", "eval", size, None, replicas, models, every=every, after=after)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_the_samples_of_a_batch_are_counted_as_they_are_finished():
    script = Script(grpo(shared=True), hold={"gen#1", "gen#3", "score", "actor_train"})
    script.run()
    assert script.state.num_generated() == {"gen": 2}, "0 and 2; a reward does not count"
    for waiting in ("gen#1", "gen#3"):
        script.release(waiting)
    assert script.state.num_generated() == {"gen": 4}
    for sample_id in range(4):
        script.release(f"score {sample_id}")
    assert script.state.num_generated() == {}, "the batch is formed, and no group is open"


# -------------------------------------------------------------------------- whole traces
def test_grpo_colocated():
    assert Script(grpo(shared=True)).run() == lines("""
        wake actor@gen 0
        open gen 0
        open gen 1
        score 0
        score 1
        score 2
        score 3
        advantage 0
        advantage 1
        form gen 0: 0 1
        sleep actor@gen
        ref 0
        actor_train 0
        step 0
        wake actor@gen 1
        open gen 2
        open gen 3
        score 4
        score 5
        score 6
        score 7
        advantage 2
        advantage 3
        form gen 1: 2 3
        sleep actor@gen
        ref 1
        actor_train 1
        step 1
        done
    """)


def test_accept_lists_all_remaining_samples_of_a_group():
    script = Script(grpo(shared=True), hold={"score"})
    script.run()
    script.release("score 1")
    script.release("score 0")
    assert script.accepted == {"gen": (0, 1)}
    script.release("score 2")
    assert script.accepted == {"gen": (0, 1)}


def test_grpo_separate():
    """The engine is awake while others train, and only stops to take the new weights."""
    trace = Script(grpo(shared=False)).run()
    assert [line for line in trace if not line.startswith(("score", "advantage"))] == lines("""
        publish actor@gen 0
        wake actor@gen 0
        open gen 0
        open gen 1
        form gen 0: 0 1
        ref 0
        actor_train 0
        step 0
        publish actor@gen 1
        sleep actor@gen
        wake actor@gen 1
        open gen 2
        open gen 3
        form gen 1: 2 3
        ref 1
        actor_train 1
        step 1
        done
    """)


def test_grpo_one_step_ahead():
    """With eta = 1 the next batch is generated under the old weights while the first one trains.

    It is bound when the trainer comes for it.
    """
    script = Script(grpo(shared=False, max_staleness=1, num_steps=3), hold={"actor_train"})
    trace = script.run()
    assert [line for line in trace if line.startswith(("open", "form"))] == lines("""
        open gen 0
        open gen 1
        open gen 2
        open gen 3
        form gen 0: 0 1
    """)
    assert script.release("actor_train 0")[:8] == lines("""
        step 0
        publish actor@gen 1
        form gen 1: 2 3
        ref 1
        sleep actor@gen
        actor_train 1
        wake actor@gen 1
        open gen 4
    """)


def test_sft_with_evaluation():
    """Texts are encoded one batch ahead; the evaluation's loss is read before its weights change."""
    nodes = [
        batch("eval_loss", "train", stream="eval", reads=("actor",)),
        batch("sft_train", "train", "eval_loss", writes=("actor",)),
    ]
    plan = schedule([encoded(), side(every=2, engine=None)], nodes, num_steps=3, max_concurrent=4)
    assert Script(plan, rows={"eval": 2}).run() == lines("""
        open eval 0
        open eval 1
        open eval 2
        open eval 3
        open eval 4
        open eval 5
        open gen 0
        open gen 1
        open gen 2
        form eval 0: 0 1
        eval_loss 0
        open gen 3
        form gen 0: 0 1
        sft_train 0
        form gen 1: 2 3
        open eval 2
        open eval 3
        step 0
        sft_train 1
        open gen 4
        open gen 5
        form eval 2: 2 3
        step 1
        eval_loss 2
        form gen 2: 4 5
        open eval 4
        open eval 5
        sft_train 2
        form eval 3: 4 5
        step 2
        eval_loss 3
        step 3
        done
    """)


def test_sft_wakes_its_engine_only_for_evaluations():
    plan = schedule(
        [encoded(), side(every=2)],
        [batch("sft_train", "train", writes=("actor",))],
        shared="train",
        num_steps=3,
        max_concurrent=4,
    )
    trace = Script(plan, rows={"eval": 2}).run()
    assert [line for line in trace if not line.startswith("open")] == lines("""
        wake actor@gen 0
        form gen 0: 0 1
        form gen 1: 2 3
        form eval 0: 0 1
        sleep actor@gen
        sft_train 0
        step 0
        sft_train 1
        step 1
        wake actor@gen 2
        form gen 2: 4 5
        form eval 2: 2 3
        sleep actor@gen
        sft_train 2
        step 2
        wake actor@gen 3
        form eval 3: 4 5
        sleep actor@gen
        done
    """)


def ppo(**more: int):
    nodes = [
        batch("values", "critic", reads=("critic",)),
        batch("gae", None, "values"),
        batch("critic_train", "critic", "gae", "values", writes=("critic",)),
        batch("actor_train", "actor", "gae", writes=("actor",)),
    ]
    return schedule([generated(size=1)], nodes, **more)


def test_actor_and_critic_train_at_once_on_two_groups():
    script = Script(ppo(max_staleness=1), hold={"critic_train", "actor_train"})
    script.run()
    assert set(script.held) == {"critic_train 0", "actor_train 0"}
    assert script.release("actor_train 0") == []
    assert script.release("critic_train 0") == [
        "step 0",
        "values 1",
        "gae 1",
        "critic_train 1",
        "actor_train 1",
    ]
    assert script.release("critic_train 1") == []
    assert script.release("actor_train 1") == ["step 1", "done"]


# -------------------------------------------------------------------------- device sets that overlap in part
def overlapping(**more: int) -> Schedule:
    """Engines and actor on groups a and b, on each of which another model runs alone."""
    nodes = [
        batch("values", "a", reads=("critic",)),
        batch("ref", "b", reads=("ref",)),
        batch("critic_train", "a", "values", writes=("critic",)),
        batch("actor_train", "a+b", "values", "ref", writes=("actor",)),
    ]
    return schedule([generated(size=1)], nodes, shared="a+b", **more)


def test_a_node_on_two_groups_waits_for_both_and_occupies_them():
    script = Script(overlapping(), hold={"values", "ref", "critic_train", "actor_train"})
    script.run()
    assert set(script.held) == {"values 0", "ref 0"}, "on the two groups at once"
    assert script.release("ref 0") == []
    assert script.release("values 0") == ["critic_train 0"]
    assert script.release("critic_train 0") == ["actor_train 0"]
    assert [device.running.name for device in script.state.parts.devices] == ["actor_train"] * 2
    assert script.release("actor_train 0")[:2] == ["step 0", "wake actor@gen 1"]


def test_an_engine_on_two_groups_has_its_turn_when_both_have_reached_it():
    plan = overlapping()
    nodes = [*plan.nodes[:-1], batch("actor_train", "b", "ref", writes=("actor",))]
    plan = schedule(list(plan.streams), nodes, shared="a+b")
    script = Script(plan, hold={"critic_train"})
    trace = script.run()
    assert "actor_train 0" in trace, "while the critic trains"
    assert "wake actor@gen 1" not in trace
    assert script.release("critic_train 0")[:2] == ["step 0", "wake actor@gen 1"]
    assert script.sleep_levels[0] == "DROP_WEIGHTS", "nodes on one of its groups change its weights"


def test_a_node_that_does_not_fire_is_skipped_in_all_its_groups():
    plan = overlapping(num_steps=3)
    rarely = replace(plan.nodes[-1], name="check", writes=(), every=2, after=1)
    plan = schedule(list(plan.streams), [*plan.nodes, rarely], shared="a+b", num_steps=3)
    trace = Script(plan).run()
    assert [line for line in trace if line.startswith("check")] == ["check 1"]
    assert trace[-1] == "done"


# -------------------------------------------------------------------------- weights
def test_sync_every_gives_weights_after_so_many_steps():
    trace = Script(grpo(shared=False, num_steps=6, sync_every=2)).run()
    assert [line for line in trace if line.startswith("wake")] == [f"wake actor@gen {v}" for v in (0, 2, 4)]


def test_an_evaluation_keeps_its_weights_while_the_trainer_continues():
    plan = schedule(
        [generated(size=1), side(every=100)],
        [batch("actor_train", "train", writes=("actor",))],
        max_staleness=2,
        num_steps=3,
        max_concurrent=8,
    )
    script = Script(plan, rows={"eval": 1}, hold={"eval#0"})
    trace = script.run()
    words = ("publish", "wake", "sleep", "actor_train")
    assert [line for line in trace if line.startswith(words)] == lines("""
        publish actor@gen 0
        wake actor@gen 0
        actor_train 0
        actor_train 1
        actor_train 2
    """)
    released = script.release("eval#0")
    assert released[:4] == [
        "form eval 0: 0",
        "publish actor@gen 3",
        "sleep actor@gen",
        "wake actor@gen 3",
    ]
    assert released[-2:] == ["form eval 3: 1", "done"]


def test_an_evaluation_comes_before_fresh_samples():
    plan = changed(grpo(shared=True), max_concurrent=4)
    plan = replace(plan, streams=(*plan.streams, side(every=100)))
    trace = Script(plan, rows={"eval": 3}).run()
    assert trace[:5] == ["wake actor@gen 0", *(f"open eval {number}" for number in range(4))]


def test_sleeping_samples_leave_room_for_the_evaluation():
    """The evaluation of step 1 needs two places; the trained stream must not sleep on all but one."""
    nodes = [
        batch("eval_loss", "train", stream="eval", reads=("actor",)),
        batch("actor_train", "train", "eval_loss", writes=("actor",)),
    ]
    streams = [generated(size=1, num_groups=1), side(engine=None, size=2)]
    plan = schedule(streams, nodes, shared="train", max_staleness=3, max_concurrent=4, num_steps=4)
    script = Script(plan, rows={"eval": 1}, hold={f"gen#{key}" for key in range(6)})
    script.run()
    assert any(line.startswith("form eval 1") for line in script.release("gen#0"))


def test_interrupted_samples_continue_in_the_next_turn():
    """Sample 6 sleeps through step 0; what it holds of version 0 is within eta = 1 of step 1."""
    script = Script(grpo(shared=True, max_staleness=1), hold={"gen#6"})
    assert script.run()[-2:] == ["step 0", "wake actor@gen 1"]
    after = script.release("gen#6")
    assert after[:3] == ["score 6", "advantage 3", "form gen 1: 2 3"]
    assert after[-1] == "done"


# -------------------------------------------------------------------------- refusals
def test_a_refused_group_is_replaced():
    script = Script(grpo(shared=True, num_steps=1), hold={"advantage 0"})
    script.run()
    del script.held["advantage 0"]
    assert script.send(ev.NodeFailed("advantage", 0, ev.Refusal.FAILED))[:2] == [
        "refuse 0 1 advantage failed",
        "open gen 2",
    ]
    assert "form gen 0: 1 2" in script.trace


def test_keep_refuses_a_member_and_the_group_continues():
    nodes = [
        sample("keep", "gen", keep=True),
        group("advantage", "keep"),
        batch("train", "t", writes=("actor",)),
    ]
    script = Script(schedule([generated()], nodes, num_steps=1), hold={"keep 1"})
    script.run()
    del script.held["keep 1"]
    assert script.send(ev.NodeDone("keep", 1, keep=False))[:2] == ["refuse 1 keep keep", "advantage 0"]
    assert script.trace[-1] == "done"


def test_abandoned_samples_occupy_their_place_until_they_report():
    plan = changed(grpo(shared=False), max_concurrent=4)
    plan = replace(plan, streams=(generated(min_group=2),))
    script = Script(plan, hold={f"gen#{key}" for key in range(6)})
    script.run()
    assert script.send(ev.NodeFailed("gen", 0, ev.Refusal.TIMEOUT)) == [
        "refuse 0 gen timeout",
        "refuse 1 gen small_group",
    ]
    assert script.release("gen#1") == ["open gen 2"]


def test_a_late_result_for_a_refused_group_is_ignored():
    plan = replace(grpo(shared=True), streams=(generated(min_group=2),))
    script = Script(plan, hold={"score 0", "score 1", "gen#2"})
    script.run()
    assert script.send(ev.NodeFailed("score", 0, ev.Refusal.FAILED))[:2] == [
        "refuse 0 score failed",
        "refuse 1 score small_group",
    ]
    assert script.release("score 1") == []


def refuse_all(script: Script, reason: ev.Refusal) -> int:
    """Let a node fail on each group until the run ends; returns on how many."""
    script.run()
    number = 0
    while script.state.finished is None:
        script.send(ev.NodeFailed("advantage", number, reason, "no connection"))
        number += 1
    assert script.state.finished.error
    return number


def test_a_run_that_only_refuses_stops_and_names_the_culprit():
    script = Script(grpo(shared=True, max_refused_per_step=3), hold={"advantage"})
    assert refuse_all(script, ev.Refusal.KEEP) == 4 + 1, "it waits for the group that is still open"
    assert script.trace[-1] == (
        "4 groups were refused since the last batch, 4 of them by advantage (keep): no connection; fix "
        "advantage or raise schedule.max_refused_per_step"
    )


def test_a_run_in_which_everything_fails_stops_early():
    script = Script(grpo(shared=True), hold={"advantage"})
    assert refuse_all(script, ev.Refusal.TIMEOUT) == MIN_FAILED_GROUPS + 1 + 1
    assert script.trace[-1] == (
        "17 groups in a row were refused as a node failed, the last by advantage (timeout): no connection; "
        "correct that, or set retries= of advantage if it fails by chance"
    )


def test_a_group_that_is_accepted_begins_the_row_of_failures_again():
    script = Script(grpo(shared=True), hold={"advantage"})
    script.run()
    for number in range(MIN_FAILED_GROUPS):
        script.send(ev.NodeFailed("advantage", number, ev.Refusal.FAILED))
    assert script.state.parts.trained.num_failed == MIN_FAILED_GROUPS
    script.release(f"advantage {MIN_FAILED_GROUPS}")
    assert script.state.parts.trained.num_failed == 0
    assert script.state.parts.progress.problem is None


def test_a_run_that_stops_over_refusals_saves_its_steps_and_starts_to_count_again():
    plan = grpo(shared=True, max_refused_per_step=1)
    name = f"{SAVE_PREFIX}actor"
    saves = ScheduledNode(name, Level.BATCH, "gen", ("actor_train",), "train", every=99, after=98)
    orders = tuple((name, (*nodes, saves.name)) for name, nodes in plan.orders)
    plan = replace(plan, nodes=(*plan.nodes, saves), orders=orders)
    script = Script(plan, hold={f"advantage {n}" for n in (2, 3, 4)})
    script.run()
    assert script.trace[-1] != "done"
    for number in (2, 3, 4):
        script.send(ev.NodeFailed("advantage", number, ev.Refusal.FAILED))
    assert script.state.finished is not None
    assert script.state.finished.error
    assert "checkpoint 1" in script.trace
    assert script.state.parts.trained.num_refused == 0


def test_the_newest_message_of_the_failing_node_is_reported():
    plan = replace(grpo(shared=True, max_refused_per_step=1), streams=(generated(min_group=2),))
    script = Script(plan, hold={"score"})
    script.run()
    state = script.state
    said = [
        what.message
        for key, message in ((0, "KeyError: 'a'"), (2, "KeyError: 'b'"))
        for what in state.handle(ev.NodeFailed("score", key, ev.Refusal.FAILED, message))
        if isinstance(what, ev.Refuse) and what.reason is ev.Refusal.FAILED
    ]
    assert said == ["KeyError: 'a'", "KeyError: 'b'"]
    assert state.parts.progress.problem == (
        "2 groups were refused since the last batch, 2 of them by score (failed): KeyError: 'b'; "
        "fix score or raise schedule.max_refused_per_step"
    )


def test_late_results_of_a_refused_group_do_not_change_the_message():
    plan = replace(grpo(shared=True), streams=(generated(min_group=2),))
    script = Script(plan, hold={"score 0", "score 1"})
    script.run()
    script.state.handle(ev.NodeFailed("score", 0, ev.Refusal.FAILED, "KeyError: 'a'"))
    assert script.state.parts.trained.refusal_messages == {("score", ev.Refusal.FAILED): "KeyError: 'a'"}
    script.state.handle(ev.NodeFailed("score", 1, ev.Refusal.FAILED, "its sample left the run"))
    assert script.state.parts.trained.refusal_messages == {("score", ev.Refusal.FAILED): "KeyError: 'a'"}


# -------------------------------------------------------------------------- age
def aging(hold: str) -> Script:
    """eta = 1: group 1 stays behind while steps 0 and 1 train on others."""
    nodes = [sample("score", "gen"), batch("actor_train", "train", writes=("actor",))]
    return Script(schedule([generated(size=1)], nodes, max_staleness=1, num_steps=4), hold={hold})


@pytest.mark.parametrize("hold", ["gen#1", "score 1"])
def test_a_sample_that_got_too_old_is_refused_and_replaced(hold: str):
    """As soon as it is certain: while it still runs, and while it waits for its reward."""
    script = aging(hold)
    assert [line for line in script.run() if line.startswith(("form", "refuse"))] == lines("""
        form gen 0: 0 2
        form gen 1: 3 4
        refuse 1 gen stale
        form gen 2: 5 6
        form gen 3: 7 8
    """)
    assert script.trace[-1] == "done"


def test_a_slow_sample_within_the_certified_lag_is_trained_on():
    script = aging("actor_train 0")
    script.run()
    assert "form gen 1: 2 3" in script.release("actor_train 0")
    assert not any(line.startswith("refuse") for line in script.trace)


# -------------------------------------------------------------------------- the end
def test_an_exhausted_dataset_trains_the_formed_batches():
    trace = Script(grpo(shared=True, num_steps=5), rows={"gen": 5}).run()
    assert [line for line in trace if line.startswith(("form", "step"))] == lines("""
        form gen 0: 0 1
        step 0
        form gen 1: 2 3
        step 1
    """)
    assert trace[-1] == "dataset exhausted"


def test_saving_happens_at_the_last_step_even_if_the_dataset_ends_early():
    nodes = [
        batch("actor_train", "train", writes=("actor",)),
        batch("save.actor", "train", "actor_train", every=9, after=8, at_end=True),
    ]
    plan = schedule([generated()], nodes, num_steps=9)
    early = Script(plan, rows={"gen": 4}).run()
    planned = Script(replace(plan, num_steps=2)).run()
    for trace, end in ((early, "dataset exhausted"), (planned, "done")):
        assert [line for line in trace if line.startswith("save")] == ["save.actor 1"]
        assert trace.index("actor_train 1") < trace.index("save.actor 1")
        assert trace[-1] == end


def test_a_stop_completes_the_steps_that_have_begun():
    script = Script(grpo(shared=True), hold={"ref 0"})
    script.run()
    assert script.send(ev.StopRequested()) == []
    assert script.release("ref 0") == ["actor_train 0", "step 0", "stopped"]
    assert script.state.handle(ev.NodeDone("ref", 0)) == []


def test_a_stop_interrupts_samples():
    script = Script(grpo(shared=True), hold={"gen#0"})
    script.run()
    assert script.send(ev.StopRequested()) == ["sleep actor@gen", "stopped"]


def test_what_fails_while_a_run_stops_begins_again_when_it_is_resumed():
    """A stop with a problem is an error, once the step that has begun is complete."""
    plan = changed(grpo(shared=False, num_steps=4), max_staleness=1.0)
    script = Script(plan, hold={"actor_train 0", "score 4"})
    script.run()
    script.send(ev.StopRequested("the budget is used up"))
    failed = ev.NodeFailed("score", 4, ev.Refusal.FAILED, "no money")
    assert not any("refuse" in line for line in script.send(failed))
    script.release("actor_train 0")
    assert script.state.finished == ev.Finish("the budget is used up", error=True)
    (stream,) = make_snapshot(script.state.parts).streams
    assert 4 in [member.sample for group in stream.groups for member in group.members]


# -------------------------------------------------------------------------- our own bugs
@pytest.mark.parametrize(
    "event",
    [
        ev.NodeDone("nobody", 0),
        ev.NodeDone("gen", 0),
        ev.NodeDone("ref", 0),
        ev.NodeDone("score", 0),
        ev.NodeDone("advantage", 7),
        ev.NodeFailed("ref", 0, ev.Refusal.FAILED),
        ev.SampleDone("gen", 99),
        ev.Awake(ENGINE, 0),
        ev.Asleep(ENGINE),
        ev.Exhausted("gen", 9),
        ev.Started(),
    ],
)
def test_an_impossible_event_raises_with_the_history(event: ev.Event):
    script = Script(grpo(shared=True), hold={"gen"} | {f"gen#{key}" for key in range(4)})
    script.run()
    with pytest.raises(AssertionError, match="last events") as caught:
        script.state.handle(event)
    assert "Awake(replica='actor@gen', version=0)" in str(caught.value)
    assert str(event) in str(caught.value)


def test_a_second_completion_raises():
    script = Script(grpo(shared=True), hold={"gen#1"})
    script.run()
    with pytest.raises(AssertionError, match="sample 0 of gen is done twice"):
        script.state.handle(ev.SampleDone("gen", 0, 0))


def test_a_reader_that_no_edge_protects_raises():
    """`values` runs beside the writer of what it reads: the plan lacks an overwrite edge."""
    nodes = [
        batch("slow", "a"),
        batch("values", "a", reads=("actor",)),
        batch("train", "b", writes=("actor",)),
    ]
    state = RunState(schedule([encoded()], nodes))
    state.handle(ev.Started())
    state.handle(ev.SampleDone("gen", 0))
    state.handle(ev.SampleDone("gen", 1))
    state.handle(ev.NodeDone("train", 0))
    with pytest.raises(AssertionError, match="an order edge before a node that writes it is missing"):
        state.handle(ev.NodeDone("slow", 0))
