"""Channels that carry published weights from the processes that send them to those that load them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hflow.planner.plan.channels import channel_kind

if TYPE_CHECKING:
    from hflow.weights.channels.interface import ChannelSettings, WeightChannel


def make_channel(settings: ChannelSettings) -> WeightChannel:
    """Return a new channel, for a sender."""
    channel: WeightChannel = channel_kind(settings.name).factory(settings)
    return channel


@cache
def open_channel(settings: ChannelSettings) -> WeightChannel:
    """Return the channel with which this process receives. It stays open for later versions."""
    return make_channel(settings)
