"""`NodeType`: the one mechanism behind every verb, and behind a user's own.

An instance is a decorator with its models and options bound. It reads the body's signature,
attaches a `Definition` to the function and returns the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hflow.dsl.annotations import Form
from hflow.dsl.definition import ATTRIBUTE, define
from hflow.dsl.model import Model
from hflow.dsl.options import COMMON, GROUPED, Options
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_fields
from hflow.dsl.source_location import caller_location
from hflow.errors import RecipeError, nearest
from hflow.graph.errors import recipe_error
from hflow.graph.ir import Level

Body = TypeVar("Body", bound=Callable[..., Any])

_FORMS: Mapping[Level, Form] = {Level.SAMPLE: "sample", Level.GROUP: "group", Level.BATCH: "tensor"}

NODE_TYPES: dict[str, type[NodeType]] = {}
"""verb -> its type."""


@dataclass(frozen=True)
class Shapes:
    """The size of one firing of a node, for `NodeType.cost`."""

    tokens: float
    sequences: float
    groups: float


@dataclass(frozen=True)
class Context:
    """What `NodeType.run` has besides its inputs."""

    body: Callable[..., Any]
    knobs: Mapping[str, Any]
    options: Mapping[str, Any]


class NodeType:
    """A kind of node. Subclass it to add a verb; `class Audit(NodeType)` is used as `@Audit()`.

    Class attributes say what is the same for every node of the kind, the constructor takes what
    one node chooses. What planning needs (layouts, cost, drawing, weights) is asked once, when the
    recipe becomes a value, and frozen into the node.

    Attributes:
        verb: its name in plans and messages; the class's in lower case unless set.
        level: when it fires.
        num_models: least and most models that it takes; None means any number.
        options: decorator options, by name.
        objects: options that are objects of the recipe (`data`, `source`), with their type.
        provides: kinds of provided parameters that its bodies may ask for.
        needs: kinds among them that its bodies must ask for.
        is_async: whether a body must be `async def`; None where it may.
        opens_stream: whether it makes samples.
    """

    verb: ClassVar[str] = "node"
    level: ClassVar[Level] = Level.BATCH
    num_models: ClassVar[tuple[int, int | None]] = (0, None)
    options: ClassVar[Options] = COMMON | GROUPED
    objects: ClassVar[Mapping[str, type]] = {}
    provides: ClassVar[tuple[str, ...]] = ("sequences", "state")
    needs: ClassVar[tuple[str, ...]] = ()
    is_async: ClassVar[bool | None] = False
    opens_stream: ClassVar[bool] = False

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if abstract:
            return
        if "verb" not in cls.__dict__:
            cls.verb = cls.__name__.lower()
        known = NODE_TYPES.get(cls.verb)
        if known is not None and known.__module__ != cls.__module__:
            raise RecipeError(
                f"{caller_location()}: verb {cls.verb!r} is taken by {known.__module__}; set another verb"
            )
        NODE_TYPES[cls.verb] = cls

    def __init__(self, *models: Model, **options: Any) -> None:
        self.where = caller_location()
        self.models = self._checked_models(models)
        self.bound = {name: options.pop(name) for name in self.objects if name in options}
        self.given = self._checked_options(options)
        for name, value in self.bound.items():
            if not isinstance(value, self.objects[name]):
                raise self._fault(f"{name}= takes a {self.objects[name].__name__}, not {value!r}")

    def __call__(self, body: Body) -> Body:
        """Decorate a body.

        Raises:
            RecipeError: when its signature is not one that this kind can run.
        """
        if not callable(body) or not hasattr(body, "__code__"):
            raise self._fault(f"@{self.verb} decorates a function, not {body!r}")
        if hasattr(body, ATTRIBUTE):
            raise self._fault(f"{body.__name__} is decorated twice; use() makes variants of a node")
        setattr(body, ATTRIBUTE, define(self, body))
        return body

    @property
    def settings(self) -> dict[str, Any]:
        """Every option with its value, defaults included."""
        return {name: self.given.get(name, option.default) for name, option in self.options.items()}

    @property
    def fires(self) -> Level:
        """The level that this node chose (`per=`), or its kind's."""
        return Level(self.given.get("per", self.level))

    @property
    def form(self) -> Form:
        """How bodies see their fields."""
        return _FORMS[self.fires]

    @property
    def all_models(self) -> tuple[Model, ...]:
        """Models that it names."""
        return self.models

    @property
    def reads_weights(self) -> tuple[str, ...]:
        """Names of the models whose weights it reads."""
        return tuple(model.name for model in self.all_models)

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """Names of the models whose weights it overwrites."""
        return ()

    def layout(self, field: str) -> str:
        """Where a returned field lies: `sharded` over the dp-heads of its replica, or `single`."""
        return "single"

    def cost(self, shapes: Shapes) -> float:
        """Seconds of one firing, affine in the shapes; 0 leaves it to the planner's cost model."""
        return 0.0

    def draw(self) -> str:
        """Its Graphviz shape."""
        return "box"

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        """Fire: inputs by parameter name in, the body's results out."""
        return context.body(**inputs, **context.knobs)

    def read_results(self, hint: Any, function: str, fault: ErrorFactory) -> ReturnTypes:
        """What a body with this result annotation returns."""
        return read_fields(hint, self.names, function, self.form, fault)

    @property
    def names(self) -> tuple[str, ...]:
        """What `returns=` says, as a tuple."""
        names = self.given.get("returns") or ()
        return (names,) if isinstance(names, str) else names

    @property
    def is_open(self) -> bool:
        """Whether models are still missing."""
        return len(self.models) < self.num_models[0]

    def variant(self, models: tuple[Model, ...], options: Mapping[str, Any]) -> NodeType:
        """The same kind with other models and some other options."""
        return type(self)(*(models or self.models), **{**self.given, **self.bound, **options})

    def _checked_models(self, models: tuple[Any, ...]) -> tuple[Model, ...]:
        most = self.num_models[1]
        for model in models:
            if callable(model) and not isinstance(model, type):
                raise self._fault(f"write @{self.verb}(...) with parentheses above {model.__name__}")
            if not isinstance(model, Model):
                raise self._fault(f"@{self.verb} takes Models, not {model!r}")
        if most is not None and len(models) > most:
            raise self._fault(f"@{self.verb} takes at most {most} model(s), not {len(models)}")
        return models

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        checked = {}
        for name, value in options.items():
            if name not in self.options:
                raise self._fault(f"@{self.verb} has no option {name!r}{nearest(name, self.known)}")
            try:
                checked[name] = self.options[name].check(value)
            except ValueError as error:
                raise self._fault(f"option {name} is {error}") from error
        return checked

    @property
    def known(self) -> tuple[str, ...]:
        """Every option's name."""
        return (*self.options, *self.objects)

    def _fault(self, text: str) -> RecipeError:
        return recipe_error(self.where, self.verb, text)
