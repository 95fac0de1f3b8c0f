"""What a step's redistribution moves, by the functions that the run calls."""

import random
from collections import Counter

import numpy as np
import plan_graphs as graphs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import model_config

from hflow.data_plane.group_placement import GroupPlacer
from hflow.data_plane.locations import DataLocations
from hflow.data_plane.minibatches import cut_minibatches, shards
from hflow.data_plane.redistribute import redistribute
from hflow.graph.ir import TRAJECTORY_FIELDS
from hflow.graph.queries import topological_order
from hflow.planner.compile import compile_plan
from hflow.planner.forecast import traffic
from hflow.planner.forecast.traffic import (
    MAX_LISTED_STEPS,
    estimate_traffic,
    field_size,
    generating_workers,
    thinned,
)
from hflow.planner.plan.workload import Workload, sample_lengths
from hflow.types import Trajectory, Unit
from hflow.workers.storage.sample_store import SampleStore


def planned(graph, cluster="cpu-1x2", layouts=None, **changes):
    """A plan and its request; `layouts` says (train or infer, generation) by model."""
    models = {
        name: model_config(layout=layout, gen_layout=gen) for name, (layout, gen) in (layouts or {}).items()
    }
    request = graphs.request(cluster, models=models, **changes)
    return compile_plan(graph, request), request


# ---------------------------------------------------------------------------- layouts by hand
EIGHT_TOKENS = Workload(prompt=3, response_mean=5.0, response_cv=0.0, max_response=9)


def test_equal_layouts_move_only_single_worker_outputs():
    # Two groups of two samples of 8 tokens: group 0 on worker 0, group 1 on worker 1.
    plan, request = planned(graphs.grpo(group=2), batch=2)
    ref, advantage, train = estimate_traffic(plan, request, EIGHT_TOKENS)
    # A sample's input_ids take 8 x 8 bytes and its loss_mask 8 x 1; all 4 samples are in place.
    assert (ref.consumer, ref.num_bytes, ref.local_bytes) == ("ref_inf", 0, 4 * 72)
    # Worker 0 takes group 1's reward (8), group (8) and loss_mask (8): 2 x 24 bytes.
    assert (advantage.consumer, advantage.num_bytes, advantage.lower_bound) == ("group_advantage", 48, 48)
    assert advantage.busiest_bytes == 48
    (step,) = advantage.steps
    assert (step.kind, step.root, step.sources, step.destinations) == ("gather", 0, (1,), (0,))
    assert (step.num_samples, step.num_bytes) == (2, 48)
    # Back go group 1's advantages, 4 bytes each. A sample's fields are input_ids 64, loss_mask 8,
    # behav_logprobs 32, ref_logprobs 32 and advantages 4.
    assert (train.consumer, train.num_bytes, train.local_bytes) == ("actor_train", 8, 4 * 140 - 8)
    assert train.imbalance == 1.0


def test_a_narrower_trainer_pulls_the_other_engines_samples():
    layouts = {"actor": ("d1", "d2"), "ref": ("d1", None)}
    plan, request = planned(graphs.grpo(group=2), layouts=layouts, batch=2)
    ref, advantage, train = estimate_traffic(plan, request, EIGHT_TOKENS)
    # Everything runs on worker 0: it pulls group 1's fields once, those that it lacks.
    assert ref.num_bytes == 2 * (64 + 8)
    assert advantage.num_bytes == 2 * (8 + 8)
    assert train.num_bytes == 2 * 32
    assert train.num_steps == 1
    assert [edge.local_bytes for edge in (ref, advantage, train)] == [2 * 72, 96 - 32, 4 * 140 - 64]


def test_bytes_between_machines_are_counted_separately():
    layouts = {"actor": ("d1", "d4"), "ref": ("d1", None)}
    plan, request = planned(graphs.grpo(group=2), "cpu-2x2", layouts, batch=4)
    ref = estimate_traffic(plan, request, EIGHT_TOKENS)[0]
    assert ref.num_bytes == 3 * 2 * 72
    assert ref.num_node_bytes == 2 * 2 * 72
    assert ref.busiest_bytes == ref.num_bytes


