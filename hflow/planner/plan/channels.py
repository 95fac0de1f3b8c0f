"""Names of the channels that carry published weights, and the traits that tell them apart.

To add one, write `descriptor.py` in `weights/channels/NAME`, and add one line to `CHANNELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hflow.base.registry import Registry

CHANNELS = Registry(
    "weight channel",
    "hflow.channels",
    {
        "store": "hflow.weights.channels.store.descriptor:CHANNEL",
        "disk": "hflow.weights.channels.disk.descriptor:CHANNEL",
        "shared": "hflow.weights.channels.shared.descriptor:CHANNEL",
        "collective": "hflow.weights.channels.collective.descriptor:CHANNEL",
        "ipc": "hflow.weights.channels.ipc.descriptor:CHANNEL",
        "memory": "hflow.weights.channels.memory.descriptor:CHANNEL",
    },
)
"""The channels. The object `CHANNEL` of a descriptor describes one."""


GATHER = "gather"
"""The value of `models.NAME.gen.transport` for no channel between devices: each worker gathers whole tensors
by collectives of the trainer, and hands them over to the engine's process on its device."""


@dataclass(frozen=True)
class ChannelTraits:
    """What a channel needs, and where it keeps buckets, as far as it is one choice of a few."""

    buckets: Literal["process", "device", "host", "store", "disk"]
    """Where published buckets are: in the process that made them, on the sender's device, in memory that the
    processes of a machine share, in Ray's object store, or in files. The forecast of bytes and seconds
    follows from it. Only a process that hosts all workers uses a channel of the first kind, in the place of
    another one."""
    crosses_machines: bool = True
    """Whether sender and receiver may be on different machines."""
    is_fetched_by_each_machine: bool = False
    """Whether a sender serves each machine by itself. Otherwise receivers pass a bucket on, so that it
    leaves the sender's machine once."""
    needs_workers_apart: bool = False
    """Whether sender and receiver must be different processes on different devices."""
    needs_one_device: bool = False
    """Whether the receiver reads buckets in place, so that it must be an engine in a process of its own on
    the sender's device. Buckets are freed when engines have loaded them."""
    needs_cuda: bool = False
    """Whether devices must be GPUs."""
    needs_ray: bool = False
    """Whether processes that are no Ray workers cannot open buckets. The worker of an engine in a process of
    its own copies them for it."""
    is_near_on: Literal["cpu", "cuda"] | None = None
    """The type of devices on which it is the channel to an engine on the sender's own device, whatever
    carries the rest; None: on neither."""

    @property
    def broadcasts(self) -> bool:
        """Whether senders and receivers join process groups, in which buckets move from device to device."""
        return self.buckets == "device" and self.needs_workers_apart


@dataclass(frozen=True)
class RouteFacts:
    """What the choice of a channel depends on."""

    device: str
    """`cpu` or `cuda`: the cluster's devices."""
    is_one_process: bool
    """Whether one process hosts all workers (`workers=inproc`)."""
    has_own_process: bool
    """Whether engines run in processes of their own."""
    shares_devices: bool
    """Whether an engine is on a device of the trainer."""
    num_machines: int
    """Machines of trainer and engines."""
    moved_bytes: int
    """Bytes that engines need of other devices; 0 also if the model's sizes are unknown."""
    held_bytes: int
    """Bytes that engines need of what their own devices hold; 0 also if the model's sizes are unknown."""
    stored_bytes: int
    """The most that a machine of the trainer publishes of one version; 0 if the model's sizes are unknown."""
    store_bytes: float | None
    """Size of a machine's object store; None: unknown."""


@dataclass(frozen=True)
class ChannelKind:
    """Everything that hflow must know about a channel outside its own package."""

    name: str
    traits: ChannelTraits
    factory: Callable[[Any], Any]
    """`ChannelSettings` -> a new `WeightChannel` (`weights/channels/interface.py`)."""
    prefer: Callable[[RouteFacts], str | None] = lambda facts: None
    """The reason for which `transport=auto` takes the channel; None: it does not."""
    priority: int = 100
    """`auto` takes the channel with the highest priority among those that give a reason. hflow's own have
    less than the default."""
    trial: str = ""
    """What `hflow doctor` tries with it; empty: nothing."""


@cache
def channel_kind(name: str) -> ChannelKind:
    """Return the descriptor of a channel.

    Raises:
        PlanError: for an unknown name.
    """
    return CHANNELS.describe(name, ChannelKind)


def channel_traits(name: str) -> ChannelTraits:
    """Return the traits of a channel; empty: no channel, so that weights stay in a process.

    Raises:
        PlanError: for an unknown name.
    """
    return channel_kind(name).traits if name else ChannelTraits("process")


def transports() -> Iterator[str]:
    """Yield the transports that a configuration can name."""
    yield "auto"
    yield from (name for name in CHANNELS if channel_traits(name).buckets != "process")
    yield GATHER


def near_channel(device: str) -> str:
    """Return the channel to an engine in a process of its own on the sender's device."""
    return next(name for name in CHANNELS if channel_traits(name).is_near_on == device)


def broadcast_channel() -> str:
    """Return the first channel that leaves buckets on devices, for engines on other ones."""
    return next(name for name in CHANNELS if channel_traits(name).broadcasts)


def channel_in_one_process(name: str, *, has_own_process: bool) -> str:
    """Return the channel that takes the place of the plan's where one process hosts all workers.

    `has_own_process` says whether engines run in processes of their own.
    """
    if not channel_traits(name).needs_ray:
        return name
    wanted = "host" if has_own_process else "process"
    return next(name for name in CHANNELS if channel_traits(name).buckets == wanted)
