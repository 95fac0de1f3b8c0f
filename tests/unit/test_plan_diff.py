"""Differences of plans: every change is found, with its effect on a resumed run."""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_kit import SHIPPED
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import model_config
from plan_graphs import agent, changed, ema, grpo, ppo, request, sft, without
from rich.console import Console

from hflow.base.errors import PlanError
from hflow.graph.ir import BodyRef, DatasetSpec, Graph, Knob, SourceLocation
from hflow.planner.compile import compile_plan
from hflow.planner.diff import Change, Effect, PlanDiff, diff_plans
from hflow.planner.diff.compare import decided_values
from hflow.planner.diff.values import Unmatched, estimated_values, format_devices
from hflow.planner.plan.forecast import (
    CycleStep,
    EdgeTraffic,
    Forecast,
    MemoryCategory,
    MemoryItem,
    NodeTime,
    Period,
    PhaseMemory,
)
from hflow.planner.plan.hardware import Device, Hardware, Link
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import decisive_rows, to_json
from hflow.planner.plan.workload import Workload
from hflow.report.text.diff import render_diff
from hflow.shapes.model_shape import ModelShape

GIB = 2**30
TINY = ModelShape("llama", 1, 4, 8, 2, 2, 2, 10, True)


def rows(graph: Graph | None = None, **changes: object) -> dict[str, Any]:
    """The plan as a file holds it."""
    plan = compile_plan(graph or grpo(), request(**changes))
    return json.loads(json.dumps(to_json(plan)))


def diff(before: dict[str, Any], after: dict[str, Any]) -> PlanDiff:
    """Return the differences, after checking them against the digests."""
    found = diff_plans(before, after)
    assert bool(found.decided) == (found.before != found.after)
    return found


def the(found: PlanDiff, topic: str, subject: str) -> Change:
    """The one change of a subject."""
    (change,) = [c for c in found.changes if (c.topic, c.subject) == (topic, subject)]
    return change


def with_setting(key: str, value: object) -> dict[str, Any]:
    return rows(settings={key: value})


def test_a_plan_equals_itself():
    found = diff(rows(), rows())
    assert found.changes == ()
    assert found.effect is Effect.SAME
    assert "the same" in found.verdict


def test_the_location_of_files_is_not_a_change():
    graph = grpo()
    moved = tuple(
        replace(n, spec=replace(n.spec, where=SourceLocation("/other/r.py", 90))) for n in graph.nodes
    )
    other = replace(graph, nodes=moved, warnings=("/other/r.py:90: unused",), notes=("unbound",))
    assert diff(rows(graph), rows(other)).changes == ()
    here, there = with_setting("data.data.path", "/a/t.jsonl"), with_setting("data.data.path", "/b/t.jsonl")
    assert diff(here, there).changes == ()


def test_a_larger_replica_is_resharded():
    found = diff(rows(), rows(cluster="cpu-1x4"))
    assert the(found, "replica", "actor@train") == Change(
        "replica", "actor@train", "d2", "d4", Effect.RESHARD
    )
    assert the(found, "replica", "actor@gen").effect is Effect.SAME
    assert the(found, "replica", "ref@infer").effect is Effect.SAME
    assert the(found, "group", "all") == Change("group", "all", "0-1", "0-3", Effect.SAME)
    assert the(found, "cluster", "devices_per_node").after == "4"
    assert the(found, "routing", "actor@train").before == "2 x 1 x 1 shards on 0-1"
    assert the(found, "placement", "actor_train dp-heads").after == "0-3"
    assert "reshard actor@train d2 -> d4" in found.verdict


def test_a_resharding_that_changes_results_says_so():
    found = diff(rows(), rows(cluster="cpu-1x4", batch=16))
    assert "reshard actor@train d2 -> d4" in found.verdict
    assert "results differ" in found.verdict


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "none"),
        ([4], "4"),
        ([0, 1], "0-1"),
        ([0, 2], "0 2"),
        ([0, 1, 2, 3, 6, 5], "0-3 6 5"),
        (list(range(0, 64, 4)), "0-60 by 4"),
        ([0, 2, 4, 8, 9, 10], "0-4 by 2 8-10"),
        ([9, 7, 5, 3, 1, 8, 6, 4], "9 7 5 3 1 8 ... (8)"),
    ],
)
def test_devices_in_few_letters(ids: list[int], text: str):
    assert format_devices(ids) == text


