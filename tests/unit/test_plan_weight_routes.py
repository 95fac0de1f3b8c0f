"""Weight routes, replayed on numpy arrays: what arrives is what a direct cut of the full tensors gives."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import plan_graphs as graphs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import model_config

from hflow.planner.compile import compile_plan
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica, RouteRow, WeightRoute
from hflow.planner.plan.traits import BACKENDS, ENGINES, traits
from hflow.planner.weights.resharding import BoxOverlap, add_rows, box_overlaps, senders
from hflow.planner.weights.sharding import TensorShard, rank_tensors
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import Experts, ModelShape, is_in_fp32, tensors

NOTHING = -1
"""An entry that a worker does not have."""


def shape_of(**changes):
    """One layer of 2 heads of 2, hidden size 4, intermediate size 8, 256 tokens; no biases, not tied."""
    sizes = {
        "family": "llama",
        "num_layers": 1,
        "hidden": 4,
        "intermediate": 8,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 2,
        "vocab": 256,
        "is_tied": False,
    }
    return ModelShape(**{**sizes, **changes})


def replica(role, backend, layout, workers):
    return Replica(
        f"actor@{role}", "actor", role, backend, Layout.parse(layout), ("all",), tuple(workers), ()
    )


def cluster(num_nodes=1, devices_per_node=16):
    return ClusterSpec("test", "cpu", num_nodes, devices_per_node, 2**30)


def route_of(src, dst, shape, item_bytes=1, machines=None):
    bare = WeightRoute("actor", src.name, dst.name, "pull")
    return add_rows(bare, src, dst, shape, item_bytes, machines or cluster())


def rows_of(route, name):
    """(layers, box, holders, receivers) of a tensor's rows."""
    sets = route.worker_sets
    return [(r.layers, r.box, sets[r.holders], sets[r.receivers]) for r in route.rows if r.tensor == name]


# -------------------------------------------------------------------------- by hand
def test_data_and_tensor_ranks_become_data_replicas_on_the_same_workers():
    # Cut in two: embedding and head 256 * 4 each, q, k, v, o 4 * 4 each, gate, up, down 8 * 4 each:
    # 2048 + 64 + 96 = 2208 entries. Whole on every rank: three norms of 4, 12 entries.
    # Each of the four workers holds half of the 2208 and all 12, and lacks the other half, 1104.
    src = replica("train", "megatron", "d2t2p1", range(4))
    dst = replica("gen", "embedded", "d4t1", range(4))
    route = route_of(src, dst, shape_of(), item_bytes=2)
    assert route.moved_bytes == 4 * 1104 * 2
    assert route.held_bytes == 4 * (1104 + 12) * 2
    assert route.node_bytes == 0
    everyone = (0, 1, 2, 3)
    assert rows_of(route, "model.layers.{}.self_attn.q_proj.weight") == [
        ((0, 1), ((0, 2), (0, 4)), (0, 2), everyone),
        ((0, 1), ((2, 4), (0, 4)), (1, 3), everyone),
    ]
    assert rows_of(route, "model.layers.{}.mlp.down_proj.weight") == [
        ((0, 1), ((0, 4), (0, 4)), (0, 2), everyone),
        ((0, 1), ((0, 4), (4, 8)), (1, 3), everyone),
    ]
    assert rows_of(route, "model.norm.weight") == [(None, ((0, 4),), everyone, everyone)]


def test_tensor_ranks_have_two_boxes_of_gate_and_up_in_one_matrix():
    # 8 rows of each: rank 0 has 0 to 4 of both, so that every route has four rows of a box each.
    src = replica("train", "megatron", "t2", (0, 1))
    dst = replica("gen", "embedded", "d1", (0,))
    route = route_of(src, dst, shape_of(family="glm4", has_post_norms=True))
    assert rows_of(route, "model.layers.{}.mlp.gate_up_proj.weight") == [
        ((0, 1), ((start, start + 4), (0, 4)), holders, (0,))
        for start, holders in ((0, (0,)), (4, (1,)), (8, (0,)), (12, (1,)))
    ]


