"""The text of `hflow plan`: complete, within the width of the terminal, with the figures of the plan."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from forecast_samples import GIB, sample_hardware, with_forecast
from model_configs import model_config
from plan_graphs import agent, ema, grpo, ppo, request, sft
from rich.cells import cell_len
from rich.console import Console

from hflow.dsl.recipe import load_recipe
from hflow.graph.build import build_graph
from hflow.graph.ir import Edge, EdgeKind
from hflow.planner.compile import compile_plan
from hflow.planner.plan.forecast import (
    CycleStep,
    Forecast,
    MemoryCategory,
    MemoryItem,
    Period,
    PhaseMemory,
    Slot,
)
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import Workload
from hflow.report.formatting import format_cadence
from hflow.report.text.graph import describe_edge
from hflow.report.text.plan import render_plan
from hflow.report.text.plan.assumptions import lengths_text
from hflow.report.text.plan.devices import devices_section, marks_of
from hflow.report.text.plan.header import cluster_line, cycle_line
from hflow.report.text.plan.memory import device_classes, memory_bar
from hflow.report.text.plan.time import gantt

ROOT = Path(__file__).parents[2]
GOOD = sorted((ROOT / "tests" / "graphs" / "good").glob("*.py"))
CLUSTERS = ("cpu-1x2", "h100-8x8", "h100-128x8")
GRAPHS = (grpo, ppo, agent, sft, ema)
TITLES = (
    *("Graph", "Replicas", "Devices", "Device groups", "Routing", "Data", "Weights", "Memory", "Time"),
    *("Period", "Samples", "Assumptions"),
)


def plan_of(graph=None, cluster: str = "cpu-1x2", **changes) -> Plan:
    batch = 8 if cluster == "cpu-1x2" else 1024
    return compile_plan(graph or grpo(), request(cluster, **({"batch": batch} | changes)))


def separate(cluster: str, train: str, gen: str, **changes) -> Plan:
    """The actor trains on one group and generates on another."""
    actor = model_config(layout=train, gen_layout=gen, group="train", gen_group="gen")
    return plan_of(grpo(), cluster, models={"actor": actor}, **changes)


def printed(renderable, width: int = 100) -> str:
    """Return the text as a pipe receives it, without colours."""
    file = io.StringIO()
    Console(width=width, file=file).print(renderable)
    return file.getvalue()


def page(plan: Plan, width: int = 100) -> str:
    return printed(render_plan(plan), width)


def words(plan: Plan, width: int = 100) -> str:
    """The page without frames and line breaks, so that folded sentences can be found."""
    return " ".join(page(plan, width).replace("│", " ").split())


def has(text: str, *figures: str) -> bool:
    """Return whether a text contains all figures; print the first one that is missing."""
    missing = [figure for figure in figures if figure not in text]
    print(missing, text) if missing else None
    return not missing


def sections(plan: Plan, width: int = 100) -> dict[str, list[str]]:
    """Title -> its lines."""
    found: dict[str, list[str]] = {}
    title = "head"
    for line in page(plan, width).splitlines():
        if line.endswith("━━━"):
            title = line.rstrip("━").strip()
        found.setdefault(title, []).append(line.rstrip())
    return found


@pytest.mark.first(8)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(make, cluster, width):
    text = page(with_forecast(plan_of(make(), cluster, max_staleness=1)), width)
    assert max(map(cell_len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_with_separate_groups(width):
    for plan in (separate("h100-8x8", "d4t4p2", "d4t8"), separate("h100-128x8", "d64t4p2", "d64t8")):
        assert max(map(cell_len, page(with_forecast(plan), width).splitlines())) <= width


@pytest.mark.first(3)
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_every_part_of_a_good_recipe_is_named(path):
    graph = build_graph(load_recipe(path).spec())
    plan = with_forecast(plan_of(graph, batch=64))
    text = words(plan, 120)
    fields = [field.rpartition("/")[2] for rule in plan.rules for field in rule.fields]
    names = [
        *(node.name for node in graph.nodes),
        *(replica.name for replica in plan.replicas),
        *(str(replica.layout) for replica in plan.replicas),
        *(group.name for group in plan.groups),
        *(stream.name for stream in plan.schedule.streams),
        *(field for edge in graph.edges for field in edge.fields),
        *fields,
        plan.digest,
        plan.cluster.name,
    ]
    assert [name for name in names if name not in text] == []
    assert [
        title for title in TITLES if title not in sections(plan) and f"{title}: left out" not in text
    ] == []


@pytest.mark.first(2)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_the_report_of_1024_devices_is_hardly_longer_than_that_of_64(make):
    large, small = (sections(with_forecast(plan_of(make(), name))) for name in ("h100-128x8", "h100-8x8"))
    assert set(TITLES) - {"Weights"} <= set(large)
    assert sum(map(len, large.values())) < 1.5 * sum(map(len, small.values()))


# The head


def test_the_head_gives_the_verdicts():
    # On cpu-1x2 the fullest phase holds 84 % of 8 GiB, as the samples say: 6.72 GiB. A step takes
    # 60 + 4 + 0.05 + 30 s; 8 x 4 samples in 94.05 s are 0.34 a second.
    text = words(with_forecast(plan_of()))
    assert has(text, "2 cpu devices", "10 steps", "8 prompts x 4 samples", "0.34 samples/s")
    assert has(text, "6.72 GiB of 8 GiB (84 %)", "device 0 in actor_train")
    assert "hflow simulate" not in text
    ahead = words(with_forecast(plan_of(max_staleness=1)))
    assert "hflow simulate" in ahead
    assert "actor_gen 60 s → ref_inf 4 s → actor_train 30 s" in text
    assert has(text, "max_staleness 0", "sync_every 1")


def test_a_plan_that_does_not_fit_names_device_and_node():
    text = words(with_forecast(plan_of(), shrink=2))
    assert has(text, "fits no", "13.4 GiB of 8 GiB (168 %)", "device 0 in actor_train")


def test_links_between_machines_are_named_where_there_are_several():
    plan = with_forecast(plan_of(cluster="h100-8x8"))
    assert has(cluster_line(plan), "nvlink4 450 GB/s", "ib-ndr 50 GB/s")
    one = with_forecast(plan_of(cluster="h100-1x1"))
    assert "1 h100 device" in cluster_line(one)
    assert "GB/s" not in cluster_line(one)


def test_the_cycle_line_leaves_out_short_nodes():
    long, short = CycleStep("a", 99.5, "data", 0), CycleStep("b", 0.5, "data", 1)
    line = cycle_line(plan_of(), (long, short))
    assert has(line, "a 99.5 s", "1 short node")
    assert "b " not in line
    assert "a 99.5 s → b 2 s" in cycle_line(plan_of(), (long, replace(short, seconds=2.0)))


def test_an_engine_on_the_cycle_takes_new_weights():
    line = cycle_line(plan_of(), (CycleStep("actor_gen", 9, "", 0), CycleStep("actor@gen", 1, "", 1)))
    assert "actor_gen 9 s → actor@gen (new weights) 1 s" in line


def test_a_plan_without_estimates_shows_the_rest_with_the_reason():
    text = words(replace(plan_of(), forecast=Forecast()))
    assert has(text, "Memory: left out, as the sizes of the models are not known")
    assert has(text, "fits unknown", "period unknown", "Bytes are not estimated")
    assert "nothing has a second copy" not in text


def test_missing_estimates_are_reported():
    plan = with_forecast(plan_of(), missing=("actor: its sizes are unknown to the planner",))
    assert has(words(plan), "fits partly known", "6.72 GiB of 8 GiB (84 %)")
    plan = replace(plan, forecast=replace(plan.forecast, memory=(), period=None))
    text = words(plan)
    assert has(text, "period unknown", "actor: its sizes are unknown", "Memory: left out", "Period: left out")


def test_warnings_close_the_page():
    plan = replace(plan_of(), warnings=("layout [d1] leaves devices idle",))
    assert page(plan).rstrip().endswith("warning: layout [d1] leaves devices idle")


# The graph


def test_edges_are_listed_by_kind_with_their_lags():
    text = "\n".join(sections(plan_of(ppo(), max_staleness=2, sync_every=3))["Graph"])
    # (2 + 1) * 3 steps for generation, one step for a batch reader.
    assert "weights actor from actor_train, lag ≤ 9\n" in text
    assert "weights critic from critic_train, lag 1\n" in text
    assert "overwrite critic after critic_inf\n" in text
    assert "order after gae\n" in text
    assert "order after save.actor, lag 1\n" in text
    assert "generate a sample on actor@gen" in text


def test_edges_and_cadences_in_words():
    fields = ("advantages", "input_ids")
    assert describe_edge(Edge(EdgeKind.DATA, "a", "b", fields=fields)) == "a (advantages, input_ids)"
    assert describe_edge(Edge(EdgeKind.DATA, "a", "b")) == "a"
    assert describe_edge(Edge(EdgeKind.WEIGHTS, "a", "b", 1, model="m")) == "m from a"
    assert describe_edge(Edge(EdgeKind.OVERWRITE, "a", "b", model="m")) == "m after a"
    assert [format_cadence(1, 0), format_cadence(20, 0), format_cadence(20, 19)] == [
        "",
        ", every 20 steps",
        ", every 20 steps",
    ]
    assert [format_cadence(20, 5), format_cadence(1, 5)] == [
        ", every 20 steps, after step 5",
        ", after step 5",
    ]


# Replicas, devices, turns, routing


def test_replicas_with_the_same_cut_share_a_letter():
    # Of the same layout, but generation ranks have another order, so that it is another cut.
    assert marks_of(plan_of(ppo())) == {
        "actor@train": "A",
        "actor@gen": "B",
        "critic@train": "A",
        "ref@infer": "A",
    }


def test_a_small_grid_shows_the_coordinates_of_each_device():
    # Training ranks are [pipe, data, tensor]; generation, on the second machine, has one stage.
    plan = separate("h100-2x8", "d2t2p2", "d4t2")
    lines = [line.split() for line in sections(plan)["Devices"]]
    first = next(line for line in lines if line[:2] == ["machine", "0"])
    cells = "A d0t0p0 A d0t1p0 A d1t0p0 A d1t1p0 A d0t0p1 A d0t1p1 A d1t0p1 A d1t1p1"
    assert " ".join(first[2:]) == cells
    second = next(" ".join(line[2:]) for line in lines if line[:2] == ["machine", "1"])
    assert second == "B d0t0 B d0t1 B d1t0 B d1t1 B d2t0 B d2t1 B d3t0 B d3t1"


def test_a_device_without_a_group_is_a_dot():
    plan = plan_of(cluster="cpu-1x4", groups={"all": (0, 1)})
    assert printed(devices_section(plan, 100).body[0]).splitlines()[0].split()[-2:] == ["·", "·"]


def test_machines_with_equal_rows_share_a_row():
    # 512 devices train in two stages of 256, which are 32 machines each; the other 64 machines generate.
    plan = separate("h100-128x8", "d64t4p2", "d64t8")
    lines = [" ".join(line.split()) for line in sections(plan)["Devices"]]
    assert "machines 0-31 AC AC AC AC AC AC AC AC A d0-63 t0-3 p0" in lines
    assert "machines 32-63 AC AC AC AC AC AC AC AC A d0-63 t0-3 p1" in lines
    assert "machines 64-127 B B B B B B B B B d0-63 t0-7" in lines


def test_stages_that_alternate_are_folded_too():
    # Generation ranks are [data, pipe, tensor]: with t8p2 every second machine holds the other stage.
    plan = separate("h100-128x8", "d64t4p2", "d32t8p2")
    lines = [" ".join(line.split()) for line in sections(plan)["Devices"]]
    assert "machines 64-127 B B B B B B B B B d0-31 t0-7 p0-1" in lines


def test_a_machine_of_many_devices_is_folded_into_lines_that_fit():
    text = sections(plan_of(sft(), cluster="cpu-1x64", batch=64), 80)["Devices"]
    cells = [line[16:].split() for line in text if "A d" in line and "is the part" not in line]
    assert [len(row) // 2 for row in cells] == [8] * 8
    assert cells[-1][-2:] == ["A", "d63"]


def test_turns_name_engines_in_brackets():
    shown = " ".join(" ".join(sections(plan_of())["Device groups"]).split())
    assert "all 0-1 [actor@gen] → ref_inf → group_advantage → actor_train → save.actor" in shown
    assert "gen 512-1023 [actor@gen]" in words(separate("h100-128x8", "d64t4p2", "d64t8"))


def test_a_streaming_model_is_listed_with_its_devices():
    text = words(plan_of(agent(), models={"rm": model_config(layout="d1", group="rm")}))
    assert has(text, "rm@infer, as they arrive", "rew_inf, as samples and groups arrive")


def test_of_many_keys_the_first_and_the_last_are_shown():
    plan = plan_of(cluster="h100-8x8")
    narrow, wide = (sections(plan, width)["Routing"] for width in (80, 120))
    assert "actor_gen       64   __data0__ → 0, __data1__ → 1, …, __data63__ → 63" in wide
    assert "actor@gen       64   (actor@gen, 0, 0, 0) → 0, …, (actor@gen, 63, 0, 0) → 63" in narrow
    two = "(actor@gen, 0, 0, 0) → 0, (actor@gen, 1, 0, 0) → 1, …, (actor@gen, 63, 0, 0) → 63"
    assert f"actor@gen       64   {two}" in wide


# Bytes


def test_data_are_shown_with_their_bytes():
    # 8 x 4 samples of 12 KiB. The second of two heads receives a tenth of its 16: one sample.
    text = words(with_forecast(plan_of(grpo(minibatches=2))))
    assert has(text, "2 minibatches", "scatter 0 → 1: 12 KiB", "nothing moves")
    assert has(text, "input_ids, loss_mask 12 KiB 372 KiB 1.03", "≥ 10.8 KiB")


def test_many_steps_are_counted():
    # 63 neighbours pass on a tenth of 64 samples each, 12 KiB a sample; half of that to another machine.
    text = words(with_forecast(plan_of(cluster="h100-8x8")))
    assert "input_ids, loss_mask 4.43 MiB 2.21 MiB 43.6 MiB 1.03" in text
    assert has(text, "63 steps", "scatter 0 → 1: 72 KiB")


def test_weight_routes_have_their_bytes():
    text = words(with_forecast(separate("h100-2x8", "d2t2p2", "d4t2")))
    assert "actor@train d2t2p2 on 0-7 pull 0 14 GiB 7 GiB 14 GiB → actor@gen d4t2p1 on 8-15" in text


# Memory


def phase(name: str, *devices: int, held: int = GIB, group: str = "all", **transient: int) -> PhaseMemory:
    weights = MemoryItem("actor@train weights", held, MemoryCategory.WEIGHTS)
    items = tuple(MemoryItem(name, size, MemoryCategory(name)) for name, size in transient.items())
    return PhaseMemory(group, devices, name, (weights,), items)


def test_a_bar_rounds_from_the_left():
    # 2.5 of 10 columns for weights, 3.5 more for activations: they end at round(2.5) = 2 and at 6.
    row = phase("train", 0, held=25, activations=35)
    assert memory_bar(row, scale=100, capacity=100, width=10).plain == "WWaaaa····"


def test_a_bar_beyond_the_capacity_marks_it():
    row = phase("train", 0, held=100, logits=100)
    assert memory_bar(row, scale=200, capacity=150, width=8).plain == "WWWWll|l"


def test_devices_with_the_same_rows_are_one_class():
    rows = (phase("generate", 0, 1, 2, 3), phase("train", 0, 1), phase("train", 2, 3, held=2 * GIB))
    classes = device_classes(rows)
    assert [(one.devices, one.peak.total) for one in classes] == [((0, 1), GIB), ((2, 3), 2 * GIB)]
    assert classes[1].phases == (rows[0], rows[2])


def test_memory_marks_the_fullest_phase_and_its_contents():
    lines = sections(with_forecast(plan_of()))["Memory"]
    marked = [line.split()[:5] for line in lines if line.startswith("*   ")]
    assert marked == [["*", "actor_train", "6.72", "GiB", "84"]]
    text = " ".join(" ".join(lines).split())
    assert has(text, "activations 2.4 GiB", "actor@train optimizer 1.6 GiB")
    assert has(text, "device 1: at most 6.16 GiB, 77 %")


def test_short_bars_are_drawn_larger():
    # Of 8 GiB the fullest phase holds 1.5 GiB; a quarter of 8 GiB is the shortest half that it fits into.
    plan = with_forecast(plan_of())
    rows = (phase("generate", 0, 1, held=GIB), phase("train", 0, 1, held=GIB * 3 // 2))
    lines = sections(replace(plan, forecast=replace(plan.forecast, memory=rows)))["Memory"]
    assert any(line.endswith("0 to 2 GiB") for line in lines)
    assert [line.count("W") for line in lines if "GiB " in line and "W" in line] == [30, 45]


def test_the_smallest_of_many_phases_are_counted():
    plan = with_forecast(plan_of(cluster="h100-1x1"))
    rows = tuple(phase(f"node{i}", 0, held=(i + 1) * GIB) for i in range(12))
    lines = sections(replace(plan, forecast=replace(plan.forecast, memory=rows)))["Memory"]
    assert next(line.split()[0] for line in lines if "GiB" in line and "node" in line) == "node2"
    assert "and 2 smaller phases" in " ".join(lines)


def test_many_classes_take_a_line_each_and_then_are_counted():
    plan = with_forecast(plan_of(cluster="h100-1x8"))
    rows = tuple(phase("train", device, held=(8 - device) * GIB) for device in range(8))
    text = words(replace(plan, forecast=replace(plan.forecast, memory=rows)))
    assert has(text, "device 0: at most 8 GiB", "device 4: at most 4 GiB, 5 %")
    assert has(text, "3 other devices: at most 3 GiB, 4 %")
    assert "device 5:" not in text


# Time, period, samples, assumptions


def test_times_have_parts_and_limits():
    text = words(with_forecast(plan_of()), 120)
    assert has(text, "actor_gen batch 60 s", "prefill 6 s", "decode 45 s", "memory bandwidth")
    assert has(text, "score sample 50 ms", "save.actor batch, at the end 200 ms")


def test_the_cycle_is_spelled_out():
    lines = [" ".join(line.split()) for line in sections(with_forecast(plan_of()))["Period"]]
    start = lines.index("actor_gen 60 s data")
    assert lines[start : start + 4] == [
        "actor_gen 60 s data",
        "ref_inf 4 s data",
        "group_advantage 50 ms data",
        "actor_train 30 s weights of actor",
    ]
    assert "together 94 s" in lines[start + 4]


def test_a_cycle_over_several_steps_shows_the_time_of_one():
    plan = with_forecast(plan_of())
    assert plan.forecast.period is not None
    cycle = (CycleStep("actor_gen", 60, "data", 1), CycleStep("actor_train", 30, "weights of actor", 1))
    period = replace(plan.forecast.period, seconds=45.0, cycle=cycle)
    text = words(replace(plan, forecast=replace(plan.forecast, period=period)))
    assert has(text, "together 90 s", "once in 2 steps", "45 s a step")


def chart(period: Period, width: int) -> list[str]:
    (drawn, *_) = gantt(period, width)
    return [line.rstrip() for line in printed(drawn, width).splitlines()]


def test_the_chart_draws_two_periods():
    # 20 columns for 20 s: 6 s of a, 3 s of b, 1 s of waiting, twice.
    slots = (Slot("a", "all", 0, 6), Slot("b", "all", 6, 3))
    period = Period(10, (CycleStep("a", 10, "", 1),), slots, (("all", 0.1),))
    assert chart(period, len("all ") + 20 + len(" idle 100 %")) == [
        "all ██████▓▓▓·██████▓▓▓· idle 10 %",
        "    a     b   a     b",
        "    |0        |10 s",
    ]


def test_a_slot_that_leaves_the_chart_wraps_around():
    # b begins 8 s after the start and takes 4 s, so that it ends 2 s into the next period.
    slots = (Slot("b", "all", 8, 4),)
    period = Period(10, (CycleStep("b", 10, "", 1),), slots, (("all", 0.6),))
    assert chart(period, len("all ") + 20 + len(" idle 100 %"))[0] == "all ██······████······██ idle 60 %"


def test_slots_of_several_steps_repeat_together():
    # Slots cover two steps of 5 s: a runs in the first only, so it comes back after 10 s.
    slots = (Slot("a", "all", 0, 5),)
    period = Period(5, (CycleStep("a", 10, "", 2),), slots, (("all", 0.5),), num_steps=2)
    assert chart(period, len("all ") + 20 + len(" idle 100 %"))[0] == "all ██████████·········· idle 50 %"


def test_a_short_node_takes_one_idle_column():
    # 20 columns for 20 s: 0.2 s round to nothing, but the lane would look idle.
    period = Period(10, (CycleStep("a", 10, "", 1),), (Slot("a", "all", 5, 0.2),), (("all", 0.98),))
    assert chart(period, len("all ") + 20 + len(" idle 100 %"))[0] == "all ·····█·········█···· idle 98 %"


def test_names_without_room_are_listed():
    slots = (Slot("actor_gen", "all", 0, 40), Slot("gae", "all", 40, 0.1), Slot("train", "all", 40.1, 59.9))
    period = Period(100, (CycleStep("actor_gen", 100, "", 1),), slots, (("all", 0.0),))
    (_, rest) = gantt(period, 100)
    assert str(rest) == "not named above: gae 100 ms"


def test_staleness_in_words():
    assert "Staleness is 0" in words(plan_of())
    assert has(words(plan_of(max_staleness=2, sync_every=3)), "Staleness is at most 8", "- 1 = 8")
    half = words(plan_of(max_staleness=0.5, sync_every=3))
    assert has(half, "max_staleness 0.5", "sync_every 3", "rounded up", "- 1 = 4")
    exact = words(plan_of(max_staleness=0.7, sync_every=10))
    assert has(exact, "max_staleness 0.7", "sync_every 10", "- 1 = 16")
    assert "no model makes the samples" in words(plan_of(sft()))
    assert "unbounded" in words(replace(plan_of(), staleness_bound=None))


def test_lengths_name_their_source():
    given = Workload(512, 1024.0, 0.6, 4096, is_assumed=False)
    text = lengths_text(given)
    # The mean of what is left after the cut at 4,096, of a mean of 1,024 before it.
    assert has(text, "512 tokens", "1,022 on average", "60 %", "at most 4,096", "set by workload")
    assumed = lengths_text(replace(given, is_assumed=True))
    assert has(assumed, "1,022", "assumed", "set workload.prompt")


def test_figures_of_devices_and_links_are_listed():
    text = words(with_forecast(plan_of(cluster="h100-8x8")))
    assert has(text, "989 in bf16", "67 in fp32", "45 % of the FLOP/s", "3,350 GB/s")
    assert has(text, "calibration cuda, shipped figures", "70 % of the memory bandwidth")
    assert has(text, "ib-ndr 50 GB/s", "5 µs")
    assert sample_hardware(plan_of()).inter.name not in words(with_forecast(plan_of()))
