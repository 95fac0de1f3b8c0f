"""Every order of events of a small schedule, breadth first, with a check in each state."""

from __future__ import annotations

import io
import pickle
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random
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


class _Saver(pickle.Pickler):
    """Keeps what never changes out of each copy."""

    kept: ClassVar[dict[int, Any]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (*STATIC, ScheduledNode)):
            return None
        self.kept[id(value)] = value
        return id(value)


class _Loader(pickle.Unpickler):
    def persistent_load(self, key: int) -> Any:
        return _Saver.kept[key]


def _save(world: World) -> bytes:
    buffer = io.BytesIO()
    _Saver(buffer).dump(world)
    return buffer.getvalue()


def _load(blob: bytes) -> World:
    world = _Loader(io.BytesIO(blob)).load()
    assert isinstance(world, World)
    return world


def _key(world: World) -> Any:
    under_way = Counter(repr(entry) for entry in world.bag)
    return frozenset(under_way.items()), tuple(sorted(world.version.items())), freeze(world.state.parts)


def freeze(value: Any) -> Any:
    """A value that is equal where all that can change is."""
    match value:
        case None | bool() | int() | str() | Enum():
            return value
        case ScheduledNode():
            return value.name
        case list() | tuple() | deque():
            return tuple(map(freeze, value))
        case set() | frozenset():
            return frozenset(map(freeze, value))
        case Mapping():
            return frozenset((freeze(key), freeze(held)) for key, held in value.items())
    if isinstance(value, (*STATIC, Callable)):
        return None
    return type(value).__name__, tuple(freeze(held) for held in _attributes(value))


def _attributes(value: Any) -> list[Any]:
    names = sorted(getattr(type(value), "__slots__", None) or vars(value))
    return [getattr(value, name) for name in names]
