"""`to_spec`: convert a `Definition` to a `NodeSpec`, a frozen value in which costs and layouts are data.

`Recipe`: the nodes of an algorithm and the dataset that feeds them.

`load_recipe`: import a recipe file and find the `Recipe` in it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import linecache
import math
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hflow.base.errors import HflowError, RecipeError, nearest, shorten
from hflow.base.files import resolved
from hflow.base.recipe_files import MODULE_PREFIX, use_directory
from hflow.base.shipped import shipped_recipes
from hflow.base.validation import is_name
from hflow.dsl.bodies import WARNING_ATTRIBUTE, check_of, has_setup, node_body, reads_group_members
from hflow.dsl.dataset import Dataset
from hflow.dsl.first_pass import first_pass_of, first_pass_problem, read_first_pass
from hflow.dsl.implicit_nodes import implicit_nodes
from hflow.dsl.nodetype import Definition, NodeType, Shapes, definition_of
from hflow.dsl.options import SPEC_FIELDS
from hflow.dsl.rows import functions_with, rows, sampler
from hflow.graph.errors import (
    SourceLocation,
    caller_location,
    caller_module,
    format_problem,
    recipe_error,
    relative_path,
)
from hflow.graph.ir import BodyRef, Graph, Knob, Level, NodeSpec, Parameter, RecipeSpec
from hflow.graph.model import Model
from hflow.observer import Observer
from hflow.types import Unit

_LAYOUTS = ("sharded", "single")


def to_spec(node: Definition[..., Any]) -> NodeSpec:
    """Return a node as a frozen value.

    Raises:
        RecipeError: if a model is missing, or a user's NodeType returns an invalid cost, layout or memory.
    """
    kind = node.kind
    if kind.has_open_models:
        problem = f"the node has no model yet. List use({node.name}, MODEL) instead"
        raise recipe_error(node.where, node.name, problem)
    options = kind.option_values
    parameters = tuple(replace(p, field=node.reads.get(p.name, p.field)) for p in node.signature.parameters)
    option_values = _options(kind, node, parameters)
    if _combines_members(node):
        parameters += (Parameter("@group", "group", Unit.SEQUENCE, "tensor"),)
    return NodeSpec(
        name=node.name,
        verb=kind.runs_as,
        level=kind.node_level,
        body=_body_ref(node),
        where=node.where,
        models=tuple(model.name for model in kind.all_models),
        parameters=parameters,
        provided=_provided(node),
        returns=node.results.fields,
        metrics=node.results.metrics,
        opens_stream=kind.opens_stream,
        streams=node.results.streams,
        group=options.get("group", 1),
        on=options.get("on"),
        data=kind.given_objects["data"].name if "data" in kind.given_objects else None,
        reads_weights=kind.reads_weights,
        writes_weights=kind.writes_weights,
        knobs=tuple(Knob(knob.name, knob.type, node.knobs[knob.name]) for knob in node.signature.knobs),
        options=option_values,
        every=options["every"],
        after=options["after"],
        layouts=_layouts(node),
        cost=_cost(node),
        memory=_memory(node),
        shape=kind.draw(),
        has_setup=has_setup(node),
        kind="" if kind.verb == kind.runs_as else kind.verb,
        implicit=node.implicit,
    )


def _combines_members(node: Definition[..., Any]) -> bool:
    """Return whether a body of micro-batches needs whole groups, which no parameter or result says."""
    returns_groups = any(returned.unit is Unit.GROUP for returned in node.results.fields)
    kinds = {kind for _, kind in node.signature.provided}
    has_sequences = not kinds.isdisjoint(("sequences", "separate_sequences"))
    is_of_microbatches = node.kind.runs_as in ("infer", "train") and has_sequences
    return is_of_microbatches and not returns_groups and reads_group_members(node.body)


def _provided(node: Definition[..., Any]) -> tuple[tuple[str, str], ...]:
    """Return the provided parameters with their kinds; if there are several engines, each with its model."""
    models = dict(zip(node.engines, (m.name for m in node.kind.models), strict=False))
    several = len(node.engines) > 1
    return tuple(
        (name, f"engine:{models[name]}" if several and kind == "engine" else kind)
        for name, kind in node.signature.provided
    )


def _options(
    kind: NodeType, node: Definition[..., Any], parameters: tuple[Parameter, ...]
) -> tuple[tuple[str, Any], ...]:
    """Return every option with its value. Defaults that depend on the body are filled in here."""
    options = {name: value for name, value in kind.option_values.items() if name not in SPEC_FIELDS}
    if options.get("min_group", 0) is None:
        options["min_group"] = 2 if _needs_group(kind, node, parameters) else 1
    if options.get("prox", "") is None:
        reads_prox = any(parameter.field == "prox_logprobs" for parameter in parameters)
        options["prox"] = "recompute" if reads_prox else "none"
    return tuple(options.items())


def _needs_group(kind: NodeType, node: Definition[..., Any], parameters: tuple[Parameter, ...]) -> bool:
    has_group_loss = kind.runs_as == "train" and node.results.fields[0].unit is Unit.GROUP
    return kind.node_level is Level.GROUP or has_group_loss or any(p.field == "group" for p in parameters)


def _layouts(node: Definition[..., Any]) -> tuple[tuple[str, str], ...]:
    layouts = tuple((result.field, node.kind.layout(result.field)) for result in node.results.fields)
    for field, layout in layouts:
        if layout not in _LAYOUTS:
            problem = f"layout({field!r}) must return 'sharded' or 'single', not {layout!r}"
            raise recipe_error(node.where, node.name, problem)
    return layouts


def _cost(node: Definition[..., Any]) -> tuple[tuple[str, float], ...]:
    """Return the coefficients of an affine cost; none if it is 0, so that the planner estimates it."""
    cost = node.kind.cost
    constant = cost(Shapes(0, 0, 0))
    slopes = [cost(s) - constant for s in (Shapes(1, 0, 0), Shapes(0, 1, 0), Shapes(0, 0, 1))]
    predicted = constant + 300 * slopes[0] + 20 * slopes[1] + 5 * slopes[2]
    if abs(cost(Shapes(300, 20, 5)) - predicted) > 1e-6 * max(1.0, abs(predicted)):
        problem = "cost(shapes) must be affine in tokens, sequences and groups"
        raise recipe_error(node.where, node.name, problem)
    names = ("constant", "tokens", "sequences", "groups")
    values = (constant, *slopes)
    return tuple(zip(names, values, strict=True)) if any(values) else ()


def _memory(node: Definition[..., Any]) -> int:
    memory = node.kind.memory()
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 <= memory < math.inf:
        problem = f"memory() must return a number of bytes, not {memory!r}"
        raise recipe_error(node.where, node.name, problem)
    return int(memory)


def _body_ref(node: Definition[..., Any]) -> BodyRef:
    body = node.body
    return BodyRef(body.__module__, body.__qualname__, _source_digest(body, node))


def _source_digest(body: Callable[..., Any], node: Definition[..., Any]) -> str:
    functions = filter(None, (body, first_pass_of(body)))
    try:
        source = "".join(textwrap.dedent(inspect.getsource(function)) for function in functions)
    except OSError as error:
        problem = "the function's source cannot be read. Define it in a file"
        raise recipe_error(node.where, node.name, problem) from error
    return hashlib.sha256(source.encode()).hexdigest()[:16]


Named = TypeVar("Named", Model, Dataset)


class Recipe:
    """A list of nodes, fed by a dataset: `Recipe("grpo", data, [actor_gen, score, ...])`.

    The order of the nodes does not matter: the names of parameters and fields connect them.

    Args:
        name: the recipe's name, an identifier.
        dataset: the dataset whose batches make the training steps.
        nodes: decorated functions, and variants of them made by `use`.
        observers: receive what a run reports, such as a tracker of one's own.

    Raises:
        RecipeError: if an item of a list is not a node or not an observer, or two nodes have the same name.
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        nodes: Sequence[Callable[..., Any]],
        *,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.where = caller_location()
        self.module = caller_module()
        if not is_name(name):
            raise RecipeError(
                f"{self.where}: Recipe({name!r}): the name must be an identifier of ASCII letters, such as "
                "'ppo'"
            )
        if not isinstance(dataset, Dataset):
            raise RecipeError(
                f"{self.where}: Recipe({name!r}): the second argument must be a Dataset, not {dataset!r}"
            )
        self.name = name
        self.dataset = dataset
        self.nodes = tuple(self._definition(node) for node in nodes)
        self.observers = tuple(observers)
        for observer in self.observers:
            if not isinstance(observer, Observer):
                raise RecipeError(
                    f"{self.where}: Recipe({name!r}): {observer!r} is not an observer. Pass an instance of a "
                    "subclass of hflow.Observer"
                )
        self._check_node_names()

    @property
    def file(self) -> Path | None:
        """The Python file that defines the recipe; None: it is defined in a notebook or a shell."""
        name = getattr(sys.modules.get(self.module), "__file__", None)
        return Path(name) if name and Path(name).is_file() else None

    @property
    def row_functions(self) -> dict[str, Callable[..., Any]]:
        """The functions of the recipe's file that make rows (`@rows`), by name."""
        return functions_with(rows, self._names)

    @property
    def samplers(self) -> dict[str, Callable[..., Any]]:
        """The functions of the recipe's file that choose rows (`@sampler`), by name."""
        return functions_with(sampler, self._names)

    @property
    def _names(self) -> dict[str, Any]:
        return vars(sys.modules[self.module]) if self.module in sys.modules else {}

    def spec(self) -> RecipeSpec:
        """Return the recipe as a frozen value, with the nodes that hflow adds.

        Raises:
            RecipeError: if a node lacks its model, or two models or datasets have the same name.
        """
        listed = [to_spec(node) for node in self.nodes]
        implicit = [to_spec(node) for node in implicit_nodes(self.nodes)]
        return RecipeSpec(
            name=self.name,
            dataset=self.dataset.name,
            nodes=(*listed, *implicit),
            models=tuple(self._models()),
            datasets=tuple(dataset.spec() for dataset in self._datasets()),
            unlisted=tuple(self._unlisted()),
            doc=getattr(sys.modules.get(self.module), "__doc__", None) or "",
        )

    def bodies(self, options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Callable[..., Any]]:
        """Return the function that a worker calls for each node, with inputs and knobs by name.

        Args:
            options: node -> options that a configuration changed, for node types that override `run`.
        """
        nodes = (*self.nodes, *implicit_nodes(self.nodes))
        directory = str(Path.cwd() if self.file is None else self.file.resolve().parent)
        return {node.name: node_body(node, (options or {}).get(node.name, {}), directory) for node in nodes}

    def check_bodies(self, graph: Graph) -> Graph:
        """Make the checks that bodies have of their knobs and inputs, and of first passes.

        Args:
            graph: this recipe's, with the knobs of the configuration.

        Returns:
            The graph, with the warnings of its bodies (`warned_by`).

        Raises:
            RecipeError: for the first problem (`checked_by`).
        """
        bodies, warnings = {node.name: node.body for node in self.nodes}, list(graph.warnings)
        for node in graph.nodes:
            if body := bodies.get(node.name):
                check, function = check_of(body), first_pass_of(body)
                reads = [read.parameter for read in node.reads]
                settings = dict(node.spec.options) | node.spec.knob_values
                problem = check(settings, reads) if check else None
                if problem is None and function is not None:
                    problem = first_pass_problem(read_first_pass(function), node, graph)
                if problem is not None:
                    raise recipe_error(node.spec.where, node.name, problem)
                warn = check_of(body, WARNING_ATTRIBUTE)
                if warn is not None and (warning := warn(settings, reads)):
                    warnings.append(format_problem(node.spec.where, node.name, warning))
        return replace(graph, warnings=tuple(warnings))

    def _definition(self, node: Callable[..., Any]) -> Definition[..., Any]:
        definition = definition_of(node)
        if definition is None:
            shown = getattr(node, "__name__", repr(node))
            raise RecipeError(
                f"{self.where}: Recipe({self.name!r}): {shown} is not a node. Decorate the function, "
                f"for example with @compute()"
            )
        is_library_node = node is definition.body and node.__module__.startswith("hflow.")
        return replace(definition, where=self.where) if is_library_node else definition

    def _check_node_names(self) -> None:
        locations: dict[str, SourceLocation] = {}
        for node in self.nodes:
            if node.name in locations:
                raise RecipeError(
                    f"{node.where}: {node.name}: another node with this name is at {locations[node.name]}. "
                    f"Rename one of them with use(..., name=)"
                )
            locations[node.name] = node.where

    def _models(self) -> list[Model]:
        models = [model for node in self.nodes for model in node.kind.all_models]
        for model in models:
            if model.init_from is not None and model.init_from not in models:
                models.append(model.init_from)
        return _distinct(models)

    def _datasets(self) -> list[Dataset]:
        given = [node.kind.given_objects for node in self.nodes]
        return _distinct([self.dataset, *(objects["data"] for objects in given if "data" in objects)])

    def _unlisted(self) -> Iterator[tuple[str, SourceLocation]]:
        """Yield the nodes of the recipe's file that no recipe in it lists, in the order of the file."""
        values = vars(sys.modules[self.module]).values() if self.module in sys.modules else ()
        recipes = [value for value in values if isinstance(value, Recipe)]
        listed = [node for recipe in {*recipes, self} for own in recipe.nodes for node in _with_varied(own)]
        for value in values:
            node = definition_of(value)
            if node is None or not _is_defined_in(self.module, value, node):
                continue
            is_listed = any(node is other or (callable(value) and value is other.body) for other in listed)
            if not is_listed:
                yield node.name, node.where


