"""Logits of the megatron backend and of transformers: model families in layouts of 1, 2 and 4 ranks.

python -m benchmarks.accuracy.megatron_logits

Each family is a random fp32 checkpoint whose every weight, biases and norms too, is off its initial value.
Random sequences are packed for megatron; transformers computes them one by one, without packing and without
hflow. Ranks are processes that communicate over gloo. The largest absolute difference is reported.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.training.loop.inputs import PackedTokens, pack_tokens
from hflow.training.megatron.device import prepare
from hflow.types import Unit

prepare("cpu")

from hflow.training.megatron.model import Stage, build_stage  # noqa: E402
from hflow.training.megatron.parallel_state import ParallelState  # noqa: E402
from hflow.training.megatron.schedule import PipelineSchedule  # noqa: E402

VOCAB = 5000
"""Padded to 5,120 rows."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 48},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}
LAYOUTS = {"d1": (1, 1, 1), "t2": (1, 2, 1), "p2": (1, 1, 2), "t2p2": (1, 2, 2)}
NUM_PACKS, SEQUENCES, LONGEST = 3, 8, 160


def cases() -> list[tuple[str, bool]]:
    """Family, and whether its output matrix is the embedding."""
    return list(itertools.product(FAMILIES, (True, False)))


def name_of(family: str, is_tied: bool) -> str:
    """For people, and for directories."""
    return f"{family} {'tied' if is_tied else 'untied'}"


def packs() -> list[Batch]:
    """Micro-batches of random sequences of random lengths."""
    rng, made = np.random.default_rng(0), []
    for _ in range(NUM_PACKS):
        lengths = rng.integers(1, LONGEST + 1, SEQUENCES)
        ids, order = rng.integers(0, VOCAB, lengths.sum()), np.arange(SEQUENCES)
        made.append(Batch(order, order, lengths, {"input_ids": Column(Unit.TOKEN, ids)}))
    return made


def following(ids: Tensor) -> Tensor:
    """The token after each; after the last, the first."""
    return ids.roll(-1)


def write_checkpoint(family: str, is_tied: bool, path: Path) -> None:
    """A random checkpoint, and beside it what transformers computes from it."""
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], tie_word_embeddings=is_tied)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    results = []
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.05)
        for batch in packs():
            ids = torch.as_tensor(np.array(batch.columns["input_ids"].values))
            logits = torch.cat([model(part[None]).logits[0] for part in ids.split(batch.lengths.tolist())])
            picked = logits.log_softmax(-1).gather(-1, following(ids)[:, None])[:, 0]
            results.append((logits, picked))
    model.save_pretrained(path)
    torch.save(results, path / "expected.pt")


def run(rank: int, path: str) -> None:
    """One of four ranks: compute every case in every layout that it is part of."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(minutes=10))
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    for case, (layout, sizes) in itertools.product(cases(), LAYOUTS.items()):
        group = groups[int(np.prod(sizes))]
        if rank < int(np.prod(sizes)):
            compare(Path(path) / name_of(*case), layout, RankPosition(group, Layout(*sizes)))
    dist.barrier()
    dist.destroy_process_group()


def compare(path: Path, layout: str, position: RankPosition) -> None:
    """Leave the differences of one case in `LAYOUT.json`."""
    stage = build_stage(ModelSettings(name="actor", path=str(path)), ParallelState.of(position))
    stage.module.eval()
    micro = [pack_tokens(batch, stage.device, stage.dtype) for batch in packs()]
    schedule = PipelineSchedule(stage, stage.module)
    found = schedule.forward(micro, lambda tokens, hidden: outputs(stage, tokens, hidden))
    if not stage.parallel.is_head:
        return
    logits, logprobs, largest = [], [], []
    for (got, got_picked), (wanted, picked) in zip(found, torch.load(path / "expected.pt"), strict=True):
        logits.append(float((got[:, :VOCAB] - wanted).abs().max()))
        logprobs.append(float((got_picked - picked).abs().max()))
        largest.append(float(wanted.abs().max()))
    row = {"logits": max(logits), "logprobs": max(logprobs), "largest_logit": max(largest)}
    (path / f"{layout}.json").write_text(json.dumps(row))


def outputs(stage: Stage, tokens: PackedTokens, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """All logits `[T, V']` by every tensor rank's part of them, and the backend's own log-probs `[T]`."""
    rows = tokens.expand(hidden)
    source = stage.logits(rows)
    part = source.whole().float()
    parts = [torch.empty_like(part) for _ in range(stage.parallel.tensor)]
    dist.all_gather(parts, part.contiguous(), group=stage.parallel.groups.tp)
    return torch.cat(parts, dim=-1), source.logprobs_of(following(tokens.input_ids)[:, None])[:, 0]


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for family, is_tied in cases():
            write_checkpoint(family, is_tied, Path(directory) / name_of(family, is_tied))
        mp.spawn(run, (directory,), nprocs=4)
        for case, layout in itertools.product(cases(), LAYOUTS):
            path = Path(directory) / name_of(*case) / f"{layout}.json"
            rows.append({"model": name_of(*case), "layout": layout, **json.loads(path.read_text())})
    worst = {key: max(row[key] for row in rows) for key in ("logits", "logprobs")}
    tokens = sum(batch.num_tokens for batch in packs())
    config = {"sizes": SIZES, "families": FAMILIES, "dtype": "fp32", "sequences": NUM_PACKS * SEQUENCES}
    config |= {"tokens": tokens}
    print(harness.write("megatron-logits", {"worst": worst, "config": config, "rows": rows}))
    print("| model | " + " | ".join(LAYOUTS) + " |\n|-|" + "-|" * len(LAYOUTS))
    for case in cases():
        mine = [row for row in rows if row["model"] == name_of(*case)]
        cells = [f"{row['logits']:.1e}, {row['logprobs']:.1e}" for row in mine]
        print("| " + " | ".join([name_of(*case), *cells]) + " |")


if __name__ == "__main__":
    main()