def test_every_replica_that_a_checkpoint_holds_is_resharded():
    found = diff(rows(ppo(), batch=16), rows(ppo(), batch=16, cluster="cpu-1x4"))
    assert "reshard actor@train d2 -> d4, critic@train d2 -> d4" in found.verdict
    averaged = diff(rows(ema()), rows(ema(), cluster="cpu-1x4"))
    assert "reshard actor@train d2 -> d4, ref@infer d2 -> d4" in averaged.verdict


def test_the_same_shards_on_other_devices_are_no_resharding():
    at = [{"all": (0, 1)}, {"all": (2, 3)}]
    before, after = (rows(cluster="cpu-1x4", groups=groups) for groups in at)
    found = diff(before, after)
    assert the(found, "replica", "actor@train devices").before == "0-1"
    assert found.effect is Effect.SAME
    assert found.verdict == "nothing to reshard"


def test_another_backend_is_resharded():
    backends = [{"actor": model_config(backend=backend)} for backend in ("torch", "megatron")]
    found = diff(*(rows(models=models) for models in backends))
    assert found.verdict == "a resume would have to reshard actor@train backend torch -> megatron"
    engines = [{"actor": model_config(engine=engine)} for engine in ("embedded", "vllm")]
    found = diff(*(rows(models=models) for models in engines))
    assert the(found, "replica", "actor@gen backend").effect is Effect.NEW


@pytest.mark.parametrize(
    ("changes", "subject", "effect"),
    [
        ({"num_steps": 20}, "steps", Effect.SAME),
        ({"batch": 16}, "batch", Effect.NEW),
        ({"max_staleness": 2}, "max_staleness", Effect.NEW),
        ({"sync_every": 2}, "sync_every", Effect.NEW),
        ({"max_concurrent": 64}, "max_concurrent", Effect.SAME),
        ({"max_refused_per_step": 9}, "max_refused_per_step", Effect.SAME),
    ],
)
def test_numbers_of_a_run(changes: dict[str, int], subject: str, effect: Effect):
    change = the(diff(rows(), rows(**changes)), "schedule", subject)
    assert change.after == str(next(iter(changes.values())))
    assert change.effect is effect


@pytest.mark.parametrize(("schedule", "effect"), [("cosine", Effect.NEW), ("constant", Effect.SAME)])
def test_other_steps_change_results_where_the_learning_rate_falls_until_the_last(
    schedule: str, effect: Effect
):
    settings = {"models.actor.optim.schedule": schedule, "models.other.optim.schedule": "linear"}
    found = diff(rows(settings=settings), rows(settings=settings, num_steps=20))
    assert the(found, "schedule", "steps").effect is effect
    assert ("results differ from here on" in found.verdict) is (effect is Effect.NEW)


def test_staler_weights_raise_the_bound():
    found = diff(rows(), rows(max_staleness=2, sync_every=2))
    # (2 + 1) syncs of 2 steps each, less the step itself: 3 * 2 - 1.
    assert the(found, "staleness", "bound") == Change("staleness", "bound", "0", "5", Effect.NEW)


def test_how_often_a_model_is_saved_changes_nothing():
    found = diff(rows(), rows(save_every=2))
    assert the(found, "firing", "save.actor every") == Change(
        "firing", "save.actor every", "10", "2", Effect.SAME
    )
    assert found.verdict == "nothing to reshard"


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("data.data.generator", Effect.REFUSE),
        ("data.data.shuffle", Effect.REFUSE),
        ("data.heldout.generator", Effect.NEW),
        ("models.actor.path", Effect.REFUSE),
        ("models.ref.path", Effect.NEW),
        ("models.actor.architecture.vocab_size", Effect.REFUSE),
        ("models.ref.architecture.vocab_size", Effect.NEW),
        ("models.actor.alphabet", Effect.REFUSE),
        ("models.actor.chat_template", Effect.NEW),
        ("models.actor.optim.lr", Effect.NEW),
        ("models.actor.dtype", Effect.NEW),
        ("models.actor.tokens_per_microbatch", Effect.SAME),
        ("models.actor.activation_checkpointing", Effect.SAME),
        ("models.actor.save_optimizer", Effect.SAME),
        ("models.actor.layout", Effect.SAME),
        ("models.actor.gen.layout", Effect.SAME),
        ("models.actor.gen.max_running", Effect.SAME),
        ("models.actor.gen.max_model_len", Effect.NEW),
        ("workers", Effect.SAME),
    ],
)
def test_settings(key: str, effect: Effect):
    found = diff(with_setting(key, "one"), with_setting(key, "other"))
    assert found.changes == (Change("setting", key, "one", "other", effect),)


