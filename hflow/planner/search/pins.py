"""`pins_of`: what the user has set and a search therefore keeps, each with the request without it.

Where no plan fits, these are tried one after the other, so that the error names those that are the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hflow.graph.ir import Graph
from hflow.planner.cluster import device_ranges
from hflow.planner.placement.placement_setting import placed_devices
from hflow.planner.placement.replicas import GEN_SUFFIX, replica_roles
from hflow.planner.request import PlanRequest
from hflow.planner.search.result import with_settings

MEMORY_SETTINGS = ("offload", "gen.max_running", "activation_checkpointing", "tokens_per_microbatch")
"""Settings of a model that change what it needs of memory, and no result. The first ones cost least."""


@dataclass(frozen=True)
class Pin:
    """One thing that the user has set."""

    kind: Literal["placement", "layout", "setting"]
    key: str
    """The key of the configuration."""
    text: str
    """As the user has written it, such as `models.actor.layout=d8`."""
    release: Callable[[PlanRequest], PlanRequest]
    """Returns a request in which the search chooses it."""


def pins_of(graph: Graph, request: PlanRequest) -> tuple[PlanRequest, tuple[Pin, ...]]:
    """Return the pins of a request whose placement is free: devices first, then layouts, then settings.

    The request is returned with an item of its own for each name in its placement, from which any pin can be
    removed.
    """
    places: list[Pin] = []
    if request.placement is not None:
        names = [model + GEN_SUFFIX * (role == "gen") for model, role in replica_roles(graph)]
        items, devices = placed_devices(request, names)
        texts = {
            name: f"{name}={device_ranges(devices[name])}" + (f":{item.layout}" if item.layout else "")
            for name, item in items.items()
        }
        for item in dict.fromkeys(items.values()):
            text = f"{item.text} in placement"
            places.append(Pin("placement", "placement", text, partial(_without_items, names=item.names)))
            if item.layout is not None:
                release = partial(_without_layouts, names=item.names)
                places.append(Pin("placement", "placement", text, release))
        request = replace(request, placement=" ".join(texts.values()))
    places += _groups(request)
    return request, (*places, *_layouts(request), *_settings(graph, request))


def value_of(request: PlanRequest, key: str) -> Any:
    """Return the value of a key such as `models.actor.gen.layout`."""
    model, _, name = key.removeprefix("models.").partition(".")
    config: Any = request.model(model)
    for part in name.split("."):
        config = getattr(config, part)
    return config


def layout_keys(request: PlanRequest) -> tuple[str, ...]:
    """Return the keys of the layouts that models have."""
    return tuple(_set_keys(request, "layout"))


def _groups(request: PlanRequest) -> Iterator[Pin]:
    for key in _set_keys(request, "group"):
        text = f"{key}={value_of(request, key)}"
        yield Pin("placement", key, text, partial(_without_group, key=key))
    if request.groups:
        texts = (f"groups.{name}=[{device_ranges(devices)}]" for name, devices in request.groups.items())
        yield Pin("placement", "groups", " ".join(texts), lambda request: replace(request, groups={}))


def _layouts(request: PlanRequest) -> Iterator[Pin]:
    for key in layout_keys(request):
        text = f"{key}={value_of(request, key)}"
        yield Pin("layout", key, text, partial(with_settings, settings={key: None}))


def _settings(graph: Graph, request: PlanRequest) -> Iterator[Pin]:
    keys = [
        f"models.{model}.{name}"
        for name in MEMORY_SETTINGS
        for model in dict.fromkeys(model for model, _ in replica_roles(graph))
    ]
    for key in keys:
        if key not in request.free:
            value = value_of(request, key)
            text = f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            yield Pin("setting", key, text, partial(_with_free, key=key))


def _set_keys(request: PlanRequest, name: str) -> Iterator[str]:
    """Yield the keys of a setting, such as `group`, that models and their engines have."""
    for model, config in request.models.items():
        if getattr(config, name) is not None:
            yield f"models.{model}.{name}"
        if getattr(config.gen, name) is not None:
            yield f"models.{model}.gen.{name}"


def _without_items(request: PlanRequest, names: Container[str]) -> PlanRequest:
    kept = [item for item in (request.placement or "").split() if item.partition("=")[0] not in names]
    return replace(request, placement=" ".join(kept) or None)


def _without_layouts(request: PlanRequest, names: Container[str]) -> PlanRequest:
    items = (request.placement or "").split()
    kept = [item.partition(":")[0] if item.partition("=")[0] in names else item for item in items]
    return replace(request, placement=" ".join(kept) or None)


def _without_group(request: PlanRequest, key: str) -> PlanRequest:
    """Return the request with a model in no group, and without devices of groups that are empty then."""
    request = with_settings(request, {key: None})
    named = {value_of(request, key) for key in _set_keys(request, "group")}
    groups = {name: devices for name, devices in request.groups.items() if name in named}
    return replace(request, groups=groups)


def _with_free(request: PlanRequest, key: str) -> PlanRequest:
    return replace(request, free=request.free | {key})
