"""Bodies of nodes: checks of their knobs and inputs, and what a worker calls for them.

`checked_by` adds a check, made when the recipe is read. `node_body` returns the body, or the `run` of the
recipe's own node type.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from types import CodeType
from typing import Any, TypeVar

from hflow.base.recipe_files import local_directory
from hflow.dsl.nodetype import Context, Definition, NodeType
from hflow.types.node_setup import ATTRIBUTE
from hflow.types.sequences import GROUP_FUNCTIONS

CHECK_ATTRIBUTE, WARNING_ATTRIBUTE = "__hflow_check__", "__hflow_warning__"
"""Attributes of a function that hold its check, and the check whose problems are warnings."""

BodyCheck = Callable[[Mapping[str, Any], Collection[str]], str | None]
"""Takes the knobs and the decorator's options, and the names of the parameters that a field is bound to.
Returns what is wrong and how to fix it, or None."""

Function = TypeVar("Function", bound=Callable[..., Any])


def checked_by(check: BodyCheck) -> Callable[[Function], Function]:
    """Attach a check to a body, below the decorator that makes it a node."""

    def attach(body: Function) -> Function:
        setattr(body, CHECK_ATTRIBUTE, check)
        return body

    return attach


def warned_by(check: BodyCheck) -> Callable[[Function], Function]:
    """Attach a check like `checked_by`, of what does no harm: a problem is a warning."""

    def attach(body: Function) -> Function:
        setattr(body, WARNING_ATTRIBUTE, check)
        return body

    return attach


def check_of(body: Callable[..., Any], attribute: str = CHECK_ATTRIBUTE) -> BodyCheck | None:
    """Return the check of a body, if it has one."""
    return getattr(body, attribute, None)


def reads_group_members(body: Callable[..., Any]) -> bool:
    """Return whether a body, or a function of its file that it calls, uses one of `GROUP_FUNCTIONS`."""
    function = inspect.unwrap(body)
    seen: set[CodeType] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        if not set(GROUP_FUNCTIONS).isdisjoint(code.co_names):
            return True
        seen.add(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        others = (function.__globals__.get(name) for name in code.co_names)
        codes += [f.__code__ for f in others if inspect.isfunction(f) and f.__module__ == function.__module__]
    return False


_NODE_OF_LOSS = {
    "cispo": "cispo_train",
    "sapo": "sapo_train",
    "dppo-tv": "dppo_train",
    "dppo-kl": "dppo_train with divergence=kl",
    "reinforce": "reinforce_train",
    "vespo": "vespo_train",
    "dro": "dro_train",
}


def loss_hint(module: str, function: str, knob: str, value: Any) -> str:
    """Return a hint at the node that has a policy's loss, for a recipe that sets `loss=`, or an empty string.

    Args:
        module: the module of the node's body.
        function: the name of the node's body.
        knob: the unknown knob.
        value: the value that the recipe gives it.
    """
    if (module, function, knob) != ("hflow.nodes.training", "actor_train", "loss"):
        return ""
    if value == "ppo":
        return ". Remove it: the loss of actor_train is PPO's"
    node = _NODE_OF_LOSS.get(value, "one of cispo_train, sapo_train, dppo_train, reinforce_train, dro_train")
    return f", as every loss is a node. In the place of actor_train, list {node}"


def missing_extra(extra: str, *packages: str) -> str | None:
    """Return the missing packages of an optional part of hflow, with the command to install it; or None.

    Args:
        extra: the extra of the distribution that brings the packages.
        packages: importable names.
    """
    missing = [package for package in packages if find_spec(package) is None]
    return f"it needs {', '.join(missing)}: pip install 'hflow-rl[{extra}]'" if missing else None


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