def test_another_seed_is_another_order_of_the_data():
    assert diff(rows(), rows(seed=1)).verdict == "cannot resume: setting seed: 0 -> 1"


def test_saved_samples_have_a_record_of_their_experts_or_not():
    options = grpo().node("actor_gen").spec.options
    off, on = (
        rows(changed(grpo(), "actor_gen", options=(*options, ("routing_replay", value))))
        for value in (False, True)
    )
    found = diff(off, on)
    assert found.verdict == "cannot resume: node actor_gen.routing_replay: false -> true"
    assert diff(rows(), off).effect is Effect.NEW  # a run of a version without the option


def test_samples_of_another_group_size_have_other_ids():
    found = diff(rows(grpo(group=4)), rows(grpo(group=8)))
    assert the(found, "node", "actor_gen group").effect is Effect.REFUSE
    assert found.verdict == "cannot resume: node actor_gen group: 4 -> 8"
    evaluated = changed(grpo(), "eval_gen", group=2)
    assert the(diff(rows(), rows(evaluated)), "node", "eval_gen group").effect is Effect.REFUSE


def test_knobs_options_and_bodies_give_other_numbers():
    graph = changed(
        grpo(minibatches=1, concurrency=4),
        "actor_train",
        knobs=(Knob("clip", "float", 0.1),),
        options=(("reduce", "token-mean"), ("minibatches", 2), ("concurrency", 8)),
        body=BodyRef("recipe", "actor_train", "0123456789abcdef"),
    )
    found = diff(rows(grpo(minibatches=1, concurrency=4)), rows(graph))
    assert the(found, "node", "actor_train.clip") == Change(
        "node", "actor_train.clip", "0.2", "0.1", Effect.NEW
    )
    assert the(found, "node", "actor_train.minibatches").effect is Effect.NEW
    assert the(found, "cut", "actor_train").after == "2"
    assert the(found, "node", "actor_train.concurrency").effect is Effect.SAME
    assert the(found, "node", "actor_train body").after == "source 01234567"
    assert "results differ" in found.verdict
    assert "node actor_train body: source digest o -> source 01234567, and 3 more" in found.verdict


def test_a_body_by_another_name_is_the_same_body():
    body = BodyRef("renamed", "score", "digest of score")
    found = diff(rows(), rows(changed(grpo(), "score", body=body)))
    assert [(c.subject, c.effect) for c in found.changes] == [("score name of the body", Effect.SAME)]


def test_a_new_node_is_one_row():
    found = diff(rows(without(grpo(), "ref_inf")), rows())
    about = [change for change in found.changes if "ref_inf" in change.subject]
    assert about == [Change("node", "ref_inf", None, "infer(ref)", Effect.NEW)]
    assert the(found, "order", "all").after == "ref_inf > group_advantage > actor_train > save.actor"
    gone = diff(rows(), rows(without(grpo(), "ref_inf")))
    change = the(gone, "node", "ref_inf")
    assert (change.before, change.after) == ("infer(ref)", None)
    assert "infer(ref)" in str(change)


def test_models():
    frozen = replace(ppo(), models=tuple(replace(m, head="score") for m in ppo().models))
    found = diff(rows(ppo()), rows(frozen))
    assert the(found, "model", "critic head") == Change(
        "model", "critic head", "value", "score", Effect.REFUSE
    )
    assert the(found, "model", "ref head").effect is Effect.NEW
    assert the(diff(rows(sft()), rows(ema())), "model", "ref").effect is Effect.REFUSE
    found = diff(rows(grpo()), rows(ppo()))
    assert the(found, "model", "critic") == Change("model", "critic", None, "trained", Effect.REFUSE)
    assert not [change for change in found.changes if change.subject.startswith("models.critic")]


