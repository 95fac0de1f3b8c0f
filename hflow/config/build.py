"""From a composed mapping to frozen dataclasses, naming the key of every mistake.

OmegaConf's structured configs do the same for mutable classes only: they refuse to merge into
frozen ones.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from hflow.errors import ConfigError, nearest

# -------------------- A dict that does not change, so that a configuration is a value down to its
# leaves.


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


T = TypeVar("T")

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def build(cls: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """Make a `cls` from `values`; what they leave out has its default.

    Args:
        cls: a frozen dataclass of `hflow.config.schema`.
        values: plain nested mappings, lists and scalars.
        key: the dotted key of `values` in the configuration, for messages.

    Raises:
        ConfigError: for a key that does not exist or is missing, or a value that does not fit, with its key.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        path = join(key, name)
        if name not in fields:
            raise ConfigError(unknown(path, name, fields))
        arguments[name] = convert(hints[name], value, path)
        _check_least(arguments[name], fields[name].metadata.get("minimum"), path)
    for name, field in fields.items():
        if name not in arguments and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{join(key, name)} is missing, and has no default")
    return cls(**arguments)


def join(key: str, name: object) -> str:
    """The dotted key of `name` under `key`."""
    return f"{key}.{name}" if key else str(name)


def unknown(path: str, name: object, known: Collection[str]) -> str:
    """The message for a key that does not exist."""
    hint = nearest(str(name), known) or f"; known here: {', '.join(sorted(known)) or 'nothing'}"
    return f"unknown key {path!r}{hint}"


def convert(hint: Any, value: Any, path: str) -> Any:
    """Check a value against a type and freeze it.

    Raises:
        ConfigError: when it does not fit.
    """
    if hint is Any:
        return freeze(value)
    if dataclasses.is_dataclass(hint):
        return build(hint, _mapping(value, path), path)  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else convert(arguments[0], value, path)
    if origin is Literal:
        return _choice(value, arguments, path)
    if origin is Mapping:
        items = _mapping(value, path).items()
        return FrozenDict({str(k): convert(arguments[1], v, join(path, k)) for k, v in items})
    if origin is tuple:
        return _tuple(arguments, value, path)
    return _scalar(hint, value, path)


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; it must be a mapping of keys to values")
    return value


def _choice(value: Any, choices: tuple[Any, ...], path: str) -> Any:
    if value not in choices:
        raise ConfigError(f"{path} is {value!r}; choose {' or '.join(map(str, choices))}")
    return value


def _tuple(hints: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path} is {value!r}; it must be a list")
    if hints[1:] == (...,):
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        raise ConfigError(f"{path} is {value!r}; it must be a list of {len(hints)} values")
    return tuple(convert(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))


def _scalar(hint: type, value: Any, path: str) -> Any:
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if fits:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"{path} is {value!r}; it must be {_WANTED[hint]}")


def _check_least(value: Any, least: float | None, path: str) -> None:
    if value is not None and least is not None and not value >= least:
        raise ConfigError(f"{path} is {value}; it must be at least {least}")