def test_every_minibatch_waits_for_its_heaviest_rank():
    # Two samples to a minibatch, one for each rank: the heavier ones of both minibatches add up.
    plan, request = planned(graphs.ppo(minibatches=2), batch=4)
    workload = Workload(prompt=1, response_mean=30.0, response_cv=1.0, max_response=200)
    edges = {edge.consumer: edge for edge in estimate_traffic(plan, request, workload)}
    lengths = sample_lengths(workload, 4, request.seed)
    cut = dict(plan.cuts)["actor_train"]
    heaviest = [max(lengths[g] for g in part) for part in cut_minibatches(range(4), cut, request.seed, 0)]
    assert edges["actor_train"].imbalance == pytest.approx(sum(heaviest) / (sum(lengths) / 2))
    assert edges["actor_train"].imbalance > edges["critic_inf"].imbalance


def test_steps_are_the_largest_ones():
    layouts = {"actor": ("d1t1p1", "d64"), "ref": ("d64", None)}
    plan, request = planned(graphs.grpo(group=4), "cpu-1x64", layouts, batch=128)
    workload = Workload(prompt=10, response_mean=40.0, response_cv=0.8, max_response=200)
    edges = estimate_traffic(plan, request, workload)
    assert {edge.num_steps > MAX_LISTED_STEPS for edge in edges} == {True, False}
    for edge in edges:
        sizes = [step.num_bytes for step in edge.steps]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == min(MAX_LISTED_STEPS, edge.num_steps)
        if edge.num_steps <= MAX_LISTED_STEPS:
            assert sum(sizes) == edge.num_bytes


# --------------------------------------------------------------- replayed on what workers hold
def replayed(plan, request, workload):
    """The step as the run goes through it, with an array for every field of every sample.

    Returns:
        consumer -> (bytes moved, bytes moved between machines, bytes read).
    """
    stream = plan.schedule.streams[0]
    size = stream.group_size
    lengths = sample_lengths(workload, request.batch * size, request.seed)
    homes = generating_workers(plan, request, stream, [length - workload.prompt for length in lengths])
    holdings, samples = DataLocations(), tuple(range(len(lengths)))
    for sample, (home, length) in enumerate(zip(homes, lengths, strict=True)):
        holdings.add_sample(sample, home, length)
    groups = {g: list(range(g * size, (g + 1) * size)) for g in range(request.batch)}
    stores = {worker: {} for worker in range(plan.cluster.num_devices)}
    in_order = {name: i for i, name in enumerate(topological_order(plan.graph))}
    mine = [r for r in plan.rules if r.fields and plan.graph.root_stream(r.stream).name == stream.name]
    made_by_nodes = {f"{n.stream}/{f.field}" for n in plan.graph.nodes for f in n.spec.returns}
    made_by_batch = {
        f"{plan.graph.node(rule.consumer).stream}/{returned.field}"
        for rule in mine
        for returned in plan.graph.node(rule.consumer).spec.returns
    }
    numbers = {
        field: i for i, field in enumerate(sorted({f for r in mine for f in r.fields} | made_by_nodes))
    }
    for field in numbers.keys() - made_by_batch:
        for sample, home in enumerate(homes):
            stores[home][field, sample] = value_of(numbers[field], sample, lengths)
    found = {}
    for rule in sorted(mine, key=lambda r: in_order[r.consumer]):
        holders = holdings.holders(rule.fields, samples)
        assignment = shards(
            rule,
            dict(plan.cuts).get(rule.consumer),
            groups,
            holders,
            seed=request.seed,
            step=0,
        )
        moves = redistribute(rule, assignment, holders, plan.cluster)
        before = {worker: set(store) for worker, store in stores.items()}
        moved = Counter()
        holdings.add_moves(moves)
        for move in moves.joined():
            for key in ((field, sample) for field in move.fields for sample in move.samples):
                assert key in before[move.src], "sent by a worker that did not hold it"
                assert key not in before[move.dst], "sent to a worker that held it"
                stores[move.dst][key] = stores[move.src][key]
                crosses = plan.cluster.node_of(move.src) != plan.cluster.node_of(move.dst)
                moved[crosses] += num_bytes(plan, key, lengths, workload)
        read = set()
        outputs = [f"{rule.stream}/{f.field}" for f in plan.graph.node(rule.consumer).spec.returns]
        for head, minibatches in zip(rule.heads, assignment, strict=True):
            own = [sample for minibatch in minibatches for sample in minibatch]
            for field, sample in ((field, sample) for field in rule.fields for sample in own):
                np.testing.assert_array_equal(
                    stores[head][field, sample], value_of(numbers[field], sample, lengths)
                )
                read.add((head, field, sample))
            holdings.add_outputs(outputs, own, head)
            stores[head].update(
                {(f, s): value_of(numbers[f], s, lengths) for f in outputs for s in own if f in numbers}
            )
        arrived = {(w, *key) for w, store in stores.items() for key in store.keys() - before[w]}
        assert {key for key in arrived if key[1] not in outputs} <= read, "moved to where nobody reads it"
        total = sum(num_bytes(plan, key, lengths, workload) for _, *key in read)
        found[rule.consumer] = (moved.total(), moved[True], total)
    return found


