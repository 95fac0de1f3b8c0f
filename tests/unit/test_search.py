"""The search for a placement: optimal on small clusters, never worse than what people write, pins kept."""

from __future__ import annotations

import html
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from search_kit import LENGTHS, RECIPES, exhaustive, hand_placements, problem

from hflow.base.errors import PlanError
from hflow.base.text import format_seconds
from hflow.launch.planning.compile import compile_plan_file, compile_recipe, plan_file_text
from hflow.planner.checks.unrunnable import layout_reasons
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.figures import plan_figures
from hflow.planner.forecast.memory import MEMORY_MARGIN
from hflow.planner.make.engine_ranks import best_workers
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.forecast import Limit
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.planner.search import PLACEMENT, Evaluator, PastSearches, SearchProblem, search, with_settings
from hflow.planner.search.explore import explore
from hflow.planner.search.layouts import (
    assign_devices,
    comparable_devices,
    compositions,
    group_sizes,
    layouts_for,
    usable_devices,
)
from hflow.planner.search.partition import set_partitions
from hflow.planner.search.result import placement_of
from hflow.planner.search.route_bytes import with_bytes
from hflow.planner.search.simulated import by_seconds
from hflow.planner.weights.resharding import add_rows, held_bytes
from hflow.report.html.plan import render_page
from hflow.report.text.plan import render_plan
from hflow.report.text.section import limit_text
from hflow.runtime.simulation.simulate_plan import simulate_plan, simulated_period
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import Experts, ModelShape

LONG = pytest.mark.long
TORCH = ("actor.backend=torch", "actor.tokens_per_microbatch=4096")
CALIBRATIONS = RECIPES.parent / "configs" / "hardware" / "calibrations"
PPO_ON_8 = (
    "cluster=h100-1x8",
    "model@models.actor=qwen2.5-1.5b",
    "models.actor.path=null",
    "models.actor.dtype=bf16",
    "models.actor.gen.engine=vllm",
    "models.actor.backend=megatron",
    *LENGTHS,
)
LARGE = ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 32000, is_tied=False)
EXPERTS = replace(
    LARGE,
    family="qwen3_moe",
    num_layers=8,
    hidden=2048,
    experts=Experts(num=128, per_token=8, intermediate=768),
)


@pytest.mark.parametrize(
    ("recipe", "cluster", "model", "overrides", "tunes"),
    [
        pytest.param("grpo", "h100-1x8", "qwen2.5-7b", (), True, marks=LONG),
        ("grpo", "h100-2x2", "qwen2.5-1.5b", ("schedule.max_staleness=1",), False),
        ("grpo_async", "h100-2x8", "qwen2.5-7b", (), False),
        ("ppo", "h100-1x4", "qwen2.5-1.5b", ("batch=64",), False),
        pytest.param("ppo", "h100-2x8", "qwen2.5-7b", (), False, marks=LONG),
        ("ppo_async", "h100-1x4", "qwen2.5-1.5b", ("batch=64",), False),
    ],
)
def test_the_search_is_within_one_percent_of_trying_everything(
    recipe: str, cluster: str, model: str, overrides: tuple[str, ...], tunes: bool
) -> None:
    graph, request = problem(recipe, cluster, model, *overrides, tunes=tunes)
    assert search(graph, request).seconds <= 1.01 * exhaustive(graph, request)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("cluster", "model", "offloaded"),
    [
        (
            "h100-1x2",
            "qwen2.5-3b",
            dict.fromkeys(("models.actor.offload", "models.critic.offload"), "optimizer"),
        ),
        (
            "h100-1x4",
            "qwen2.5-7b",
            dict.fromkeys(("models.actor.offload", "models.critic.offload"), "optimizer"),
        ),
        ("h100-1x8", "qwen2.5-1.5b", {}),
    ],
)
def test_the_search_offloads_where_memory_is_short(
    cluster: str, model: str, offloaded: dict[str, str]
) -> None:
    graph, request = problem("ppo", cluster, model, "batch=64", tunes=False, offloads=True)
    found = search(graph, request)
    assert {key: value for key, value in found.overrides.items() if key.endswith("offload")} == offloaded
    if request.cluster.num_devices <= 4:
        assert found.seconds <= 1.01 * exhaustive(graph, request)


@pytest.mark.parametrize(
    "overrides",
    [(), pytest.param(("schedule.max_staleness=1",), marks=LONG), pytest.param(("batch=64",), marks=LONG)],
)
def test_the_search_is_never_worse_than_what_people_write(overrides: tuple[str, ...]) -> None:
    graph, request = problem("ppo", "h100-1x8", "qwen2.5-1.5b", *overrides)
    found = search(graph, request)
    for placement in hand_placements(8).values():
        by_hand = search(graph, replace(request, placement=placement))
        assert found.seconds <= by_hand.seconds * (1 + 1e-6)


@pytest.mark.long
def test_equal_requests_have_equal_results() -> None:
    graph, request = problem("ppo", "h100-1x8", "qwen2.5-1.5b")
    assert search(graph, request).candidates == search(graph, request).candidates


@pytest.mark.long
def test_the_seconds_are_those_of_the_plan_and_its_memory_has_a_margin() -> None:
    graph, request = problem("ppo", "h100-2x8", "qwen2.5-7b")
    found = search(graph, request)
    plan = compile_plan(graph, found.request)
    assert plan.forecast.period is not None
    assert plan.forecast.period.seconds == pytest.approx(found.seconds, rel=0.03)
    largest = max(phase.total for phase in plan.forecast.memory)
    assert largest <= (1 - MEMORY_MARGIN) * plan.cluster.memory_bytes


