"""Results of four real ranks (gloo) with `MegatronModel`; each rank writes its own to a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_twins as twins
import numpy as np
import torch
import torch.distributed as dist
import torch_kit as kit

from hflow.base.errors import HflowError
from hflow.data.batches.batch import Column
from hflow.models.settings import RankPosition
from hflow.shapes.layout import Layout, RankOrder
from hflow.training.interface import TrainShard
from hflow.training.loop.inputs import prepare_batch
from hflow.training.loop.microbatches import Minibatch
from hflow.training.megatron.device import prepare
from hflow.types import Unit

prepare("cpu")

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # noqa: E402

from hflow.training.megatron import optimizer as megatron_optimizer  # noqa: E402
from hflow.training.megatron.backend import MegatronModel  # noqa: E402
from hflow.training.megatron.parallel_state import ParallelState  # noqa: E402
from hflow.training.megatron.runner import broadcast_minibatches  # noqa: E402

Groups = dict[tuple[int, ...], Any]


def run(rank: int, path: Path, act: Callable[[int, Path, Groups], None]) -> None:
    """Join the world, run the rank's part, and leave the world."""
    store = dist.FileStore(str(path / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    groups = {ranks: dist.new_group(ranks) for ranks in (twins.FIRST, twins.SECOND)}
    act(rank, path, groups | {twins.ALL: dist.group.WORLD})
    dist.barrier()
    dist.destroy_process_group()


def model(twin: twins.Twin, path: Path, group: Any, **changes: Any) -> MegatronModel:
    settings = dataclasses.replace(kit.SETTINGS, **twins.settings(twin, path / "checkpoint") | changes)
    position = RankPosition(group, twin.layout)
    return MegatronModel(settings, position)


def place(twin: twins.Twin, group: Any) -> tuple[int, bool]:
    """Return the data index, and whether this rank is its head, by the order of ranks."""
    d, t, p, c = twin.layout.coords(RankOrder.TRAIN, group.rank())
    return d, t == c == 0 and p == twin.pipe - 1


@contextmanager
def late_gathers(are_late: bool) -> Iterator[None]:
    """Have new weights gathered only when they are waited for, so that using them earlier gives old ones."""
    start, finish = _ParamAndGradBucketGroup.start_param_sync, _ParamAndGradBucketGroup.finish_param_sync

    def wait(self: Any, force_sync: bool = False) -> None:
        """Do nothing; the bucket counts as not sent yet."""

    def gather(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        if not self.param_gather_dispatched:
            start(self, force_sync=True)

    if are_late:
        _ParamAndGradBucketGroup.start_param_sync = wait
        _ParamAndGradBucketGroup.finish_param_sync = gather
    yield
    _ParamAndGradBucketGroup.start_param_sync = start
    _ParamAndGradBucketGroup.finish_param_sync = finish


def train(rank: int, path: Path, groups: Groups) -> None:
    megatron_optimizer.BUCKET_PARAMETERS = twins.BUCKET_PARAMETERS
    train_rounds(rank, path, groups, twins.ROUNDS)
    if rank in twins.FIRST:
        train_on_nan(groups[twins.FIRST], path)
        start_in_bf16(groups[twins.FIRST], path)
    if rank == 0:
        train_alone(path)


def train_adapters(rank: int, path: Path, groups: Groups) -> None:
    megatron_optimizer.BUCKET_PARAMETERS = twins.BUCKET_ADAPTERS
    train_rounds(rank, path, groups, twins.ADAPTER_ROUNDS)


def train_families(rank: int, path: Path, groups: Groups) -> None:
    megatron_optimizer.BUCKET_PARAMETERS = twins.BUCKET_PARAMETERS
    train_rounds(rank, path, groups, twins.FAMILY_ROUNDS)


def train_families_often(rank: int, path: Path, groups: Groups) -> None:
    megatron_optimizer.BUCKET_PARAMETERS = twins.BUCKET_PARAMETERS
    train_rounds(rank, path, groups, twins.OFTEN_ROUNDS)


def train_rounds(rank: int, path: Path, groups: Groups, rounds: list[dict[tuple[int, ...], Any]]) -> None:
    for number, turn in enumerate(rounds):
        with late_gathers(number % 2 == 0):
            train_turn(rank, path, groups, turn)


def train_turn(rank: int, path: Path, groups: Groups, turn: dict[tuple[int, ...], twins.Twin]) -> None:
    for ranks, twin in turn.items():
        if rank in ranks:
            train_twin(twin, groups[ranks], path)


def train_twin(twin: twins.Twin, group: Any, path: Path) -> None:
    """Write the metrics of all steps, and the weights after them."""
    call, _ = twins.NODES[twin.node]
    d, is_head = place(twin, group)
    shards = twins.shards(twin.data, d) if is_head else []
    if twin.base_of:
        owner, backend = on_one_base(twin, group, path)
        before = inferred(owner.share_weights(frozen(owner)), twin, shards)
    else:
        backend = model(twin, path, group)
    metrics = []
    for step in twins.STEPS:
        metrics.append(backend.train(call, shards, step))
        if twin.base_of:
            owner.train(twins.NODES[twin.base_of][0], shards, step)
    if twin.base_of:
        for one in (owner, *([] if "critic" in twin.node else [backend])):
            after = inferred(one.share_weights(frozen(one)), twin, shards)
            assert all(map(np.array_equal, before, after))
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    torch.save((metrics, weights), path / f"{twin.name}.{group.rank()}.pt")
    if twin.pipe == 1:
        assert sum(map(len, backend._optimizer._buckets)) > 2
    if twin.dtype == "bf16" or "adapters" in twin.node:
        backend.save(str(path / f"{twin.name} saved"))()


def on_one_base(twin: twins.Twin, group: Any, path: Path) -> tuple[MegatronModel, MegatronModel]:
    """Return the models of a twin, of which the second uses the frozen weights of the first."""
    owner = model(dataclasses.replace(twin, node=twin.base_of), path, group)
    changes = twins.settings(twin, path / "checkpoint")
    if changes.get("offload") == "all":
        changes["offload"] = "optimizer"
    backend = owner.share_weights(dataclasses.replace(kit.SETTINGS, **changes))
    assert isinstance(backend, MegatronModel)
    held = dict(owner._stage.module.named_parameters())
    trained = {row.name for row in backend._stage.parameters}
    shared = {name for name, x in backend._stage.module.named_parameters() if x is held.get(name)}
    assert shared == dict(backend._stage.module.named_parameters()).keys() - trained
    return owner, backend


def frozen(backend: MegatronModel) -> Any:
    return dataclasses.replace(backend.settings, lora=None, trainable=False)


def inferred(backend: Any, twin: twins.Twin, shards: list[TrainShard]) -> list[np.ndarray]:
    """Return the log-probs of the first minibatch of a head's shards."""
    found = backend.infer(kit.LOGPROBS, [shard.minibatches[0] for shard in shards])
    return [batch.columns["result"].values for batch in found]


def train_on_nan(group: Any, path: Path) -> None:
    """Train with an input that is not finite on one of two data ranks; write every rank's error."""
    twin = twins.Twin("ppo", data=2)
    (shard,) = twins.shards(2, group.rank())
    first = shard.minibatches[0]
    if group.rank() == 1:
        nan = np.full(len(first), np.nan, np.float32)
        first = first.with_columns({"advantages": Column(Unit.SEQUENCE, nan)})
    shards = [TrainShard((first, *shard.minibatches[1:]))]
    message = refusal(lambda: model(twin, path, group).train(twins.NODES["ppo"][0], shards, 7))
    (path / f"nan.{group.rank()}").write_text(message)
    optim = dataclasses.replace(kit.SETTINGS.optim, on_nonfinite="skip")
    backend = model(twin, path, group, optim=optim)
    metrics = backend.train(twins.NODES["ppo"][0], shards, 7)
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    torch.save((metrics, weights), path / f"skipped.{group.rank()}.pt")


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except HflowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def start_in_bf16(group: Any, path: Path) -> None:
    """Save a bf16 model before any step."""
    twin = twins.Twin("sft", data=2, settings=twins.BF16)
    model(twin, path, group).save(str(path / "untouched"))()


def train_alone(path: Path) -> None:
    """Train in one process with the shards of all data indices."""
    call, _ = twins.NODES["ppo"]
    backend = model(twins.Twin("ppo"), path, None)
    shards = [*twins.shards(2, 0), *twins.shards(2, 1)]
    metrics = [backend.train(call, shards, step) for step in twins.STEPS]
    weights = {name: x.clone() for name, x in backend.weights()}
    torch.save((metrics, weights), path / "alone.pt")
    mask = Column(Unit.TOKEN, np.zeros(twins.batch().num_tokens, bool))
    nothing = twins.batch().with_columns({"loss_mask": mask})
    metrics = backend.train(call, [TrainShard((nothing, nothing.take([])))], 3)
    assert backend._optimizer is not None
    first, *_ = backend._optimizer._parts[0].state_dict()["optimizer"]["param_groups"]
    is_same = all(torch.equal(weights[name], x) for name, x in backend.weights())
    torch.save((metrics, first["step"], is_same), path / "nothing.pt")


def infer(rank: int, path: Path, groups: Groups) -> None:
    for turn in twins.INFER_ROUNDS:
        for ranks, twin in turn.items():
            if rank in ranks:
                infer_twin(twin, groups[ranks], path)
    receive(groups[twins.ALL], path)
    if rank in twins.FIRST:
        fail(twins.Twin("sft", tensor=2), groups[twins.FIRST], path)
    patience = timedelta(seconds=3)
    pair = dist.new_group(list(twins.SECOND), timeout=patience)
    if rank in twins.SECOND:
        fail(twins.Twin("sft", pipe=2), pair, path)


def infer_twin(twin: twins.Twin, group: Any, path: Path) -> None:
    """Write the results of each call, on every rank."""
    d, is_head = place(twin, group)
    shards = twins.infer_shards(twin.data, d) if is_head else []
    _, head = twins.NODES[twin.node]
    backend = model(twin, path, group, trainable=False)
    calls = twins.CALLS[head.get("head", "lm")]
    results = {name: backend.infer(call, shards) for name, call in calls.items()}
    torch.save(results, path / f"{twin.name}.{group.rank()}.pt")


def receive(group: Any, path: Path) -> None:
    """Write the minibatches that each of four ranks receives."""
    grid = ParallelState.of(RankPosition(group, Layout(data=1, tensor=2, pipe=2)))
    whole = prepare_batch(twins.batch(), "lm")
    mine = [Minibatch((whole.take([0, 1]), whole.take([2])), 3, {Unit.TOKEN: 7})] if grid.is_head else None
    torch.save(broadcast_minibatches(grid, mine, torch.device("cpu")), path / f"received.{group.rank()}.pt")


def fail(twin: twins.Twin, group: Any, path: Path) -> None:
    """Run a body that raises; write every rank's error."""
    d, is_head = place(twin, group)
    shards = twins.shards(twin.data, d) if is_head else []
    backend = model(twin, path, group)
    try:
        backend.train(twins.FAILING, shards, 0)
    except (HflowError, RuntimeError, ZeroDivisionError) as error:
        (path / f"failed {twin.name}.{group.rank()}").write_text(f"{type(error).__name__}: {error}")
