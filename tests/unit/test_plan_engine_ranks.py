"""The devices of an engine's ranks: by hand, never more bytes than in the order of devices, and in plans."""

import io
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import model_config
from plan_graphs import changed, grpo, request
from rich.console import Console

from hflow.planner.compile import compile_plan
from hflow.planner.diff import diff_plans
from hflow.planner.make.engine_ranks import best_order, best_workers
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.routing import on_workers, tensor_ranks
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.planner.plan.serialise import to_json
from hflow.planner.weights.resharding import add_rows, held_bytes
from hflow.report.html.plan import render_page
from hflow.report.text.plan import render_plan
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape

SHAPE = ModelShape("llama", 8, 1024, 4096, 16, 8, 64, 32768, is_tied=False)


def replica(role, backend, layout, first=0):
    layout = Layout.parse(layout)
    placed = Replica(f"actor@{role}", "actor", role, backend, layout, "all", (), ())
    return on_workers(placed, tuple(range(first, first + layout.world)))


def pulled(actor):
    """The actor, whose engines pull slices."""
    return replace(actor, gen=replace(actor.gen, transport="store"))


def planned(actor, cluster="h100-1x8", graph=None, **changes):
    """The plan of an actor that trains and generates, with the sizes of `SHAPE`."""
    models = {"actor": pulled(actor), "ref": model_config(layout="d1")}
    shapes = {"actor": SHAPE}
    return compile_plan(graph or grpo(), request(cluster, models=models, shapes=shapes, **changes))


def moved(plan):
    (route,) = plan.weights
    return route.moved_bytes / (route.moved_bytes + route.saved_bytes)


# -------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize(
    ("backend", "layout", "gen_layout", "engines", "before", "after"),
    [
        # Each device holds a quarter, and needs the half around it: 4 models are needed, of which devices
        # hold 8 quarters. In the order of devices, every other one holds nothing that it needs.
        ("megatron", "d2t4", "d4t2", [(0, 2), (1, 3), (4, 6), (5, 7)], 3.0, 2.0),
        # Two models are needed. All eighths are in place; in the order of devices the first and the last.
        ("megatron", "d1t8", "d2t4", [(0, 2, 4, 6), (1, 3, 5, 7)], 1.75, 1.0),
        # A half contains the quarter that the same device needs: nothing moves.
        ("megatron", "d4t2", "d2t4", [(0, 2, 1, 3), (4, 6, 5, 7)], 1.0, 0.0),
        # Stages do not matter to engines without them. Devices hold an eighth of the model.
        ("megatron", "d1t4p2", "d4t2", [(0, 2), (1, 3), (4, 6), (5, 7)], 3.5, 3.0),
    ],
)
def test_engines_of_fewer_or_more_tensor_ranks(backend, layout, gen_layout, engines, before, after):
    actor = model_config(layout, gen_layout, backend=backend, engine="vllm", dtype="bf16")
    plan = planned(actor)
    gen, (route,) = plan.replica("actor@gen"), plan.weights
    assert [tensor_ranks(gen, head) for head in gen.heads] == engines
    assert gen.heads == tuple(engine[0] for engine in engines)
    assert plan.placement("actor_gen").heads == gen.heads
    in_order = add_rows(
        route, plan.replica("actor@train"), replica("gen", "vllm", gen_layout), SHAPE, 2, plan.cluster
    )
    assert in_order.moved_bytes == route.moved_bytes + route.saved_bytes
    # Norms are on all ranks, so the figures by hand are off by their share, 1e-4.
    model = in_order.moved_bytes / before
    assert route.moved_bytes / model == pytest.approx(after, rel=1e-3)
    assert model == pytest.approx(2 * 8 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 4096) + 2**27, rel=1e-3)
    assert {row.key: row.worker for row in plan.routing}["(actor@gen, 1, 0, 0)"] == gen.heads[1]


def test_the_tensor_size_that_halves_moves_43_percent_less():
    actor = model_config("d1t8", "d2t4", backend="megatron", engine="vllm")
    assert moved(planned(actor)) == pytest.approx(1 - 0.43, abs=0.002)


def test_rows_of_fsdp_are_near_the_half_that_contains_them():
    # Tensors that are cut by columns are an eighth times a half in place on any device.
    plan = planned(model_config("d8", "d4t2", engine="vllm"))
    assert plan.replica("actor@gen").workers == (0, 4, 1, 5, 2, 6, 3, 7)
    assert 0.85 < moved(plan) < 0.95


@pytest.mark.parametrize(
    "actor",
    [
        model_config("d2t4", "d2t4", backend="megatron", engine="vllm"),  # in place already
        model_config("d2t4", "d8", backend="megatron", engine="vllm"),  # all engines need everything
        model_config("d4", "d2t2", "a", "b", engine="vllm"),  # everything comes from other devices
    ],
)
def test_without_a_gain_ranks_stay_in_the_order_of_devices(actor):
    plan = planned(actor)
    gen, (route,) = plan.replica("actor@gen"), plan.weights
    devices = next(group.devices for group in plan.groups if (group.name,) == gen.groups)
    assert (gen.workers, route.saved_bytes) == (devices, 0)


