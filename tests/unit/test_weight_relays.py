"""Broadcasts of several senders: few groups, one order at all receivers, and nothing that waits for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from channel_process import buckets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_weight_routes import cases, cluster, replica, route_of, shape_of

from hflow.planner.weights.weight_slices import Receivers, relays, slices_to_send, streams
from hflow.types.tensor_slices import box_shape
from hflow.weights import incoming
from hflow.weights.buckets import Bucket, SliceValues, assemble_tensors, pack_buckets, unpack_bucket
from hflow.weights.channels.collective.channel import CollectiveChannel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.incoming import IncomingWeights

Taken = tuple[int, Receivers, int]
"""Sender, receivers and number of a bucket in its stream."""


@given(cases(), st.sampled_from([1, 300, 5000]))
@settings(max_examples=50, deadline=None)
def test_receivers_take_buckets_in_an_order_in_which_none_waits_for_ever(case, bucket_bytes):
    """Each receiver takes what the real merge asks for. A broadcast needs all its members."""
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    sent: dict[tuple[int, Receivers], list[Bucket]] = {}
    for sender in case.src.workers:
        for receivers, slices in slices_to_send(route, case.machines, sender).items():
            values = ((piece, torch.zeros(box_shape(piece.box))) for piece in slices)
            sent[sender, receivers] = list(pack_buckets(values, bucket_bytes))
    assert sent.keys() == streams(route, case.machines)
    orders = {worker: _order(worker, sent) for worker in case.dst.workers}
    remaining = {worker: list(order) for worker, order in orders.items() if order}
    while remaining:
        ready = [
            bucket
            for bucket in {order[0] for order in remaining.values()}
            if all(remaining.get(worker, [None])[0] == bucket for worker in bucket[1])
        ]
        assert ready, "all receivers wait"
        for worker in ready[0][1]:
            remaining[worker].pop(0)
        remaining = {worker: order for worker, order in remaining.items() if order}


def _order(worker: int, sent: dict[tuple[int, Receivers], list[Bucket]]) -> list[Taken]:
    """The order in which a receiver takes its buckets."""
    order: list[Taken] = []

    def slices(stream: tuple[int, Receivers]) -> Iterator[SliceValues]:
        for number, bucket in enumerate(sent[stream]):
            order.append((*stream, number))
            yield from unpack_bucket(bucket)

    for _ in assemble_tensors([slices(stream) for stream in sent if worker in stream[1]]):
        pass
    return order


@given(cases())
@settings(max_examples=50)
def test_a_sender_is_in_no_group_with_another_and_relays_take_turns(case):
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    found = streams(route, case.machines)
    relay_of = relays(found, case.machines)
    for sender, receivers in found:
        relay = relay_of.get((sender, receivers))
        num_senders = sum(other == receivers for _, other in found)
        assert (relay is None) == (len(receivers) == 1 or num_senders == 1)
        assert relay is None or relay in receivers


@pytest.mark.parametrize(
    ("src", "dst", "machines", "most"),
    [
        (("torch", "d4", range(4)), ("d4", range(4, 8)), cluster(1, 8), 2),
        (("torch", "d8", range(8)), ("d24", range(8, 32)), cluster(4, 8), 2),
        (("torch", "d32", range(32)), ("d32", range(32, 64)), cluster(8, 8), 2),
    ],
)
def test_the_groups_of_an_engine_do_not_grow_with_the_number_of_senders(src, dst, machines, most):
    backend, layout, workers = src
    source = replica("train", backend, layout, workers)
    target = replica("gen", "vllm", *dst)
    found = streams(route_of(source, target, shape_of(hidden=64, intermediate=64), 2, machines), machines)
    relay_of = relays(found, machines)
    assert len(found) == len(workers)
    for worker in target.workers:
        assert 1 + sum(relay == worker for relay in relay_of.values()) <= most


SENDERS, RECEIVERS = range(4), (4, 5, 6)


def _received(channel: CollectiveChannel, worker: int, sent: Sequence[Sequence[Any]]) -> dict[str, Any]:
    arrived = IncomingWeights(channel._settings, worker, "cpu", sent)
    return {one.name: one.tensor.float().clone() for one in arrived}


def test_a_relay_takes_the_next_bucket_before_the_other_receivers_have_the_first() -> None:
    base = ChannelSettings("collective", "a", "", timeout=60)
    sender = CollectiveChannel(replace(base, relays=((RECEIVERS, 5),)))
    relay = CollectiveChannel(replace(base, owner="relay"))
    handles = [sender.send(RECEIVERS, one) for one in buckets(3)]
    for handle in (*handles[:2], *handles[:2]):
        relay.expect(handle, 5)
        relay.expect(handle, 4)  # which is not its relay
    assert list(relay._expected) == [(handle.address, handle.key) for handle in handles[:2]]
    for (payload, arriving), bucket in zip(relay._expected.values(), buckets(2), strict=True):
        arriving.wait()  # no other receiver takes part
        assert torch.equal(payload, bucket.payload)
    sender.close()
    relay.close()


def test_four_senders_and_three_receivers_have_few_groups_and_a_receiver_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real broadcasts by gloo, each worker on a thread."""
    machines = cluster(1, 8)
    relay_of = relays([(sender, RECEIVERS) for sender in SENDERS], machines)
    base = ChannelSettings("collective", "a", "", timeout=60)
    senders = [
        CollectiveChannel(replace(base, owner=f"s{i}", relays=((RECEIVERS, relay_of[i, RECEIVERS]),)))
        for i in SENDERS
    ]
    receivers = {worker: CollectiveChannel(replace(base, owner=f"r{worker}")) for worker in RECEIVERS}
    opened = lambda settings: next(one for one in receivers.values() if one._settings == settings)  # noqa: E731
    monkeypatch.setattr(incoming, "open_channel", opened)
    packed = buckets(12)
    wanted = {f"w{i}": next(unpack_bucket(one)).values.float() for i, one in enumerate(packed)}
    with ThreadPoolExecutor(3) as threads:
        for version in range(3):
            if version == 2:
                for channel in senders:
                    channel.forget_receivers()
                receivers[5] = CollectiveChannel(replace(base, owner="another"))
            sent = [
                [channel.send(RECEIVERS, one) for one in packed[i::4]] for i, channel in enumerate(senders)
            ]
            answers = [
                threads.submit(_received, channel, worker, sent) for worker, channel in receivers.items()
            ]
            for answer in answers:
                found = answer.result(timeout=120)
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for worker, channel in receivers.items():
        assert not channel._expected
        assert list(channel._groups_of_receivers) == [RECEIVERS]
        assert len(channel._groups) == sum(relay == worker for relay in relay_of.values())
    for channel in (*senders, *receivers.values()):
        channel.close()
