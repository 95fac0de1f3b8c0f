"""Models of real size on many ranks, without their memory: what a rank keeps and sends, beside the planner's.

python benchmarks/fake_ranks.py [--only TEXT]

Each case is one rank, alone in its process: collectives return at once, and tensors have no storage. It
builds a model of `configs/model` and makes one training step with one micro-batch, by the code of real runs.
Values have no meaning, and the norm of the gradient is not computed. Exits with 1 where the planner differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hflow.backends.common.train import StepRecord
from hflow.backends.interface import ModelSettings, RankPosition, TrainShard
from hflow.backends.megatron.device import prepare
from hflow.planner.architectures import read_shape
from hflow.planner.backends import training_backend
from hflow.planner.layout import Layout, RankOrder

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kits"))

import harness  # noqa: E402
import memory_kit  # noqa: E402
import torch_kit as kit  # noqa: E402

LENGTHS = [512, 512, 512, 512]
CASES = [
    ("torch", "d64", 0, "qwen2.5-7b"),
    ("torch", "d256", 0, "qwen2.5-32b"),
    ("torch", "d1024", 0, "qwen2.5-72b"),
    ("megatron", "d32t2", 0, "qwen2.5-7b"),
    ("megatron", "d8t2p2c2", 63, "qwen2.5-7b"),
    ("megatron", "d8t8p4", 0, "qwen2.5-72b"),
    ("megatron", "d32t8p4", 1023, "qwen2.5-72b"),
    ("megatron", "d8t8p8c2", 512, "qwen2.5-72b"),
]
"""Backend, layout, rank, model."""


class Collectives(TorchDispatchMode):
    """Counts collectives and their bytes: those of the larger one of input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func.namespace == "c10d":
            row = self.found[func.name().removeprefix("c10d::").strip("_")]
            row[0] += 1
            row[1] += max(map(num_bytes, args[:2]))
        return func(*args, **(kwargs or {}))