@pytest.mark.long
def test_communicators_that_models_share_count_once() -> None:
    """Actor, reference model and critic divide their layers over the same eight devices."""
    recipe, setup = RECIPES / "gsm8k" / "ppo.py", "setup=qwen2.5-1.5b-8x80g"
    searched = compile_recipe(recipe, (setup, "placement=auto")).plan
    together = next(c for c in searched.forecast.candidates if c.why.startswith("all colocated"))
    plan = compile_recipe(recipe, (setup, f"placement='{together.placement}'")).plan
    fullest = max(plan.forecast.memory, key=lambda phase: phase.total)
    (communicators,) = (item for item in fullest.resident if item.name == "communicators")
    assert communicators.num_bytes == (944 + 752) << 20  # of eight trainers, and of an engine with two ranks
    assert together.memory_bytes == fullest.total


@pytest.mark.parametrize(("layout", "gen"), [("d4t2", "d8"), ("d2t4", "d4t2")])
def test_memory_counts_the_way_that_weights_take_between_both_layouts(layout: str, gen: str) -> None:
    """Each alone would be where its part of every tensor is; together they gather."""
    together = ("models.actor.group=a", "models.actor.gen.group=a", "groups.a=[0,1,2,3,4,5,6,7]")
    layouts = (f"models.actor.layout={layout}", f"models.actor.gen.layout={gen}")
    model = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.backend=megatron")
    settings = ("cluster=h100-1x8", *model, *together, *layouts, "models.actor.gen.engine=vllm")
    plan = compile_recipe(RECIPES / "grpo.py", (*settings, "placement=auto")).plan
    (route,) = plan.weights
    assert route.how == "gather"
    assert plan.forecast.candidates[0].memory_bytes == max(phase.total for phase in plan.forecast.memory)


def test_what_the_user_has_set_is_kept() -> None:
    pins = ("placement='actor.gen=4-7'", "models.actor.tokens_per_microbatch=4096")
    compiled = compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, *pins))
    assert compiled.plan.replica("actor@gen").workers[-1] == 7
    assert min(compiled.plan.replica("actor@gen").workers) >= 4
    assert compiled.config.models["actor"].tokens_per_microbatch == 4096
    layout = compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, "models.critic.layout=d2"))
    assert str(layout.plan.replica("critic@train").layout) == "d2t1p1"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("pin", "rest"),
    [
        ("actor.gen=0", "actor,ref=8-15 critic=16-23"),  # with the rest of a machine idle
        ("actor.gen=0-3", "actor,ref=4-15:d12 critic=16-23"),  # with a group that begins there
        ("actor.gen=0,8", "actor,ref=16-23 critic=1-7,9-15:d14"),
    ],
)
def test_others_are_placed_well_around_a_part_of_a_machine(pin: str, rest: str) -> None:
    graph, request = problem("ppo", "h100-3x8", "qwen2.5-1.5b", tunes=False)
    found = search(graph, replace(request, placement=pin))
    by_hand = search(graph, replace(request, placement=f"{pin} {rest}"))
    assert found.seconds <= by_hand.seconds * (1 + 1e-6)
    plan = compile_plan(graph, found.request)
    assert plan.forecast.period is not None
    assert plan.forecast.period.seconds == pytest.approx(found.seconds, rel=0.03)
    for replica in plan.replicas:
        for first in range(0, len(replica.workers), replica.layout.tensor):
            ranks = replica.workers[first : first + replica.layout.tensor]
            assert len({plan.cluster.node_of(device) for device in ranks}) == 1


def test_models_of_a_named_group_share_devices_and_groups_stay_apart() -> None:
    names = ("placement=auto", "models.critic.group=b", "models.actor.gen.group=b")
    plan = compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, *names, "models.actor.group=a")).plan
    assert plan.replica("critic@train").groups == plan.replica("actor@gen").groups
    assert plan.replica("critic@train").groups != plan.replica("actor@train").groups
    devices = compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, *names, "groups.b=[0,1,2]"))
    b = next(group for group in devices.plan.groups if group.devices == (0, 1, 2))
    assert (
        devices.plan.replica("critic@train").groups == devices.plan.replica("actor@gen").groups == (b.name,)
    )
    assert not devices.config.groups  # all of them are in the placement
    assert len(devices.plan.forecast.candidates) > 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("groups.a=[0]",), r"groups\.a has devices, but no model is in it; set models\.actor\.group=a, or "),
        (
            ("models.actor.group=a", "groups.a=[8]"),
            "'a' names device 8, but cluster h100-1x8 has devices 0 to 7",
        ),
        (
            ("models.actor.layout=d16",),
            "layout d16t1p1 needs 16 devices, but group 'actor' has 8; d8t1p1 fits",
        ),
        (
            ("models.actor.layout=t3",),
            r"2 key-value heads cannot be split over 3 tensor ranks; 2 and 1 fit: d3t",
        ),
    ],
)
def test_pins_that_contradict_the_cluster_or_the_model_are_refused(
    keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, "placement=auto", *keys))


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("cluster", "pins", "message"),
    [
        (
            "h100-1x4",
            {"placement": "actor=0-2:d3t1"},
            r"with actor=0-2:d3t1 in placement\. Without it, placement='.*actor=0-2:d1t1p3.*' fits \(",
        ),
        (
            "h100-1x4",
            {"models.actor.layout": "d3t1p1", "models.actor.gen.layout": "d1t1p1"},
            r"with models\.actor\.layout=d3t1p1\. Without it, models\.actor\.layout=\S+ fits \(",
        ),
        (
            "h100-1x4",
            {"models.actor.tokens_per_microbatch": 1_000_000},
            r"with models\.actor\.tokens_per_microbatch=1000000\. Without it, "
            r"models\.actor\.tokens_per_microbatch=\d+ fits \(",
        ),
        (
            "h100-1x1",
            {"models.actor.layout": "d1t1p1"},
            r"memory\. Set cluster=h100-1x4 and remove models\.actor\.layout=d1t1p1 \(",
        ),
    ],
)
def test_a_pin_that_makes_a_plan_impossible_is_named(
    cluster: str, pins: dict[str, object], message: str
) -> None:
    graph, request = problem("grpo", cluster, "qwen2.5-7b")
    request = with_settings(request, pins)
    request = replace(request, placement=pins.get("placement"), free=request.free - set(pins) | {PLACEMENT})
    with pytest.raises(PlanError, match=message):
        search(graph, request)