def _with_varied(node: Definition[..., Any] | None) -> Iterator[Definition[..., Any]]:
    """Yield a node and those of which `use` made it."""
    while node is not None:
        yield node
        node = node.varied


def _is_defined_in(module: str, value: object, node: Definition[..., Any]) -> bool:
    """Return whether a node was made in a module: a variant always was, a function may be imported."""
    return isinstance(value, Definition) or node.body.__module__ == module


def _distinct(items: Sequence[Named]) -> list[Named]:
    """Return each model or dataset once.

    Raises:
        RecipeError: if two different ones have the same name.
    """
    by_name: dict[str, Named] = {}
    for item in items:
        other = by_name.setdefault(item.name, item)
        if other is not item:
            raise RecipeError(f"{item.where}: {item!r} is also declared at {other.where}. Rename one of them")
    return list(by_name.values())


def load_recipe(path: str | Path) -> Recipe:
    """Import a recipe file and return the one `Recipe` in it. It can import modules beside it.

    Raises:
        RecipeError: if the file does not exist, is not Python, raises an exception, or does not hold exactly
            one `Recipe`.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        shallow_first = sorted(shipped_recipes(), key=lambda name: name.count("/"))
        shipped = next((name for name in shallow_first if Path(name).name == file.stem), None)
        hint = nearest(file.name, neighbours)
        if shipped is not None and not hint:
            hint = f"; did you mean {shipped!r}, which comes with hflow?"
        raise RecipeError(f"there is no recipe file {str(path)!r}{hint}")
    module = _import(resolved(file))
    recipes = [value for value in vars(module).values() if isinstance(value, Recipe)]
    if len(recipes) == 1:
        return recipes[0]
    shown = relative_path(str(resolved(file)))
    if not recipes:
        raise RecipeError(
            f"{shown}: the file has no Recipe(...). Add 'recipe = Recipe(NAME, DATASET, NODES)'"
        )
    names = ", ".join(recipe.name for recipe in recipes)
    raise RecipeError(f"{shown}: the file has {len(recipes)} recipes ({names}). Keep one")


def _import(file: Path) -> ModuleType:
    name = MODULE_PREFIX + file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file}: a recipe must be a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    use_directory(file.parent)
    try:
        spec.loader.exec_module(module)
    except HflowError:
        raise
    except SyntaxError as error:
        shown = relative_path(error.filename or str(file))
        raise RecipeError(f"{shown}:{error.lineno}: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a recipe may also call sys.exit()
        line = _line_in(file, error)
        said = _first_line(error) or linecache.getline(str(file), line).strip() or "it gives no reason"
        what = f"{type(error).__name__}: {said}"
        raise RecipeError(f"{relative_path(str(file))}:{line}: {what}{_meant(error)}") from error
    return module


def _meant(error: BaseException) -> str:
    """Return the name that was probably meant, such as `"; did you mean 'group_advantage'?"`."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return nearest(error.name or "", dir(error.obj))
    return ""


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, if it has one that can be printed."""
    try:
        return shorten(str(error).strip().partition("\n")[0], 500)
    except Exception:  # noqa: BLE001 - raised by the recipe's own exception class
        return "its message cannot be printed"


def _line_in(file: Path, error: BaseException) -> int:
    """Return the innermost line of the file in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(file)), 0)
