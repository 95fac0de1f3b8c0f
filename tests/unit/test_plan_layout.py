"""Layouts, rank orders, heads, routing and clusters: the known answers of the contract."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import cluster_of

from hflow.base.errors import PlanError
from hflow.planner.plan.routing import data_key, routing_table, shard_key
from hflow.planner.plan.rows import Replica, RoutingRow
from hflow.shapes.layout import Layout, RankOrder, even_blocks

sizes = st.integers(1, 5)


@st.composite
def any_layout(draw):
    data, tensor, pipe, context = (draw(sizes) for _ in range(4))
    fitting = [size for size in range(1, data * context + 1) if data * context % size == 0]
    return Layout(data, tensor, pipe, context, draw(st.sampled_from(fitting)))


layouts = any_layout()


def replica(model: str, layout: str) -> Replica:
    shape = Layout.parse(layout)
    workers = tuple(range(shape.world))
    return Replica(
        f"{model}@train", model, "train", "torch", shape, "all", workers, shape.dp_heads(RankOrder.TRAIN)
    )


def lookup(rows: tuple[RoutingRow, ...]) -> dict[str, int]:
    return {row.key: row.worker for row in rows}


def table(*replicas: Replica) -> dict[str, int]:
    return lookup(routing_table(replicas, replicas[0].heads, range(replicas[0].layout.world)))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("d2t2p1", Layout(2, 2, 1)),
        ("d2", Layout(2, 1, 1)),
        ("t4", Layout(1, 4, 1)),
        ("d8p2", Layout(8, 1, 2)),
        ("d16t4p2", Layout(16, 4, 2)),
        ("d4t2c2e8", Layout(4, 2, 1, 2, 8)),
        ("d16r2", Layout(16, replicate=2)),
        ("d4e2", Layout(4, expert=2)),
    ],
)
def test_parse(text, layout):
    assert Layout.parse(text) == layout


@pytest.mark.parametrize("text", ["", "e2c2", "t2d2", "p2t1", "d", "d2x3", "2", "d2 t2", "D2"])
def test_parse_refuses_with_an_example(text):
    with pytest.raises(PlanError, match="d2t2p1"):
        Layout.parse(text)


def test_an_axis_of_size_zero_is_refused():
    with pytest.raises(PlanError, match="at least 1"):
        Layout.parse("d0t2")


def test_experts_need_ranks():
    with pytest.raises(PlanError, match="layout d2t4p1e4 divides experts over 4 of 2 data and context ranks"):
        Layout.parse("d2t4e4")


def test_str_names_three_axes_and_others_in_use():
    assert str(Layout.parse("d2")) == "d2t1p1"
    assert str(Layout.parse("d2t1p1c1e1")) == "d2t1p1"
    assert str(Layout.parse("d2c3e6")) == "d2t1p1c3e6"


@given(layouts)
def test_str_and_parse_are_inverse(layout):
    assert Layout.parse(str(layout)) == layout


@given(layouts, st.sampled_from(RankOrder))
def test_ranks_and_coordinates_are_inverse(layout, order):
    coords = [layout.coords(order, rank) for rank in range(layout.world)]
    assert len(set(coords)) == layout.world
    assert [layout.rank(order, *at) for at in coords] == list(range(layout.world))


@given(layouts)
def test_rank_formulas(layout):
    D, T, P, C = layout.data, layout.tensor, layout.pipe, layout.context
    for d, t, p, c in product(range(D), range(T), range(P), range(C)):
        assert layout.rank(RankOrder.TRAIN, d, t, p, c) == p * (D * C * T) + d * (C * T) + c * T + t
        assert layout.rank(RankOrder.GENERATE, d, t, p, c) == d * (P * C * T) + p * (C * T) + c * T + t
    train = [layout.coords(RankOrder.TRAIN, rank) for rank in range(layout.world)]
    assert train == [at for stage in range(P) for at in layout.stage_coords(stage)]


@given(layouts)
def test_each_copy_of_the_experts_is_on_neighbours(layout):
    parts = [layout.expert_index(d, c) for d, t, _, c in layout.stage_coords(0) if t == 0]
    assert parts == list(range(layout.expert)) * layout.num_expert_copies
    assert len(parts) == layout.num_copies


@given(layouts, st.sampled_from(RankOrder))
def test_heads_are_the_first_context_and_tensor_rank_of_the_last_stage(layout, order):
    coords = [layout.coords(order, head) for head in layout.dp_heads(order)]
    assert coords == [(d, 0, layout.pipe - 1, 0) for d in range(layout.data)]


@pytest.mark.parametrize(("text", "heads"), [("d2", (0, 1)), ("d2t2", (0, 2)), ("d2t2p2", (4, 6))])
def test_heads_of_training(text, heads):
    assert Layout.parse(text).dp_heads(RankOrder.TRAIN) == heads


def test_heads_of_generation():
    assert Layout.parse("d2t2p2").dp_heads(RankOrder.GENERATE) == (2, 6)


@pytest.mark.parametrize(("text", "heads"), [("d2", (0, 1)), ("d2t2", (0, 2)), ("d2t2p2", (4, 6))])
def test_routing_of_data_shards(text, heads):
    routes = table(replica("actor", text))
    assert tuple(routes[data_key(i)] for i in range(2)) == heads


def test_routing_of_model_shards_and_workers():
    routes = table(replica("actor", "d2t2p2"))
    assert routes[shard_key("actor@train", dp=1, tp=0, pp=1)] == 6
    assert routes[shard_key("actor@train", dp=0, tp=1, pp=0)] == 1
    assert all(routes[str(worker)] == worker for worker in range(8))


def test_routing_with_a_context_axis_names_its_index():
    routes = table(replica("actor", "d2t2c2"))
    assert routes[shard_key("actor@train", dp=1, tp=0, pp=0, cp=1)] == 6
    assert shard_key("actor@train", 1, 0, 0, 1) == "(actor@train, 1, 0, 0, 1)"
    assert (routes[data_key(0)], routes[data_key(1)]) == (0, 4)


def test_actor_and_critic_share_workers():
    routes = table(replica("actor", "d2"), replica("critic", "d2"))
    for dp in range(2):
        assert routes[shard_key("actor@train", dp, 0, 0)] == dp
        assert routes[shard_key("critic@train", dp, 0, 0)] == dp


def test_even_blocks_known_answers():
    assert even_blocks(6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert even_blocks(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert even_blocks(2, 3) == [range(0, 1), range(1, 2), range(2, 2)]


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_blocks_are_an_even_partition(num_items, num_blocks):
    blocks = even_blocks(num_items, num_blocks)
    assert [item for block in blocks for item in block] == list(range(num_items))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert sorted(map(len, blocks), reverse=True) == list(map(len, blocks))


def test_clusters_by_name():
    cluster = cluster_of("h100-8x4")
    assert (cluster.device, cluster.num_nodes, cluster.devices_per_node) == ("cuda", 8, 4)
    assert cluster.num_devices == 32
    assert (cluster.node_of(3), cluster.node_of(4)) == (0, 1)
    assert cluster_of("cpu-1x2").device == "cpu"


def test_unknown_devices_are_answered_with_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'h100'"):
        cluster_of("h1000-1x8")


@pytest.mark.parametrize("name", ["cpu", "cpu-2", "cpu-0x2", "cpu-1x", "h100_8x8"])
def test_malformed_clusters_are_refused(name):
    with pytest.raises(PlanError, match="cpu-1x2"):
        cluster_of(name)


def test_a_replicate_axis_divides_data_ranks_into_sets():
    layout = Layout.parse("d12r3")
    assert (str(layout), layout.world, layout.fsdp_size) == ("d12t1p1r3", 12, 4)
    assert (list(layout.fsdp_ranks(6)), list(layout.replicate_ranks(6))) == ([4, 5, 6, 7], [2, 6, 10])
    for text in ("d4r3", "d4r4", "t2r2", "d4e2r2"):
        with pytest.raises(PlanError, match=r"r must divide d and be less than d|has both e and r"):
            Layout.parse(text)
