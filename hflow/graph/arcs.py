"""`Arcs`: what comes before what, such as the nodes of a step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping


class Arcs:
    """A directed graph of names, which are in the order in which they were added."""

    def __init__(self, arcs: Iterable[tuple[str, str]], names: Iterable[str] = ()) -> None:
        """Add names, then arcs with their ends."""
        self._after: dict[str, dict[str, None]] = {name: {} for name in names}
        self._before: dict[str, dict[str, None]] = {name: {} for name in self._after}
        for src, dst in arcs:
            for name in (src, dst):
                self._after.setdefault(name, {})
                self._before.setdefault(name, {})
            self._after[src][dst] = self._before[dst][src] = None

    def before(self, name: str) -> Iterable[str]:
        """Return the names with an arc to this one."""
        return self._before[name]

    def ancestors(self, name: str) -> set[str]:
        """Return all names from which arcs lead to this one."""
        return _reached(self._before, name)

    def descendants(self, name: str) -> set[str]:
        """Return all names to which arcs lead from this one; none from an unknown one."""
        return _reached(self._after, name)

    def generations(self) -> Iterator[list[str]]:
        """Yield the names in sets, each of which has arcs from earlier ones only; there is no cycle."""
        missing = {name: len(before) for name, before in self._before.items()}
        ready = [name for name, num in missing.items() if not num]
        while ready:
            yield ready
            ready = [name for done in ready for name in self._fulfilled(done, missing)]

    def in_order(self, position: Mapping[str, int]) -> Iterator[str]:
        """Yield the names along the arcs: of those that may be next the one with the first position."""
        missing = {name: len(before) for name, before in self._before.items()}
        ready = [(position[name], name) for name, num in missing.items() if not num]
        heapq.heapify(ready)
        while ready:
            _, done = heapq.heappop(ready)
            yield done
            for name in self._fulfilled(done, missing):
                heapq.heappush(ready, (position[name], name))

    def _fulfilled(self, done: str, missing: dict[str, int]) -> Iterator[str]:
        """Yield the names that waited for one alone, and count its arcs as done."""
        for name in self._after[done]:
            missing[name] -= 1
            if not missing[name]:
                yield name

    def find_cycle(self) -> list[str]:
        """Return the names on a cycle, in its order; empty if there is none."""
        seen: set[str] = set()
        for start in self._after:
            path, waiting = dict[str, None](), [iter((start,))]
            while waiting:
                name = next(waiting[-1], None)
                if name is None:
                    waiting.pop()
                    if path:
                        path.popitem()
                elif name in path:
                    names = list(path)
                    return names[names.index(name) :]
                elif name not in seen:
                    seen.add(name)
                    path[name] = None
                    waiting.append(iter(self._after[name]))
        return []


def _reached(arcs: Mapping[str, Iterable[str]], name: str) -> set[str]:
    found, waiting = set[str](), [name]
    while waiting:
        new = set(arcs.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found - {name}