def test_what_fits_on_no_number_of_devices_is_explained_and_a_larger_kind_is_named() -> None:
    """The engine of 405B parameters is on one machine, and eight H100 are too small for it."""
    large = ("model@models.actor=llama-3.1-405b", "models.actor.path=null", "models.actor.gen.engine=vllm")
    with pytest.raises(PlanError) as refusal:
        compile_recipe(RECIPES / "grpo.py", (*large, "cluster=h100-8x8"))
    found = re.search(r"Set cluster=(h200-\S+) \(\S+ GiB\)\.$", str(refusal.value))
    assert "an engine of actor@gen is within a machine, where 8 devices have 597.0 GiB for 756.0 GiB" in str(
        refusal.value
    )
    assert found
    assert compile_recipe(RECIPES / "grpo.py", (*large, f"cluster={found[1]}")).plan.forecast


@LONG
def test_remedies_do_not_lead_back_and_name_nothing_that_the_planner_chose() -> None:
    """gpt-oss needs an engine that divides it."""
    large = ("cluster=h100-8x8", "model@models.actor=gpt-oss-120b", "models.actor.path=null")
    with pytest.raises(PlanError) as refusal:
        compile_recipe(RECIPES / "grpo.py", large)
    assert re.fullmatch(
        r"no placement fits into memory\. Set models\.actor\.gen\.engine=vllm \(\S+ GiB\)\.",
        str(refusal.value),
    )
    followed = (*large, "models.actor.gen.engine=vllm")
    plan = compile_recipe(RECIPES / "grpo.py", followed, with_limits=True).plan
    assert plan.replica("actor@gen").layout.expert == 1, "engines have no expert ranks"
    assert not plan.unrunnable
    (backend,) = [limit for limit in plan.forecast.limits if "network" in limit.cause]
    assert backend.remedies[0].settings == (("models.actor.backend", "megatron"),)
    small = ("cluster=h100-1x8", "model@models.actor=gemma-3-1b", "models.actor.path=null")
    plan = compile_recipe(RECIPES / "grpo.py", small, with_limits=True).plan
    assert not plan.unrunnable
    (slow,) = [limit for limit in plan.forecast.limits if "megatron" in limit_text(limit)]
    assert slow.remedies[0].settings == (("models.actor.backend", "megatron"),), "it has Gemma 3"


@pytest.mark.parametrize(
    ("is_chosen", "instead"),
    [
        (False, "Remove c2 from the layout, or set models.m.backend=megatron."),
        (True, "No layout without c2 fits into memory. Set models.m.backend=megatron."),
    ],
)
def test_an_axis_is_to_be_removed_only_by_who_has_set_it(is_chosen: bool, instead: str) -> None:
    replica = _replica("d2c2", "train", "torch", 0)
    (reason,) = layout_reasons(replica, "ray", LARGE, is_chosen=is_chosen)
    assert reason == f"m@train has layout d2t1p1c2, but torch has no context ranks. {instead}"


def test_groups_and_complete_placements_are_not_searched() -> None:
    hand = "placement='actor,critic,ref,actor.gen=all'"
    plan = compile_recipe(RECIPES / "ppo.py", (*PPO_ON_8, hand)).plan
    assert (len(plan.groups), plan.forecast.candidates) == (1, ())
    on_cpus = compile_recipe(RECIPES / "ppo.py", ("cluster=cpu-1x2",))
    assert on_cpus.config.placement is None


def test_a_plan_file_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    compiled = compile_recipe("recipes/ppo.py", PPO_ON_8)
    file = tmp_path / "plan.json"
    file.write_text(plan_file_text(compiled))
    monkeypatch.setattr(PastSearches, "search", pytest.fail)
    again = compile_plan_file(file)
    assert again.plan.digest == compiled.plan.digest
    assert again.plan.forecast == compiled.plan.forecast
    assert len(again.plan.forecast.candidates) == 10
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_plan(again.plan))
    text, best = console.export_text(), again.plan.forecast.candidates[0]
    assert "Placements" in text
    assert "all colocated: +" in text
    assert best.placement.split()[0] in text
    assert "The best plan of each way" in render_page(again.plan)


