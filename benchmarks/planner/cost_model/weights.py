"""Published seconds of weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.planner.cost_model.comparison import (
    MACHINE,
    Comparison,
    PeerFigures,
    Row,
    compare,
    costs,
    hardware,
    rows,
    seconds,
    spread,
)
from hflow.planner.forecast.cost.collectives import RankPlacement, all_gather, send
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.transfers import load_weights
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import WeightRoute
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape

OTHER_ROADS = "weight sync, other roads"
"""Updates by whole copies that another process gets over HTTP, or by a call for each tensor, which no plan of
hflow has."""

TO_HOST_GB_PER_S, FROM_HOST_GB_PER_S = 2.3, 8.4
"""Rates of copies to memory of the host that is new and not pinned, and back: 63 GB of an encoder on an H20
in 27.2 and 7.5 s (github.com/vllm-project/vllm-omni/pull/5922). To the host of an H200 it was 2.8
(github.com/sgl-project/sglang/pull/32032). Pages are new each time that they are written."""


@dataclass(frozen=True)
class Update:
    """New weights that cross from training ranks to engine ranks."""

    device: str
    num_bytes: float
    gathered_bytes: float
    """As training ranks gather them: twice as many where they keep fp32."""
    num_tensors: int
    trainers: int
    receivers: int

    @classmethod
    def of(cls, row: Row) -> Update:
        """Return the update of a row."""
        return cls(
            row["device"],
            1e9 * float(row["gigabytes"]),
            1e9 * float(row["gathered"] or 0),
            int(row["tensors"]),
            int(row["train_gpus"]),
            int(row["generate_gpus"]),
        )

    @property
    def hardware(self) -> Hardware:
        """Devices and links, with the rates of updates."""
        return without_checksums(self.device).of_updates

    @property
    def calls(self) -> float:
        """Seconds of handling every tensor once."""
        return self.num_tensors * self.hardware.calibration.transfers.tensor_us * 1e-6

    def gather(self) -> float:
        """Return the seconds in which all training ranks gather whole tensors, one at a time."""
        ranks = spread(self.trainers, 1, MACHINE.get(self.device, 8))
        return all_gather(self.gathered_bytes, ranks, self.hardware).seconds + self.calls

    def from_one_port(self) -> tuple[float, float]:
        """Return the seconds in which one rank sends all weights to each receiver, and of loading them."""
        return self._sent(RankPlacement(1, self.receivers), 1)

    def from_one_machine(self) -> tuple[float, float]:
        """Return the same where the broadcast has all ranks of the sender's machine, and so all its ports."""
        per_machine = MACHINE.get(self.device, 8)
        return self._sent(spread(self.receivers, 1, per_machine), min(self.trainers, per_machine))

    def _sent(self, ranks: RankPlacement, sources: int) -> tuple[float, float]:
        engine = costs("qwen3-8b", self.hardware, Layout(self.receivers), "vllm")
        moved = route(self.num_bytes, self.receivers, 1.0)
        network, num = self.hardware.inter, self.num_tensors
        parts = load_weights(moved, engine, ranks, network, sources, num_tensors=num, has_relays=False)
        sending = seconds([part for part in parts if part.name == "weights"])
        return sending, seconds(parts) - sending


def without_checksums(device: str) -> Hardware:
    """Return devices and links of programs that do not sum the weights they send."""
    one = hardware(device)
    transfers = replace(one.calibration.transfers, checksum_gb_per_s=None)
    return replace(one, calibration=replace(one.calibration, transfers=transfers))


