"""Channels that carry published weights from the processes that send them to those that load them."""

from __future__ import annotations

import importlib
from functools import cache

from hflow.weights.channels.interface import ChannelSettings, WeightChannel

_CHANNELS = {
    "store": "hflow.weights.channels.store",
    "disk": "hflow.weights.channels.disk",
    "shared": "hflow.weights.channels.shared",
    "collective": "hflow.weights.channels.collective",
    "ipc": "hflow.weights.channels.ipc",
    "memory": "hflow.weights.channels.memory",
}
"""Name -> the module whose `Channel` implements it; imported when it is used."""


def make_channel(settings: ChannelSettings) -> WeightChannel:
    """Return a new channel, for a sender."""
    channel = importlib.import_module(_CHANNELS[settings.name]).Channel(settings)
    assert isinstance(channel, WeightChannel)
    return channel


@cache
def open_channel(settings: ChannelSettings) -> WeightChannel:
    """Return the channel with which this process receives. It stays open for later versions."""
    return make_channel(settings)