@pytest.mark.parametrize(("is_tied", "outside"), [(False, 256 * 4 + 4), (True, 4)])
def test_two_stages_become_one(is_tied, outside):
    # A layer: q, k, v, o 64, gate, up, down 96, two norms 8: 168 entries. Five layers make stages of
    # 3 and 2. The first worker lacks two layers, the final norm (4) and, where it is not tied to the
    # embedding that both workers hold, the head (256 * 4).
    src = replica("train", "megatron", "p2", (0, 1))
    dst = replica("gen", "embedded", "d1", (0,))
    route = route_of(src, dst, shape_of(num_layers=5, is_tied=is_tied))
    assert route.moved_bytes == 2 * 168 + outside
    assert route.held_bytes == 3 * 168 + 256 * 4
    whole = ((0, 4), (0, 4))
    assert rows_of(route, "model.layers.{}.self_attn.v_proj.weight") == [
        ((0, 3), whole, (0,), (0,)),
        ((3, 5), whole, (1,), (0,)),
    ]
    (embedding,) = rows_of(route, "model.embed_tokens.weight")
    assert embedding[2] == ((0, 1) if is_tied else (0,))


def test_stages_that_end_at_different_layers_meet_in_ranges():
    # 7 layers in 2 stages are 4 + 3, in 3 stages 3 + 2 + 2: ranges end at 3, 4, 5 and 7.
    src = replica("train", "megatron", "p2", (0, 1))
    dst = replica("gen", "embedded", "p3", (2, 3, 4))
    route = route_of(src, dst, shape_of(num_layers=7, is_tied=True))
    norms = rows_of(route, "model.layers.{}.input_layernorm.weight")
    assert [(layers, holders, receivers) for layers, _, holders, receivers in norms] == [
        ((0, 3), (0,), (2,)),
        ((3, 4), (0,), (3,)),
        ((4, 5), (1,), (3,)),
        ((5, 7), (1,), (4,)),
    ]
    ((_, _, holders, receivers),) = rows_of(route, "model.embed_tokens.weight")
    assert (holders, receivers) == ((0, 1), (2, 4))


def test_gathering_fsdp_shards_moves_three_quarters_to_each_of_four():
    # Every first axis (256, 4, 8) divides by 4, so each worker holds a quarter of all
    # 2 * 1024 + 168 + 4 = 2220 entries and takes the rest.
    src = replica("train", "torch", "d4", range(4))
    dst = replica("gen", "embedded", "d4", range(4))
    route = route_of(src, dst, shape_of(), item_bytes=4)
    assert route.moved_bytes == 3 * 2220 * 4
    assert route.held_bytes == 2220 * 4
    assert len(route.rows) == 4 * 12
    assert sorted(route.worker_sets) == [(0,), (0, 1, 2, 3), (1,), (2,), (3,)]


def test_replicated_shards_are_taken_from_the_own_machine():
    # Two machines of four, each of which holds all 2220 entries in two sets of shards.
    src = replica("train", "torch", "d8r2", range(8))
    dst = replica("gen", "embedded", "d8", range(8))
    route = route_of(src, dst, shape_of(), 4, cluster(2, 4))
    assert route.moved_bytes == 8 * 3 / 4 * 2220 * 4
    assert route.held_bytes == 8 / 4 * 2220 * 4
    assert route.node_bytes == 0
    assert len(route.rows) == 4 * 12


def test_four_tensor_ranks_share_two_key_value_heads():
    shape = shape_of(num_heads=4, head_dim=1)
    src = replica("train", "megatron", "t4", range(4))
    dst = replica("gen", "embedded", "d1", (5,))
    name = "model.layers.{}.self_attn.k_proj.weight"
    one, two = ((0, 1), (0, 4)), ((1, 2), (0, 4))
    assert rows_of(route_of(src, dst, shape), name) == [
        ((0, 1), one, (0, 1), (5,)),
        ((0, 1), two, (2, 3), (5,)),
    ]
    back = route_of(replica("train", "torch", "d1", (5,)), replica("gen", "vllm", "t4", range(4)), shape)
    assert rows_of(back, name) == [((0, 1), one, (5,), (0, 1)), ((0, 1), two, (5,), (2, 3))]
    # 2 * 1024 entries of embedding and head and 96 of the MLP once, q and o 16 each, k and v 8 each for
    # two pairs of ranks, three norms of 4 for each of the four ranks.
    assert back.moved_bytes == 2048 + 96 + 2 * 16 + 2 * 2 * 8 + 4 * 12


def test_bytes_cross_machines_only_where_no_holder_is_near():
    # Machines of two workers. Workers 0 and 2 hold everything; 1 and 3 have a holder beside them,
    # 4 and 5 do not: two copies of 2220 entries cross.
    src = replica("train", "megatron", "d2", (0, 2))
    dst = replica("gen", "embedded", "d6", range(6))
    route = route_of(src, dst, shape_of(), machines=cluster(3, 2))
    assert route.moved_bytes == 4 * 2220
    assert route.node_bytes == 2 * 2220
    assert route.held_bytes == 2 * 2220
    found = senders(route, 0, cluster(3, 2))
    assert [found[receiver] for receiver in range(4)] == [0, 0, 2, 2]
    assert {found[receiver] for receiver in (4, 5)} == {0, 2}


