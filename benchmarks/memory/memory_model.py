"""The planner's memory model against the real peak of the torch backend and the embedded engine.

python -m benchmarks.memory.memory_model [--only TEXT]

Each case runs in fresh processes, one for each rank. Measured is the high-water mark of a process's
resident memory over the second to fourth step (scratch memory of libraries included), less what it held
before the model was built. glibc would keep freed pieces of its heap, so that peaks would
depend on what ran before: with MALLOC_MMAP_THRESHOLD_ every tensor is a mapping of its own, and resident
bytes are live bytes. The column `glibc` is measured without that setting, and so includes fragmentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib import harness, memory
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use
from hflow.config.schema import GenConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig, WorkloadConfig
from hflow.data.batches.batch import Batch, Column
from hflow.dsl import apply_overrides
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.graph.build import build_graph
from hflow.graph.ir import Read
from hflow.launch.planning.request import cluster_hardware
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.memory import memory_phases
from hflow.planner.plan.request import PlanRequest
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import num_parameters
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit

NUM_STEPS = 3
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {
    "10M": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6, "vocab_size": 6144},
    "33M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 12288},
    "92M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "vocab_size": 16384},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement. A sequence's first quarter is prompt."""

    phase: str
    size: str
    dtype: str = "fp32"
    recompute: bool = False
    dp: int = 1
    sequences: int = 16
    """On each rank."""
    tokens: int = 128
    """Of the longest sequence."""
    budget: int = 1 << 20
    """Tokens of a micro-batch."""
    varied: bool = False
    """Whether sequences are of different lengths, from a quarter of the longest on."""

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        parts = [self.phase, self.size, self.dtype, f"dp{self.dp}", f"{self.sequences}x{self.tokens}"]
        parts += ["recompute"] * self.recompute + ["varied"] * self.varied
        return " ".join(parts + ([f"budget {self.budget}"] if self.budget < 1 << 20 else []))

    @property
    def architecture(self) -> dict[str, Any]:
        """An HF configuration; the largest one has an output matrix of its own."""
        sizes = SHAPES[self.size]
        heads = sizes["hidden_size"] // 64
        attention = {
            "num_attention_heads": heads,
            "num_key_value_heads": heads // (2 if heads % 2 == 0 else 1),
        }
        tied = {"tie_word_embeddings": self.size != "92M", "max_position_embeddings": 4096}
        return {"model_type": "qwen2", **sizes, **attention, **tied}


def cases() -> list[Case]:
    """All cases of the result file."""
    found = []
    for size in SHAPES:
        for dtype in ("fp32", "bf16"):
            for recompute in (False, True):
                for dp in (1, 2):
                    found.append(Case("train", size, dtype, recompute, dp))
    for dp in (1, 2):
        found += [Case("train", "33M", recompute=r, dp=dp, sequences=32, budget=1024) for r in (False, True)]
        found += [Case("train", "33M", "bf16", dp=dp, sequences=4)]
        found += [
            Case("train", "33M", d, dp=dp, sequences=48, budget=2048, varied=True) for d in ("fp32", "bf16")
        ]
        found += [Case("infer", size, d, dp=dp) for size in SHAPES for d in ("fp32", "bf16")]
        found += [Case("save", size, dp=dp) for size in ("33M", "92M")]
    found += [Case("generate", size, d, sequences=32) for size in SHAPES for d in ("fp32", "bf16")]
    found += [
        Case("generate", "33M", sequences=64, tokens=512),
        Case("generate", "33M", sequences=4, tokens=1024),
    ]
    return found


WITH_GLIBC = (Case("train", "33M"), Case("train", "33M", "bf16"), Case("train", "33M", recompute=True))
"""Cases that are also measured with glibc's own thresholds."""


# ------------------------------------------------------------------------------- predicted
data = Dataset("train", prompt=Text, answer=Text)
actor, ref = Model("actor", trainable=True), Model("ref")


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


