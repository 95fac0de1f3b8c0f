"""Weight slices between workers: every receiver gets every entry of every tensor exactly once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from test_plan_weight_routes import (
    NOTHING,
    assert_same,
    cases,
    cluster,
    item_bytes,
    memories,
    replica,
    route_of,
    shape_of,
)

from hflow.planner.weights.weight_slices import WeightSlice, slices_to_keep, slices_to_send
from hflow.types.tensor_slices import slices_within


def at(piece: WeightSlice):
    return slices_within(piece.box, tuple((0, size) for size in piece.shape))


@given(cases())
@settings(max_examples=50)
def test_every_receiver_gets_every_entry_once(case):
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    source, target = memories(case.shape, case.src), memories(case.shape, case.dst)
    arrived = {worker: {} for worker in target}
    moved = 0

    def take(worker, giver, piece):
        values = source[giver][piece.tensor][at(piece)]
        assert values.size > 0
        assert (values != NOTHING).all(), "sent by a worker that did not hold it"
        whole = arrived[worker].setdefault(piece.tensor, np.full(piece.shape, NOTHING))
        assert (whole[at(piece)] == NOTHING).all(), "sent twice"
        whole[at(piece)] = values
        return item_bytes(piece.tensor) * values.size

    for sender in source:
        for receivers, slices in slices_to_send(route, case.machines, sender).items():
            assert sorted(set(receivers)) == list(receivers)
            assert sender not in receivers
            assert [piece.position for piece in slices] == sorted(piece.position for piece in slices)
            moved += sum(take(worker, sender, piece) for worker in receivers for piece in slices)
    for worker in target:
        mine = slices_to_keep(route, worker)
        assert [piece.position for piece in mine] == sorted(piece.position for piece in mine)
        for piece in mine:
            take(worker, worker, piece)
    for worker, memory in target.items():
        assert_same(arrived[worker], memory)
    assert route.moved_bytes == moved


@given(cases())
@settings(max_examples=50)
def test_all_workers_number_the_tensors_equally(case):
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    places = {}
    for worker in (*case.src.workers, *case.dst.workers):
        sent = slices_to_send(route, case.machines, worker)
        for piece in (
            *slices_to_keep(route, worker),
            *(piece for slices in sent.values() for piece in slices),
        ):
            assert places.setdefault(piece.tensor, (piece.position, piece.shape)) == (
                piece.position,
                piece.shape,
            )
    assert len({place for place, _ in places.values()}) == len(places)


def test_what_its_own_engine_needs_is_sent_apart():
    """Two workers hold halves, and two engines there need everything."""
    both = replica("train", "torch", "d2", (0, 1)), replica("gen", "vllm", "d2", (0, 1))
    route = route_of(*both, shape_of())
    assert [set(slices_to_send(route, cluster(), w, to_itself=True)) for w in (0, 1)] == [{(0, 1)}] * 2
    apart = replace(route, near="shared")
    for worker in (0, 1):
        sent = slices_to_send(apart, cluster(), worker, to_itself=True)
        assert sent.keys() == {(0,), (1,)}
        assert sent[0,] == sent[1,] == slices_to_keep(route, worker)
        assert slices_to_send(apart, cluster(), worker).keys() == {(1 - worker,)}


@pytest.mark.parametrize("num_engines", [1, 2])
def test_slices_for_several_engines_are_packed_once(num_engines):
    """Two FSDP ranks hold halves: each sends its half once, to all engines together."""
    src = replica("train", "torch", "d2", (0, 1))
    dst = replica("gen", "embedded", f"d{num_engines}", range(2, 2 + num_engines))
    route = route_of(src, dst, shape_of())
    for worker in (0, 1):
        assert list(slices_to_send(route, cluster(), worker)) == [tuple(range(2, 2 + num_engines))]
    assert slices_to_send(route, cluster(), 2) == {}
    assert slices_to_keep(route, 0) == []
