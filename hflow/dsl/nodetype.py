"""`NodeType`, the base class of all decorators, and `Definition`, the node that one makes of a function.

An instance is a decorator with its models and options. It reads the signature of the decorated function,
attaches a `Definition` to it and returns the same function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

from hflow.base.errors import RecipeError, nearest
from hflow.base.recipe_files import MODULE_PREFIX
from hflow.dsl.annotations import Form
from hflow.dsl.first_pass import first_pass_of, with_first_pass
from hflow.dsl.options import NodeOptions, Options, options_of
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_fields
from hflow.dsl.signature import Signature, read_signature
from hflow.graph.errors import SourceLocation, caller_location, definition_location, recipe_error
from hflow.graph.ir import Level
from hflow.graph.model import Model

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Body = TypeVar("Body", bound=Callable[..., Any])
Constructor = TypeVar("Constructor", bound=Callable[..., None])

ATTRIBUTE = "__hflow__"
"""The attribute of a decorated function that holds its definition."""

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

    Class attributes say what all nodes of this kind have in common. The constructor takes the choices of one
    node: models and options. Layouts, cost, drawing and weights are read once, when the recipe is converted
    to a graph, so that planning needs no instance.

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
    options: ClassVar[Options] = options_of(NodeOptions)
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
        """Return the layout in which a returned field is stored.

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
        """Return the fields of a body with this result annotation.

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


@dataclass(frozen=True, repr=False)
class Definition(Generic[Arguments, Result]):
    """One node of a recipe. Calling it calls its body, with the body's own parameters and result."""

    name: str
    kind: NodeType
    """The decorator, with its models and options."""
    body: Callable[Arguments, Result]
    where: SourceLocation
    signature: Signature
    results: ReturnTypes
    knobs: Mapping[str, Any]
    reads: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the field that it reads, for parameters that are not named like their field."""
    engines: tuple[str, ...] = ()
    """The body's Engine parameters, in the order of the decorator's models."""
    implicit: bool = False
    """Whether the framework added the node."""
    varied: Definition[..., Any] | None = field(default=None, repr=False, compare=False)
    """The node of which `use` made this one."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the body."""
        return self.body(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the node as a recipe writes it: with what differs from the decorated function."""
        own = definition_of(self.body)
        given = {**self.kind.given_options, **self.kind.given_objects, **self.knobs}
        usual = {**own.kind.given_options, **own.kind.given_objects, **own.knobs} if own else {}
        changed = {key: value for key, value in given.items() if key not in usual or value != usual[key]}
        named: dict[str, Any] = {"name": self.name} if self.name != self.body.__name__ else {}
        named |= {"reads": dict(self.reads)} if self.reads else {}
        models = [model.name for model in self.kind.models]
        texts = [*models, *(f"{key}={value!r}" for key, value in (named | changed).items())]
        return f"use({', '.join([self.body.__name__, *texts])})"


def definition_of(node: object) -> Definition[..., Any] | None:
    """Return the definition of a decorated function or of a variant made by `use`; None for anything else."""
    return node if isinstance(node, Definition) else getattr(node, ATTRIBUTE, None)


def define(
    kind: NodeType, body: Callable[..., Any], base: Definition[..., Any] | None = None
) -> Definition[..., Any]:
    """Read the signature of a body and check that a node type can run it.

    Args:
        kind: the decorator.
        body: the function.
        base: the definition of which the new one is a variant. Its name, location, knobs, `reads` and order
            of engines are kept.

    Raises:
        RecipeError: if the node type cannot run the body.
    """
    where = base.where if base else definition_location(body)

    def error(problem: str) -> RecipeError:
        return recipe_error(where, body.__name__, problem)

    _check_async(kind, body, error)
    signature = read_signature(body, where, kind.form, _provided_kinds(kind))
    if function := first_pass_of(body):
        if kind.runs_as != "train":
            raise error(f"@first_pass is for train nodes, and this is @{kind.verb}. Remove it")
        signature = with_first_pass(signature, function, error)
    name = base.name if base else body.__name__
    if not name.isascii():
        raise error("the name must have ASCII letters only, as overrides name the node. Rename the function")
    results = kind.read_results(signature.result, name, error)
    _check_knob_names(kind, signature, error)
    _check_required_parameters(kind, signature, error)
    engines = base.engines if base and base.engines else _order_engines(kind, signature, error)
    knobs = {knob.name: knob.value for knob in signature.knobs}
    fresh: Definition[..., Any] = Definition(
        name, kind, body, where, signature, results, knobs, engines=engines
    )
    return replace(fresh, knobs={**knobs, **base.knobs}, reads=base.reads) if base else fresh


def _provided_kinds(kind: NodeType) -> tuple[str, ...]:
    """Return the kinds of parameters that are provided; those of whole batches exist for batches only."""
    batch_only = {"sequences", "separate_sequences", "state", "tensordict"}
    return kind.provides if kind.form == "tensor" else tuple(set(kind.provides) - batch_only)


def _check_async(kind: NodeType, body: Callable[..., Any], error: ErrorFactory) -> None:
    is_async = inspect.iscoroutinefunction(body)
    if kind.is_async is True and not is_async:
        raise error(f"the body of @{kind.verb} must be asynchronous. Write 'async def'")
    if is_async and (kind.is_async is False or kind.form == "tensor"):
        raise error(
            "only bodies of generate, and of compute with per='sample' or per='group', may be 'async def'. "
            "Write 'def'"
        )
    if inspect.iscoroutinefunction(type(kind).run) and (
        kind.runs_as not in ("compute", "generate") or kind.form == "tensor"
    ):
        raise error(
            f"run of {type(kind).__name__} is 'async def', which only kinds like generate, and like compute "
            "per sample or group, can have. Write 'def'"
        )


def _check_knob_names(kind: NodeType, signature: Signature, error: ErrorFactory) -> None:
    for knob in signature.knobs:
        if not knob.name.isascii():
            raise error(f"knob {knob.name!r} must have ASCII letters only, as overrides name it. Rename it")
        if knob.name in kind.option_names:
            raise error(f"knob {knob.name!r} has the same name as an option of @{kind.verb}. Rename the knob")


def _check_required_parameters(kind: NodeType, signature: Signature, error: ErrorFactory) -> None:
    provided = [provided_kind for _, provided_kind in signature.provided]
    for needed in kind.needs:
        if needed not in provided:
            annotation = needed.capitalize()
            raise error(f"the body of @{kind.verb} needs a parameter annotated with {annotation}. Add one")


def _order_engines(kind: NodeType, signature: Signature, error: ErrorFactory) -> tuple[str, ...]:
    """Return the Engine parameters in the order of the models. With several models, names must match."""
    engines = tuple(name for name, provided_kind in signature.provided if provided_kind == "engine")
    models = tuple(model.name for model in kind.models)
    if not models or (len(engines) <= 1 and len(models) <= 1):
        return engines
    if sorted(engines) != sorted(models):
        raise error(
            f"with several models, the body needs one Engine parameter named after each model. "
            f"The models are {', '.join(models)}, the Engine parameters {', '.join(engines) or 'none'}. "
            "Rename the parameters"
        )
    return models