def test_holders_send_about_equally():
    # Worker 4 takes ten layers of one tensor from holders on another machine, in turns.
    row = RouteRow("x.{}", (0, 10), ((0, 1),), 0, 1)
    far = WeightRoute("actor", "a", "b", "pull", ((0, 1), (4,)), (row,))
    turns = Counter(senders(far, 0, cluster(2, 4), layer)[4] for layer in range(10))
    assert turns == {0: 5, 1: 5}
    # Six receivers in one row: two for each of three holders.
    one = WeightRoute("actor", "a", "b", "pull", ((0, 1, 2), tuple(range(4, 10))), (row,))
    assert Counter(senders(one, 0, cluster()).values()) == {0: 2, 1: 2, 2: 2}


def test_overlaps_of_a_grid_with_rows():
    # Four quarters of a 4 x 4 matrix against its rows 0 to 2 and row 3.
    edges = [(0, 2), (2, 4)]
    grid = tuple(TensorShard((rows, columns), ()) for rows in edges for columns in edges)
    rows = (TensorShard(((3, 4), (0, 4)), ()), TensorShard(((0, 3), (0, 4)), ()))
    assert box_overlaps(grid, rows) == (
        BoxOverlap(((0, 2), (0, 2)), 0, 1),
        BoxOverlap(((0, 2), (2, 4)), 1, 1),
        BoxOverlap(((2, 3), (0, 2)), 2, 1),
        BoxOverlap(((2, 3), (2, 4)), 3, 1),
        BoxOverlap(((3, 4), (0, 2)), 2, 0),
        BoxOverlap(((3, 4), (2, 4)), 3, 0),
    )


# ---------------------------------------------------------------------- in the plan
def planned(actor, shape=None):
    shapes = {} if shape is None else {"actor": shape}
    request = graphs.request(models={"actor": actor}, shapes=shapes)
    (route,) = compile_plan(graphs.grpo(), request).weights
    return route


@pytest.mark.parametrize(("dtype", "item_bytes"), [("fp32", 4), ("bf16", 2)])
def test_a_plan_counts_in_the_dtype_that_engines_hold(dtype, item_bytes):
    # Two FSDP ranks, two whole engines: each holds one half of 2220 entries and takes the other.
    route = planned(model_config(dtype=dtype), shape_of())
    assert (route.how, route.moved_bytes, route.held_bytes) == (
        "gather",
        2220 * item_bytes,
        2220 * item_bytes,
    )


def test_storage_that_is_shared_moves_nothing():
    route = planned(model_config(layout="d1", gen_layout="d1"), shape_of())
    assert (route.how, route.moved_bytes, route.held_bytes) == ("shared", 0, 2220 * 4)


def test_a_model_of_unknown_sizes_has_no_rows():
    assert planned(model_config()).rows == ()