def value_of(field, sample, lengths):
    return np.full(lengths[sample], 1000 * field + sample)


def num_bytes(plan, key, lengths, workload):
    field, sample = key
    return field_size(plan.graph, field, dict(plan.shapes)).of(
        workload.prompt, lengths[sample] - workload.prompt
    )


layout_texts = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)).filter(
    lambda axes: axes[0] * axes[1] * axes[2] <= 8
)


@st.composite
def cases(draw):
    """A graph on eight workers of two machines, with a layout for every replica."""
    graph = draw(st.sampled_from([graphs.grpo(3, minibatches=2), graphs.ppo(minibatches=2), graphs.agent()]))

    def layout():
        d, t, p = draw(layout_texts)
        return f"d{d}t{t}p{p}"

    layouts = {model.name: (layout(), layout()) for model in graph.models}
    concurrent = draw(st.sampled_from([8, 16, 500]))
    plan, request = planned(
        graph, "cpu-2x4", layouts, batch=draw(st.integers(8, 13)), max_concurrent=concurrent
    )
    workload = Workload(draw(st.integers(1, 5)), draw(st.floats(2.0, 20.0)), draw(st.floats(0.0, 1.0)), 60)
    return plan, request, workload


@given(cases())
@settings(max_examples=40)
def test_the_estimate_equals_the_bytes_of_a_replay(case):
    plan, request, workload = case
    edges = estimate_traffic(plan, request, workload)
    found = replayed(plan, request, workload)
    assert {e.consumer: (e.num_bytes, e.num_node_bytes, e.num_bytes + e.local_bytes) for e in edges} == found
    for edge in edges:
        assert 0 <= edge.lower_bound <= edge.num_bytes
        assert edge.busiest_bytes <= edge.num_bytes
        assert edge.imbalance >= 1 - 1e-9
        assert (edge.num_steps > 0) == (edge.num_bytes > 0)


# ------------------------------------------------------------------------------ where samples lie
def homes_of(plan, request, responses):
    return generating_workers(plan, request, plan.schedule.streams[0], responses)


def test_a_full_engine_keeps_its_load_while_samples_wait():
    # One slot an engine, four samples in flight. Samples 0 to 3 alternate; sample 2 waits behind the long
    # sample 0. Sample 1 ends at 2 and sample 3 at 4, both on engine 1, which therefore takes 4 and 5.
    responses = [10, 2, 2, 2, 2, 2]
    plan, request = planned(graphs.ppo(), batch=6, max_concurrent=4)
    assert homes_of(plan, request, responses) == [0, 1, 0, 1, 0, 1]
    one_slot = {"actor": model_config(max_running=1)}
    request = graphs.request(models=one_slot, batch=6, max_concurrent=4)
    assert homes_of(plan, request, responses) == [0, 1, 0, 1, 1, 1]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=60), st.integers(3, 40))
def test_groups_go_where_the_dispatcher_sends_them(first, max_concurrent):
    rng = random.Random(0)  # no two samples end at the same moment
    responses = [10**10 * tokens + rng.randrange(10**10) for tokens in first for _ in range(3)]
    graph = graphs.grpo(group=3)
    plan, request = planned(graph, "cpu-1x4", batch=len(first), max_concurrent=max_concurrent)
    placer, flying, expected, now = GroupPlacer(plan), [], [], 0
    for group in range(len(first)):
        while len(flying) + 3 > max_concurrent:
            flying.sort()
            now, done = flying.pop(0)
            placer.finished("actor_gen", done)
        expected += [placer.place("actor_gen", group, 3)] * 3
        flying += [(now + tokens, group) for tokens in responses[3 * group : 3 * group + 3]]
    assert homes_of(plan, request, responses) == expected


def test_written_groups_take_turns_on_the_ranks_that_train_on_them():
    plan, request = planned(graphs.sft(), "cpu-1x4", {"actor": ("d2t2", None)}, batch=4)
    assert homes_of(plan, request, [5] * 4) == [0, 2, 0, 2]
    (edge,) = estimate_traffic(plan, request, Workload(4, 4.0, 0.0, 4))
    assert edge.num_bytes == 0