def test_a_search_is_not_repeated_for_settings_that_it_does_not_read() -> None:
    searches = PastSearches()
    graph, request = problem("grpo", "h100-1x2", "qwen2.5-1.5b", tunes=False)
    found = searches.search(graph, request)
    other_rate = problem("grpo", "h100-1x2", "qwen2.5-1.5b", "models.actor.optim.lr=1e-5", tunes=False)
    assert searches.search(*other_rate) is found
    other_batch = problem("grpo", "h100-1x2", "qwen2.5-1.5b", "batch=128", tunes=False)
    assert searches.search(*other_batch).seconds != found.seconds


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama-3.1-70b", ()),
        ("qwen2.5-7b", ("nodes.actor_gen.max_tokens=16384", "models.actor.gen.max_model_len=16896")),
    ],
)
def test_a_replica_that_fits_on_no_number_of_devices_is_found_without_trying_divisions(
    model: str, keys: tuple[str, ...]
) -> None:
    """Its weights and optimizer are too large, or fit without the activations of one sequence."""
    graph, request = problem("ppo", "h100-1x2", model, *keys, tunes=False)
    found = explore(Evaluator(SearchProblem(graph, request)))
    assert (found.best, found.num_tried) == ({}, 0)


def test_settings_that_hold_a_plan_back_are_named() -> None:
    apart = "placement='actor,critic,ref=0-3:d4 actor.gen=4-7:d4'"
    limited = (*PPO_ON_8, apart, "schedule.max_concurrent=16")
    plan = compile_recipe(RECIPES / "ppo.py", limited, with_limits=True).plan
    setting, idle, *others = plan.forecast.limits
    assert all("FP8" in other.cause for other in others)
    assert re.fullmatch(
        r"schedule\.max_concurrent=16 limits how many samples are generated at once\. With "
        r"schedule\.max_concurrent=512 a step takes \d+ % less\.",
        limit_text(setting),
    )
    assert re.fullmatch(
        r".* is idle for \d+ % of a step\. With schedule\.max_staleness=[124] schedule\.max_concurrent=\d+ "
        r"a step takes \d+ % less, with placement='actor.*' \d+ % less\.",
        limit_text(idle),
    )
    page = html.unescape(render_page(plan))
    assert page.count(limit_text(setting)) == 1
    assert page.count(limit_text(idle)) == 1 + len(idle.idle), "at the top, and at the idle groups"


@pytest.mark.parametrize("sync_every", [1, 2])
def test_copies_of_sleeping_engines_are_counted_in_host_memory(sync_every: int) -> None:
    """As in the plan: an engine that wakes with the weights that it had keeps a copy of them."""
    schedule = (f"schedule.sync_every={sync_every}", "schedule.max_staleness=2")
    graph, request = problem("grpo", "h100-1x1", "qwen2.5-1.5b", *schedule, tunes=False)
    choice = explore(Evaluator(SearchProblem(graph, request))).ranked()[0]
    placed = replace(request, free=frozenset(), placement=placement_of(choice))
    forecast = compile_plan(graph, placed).forecast
    items = [item for row in forecast.host for item in row.items if item.name.endswith("weights (asleep)")]
    assert sum(row.total for row in forecast.host) == sum(group.fit.host for group in choice.groups)
    assert bool(items) == (sync_every > 1)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cluster", "pins", "fits_otherwise"),
    [
        ("h100-1x4", ("models.actor.gen.delta=true",), True),
        ("h100-2x4", ("placement='actor=0-3 actor.gen=4-7'", "models.actor.gen.transport=store"), False),
    ],
)
def test_published_weights_are_counted_in_host_memory(
    cluster: str, pins: tuple[str, ...], fits_otherwise: bool
) -> None:
    """The search leaves out what the plan refuses, and takes it where the plan has room for it."""
    graph, request = problem("grpo", cluster, "qwen2.5-7b", "batch=64", *pins, tunes=False)
    found = search(graph, request)
    forecast = compile_plan(graph, found.request).forecast
    fullest = max(forecast.host, key=lambda row: row.total)
    assert any("published" in item.name or "object store" in item.name for item in fullest.items)
    needed = fullest.total / request.cluster.devices_per_node
    with pytest.raises(PlanError, match="host memory"):
        compile_plan(graph, _with_host_memory(found.request, 0.99 * needed))
    enough = _with_host_memory(request, 1.02 * needed / (1 - MEMORY_MARGIN))
    assert search(graph, enough).overrides == found.overrides
    too_little = _with_host_memory(request, 0.99 * needed)
    if fits_otherwise:
        assert compile_plan(graph, search(graph, too_little).request).digest
    else:
        with pytest.raises(PlanError, match="no placement fits into memory"):
            search(graph, too_little)


def _with_host_memory(request: PlanRequest, num_bytes: float) -> PlanRequest:
    """The request with so much memory of a machine for each of its devices."""
    device = replace(request.hardware.device, host_memory_gib=num_bytes / GIB)
    return replace(request, hardware=replace(request.hardware, device=device))


AHEAD = (
    "cluster=h100-1x4",
    "model@models.actor=qwen2.5-1.5b",
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    *LENGTHS,
    "schedule.max_staleness=1",
    "schedule.max_concurrent=64",
    "batch=16",
    "workload.response_cv=0.6",
)


