"""Ready nodes (`hflow.nodes`, `hflow.rewards`), optimizers, adapters, and nodes of a recipe."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hflow import nodes, rewards
from hflow.base.errors import RecipeError, nearest
from hflow.config.field_meanings import field_meanings
from hflow.config.schema import LoraConfig, OptimConfig
from hflow.dsl.first_pass import first_pass_of
from hflow.dsl.nodetype import Definition, definition_of
from hflow.graph.errors import definition_location
from hflow.graph.ir import NodeSpec
from hflow.launch.planning.read_recipe import read_nodes
from hflow.planner.plan.optimizers import OPTIMIZERS, optimizer_kind
from hflow.types import Unit

UNITS = {
    Unit.TOKEN: "per token [T]",
    Unit.SEQUENCE: "per sequence [S]",
    Unit.GROUP: "per group [P]",
    Unit.TEXT: "text",
    Unit.MESSAGES: "messages",
    Unit.JSON: "JSON",
    Unit.IMAGE: "an image",
    Unit.IMAGES: "images",
    Unit.PIXELS: "pixels",
}
_ARGUMENT = re.compile(r"(\w+): (.*)")
_SECTIONS = ("Args:", "Returns:", "Raises:")


@dataclass(frozen=True)
class NodeField:
    """A field that a node reads or returns."""

    name: str
    unit: str
    meaning: str
    is_optional: bool = False


@dataclass(frozen=True)
class NodeOption:
    """A knob of a node's body, or an option of its decorator."""

    name: str
    type: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class CatalogNode:
    """A ready node, or a node of a recipe."""

    name: str
    """The name that recipes write, such as `nodes.actor_train`; in a recipe, the node's own name."""
    kind: str
    """The node's decorator."""
    level: str
    """`sample`, `group` or `batch`: what one call receives."""
    summary: str
    description: str
    """The docstring without its arguments."""
    inputs: tuple[NodeField, ...]
    provided: tuple[NodeField, ...]
    """Parameters that hflow provides; their unit is their kind."""
    outputs: tuple[NodeField, ...]
    knobs: tuple[NodeOption, ...]
    options: tuple[NodeOption, ...]
    function: str = ""
    """The function that a recipe's node runs, and its place. Nodes may share one."""

    @property
    def config_name(self) -> str:
        """NAME of its keys `nodes.NAME.KNOB`."""
        return self.name.rpartition(".")[2]

    def to_json(self) -> dict[str, Any]:
        """Return the node as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class CatalogSetting:
    """What else a recipe's models can be trained with, by their configuration: an optimizer, or adapters."""

    name: str
    """The key, and its value if it chooses: `models.NAME.optim.name=muon`."""
    kind: str
    """`optimizer` or `adapter`."""
    summary: str
    options: tuple[NodeOption, ...]
    """The keys beside it, or in it, that count."""

    def to_json(self) -> dict[str, Any]:
        """Return the setting as plain values."""
        return asdict(self)


def ready_settings() -> list[CatalogSetting]:
    """Return all optimizers, then adapters."""
    of_optimizers = _key_options(OptimConfig)
    found = [
        CatalogSetting(
            f"models.NAME.optim.name={name}",
            "optimizer",
            kind.summary,
            tuple(option for option in of_optimizers if option.name in kind.traits.options),
        )
        for name, kind in ((name, optimizer_kind(name)) for name in OPTIMIZERS)
    ]
    summary = " ".join((inspect.getdoc(LoraConfig) or "").split())
    return [*found, CatalogSetting("models.NAME.lora", "adapter", summary, _key_options(LoraConfig))]


def _key_options(cls: type) -> tuple[NodeOption, ...]:
    meanings, default = field_meanings(cls), cls()
    return tuple(
        NodeOption(field.name, str(field.type), getattr(default, field.name), meanings[field.name])
        for field in fields(cls)
    )


def ready_nodes() -> list[CatalogNode]:
    """Return all ready nodes: those of `hflow.nodes`, then those of `hflow.rewards`."""
    found = []
    for module in (nodes, rewards):
        for name in dir(module):
            definition = definition_of(getattr(module, name))
            if definition is not None:  # rewards.combine makes a node when it is called
                found.append(_read(f"{module.__name__.rpartition('.')[2]}.{name}", definition))
    return found