def test_another_dataset_or_stream_is_refused():
    graph = grpo()
    streams = tuple(replace(s, dataset="other") if s.trained else s for s in graph.streams)
    other = replace(graph, dataset="other", streams=streams)
    found = diff(rows(), rows(other))
    assert the(found, "recipe", "dataset").effect is Effect.REFUSE
    assert the(found, "stream", "actor_gen dataset").effect is Effect.REFUSE
    columns = replace(graph, datasets=(DatasetSpec("data", graph.datasets[0].columns[:1]),))
    change = the(diff(rows(), rows(columns)), "recipe", "columns of data")
    assert (change.before, change.after) == ("prompt: text, answer: text", "prompt: text")
    assert the(diff(rows(sft()), rows(agent())), "stream", "sft_view").effect is Effect.REFUSE


def test_a_model_of_other_sizes_is_refused():
    larger = replace(TINY, num_layers=2)
    with_actor = [rows(shapes=shapes) for shapes in ({"actor": TINY}, {"actor": larger}, {})]
    found = diff(*with_actor[:2])
    assert the(found, "shape", "actor num_layers") == Change(
        "shape", "actor num_layers", "1", "2", Effect.REFUSE
    )
    assert found.verdict == "cannot resume: shape actor num_layers: 1 -> 2"
    with_ref = [rows(shapes={"ref": shape}) for shape in (TINY, larger)]
    assert the(diff(*with_ref), "shape", "ref num_layers").effect is Effect.NEW
    unknown = the(diff(with_actor[2], with_actor[0]), "shape", "actor")
    assert (unknown.before, unknown.after, unknown.effect) == (None, "llama", Effect.SAME)


def test_weight_routes():
    shapes = {"actor": TINY}
    together = {"actor": model_config("d1", "d1")}
    apart = {"actor": model_config("d1", "d1", "train", "gen")}
    found = diff(rows(models=together, shapes=shapes, cluster="cpu-1x1"), rows(models=apart, shapes=shapes))
    # Embedding 10*4; q k v o 4*(4*4); gate up down 3*(8*4); norms 3*4: 212 entries of 4 bytes.
    assert the(found, "weights", "actor@train -> actor@gen moved").after == "848 B"
    assert the(found, "weights", "actor@train -> actor@gen").before == "shared"
    assert the(found, "weights", "actor@train -> actor@gen").after == "pull"
    assert {change.effect for change in found.changes if change.topic == "weights"} == {Effect.SAME}


def forecast(seconds: float, num_bytes: int) -> Forecast:
    """Return a forecast in which training takes `seconds` and `num_bytes` of activations."""
    weights = (MemoryItem("actor@train weights", GIB, MemoryCategory.WEIGHTS),)
    return Forecast(
        workload=(("actor_gen", Workload(20, 100.0, 0.6, 200)),),
        memory=(
            PhaseMemory(
                "all", (0, 1), "generate", weights, (MemoryItem("cache", 2 * GIB, MemoryCategory.KV_CACHE),)
            ),
            PhaseMemory(
                "all",
                (0, 1),
                "actor_train",
                weights,
                (MemoryItem("activations", num_bytes, MemoryCategory.ACTIVATIONS),),
            ),
        ),
        times=(NodeTime("actor_train", seconds, (("forward", seconds),), "compute"),),
        period=Period(
            seconds + 0.5,
            (
                CycleStep("actor_gen", 0.5, "data", 0),
                CycleStep("actor_train", seconds, "weights of actor", 1),
            ),
            (),
            (("all", 0.25 * seconds),),
        ),
        traffic=(EdgeTraffic("actor_train", 1024 * int(seconds), 0, 0, 1.0, (), 0),),
    )


def foreseen(estimates: Forecast | None) -> dict[str, Any]:
    plan: Plan = replace(compile_plan(grpo(), request()), forecast=estimates)
    return json.loads(json.dumps(to_json(plan)))


