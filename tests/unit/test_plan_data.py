"""Assignment of samples to ranks, the bytes that move, and the lower bound on them."""

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import cluster_of

from hflow.data_plane.minibatches import SLACK, assign_units, cut_minibatches, shards
from hflow.data_plane.redistribute import NO_WORKER, FieldHolders, Holders, Move, Moves, redistribute
from hflow.planner.forecast.traffic import collective_steps, lower_bound_bytes, moved_bytes
from hflow.planner.plan.rows import BatchCut, EdgeRule

CLUSTER = cluster_of("cpu-2x4")
FIELDS = ("s/advantages", "s/input_ids", "s/reward")


def rule(heads, by_group=False, policy="balanced", fields=FIELDS):
    return EdgeRule("train", "s", tuple(fields), tuple(heads), by_group, policy)


def loads_of(ranks, tokens):
    return [sum(tokens[u] for u in rank) for rank in ranks]


def longest_first(tokens, num_ranks):
    loads = [0] * num_ranks
    for size in sorted(tokens, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads)


def ranks_of(tokens, num_ranks, at):
    """The units of each rank, where some ranks hold each unit."""
    rank_of = assign_units(tokens, num_ranks, {unit: ranks for unit, ranks in enumerate(at) if ranks})
    return tuple(tuple(u for u, at in enumerate(rank_of) if at == rank) for rank in range(num_ranks))


def columns(at, tokens=None):
    """Holders of field -> sample -> workers."""
    samples = sorted(tokens or {sample for workers in at.values() for sample in workers})
    groups = []
    for field, workers in at.items():
        rows = [sorted(workers[sample]) for sample in samples]
        width = max(map(len, rows), default=0)
        padded = [row + [NO_WORKER] * (width - len(row)) for row in rows]
        groups.append(FieldHolders((field,), np.array(padded, np.int32).reshape(len(rows), width).T))
    return Holders(np.array(samples), np.array([(tokens or {}).get(s, 1) for s in samples]), tuple(groups))


# ------------------------------------------------------------------------------------ assign
def test_lognormal_lengths_are_balanced_within_a_percent():
    tokens = [int(x) + 1 for x in np.random.default_rng(0).lognormal(6.0, 1.0, 512)]
    ranks = ranks_of(tokens, 8, [()] * 512)
    loads = loads_of(ranks, tokens)
    assert max(loads) / (sum(loads) / 8) < 1.001
    at = [frozenset({random.Random(i).randrange(8)}) for i in range(512)]
    loads = loads_of(ranks_of(tokens, 8, at), tokens)
    assert max(loads) / (sum(loads) / 8) < 1.01


def test_units_stay_where_they_are_when_that_is_balanced():
    tokens = [5, 5, 5, 5]
    at = [frozenset({1}), frozenset({0}), frozenset({1}), frozenset({0})]
    assert ranks_of(tokens, 2, at) == ((1, 3), (0, 2))


def test_only_the_excess_leaves_a_crowded_rank():
    tokens = [1] * 12
    at = [frozenset({0})] * 8 + [frozenset({1})] * 2 + [frozenset({2})] * 2
    ranks = ranks_of(tokens, 3, at)
    assert [len(rank) for rank in ranks] == [4, 4, 4]
    assert set(ranks[0]) < set(range(8))
    assert {8, 9} < set(ranks[1])
    assert {10, 11} < set(ranks[2])


unit_tokens = st.lists(st.integers(0, 60), min_size=0, max_size=40)


@given(unit_tokens, st.integers(1, 6), st.randoms(use_true_random=False))
def test_assign_is_a_partition_within_the_limit(tokens, num_ranks, rng):
    at = [frozenset(rng.sample(range(num_ranks), rng.randint(0, num_ranks))) for _ in tokens]
    ranks = ranks_of(tokens, num_ranks, at)
    assert sorted(u for rank in ranks for u in rank) == list(range(len(tokens)))
    limit = max(longest_first(tokens, num_ranks), (1 + SLACK) * sum(tokens) / num_ranks)
    assert max(loads_of(ranks, tokens)) <= limit
    assert ranks == ranks_of(tokens, num_ranks, at)