RECIPE = Recipe(
    "memory",
    data,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=1 << 20),
        score,
        use(nodes.ref_inf, ref),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
NODES = {"train": "actor_train", "infer": "ref_inf", "save": "save.actor", "generate": "generate"}
REPLICAS = {"train": "actor@train", "infer": "ref@infer", "save": "actor@train", "generate": "actor@gen"}


def predicted(case: Case) -> dict[str, int]:
    """The planner's items of the case's own replica, in the case's phase, on the device that needs most."""
    asked = ModelConfig(
        dtype=case.dtype,
        tokens_per_microbatch=case.budget,
        activation_checkpointing=case.recompute,
        group="train",
        gen=GenConfig(group="gen", max_running=case.sequences, max_model_len=case.tokens),
    )
    shape = read_shape(case.architecture)
    assert shape is not None
    config = RunConfig(name="memory", cluster=f"cpu-1x{case.dp + 1}", device_memory_gib=64)
    request = PlanRequest(
        *cluster_hardware(config, __file__),
        batch=case.sequences * case.dp // 2,
        num_steps=4,
        models={"actor": asked, "ref": asked},
        shapes={"actor": shape, "ref": shape},
        groups={"train": tuple(range(case.dp)), "gen": (case.dp,)},
        schedule=ScheduleConfig(max_concurrent=case.sequences * case.dp),
        workload=WorkloadConfig(case.tokens // 4, case.tokens * 3 / 4, 0.6 if case.varied else 0.0),
    )
    plan = compile_plan(build_graph(apply_overrides(RECIPE.spec(), {})), request)
    rows = [row for row in memory_phases(plan, request) if row.phase == NODES[case.phase]]
    items = []
    for row in rows:
        own = [item for item in row.resident if item.name.startswith(REPLICAS[case.phase])]
        items.append({item.name: item.num_bytes for item in (*own, *row.transient)})
    return max(items, key=lambda parts: sum(parts.values()))


# -------------------------------------------------------------------------------- measured
def peak_of(work: Callable[[], Any]) -> int:
    """The high-water mark over three calls."""
    memory.reset_peak()
    for _ in range(NUM_STEPS):
        work()
    return memory.resident("VmHWM")


def settings(case: Case, architecture: dict[str, Any]) -> ModelSettings:
    return ModelSettings(
        name="actor",
        trainable=case.phase != "infer",
        architecture=architecture,
        dtype=case.dtype,
        activation_checkpointing=case.recompute,
        tokens_per_microbatch=case.budget,
        optim=OptimConfig(lr=1e-5),
    )


def batch_of(case: Case, rank: int, vocab: int) -> Batch:
    rng = np.random.default_rng(rank)
    longest, count = case.tokens, case.sequences
    lengths = rng.integers(longest // 4 + 1, longest + 1, count) if case.varied else np.full(count, longest)
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mask = within >= longest // 4
    columns = {
        "input_ids": rng.integers(0, vocab, total),
        "loss_mask": mask,
        "behav_logprobs": np.where(mask, -9.0, 0.0).astype(np.float32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
    }
    ids = np.arange(count)
    return Batch(ids, ids // 2, lengths, {n: Column(Unit.TOKEN, v) for n, v in columns.items()})


def call_of(body: Any, unit: str, fields: dict[str, str], **options: Any) -> NodeCall:
    reads = tuple(
        Read(name, field, "gen", "gen", Unit.TOKEN, Unit.TOKEN, "tensor") for name, field in fields.items()
    )
    knobs = {"behav_weight_cap": None} if fields else {}
    returns = (("result", unit),)
    provided = body.__hflow__.signature.provided
    return NodeCall("node", body, reads, provided, returns, bool(fields), knobs, options)


TRAIN = call_of(
    nodes.actor_train,
    "token",
    {"behav_logprobs": "behav_logprobs", "prox_logprobs": "behav_logprobs", "advantages": "advantages"},
    reduce="token-mean",
)
INFER = call_of(nodes.ref_inf, "token", {})


def work_of(case: Case, architecture: dict[str, Any], position: RankPosition, rank: int) -> Callable[[], Any]:
    """What the case does again and again; the model is built and everything has happened once."""
    vocab = architecture["vocab_size"]
    if case.phase == "generate":
        return generation(case, architecture)
    model, batch = TorchModel(settings(case, architecture), position), batch_of(case, rank, vocab)
    if case.phase == "infer":
        work: Callable[[], Any] = lambda: model.infer(INFER, [batch])  # noqa: E731
    else:
        work = lambda: model.train(TRAIN, [TrainShard((batch,))], 0)  # noqa: E731
    work()
    if case.phase != "save":
        return work
    directory = tempfile.TemporaryDirectory()

    def save() -> None:
        model.save(directory.name)()

    save()
    return save


def generation(case: Case, architecture: dict[str, Any]) -> Callable[[], Any]:
    options = {"max_running": case.sequences, "max_model_len": case.tokens}
    engine = EmbeddedEngine(settings(case, architecture), options)
    rng, prompt = np.random.default_rng(0), case.tokens // 4

    def turn() -> None:
        for i in range(case.sequences):
            ids = rng.integers(0, architecture["vocab_size"], prompt) if i % 2 == 0 else ids  # noqa: F821
            engine.add(i, ids.tolist(), SamplingParams(max_tokens=case.tokens, seed=i))
        while engine.num_unfinished:
            engine.step()

    turn()
    return turn


def measure(case: Case, rank: int, store: str) -> None:
    """One rank of a case: print the bytes that it held at its peak."""
    torch.set_num_threads(1)
    position = RankPosition()
    if case.dp > 1:
        files = dist.FileStore(store, case.dp)
        dist.init_process_group(
            "gloo", store=files, rank=rank, world_size=case.dp, timeout=timedelta(minutes=5)
        )
        position = RankPosition(dist.group.WORLD, Layout(case.dp))
    warm = dataclasses.replace(case, sequences=4, tokens=32)
    work_of(warm, case.architecture | TINY, position, rank)()
    gc.collect()
    before = memory.resident("VmRSS")
    peak = peak_of(work_of(case, case.architecture, position, rank)) - before
    print(json.dumps({"peak": peak}), flush=True)
    if case.dp > 1:
        dist.barrier()
        dist.destroy_process_group()


def measured(case: Case, env: dict[str, str]) -> int:
    """The most that any rank of a case held, in fresh processes."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--case", json.dumps(dataclasses.asdict(case)), "--store", f"{directory}/store"]
        rows = memory.run_ranks(__spec__.name, options, case.dp, env)
    return max(int(row["peak"]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--case")
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    if args.case:
        measure(Case(**json.loads(args.case)), args.rank, args.store)
        return
    rows = []
    for case in cases():
        if args.only not in case.name:
            continue
        items, real = predicted(case), measured(case, memory.SEPARATE_TENSORS)
        row = {
            "case": case.name,
            "parameters": num_parameters(read_shape(case.architecture)),
            "measured_mib": round(real / memory.MIB, 1),
            "predicted_mib": round(sum(items.values()) / memory.MIB, 1),
            "error": round(sum(items.values()) / real - 1, 3),
        }
        if case in WITH_GLIBC:
            row["glibc_mib"] = round(measured(case, {}) / memory.MIB, 1)
        row["items_mib"] = {name: round(size / memory.MIB, 1) for name, size in items.items()}
        rows.append(row)
        print(
            f"{row['case']:55s} {row['measured_mib']:8.1f} {row['predicted_mib']:8.1f} {row['error']:+.1%}",
            flush=True,
        )
    worst = max(abs(row["error"]) for row in rows)
    print(f"{len(rows)} cases, the largest error {worst:.1%}")
    if not args.only:
        what = "peak resident bytes of one process (rank), second to fourth step, less those before the model"
        print(harness.write("memory-model", {"what": what, "largest_error": worst, "cases": rows}))


if __name__ == "__main__":
    main()