def ready_node(name: str) -> CatalogNode | CatalogSetting:
    """Return a ready node, by its name with or without its module, an optimizer such as `muon`, or `lora`.

    Raises:
        RecipeError: if there is none.
    """
    known, settings = ready_nodes(), ready_settings()
    for node in known:
        if name in (node.name, node.name.partition(".")[2]):
            return node
    for setting in settings:
        if name in (setting.name, _last(setting.name)):
            return setting
    names = [*(node.name.partition(".")[2] for node in known), *(_last(one.name) for one in settings)]
    hint = nearest(name.rpartition(".")[2], names)
    raise RecipeError(
        f"there is no ready node {name!r}{hint or '; hflow nodes lists them'}. A recipe's own: hflow nodes "
        "RECIPE NAME"
    )


def _last(name: str) -> str:
    """Return the last part of a setting's name: `muon`, `lora`."""
    return re.split(r"[.=]", name)[-1]


def recipe_nodes(recipe: str | Path, name: str | None = None) -> list[CatalogNode]:
    """Return the nodes of a recipe in its order, or the one named, with the values of its configuration.

    Raises:
        RecipeError: for an error in the recipe, or if it has no such node.
        ConfigError: for an error in its configuration.
    """
    loaded, specs = read_nodes(recipe)
    if name is not None and name not in specs:
        known = [node.name for node in loaded.nodes]
        hint = nearest(name, known) or f"; it has {', '.join(known)}"
        raise RecipeError(f"{recipe} has no node {name!r}{hint}")
    return [
        _with_values(_read(node.name, node), specs[node.name], node)
        for node in loaded.nodes
        if name in (None, node.name)
    ]


def _with_values(node: CatalogNode, spec: NodeSpec, definition: Definition[..., Any]) -> CatalogNode:
    values = {**dict(spec.options), **spec.knob_values, "every": spec.every, "group": spec.group}
    body, place = definition.body, definition_location(definition.body)
    package, _, module = body.__module__.partition(".")
    own = f"{body.__name__}, {Path(place.file).name}:{place.line}"
    return replace(
        node,
        knobs=tuple(replace(knob, default=values[knob.name]) for knob in node.knobs),
        options=tuple(replace(one, default=values.get(one.name, one.default)) for one in node.options),
        function=f"{module.partition('.')[0]}.{body.__name__}" if package == "hflow" else own,
    )


def _read(name: str, node: Definition[..., Any]) -> CatalogNode:
    doc = inspect.getdoc(node.body) or ""
    arguments = _arguments(doc)
    if function := first_pass_of(node.body):
        arguments = _arguments(inspect.getdoc(function) or "") | arguments
    of_decorator = _arguments(inspect.getdoc(type(node.kind).__init__) or "")
    accepted = inspect.signature(type(node.kind).__init__).parameters
    description = _description(doc)
    return CatalogNode(
        name=name,
        kind=node.kind.verb,
        level=node.kind.node_level.value,
        summary=description.partition("\n\n")[0],
        description=description,
        inputs=tuple(
            NodeField(p.field, UNITS[p.unit], arguments.get(p.name, ""), p.optional)
            for p in node.signature.parameters
        ),
        provided=tuple(
            NodeField(parameter, kind, arguments.get(parameter, ""))
            for parameter, kind in node.signature.provided
        ),
        outputs=_outputs(node),
        knobs=tuple(
            NodeOption(knob.name, knob.type, node.knobs[knob.name], arguments.get(knob.name, ""))
            for knob in node.signature.knobs
        ),
        options=tuple(
            NodeOption(
                key, option.type, node.kind.option_values[key], option.text or of_decorator.get(key, "")
            )
            for key, option in node.kind.options.items()
            if option.text or key in accepted
        ),
    )


def _outputs(node: Definition[..., Any]) -> tuple[NodeField, ...]:
    streams = [NodeField(node.name, "stream of samples", "")] * node.kind.opens_stream
    metrics = [NodeField("metrics", "metrics", "")] * node.results.metrics
    return (*streams, *(NodeField(f.field, UNITS[f.unit], "") for f in node.results.fields), *metrics)


def _description(doc: str) -> str:
    """Return a docstring without `Args:`, `Returns:` and `Raises:`, each paragraph and item on a line."""
    paragraphs = (text for text in doc.split("\n\n") if not text.startswith(_SECTIONS))
    items = (text.split("\n- ") for text in paragraphs)
    return "\n\n".join("\n- ".join(" ".join(item.split()) for item in texts) for texts in items)


def _arguments(doc: str) -> dict[str, str]:
    """Return argument -> its meaning, from the section `Args:` of a docstring."""
    lines = doc.partition("Args:\n")[2].splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if line and not line.startswith(" "):
            break
        match = _ARGUMENT.match(line.strip()) if re.match(r" {4}\S", line) else None
        if match:
            name, found[match[1]] = match[1], match[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found
