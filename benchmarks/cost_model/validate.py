"""The cost model against published measurements, with the shipped calibrations.

python benchmarks/cost_model/validate.py [--save] [--rows SOURCE]

Each source is a CSV file in `data/`, with its citation in front. Rows are marked `fitted` (the shipped
calibrations were chosen with them) or `held out` (nothing was). An error is |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from hflow.config.compose import config_dir
from hflow.config.schema import GenConfig, ModelConfig
from hflow.launch.plan_request import device_calibration, known_devices, known_links
from hflow.planner.architectures import read_shape
from hflow.planner.backends import traits
from hflow.planner.calibration import HostTimes
from hflow.planner.cost.collectives import RankPlacement, send
from hflow.planner.cost.flops import Work, kv_entries, stage_parameters, work_of
from hflow.planner.cost.generation import (
    RolloutRequest,
    decode_collectives,
    decode_step,
    generate,
    prefill,
)
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.training import forward, train
from hflow.planner.cost.transfers import load_weights
from hflow.planner.hardware import GIB, Hardware
from hflow.planner.ir import RouteRow, WeightRoute
from hflow.planner.layout import Layout
from hflow.planner.model_shape import ModelShape
from hflow.planner.workload import Workload

HERE = Path(__file__).parent
Row = Mapping[str, str]
TARGETS = {"training": 0.10, "decode": 0.12, "RL step": 0.20, "gain by staleness": 0.10, "weight sync": 0.40}

MPT = {  # layers, hidden, heads: scripts/train/yamls/pretrain of LLM Foundry; its counts of parameters agree
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
TRITON_ATTENTION = {"h100": 0.158, "a100": 0.283}
"""Fraction of the data sheet that LLM Foundry's own attention kernels reach, fitted to its fitted rows."""
LEARNING = 1.43
"""Seconds of NeMo RL's forward and training passes over those of their kernels, fitted to its fitted rows: it
pads packed sequences, computes logits in fp32, and swaps the reference model in."""
FAST_HOST = HostTimes(gap_us=27, step_us=600, sequence_us=3.3, passes=0.75)
"""The host of SGLang and TensorRT-LLM, fitted to the fitted rows of both."""
NAMES = {"llama-3.3-70b": "llama-3.1-70b", "llama-3-70b": "llama-3.1-70b", "llama-3-8b": "llama-3.1-8b"}
LARGE = {
    "llama-3.1-405b": ModelShape("llama", 126, 16384, 53248, 128, 8, 128, 128256, is_tied=False),
    "gpt3-175b": ModelShape("llama", 96, 12288, 8 * 12288 // 3, 96, 96, 128, 51200, is_tied=True),
}


@dataclass(frozen=True)
class Comparison:
    """One measurement beside what the cost model says."""

    source: str
    topic: str
    name: str
    measured: float
    predicted: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Return the relative error."""
        return abs(self.predicted / self.measured - 1)


def rows(name: str) -> Iterator[Row]:
    """Yield the rows of a source, without its comments."""
    lines = (HERE / "data" / f"{name}.csv").read_text().splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


@cache
def hardware(device: str, network: str | None = None) -> Hardware:
    """Return the figures of a device with its shipped calibration."""
    links, known = known_links(__file__), known_devices(__file__)[device]
    inter = links[network or known.network]
    calibration = device_calibration(known, __file__)
    return Hardware(known, links[known.link], inter, links[known.host_link], calibration)


@cache
def model(name: str) -> ModelShape:
    """Return the sizes of a model. MPT's MLP has two matrices, so the same work in three is narrower."""
    if name in MPT:
        layers, hidden, heads = MPT[name]
        size = hidden // heads
        return ModelShape("llama", layers, hidden, 8 * hidden // 3, heads, heads, size, 50368, is_tied=True)
    if name in LARGE:
        return LARGE[name]
    file = config_dir() / "model" / f"{NAMES.get(name, name)}.yaml"
    shape = read_shape(yaml.safe_load(file.read_text())["architecture"])
    assert shape is not None
    return shape


def costs(
    name: str,
    hardware: Hardware,
    layout: Layout,
    backend: str,
    per_machine: int = 8,
    is_overlapping: bool = False,
    **settings: object,
) -> ReplicaCosts:
    """Return a replica on neighbouring devices; tensor ranks are innermost, then data, then stages."""
    t, d, p = layout.tensor, layout.data, layout.pipe
    kind = replace(traits(backend), overlaps_optimizer=is_overlapping, overlaps_tensor=is_overlapping)
    config = ModelConfig(dtype="bf16", **settings)  # type: ignore[arg-type]
    return ReplicaCosts(
        model(name),
        config,
        layout,
        kind,
        hardware.calibration.host[backend],
        hardware,
        data=_spread(d, t, per_machine),
        tensor=_spread(t, 1, per_machine),
        pipe=_spread(p, t * d, per_machine),
        expert_data=_spread(d, t, per_machine),
    )


def _spread(num: int, stride: int, per_machine: int) -> RankPlacement:
    """Return the placement of ranks that are `stride` devices apart."""
    within = max(1, min(num, per_machine // stride))
    return RankPlacement(within, num // within)


def seconds(parts: list) -> float:
    """Return the sum of the parts."""
    return sum(part.seconds for part in parts)


# Training
def llm_foundry() -> Iterator[Comparison]:
    for row in rows("llm_foundry"):
        device, gpus = row["device"], int(row["gpus"])
        one = costs(
            row["model"],
            hardware(device, "ib-ndr" if device == "h100" else "ib-hdr"),
            Layout(gpus),
            "torch",
            tokens_per_microbatch=int(row["microbatch"]) * int(row["sequence"]),
            activation_checkpointing=row["checkpointing"] == "true",
        )
        one = replace(one, host=replace(one.host, attention=TRITON_ATTENTION[device[:4]]))
        if row["precision"] == "amp_fp8":
            one = replace(one, low_dtype="fp8")
        sequences = int(row["microbatch"]) * int(row["accumulation"])
        work = whole_sequences(int(row["sequence"]), sequences)
        measured = work.tokens / float(row["tokens_per_second_per_gpu"])
        name = f"{row['model']} {row['sequence']} {row['gpus']}x{device} {row['precision']}"
        yield compare("LLM Foundry", "training", name, measured, seconds(train(one, work, 1)), row)


def megatron_bridge() -> Iterator[Comparison]:
    yield from _megatron("Megatron-Bridge", "megatron_bridge")


def nemo_framework() -> Iterator[Comparison]:
    yield from _megatron("NeMo Framework", "nemo_framework")


def _megatron(source: str, file: str) -> Iterator[Comparison]:
    for row in rows(file):
        t, p, c, gpus = (int(row[key]) for key in ("tensor", "pipe", "context", "gpus"))
        d = gpus // (t * p * c)
        backend = "torch" if int(row["fsdp"]) > 1 else "megatron"
        # A context rank has a part of each sequence; its exchange of keys and values is hidden.
        one = costs(
            row["model"],
            hardware(row["device"]),
            Layout(d * c, t, p),
            backend,
            is_overlapping=True,
            tokens_per_microbatch=int(row["microbatch"]) * int(row["sequence"]) // c,
        )
        one = replace(one, low_dtype="fp8", virtual_stages=int(row["virtual"]))
        sequences = int(row["batch"]) / d
        work = whole_sequences(int(row["sequence"]), sequences).share(1 / c)
        measured = work.tokens / (t * p) / float(row["tokens_per_second_per_gpu"])
        name = f"{row['model']} {gpus}x{row['device']} t{t}p{p}c{c}"
        yield compare(source, "training", name, measured, seconds(train(one, work, 1)), row)


def whole_sequences(length: int, num: float) -> Work:
    """Return the work of sequences whose tokens are all learned from."""
    return work_of([length], 0, 1).share(num)


# Decoding
def tensorrt_llm() -> Iterator[Comparison]:
    for row in rows("tensorrt_llm"):
        t, prompt, response = (int(row[key]) for key in ("tensor", "prompt", "response"))
        device = hardware(row["device"])
        one = costs(row["model"], device, Layout(1, t), "vllm")
        one = replace(one, low_dtype="fp8", host=FAST_HOST)
        slots = cache_slots(one, prompt + response, 0.95)
        step = decode_seconds(one, slots, prompt + response / 2)
        filling = seconds(prefill(one, whole_sequences(prompt, slots)))
        predicted = slots * response / (response * step + filling)
        measured = float(row["tokens_per_second"])
        name = f"{row['model']} {t}x{row['device']} {prompt}/{response}"
        yield compare("TensorRT-LLM", "decode", name, measured, predicted, row)


def qwen3_speed() -> Iterator[Comparison]:
    for row in rows("qwen3_speed"):
        backend = {"sglang": "vllm", "transformers": "embedded"}[row["engine"]]
        one = costs(row["model"], hardware("h20"), Layout(), backend)
        if row["engine"] == "sglang":
            one = replace(one, host=FAST_HOST)
        prompt, response = int(row["prompt"]), 2048
        spent = seconds(prefill(one, whole_sequences(prompt, 1)))
        spent += response * decode_seconds(one, 1, prompt + response / 2)
        name = f"{row['model']} {row['engine']} {prompt}"
        measured, predicted = float(row["tokens_per_second"]), (prompt + response) / spent
        yield compare("Qwen3 speed", "decode", name, measured, predicted, row)


def decode_seconds(one: ReplicaCosts, num: float, length: float) -> float:
    """Return the seconds of one decode step of sequences of a length."""
    return decode_step(one, num, num * length).seconds + decode_collectives(one, num).seconds


def cache_slots(one: ReplicaCosts, length: int, share: float) -> int:
    """Return the sequences that the cache holds in a share of what weights and runtime leave."""
    device = one.hardware.device
    weights = stage_parameters(one.shape, 1) / one.layout.tensor * one.weight_bytes
    room = share * (device.memory_bytes - device.overhead_gib * GIB - weights)
    per_token = kv_entries(one.shape, one.layout.tensor) * one.weight_bytes
    return min(2048, math.floor(room / per_token / length))


# RL
def nemo_rl() -> Iterator[Comparison]:
    sync: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows("nemo_rl"):
        gpus, training = int(row["gpus"]), int(row["train_gpus"])
        is_colocated = row["colocated"] == "true"
        predicted = grpo_step(row, gpus if is_colocated else gpus - training, training, is_colocated)
        measured = float(row["seconds"])
        mode = "in turns" if is_colocated else "one step ahead"
        name = f"{row['model']} {gpus}x{row['device']} {mode}"
        yield compare("NeMo RL", "RL step", name, measured, predicted, row)
        rate = gpus * predicted, gpus * measured
        key = (row["model"], row["split"])
        if is_colocated:
            sync[key] = rate
        else:
            name = f"{row['model']}: GPU seconds a step, in turns over one step ahead"
            before = sync[key]
            yield compare("NeMo RL", "gain by staleness", name, before[1] / rate[1], before[0] / rate[0], row)


PROMPT = 128
"""Assumed tokens of a prompt of OpenMathInstruct-2, which the source does not give."""
DEVIATION = 0.6
"""Assumed deviation of response lengths over their mean; hflow's default."""
MAX_LENGTH = 4096


def grpo_step(row: Row, generating: int, training: int, is_colocated: bool) -> float:
    """Return the seconds of a step of 2048 samples: generation, two forward passes, four updates."""
    device = hardware(row["device"])
    t, p, g = (int(row[key]) for key in ("train_tensor", "train_pipe", "generate_tensor"))
    workload = cut_workload(int(row["length"]) - PROMPT, MAX_LENGTH - PROMPT)
    engine = costs(row["model"], device, Layout(generating // g, g), "vllm", gen=GenConfig(max_running=256))
    limit = cache_slots(engine, int(row["length"]), 0.6 if is_colocated else 0.8)
    config = replace(engine.config, gen=replace(engine.config.gen, max_running=min(256, limit)))
    rollout = RolloutRequest(64, 32, 2048 * (1 if is_colocated else 2), 0 if is_colocated else 1, 0)
    generation = seconds(generate(replace(engine, config=config), workload, rollout))
    d = training // (t * p)
    trainer = costs(
        row["model"],
        device,
        Layout(d, t, p),
        "megatron",
        is_overlapping=True,
        tokens_per_microbatch=MAX_LENGTH,
        activation_checkpointing=row["model"] == "llama-3.1-8b",
    )
    work = work_of([int(row["length"])] * 2048, PROMPT, 32).share(1 / d)
    learning = LEARNING * 2 * seconds(forward(trainer, work)) + LEARNING * seconds(
        train(trainer, work.share(1 / 4), 4)
    )
    return generation + learning if is_colocated else max(generation, learning)


def cut_workload(mean: float, longest: int) -> Workload:
    """Return the lengths whose mean after the cut is as measured."""
    from hflow.planner.workload import expected_max

    low, high = 1.0, 4.0 * mean
    for _ in range(40):
        middle = (low + high) / 2
        if expected_max(Workload(PROMPT, middle, DEVIATION, longest), 1) < mean:
            low = middle
        else:
            high = middle
    return Workload(PROMPT, round(low, 1), DEVIATION, longest)


# Weights
def weight_sync() -> Iterator[Comparison]:
    for row in rows("weight_sync"):
        receivers = int(row["generate_gpus"])
        machines = -(-receivers // 8)
        engine = costs("qwen3-8b", hardware(row["device"]), Layout(receivers), "vllm")
        num_bytes, tensors = 1e9 * float(row["gigabytes"]), int(row["tensors"])
        # Every engine GPU receives everything: to keep it, or as a broadcast of which it keeps its part.
        is_apart = row["path"] == "collective"
        crossing = 1.0 if is_apart else (machines - 1) / machines
        route = WeightRoute(
            "m",
            "m@train",
            "m@gen",
            "pull",
            rows=(RouteRow("tensor", (0, tensors), (), 0, 0),),
            moved_bytes=round(num_bytes * receivers),
            node_bytes=round(num_bytes * receivers * crossing),
            transport="collective",
        )
        ranks, inter = _spread(receivers, 1, 8), engine.hardware.inter
        if is_apart:
            # One rank broadcasts apart from its receivers, so that its own port carries everything.
            ranks = RankPlacement(1, receivers)
        parts = load_weights(route, engine, ranks, inter, 1 if is_apart else receivers)
        if not is_apart:
            shard = num_bytes / receivers
            parts.append(send(shard, engine.hardware.host, engine.hardware).part("PCIe"))
        name = f"{row['source']} {row['model']} to {receivers}x{row['device']}"
        yield compare(row["source"], "weight sync", name, float(row["seconds"]), seconds(parts), row)


def compare(source: str, topic: str, name: str, measured: float, predicted: float, row: Row) -> Comparison:
    """Return the comparison of a row."""
    return Comparison(source, topic, name, measured, predicted, row["split"] == "held out")


SOURCES: tuple[Callable[[], Iterator[Comparison]], ...] = (
    llm_foundry,
    megatron_bridge,
    nemo_framework,
    tensorrt_llm,
    qwen3_speed,
    nemo_rl,
    weight_sync,
)


def rank_correlation(pairs: list[Comparison]) -> float:
    """Return Spearman's rank correlation of measured and predicted figures."""
    order = [sorted(range(len(pairs)), key=lambda i: key(pairs[i])) for key in (_measured, _predicted)]
    ranks = [{index: rank for rank, index in enumerate(one)} for one in order]
    return statistics.correlation(
        [ranks[0][i] for i in range(len(pairs))], [ranks[1][i] for i in range(len(pairs))]
    )


def _measured(pair: Comparison) -> float:
    return pair.measured


def _predicted(pair: Comparison) -> float:
    return pair.predicted


def summary(found: list[Comparison]) -> list[dict[str, object]]:
    """Return the errors of each source and topic, apart for fitted and held-out rows, and of each topic."""
    groups: dict[tuple[str, str, bool], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.topic, one.source, one.is_held_out), []).append(one)
        if one.is_held_out:
            groups.setdefault((one.topic, "all held out", True), []).append(one)
    table = []
    for (topic, source, is_held_out), pairs in sorted(groups.items()):
        table.append(
            {
                "topic": topic,
                "source": source,
                "rows": "held out" if is_held_out else "fitted",
                "number": len(pairs),
                "mean error": round(statistics.mean(pair.error for pair in pairs), 3),
                "median error": round(statistics.median(pair.error for pair in pairs), 3),
                "worst": round(max(pair.error for pair in pairs), 3),
                "mean ratio": round(statistics.mean(p.predicted / p.measured for p in pairs), 3),
                "rank correlation": round(rank_correlation(pairs), 3) if len(pairs) > 2 else None,
                "target": TARGETS[topic] if is_held_out else None,
            }
        )
    return table


def main() -> None:
    """Print the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rows", help="print every row of the sources whose name contains this")
    args = parser.parse_args()
    found = [one for source in SOURCES for one in source()]
    for one in found:
        if args.rows is not None and args.rows.lower() in one.source.lower():
            split = "held out" if one.is_held_out else "fitted"
            print(
                f"{one.name:55} {one.measured:12.4g} {one.predicted:12.4g} "
                f"{one.predicted / one.measured:6.2f} {split}"
            )
    table = summary(found)
    for row in table:
        print("  ".join(f"{value!s:>16}" for value in row.values()))
    if args.save:
        day = datetime.date.today().isoformat()
        file = HERE.parent / "results" / f"{day}-cost-model.json"
        file.write_text(json.dumps({"summary": table, "rows": [vars(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
