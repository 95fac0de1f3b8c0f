"""The plan's page as text: complete, self-contained, safe, and the same for the same plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from forecast_samples import GIB, with_forecast
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config
from plan_graphs import agent, grpo, ppo, request, sft

from hflow.base.text import MINUS
from hflow.planner.compile import compile_plan
from hflow.planner.plan.forecast import CycleStep, Forecast, Period, Slot
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_plain
from hflow.report.html.plan import page_view, render_page
from hflow.report.html.plan.devices import memory_view
from hflow.report.html.plan.gantt import Gantt, gantt_view
from hflow.report.html.plan.routes import Sets
from hflow.shapes.model_shape import ModelShape

SHAPE = ModelShape("qwen2", 4, 128, 256, 8, 4, 16, 512, is_tied=True, has_qkv_bias=True)
BEFORE = f"k{MINUS}1"
GRAPHS = {"grpo": grpo, "ppo": ppo, "agent": agent, "sft": sft}


def plan_of(name: str = "grpo", **changes: object) -> Plan:
    return with_forecast(compile_plan(GRAPHS[name](), request(**changes)))


class Page(HTMLParser):
    """The parts of an HTML page that tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.ids, self.addresses, self.refs = "", [], [], [], []
        self.details, self.data, self._inside = [], "", None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = tag
        got = dict(attrs)
        self.ids += [got["id"]] if "id" in got else []
        self.refs += [got["data-ref"]] if "data-ref" in got else []
        self.details += [got["data-detail"]] if "data-detail" in got else []
        self.addresses += [got[key] for key in ("src", "href", "action", "srcset", "poster") if key in got]

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script" and data.startswith("{"):
            self.data = data
        elif self._inside not in ("script", "style"):
            self.text += data


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_and_edge_can_be_chosen(name):
    plan = plan_of(name)
    page = Page(render_page(plan))
    nodes = {f"node:{node.name}" for node in plan.graph.nodes}
    assert nodes <= set(page.refs)
    assert nodes <= set(page.details)
    chosen = {ref for ref in page.refs if ref.startswith("edge:")}
    assert chosen == {detail for detail in page.details if detail.startswith("edge:")}
    assert {f"replica:{replica.name}" for replica in plan.replicas} <= set(page.refs)
    assert {f"device:{device}" for device in range(plan.cluster.num_devices)} <= set(page.refs)
    assert len(page.ids) == len(set(page.ids))


def test_the_page_fetches_nothing():
    text = render_page(plan_of("ppo"))
    page = Page(text)
    assert [at for at in page.addresses if not at.startswith("#") and at != "data:,"] == []
    assert {at[1:] for at in page.addresses if at.startswith("#")} <= set(page.ids)
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
    assert "@import" not in text
    assert [at for at in re.findall(r"url\(([^)]*)\)", text) if not at.startswith("#")] == []


def test_equal_plans_give_equal_bytes():
    assert render_page(plan_of("ppo")) == render_page(plan_of("ppo"))


def test_a_thousand_devices_fit_in_the_page():
    models = {
        "actor": model_config("d32t4p4", "d64t8", "train", "gen"),
        "critic": model_config("d32t4p4", group="train"),
        "ref": model_config(group="train"),
    }
    plan = plan_of(
        "ppo", cluster="h100-128x8", batch=1024, models=models, shapes=dict.fromkeys(models, SHAPE)
    )
    text = render_page(plan)
    assert len(text.encode()) < 1_500_000
    assert len({ref for ref in Page(text).refs if ref.startswith("device:")}) == 1024


EVIL = "</script><img src=x onerror=alert(1)>\"'&"


def test_names_from_plans_are_only_text():
    plan = plan_of()
    group, others = plan.groups[0], plan.groups[1:]
    evil = replace(
        plan,
        recipe=EVIL,
        warnings=(EVIL,),
        groups=(replace(group, name=EVIL), *others),
        replicas=tuple(replace(row, groups=(EVIL,)) for row in plan.replicas),
        placements=tuple(replace(row, groups=(EVIL,) if row.groups else ()) for row in plan.placements),
    )
    harmless, page = Page(render_page(plan)), Page(render_page(evil))
    assert "img" not in page.tags
    assert page.tags.count("script") == harmless.tags.count("script")
    assert page.text.count(EVIL) >= 3
    assert {replica["group"] for replica in json.loads(page.data)["devices"]["replicas"]} == {EVIL}


def test_the_view_is_plain_json():
    row = json.loads(json.dumps(to_plain(page_view(plan_of("agent")))))
    assert row["recipe"] == "agent"
    assert row["headline"]["tiles"][0]["label"] == "Peak memory"


def test_the_headline_has_the_main_figures():
    """The sample forecast: 60 s of generation and 30 of training in turn, 84 % of 8 GiB at the peak.

    Eight prompts with four answers in 4 + 60 + 30 + 0.05 s are 0.34 samples a second.
    """
    top = page_view(plan_of()).headline
    tiles = {tile.label: tile for tile in top.tiles}
    assert tiles["Period"].value == "94 s"
    assert tiles["Throughput"].value == "0.34 samples/s"
    assert tiles["Bound by"].value == "actor_gen"
    assert tiles["Bound by"].note == "memory bandwidth"
    assert tiles["Staleness"].value == "on policy"
    assert "actor_train" in tiles["Peak memory"].note
    assert "It fits" in top.verdict
    assert top.cycle[0].node == "actor_gen"
    assert sum(link.percent for link in top.cycle) == pytest.approx(100, abs=0.1)
    assert [link.share for link in top.cycle] == [f"{link.percent:.0f} %" for link in top.cycle]


def test_written_samples_have_no_staleness():
    tiles = {tile.label: tile for tile in page_view(plan_of("sft")).headline.tiles}
    assert tiles["Staleness"].value == "none"
    late = page_view(plan_of(max_staleness=1, sync_every=2)).headline.tiles[-1]
    assert late.value == "≤ 3 versions", "(1 + 1) x 2 - 1"


def test_phases_that_do_not_fit_are_marked():
    """Per cent of the capacity: 37 stay; generation takes 40 more, waking 12, ref_inf 15, training 47.

    Twice as much is 154, 98, 104 and 168.
    """
    plan = with_forecast(compile_plan(grpo(), request()), shrink=2)
    assert page_view(plan).headline.verdict.startswith("It does not fit")
    view = memory_view(plan)
    assert view is not None
    assert [bar.phase for bar in view.classes[0].phases if bar.is_too_much] == [
        "generate",
        "ref_inf",
        "actor_train",
    ]


def test_a_page_without_estimates_names_what_is_missing():
    page = Page(render_page(replace(compile_plan(grpo(), request()), forecast=Forecast())))
    assert "whether it fits in memory is not known" in page.text
    assert "The period is not estimated" in page.text
    assert "Memory is not estimated" in page.text
    missing = Page(render_page(with_forecast(compile_plan(grpo(), request()), missing=("actor: a reason",))))
    assert "actor: a reason" in missing.text


def chart(period: Period) -> Gantt:
    plan = plan_of()
    made = gantt_view(replace(plan, forecast=replace(plan.forecast, period=period)))
    assert made is not None
    return made


def test_a_slot_after_its_period_belongs_to_the_previous_step():
    """Of 20 s drawn, b begins at 12: at 12 for step k (60 %), at 2 for the step before (10 %)."""
    slots = (Slot("a", "all", 0, 6), Slot("b", "all", 12, 3))
    made = chart(Period(10, (CycleStep("b", 3, "data", 1),), slots, (("all", 0.1),)))
    bars = {(bar.node, bar.step): (bar.left, bar.width) for bar in made.lanes[0].bars}
    assert bars == {
        ("a", "k"): (0, 30),
        ("b", BEFORE): (10, 15),
        ("a", "k+1"): (50, 30),
        ("b", "k"): (60, 15),
    }
    assert [bar.node for bar in made.lanes[0].bars if bar.is_critical] == ["b", "b"]
    assert [step for step, _ in made.steps] == [BEFORE, "k", "k+1"]
    assert made.lanes[0].idle == "10 %"


def test_bars_are_cut_at_the_edges_of_the_chart():
    """Nine seconds from 8 on reach over the period's end: step k-1 shows the seconds 0 to 7 (35 %)."""
    made = chart(Period(10, (), (Slot("a", "all", 0, 1), Slot("b", "all", 8, 9)), ()))
    first, *_ = [bar for bar in made.lanes[0].bars if bar.node == "b"]
    assert (first.step, first.left, first.width, first.is_cut_left) == (BEFORE, 0, 35, True)
    last = [bar for bar in made.lanes[0].bars if bar.node == "b"][-1]
    assert (last.step, last.left, last.width, last.is_cut_right) == ("k+1", 90, 10, True)


def test_steps_that_differ_are_drawn_until_all_repeats():
    """Of two steps of 10 s, only the second has b: drawn in 20 s are steps k and k+1, b at 14 (70 %)."""
    slots = (Slot("a", "all", 0, 4), Slot("a", "all", 10, 4, step=1), Slot("b", "all", 14, 2, step=1))
    made = chart(Period(10, (), slots, (), num_steps=2))
    bars = [(bar.node, bar.step, bar.left, bar.width) for bar in made.lanes[0].bars]
    assert bars == [("a", "k", 0, 20), ("a", "k+1", 50, 20), ("b", "k+1", 70, 10)]
    assert made.note == ""
    more = chart(Period(10, (), slots, (), num_steps=6))
    assert more.periods == ("period 1", "period 2", "period 3", "period 4")
    assert "2 more steps" in more.note


def test_an_engine_shares_its_group_s_lane():
    """The sample's engine has a lane of its own name; idle or not, the page has one lane a group."""
    models = {"actor": model_config(group="train", gen_group="gen")}
    made = gantt_view(plan_of(cluster="h100-1x8", batch=64, models=models))
    assert made is not None
    lanes = {lane.name: [bar.node for bar in lane.bars] for lane in made.lanes}
    assert sorted(lanes) == ["gen", "train"]
    assert set(lanes["gen"]) == {"actor_gen"}


@given(st.lists(st.tuples(st.floats(0, 35), st.floats(0.1, 12)), min_size=1, max_size=5))
def test_two_periods_show_each_node_twice(times):
    """Whatever the offset, a chart of two periods shows 2 x seconds of every node, without overlap."""
    slots = tuple(Slot(f"n{i}", "all", start, seconds) for i, (start, seconds) in enumerate(times))
    made = chart(Period(10, (), slots, ()))
    for slot in slots:
        bars = [bar for bar in made.lanes[0].bars if bar.node == slot.node]
        assert sum(bar.width for bar in bars) == pytest.approx(2 * slot.seconds / 20 * 100, abs=0.05)
    rows = sorted((bar.row, bar.left, bar.width) for bar in made.lanes[0].bars)
    for (row, left, width), (next_row, next_left, _) in pairwise(rows):
        assert row != next_row or left + width <= next_left + 0.01


def test_memory_bars_add_up():
    """A bar is as long as its bytes: 0.25 of what holds capacity x 1.02."""
    plan = plan_of(cluster="h100-8x8", batch=64)
    view = memory_view(plan)
    assert view is not None
    assert view.classes[0].capacity_at == pytest.approx(100 / 1.02, abs=0.01)
    totals = {bar.phase: bar.items for bar in view.classes[0].phases}
    widths = {phase: items[-1].left + items[-1].width for phase, items in totals.items()}
    row = next(row for row in plan.forecast.memory if row.phase == "actor_train" and 0 in row.devices)
    assert widths["actor_train"] == pytest.approx(
        100 * row.total / plan.cluster.memory_bytes / 1.02, abs=0.01
    )
    peaks = [[bar.phase for bar in one.phases if bar.is_peak] for one in view.classes]
    assert peaks[0] == ["actor_train"]


def test_each_device_knows_its_fullest_phase():
    plan = plan_of(cluster="h100-1x8", batch=64)
    view = page_view(plan).devices
    for device, text in enumerate(view.peaks):
        peak = plan.forecast.peaks()[device]
        assert text.endswith(f"in {peak.phase}")
        assert view.machines[0][device].fill == pytest.approx(
            peak.total / plan.cluster.memory_bytes, abs=1e-3
        )


def test_routes_name_senders_and_receivers():
    """Training on 0-3 and generation on 4-7: every receiver needs slices that only 0-3 hold."""
    models = {"actor": model_config("d2t2", "d4", "train", "gen")}
    groups = {"train": (0, 1, 2, 3), "gen": (4, 5, 6, 7)}
    shapes = {"actor": SHAPE}
    plan = plan_of(cluster="h100-1x8", batch=64, models=models, shapes=shapes, groups=groups)
    view = page_view(plan).devices
    route = next(route for route in view.routes if route.kind == "weights")
    sets = [{i for first, last in runs for i in range(first, last + 1)} for runs in view.sets]
    assert set().union(*(sets[holders] for holders, _ in route.flows)) == {0, 1, 2, 3}
    assert {frozenset(sets[receivers]) for _, receivers in route.flows} == {frozenset({4, 5, 6, 7})}
    assert route.note.startswith("14 GiB move")


def test_routes_of_unknown_sizes_name_their_ends():
    models = {"actor": model_config("d4", "d2", "train", "gen")}
    groups = {"train": (0, 1, 2, 3), "gen": (4, 5)}
    view = page_view(plan_of(cluster="h100-1x8", batch=64, models=models, groups=groups)).devices
    route = next(route for route in view.routes if route.kind == "weights")
    assert [(view.sets[a], view.sets[b]) for a, b in route.flows] == [(((0, 3),), ((4, 5),))]


def test_sets_are_runs():
    sets = Sets()
    assert [sets.add([3, 1, 2, 7]), sets.add([5]), sets.add([7, 3, 2, 1])] == [0, 1, 0]
    assert sets.runs() == (((1, 3), (7, 7)), ((5, 5),))


def test_details_tell_bytes_and_knobs():
    view = page_view(plan_of(cluster="h100-1x8", batch=64))
    train = next(node for node in view.nodes if node.name == "actor_train")
    assert ("clip", "0.2") in train.knobs
    assert sum(percent for _, _, percent in train.parts) == pytest.approx(100)
    edges = {(e.arrow.kind, e.arrow.src, e.arrow.dst): e for e in view.edges}
    data = edges["data", "actor_gen", "actor_train"]
    facts = dict(data.facts)
    assert facts["moves"].endswith("by any split")
    assert data.listings[0].columns[0] == "step"
    weights = edges["weights", "actor_train", "actor_gen"]
    assert dict(weights.facts)["moved"] == "14 GiB"
    assert weights.routes == ("weights actor@train actor@gen",)


def test_capacity_is_that_of_the_cluster():
    view = memory_view(plan_of())
    assert view is not None
    assert view.classes[0].capacity == "8 GiB"
    assert plan_of().cluster.memory_bytes == 8 * GIB
