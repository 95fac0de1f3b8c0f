"""`NodeType`: the base class of all decorators, the library's and a user's own.

An instance is a decorator with its models and options. It reads the signature of the decorated function,
attaches a `Definition` to it and returns the same function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from hflow.dsl.annotations import Form
from hflow.dsl.definition import ATTRIBUTE, define
from hflow.dsl.options import COMMON, GROUPED, Options
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_fields
from hflow.errors import RecipeError, nearest
from hflow.graph.errors import recipe_error
from hflow.graph.ir import Level
from hflow.graph.model import Model
from hflow.graph.source_location import caller_location
from hflow.recipe_files import MODULE_PREFIX

Body = TypeVar("Body", bound=Callable[..., Any])
Constructor = TypeVar("Constructor", bound=Callable[..., None])

_FORMS: Mapping[Level, Form] = {Level.SAMPLE: "sample", Level.GROUP: "group", Level.BATCH: "tensor"}

NODE_TYPES: dict[str, type[NodeType]] = {}
"""Verb -> its node type."""


@dataclass(frozen=True)
class Shapes:
    """The size of one call of a node, for `NodeType.cost`."""

    tokens: float
    sequences: float
    groups: float


@dataclass(frozen=True)
class Context:
    """What `NodeType.setup` and `NodeType.run` receive besides the inputs."""

    body: Callable[..., Any]
    """The decorated function."""
    knobs: Mapping[str, Any]
    """The body's knobs, with the values of the recipe and the configuration."""
    options: Mapping[str, Any]
    """Every option of the node, defaults included."""
    directory: Path
    """The directory of the recipe's file, or its copy on another machine."""


