"""One rank of many, without their memory: what it keeps and sends in a training step, beside the plan's.

Collectives return at once, and tensors have no storage. The rank builds a model and makes one training step
by the code of real runs. Values have no meaning. Every expert gets as many tokens as
every other. What is replaced stays so, so a process of its own is needed: run this file with cases as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import cost_kit
import memory_kit
import numpy as np
import torch
import torch.distributed as dist
import torch_kit as kit
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hflow.config.schema import LoraConfig
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.forecast.communicators import rank_groups
from hflow.planner.forecast.cost.flops import Work
from hflow.planner.forecast.cost.rank_collectives import Passes, train_collectives
from hflow.planner.forecast.cost.training import num_microbatches
from hflow.planner.models.descriptors import training_backend
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout, RankOrder
from hflow.shapes.model_shape import ModelShape
from hflow.training import rank_groups as training_groups
from hflow.training.fsdp import build
from hflow.training.fsdp.optimizer import local_shard
from hflow.training.interface import TrainShard
from hflow.training.loop.microbatches import _UNITS, MicrobatchSplitter
from hflow.training.loop.train import StepRecord
from hflow.training.megatron.device import prepare

LENGTHS = (512, 512, 512, 512)
OTHERS = "others"
"""Objects, and numbers of samples, which ranks agree on once a step. The planner leaves them out."""
NAMES = {
    "allgather_base": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "send": "message",
    "recv": "message",
    "allgather": OTHERS,
    "broadcast": OTHERS,
}
"""The name of a collective in torch -> in the result."""
MAX_OTHERS = 1 << 20
"""The most bytes of `OTHERS`."""
FEW_BYTES = 0.01
"""Fraction of a kind's bytes by which both may differ: the planner leaves norms, biases and padding out."""


@dataclass(frozen=True)
class Case:
    """A rank of a replica, and what its model computes."""

    backend: str
    layout: str
    rank: int
    architecture: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `models.NAME`."""

    @property
    def asked(self) -> dict[str, Any]:
        """The settings with their defaults here."""
        asked = {"dtype": "bf16", "sequence_parallel": False, **self.settings}
        return asked | ({"lora": LoraConfig(**asked["lora"])} if "lora" in asked else {})


Figures = dict[str, Any]
"""Bytes of `weights`, `gradients` and `optimizer`, `groups`, and `collectives`: kind -> [number, bytes]."""


# ------------------------------------------------------------------------------ planned
def shape_of(case: Case) -> ModelShape:
    """Return the sizes of a case's model."""
    shape = read_shape(case.architecture)
    assert shape is not None
    return shape


def planned(case: Case) -> Figures:
    """Return the planner's figures for a rank."""
    layout, shape = Layout.parse(case.layout), shape_of(case)
    stage = layout.coords(RankOrder.TRAIN, case.rank)[2]
    asked = case.asked
    rank = memory_kit.rank(shape, case.layout, case.backend, stage=stage, on_cpu=False, **asked)
    kept = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for key, size in training_backend(case.backend).memory.model_state(rank).items():
        kept[key.category.value] += size
    replica = cost_kit.side(shape, case.layout, cost_kit.H100, case.backend, **asked)
    share = 1 / layout.context
    batch = kit.make_batch(list(LENGTHS))
    tokens, learned = sum(LENGTHS), int(batch.columns["loss_mask"].values.sum())
    work = Work(2, len(LENGTHS), tokens, tokens, learned, sum(n * n for n in LENGTHS)).share(share)
    num_passes = 3 if case.settings.get("activation_checkpointing") else 2
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    num = num_microbatches(replica, work)
    for one in train_collectives(replica, work, Passes.of(num, num_passes), stage):
        row = found["message" if one.kind == "send" else one.kind]
        row[0] += one.times
        row[1] += one.times * one.num_bytes
    collectives = {kind: [round(number), round(size)] for kind, (number, size) in found.items()}
    groups = rank_groups(layout, rank.traits, shape, case.rank)
    return {**kept, "collectives": collectives, "groups": len(groups)}