def test_a_gain_that_does_not_matter_is_left():
    # On each of 16 machines 8 of 128 blocks of rows are in place, of the 64 models that are needed.
    plan = planned(model_config("d128", "d64t2", engine="vllm"), "h100-16x8", batch=128)
    assert plan.replica("actor@gen").workers == tuple(range(128))


def test_ranks_stay_on_their_machines():
    actor = model_config("d4t4", "d8t2", backend="megatron", engine="vllm")
    plan = planned(actor, "h100-2x8")
    workers = plan.replica("actor@gen").workers
    assert workers == (0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
    assert plan.weights[0].node_bytes == 0


def test_engines_of_one_episode_keep_the_same_workers():
    models = {
        "actor": pulled(model_config("d2t4", "d4t2", backend="megatron", engine="vllm")),
        "ref": model_config("d1", "d4t2", engine="vllm"),
    }
    both = {"reads_weights": ("actor", "ref"), "models": ("actor", "ref")}
    for ref_layout, order in (("d4t2", (0, 2, 1, 3, 4, 6, 5, 7)), ("d2t4", tuple(range(8)))):
        models["ref"] = replace(models["ref"], gen=replace(models["ref"].gen, layout=ref_layout))
        graph = changed(changed(grpo(), "actor_gen", **both), "eval_gen", **both)
        plan = compile_plan(graph, request("h100-1x8", models=models, shapes={"actor": SHAPE}))
        assert plan.replica("actor@gen").workers == plan.replica("ref@gen").workers == order


def test_the_order_is_shown_in_text_page_and_differences():
    plans = [
        planned(model_config("d1t8", gen_layout, backend="megatron", engine="vllm"))
        for gen_layout in ("d1t8", "d2t4")
    ]
    out = io.StringIO()
    Console(file=out, width=200).print(render_plan(plans[1]))
    text = "engine ranks ordered for 43 % fewer bytes"
    assert text in out.getvalue()
    assert text in render_page(plans[1])
    changes = {(c.subject, c.after) for c in diff_plans(*(to_json(plan) for plan in plans)).changes}
    assert ("actor@gen devices", "0-6 by 2 1-7 by 2") in changes
    assert ("actor@gen dp-heads", "0-1") in changes or ("actor_gen dp-heads", "0-1") in changes


# ------------------------------------------------------------------------------ properties
@given(st.data())
def test_an_order_is_the_best_of_all_and_leaves_ties(data):
    num_shards = data.draw(st.integers(1, 3))
    shards = tuple(data.draw(st.lists(st.integers(0, num_shards - 1), min_size=1, max_size=6)))
    row = st.tuples(*[st.integers(0, 5)] * num_shards)
    held = tuple(data.draw(st.lists(row, min_size=len(shards), max_size=len(shards))))

    def total(order):
        return sum(held[device][shard] for device, shard in zip(order, shards, strict=True))

    found, in_order = best_order(held, shards), tuple(range(len(shards)))
    best = max(map(total, permutations(in_order)))
    assert sorted(found) == list(in_order)
    assert total(found) == best
    assert found == in_order or total(in_order) < best


LAYOUTS = [Layout(d, t, p) for t in (1, 2, 4, 8) for p in (1, 2) for d in (1, 2, 3, 4, 8) if d * t * p <= 16]


@given(
    st.sampled_from(["torch", "megatron"]),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 8),
    st.sampled_from([2, 4, 8, 16]),
)
@settings(max_examples=60)
def test_no_plan_moves_more_than_in_the_order_of_devices(backend, layout, gen_layout, first, per_machine):
    cluster = ClusterSpec("x", "cuda", 32 // per_machine, per_machine, 80 << 30)
    if backend == "torch":
        layout = Layout(layout.world)
    trainer, engine = replica("train", backend, str(layout)), replica("gen", "vllm", str(gen_layout), first)
    held = dict.fromkeys(engine.workers, [0] * engine.layout.num_shards)
    held |= held_bytes(trainer, engine, SHAPE, 2, cluster)
    workers, saved = best_workers(engine, held, cluster)
    bare = WeightRoute("actor", trainer.name, engine.name, "pull")
    before, after = (
        add_rows(bare, trainer, one, SHAPE, 2, cluster) for one in (engine, on_workers(engine, workers))
    )
    assert before.moved_bytes - after.moved_bytes == saved >= 0
    assert before.node_bytes == after.node_bytes
    assert sorted(workers) == sorted(engine.workers)
    assert [cluster.node_of(w) for w in workers] == [cluster.node_of(w) for w in engine.workers]
