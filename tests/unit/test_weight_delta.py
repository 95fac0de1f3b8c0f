"""Changes of weights between two versions: exact, smaller where little has changed, and never misapplied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import whole_box
from hflow.weights.buckets import Bucket, pack_buckets, unpack_bucket, verify_bucket
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.delta import DeltaReceiver, DeltaSender

SHAPES = {"w": (40, 30), "b": (7,), "scale": (), "none": (0, 3)}
DTYPES = [torch.float32, torch.bfloat16, torch.bool]


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def packed(tensors: dict[str, Tensor]) -> Iterator[Bucket]:
    slices = [
        (WeightSlice(name, tuple(x.shape), whole_box(tuple(x.shape)), place), x)
        for place, (name, x) in enumerate(tensors.items())
    ]
    return pack_buckets(slices, 2000)


def send(sender: DeltaSender, tensors: dict[str, Tensor], version: int) -> list[Bucket]:
    sender.start(version)
    return [sender.encode((1,), bucket) for bucket in packed(tensors)]


def receive(receiver: DeltaReceiver, buckets: list[Bucket]) -> dict[str, Tensor]:
    arrived = {}
    for bucket in buckets:
        whole = receiver.decode(bucket)
        verify_bucket(whole)
        arrived |= {values.slice.tensor: values.values.clone() for values in unpack_bucket(whole)}
    return arrived


def assert_same(arrived: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert arrived.keys() == sent.keys()
    for name, tensor in sent.items():
        assert arrived[name].dtype is tensor.dtype
        assert torch.equal(arrived[name], tensor)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.sets(st.integers(0, 1199), max_size=40), max_size=4))
def test_any_changes_arrive_exactly(dtype: torch.dtype, changes: list[set[int]]) -> None:
    sender, receiver, tensors = DeltaSender("a"), DeltaReceiver(), weights(dtype)
    assert_same(receive(receiver, send(sender, tensors, 0)), tensors)
    for version, changed in enumerate(changes, start=1):
        sender.loaded()
        flat = tensors["w"].view(-1)
        for place in changed:
            flat[place] = not flat[place] if dtype is torch.bool else flat[place] + 1
        sent = send(sender, tensors, version)
        if dtype is torch.bfloat16:
            assert sum(bucket.num_bytes for bucket in sent) <= len(changed) * 6 or len(changed) > 300
        assert_same(receive(receiver, sent), tensors)


def test_what_changed_everywhere_is_sent_whole() -> None:
    sender, receiver = DeltaSender("a"), DeltaReceiver()
    receive(receiver, send(sender, weights(torch.float32), 0))
    sender.loaded()
    sent = send(sender, weights(torch.float32, seed=1), 1)
    assert [bucket.has_changes for bucket in sent] == [False, False]
    assert_same(receive(receiver, sent), weights(torch.float32, seed=1))


def test_weights_are_sent_whole_when_the_last_version_was_not_loaded() -> None:
    sender, tensors = DeltaSender("a"), weights(torch.float32)
    assert sender.start(0) is None
    send(sender, tensors, 0)
    assert sender.start(1) is None, "no receiver has loaded version 0"
    send(sender, tensors, 1)
    sender.loaded()
    assert sender.start(2) == 1
    assert {bucket.has_changes for bucket in send_started(sender, tensors)} == {True}


def send_started(sender: DeltaSender, tensors: dict[str, Tensor]) -> list[Bucket]:
    return [sender.encode((1,), bucket) for bucket in packed(tensors)]


def test_changes_to_another_version_are_refused() -> None:
    sender, receiver, tensors = DeltaSender("a"), DeltaReceiver(), weights(torch.float32)
    receive(receiver, send(sender, tensors, 0))
    sender.loaded()
    send(sender, tensors, 1)
    sender.loaded()
    late = send(sender, tensors, 2)
    with pytest.raises(RunError, match="changes since version 1 arrived, but the engine has version 0"):
        receiver.decode(late[0])
    with pytest.raises(RunError, match="changes since version 1 arrived, but the engine has version None"):
        DeltaReceiver().decode(late[0])


def test_a_change_that_is_lost_names_its_tensor() -> None:
    sender, receiver, tensors = DeltaSender("a"), DeltaReceiver(), weights(torch.bfloat16)
    receive(receiver, send(sender, tensors, 0))
    sender.loaded()
    tensors["w"][3, 4] += 1
    (bucket,) = send(sender, tensors, 1)[:1]
    bucket.payload[0] ^= 1
    with pytest.raises(RunError, match="of 'w' was received with checksum"):
        verify_bucket(receiver.decode(bucket))


@pytest.mark.parametrize("name", ["memory", "disk", "shared"])
def test_channels_carry_changes(name: str, tmp_path: Path) -> None:
    channel = make_channel(ChannelSettings(name, "a", str(tmp_path)))
    sender, receiver, tensors = DeltaSender("a"), DeltaReceiver(), weights(torch.bfloat16)
    for version in range(3):
        tensors["b"][version] += 1
        handles = [channel.send((1,), bucket) for bucket in send(sender, tensors, version)]
        assert_same(receive(receiver, [channel.receive(handle, 1) for handle in handles]), tensors)
        channel.free(handles)
        sender.loaded()
    channel.close()