class NodeType:
    """A kind of node. Subclass it to add a decorator: `class Audit(NodeType)` is used as `@Audit()`.

    A direct subclass runs like `compute`: it takes fields and returns fields. A kind that reads or trains a
    model, generates or encodes is derived from `infer`, `train`, `generate` or `encode`, which are subclasses
    of this class too, and has everything that the decorator has.

    Class attributes say what all nodes of this kind have in common. The constructor takes what one node
    chooses: its models and its options. Layouts, cost, drawing and weights are read once, when the recipe
    is converted to a graph, so that planning needs no instance.

    A subclass may declare a constructor with typed parameters, for editors and type checkers; see
    `typed_options`.

    Attributes:
        verb: the kind's name in plans and messages. Default: the class name in lower case.
        runs_as: the decorator that it runs like. Derive from that decorator instead of setting it.
        level: when a node runs: once per sample, per group or per batch.
        num_models: smallest and largest number of models; None means any number.
        options: the decorator's options by name.
        objects: options whose values are objects of the recipe (`data`, `source`), with their types.
        provides: kinds of provided parameters that a body may have.
        needs: kinds of provided parameters that a body must have.
        is_async: whether a body must be `async def`; None if it may be.
        opens_stream: whether a node creates samples.
    """

    verb: ClassVar[str] = "node"
    runs_as: ClassVar[str] = "compute"
    level: ClassVar[Level] = Level.BATCH
    num_models: ClassVar[tuple[int, int | None]] = (0, None)
    options: ClassVar[Options] = COMMON | GROUPED
    objects: ClassVar[Mapping[str, type]] = {}
    provides: ClassVar[tuple[str, ...]] = ("sequences", "state", "tensordict")
    needs: ClassVar[tuple[str, ...]] = ()
    is_async: ClassVar[bool | None] = False
    opens_stream: ClassVar[bool] = False

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if abstract:
            return
        if "verb" not in cls.__dict__:
            cls.verb = cls.__name__.lower()
        other = NODE_TYPES.get(cls.verb)
        is_of_other_recipe = other is not None and other.__module__.startswith(MODULE_PREFIX)
        if other is not None and other.__module__ != cls.__module__ and not is_of_other_recipe:
            raise RecipeError(
                f"{caller_location()}: {cls.__name__}: verb {cls.verb!r} is already used by "
                f"{other.__module__}. Set another name with verb="
            )
        NODE_TYPES[cls.verb] = cls

    def __init__(self, *models: Model | None, **options: Any) -> None:
        """Check the models and options of one node.

        Args:
            *models: the models that the node uses; None leaves one open.
            **options: options of the table `options`, and objects of the table `objects`.

        Raises:
            RecipeError: for an unknown option, or a model or value that does not fit.
        """
        self.where = caller_location()
        self.models = self._checked_models([model for model in models if model is not None])
        self.given_objects = self._checked_objects({k: v for k, v in options.items() if k in self.objects})
        self.given_options = self._checked_options(
            {k: v for k, v in options.items() if k not in self.objects}
        )

    def __call__(self, body: Body) -> Body:
        """Decorate a body and return it unchanged.

        Raises:
            RecipeError: if this kind of node cannot run a body with its signature.
        """
        if not callable(body) or not hasattr(body, "__code__"):
            raise self._error(f"@{self.verb} must decorate a function, not {body!r}")
        if hasattr(body, ATTRIBUTE):
            raise self._error(f"{body.__name__} has two decorators. Make a variant of a node with use()")
        setattr(body, ATTRIBUTE, define(self, body))
        return body

    # Methods that a subclass may override.

    @property
    def reads_weights(self) -> tuple[str, ...]:
        """Names of the models whose weights a node reads."""
        return tuple(model.name for model in self.all_models)

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """Names of the models whose weights a node overwrites."""
        return ()

    def layout(self, field: str) -> str:
        """Return where a returned field is stored.

        `sharded`: over the first ranks of the data-parallel groups of a replica; `single`: in one place.
        """
        return "single"

    def cost(self, shapes: Shapes) -> float:
        """Return the seconds of one call, affine in the shapes; 0 leaves it to the planner's cost model."""
        return 0.0

    def memory(self) -> int:
        """Return the bytes that the node keeps on each worker that runs it, such as an index.

        It is memory of the device; on a cluster of CPUs, of the host. Memory of a GPU's host is not planned.
        """
        return 0

    def draw(self) -> str:
        """Return the node's Graphviz shape."""
        return "box"

    def setup(self, context: Context) -> None:
        """Prepare a worker for calls of the node: load an index, open a client. Store it in `self`.

        It is called once on each worker that runs the node, before the first call, and again if the process
        had to be replaced. An exception ends the run. A checkpoint does not hold what it stores.
        """

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        """Run a node once: take inputs by parameter name and return the results of the body.

        It may be `async def` where the body may be.
        """
        return context.body(**inputs, **context.knobs)

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return what a body with this result annotation returns.

        Args:
            hint: the result annotation.
            function: the name of the node.
            error: makes the exception for a message about the body.
        """
        return read_fields(hint, self.return_names, function, self.form, error)

    @property
    def form(self) -> Form:
        """The form in which bodies receive their fields."""
        return _FORMS[self.node_level]

    @property
    def all_models(self) -> tuple[Model, ...]:
        """Every model that the node uses."""
        return self.models

    @property
    def has_open_models(self) -> bool:
        """Whether models are still missing, as in the nodes of the library."""
        return len(self.models) < self.num_models[0]

    # What the rest of the language reads.

    @property
    def node_level(self) -> Level:
        """The level that the node chose with `per=`, or else that of its kind."""
        return Level(self.given_options.get("per", self.level))

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of all options, objects included."""
        return (*self.options, *self.objects)

    @property
    def option_values(self) -> dict[str, Any]:
        """Every option with its value, defaults included."""
        return {name: self.given_options.get(name, option.default) for name, option in self.options.items()}

    @property
    def return_names(self) -> tuple[str, ...]:
        """The names in `returns=` as a tuple."""
        names = self.given_options.get("returns") or ()
        return (names,) if isinstance(names, str) else names

    def variant(self, models: tuple[Model, ...], options: Mapping[str, Any]) -> NodeType:
        """Return the same kind of node with other models (if any are given) and some other options."""
        return type(self)(*(models or self.models), **{**self.given_options, **self.given_objects, **options})

    def _checked_models(self, models: list[Any]) -> tuple[Model, ...]:
        for model in models:
            if callable(model) and not isinstance(model, type):
                raise self._error(f"write @{self.verb}(...) with parentheses above {model.__name__}")
            if not isinstance(model, Model):
                raise self._error(
                    f"@{self.verb} takes Model(...) objects, not {model!r}. Declare one with Model(NAME)"
                )
        max_models = self.num_models[1]
        if max_models is not None and len(models) > max_models:
            raise self._error(
                f"@{self.verb} takes at most {max_models} model(s), not {len(models)}. Remove the others"
            )
        return tuple(models)

    def _checked_objects(self, objects: dict[str, Any]) -> dict[str, Any]:
        for name, value in objects.items():
            if value is not None and not isinstance(value, self.objects[name]):
                raise self._error(f"{name}= must be a {self.objects[name].__name__}, not {value!r}")
        return {name: value for name, value in objects.items() if value is not None}

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        checked = {}
        for name, value in options.items():
            if name not in self.options:
                raise self._error(f"@{self.verb} has no option {name!r}{nearest(name, self.option_names)}")
            try:
                checked[name] = self.options[name].check(value)
            except ValueError as error:
                raise self._error(f"option {name} is {error}") from error
        return checked

    def _error(self, problem: str) -> RecipeError:
        return recipe_error(self.where, self.verb, problem)


def typed_options(constructor: Constructor) -> Constructor:
    """Give a node type's constructor typed parameters, for editors and type checkers.

    Only the signature of the decorated `__init__` is used. `NodeType.__init__` does the work from the tables
    `options` and `objects`, so that wrong options get the same errors for every kind of node and a subclass
    can add options. A test compares the signatures with the tables.
    """

    @functools.wraps(constructor)
    def init(self: NodeType, *models: Model | None, **options: Any) -> None:
        NodeType.__init__(self, *models, **options)

    return cast(Constructor, init)
