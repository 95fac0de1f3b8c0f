"""Results of four real ranks (gloo) with megatron, which a test compares with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_kit as kit
import torch
import torch.distributed as dist

from hflow.models.settings import RankPosition
from hflow.training.megatron.device import prepare

prepare("cpu")

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402

from hflow.models.host_copy import HostCopies  # noqa: E402
from hflow.shapes.layout import Layout  # noqa: E402
from hflow.shapes.model_shape import is_in_fp32  # noqa: E402
from hflow.training.megatron import weight_export as weights  # noqa: E402
from hflow.training.megatron.hf_export import copy_stage  # noqa: E402
from hflow.training.megatron.model import Stage, build_stage  # noqa: E402
from hflow.training.megatron.parallel_state import ParallelState  # noqa: E402
from hflow.training.megatron.weight_export import held_blocks, named_weights  # noqa: E402


def run(rank: int, path: Path) -> None:
    """Run one of four ranks; it writes a file for each case."""
    weights.BUCKET_BYTES = 10_000  # several buckets for a model, and several pieces for its embedding
    store = dist.FileStore(str(path / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    groups = {ranks: dist.new_group(ranks) for ranks in (kit.FIRST, kit.SECOND)} | {kit.ALL: dist.group.WORLD}
    for _ in range(rank):  # Ranks have made unequal numbers of groups before.
        dist.new_group([rank], use_local_synchronization=True)
    for turn in kit.ROUNDS:
        for ranks, case in turn:
            if rank in ranks:
                compute(case, groups[ranks], path)
    side_by_side(groups, rank, path)
    torch.save(
        [coordinates(ParallelState.of(RankPosition(groups[kit.ALL], Layout(*sizes)))) for sizes in kit.GRIDS],
        path / f"{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def compute(case: kit.Case, group: Any, path: Path) -> None:
    """Write outputs, gradients and exported weights of a case."""
    stage = build_stage(kit.settings(case, path), ParallelState.of(RankPosition(group, Layout(*case.layout))))
    ddp = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        stage.module,
        pg_collection=stage.parallel.groups,
    )
    stage.config.finalize_model_grads_func = finalize_model_grads
    outputs = run_schedule(stage, ddp, kit.packs())
    gradients = {
        name: weight.main_grad if weight.requires_grad else weight
        for name, weight in stage.module.named_parameters()
    }
    results = {
        "norm": norm(stage),
        "gradients": {
            n: x.clone() for n, x in named_weights(stage, torch.float32, gradients) if not is_in_fp32(n)
        },
        "weights": [(n, x.clone()) for n, x in named_weights(stage)],
        "blocks": [(block.tensor, block.box, block.values.clone()) for block in held_blocks(stage)],
    }
    (path / "saved").mkdir(exist_ok=True)
    copy_stage(stage, path / "saved" / case.name, HostCopies(), file_bytes=20_000)()
    if stage.parallel.is_head:
        torch.save(outputs, path / f"{case.name}.outputs.pt")
    torch.save(results, path / f"{case.name}.{group.rank()}.pt")


def norm(stage: Stage) -> torch.Tensor:
    """Return the gradient norm over all ranks, by the rules of megatron's optimizer."""
    counted = [
        weight.main_grad.square().sum()
        for weight in stage.module.parameters()
        if weight.requires_grad
        and param_is_not_shared(weight)
        and param_is_not_tensor_parallel_duplicate(weight, stage.parallel.groups.tp)
    ]
    square = torch.stack(counted).sum()
    dist.all_reduce(square, group=stage.parallel.group)
    return square.sqrt()