def test_what_is_named_is_what_a_plan_with_it_takes() -> None:
    """The planner chooses again with the named setting, and the state machine gives both seconds."""
    plan = compile_recipe(RECIPES / "grpo.py", AHEAD, with_limits=True).plan
    figures, forecast = plan_figures(plan), plan.forecast
    assert forecast.period is not None
    assert forecast.period.simulated == pytest.approx(forecast.candidates[0].seconds, rel=0.01)
    assert forecast.period.simulated > forecast.period.seconds, "late responses are waited for"
    assert (figures.seconds_per_step, figures.is_lower_bound) == (forecast.period.simulated, False)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    seconds = format_seconds(forecast.period.seconds)
    assert f", with waiting for late responses; without it {seconds}" in console.export_text()

    limit = next(limit for limit in forecast.limits if limit.cause.startswith("schedule.max_concurrent=64"))
    ((key, value),) = limit.remedies[0].settings
    followed = plan_figures(compile_recipe(RECIPES / "grpo.py", (*AHEAD, f"{key}={value}")).plan)
    assert followed.seconds_per_step is not None
    gain = 1 - followed.seconds_per_step / forecast.candidates[0].seconds
    assert gain >= limit.remedies[0].gain - 0.01
    chosen = {key for key, _ in forecast.candidates[0].settings}
    assert not [limit for limit in forecast.limits if limit.cause.partition("=")[0] in chosen]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("placement='actor=0-1:d2 actor.gen=2-3:d2'",),
        ("schedule.max_staleness=0", "schedule.sync_every=2"),
    ],
)
def test_a_plan_names_the_seconds_and_idle_shares_of_its_simulation(keys: tuple[str, ...]) -> None:
    plan = compile_recipe(RECIPES / "grpo.py", (*AHEAD, *keys)).plan
    assert plan.forecast.period is not None
    figures, simulation = plan_figures(plan), simulate_plan(plan)
    assert not figures.is_lower_bound
    assert figures.seconds_per_step == pytest.approx(simulation.period, rel=0.04)
    shares = dict(simulation.run.idle)
    for lane, share in plan.forecast.period.idle:
        assert share == pytest.approx(shares[lane], abs=0.04)
    assert simulation.to_json()["planned_seconds_per_step"] == figures.seconds_per_step


def test_a_bound_is_said_to_be_one() -> None:
    ahead = ("schedule.max_staleness=1", "workload.response_cv=0.5")
    plan = compile_recipe(RECIPES / "grpo.py", ("cluster=cpu-1x2", *ahead)).plan
    assert plan_figures(plan).is_lower_bound
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    shown = " ".join(console.export_text().split())
    assert "Waiting for late responses is left out, also of idle shares." in shown


def test_a_placement_that_is_fastest_only_when_responses_are_late_is_found() -> None:
    """Taking turns on all devices is fastest by the analytic period, which leaves out late responses."""
    ahead = ("schedule.max_staleness=4", "workload.response_cv=1.5", "batch=128")
    graph, request = problem("grpo", "h100-2x8", "qwen2.5-7b", *ahead, tunes=False)
    evaluator = Evaluator(SearchProblem(graph, request))
    first = by_seconds(evaluator, explore(evaluator).ranked(), simulated_period, most=6)[0]
    found = search(graph, request, simulate=simulated_period)
    assert found.seconds < 0.97 * first[1]
    assert min(candidate.seconds for candidate in found.candidates) == found.seconds


def test_a_backend_that_divides_layers_is_named_where_training_waits_for_the_network() -> None:
    large = (
        *("cluster=h100-8x8", "network=ib-hdr"),
        *("model@models.actor=llama-3.1-70b", "models.actor.path=null"),
        *("models.actor.gen.engine=vllm", "models.actor.gen.max_model_len=2048", "models.actor.dtype=bf16"),
        *("nodes.actor_gen.max_tokens=1024", "workload.prompt=200", "workload.response_mean=600"),
    )
    plan = compile_recipe(RECIPES / "grpo.py", large, with_limits=True).plan
    limit, *others = plan.forecast.limits
    assert all("FP8" in other.cause for other in others)
    setting = "models.actor.backend=megatron"
    waits = "actor_train waits for the network for most of its seconds"
    assert re.fullmatch(rf"{waits}\. With {setting} a step takes \d+ % less\.", limit_text(limit))
    followed = compile_recipe(RECIPES / "grpo.py", (*large, setting)).plan
    gain = 1 - followed.forecast.candidates[0].seconds / plan.forecast.candidates[0].seconds
    assert gain >= limit.remedies[0].gain - 0.01


@LONG
def test_backends_that_divide_layers_are_named_where_devices_are_idle() -> None:
    """FSDP lets the critic use a few machines only, on which it does not wait for the network."""
    large = (
        *("cluster=h100-64x8", "model@models.actor=llama-3.1-8b", "models.actor.path=null"),
        *("models.actor.gen.engine=vllm", "nodes.actor_gen.max_tokens=1024"),
        *("workload.prompt=200", "workload.response_mean=100"),
    )
    plan = compile_recipe(RECIPES / "ppo.py", large, with_limits=True).plan
    first = plan.forecast.limits[0]
    assert first.cause == "models that are divided over data alone cannot use more devices well"
    settings = [f"{key}={value}" for key, value in first.remedies[0].settings]
    followed = compile_recipe(RECIPES / "ppo.py", (*large, *settings)).plan
    gain = 1 - followed.forecast.candidates[0].seconds / plan.forecast.candidates[0].seconds
    assert gain >= first.remedies[0].gain - 0.01 > 0.4


def test_the_fullest_stage_of_a_model_whose_first_layers_have_no_experts_counts() -> None:
    """The first stage of DeepSeek-V3 has three dense layers, so the second one is larger."""
    setting = (
        *("cluster=h100-32x8", "model@models.actor=deepseek-v3", "models.actor.path=null"),
        *("models.actor.gen.engine=vllm", "models.actor.backend=megatron", *LENGTHS),
    )
    plan = compile_recipe(RECIPES / "grpo.py", setting).plan
    fullest = max(plan.forecast.memory, key=lambda phase: phase.total)
    assert fullest.total <= (1 - MEMORY_MARGIN) * plan.cluster.memory_bytes
    assert plan.forecast.candidates[0].memory_bytes == fullest.total
    stage = plan.replica("actor@train").layout.world // plan.replica("actor@train").layout.pipe
    assert min(fullest.devices) == stage, "of the second stage"


