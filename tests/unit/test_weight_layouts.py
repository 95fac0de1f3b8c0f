"""New weights from any training layout to any engine layout: published, received, loaded and checked."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import plan_graphs as graphs
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from model_configs import model_config
from test_weight_loading import Rank
from torch import Tensor

from hflow.planner.compile import compile_plan
from hflow.planner.plan.routing import rank_order, tensor_ranks
from hflow.planner.plan.rows import Plan, Replica
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import rank_tensors
from hflow.shapes.model_shape import Experts, ModelShape, tensors
from hflow.types.tensor_slices import Block, Box, slices_within, whole_box
from hflow.weights import incoming as incoming_module
from hflow.weights.checksum import MODULUS
from hflow.weights.delta import DeltaReceiver
from hflow.weights.loading import load_verified
from hflow.weights.publisher import WeightPublisher, WorkerRoutes, channel_settings

SHAPE = ModelShape("qwen2", 3, 8, 16, 4, 2, 4, 70, is_tied=False, has_qkv_bias=True)
TIED = ModelShape("llama", 3, 8, 16, 4, 1, 4, 70, is_tied=True)
MIXED = ModelShape("qwen3_moe", 3, 8, 16, 4, 2, 4, 70, is_tied=False, experts=Experts(4, 2, 4, first=1))
"""With experts in all layers but the first."""
FUSED = ModelShape("glm4", 3, 8, 16, 4, 2, 4, 70, is_tied=False, has_qkv_bias=True, has_post_norms=True)
"""With gate and up in one matrix, of which tensor ranks have two boxes."""
TRAINERS = [
    ("torch", "d1"),
    ("torch", "d3"),
    ("megatron", "d2t2"),
    ("megatron", "t2p2"),
    ("megatron", "d2p3"),
    ("megatron", "t4"),
    ("megatron", "d2e2"),
    ("megatron", "d2t2e2"),
]
ENGINES = [
    ("vllm", "d1"),
    ("vllm", "d2"),
    ("vllm", "t2"),
    ("vllm", "d2t2"),
    ("vllm", "t4"),
    ("embedded", "d2"),
]
NUM_DEVICES = 10


@dataclass
class Shard:
    """What a training backend shows of its weights."""

    values: dict[str, Tensor]
    boxes: list[tuple[str, Box]]
    dtype: torch.dtype

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def blocks(self) -> Iterator[Block]:
        for name, box in self.boxes:
            whole = self.values[name]
            shape = tuple(whole.shape)
            yield Block(name, shape, box, whole[slices_within(box, whole_box(shape))])


def boxes_of(shape: ModelShape, replica: Replica) -> dict[int, list[tuple[str, Box]]]:
    """Worker -> the boxes that its rank holds."""
    order, layout = rank_order(replica.role), replica.layout
    return {
        worker: [
            (spec.name, box)
            for spec, box in rank_tensors(shape, traits(replica.backend), layout, layout.coords(order, index))
        ]
        for index, worker in enumerate(replica.workers)
    }


def compiled(shape: ModelShape, trainer: tuple[str, str], engine: tuple[str, str], **asked: Any) -> Plan:
    config = model_config(
        backend=trainer[0], layout=trainer[1], engine=engine[0], gen_layout=engine[1], **asked
    )
    request = graphs.request(f"cpu-1x{NUM_DEVICES}", models={"actor": config}, shapes={"actor": shape})
    return compile_plan(graphs.grpo(), request)


def publishers(plan: Plan, shards: dict[int, Any], directory: str) -> dict[int, WeightPublisher]:
    """A publisher for each worker, as each has in its process."""
    (route,) = plan.weights
    return {
        worker: WeightPublisher(
            WorkerRoutes(plan, (worker,), {route.src: shards[worker]} if worker in shards else {}),
            channel_settings(plan, (worker,), directory, "127.0.0.1", 60.0),
            "cpu",
        )
        for worker in range(NUM_DEVICES)
    }


IN_BF16 = {"is_apart": False, "transport": "disk", "delta": False, "dtype": "bf16"}


@example(shape=SHAPE, trainer=("megatron", "t4"), engine=("vllm", "d2t2"), order=(0, 2, 1, 3), **IN_BF16)
@example(shape=SHAPE, trainer=("megatron", "d2t2"), engine=("vllm", "t4"), order=(0, 2, 1, 3), **IN_BF16)
@example(shape=FUSED, trainer=("megatron", "d2t2"), engine=("vllm", "t4"), order=(0, 2, 1, 3), **IN_BF16)
@example(
    shape=MIXED,
    trainer=("megatron", "d2t2e2"),
    engine=("embedded", "d2"),
    order=None,
    **IN_BF16 | {"is_apart": True},
)
@settings(max_examples=15)
@given(
    shape=st.sampled_from([SHAPE, TIED, MIXED, FUSED]),
    trainer=st.sampled_from(TRAINERS),
    engine=st.sampled_from(ENGINES),
    is_apart=st.booleans(),
    transport=st.sampled_from(["shared", "disk"]),
    delta=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
    order=st.none(),
)
def test_every_rank_of_an_engine_holds_what_was_trained(
    shape: ModelShape,
    trainer: tuple[str, str],
    engine: tuple[str, str],
    is_apart: bool,
    transport: str,
    delta: bool,
    dtype: str,
    order: tuple[int, ...] | None,
) -> None:
    """Three versions, of which the last differs from the one before in a few entries.

    Expert ranks are those of models with experts only.

    `order` has the devices of the engines' ranks, if it is known.
    """
    assume(shape is MIXED or "e" not in trainer[1])
    apart = {"group": "a", "gen_group": "b"} if is_apart or engine[0] == "embedded" else {}
    plan = compiled(shape, trainer, engine, transport=transport, delta=delta, dtype=dtype, **apart)
    (route,) = plan.weights
    assert (route.how, route.transport, route.delta) == ("pull", transport, delta)
    src, dst = plan.replica(route.src), plan.replica(route.dst)
    assert order in (None, dst.workers)
    sent_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    values = {spec.name: torch.empty(spec.shape) for spec in tensors(shape)}
    shards = {w: Shard(values, boxes, sent_dtype) for w, boxes in boxes_of(shape, src).items()}
    held = boxes_of(shape, dst)
    changes: dict[int, DeltaReceiver] = {}
    """Of each rank of an engine, which are processes of their own in a run."""
    with tempfile.TemporaryDirectory() as directory:
        ends = publishers(plan, shards, directory)
        for version in range(3):
            for seed, (name, whole) in enumerate(values.items()):
                if version < 2:
                    whole.copy_(
                        torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed + version))
                    )
                elif "norm" in name:
                    whole[1] += 1.0
            published = {worker: ends[worker].publish(dst.name, version) for worker in src.workers}
            reports = [report for _, report in published.values()]
            sent: Counter[int] = Counter()
            for report in reports:
                sent.update(report.checksums)
                assert (report.base is not None) == (delta and version > 0)
            for head in dst.heads:
                ranks = tensor_ranks(dst, head)
                arriving = ends[head].incoming(dst.name, [handles for handles, _ in published.values()])
                for worker, incoming in zip(ranks, arriving, strict=True):
                    boxes: dict[str, list[Box]] = {}
                    for name, box in held[worker]:
                        boxes.setdefault(name, []).append(box)
                    rank = Rank(boxes, sent_dtype)
                    with pytest.MonkeyPatch.context() as patch:
                        mine = changes.setdefault(worker, DeltaReceiver())
                        patch.setattr(incoming_module, "delta_receiver", lambda _, mine=mine: mine)
                        loaded = load_verified(incoming, rank.load, rank.held)
                    local = sum(loaded.local_checksums)
                    assert loaded.checksums == ((sent[worker] + local) % MODULUS,)
                    for name, views in rank.views.items():
                        for box, view in views:
                            cut = values[name][slices_within(box, whole_box(tuple(values[name].shape)))]
                            assert torch.equal(view, cut.to(sent_dtype)), name
                ends[head].loaded(dst.name)
            for worker in src.workers:
                ends[worker].free(dst.name)
            if delta and version == 2:
                assert (
                    0
                    < sum(report.num_bytes for report in reports)
                    < 0.1 * sum(report.whole_bytes for report in reports)
                )
        for end in ends.values():
            end.close()