def num_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors of a list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def torch_rank(settings: ModelSettings, position: RankPosition) -> tuple[Any, Any]:
    """A rank of the torch backend, and the function that returns the bytes that it keeps."""
    from hflow.backends.torch_model.backend import TorchModel
    from hflow.backends.torch_model.optimizer import TorchOptimizer

    from_group = DeviceMesh.from_group

    def real_mesh(*args: Any, **options: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return from_group(*args, **options)

    DeviceMesh.from_group = staticmethod(real_mesh)  # type: ignore[method-assign]
    TorchOptimizer.gradient_norm = lambda self: 1.0  # type: ignore[method-assign]
    model = TorchModel(settings, position)

    def kept() -> dict[str, int]:
        optimizer = model._optimizer
        assert optimizer is not None
        states = [num_bytes(list(optimizer.moments(weight))) for weight in optimizer._weights]
        return {"weights": num_bytes(optimizer._shards), "gradients": 0, "optimizer": sum(states)}

    return model, kept


def megatron_rank(settings: ModelSettings, position: RankPosition) -> tuple[Any, Any]:
    """The same of the megatron backend."""
    prepare("cpu")
    from megatron.core.distributed import param_and_grad_buffer

    from hflow.backends.megatron import context_parallel, parallel_state
    from hflow.backends.megatron.backend import MegatronModel
    from hflow.backends.megatron.optimizer import MegatronOptimizer

    @contextmanager
    def one_by_one(group: object, **options: object) -> Iterator[Any]:
        """Issue the collectives of a block, which here are one each, without coalescing them."""
        yield Done()

    class Done:
        def wait(self) -> None: ...

    param_and_grad_buffer._coalescing_manager = one_by_one
    # A mask needs values, and takes no memory of its own: it is a flag of the kernel.
    context_parallel.causal_lower_right = lambda num_queries, num_keys: None  # type: ignore[assignment]
    parallel_state._Groups._equalize_counts = lambda self: None  # type: ignore[method-assign]
    parallel_state._timeout_of = lambda group: timedelta(seconds=1)

    def prepare_only(self: MegatronOptimizer) -> float:
        for part in self._parts:
            part.prepare_grads()
        return 1.0

    MegatronOptimizer.gradient_norm = prepare_only  # type: ignore[method-assign]
    model = MegatronModel(settings, position)

    def kept() -> dict[str, int]:
        optimizer = model._optimizer
        assert optimizer is not None
        masters = [master.shard for master in optimizer.ranges.values()]
        states = [state for part in optimizer._parts for state in part.optimizer.state.values()]
        moments = [list(state.values()) for state in states]
        return {
            "weights": sum(num_bytes(buffer.param_data) for buffer in optimizer.module.buffers),
            "gradients": sum(num_bytes(buffer.grad_data) for buffer in optimizer.module.buffers),
            "optimizer": num_bytes(masters) + num_bytes(moments),
        }

    return model, kept


def architecture_of(model: str) -> dict[str, Any]:
    """The config of a model."""
    return dict(yaml.safe_load((ROOT / "configs" / "model" / f"{model}.yaml").read_text())["architecture"])


def act_as_rank(backend: str, layout_text: str, rank: int, model: str) -> None:
    """Print what a rank keeps and sends."""
    layout = Layout.parse(layout_text)
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    StepRecord.finish = lambda self, group: {}  # type: ignore[method-assign]  # metrics have no values
    _, t, p, c = layout.coords(RankOrder.TRAIN, rank)
    settings = ModelSettings(
        "actor",
        architecture=architecture_of(model),
        trainable=True,
        dtype="bf16",
        sequence_parallel=False,
        tokens_per_microbatch=sum(LENGTHS),
    )
    sizes = (layout.data, layout.tensor, layout.pipe, layout.context)
    position = RankPosition(dist.group.WORLD, *sizes)
    call = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-mean")
    shard = TrainShard((kit.make_batch(LENGTHS),))
    is_head = backend == "torch" or (t, p, c) == (0, layout.pipe - 1, 0)
    collectives = Collectives()
    with FakeTensorMode(allow_non_fake_inputs=True), collectives:
        made, kept = {"torch": torch_rank, "megatron": megatron_rank}[backend](settings, position)
        if not is_head:  # its head sends it nothing here
            minibatches = made._runner.splitter.minibatches(call, [shard])
            sys.modules[type(made._runner).__module__].broadcast_minibatches = lambda *_: minibatches  # type: ignore[attr-defined]
        collectives.found.clear()
        made.train(call, [shard] if is_head else [], 0)
        found = kept()
    groups = [dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map]
    num_groups = sum(len(ranks) > 1 and rank in ranks for ranks in groups)
    print(json.dumps({**found, "collectives": collectives.found, "num_groups": num_groups}))


def planned(backend: str, layout_text: str, rank: int, model: str) -> dict[str, int]:
    """The planner's figures for the rank."""
    layout, shape = Layout.parse(layout_text), read_shape(architecture_of(model))
    assert shape is not None
    stage = layout.coords(RankOrder.TRAIN, rank)[2]
    of = memory_kit.rank(shape, layout_text, backend, stage=stage, on_cpu=False, dtype="bf16")
    items = training_backend(backend).memory.model_state(of)
    kept = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for key, size in items.items():
        kept[key.category.value] += size
    return kept


def differences(case: tuple[str, str, int, str], found: dict[str, Any]) -> list[str]:
    """Where the planner's figures are not those of the rank, up to what blocks are padded by."""
    return [
        f"{name}: planned {wanted:,}, found {found[name]:,}"
        for name, wanted in planned(*case).items()
        if abs(found[name] - wanted) > 1e-3 * max(wanted, 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        backend, layout, rank, model = args.rank
        act_as_rank(backend, layout, int(rank), model)
        return
    rows, wrong = [], []
    for case in CASES:
        text = " ".join(map(str, case))
        if args.only not in text:
            continue
        found = harness.run_once([sys.executable, __file__, "--rank", *map(str, case)])
        rows.append({"case": text, "planned": planned(*case), **found})
        wrong += [f"{text}: {difference}" for difference in differences(case, found)]
        print(text, json.dumps(found), flush=True)
    if not args.only:
        print(harness.write("fake-ranks", {"rows": rows}))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