@pytest.mark.first(1)
@pytest.mark.parametrize("cluster", ["h100-1x1", "h100-1x8"])
def test_an_engine_that_generates_slowly_is_named(cluster: str) -> None:
    """Also where it was chosen since another one is not installed here."""
    small = (
        *(f"cluster={cluster}", "model@models.actor=qwen2.5-1.5b", "models.actor.path=null"),
        *("nodes.actor_gen.max_tokens=1024", "workload.prompt=200", "workload.response_mean=400"),
        "models.actor.lora.r=16",  # its decode steps are no CUDA graphs
    )
    setting = "models.actor.gen.engine=vllm"
    embedded = (*small, "models.actor.gen.engine=embedded")
    plan = compile_recipe(RECIPES / "grpo.py", embedded, with_limits=True).plan
    slow = "the embedded engine limits how fast samples are generated"
    limit = next(limit for limit in plan.forecast.limits if limit.cause == slow)
    assert re.fullmatch(rf"{slow}\. With {setting} a step takes \d+ % less\.", limit_text(limit))
    followed = plan_figures(compile_recipe(RECIPES / "grpo.py", (*small, setting)).plan).seconds_per_step
    before = plan_figures(plan).seconds_per_step
    assert followed is not None
    assert before is not None
    assert 1 - followed / before == pytest.approx(limit.remedies[0].gain, abs=0.01)


ANSWERS = ("nodes.actor_gen.max_tokens=1024", "workload.prompt=200", "workload.response_mean=400")
ALONE = ("model@models.actor=qwen2.5-1.5b", "models.actor.path=null", *ANSWERS)


def test_settings_are_chosen_where_there_is_nothing_to_place() -> None:
    """On one device, on a CPU, and with replicas placed by hand."""
    found = compile_recipe(RECIPES / "grpo.py", (*ALONE, "cluster=h100-1x1"))
    assert not found.plan.forecast.candidates
    chosen = found.config.models["actor"]
    assert (chosen.gen.max_running, found.config.schedule.max_concurrent) == (512, 512)
    placed = ("cluster=h100-1x2", "placement='actor=0 actor.gen=1'")
    found = compile_recipe(RECIPES / "grpo.py", (*ALONE, *placed))
    assert found.config.models["actor"].gen.max_running == 512
    cpu = ("cluster=cpu-1x1", "model@models.actor=qwen2.5-0.5b", "models.actor.path=null", *ANSWERS)
    fitting = (*cpu, "device_memory_gib=18")
    tokens = compile_recipe(RECIPES / "grpo.py", fitting).config.models["actor"].tokens_per_microbatch
    assert tokens < 16384
    with pytest.raises(PlanError, match=r"Set models\.actor\.tokens_per_microbatch=\d+ "):
        compile_recipe(
            RECIPES / "grpo.py",
            (
                *fitting,
                *("models.actor.tokens_per_microbatch=16384", "models.actor.activation_checkpointing=false"),
            ),
        )


def test_an_offloaded_engine_keeps_its_sequences() -> None:
    """A search with every value of `offload` finds seconds that the plan has as well."""
    found = compile_recipe(
        RECIPES / "grpo.py", (*ALONE, "cluster=h100-1x1", "models.actor.gen.engine=embedded")
    )
    assert plan_figures(found.plan).seconds_per_step == pytest.approx(10.06, abs=0.01)


def test_a_set_value_that_makes_a_step_longer_is_named() -> None:
    slow = ("models.actor.tokens_per_microbatch=2048", "models.actor.activation_checkpointing=true")
    limited = (*ALONE, "cluster=h100-1x1", *slow)
    plan = compile_recipe(RECIPES / "grpo.py", limited, with_limits=True).plan
    named = [limit_text(limit) for limit in plan.forecast.limits]
    for setting in slow:
        (text,) = [text for text in named if text.startswith(setting)]
        found = re.search(r"With (\S+) a step takes (\d+) % less", text)
        assert found is not None
        followed = compile_recipe(RECIPES / "grpo.py", (*limited, found[1])).plan
        before, after = plan_figures(plan).seconds_per_step, plan_figures(followed).seconds_per_step
        assert before is not None
        assert after is not None
        assert 1 - after / before == pytest.approx(int(found[2]) / 100, abs=0.01)


@pytest.mark.first(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_table_of_placements_has_the_seconds_of_the_plan(staleness: int) -> None:
    keys = (*ALONE, "cluster=h100-1x4", f"schedule.max_staleness={staleness}")
    plan = compile_recipe(RECIPES / "grpo.py", keys).plan
    assert plan.forecast.candidates[0].seconds == pytest.approx(plan_figures(plan).seconds_per_step)
    seconds = [row.seconds for row in plan.forecast.candidates]
    assert seconds == sorted(seconds)


def test_idle_devices_that_nothing_uses_are_named() -> None:
    idle = Limit("train is idle for 40 % of a step", (), ("train",))
    assert limit_text(idle).startswith(
        "train is idle for 40 % of a step. More staleness and other placements"
    )


@pytest.mark.first(1)
@pytest.mark.parametrize("sample_us", [40_000, 0])
def test_a_controller_that_handles_more_samples_than_engines_generate_is_named(
    sample_us: int, tmp_path: Path
) -> None:
    values = yaml.safe_load((CALIBRATIONS / "hopper.yaml").read_text()) | {"sample_us": sample_us}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(values))
    keys = (*PPO_ON_8, "placement=actor,actor.gen,critic,ref=all", f"calibration={tmp_path / 'slow.yaml'}")
    forecast = compile_recipe(RECIPES / "ppo.py", keys, with_limits=True).plan.forecast
    source = next(row for row in forecast.times if row.node == "actor_gen")
    named = [limit_text(limit) for limit in forecast.limits if "controller" in limit.cause]
    if not sample_us:
        assert not named
        return
    longer = dict(source.parts)["episodes"]
    assert named == [
        f"actor_gen takes {format_seconds(longer)} longer, "
        "as the controller handles one sample after the other."
    ]


