"""Implementations of an interface by name: hflow's own, and those of other installed packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from hflow.base.errors import PlanError, nearest

Kind = TypeVar("Kind")


class _Entry(NamedTuple):
    """An implementation that another package adds."""

    target: str
    """`module:ATTRIBUTE`."""
    package: str


class Registry:
    """Names of the implementations of one interface. Each is imported when it is loaded.

    Another package adds a name by an entry point of the registry's group, in its `pyproject.toml`:

        [project.entry-points."hflow.channels"]
        rdma = "my_package.descriptor:CHANNEL"

    Entry points are read once, and only if a name is not one of hflow's own, or all names are listed.

    Args:
        what: what one of them is, for messages.
        group: the group of entry points.
        own: name -> `module:ATTRIBUTE` of hflow's own. The first is the default.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str]) -> None:
        self._what = what
        self._group = group
        self.own = own
        self.default = next(iter(own))

    def __iter__(self) -> Iterator[str]:
        """Yield all names: hflow's own, the default first, then those of other packages."""
        yield from self.own
        yield from self._added

    def __contains__(self, name: object) -> bool:
        """Return whether there is such an implementation."""
        return name in self.own or name in self._added

    def load(self, name: str) -> Any:
        """Import and return an implementation.

        Raises:
            PlanError: for an unknown name, or when what another package adds cannot be imported.
        """
        if name in self.own:
            return _resolve(self.own[name])
        if name not in self._added:
            known = ", ".join(self)
            raise PlanError(f"unknown {self._what} {name!r}{nearest(name, self)} (known: {known})")
        target, package = self._added[name]
        try:
            return _resolve(target)
        except (ImportError, AttributeError) as error:
            raise PlanError(
                f"{self._what} {name!r} of the package {package} cannot be imported from {target}: {error}. "
                f"Install another version of {package}"
            ) from error

    def describe(self, name: str, kind: type[Kind]) -> Kind:
        """Import and return the descriptor of an implementation.

        Raises:
            PlanError: for the reasons of `load`, or if another package adds something else.
        """
        found = self.load(name)
        if not isinstance(found, kind) or getattr(found, "name", None) != name:
            package = self._added[name].package if name not in self.own else "hflow-rl"
            raise PlanError(
                f"{self._what} {name!r} of the package {package} is no {kind.__name__} with that name. "
                f"Install another version of {package}"
            )
        return found

    @cached_property
    def _added(self) -> dict[str, _Entry]:
        """Name -> what another package adds.

        Raises:
            PlanError: when two packages add one name, or a package adds a name of hflow's.
        """
        packages = dict.fromkeys(self.own, "hflow-rl")
        added: dict[str, _Entry] = {}
        for point in _entry_points(tuple(sys.path)).select(group=self._group):
            package = point.dist.name if point.dist is not None else "?"
            if packages.setdefault(point.name, package) != package:
                raise PlanError(
                    f"the packages {packages[point.name]} and {package} both have a {self._what} "
                    f"{point.name!r}. Uninstall one of them"
                )
            added[point.name] = _Entry(point.value, package)
        return added


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on `sys.path`, read once for all registries: each is a file."""
    from importlib import metadata  # takes longer to import than most commands run

    return metadata.entry_points()


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