# -------------------------------------------------------------------------------- sizes of fields
def test_numbers_have_the_width_of_the_packed_store():
    store, graph = SampleStore(), graphs.grpo()
    logprobs, mask = (0.0, -1.0, -2.0, -3.0), (False, True, True, True)
    trajectory = Trajectory(
        input_ids=(5, 6, 7, 8), loss_mask=mask, behav_logprobs=logprobs, versions=(-1, 0, 0, 0)
    )
    store.put_trajectory("actor_gen", 0, 0, trajectory, {})
    store.add_value("actor_gen", "reward", Unit.SEQUENCE, (0,), 1.0)
    fields = [
        name for name, unit in TRAJECTORY_FIELDS.items() if unit not in (Unit.TEXT, Unit.JSON, Unit.MESSAGES)
    ]
    for field in (*fields, "reward"):
        name = f"actor_gen/{field}"
        packed = store.gather("actor_gen", [name], (0,)).columns[field].nbytes
        assert field_size(graph, name, {}).of(prompt=1, response=3) == packed, field


def test_text_bytes_grow_with_tokens():
    graph = graphs.grpo()
    assert field_size(graph, "actor_gen/prompt", {}).of(prompt=10, response=100) == 40
    assert field_size(graph, "actor_gen/completion", {}).of(prompt=10, response=100) == 400


@pytest.mark.parametrize(
    ("scalar", "unit", "expected"),
    [
        ("bool", Unit.SEQUENCE, 1),
        ("int", Unit.GROUP, 8),
        ("float", Unit.SEQUENCE, 8),
        ("list[float]", Unit.TOKEN, 800),
        ("tensor", Unit.SEQUENCE, 4),
        ("list[int]", Unit.TOKEN, 800),
    ],
)
def test_returned_fields_have_the_width_of_their_type(scalar, unit, expected):
    returned = graphs.GAE[0].__class__("made", unit, scalar)
    graph = graphs.changed(graphs.grpo(), "score", returns=(returned,))
    assert field_size(graph, "actor_gen/made", {}).of(prompt=40, response=60) == expected


# ---------------------------------------------------------------------------- large clusters
LARGE = {"actor": ("d192t4", "d128t2"), "ref": ("d768", None)}
LARGE_GROUPS = {"train": tuple(range(768)), "gen": tuple(range(768, 1024))}


def large_plan():
    models = {
        name: model_config(layout=layout, gen_layout=gen, group="train", gen_group="gen", backend="megatron")
        for name, (layout, gen) in LARGE.items()
    }
    request = graphs.request("h100-128x8", batch=1536, groups=LARGE_GROUPS, models=models)
    return compile_plan(graphs.grpo(group=2), request), request


def test_one_machine_in_several_stands_for_a_large_cluster(monkeypatch):
    workload = Workload(prompt=64, response_mean=256.0, response_cv=0.6, max_response=512)
    plan, request = large_plan()
    estimated = estimate_traffic(plan, request, workload)
    monkeypatch.setattr(traffic, "MIN_MACHINES", 1_000_000)
    exact = estimate_traffic(plan, request, workload)
    assert {row.scale for row in estimated} == {4}
    assert {row.scale for row in exact} == {1}
    for row, true in zip(estimated, exact, strict=True):
        assert row.num_bytes == pytest.approx(true.num_bytes, rel=0.15)
        assert row.busiest_bytes == pytest.approx(true.busiest_bytes, rel=0.15)
        assert row.imbalance == pytest.approx(true.imbalance, abs=0.02)


def test_chosen_machines_have_every_part_of_a_layout_over_several_machines():
    plan, request = large_plan()
    part = thinned(plan, request)
    assert (part.scale, part.request.batch) == (4, 384)
    machines = {plan.cluster.node_of(head) for rule in part.plan.rules for head in rule.heads}
    assert {machine % 4 for machine in machines} == {0, 1, 2, 3}
    sizes = {rule.consumer: len(rule.heads) for rule in part.plan.rules}
    assert (sizes["actor_train"], sizes["ref_inf"], sizes["group_advantage"]) == (48, 192, 1)
    assert part.factors["actor_train"] == part.source_factor == 1  # a head has the load that it has in full
    assert part.factors["group_advantage"] == 4


def test_a_small_cluster_or_batch_is_estimated_in_full():
    plan, request = planned(graphs.grpo(group=2), "h100-8x8", {"actor": ("d64", "d64")}, batch=4096)
    assert thinned(plan, request).scale == 1
    assert thinned(plan, request).plan is plan
