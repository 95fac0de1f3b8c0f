"""`cluster=here`: the GPUs of this machine, or its processor cores, as a cluster of the planner."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hflow.base.errors import ConfigError
from hflow.base.machine_gpus import Gpu, visible_gpus
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
_IN_ALL_NAMES = re.compile(r"nvidia|tesla|geforce|amd|instinct|sxm\d*|oam|ac|hbm\d\w*")
"""Words of a product that no other GPU has instead: makers, sockets, cooling and kinds of memory."""


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
            f"cluster is here, but hflow has no figures of {name}; describe it in {device_file(name)} beside "
            "the recipe, or set cluster to devices that it has"
        )
    differs = abs(memory - devices[found].memory_gib) > SAME_MEMORY * devices[found].memory_gib
    own = math.floor(10 * memory) / 10 if differs else None
    return replace(
        config, cluster=f"{found}-1x{len(gpus)}", device_memory_gib=config.device_memory_gib or own
    )


def device_of_product(product: str, devices: Mapping[str, Device]) -> str | None:
    """Return the device with the figures of a GPU, such as `h100-pcie` of `NVIDIA H100 PCIe`, or None.

    The parts of its name are the words that tell the product from others. A size may be left out if it is
    that of the device. So an H100 NVL, an RTX 4090 D or a part of a GPU is none of those without the word.
    """
    words = set(_telling_words(product))

    def fits(device: Device) -> bool:
        left = words.difference(_telling_words(device.name))
        sizes = [int(word[:-1]) for word in left if re.fullmatch(r"\d+g", word)]
        is_close = (abs(size - device.memory_gib) <= SAME_MEMORY * device.memory_gib for size in sizes)
        return words.issuperset(_telling_words(device.name)) and len(sizes) == len(left) and all(is_close)

    return max((name for name, device in devices.items() if fits(device)), key=len, default=None)


def device_file(product: str) -> str:
    """Return the file, relative to a recipe's directory, in which the figures of a GPU are found."""
    return f"hardware/devices/{'-'.join(_telling_words(product))}.yaml"


def _telling_words(name: str) -> dict[str, None]:
    words = (re.sub(r"^(\d+g)b$", r"\1", word) for word in re.split(r"[^a-z0-9]+", name.lower()))
    return dict.fromkeys(word for word in words if word and not _IN_ALL_NAMES.fullmatch(word))
