"""Every order of events of a small schedule, breadth first, with a check in each state."""

from __future__ import annotations

import io
import pickle
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from operator import attrgetter
from random import Random
from types import NoneType
from typing import Any, ClassVar

from state_driver import Generating, World

from hflow.config.schema import ScheduleConfig
from hflow.planner.plan.rows import Schedule, ScheduledNode, ScheduledStream
from hflow.runtime import events as ev
from hflow.runtime.state.groups import SampleDependencies

STATIC = (Schedule, ScheduledStream, ScheduleConfig, SampleDependencies)


@dataclass
class Space:
    """What an exploration found."""

    num_states: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    """Lag of the oldest token -> most trained samples that had it on one way."""
    refused: Counter[ev.Refusal] = field(default_factory=Counter)
    interrupted: int = 0
    """States in which a sample that has begun waits for its engine."""


def explore(schedule: Schedule, rows: dict[str, int], refusal: float = 0.0, salt: int = 0) -> Space:
    """Reach every state; `World` checks each instruction, each state and each end.

    Two states are the same if the state machine's parts are and the same things are under way.
    """
    start = World(schedule, Random(0), rows, refusal, salt=salt)
    start.feed(ev.Started())
    space, seen = Space(num_states=1), {_key(start)}
    frontier = deque([_save(start)])
    while frontier:
        blob = frontier.popleft()
        world = _load(blob)
        space.interrupted += any(
            isinstance(e, Generating) and e.oldest >= 0 and not world.can_move(e) for e in world.bag
        )
        ready = [i for i, entry in enumerate(world.bag) if world.can_move(entry)]
        assert ready, f"deadlock: {world.bag}, {world.engine}"
        for index in ready:
            after = _load(blob)
            after.move(index)
            space.lags |= after.lags
            space.refused |= Counter(i.reason for i in after.trace if isinstance(i, ev.Refuse))
            if after.finish is not None:
                if not after.finish.error:
                    after.check_end()
            elif (key := _key(after)) not in seen:
                seen.add(key)
                space.num_states += 1
                frontier.append(_save(after))
    return space


_KEPT: dict[int, Any] = {}
"""What never changes, by its id: copies have the same."""


def _keep(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    _KEPT[id(value)] = value
    return _kept, (id(value),)


def _kept(key: int) -> Any:
    return _KEPT[key]


class _Saver(pickle.Pickler):
    dispatch_table: ClassVar[Mapping[type, Any]] = dict.fromkeys((*STATIC, ScheduledNode), _keep)


def _save(world: World) -> bytes:
    buffer = io.BytesIO()
    _Saver(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
    return buffer.getvalue()


def _load(blob: bytes) -> World:
    world = pickle.loads(blob)
    assert isinstance(world, World)
    return world


def _key(world: World) -> Any:
    under_way = Counter(repr(entry) for entry in world.bag)
    return frozenset(under_way.items()), tuple(sorted(world.version.items())), freeze(world.state.parts)


def freeze(value: Any) -> Any:
    """A value that is equal where all that can change is."""
    return _freezer(type(value))(value)


@cache
def _freezer(kind: type) -> Callable[[Any], Any]:
    """Return the function that freezes values of a type; an exploration freezes a million."""
    if issubclass(kind, (NoneType, bool, int, str, Enum)):
        return lambda value: value
    if issubclass(kind, ScheduledNode):
        return attrgetter("name")
    if issubclass(kind, (list, tuple, deque)):
        return lambda value: tuple([freeze(held) for held in value])
    if issubclass(kind, (set, frozenset)):
        return lambda value: frozenset([freeze(held) for held in value])
    if issubclass(kind, Mapping):
        return lambda value: frozenset([(freeze(key), freeze(held)) for key, held in value.items()])
    if issubclass(kind, (*STATIC, Callable)):
        return lambda value: None
    if slots := sorted(getattr(kind, "__slots__", ())):
        return lambda value: (kind.__name__, tuple([freeze(getattr(value, name)) for name in slots]))
    return lambda value: (kind.__name__, tuple([freeze(held) for _, held in sorted(vars(value).items())]))
