"""Small parts of workers: weights in buckets, pausable timeouts, the mailbox, error locations, metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.processes.error_location import error_with_location
from hflow.types import Sequences
from hflow.types.tensor_slices import numel
from hflow.weights.buckets import (
    IncomingTensor,
    SliceValues,
    assemble_tensors,
    pack_buckets,
    unpack_bucket,
    verify_bucket,
)
from hflow.weights.checksum import MODULUS, weights_checksum
from hflow.workers.bodies.batch_node_runner import reduce_metric
from hflow.workers.generation.generate_runner import PausableClock
from hflow.workers.interface import ComputeReady, Span, WorkerReport
from hflow.workers.mailbox import Mailbox, pause_seconds


def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "flags": torch.tensor([True, False, True]),
        "embed": torch.randn(7, 5),
        "half": torch.randn(3, 3).bfloat16(),
        "scale": torch.tensor(2.5),
        "transposed": torch.randn(4, 6).T,
        "steps": torch.arange(3),
    }


def contents(
    weights: dict[str, torch.Tensor], cuts: tuple[int, ...] = (0, 100)
) -> list[tuple[WeightSlice, torch.Tensor]]:
    """Rows between two cuts of every tensor; scalars belong to the first two."""
    found = []
    for place, (name, x) in enumerate(weights.items()):
        if x.dim() == 0 and cuts[0] == 0:
            found.append((WeightSlice(name, (), (), place), x))
        elif x.dim() and cuts[0] < len(x):
            rows = (cuts[0], min(len(x), cuts[1]))
            box = (rows, *((0, size) for size in x.shape[1:]))
            found.append((WeightSlice(name, tuple(x.shape), box, place), x[slice(*rows)]))
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_weights_arrive_bit_by_bit(bucket_bytes: int) -> None:
    sent = some_weights()
    buckets = list(pack_buckets(contents(sent), bucket_bytes))
    assert len(buckets) == {1: 6, 100: 3, 1 << 20: 1}[bucket_bytes]
    assert sum(bucket.num_bytes for bucket in buckets) == sum(x.nbytes for x in sent.values())
    for bucket in buckets:
        verify_bucket(bucket)
    assert_same(assemble_tensors([(row for bucket in buckets for row in unpack_bucket(bucket))]), sent)


def assert_same(incoming: Iterable[IncomingTensor], sent: dict[str, torch.Tensor]) -> None:
    """Assert that these tensors arrived, whole and in order."""
    arrived = list(incoming)
    assert [one.name for one in arrived] == list(sent)
    for name, tensor, boxes, checksums in arrived:
        assert tensor.dtype is sent[name].dtype
        assert torch.equal(tensor, sent[name])
        assert sum(map(numel, boxes)) == tensor.numel()
        assert sum(checksums) % MODULUS == weights_checksum({name: sent[name]})


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_slices_of_several_senders_make_tensors(bucket_bytes: int) -> None:
    """And of each sender a bucket is opened only when a tensor in it is next."""
    sent, opened = some_weights(), [0, 0]
    cuts = [(0, 2), (2, 100)]

    def stream(index: int) -> Iterator[SliceValues]:
        for bucket in pack_buckets(contents(sent, cuts[index]), bucket_bytes):
            opened[index] += 1
            yield from unpack_bucket(bucket)

    arriving = assemble_tensors([stream(0), stream(1)])
    first = next(arriving)
    assert opened == [2 if bucket_bytes == 1 else 1] * 2
    assert_same([first, *arriving], sent)


def test_boxes_say_what_arrived() -> None:
    sent = some_weights()
    half = contents({"embed": sent["embed"]}, (4, 7))
    ((name, tensor, boxes, _),) = assemble_tensors([[SliceValues.of(*one) for one in half]])
    assert (name, tensor.shape, boxes) == ("embed", (7, 5), (((4, 7), (0, 5)),))
    assert torch.equal(tensor[4:], sent["embed"][4:])


def test_a_timeout_pauses_while_the_engine_sleeps() -> None:
    async def main() -> tuple[bool, bool]:
        clock = PausableClock()

        async def episode() -> bool:
            try:
                async with clock.timeout(0.1):
                    await asyncio.sleep(60)
            except TimeoutError:
                return True
            return False

        task = asyncio.create_task(episode())
        await asyncio.sleep(0.2)
        asleep = task.done()
        clock.run()
        await asyncio.sleep(0.02)
        clock.pause()
        await asyncio.sleep(0.2)
        paused = task.done()
        clock.run()
        assert await asyncio.wait_for(task, 60)
        return asleep, paused

    assert asyncio.run(main()) == (False, False)


def test_a_timeout_of_none_never_ends_the_block() -> None:
    async def main() -> None:
        clock = PausableClock()
        clock.run()
        async with clock.timeout(None) as timeout:
            await asyncio.sleep(0)
        assert not timeout.expired()

    asyncio.run(main())


def test_a_poll_takes_all_that_happened() -> None:
    mailbox = Mailbox(3)
    span = Span("train", "device", 0.0, 1.0)
    mailbox.add_span(span)
    found: list[WorkerReport] = []
    waiting = threading.Thread(target=lambda: found.append(mailbox.wait()))
    waiting.start()
    mailbox.put([ComputeReady("score", 1), ComputeReady("score", 2)])
    waiting.join(timeout=60)
    assert found == [WorkerReport(3, (ComputeReady("score", 1), ComputeReady("score", 2)), (span,))]
    mailbox.close()
    assert mailbox.wait() == WorkerReport(3, ())


def test_an_engine_s_turn_is_reported_without_an_event() -> None:
    mailbox = Mailbox(0, linger=0.0)
    asleep, turn = Span("sleep", "weights", 0.9, 1.0), Span("generate actor@gen", "generate", 0.0, 1.0)
    mailbox.add_span(asleep)
    mailbox.add_span(turn)
    assert mailbox.wait() == WorkerReport(0, (), (asleep, turn))


def test_an_event_waits_for_those_that_are_to_come() -> None:
    mailbox = Mailbox(0, linger=600.0)
    mailbox.expect(3)
    mailbox.put([ComputeReady("score", 1)])
    found: list[WorkerReport] = []
    waiting = threading.Thread(target=lambda: found.append(mailbox.wait()))
    waiting.start()
    mailbox.put([ComputeReady("score", 2), ComputeReady("score", 3)])
    waiting.join(timeout=60)
    assert [event.key for event in found[0].events] == [1, 2, 3]


def test_an_event_waits_a_moment_only() -> None:
    mailbox = Mailbox(0, linger=0.0)
    mailbox.expect(2)
    mailbox.put([ComputeReady("score", 1)])
    assert mailbox.wait() == WorkerReport(0, (ComputeReady("score", 1),))


def test_workers_together_send_a_thousand_messages_a_second() -> None:
    assert [num / pause_seconds(num) for num in (2, 128, 1024)] == pytest.approx([1000] * 3)


def test_a_report_that_follows_another_waits_for_more_and_one_after_a_quiet_time_does_not() -> None:
    mailbox = Mailbox(0, pause=600.0, linger=0.0)
    mailbox.expect(4)
    mailbox.put([ComputeReady("score", 1)])
    assert [event.key for event in mailbox.wait().events] == [1]
    mailbox.put([ComputeReady("score", 2)])
    found: list[WorkerReport] = []
    waiting = threading.Thread(target=lambda: found.append(mailbox.wait()))
    waiting.start()
    mailbox.put([ComputeReady("score", 3), ComputeReady("score", 4)])
    waiting.join(timeout=60)
    assert [event.key for event in found[0].events] == [2, 3, 4]


def test_a_failed_thread_is_reported_by_every_poll() -> None:
    mailbox = Mailbox(0)
    mailbox.fail(RunError("the pool stopped"))
    for _ in range(2):
        with pytest.raises(RunError, match="the pool stopped"):
            mailbox.wait()


def test_blame_points_into_the_body() -> None:
    def body() -> None:
        np.zeros(3).reshape(2)

    with pytest.raises(ValueError, match="reshape") as caught:
        body()
    line = body.__code__.co_firstlineno + 1
    text = error_with_location(caught.value, body)
    assert text.startswith("ValueError: cannot reshape array")
    assert text.endswith(f"({Path(__file__).relative_to(Path.cwd())}:{line})")


def test_per_token_metrics_are_reduced_over_learned_tokens() -> None:
    seqs = Sequences.of([2, 3], loss_mask=[False, True, False, True, True])
    tokens = torch.tensor([9.0, 1.0, 9.0, 2.0, 6.0])
    assert reduce_metric("kl", tokens, seqs) == 3.0
    assert reduce_metric("kl.max", tokens, seqs) == 6.0
    assert reduce_metric("kl.min", tokens, seqs) == 1.0
    assert reduce_metric("kl.sum", tokens, seqs) == 9.0
    assert reduce_metric("share", torch.tensor([True, False]), seqs) == 0.5
    assert reduce_metric("beta", torch.tensor(0.25), seqs) == 0.25
