"""`Recipe`: the list of nodes that make an algorithm."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hflow.dsl.dataset import Dataset
from hflow.dsl.definition import Definition, definition_of
from hflow.dsl.implicit_nodes import implicit_nodes
from hflow.dsl.model import Model
from hflow.dsl.nodetype import Context, NodeType
from hflow.dsl.source_location import caller_location, caller_module
from hflow.dsl.to_spec import to_spec
from hflow.errors import RecipeError
from hflow.graph.ir import RecipeSpec, SourceLocation

Named = TypeVar("Named", Model, Dataset)


class Recipe:
    """Decorated functions and `use`s of them, fed by a dataset. Their order does not matter.

    Args:
        name: of the recipe, an identifier.
        dataset: whose batches make the steps.
        nodes: decorated functions and variants made by `use`.

    Raises:
        RecipeError: when something in the list is no node, or two have one name.
    """

    def __init__(self, name: str, dataset: Dataset, nodes: Sequence[Any]) -> None:
        self.where = caller_location()
        self.module = caller_module()
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(f"{self.where}: a recipe's name is an identifier such as 'ppo', not {name!r}")
        if not isinstance(dataset, Dataset):
            raise RecipeError(
                f"{self.where}: Recipe({name!r}): its second argument is a Dataset, not {dataset!r}"
            )
        self.name = name
        self.dataset = dataset
        self.nodes = tuple(self._definition(node) for node in nodes)
        self._check_names()

    def spec(self) -> RecipeSpec:
        """The recipe as a value, with the nodes that it implies.

        Raises:
            RecipeError: when a node's model is open, or two models or datasets have one name.
        """
        listed = [to_spec(node) for node in self.nodes]
        implied = [to_spec(node) for node in implicit_nodes(self.nodes)]
        return RecipeSpec(
            name=self.name,
            dataset=self.dataset.name,
            nodes=(*listed, *implied),
            models=tuple(model.spec() for model in self._models()),
            datasets=tuple(dataset.spec() for dataset in self._datasets()),
            unlisted=tuple(self._unlisted()),
            doc=getattr(sys.modules.get(self.module), "__doc__", None) or "",
        )

    def bodies(self, options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Callable[..., Any]]:
        """What to call, by node name, with inputs and knobs; it travels beside the plan.

        Args:
            options: by node name, options that a configuration changed, for kinds with a `run` of their own.
        """
        nodes = (*self.nodes, *implicit_nodes(self.nodes))
        return {node.name: _callable(node, (options or {}).get(node.name, {})) for node in nodes}

    def _definition(self, node: Any) -> Definition:
        definition = definition_of(node)
        if definition is None:
            shown = getattr(node, "__name__", repr(node))
            raise RecipeError(
                f"{self.where}: Recipe({self.name!r}): {shown} is no node: decorate it with a verb"
            )
        is_library = node is definition.body and node.__module__.startswith("hflow.")
        return replace(definition, where=self.where) if is_library else definition

    def _check_names(self) -> None:
        seen: dict[str, SourceLocation] = {}
        for node in self.nodes:
            if node.name in seen:
                raise RecipeError(
                    f"{node.where}: {node.name}: a node of this name is at {seen[node.name]}; "
                    f"give one another name with use(..., name=)"
                )
            seen[node.name] = node.where

    def _models(self) -> list[Model]:
        models = [model for node in self.nodes for model in node.kind.all_models]
        for model in models:
            if model.init_from is not None and model.init_from not in models:
                models.append(model.init_from)
        return _distinct(models)

    def _datasets(self) -> list[Dataset]:
        others = [node.kind.bound["data"] for node in self.nodes if "data" in node.kind.bound]
        return _distinct([self.dataset, *others])

    def _unlisted(self) -> Iterator[tuple[str, SourceLocation]]:
        """Nodes of the recipe's file that no recipe in it lists, in the order of the file."""
        values = vars(sys.modules[self.module]).values() if self.module in sys.modules else ()
        recipes = [value for value in values if isinstance(value, Recipe)]
        listed = [node for recipe in {*recipes, self} for node in recipe.nodes]
        for value in values:
            node = definition_of(value)
            if node is None or not _is_own(value, node, self.module):
                continue
            is_used = any(node is other or (callable(value) and value is other.body) for other in listed)
            if not is_used:
                yield node.name, node.where


def _is_own(value: Any, node: Definition, module: str) -> bool:
    """Whether a value of a module was made there: a variant always was, a function may be imported."""
    return isinstance(value, Definition) or node.body.__module__ == module


def _distinct(things: Sequence[Named]) -> list[Named]:
    """Each thing once.

    Raises:
        RecipeError: when two different ones share a name.
    """
    by_name: dict[str, Named] = {}
    for thing in things:
        other = by_name.setdefault(thing.name, thing)
        if other is not thing:
            raise RecipeError(f"{thing.where}: {thing!r} is also at {other.where}; give one another name")
    return list(by_name.values())


def _callable(node: Definition, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The body; for a kind with a `run` of its own, a callable that goes through it."""
    if type(node.kind).run is NodeType.run:
        return node.body
    run = _Run(node, {**node.kind.settings, **options})
    if not inspect.iscoroutinefunction(node.body):
        return run

    @functools.wraps(node.body)
    async def awaited(**arguments: Any) -> Any:
        return await run(**arguments)

    return awaited


class _Run:
    """Fires a user's NodeType, called like a body: with inputs and knobs by name."""

    def __init__(self, node: Definition, options: Mapping[str, Any]) -> None:
        self._kind = node.kind
        self._options = options
        self._knobs = tuple(node.knobs)
        self.__wrapped__ = node.body  # where `inspect.unwrap`, and so messages about errors, look
        self.__name__ = node.name
        self.__module__ = node.body.__module__

    def __call__(self, **arguments: Any) -> Any:
        knobs = {name: arguments.pop(name) for name in self._knobs if name in arguments}
        inputs: Mapping[str, Any] = arguments
        return self._kind.run(Context(self.__wrapped__, knobs, self._options), inputs)