def test_estimates_are_compared_but_decide_nothing():
    found = diff(foreseen(forecast(1.0, GIB)), foreseen(forecast(2.0, 3 * GIB)))
    assert found.decided == ()
    assert {(c.topic, c.subject, c.before, c.after) for c in found.changes} == {
        ("memory", "peak of all", "3.0 GiB in generate", "4.0 GiB in actor_train"),
        ("time", "actor_train", "1 s", "2 s"),
        ("traffic", "actor_train", "1.0 KiB", "2.0 KiB"),
        ("period", "a step", "1.5 s", "2.5 s"),
        ("period", "idle share of all", "25%", "50%"),
    }
    assert found.verdict == "nothing to reshard"


def test_estimates_that_are_printed_alike_are_not_reported():
    before, after = forecast(0.8516028851593905, GIB), forecast(0.8516296988067512, GIB + 2**20)
    assert before.period is not None
    assert after.period is not None
    (step, *rest) = after.period.cycle
    renamed = replace(after.period, cycle=(replace(step, why="other data"), *rest))
    traffic = (
        replace(before.traffic[0], num_bytes=7_436_286),
        replace(after.traffic[0], num_bytes=7_438_833),
    )
    before = replace(before, traffic=traffic[:1])
    after = replace(after, traffic=traffic[1:], period=renamed)
    found = diff(foreseen(before), foreseen(after))
    assert found.changes == ()
    assert found.verdict == "the plans are the same"
    (change,) = diff(foreseen(before), foreseen(replace(after, times=forecast(0.9, GIB).times))).changes
    assert (change.topic, change.before, change.after) == ("time", "852 ms", "900 ms")


def test_sizes_that_are_rounded_alike_are_shown_in_bytes():
    shapes, apart = {"actor": TINY}, {"actor": model_config("d1", "d1", "train", "gen")}
    before = rows(models=apart, shapes=shapes)
    after = copy.deepcopy(before)
    (route,) = [row for row in after["weights"] if row["src"] == "actor@train"]
    (same,) = [row for row in before["weights"] if row["src"] == "actor@train"]
    same["moved_bytes"], route["moved_bytes"] = 7_436_286, 7_438_833
    (change,) = diff(before, after).changes
    assert (change.subject, change.before, change.after) == (
        "actor@train -> actor@gen moved",
        "7,436,286 B",
        "7,438,833 B",
    )


def test_changed_hardware_and_lengths_are_reported():
    plan = replace(compile_plan(grpo(), request()), forecast=forecast(1.0, GIB))
    link = Link("ib-ndr", 50.0, 5.0)
    device = Device("h100", "cuda", 80.0, {"fp32": 67.0, "bf16": 989.0}, 3350.0, "nvlink", "ib-ndr")
    faster = replace(device, tflops={"fp32": 67.0, "bf16": 1979.0})
    calibrated = replace(SHIPPED, name="mine", memory=replace(SHIPPED.memory, decode=0.75))
    longer = replace(forecast(1.0, GIB), workload=(("actor_gen", Workload(20, 150.0, 0.6, 200)),))
    before = replace(plan, hardware=Hardware(device, link, link, link, SHIPPED))
    after = replace(plan, hardware=Hardware(faster, link, link, link, calibrated), forecast=longer)
    assert diff(to_json(before), to_json(after)).changes == (
        Change("hardware", "device tflops bf16", "989.0", "1979.0", Effect.SAME),
        Change("hardware", "calibration", "cuda", "mine", Effect.SAME),
        Change("hardware", "calibration memory decode", "0.7", "0.75", Effect.SAME),
        Change("workload", "actor_gen response_mean", "100.0", "150.0", Effect.SAME),
    )


def test_another_critical_cycle():
    before, after = forecast(1.0, GIB), forecast(1.0, GIB)
    assert after.period is not None
    after = replace(after, period=replace(after.period, cycle=after.period.cycle[1:]))
    (change,) = diff(foreseen(before), foreseen(after)).changes
    assert (change.subject, change.before, change.after) == (
        "critical cycle",
        "actor_gen > actor_train",
        "actor_train",
    )