def run_schedule(
    stage: Stage, model: Any, batches: list[kit.Pack], forward_only: bool = False
) -> list[torch.Tensor]:
    """Run megatron's schedule on the micro-batches; return outputs on the last stage."""
    outputs: list[torch.Tensor] = []

    def step(packs: Iterator[kit.Pack], model: Any) -> Any:
        pack = next(packs)
        result = model(**stage.inputs(pack.ids, pack.positions, pack.layout(stage.dtype)))
        return result, lambda hidden: loss(stage, pack, hidden, outputs)

    pipe = {"p2p_communicator": P2PCommunicator(stage.parallel.groups.pp, stage.config)}
    get_forward_backward_func(pp_size=stage.parallel.pipe, vp_size=None)(
        forward_step_func=step,
        data_iterator=[iter(batches)],
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,  # Exchanged for each micro-batch.
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=stage.parallel.groups,
        **(pipe if stage.parallel.pipe > 1 else {}),
    )
    return outputs


def loss(stage: Stage, pack: kit.Pack, hidden: torch.Tensor, outputs: list[torch.Tensor]) -> Any:
    """Return the weighted sum of the output. Each tensor rank sums its part of the vocabulary."""
    weights = kit.output_weights(pack, stage.head)
    if stage.head == "lm":
        output = stage.logits(hidden).whole().float()
        parts = [torch.empty_like(output) for _ in range(stage.parallel.tensor)]
        dist.all_gather(parts, output.detach().contiguous(), group=stage.parallel.groups.tp)
        outputs.append(torch.cat(parts, dim=-1))
        columns = weights[:, stage.vocab_start : stage.vocab_start + output.shape[1]]
        total = (output[:, : columns.shape[1]] * columns).sum()
    else:
        output = stage.module.output_layer(hidden)
        outputs.append(output.detach())
        total = (output * weights).sum()
    # Megatron divides gradients by the number of tokens; one token in the first micro-batch only.
    return total, torch.tensor(int(len(outputs) == 1)), {}


def coordinates(grid: ParallelState) -> dict[str, Any]:
    """Return a rank's coordinates and the ranks of its groups."""
    names = ("tp", "dp", "pp", "cp", "mp", "dp_cp", "tp_cp", "tp_dp_cp", "intra_dist_opt")
    ranks = {name: dist.get_process_group_ranks(getattr(grid.groups, name)) for name in names}
    ranks["same_data"] = dist.get_process_group_ranks(grid.same_data)
    ends = None if grid.groups.embd is None else dist.get_process_group_ranks(grid.groups.embd)
    num_groups = len(dist.distributed_c10d._world.pg_names)
    return {"at": tuple(grid.coords), "num_groups": num_groups, "embd": ends, **ranks}


def side_by_side(groups: dict[tuple[int, ...], Any], rank: int, path: Path) -> None:
    """Run an actor and a critic with different layouts on the same two ranks, in turns."""
    if rank not in kit.FIRST:
        return
    actor = build_stage(
        kit.settings(kit.CASES["qwen2 t2"], path),
        ParallelState.of(RankPosition(groups[kit.FIRST], Layout(1, 2, 1))),
    )
    shared = ParallelState.of(RankPosition(groups[kit.FIRST], Layout(1, 2, 1)))
    assert shared is actor.parallel, "models with the same ranks and layout share their groups"
    critic = build_stage(
        kit.settings(kit.CASES["value t2"], path),
        ParallelState.of(RankPosition(groups[kit.FIRST], Layout(1, 1, 2))),
    )
    assert critic.parallel is not actor.parallel
    for name, stage in (("actor", actor), ("critic", critic), ("actor again", actor)):
        outputs = forward(stage, kit.packs())
        if stage.parallel.is_head:
            torch.save(outputs, path / f"{name}.pt")
    alike = [kit.with_other_tokens(pack, sequence=1) for pack in kit.packs()]
    outputs = forward(actor, alike)
    if actor.parallel.is_head:
        torch.save(outputs, path / "other tokens.pt")


def forward(stage: Stage, packs: list[kit.Pack]) -> list[torch.Tensor]:
    """Return outputs without gradients."""
    stage.module.eval()
    with torch.no_grad():
        return run_schedule(stage, stage.module, packs, forward_only=True)