def differences(case: Case, found: Figures) -> list[str]:
    """Return where the planner's figures are not those of the rank."""
    wanted, texts = planned(case), []
    for name in ("weights", "gradients", "optimizer", "groups"):
        if abs(found[name] - wanted[name]) > 1e-3 * max(wanted[name], 1):  # blocks are padded
            texts.append(f"{name}: planned {wanted[name]:,}, found {found[name]:,}")
    for kind in sorted({*wanted["collectives"], *found["collectives"]}):
        planned_row, row = (figures["collectives"].get(kind, [0, 0]) for figures in (wanted, found))
        if kind == OTHERS and row[1] <= MAX_OTHERS:
            continue
        if planned_row[0] != row[0] or abs(planned_row[1] - row[1]) > FEW_BYTES * max(row[1], 1):
            texts.append(f"{kind}: planned {planned_row}, found {row} (number, bytes)")
    return texts


# ------------------------------------------------------------------------------- found
class Recorded(TorchDispatchMode):
    """Counts collectives and their bytes: those of the larger one of input and output.

    Those over a single rank, which megatron issues too, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func.namespace == "c10d" and all(
            group.size() > 1 for group in map(group_of, args) if group is not None
        ):
            name = func.name().removeprefix("c10d::").strip("_")
            row = self.found[NAMES.get(name, name)]
            row[0] += 1
            row[1] += max(map(num_bytes, args[:2]))
        return func(*args, **(kwargs or {}))


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of an operation is, if it is one."""
    is_object = isinstance(argument, torch.ScriptObject)
    if not is_object or not argument._type().qualified_name().endswith("ProcessGroup"):
        return None
    return dist.ProcessGroup.unbox(argument)


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors of a list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def torch_rank(settings: ModelSettings, position: RankPosition) -> tuple[Any, Any]:
    """Return a rank of the torch backend, and the function that returns the bytes that it keeps."""
    from hflow.training.fsdp.backend import TorchModel

    model = TorchModel(settings, position)

    def kept() -> dict[str, int]:
        optimizer = model._optimizer
        assert optimizer is not None
        states = [num_bytes(list(optimizer.states_of(weight, 2))) for weight in optimizer._weights]
        frozen = [local_shard(x.detach()) for x in model._model.parameters() if not x.requires_grad]
        weights = num_bytes(optimizer._shards) + num_bytes(frozen)
        return {"weights": weights, "gradients": 0, "optimizer": sum(states)}

    return model, kept


def megatron_rank(settings: ModelSettings, position: RankPosition) -> tuple[Any, Any]:
    """Return the same of the megatron backend."""
    prepare("cpu")
    replace_in_megatron()
    from hflow.training.megatron.backend import MegatronModel

    model = MegatronModel(settings, position)

    def kept() -> dict[str, int]:
        optimizer = model._optimizer
        assert optimizer is not None
        module = optimizer.module
        buffers = [*module.buffers, *module.expert_parallel_buffers]
        masters = [master.shard for master in optimizer.ranges.values()]
        states = [state for part in optimizer._parts for state in part.optimizer.state.values()]
        frozen = [weight for weight in module.parameters() if not weight.requires_grad]
        moments = [[state["exp_avg"], state["exp_avg_sq"]] for state in states]
        return {
            "weights": num_bytes(frozen) + sum(num_bytes(buffer.param_data) for buffer in buffers),
            "gradients": sum(num_bytes(buffer.grad_data) for buffer in buffers),
            "optimizer": num_bytes(masters) + num_bytes(moments),
        }

    return model, kept


