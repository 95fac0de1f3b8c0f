"""`cluster=here`: the GPUs of this machine, or its processor cores, as a cluster of the planner."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hflow.base.errors import ConfigError
from hflow.base.machine_gpus import Gpu, read_gpus
from hflow.base.machine_memory import machine_memory
from hflow.config import RunConfig
from hflow.config.schema import ONE_PROCESS
from hflow.launch.planning.request import known_devices
from hflow.planner.plan.hardware import GIB, Device

HERE = "here"
MAX_CPU_DEVICES = 8
"""Worker processes of a machine without GPUs at most, as each has a copy of the models."""
FREE_SHARE = 0.1
"""Part of a machine's memory that is left to its other programs, Ray's among them."""
SAME_MEMORY = 0.05
"""Share by which a GPU's memory may differ from that of the data sheet before its own is used."""


def with_this_machine(config: RunConfig, recipe: str | Path) -> RunConfig:
    """Return a configuration in which `cluster` is a name of the planner's, with the memory of its devices.

    A machine without GPUs has a device for each core, `MAX_CPU_DEVICES` at most, or one if all workers are in
    one process. They share the memory.

    Raises:
        ConfigError: for GPUs that differ, or of a kind of which hflow has no figures.
    """
    if config.cluster != HERE:
        return config
    gpus = visible_gpus(os.environ)
    if gpus:
        return _with_gpus(config, gpus, known_devices(recipe))
    num = 1 if config.workers in ONE_PROCESS else min(len(os.sched_getaffinity(0)), MAX_CPU_DEVICES)
    memory = math.floor(10 * (1 - FREE_SHARE) * machine_memory() / GIB / num) / 10
    return replace(config, cluster=f"cpu-1x{num}", device_memory_gib=config.device_memory_gib or memory)


def fewer_workers(config: RunConfig) -> Iterator[RunConfig]:
    """Yield a configuration's CPU cluster of this machine with fewer workers, each with more of its cores.

    Nothing where the cores of workers are set. If workers are in one process, they cannot be fewer, but the
    process gets all cores.
    """
    kind, _, num = config.cluster.rpartition("-1x")
    if kind != "cpu" or config.cores is not None:
        return
    memory = (config.device_memory_gib or 0.0) * int(num)
    for workers in range(int(num), 0, -1):
        cores = len(os.sched_getaffinity(0)) // workers
        if int(num) % workers == 0 and cores > 1:
            yield replace(
                config, cluster=f"cpu-1x{workers}", cores=(cores,), device_memory_gib=memory / workers
            )


def _with_gpus(config: RunConfig, gpus: Sequence[Gpu], devices: Mapping[str, Device]) -> RunConfig:
    name, memory = gpus[0].name, gpus[0].memory_gib
    if others := {gpu.name for gpu in gpus} - {name}:
        raise ConfigError(
            f"cluster is here, but this machine has {name} and {min(others)}; choose some of the same kind "
            "by CUDA_VISIBLE_DEVICES"
        )
    found = device_of_product(name, devices)
    if found is None:
        raise ConfigError(
            f"cluster is here, but hflow has no figures of {name}; describe it in hardware/devices/NAME.yaml "
            f"beside the recipe, and set cluster=NAME-1x{len(gpus)}"
        )
    differs = abs(memory - devices[found].memory_gib) > SAME_MEMORY * devices[found].memory_gib
    own = math.floor(10 * memory) / 10 if differs else None
    return replace(
        config, cluster=f"{found}-1x{len(gpus)}", device_memory_gib=config.device_memory_gib or own
    )


def device_of_product(product: str, devices: Iterable[str]) -> str | None:
    """Return the device with the figures of a GPU, such as `h100-pcie` of `NVIDIA H100 PCIe`, or None.

    Every part of the device's name is a word of the product's, or begins one, if it is a size such as `80g`.
    """
    words = re.split(r"[^a-z0-9]+", product.lower())

    def fits(part: str) -> bool:
        is_size = re.fullmatch(r"\d+g", part) is not None
        return any(word == part or (is_size and word.startswith(part)) for word in words)

    found = [device for device in devices if all(map(fits, device.split("-")))]
    return max(found, key=len, default=None)


def visible_gpus(variables: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi` that `CUDA_VISIBLE_DEVICES` of the variables allows; none without it.

    Raises:
        ConfigError: for a CUDA_VISIBLE_DEVICES that names no GPU of this machine by its number.
    """
    gpus = read_gpus()
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not gpus:
        return gpus
    numbers = [number.strip() for number in chosen.split(",") if number.strip()]
    if all(number.isdigit() and int(number) < len(gpus) for number in numbers):
        return [gpus[int(number)] for number in numbers]
    raise ConfigError(
        f"cluster is here, but CUDA_VISIBLE_DEVICES={chosen} does not name GPUs of this machine by numbers "
        f"below {len(gpus)}; correct it, or set cluster"
    )