def weight_sync(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield updates of engines that have GPUs of their own, and of those next to a copy on the host."""
    for row in rows("weight_sync"):
        path = {
            "one rank": from_one_rank,
            "engine": from_one_rank,
            "group": to_group,
            "one by one": one_by_one,
            "pinned": through_host,
            "host": from_hosts,
            "shards": in_shards,
            "colocated": colocated,
            "handles": colocated,
        }[row["path"]]
        name = (
            f"{row['source']} {row['model']} to {row['generate_gpus']}x{row['device']} t{row['engine_gpus']} "
            f"{row['path']}"
        )
        spent, rate = path(row), figures.handover_gb_per_s
        if row["path"] == "engine" and rate is not None:
            spent += float(row["gigabytes"]) / rate
        topic = OTHER_ROADS if row["path"] in ("engine", "one by one", "handles") else "weight sync"
        yield compare(row["source"], topic, name, row["device"], float(row["seconds"]), spent, row)


def to_pageable(num_bytes: float) -> float:
    """Return the seconds of copying state of a device to memory of the host that is not pinned."""
    return num_bytes / (TO_HOST_GB_PER_S * 1e9)


def from_pageable(num_bytes: float) -> float:
    """Return the seconds of the way back."""
    return num_bytes / (FROM_HOST_GB_PER_S * 1e9)


def from_one_rank(row: Row) -> float:
    """Return the seconds in which one rank broadcasts everything; its own port carries it.

    The next bucket is gathered while one is sent (verl/checkpoint_engine/nccl_checkpoint_engine.py).
    """
    update = Update.of(row)
    held, num = update.gathered_bytes / update.trainers, int(row["host_copies"])
    copying = to_pageable(num // 2 * held) + from_pageable((num - num // 2) * held)
    sending, loading = update.from_one_port()
    return max(copying + update.gather(), sending) + loading


def to_group(row: Row) -> float:
    """Return the seconds of an update where gathering, sending and loading take turns at two buffers.

    Source: nemo_rl/utils/packed_tensor.py.
    """
    update = Update.of(row)
    return max(update.gather(), *update.from_one_machine())


def one_by_one(row: Row) -> float:
    """Return the seconds in which all tensors are gathered, and then each is sent and loaded.

    Source: `_sync_vllm_weights` in verl/experimental/fully_async_policy/base_detach_sync.py.
    """
    update = Update.of(row)
    return update.gather() + sum(update.from_one_machine()) + update.calls


def through_host(row: Row) -> float:
    """Return the seconds of four steps: to pinned memory, into buckets, to the device, and to all engines.

    Each training rank copies its share of the gathered tensors. Source: `sync_rollout_weights_by_checkpoint`
    in verl/experimental/fully_async_policy/megatron_worker.py, and checkpoint_engine.py there.
    """
    update = Update.of(row)
    part, host = update.num_bytes / update.trainers, update.hardware
    copies = 2 * send(part, host.host, host).seconds
    copies += part / (host.calibration.transfers.store_gb_per_s * 1e9)
    return update.gather() + copies + sum(update.from_one_machine())


def from_hosts(row: Row) -> float:
    """Return the seconds in which every rank loads a part from its host and sends it to all others."""
    receivers = int(row["generate_gpus"])
    engine = costs("qwen3-8b", without_checksums(row["device"]), Layout(receivers), "vllm")
    machines, num_bytes = -(-receivers // 8), 1e9 * float(row["gigabytes"])
    whole = route(num_bytes, receivers, (machines - 1) / machines)
    loading = _loaded(row, whole, engine, receivers)
    return loading + send(num_bytes / receivers, engine.hardware.host, engine.hardware).seconds


def in_shards(row: Row) -> float:
    """Return the seconds in which engine ranks receive their own parts, from all of the trainer's ranks."""
    receivers, t = int(row["generate_gpus"]), int(row["engine_gpus"])
    engine = costs("qwen3-8b", without_checksums(row["device"]), Layout(receivers // t, t), "vllm")
    moved = route(1e9 * float(row["gigabytes"]), receivers // t, 1.0)
    return _loaded(row, moved, engine, int(row["train_gpus"]))


def colocated(row: Row) -> float:
    """Return the seconds in which all ranks gather whole tensors for the engines on their devices."""
    gpus, t = int(row["generate_gpus"]), int(row["engine_gpus"])
    engine = costs(row["model"], without_checksums(row["device"]), Layout(gpus // t, t), "vllm")
    gathered = WeightRoute("m", "m@train", "m@gen", "gather", near="ipc")
    ranks, num = spread(gpus, 1), int(row["tensors"])
    return seconds(load_weights(gathered, engine, ranks, engine.hardware.inter, gpus, num_tensors=num))


def _loaded(row: Row, moved: WeightRoute, engine: ReplicaCosts, sources: int) -> float:
    """Return the seconds of loading a model with as many tensors as the row says."""
    num, network = int(row["tensors"]), engine.hardware.inter
    ranks = spread(engine.layout.world, 1)
    return seconds(load_weights(moved, engine, ranks, network, sources, num_tensors=num, has_relays=False))


def route(num_bytes: float, copies: int, crossing: float) -> WeightRoute:
    """Return a route that moves a number of copies of the weights, of which a fraction crosses machines."""
    return WeightRoute(
        "m",
        "m@train",
        "m@gen",
        "pull",
        moved_bytes=round(num_bytes * copies),
        node_bytes=round(num_bytes * copies * crossing),
        transport="collective",
    )


def exported_tensors(shape: ModelShape) -> int:
    """Return the tensors of a model as Hugging Face stores it, where each expert has three of its own."""
    experts = shape.experts
    per_mlp = [1 + 3 * experts.num if experts and experts.are_in(i) else 3 for i in range(shape.num_layers)]
    return 3 + 8 * shape.num_layers + sum(per_mlp)