@cache
def replace_in_torch() -> None:
    """Replace what needs values, or real tensors."""
    from_group = DeviceMesh.from_group

    def real_mesh(*args: Any, **options: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return from_group(*args, **options)

    training_groups._timeout_of = lambda group: timedelta(seconds=1)
    training_groups.RankGroups._equalize_counts = lambda self: None  # type: ignore[method-assign]
    DeviceMesh.from_group = staticmethod(real_mesh)  # type: ignore[method-assign]
    # Ranks agree on the number of their micro-batches, and on the samples and tokens of a minibatch.
    MicrobatchSplitter._agree = lambda self, merged, splits: [  # type: ignore[method-assign]
        [len(split), 0, *[1] * len(_UNITS)] for split in splits
    ]
    StepRecord.finish = lambda self, group: {}  # type: ignore[method-assign]  # metrics have no values
    add = build.add_adapter

    def real_adapters(*args: Any) -> None:
        with unset_fake_temporarily():  # peft swaps tensors, which fake ones refuse
            add(*args)

    build.add_adapter = real_adapters


@cache
def replace_in_megatron() -> None:
    """Do the same for the megatron backend."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.transformer.moe import token_dispatcher

    from hflow.training.megatron import checkpoint_reader, context_parallel

    draw = checkpoint_reader._drawn_adapters

    def real_adapters(*args: Any) -> dict[str, torch.Tensor]:
        with unset_fake_temporarily():  # peft swaps tensors, which fake ones refuse
            return draw(*args)

    checkpoint_reader._drawn_adapters = real_adapters

    @contextmanager
    def one_by_one(group: object, **options: object) -> Iterator[Any]:
        """Issue the collectives of a block, which here are one each, without coalescing them."""
        yield Done()

    class Done:
        def wait(self) -> None: ...

    param_and_grad_buffer._coalescing_manager = one_by_one
    # A mask needs values, and takes no memory of its own: it is a flag of the kernel.
    context_parallel.causal_lower_right = lambda num_queries, num_keys: None  # type: ignore[assignment]

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess = dispatcher.preprocess

    def evenly(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Exchange the numbers of tokens, and replace them by equal ones."""
        per_expert: torch.Tensor = preprocess(self, routing_map)
        num = self.num_out_tokens // self.num_experts * self.num_local_experts
        self.input_splits = self.output_splits = np.full(self.ep_size, num)
        self.output_splits_tp = None  # parts of equal size
        return per_expert

    def copied(tokens: torch.Tensor, routing_map: object, probs: Any, num_out_tokens: int, **_: Any) -> Any:
        rows = torch.zeros(num_out_tokens, dtype=torch.int64)
        return tokens.index_select(0, rows), probs.flatten()[:num_out_tokens], rows

    dispatcher.preprocess = evenly
    token_dispatcher.permute = copied
    token_dispatcher.sort_chunks_by_idxs = lambda x, *_, probs=None, **options: (x.clone(), probs)


def found(case: Case) -> Figures:
    """Return what a rank keeps and sends."""
    layout = Layout.parse(case.layout)
    dist.init_process_group("fake", rank=case.rank, world_size=layout.world, store=FakeStore())
    replace_in_torch()
    _, t, p, c = layout.coords(RankOrder.TRAIN, case.rank)
    settings = ModelSettings(
        name="actor",
        trainable=True,
        architecture=case.architecture,
        **{"tokens_per_microbatch": sum(LENGTHS), **case.asked},
    )
    position = RankPosition(dist.group.WORLD, layout)
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
    shard = TrainShard((kit.make_batch(list(LENGTHS)),))
    is_head = case.backend == "torch" or (t, p, c) == (0, layout.pipe - 1, 0)
    recorded = Recorded()
    with FakeTensorMode(allow_non_fake_inputs=True), recorded:
        made, kept = {"torch": torch_rank, "megatron": megatron_rank}[case.backend](settings, position)
        if not is_head:  # its head sends it nothing here
            runner = made._runner
            minibatches = runner.splitter.minibatches(call, [shard])
            module = sys.modules[type(runner).__module__]
            module.broadcast_minibatches = lambda *_: minibatches  # type: ignore[attr-defined]
        recorded.found.clear()
        made.train(call, [shard] if is_head else [], 0)
        figures: Figures = kept()
    groups = [dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map]
    num_groups = len({tuple(sorted(ranks)) for ranks in groups if len(ranks) > 1 and case.rank in ranks})
    boundaries = max(1, (p > 0) + (p < layout.pipe - 1))
    if messages := recorded.found.get("message"):  # the planner counts those over one boundary
        recorded.found["message"] = [count // boundaries for count in messages]
    dist.destroy_process_group()
    return {**figures, "collectives": dict(recorded.found), "groups": num_groups}


def main() -> None:
    for text in sys.argv[1:]:
        case = Case(**json.loads(text))
        print(json.dumps(found(case)), flush=True)


def as_json(case: Case) -> str:
    """Return a case as an argument of this file."""
    return json.dumps(dataclasses.asdict(case))


if __name__ == "__main__":
    main()
