"""`node_body`: what a worker calls for a node: its body, or the `run` of the recipe's own node type."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hflow.base.recipe_files import local_directory
from hflow.dsl.nodetype import Context, Definition, NodeType
from hflow.types.node_setup import ATTRIBUTE


def node_body(node: Definition[..., Any], options: Mapping[str, Any], directory: str) -> Callable[..., Any]:
    """Return a callable that takes a node's inputs and knobs by name.

    Args:
        node: the node.
        options: options that a configuration changed.
        directory: the directory of the recipe's file on this machine.
    """
    kind = type(node.kind)
    if kind.run is NodeType.run and not has_setup(node):
        return node.body
    run = _Run(node, {**node.kind.option_values, **options}, directory)
    if not is_async(node):
        return run

    @functools.wraps(node.body)
    async def awaited(**arguments: Any) -> Any:
        result = run(**arguments)
        return await result if inspect.isawaitable(result) else result

    if has_setup(node):
        setattr(awaited, ATTRIBUTE, run.setup)
    return awaited


def has_setup(node: Definition[..., Any]) -> bool:
    """Return whether the node's type prepares the processes in which it runs."""
    return type(node.kind).setup is not NodeType.setup


def is_async(node: Definition[..., Any]) -> bool:
    """Return whether a call of the node must be awaited."""
    return inspect.iscoroutinefunction(node.body) or inspect.iscoroutinefunction(type(node.kind).run)


class _Run:
    """Calls the `run` of a user's node type. It is called like a body: with inputs and knobs by name.

    It has a copy of the node type's instance, so that what `setup` stores there belongs to one node.
    """

    def __init__(self, node: Definition[..., Any], options: Mapping[str, Any], directory: str) -> None:
        self._kind = copy.copy(node.kind)
        self._options = options
        self._knobs = dict(node.knobs)
        self._directory = directory
        self.__wrapped__ = node.body  # `inspect.unwrap` finds the body here, and with it error locations.
        self.__name__ = node.name
        self.__module__ = node.body.__module__
        if has_setup(node):
            setattr(self, ATTRIBUTE, self.setup)

    def setup(self) -> None:
        """Prepare this process for calls."""
        self._kind.setup(self._context(self._knobs))

    def __call__(self, **arguments: Any) -> Any:
        knobs = {name: arguments.pop(name) for name in self._knobs if name in arguments}
        return self._kind.run(self._context(knobs), arguments)

    def _context(self, knobs: Mapping[str, Any]) -> Context:
        return Context(self.__wrapped__, knobs, self._options, local_directory(self._directory))
