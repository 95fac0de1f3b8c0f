"""The memory of a GPU, which trainer and engine share, as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.base.devices import has_cuda_api
from hflow.planner.plan.channels import ChannelKind, ChannelTraits, RouteFacts


def _open(settings: Any) -> Any:
    from hflow.weights.channels.ipc.channel import IpcChannel

    return IpcChannel(settings)


def _prefer(facts: RouteFacts) -> str | None:
    if not has_cuda_api(facts.device) or facts.is_one_process or not facts.has_own_process:
        return None
    if facts.held_bytes and not facts.moved_bytes:
        return "every engine is on the devices that hold its weights"
    return None


CHANNEL = ChannelKind(
    name="ipc",
    traits=ChannelTraits(
        "device", crosses_machines=False, needs_one_device=True, needs_cuda=True, is_near_on="cuda"
    ),
    factory=_open,
    prefer=_prefer,
    priority=40,
    trial="vLLM beside the trainer, new weights in the memory of the GPU",
)
