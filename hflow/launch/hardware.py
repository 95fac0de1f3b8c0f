"""From the configuration to the cluster and the figures of its devices and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hflow.config import RunConfig
from hflow.config.build import build
from hflow.config.hardware import Kind, read_hardware
from hflow.errors import ConfigError, PlanError, nearest
from hflow.plan.cluster import device_of, parse_cluster
from hflow.plan.hardware import Device, Hardware, Link
from hflow.plan.ir import ClusterSpec

T = TypeVar("T", Device, Link)


def known_devices(recipe: str | Path) -> dict[str, Device]:
    """Devices that a cluster's name may use, by name.

    Raises:
        ConfigError: for a file that is not what it should be.
        PlanError: for a figure that no device can have.
    """
    return _known(Device, "devices", recipe)


def known_links(recipe: str | Path) -> dict[str, Link]:
    """Links that devices and `network` may name; raises as `known_devices`."""
    return _known(Link, "links", recipe)


def cluster_hardware(config: RunConfig, recipe: str | Path) -> tuple[ClusterSpec, Hardware]:
    """The cluster that a configuration names, and what its devices and links can do.

    Raises:
        ConfigError: for an unknown link, or a file that is not what it should be.
        PlanError: for an unknown device, or a figure that no device can have.
    """
    devices, links = known_devices(recipe), known_links(recipe)
    cluster = parse_cluster(config.cluster, devices)
    device = devices[device_of(config.cluster)]
    if config.cores is not None:
        cluster = replace(cluster, cores=_cores(config, cluster))
    if config.device_memory_gib is not None:
        device = _with_memory(device, config.device_memory_gib)
        cluster = replace(cluster, memory_bytes=device.memory_bytes)
    intra = _link(f"hardware.devices.{device.name}.link", device.link, links)
    if config.network is not None:
        inter = _link("network", config.network, links)
    else:
        inter = _link(f"hardware.devices.{device.name}.network", device.network, links)
    return cluster, Hardware(device, intra, inter)


def _known(cls: type[T], kind: Kind, recipe: str | Path) -> dict[str, T]:
    found = {}
    for name, values in read_hardware(kind, recipe).items():
        key = f"hardware.{kind}.{name}"
        try:
            found[name] = build(cls, {"name": name, **values}, key)
        except PlanError as error:
            raise PlanError(f"{key}.{error}") from error
    return found


def _cores(config: RunConfig, cluster: ClusterSpec) -> tuple[int, ...]:
    """Cores of each device of a machine."""
    cores, num_devices = config.cores or (), cluster.devices_per_node
    if config.workers == "inproc":
        raise ConfigError("cores binds worker processes, of which workers=inproc has none; leave it out")
    if not cores or min(cores) < 1 or len(cores) not in (1, num_devices):
        raise ConfigError(
            f"cores is {list(cores)}; name the cores of each of a machine's {num_devices} devices, or one "
            "number for all of them"
        )
    return cores if len(cores) == num_devices else cores * num_devices


def _with_memory(device: Device, memory_gib: float) -> Device:
    if memory_gib <= device.overhead_gib:
        raise ConfigError(
            f"device_memory_gib is {memory_gib:g}, but a {device.name} needs {device.overhead_gib:g} for its "
            f"runtime alone; set it to more than {device.overhead_gib:g}"
        )
    return replace(device, memory_gib=memory_gib)


def _link(key: str, name: str, links: dict[str, Link]) -> Link:
    if name not in links:
        raise ConfigError(f"{key}: unknown link {name!r}{nearest(name, links)} (known: {', '.join(links)})")
    return links[name]
