"""Peak memory of each rank while a model of a real one's sizes is loaded by four ranks, and written back.

python -m benchmarks.memory.load_memory [--dtype bf16] [--backend torch] [--model llama-3.2-1b]

A random checkpoint is written once, in files of 256 MiB. Four fresh processes (megatron: two tensor ranks,
two pipeline stages; torch: four data ranks; gloo) load it as a frozen language model, then save it in HF
layout. For each rank and phase:

- `rss`: the kernel's high-water mark of resident memory (VmHWM, reset before the phase), less what was
  resident before. It counts pages of the checkpoint's files that safetensors maps and the rank has touched
  (the page cache's own, one copy for all ranks, given up when memory is short).
- `private`: the same without file-backed pages, which is what a rank needs; sampled every millisecond.

For comparison: the bytes of the rank's shard, and of the whole model in its own dtype and in that of exports.
With MALLOC_MMAP_THRESHOLD_ every tensor is a mapping of its own, so that resident bytes are live bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from benchmarks.lib import harness, memory
from hflow.models.dtypes import DTYPES
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.training.fsdp.backend import TorchModel
from hflow.training.megatron.device import prepare

prepare("cpu")

from hflow.training.megatron.backend import MegatronModel  # noqa: E402
from hflow.training.megatron.hf_mapping import ShardPosition, backbone_shapes, rank_parameters  # noqa: E402
from hflow.training.megatron.supported_models import supported_shape  # noqa: E402

MODELS = Path(__file__).parents[2] / "configs" / "model"
LAYOUTS = {"megatron": (1, 2, 2), "torch": (4, 1, 1)}
"""Backend -> data, tensor and pipeline ranks."""
FILE_BYTES = 256 << 20


def config_of(model: str) -> Any:
    """The HF configuration."""
    architecture = dict(yaml.safe_load((MODELS / f"{model}.yaml").read_text())["architecture"])
    return AutoConfig.for_model(architecture.pop("model_type"), **architecture)


def write_checkpoint(path: Path, model: str, dtype: torch.dtype) -> int:
    """A random checkpoint in several files; the bytes of its tensors."""
    config = config_of(model)
    config.save_pretrained(path)
    shapes = backbone_shapes(supported_shape(config, "lm"))
    files: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def close() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(files[-1], path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(files[-1], name))
        files[-1] = {}

    for name, shape in shapes.items():
        if files[-1] and sum(map(size_of, (*files[-1].values(),))) > FILE_BYTES:
            close()
        files[-1][name] = torch.randn(shape, dtype=dtype).mul_(0.02)
    close()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.itemsize


PRIVATE = ("RssAnon", "RssShmem")


def peaks(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What the work returns, and the most that it held beyond what was held before."""
    highest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, memory.resident(*PRIVATE))

    memory.reset_peak()
    before, private = memory.resident("VmRSS"), memory.resident(*PRIVATE)
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    highest = max(highest, memory.resident(*PRIVATE))
    return result, {"rss": memory.resident("VmHWM") - before, "private": highest - private}


def measure(rank: int, directory: Path, dtype: str, backend: str) -> None:
    """One rank: print what loading and saving took."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(minutes=10))
    position = RankPosition(dist.group.WORLD, Layout(*LAYOUTS[backend]))
    Model = {"megatron": MegatronModel, "torch": TorchModel}[backend]
    Model(ModelSettings(name="tiny", architecture=TINY, dtype=dtype), position).save(
        str(directory / "tiny")
    )()
    settings = ModelSettings(name="actor", path=str(directory / "checkpoint"), dtype=dtype)
    model, load = peaks(lambda: Model(settings, position))
    _, saved = peaks(lambda: model.save(str(directory / "saved"))())
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "load": load, "save": saved}), flush=True)


TINY = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
"""Loaded and saved first, so that what libraries allocate once is not counted."""


def measured(directory: Path, dtype: str, backend: str) -> list[dict[str, Any]]:
    """Every rank's figures, from fresh processes."""
    options = ["--directory", str(directory), "--dtype", dtype, "--backend", backend]
    return memory.run_ranks(__spec__.name, options, math.prod(LAYOUTS[backend]), memory.SEPARATE_TENSORS)


def shard_bytes(rank: int, model: str, dtype: torch.dtype) -> int:
    """Of the parameters of a rank, a tied output matrix on the last stage included."""
    _, tensor, pipe = LAYOUTS["megatron"]
    rows = rank_parameters(
        supported_shape(config_of(model), "lm"), ShardPosition(rank % tensor, tensor, rank // tensor, pipe)
    )
    return sum(math.prod(row.shape) for row in rows) * dtype.itemsize


def check_same(directory: Path) -> None:
    """What was saved is what was loaded."""
    wanted, got = (
        {
            name: file.get_tensor(name)
            for path in sorted((directory / which).glob("*.safetensors"))
            for file in [safe_open(path, framework="pt")]
            for name in file.keys()  # noqa: SIM118
        }
        for which in ("checkpoint", "saved")
    )
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name].float(), got[name]) for name in wanted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--backend", default="megatron", choices=LAYOUTS)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a model of configs/model")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--rank", type=int)
    args = parser.parse_args()
    if args.rank is not None:
        measure(args.rank, args.directory, args.dtype, args.backend)
        return
    dtype = DTYPES[args.dtype]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        whole = write_checkpoint(directory / "checkpoint", args.model, dtype)
        rows = measured(directory, args.dtype, args.backend)
        check_same(directory)
    for row in rows:
        is_torch = args.backend == "torch"  # whose stored weights are fp32
        row["shard"] = whole // dtype.itemsize if is_torch else shard_bytes(row["rank"], args.model, dtype)
        print(json.dumps(in_mib(row)))
    model = {
        "name": args.model,
        "dtype": args.dtype,
        "layout": "d4" if args.backend == "torch" else "d1t2p2",
        "mib": whole / memory.MIB,
    }
    model["exported_fp32_mib"] = whole / dtype.itemsize * 4 / memory.MIB
    print(json.dumps(in_mib(model)))
    what = "bytes in MiB beyond what a rank held before the phase"
    suffix = "" if args.model == parser.get_default("model") else f"-{args.model}"
    rows_in_mib = [in_mib(row) for row in rows]
    print(
        harness.write(
            f"load-memory-{args.backend}{suffix}",
            {"what": what, "model": in_mib(model), "ranks": rows_in_mib},
        )
    )


def in_mib(row: dict[str, Any]) -> dict[str, Any]:
    """The same with bytes as MiB."""
    return {
        key: in_mib(value)
        if isinstance(value, dict)
        else round(value / memory.MIB, 1)
        if key in ("rss", "private", "shard")
        else round(value, 1)
        if isinstance(value, float)
        else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    main()