# -------------------------------------------------------------------------------------- cuts
@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 5), st.integers(0, 5))
def test_minibatches_are_an_even_cut_of_the_groups(num_groups, num_minibatches, seed, step):
    groups = [10 + 3 * i for i in range(num_groups)]
    cut = BatchCut(num_minibatches, 1, by_group=True)
    minibatches = cut_minibatches(groups, cut, seed, step)
    assert sorted(g for minibatch in minibatches for g in minibatch) == groups
    counts = [len(minibatch) for minibatch in minibatches]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert len(counts) == min(num_minibatches, num_groups)
    assert minibatches == cut_minibatches(groups[::-1], cut, seed, step)


def test_the_cut_changes_with_seed_and_step():
    groups, cut = list(range(32)), BatchCut(4, 1, by_group=False)
    cuts = {cut_minibatches(groups, cut, seed, step) for seed in range(3) for step in range(3)}
    assert len(cuts) == 9


@given(
    st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False)
)
def test_shards_follow_the_cut_and_keep_groups_whole(num_groups, num_minibatches, dp, by_group, rng):
    groups = {g: tuple(4 * g + i for i in range(4) if rng.random() < 0.9) for g in range(num_groups)}
    samples = [s for members in groups.values() for s in members]
    tokens = {s: rng.randint(1, 50) for s in samples}
    holders = {field: {s: frozenset({rng.randrange(dp)}) for s in samples} for field in FIELDS}
    cut = BatchCut(num_minibatches, 1, by_group)
    ranks = shards(rule(range(dp), by_group), cut, groups, columns(holders, tokens), seed=1, step=2)
    assert len(ranks) == dp
    for i, minibatch in enumerate(cut_minibatches(list(groups), cut, 1, 2)):
        mine = [s for rank in ranks for s in rank[i]]
        assert sorted(mine) == sorted(s for g in minibatch for s in groups[g])
    if by_group:
        homes = {(s // 4, d) for d, rank in enumerate(ranks) for minibatch in rank for s in minibatch}
        assert len(homes) == len({g for g, _ in homes})


def test_a_node_that_does_not_train_sees_one_minibatch_and_a_single_head_everything():
    groups, tokens = {0: (0, 1), 3: (6, 7)}, dict.fromkeys((0, 1, 6, 7), 5)
    holders = {field: dict.fromkeys(tokens, frozenset({1})) for field in FIELDS}
    assert shards(rule([2], policy="single"), None, groups, columns(holders, tokens), seed=0, step=0) == (
        ((0, 1, 6, 7),),
    )


# ------------------------------------------------------------------------------ redistribute
def test_held_fields_are_pruned_and_fields_with_the_same_ends_share_a_move():
    holders = {
        "s/a": {0: frozenset({0}), 1: frozenset({0})},
        "s/b": {0: frozenset({0}), 1: frozenset({0})},
        "s/c": {0: frozenset({0, 1}), 1: frozenset({1})},
    }
    moves = redistribute(rule([1], fields=("s/a", "s/b", "s/c")), (((0, 1),),), columns(holders), CLUSTER)
    assert moves.joined() == (Move(0, 1, (0, 1), ("s/a", "s/b")),)


def test_a_source_on_the_same_machine_is_preferred_then_the_least_loaded():
    near = {"s/a": {0: frozenset({1, 7})}}
    assert redistribute(rule([6], fields=["s/a"]), (((0,),),), columns(near), CLUSTER).sources == {7}
    even = {"s/a": {s: frozenset({0, 1}) for s in range(6)}}
    moves = redistribute(rule([3], fields=["s/a"]), ((tuple(range(6)),),), columns(even), CLUSTER)
    assert {move.src: len(move.samples) for move in moves.joined()} == {0: 3, 1: 3}


def test_ranks_on_one_worker_receive_once():
    holders = {"s/a": {0: frozenset({2}), 1: frozenset({2})}}
    moves = redistribute(rule([0, 0], fields=["s/a"]), (((0,),), ((0, 1),)), columns(holders), CLUSTER)
    assert moves.joined() == (Move(2, 0, (0, 1), ("s/a",)),)


@st.composite
def batches(draw):
    num_workers, dp = 8, draw(st.integers(1, 4))
    heads = draw(st.permutations(range(num_workers)))[:dp]
    group_size, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    groups = {g: tuple(range(g * group_size, (g + 1) * group_size)) for g in range(num_groups)}
    samples = range(group_size * num_groups)
    tokens = {s: draw(st.integers(1, 40)) for s in samples}
    where = st.frozensets(st.integers(0, num_workers - 1), min_size=1, max_size=3)
    holders = {field: {s: draw(where) for s in samples} for field in FIELDS}
    return rule(heads, draw(st.booleans())), groups, tokens, holders


def stores_of(holders, tokens):
    """worker -> (field, sample) -> values, as the workers' stores would hold them."""
    stores = {worker: {} for worker in range(8)}
    for i, (field, at) in enumerate(holders.items()):
        for sample, workers in at.items():
            for worker in workers:
                stores[worker][field, sample] = np.full(tokens[sample], 100 * i + sample)
    return stores


@given(batches(), st.integers(1, 3))
def test_replaying_the_moves_gives_every_rank_what_it_reads(batch, num_minibatches):
    edge, groups, tokens, holders = batch
    cut = BatchCut(num_minibatches, 1, edge.by_group)
    assignment = shards(edge, cut, groups, columns(holders, tokens), seed=0, step=0)
    moves = redistribute(edge, assignment, columns(holders), CLUSTER)
    stores = stores_of(holders, tokens)
    before = {worker: set(store) for worker, store in stores.items()}
    arrived = Counter()
    for move in moves.joined():
        for key in ((field, sample) for field in move.fields for sample in move.samples):
            assert key in before[move.src], "sent by a worker that did not hold it"
            assert key not in before[move.dst], "sent to a worker that held it"
            stores[move.dst][key] = stores[move.src][key]
            arrived[move.dst, key] += 1
    assert set(arrived.values()) <= {1}, "moved twice"
    for head, minibatches in zip(edge.heads, assignment, strict=True):
        wanted = {(field, s) for minibatch in minibatches for s in minibatch for field in edge.fields}
        assert wanted <= set(stores[head])
        assert {key for worker, key in arrived if worker == head} <= wanted
        for field, s in wanted:
            np.testing.assert_array_equal(
                stores[head][field, s], np.full(tokens[s], 100 * FIELDS.index(field) + s)
            )


@given(batches())
def test_no_less_than_the_lower_bound_moves(batch):
    edge, groups, tokens, holders = batch
    assignment = shards(edge, None, groups, columns(holders, tokens), seed=0, step=0)
    nbytes = {field: {s: (i + 1) * tokens[s] for s in tokens} for i, field in enumerate(FIELDS)}
    moved = moved_bytes(redistribute(edge, assignment, columns(holders), CLUSTER).joined(), nbytes)
    capacity = max(sum(tokens[s] for s in rank[0]) for rank in assignment)
    assert moved >= lower_bound_bytes(edge, tokens, nbytes, columns(holders, tokens), capacity) >= 0


def moved_and_bound(edge, holders, tokens):
    groups = {s: (s,) for s in tokens}
    nbytes = {field: {s: 8 * tokens[s] for s in tokens} for field in edge.fields}
    assignment = shards(edge, None, groups, columns(holders, tokens), seed=0, step=0)
    moved = moved_bytes(redistribute(edge, assignment, columns(holders), CLUSTER).joined(), nbytes)
    capacity = max(sum(tokens[s] for s in rank[0]) for rank in assignment)
    return moved, lower_bound_bytes(edge, tokens, nbytes, columns(holders, tokens), capacity)


def test_the_bound_is_met_where_everything_is_in_place():
    tokens = dict.fromkeys(range(8), 10)
    holders = {field: {s: frozenset({s % 4}) for s in tokens} for field in FIELDS}
    assert moved_and_bound(rule(range(4)), holders, tokens) == (0, 0)


def test_the_bound_is_met_where_nothing_is():
    tokens = {s: 10 + s for s in range(8)}
    holders = {field: dict.fromkeys(tokens, frozenset({7})) for field in FIELDS}
    total = 8 * sum(tokens.values()) * len(FIELDS)
    assert moved_and_bound(rule(range(4)), holders, tokens) == (total, total)


def test_the_bound_is_met_where_one_rank_holds_all():
    tokens = dict.fromkeys(range(8), 10)
    holders = {field: dict.fromkeys(tokens, frozenset({0})) for field in FIELDS}
    three_quarters = 8 * 10 * 6 * len(FIELDS)
    assert moved_and_bound(rule(range(4)), holders, tokens) == (three_quarters, three_quarters)


def test_the_bound_is_met_at_a_single_head():
    tokens = dict.fromkeys(range(8), 10)
    holders = {field: {s: frozenset({s % 2}) for s in tokens} for field in FIELDS}
    half = 8 * 10 * 4 * len(FIELDS)
    assert moved_and_bound(rule([0], policy="single"), holders, tokens) == (half, half)


def test_little_more_than_the_bound_moves_from_scattered_samples():
    rng = np.random.default_rng(1)
    tokens = {s: int(x) + 1 for s, x in enumerate(rng.lognormal(6.0, 1.0, 512))}
    at = {s: frozenset({int(rng.integers(8))}) for s in tokens}
    moved, bound = moved_and_bound(rule(range(8)), dict.fromkeys(FIELDS, at), tokens)
    assert bound <= moved < 1.01 * bound


def test_moves_to_one_worker_are_one_message():
    rows = [Move(0, 1, (1,), ("s/a",)), Move(2, 1, (2,), ("s/a",)), Move(0, 1, (3, 5), ("s/b",))]
    rows.append(Move(1, 0, (4,), ("s/a",)))
    moves = Moves.of(rows)
    assert moves.joined() == tuple(rows)
    assert moves.sources == {0, 1, 2}
    by_destination = moves.by_destination()
    assert {dst: part.joined() for dst, part in by_destination.items()} == {0: (rows[3],), 1: tuple(rows[:3])}
    assert Moves.of(()).by_destination() == {}
    assert Moves.of(()).joined() == ()


# ------------------------------------------------------------------------------------- steps
def test_moves_are_classified_as_collectives():
    bcast = [Move(0, dst, (1, 2), ("s/a",)) for dst in (1, 2)]
    scatter = [Move(3, dst, (10 + dst,), ("s/a",)) for dst in (1, 2)]
    gather = [Move(src, 6, (20 + src,), ("s/a",)) for src in (4, 5)]
    steps = collective_steps([*gather, *bcast, *scatter])
    assert [(s.kind, s.root, s.sources, s.destinations) for s in steps] == [
        ("bcast", 0, (0,), (1, 2)),
        ("scatter", 3, (3,), (1, 2)),
        ("gather", 6, (4, 5), (6,)),
    ]
    assert steps[1].samples == (11, 12)


@given(batches())
def test_every_move_is_in_exactly_one_step(batch):
    edge, groups, tokens, holders = batch
    assignment = shards(edge, None, groups, columns(holders, tokens), seed=0, step=0)
    moves = redistribute(edge, assignment, columns(holders), CLUSTER).joined()
    in_steps = [move for step in collective_steps(moves) for move in step.moves]
    assert Counter(in_steps) == Counter(moves)
