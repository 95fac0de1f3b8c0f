"""A dict that does not change, so that a configuration is a value down to its leaves."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("a configuration does not change: compose another one")


class FrozenDict(dict[K, V]):
    """Reads, pickles, copies and serialises as a dict; every change is a TypeError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))


for _name in ["__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"]:
    setattr(FrozenDict, _name, _refuse)


def freeze(value: Any) -> Any:
    """The value with every dict frozen and every list made a tuple, however deep."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value