def test_a_forecast_on_one_side_only_is_one_row():
    (change,) = diff(foreseen(None), foreseen(forecast(1.0, GIB))).changes
    assert (change.topic, change.before, change.after) == ("forecast", "none", "made")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all scalars in plain JSON."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def altered(values: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """The same rows with another scalar at one place."""
    copied = copy.deepcopy(values)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    inner[path[-1]] = not old if isinstance(old, bool) else old + 1 if isinstance(old, int | float) else "d7"
    return copied


PLANS = [rows(graph()) for graph in (grpo, ppo, agent, ema)]


@settings(max_examples=150)
@given(st.sampled_from(PLANS), st.data())
def test_every_change_is_reported(plan: dict[str, Any], data: st.DataObject):
    path = data.draw(st.sampled_from(leaves(decisive_rows(plan))))
    other = altered(plan, path)
    found, back = diff(plan, other), diff(other, plan)
    assert found.decided
    assert all(change.before != change.after for change in found.changes)
    mirrored = {(c.topic, c.subject, c.after, c.before) for c in back.changes}
    assert {(c.topic, c.subject, c.before, c.after) for c in found.changes} == mirrored


def test_rows_without_a_topic_are_named_by_path():
    plan = rows()
    needing = next(i for i, node in enumerate(plan["schedule"]["nodes"]) if node["needs"])
    other = altered(plan, ("schedule", "nodes", needing, "needs", 0))
    (change,) = diff(plan, other).changes
    path = f"schedule.nodes[{needing}].needs[0]"
    assert (change.topic, change.subject, change.after) == ("rest", path, "d7")


def test_long_values_show_where_they_differ():
    plan = rows()
    found = diff(plan, altered(plan, ("graph", "nodes", 2, "reads", 0, "unit")))
    assert the(found, "node", "score reads").before == 'completion, answer ([0].unit: "text")'
    assert the(found, "node", "score reads").after == 'completion, answer ([0].unit: "d7")'


@pytest.mark.parametrize("broken", [{}, {"graph": []}, {**rows(), "replicas": [1]}], ids=["", "graph", "row"])
def test_rows_of_another_form_are_refused_in_one_line(broken: dict[str, Any]):
    with pytest.raises(PlanError, match="written by another version of hflow") as refused:
        diff_plans(broken, rows())
    assert "\n" not in str(refused.value)


def test_json_has_everything():
    found = diff(rows(), rows(cluster="cpu-1x4"))
    values = json.loads(json.dumps(found.to_json()))
    assert (values["effect"], values["verdict"]) == ("reshard", found.verdict)
    assert values["before"] == compile_plan(grpo(), request()).digest
    assert values["changes"][0] == {
        "topic": "cluster",
        "subject": "name",
        "before": "cpu-1x2",
        "after": "cpu-1x4",
        "effect": "same",
    }


def test_the_table_in_the_documentation_has_every_topic():
    text = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    documented = {topic for cell in cells for topic in cell.split(", ")}
    lone, plan = Unmatched(frozenset(), frozenset()), foreseen(forecast(1.0, GIB))
    topics = {*decided_values(plan, lone), *estimated_values(plan, lone, with_rows=True), "rest"}
    assert topics - {"forecast"} <= documented


def shown(found: PlanDiff, width: int = 100) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(render_diff(found, "lock.json", "recipes/grpo.py"))
    return file.getvalue()


def test_the_report_has_every_topic_in_100_columns():
    found = diff(rows(ppo(), batch=16), rows(ppo(), batch=16, cluster="cpu-1x4", seed=1))
    text = shown(found)
    assert max(map(len, text.splitlines())) <= 100
    assert {change.topic for change in found.changes} <= set(text.splitlines())
    assert text.splitlines()[0].startswith("- lock.json  ")
    assert text.splitlines()[-1] == found.verdict


def test_the_report_merges_equal_changes():
    text = " ".join(shown(diff(rows(), rows(cluster="cpu-1x4")), 400).split())
    assert "actor@train, actor@gen, ref@infer devices 0-1 0-3 same" in text
    assert "actor@gen, ref@infer d2 d4 same" in text
    assert text.endswith("reshard actor@train d2 -> d4")