# ------------------------------------------------------------------- replayed on arrays
@dataclass(frozen=True)
class Case:
    shape: ModelShape
    src: Replica
    dst: Replica
    machines: ClusterSpec


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def layouts_of(draw, num_layers):
    """A layout of at most 16 ranks, on some of which a layer's experts are divided."""
    t, p = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, min(num_layers, 4)))
    c = draw(st.integers(1, min(3, 16 // (t * p))))
    d = draw(st.integers(1, 16 // (t * p * c)))
    if draw(st.booleans()):
        return Layout(d, t, p, c, replicate=draw(st.sampled_from([1, *divisors(d * c)[:-1]])))
    return Layout(d, t, p, c, draw(st.sampled_from(divisors(d * c))))


@st.composite
def expert_layers(draw, layouts, most):
    """Experts that both layouts divide, in some layers."""
    num = math.lcm(*(layout.expert for layout in layouts))
    return Experts(
        num=num * draw(st.integers(1, 2)),
        per_token=1,
        intermediate=most * draw(st.integers(1, 2)),
        shared=most * draw(st.integers(0, 1)),
        first=draw(st.integers(0, 2)),
        step=draw(st.integers(1, 2)),
        has_bias=draw(st.booleans()),
        has_router_bias=draw(st.booleans()),
    )


@st.composite
def cases(draw):
    """Two replicas of a small model on up to 16 of 32 workers, and how many of these share a machine."""
    backends = [draw(st.sampled_from(sorted((*BACKENDS, *ENGINES)))) for _ in range(2)]
    num_layers = draw(st.integers(1, 5))
    layouts = [draw(layouts_of(num_layers)) for _ in range(2)]
    most = max(layout.tensor for layout in layouts)
    num_heads = most * draw(st.integers(1, 2))
    fits = [k for k in divisors(num_heads) if all(k % n.tensor == 0 or n.tensor % k == 0 for n in layouts)]
    bias, head = draw(st.booleans()), draw(st.sampled_from(("lm", "value")))
    pads = [traits(backend).vocab_multiple is not None for backend in backends]
    step = max(1 if padded else layout.tensor for layout, padded in zip(layouts, pads, strict=True))
    sizes = st.one_of(st.integers(1, 9), st.integers(125, 140), st.integers(250, 263))
    shape = ModelShape(
        family="llama",
        num_layers=num_layers,
        hidden=draw(st.integers(1, 5)),
        intermediate=most * draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from(fits)),
        head_dim=draw(st.integers(1, 3)),
        vocab=-(-draw(sizes) // step) * step,
        is_tied=head == "lm" and draw(st.booleans()),
        head=head,
        has_qkv_bias=bias,
        has_out_bias=draw(st.booleans()),
        has_mlp_bias=bias,
        has_qk_norm=draw(st.booleans()),
        experts=draw(st.none() | expert_layers(layouts, most)),
        has_post_norms=draw(st.booleans()),
    )
    first = draw(st.sampled_from((0, 8, 16)))
    devices = draw(st.permutations(range(16))), draw(st.permutations(range(first, first + 16)))
    workers = [order[: layout.world] for order, layout in zip(devices, layouts, strict=True)]
    roles = [draw(st.sampled_from(("train", "gen"))) for _ in range(2)]
    ends = [replica(*end) for end in zip(roles, backends, map(str, layouts), workers, strict=True)]
    return Case(shape, *ends, cluster(32, draw(st.sampled_from((1, 2, 4, 32)))))


@cache
def full_tensors(shape):
    """Every entry is its own index."""
    return {spec.name: np.arange(spec.numel).reshape(spec.shape) for spec in tensors(shape)}


AXES_WITH_BIASES = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None}
"""Tensor of experts with biases (gpt-oss) -> the axis that ranks divide. Matrices: [experts, in, out]."""


def direct_cut(shape, end, coords):
    """What a rank holds, cut out of the full tensors the way that its backend does it."""
    (d, t, p, c), layout = coords, end.layout
    layers = np.array_split(np.arange(shape.num_layers), layout.pipe)[p]
    is_first, is_last = p == 0, p == layout.pipe - 1
    cut = {}
    for name, whole in full_tensors(shape).items():
        kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if not is_on(name, layers, is_first, is_last, shape.is_tied):
            continue
        if ".experts." in name and shape.experts.has_bias:
            cut_axis = AXES_WITH_BIASES[kind]
            part = whole if cut_axis is None else np.split(whole, layout.tensor, axis=cut_axis)[t]
        else:
            axis = 1 if ".experts." in name else 0
            part = over_tensor_ranks(whole, kind, name.endswith("bias"), shape, end, t, axis)
        copy, num_copies = d * layout.context + c, layout.data * layout.context
        if ".experts." in name:
            part = np.split(part, layout.expert)[copy % layout.expert]
            copy, num_copies = copy // layout.expert, num_copies // layout.expert
        if end.backend == "torch":
            num_copies //= layout.replicate
            copy %= num_copies
            block = -(-len(part) // num_copies)
            part = part[copy * block : (copy + 1) * block]
        if part.size:
            cut[name] = part
    return cut


def is_on(name, layers, is_first, is_last, is_tied):
    """Whether a stage with these layers has a tensor."""
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) in layers
    if name == "model.embed_tokens.weight":
        return is_first or (is_tied and is_last)
    return is_last


def over_tensor_ranks(whole, kind, is_bias, shape, end, t, axis):
    num_ranks = end.layout.tensor
    if kind in ("q_proj", "gate_proj", "up_proj"):
        return np.split(whole, num_ranks, axis=axis)[t]
    if kind in ("k_proj", "v_proj"):
        heads = np.split(whole, shape.num_kv_heads)
        copies = max(1, num_ranks // shape.num_kv_heads)
        return np.concatenate(np.array_split(np.repeat(heads, copies, axis=0), num_ranks)[t])
    if kind in ("o_proj", "down_proj") and not is_bias:
        return np.split(whole, num_ranks, axis=axis + 1)[t]
    if kind in ("embed_tokens", "lm_head"):
        multiple = {"megatron": 128 * num_ranks, "vllm": 64}.get(end.backend, 1)
        padding = np.full((-len(whole) % multiple, whole.shape[1]), NOTHING)
        mine = np.split(np.concatenate([whole, padding]), num_ranks)[t]
        return mine[(mine != NOTHING).all(axis=1)]
    return whole


def ranks(end):
    """(worker, coordinates) of every rank."""
    order = rank_order(end.role)
    return [(worker, end.layout.coords(order, rank)) for rank, worker in enumerate(end.workers)]


def memories(shape, end):
    """worker -> tensor -> a full array with the entries that its ranks hold."""
    found = {}
    for worker, coords in ranks(end):
        memory = found.setdefault(worker, {})
        for name, part in direct_cut(shape, end, coords).items():
            array = memory.setdefault(name, np.full_like(full_tensors(shape)[name], NOTHING))
            array.flat[part] = part
    return found


def replay(case, route, source):
    """What destination workers have after all copies, and the bytes that moved, in all and far."""
    arrived = {}
    blank = {name: np.full_like(whole, NOTHING) for name, whole in full_tensors(case.shape).items()}
    moved = far = 0
    for index, row in enumerate(route.rows):
        at = slices(row.box)
        for layer in range(*row.layers) if row.layers else (0,):
            name = row.tensor.format(layer)
            givers = senders(route, index, case.machines, layer)
            assert sorted(givers) == sorted(route.worker_sets[row.receivers])
            for receiver, giver in givers.items():
                assert giver in route.worker_sets[row.holders]
                values = source[giver][name][at]
                assert (values != NOTHING).all(), "sent by a worker that did not hold it"
                target = arrived.setdefault(receiver, {}).setdefault(name, blank[name].copy())
                assert (target[at] == NOTHING).all(), "written twice"
                target[at] = values
                if giver != receiver:
                    moved += item_bytes(name) * values.size
                    far += (
                        item_bytes(name)
                        * values.size
                        * (case.machines.node_of(giver) != case.machines.node_of(receiver))
                    )
    return arrived, moved, far


def item_bytes(name):
    """The bytes of a number of a tensor, in a model in bf16."""
    return 4 if is_in_fp32(name) else 2


def slices(box):
    return tuple(slice(*edges) for edges in box)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name, array in wanted.items() if not np.array_equal(found[name], array)] == []


def entries(memory):
    """All (tensor, entry) pairs that a worker has."""
    return {(name, entry) for name, array in memory.items() for entry in array[array != NOTHING].tolist()}


def num_bytes(some):
    return sum(item_bytes(name) for name, _ in some)


def least(case, source, target):
    """Bytes that must move, in all and between machines, and those that may stay, over sets of entries."""
    before = {worker: entries(memory) for worker, memory in source.items()}
    on_machine = {}
    for worker, held_here in before.items():
        on_machine.setdefault(case.machines.node_of(worker), set()).update(held_here)
    moved = far = stay = 0
    for worker, memory in target.items():
        wanted = entries(memory)
        lacking = wanted - before.get(worker, set())
        moved += num_bytes(lacking)
        stay += num_bytes(wanted - lacking)
        far += num_bytes(lacking - on_machine.get(case.machines.node_of(worker), set()))
    return moved, far, stay


@given(cases())
@settings(max_examples=70)
def test_replaying_a_route_gives_every_rank_its_direct_cut_with_the_least_bytes(case):
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    source, target = memories(case.shape, case.src), memories(case.shape, case.dst)
    arrived, moved, far = replay(case, route, source)
    assert arrived.keys() <= target.keys()
    for worker, memory in target.items():
        assert_same(arrived.get(worker, {}), memory)
    for worker, coords in ranks(case.dst):
        boxes = rank_tensors(case.shape, traits(case.dst.backend), case.dst.layout, coords)
        shard = {spec.name: arrived[worker][spec.name][slices(box)] for spec, box in boxes}
        assert_same(shard, direct_cut(case.shape, case.dst, coords))
    assert (moved, far, route.held_bytes) == least(case, source, target)
    assert (route.moved_bytes, route.node_bytes) == (moved, far)


@given(cases())
@settings(max_examples=50)
def test_worker_sets_are_distinct_and_in_use(case):
    route = route_of(case.src, case.dst, case.shape, 1, case.machines)
    assert len(set(route.worker_sets)) == len(route.worker_sets)
    used = {index for row in route.rows for index in (row.holders, row.receivers)}
    assert used == set(range(len(route.worker_sets)))