LENGTH_KEYS = ("nodes.actor_gen.max_tokens", "models.actor.gen.max_model_len")


def layouts_of(
    name: str, num: int, model: str, *overrides: str, divides_sequences: bool = False
) -> list[Layout]:
    graph, request = problem("grpo", "h100-1x8", model, *overrides)
    asked = SearchProblem(graph, request, divides_sequences=divides_sequences)
    return layouts_for(asked, name, tuple(range(num)), is_large=False)


def test_a_replica_may_leave_a_few_devices_of_its_group_unused() -> None:
    found = [str(layout) for layout in layouts_of("actor@train", 5, "qwen2.5-7b")]
    assert {"d5t1p1", "d1t1p5", "d2t2p1", "d1t4p1"} <= set(found)
    assert {layout.world for layout in layouts_of("actor@gen", 7, "qwen2.5-7b")} == {6, 7}
    assert {layout.world for layout in layouts_of("actor@train", 8, "qwen2.5-7b")} == {8}


def test_context_ranks_are_tried_for_long_sequences_or_if_asked_for() -> None:
    assert {layout.context for layout in layouts_of("actor@train", 4, "qwen2.5-7b")} == {1}
    asked = layouts_of("actor@train", 4, "qwen2.5-7b", divides_sequences=True)
    long = layouts_of("actor@train", 4, "qwen2.5-7b", *(f"{key}=17000" for key in LENGTH_KEYS))
    assert {layout.context for layout in asked} == {layout.context for layout in long} == {1, 2, 4}
    assert all(layout.world == 4 for layout in asked)


def test_layouts_that_cannot_run_are_left_out() -> None:
    # A sequence of 32,768 tokens needs 1.75 GiB on one rank, and half of it on each of two.
    small = ("models.actor.gen.cache_gib=1.0", "models.actor.gen.max_model_len=32768")
    assert {layout.tensor for layout in layouts_of("actor@gen", 8, "qwen2.5-7b", *small)} == {2, 4}


def test_expert_ranks_divide_experts_and_are_tried_within_a_machine() -> None:
    found = layouts_of("actor@train", 8, "qwen3-30b-a3b")
    assert {layout.expert for layout in found if layout.data == 8} == {1, 2, 4, 8}
    assert all(layout.expert * layout.tensor <= 8 for layout in found)
    assert {layout.expert for layout in layouts_of("actor@train", 6, "qwen3-30b-a3b")} == {1, 2}


def test_sequences_are_divided_where_nothing_else_fits() -> None:
    long = (
        "nodes.actor_gen.max_tokens=400000",
        "models.actor.gen.max_model_len=400512",
        "workload.response_mean=50000",
        "models.actor.gen.max_running=32",
        "models.actor.activation_checkpointing=true",
        "models.actor.tokens_per_microbatch=400512",
        "models.actor.sequence_parallel=false",
    )
    graph, request = problem("grpo", "h100-1x2", "qwen2.5-1.5b", *long, tunes=False)
    found = search(graph, request)
    assert "actor=0-1:d1t1p1c2" in found.candidates[0].placement
    assert not found.warnings
    assert not compile_plan(graph, found.request).unrunnable


def test_set_partitions_are_complete() -> None:
    assert [len(set(set_partitions("abcdef"[:n]))) for n in range(1, 6)] == [1, 2, 5, 15, 52]  # Bell numbers


def test_compositions_and_devices() -> None:
    assert compositions(4, 2, (1, 2, 3, 4)) == ((1, 3), (2, 2), (3, 1))
    cluster = ClusterSpec("x", "cuda", 2, 8, 80 << 30)
    assert assign_devices((4, 12), range(16), cluster) == ((12, 13, 14, 15), tuple(range(12)))
    assert assign_devices((6, 6, 4), range(16), cluster) is None  # four devices would be on two machines
    assert group_sizes(16, cluster) == tuple(range(1, 17))


