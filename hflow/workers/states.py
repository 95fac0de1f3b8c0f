"""`States`: the memory of nodes, JSON, kept where the node runs from one firing to the next."""

from __future__ import annotations

import json

from hflow.errors import RunError
from hflow.types import State


class States:
    """The memory of every node on this worker. What a node that fails wrote is forgotten."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def of(self, node: str) -> State:
        """A copy of a node's memory; empty before its first firing."""
        return State(json.loads(self._texts.get(node, "{}")))

    def keep(self, node: str, state: State) -> None:
        """Take what a firing left.

        Raises:
            RunError: when it is not JSON.
        """
        try:
            self._texts[node] = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"node {node!r}: its state must be JSON, so that it can be saved: {error}; keep plain finite "
                "numbers, texts, lists and dicts, such as float(tensor)"
            ) from error