def test_devices_around_a_part_of_a_machine() -> None:
    cluster = ClusterSpec("x", "cuda", 4, 8, 80 << 30)
    assert usable_devices(tuple(range(32)), cluster) == (tuple(range(32)),)
    usable = usable_devices(tuple(range(1, 32)), cluster)
    assert [(len(devices), devices[0]) for devices in usable] == [(31, 1), (30, 2), (28, 4), (24, 8)]
    assert group_sizes(28, cluster) == (1, 2, 4, 8, 12, 16, 20, 24, 28)
    assert assign_devices((28,), range(4, 32), cluster) == (tuple(range(4, 32)),)
    assert assign_devices((12, 16), range(4, 32), cluster) == (
        tuple(range(4, 8)) + tuple(range(24, 32)),
        tuple(range(8, 24)),
    )
    assert assign_devices((15,), (*range(7), *range(8, 16)), cluster) == ((*range(7), *range(8, 16)),)
    assert assign_devices((20, 12), range(32), cluster) is None  # where all machines are free
    assert comparable_devices(tuple(range(20, 32)), cluster) == (*range(4), *range(8, 16))
    assert comparable_devices(tuple(range(16, 28)), cluster) == tuple(range(12))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("backend", "src", "dst"),
    [
        ("torch", "d8", "d4t2"),
        ("megatron", "d2t4", "d4t2"),
        ("megatron", "d8", "t8"),
        ("megatron", "d4t2", "d2t4"),
        ("megatron", "t8", "d2t4"),
        ("megatron", "d4t2p2", "d4t4"),
        ("torch", "d16", "d4t4"),
        ("torch", "d16r2", "d4t4"),
        ("torch", "d64", "d8t8"),
        ("megatron", "d4t2c2", "d2t8"),
        ("megatron", "d8e8", "d4t2e4"),
        ("megatron", "d8t2e8", "d8t2"),
        ("megatron", "d16", "d8t2e8"),
    ],
)
def test_estimated_bytes_of_new_weights_are_those_of_the_rows(
    backend: str, src: str, dst: str, offset: int
) -> None:
    model = EXPERTS if "e" in src + dst else LARGE
    cluster = ClusterSpec("x", "cuda", 16, 8, 80 << 30)
    trainer, engine = _replica(src, "train", backend, 0), _replica(dst, "gen", "vllm", 64 * offset)
    held = dict.fromkeys(engine.workers, [0] * engine.layout.num_shards)
    held |= held_bytes(trainer, engine, model, 2, cluster)
    workers, _ = best_workers(engine, held, cluster)
    route = WeightRoute("m", "m@train", "m@gen", "pull")
    exact = add_rows(route, trainer, on_workers(engine, workers), model, 2, cluster)
    estimated = with_bytes(route, trainer, engine, model, 2, cluster)
    for name in ("moved_bytes", "held_bytes", "node_bytes"):
        assert getattr(estimated, name) == pytest.approx(getattr(exact, name), rel=0.01, abs=1e6)


@pytest.mark.parametrize(
    ("backend", "src", "dst"),
    [("megatron", "d16", "d4t8"), ("megatron", "d2t8", "d4t8"), ("torch", "d16", "d8t4")],
)
def test_estimated_bytes_to_engines_on_more_machines_than_the_trainer(
    backend: str, src: str, dst: str
) -> None:
    cluster = ClusterSpec("x", "cuda", 16, 8, 80 << 30)
    trainer, engine = _replica(src, "train", backend, 0), _replica(dst, "gen", "vllm", 0)
    route = WeightRoute("m", "m@train", "m@gen", "pull")
    exact = add_rows(route, trainer, engine, LARGE, 2, cluster)
    estimated = with_bytes(route, trainer, engine, LARGE, 2, cluster)
    for name in ("moved_bytes", "node_bytes"):
        assert getattr(estimated, name) == pytest.approx(getattr(exact, name), rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "cluster", "model", "keys", "placement"),
    [
        # engines that sleep with their weights, although training changes adapters
        ("grpo", "h100-1x2", "qwen2.5-1.5b", (*TORCH, "actor.lora.r=16"), "actor,actor.gen=all:d2"),
        # weights that an engine uses in place
        ("grpo", "h100-1x1", "qwen2.5-0.5b", (*TORCH, "actor.dtype=fp32"), "actor,actor.gen=0"),
        # groups whose machines are given
        ("grpo", "h100-2x8", "qwen2.5-7b", (), "actor=8-11:t4 actor.gen=0-7"),
        # a reference model that uses offloaded weights of the trainer
        (
            "ppo",
            "h100-1x4",
            "qwen2.5-1.5b",
            (*TORCH, "ref.backend=torch", "actor.lora.r=16", "actor.offload=all"),
            "actor,ref,actor.gen=0-1:d2 critic=2-3:d2",
        ),
    ],
)
def test_the_search_counts_the_seconds_that_the_plan_counts(
    recipe: str, cluster: str, model: str, keys: tuple[str, ...], placement: str
) -> None:
    overrides = [f"++models.{key}" for key in keys]
    sync = ["schedule.sync_every=2"] if "actor.dtype=fp32" in keys else []
    if sync:
        overrides.append("models.actor.gen.engine=embedded")
    graph, request = problem(recipe, cluster, model, "batch=72", *overrides, *sync, tunes=False)
    found = search(graph, replace(request, placement=placement))
    forecast = compile_plan(graph, found.request).forecast
    assert forecast.period is not None
    assert found.seconds == pytest.approx(forecast.period.seconds, rel=5e-3)


def test_a_group_larger_than_the_samples_that_count_is_planned() -> None:
    keys = ("batch=2", "nodes.actor_gen.group=8192", "nodes.actor_train.minibatches=1")
    keys = (*keys, "schedule.max_concurrent=16384", "models.actor.tokens_per_microbatch=4096")
    graph, request = problem("grpo", "h100-1x2", "qwen2.5-1.5b", *keys, tunes=False)
    assert search(graph, request).seconds > 0


def _replica(text: str, role: str, backend: str, first: int) -> Replica:
    layout = Layout.parse(text)
    replica = Replica(f"m@{role}", "m", role, backend, layout, ("g",), (), ())  # type: ignore[arg-type]
    return on_workers(replica, tuple(range(first, first + layout.world)))
