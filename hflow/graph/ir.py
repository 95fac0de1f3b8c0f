"""Frozen values of a graph: `RecipeSpec`, which a recipe declares, and `Graph`, which `build_graph` makes.

The parameters of a `RecipeSpec` are names. In a `Graph` every parameter is bound to the node that produces
its field, and every edge has a lag: the number of steps between its two ends.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hflow.graph.errors import SourceLocation
from hflow.graph.model import Model
from hflow.types import Unit
from hflow.types.trajectory import TRAJECTORIES, TRAJECTORY

TRAJECTORY_FIELDS: Mapping[str, Unit] = {
    "input_ids": Unit.TOKEN,
    "loss_mask": Unit.TOKEN,
    "behav_logprobs": Unit.TOKEN,
    "versions": Unit.TOKEN,
    "completion": Unit.TEXT,
    "messages": Unit.MESSAGES,
    "stop_reason": Unit.TEXT,
    "num_tokens": Unit.SEQUENCE,
    "num_turns": Unit.SEQUENCE,
    "group": Unit.SEQUENCE,
}
"""Fields that every stream has from its source, besides the columns of the dataset."""


FIRST_PASS = "first_pass"
"""The kind of the parameter with which a train body receives the result of its first pass."""


class Level(enum.StrEnum):
    """When a node runs: once per sample, once per group, or once per batch (a step)."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


class EdgeKind(enum.StrEnum):
    """The meaning of an edge.

    `data`: fields; `weights`: a model's new weights; `overwrite`: read before the weights are overwritten;
    `order`: two nodes of a device group, one after the other.
    """

    DATA = "data"
    WEIGHTS = "weights"
    OVERWRITE = "overwrite"
    ORDER = "order"


@dataclass(frozen=True)
class BodyRef:
    """The name of a body and the digest of its source. The function itself is not part of a plan."""

    module: str
    qualname: str
    digest: str


@dataclass(frozen=True)
class Parameter:
    """A parameter before `*`, which reads a field. It is not bound to a producer yet."""

    name: str
    field: str
    unit: Unit
    scalar: str
    """The type that the body receives: `tensor`, `str`, `float`, `list[float]`, `dict` ..."""
    optional: bool = False


@dataclass(frozen=True)
class Knob:
    """A parameter after `*`: a hyper-parameter with its value."""

    name: str
    type: str
    value: Any


@dataclass(frozen=True)
class Returned:
    """A field that a body returns; for a train node its loss, which is not a field."""

    field: str
    unit: Unit
    scalar: str = "tensor"
    """The type that the body returns: `tensor`, `float`, `bool`, `list[float]`, `dict` ..."""


EPISODE_FIELDS = (
    Returned(TRAJECTORY, Unit.TOKEN, "list[int]"),
    Returned(TRAJECTORIES, Unit.JSON, "list[dict]"),
)
"""Fields that hflow makes of a list of trajectories, beside those that the body of its episode returns."""


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset as the recipe declares it: its name and typed columns."""

    name: str
    columns: tuple[tuple[str, Unit], ...]
    where: SourceLocation | None = None


@dataclass(frozen=True)
class NodeSpec:
    """A decorated function, or a variant of one made by `use`, as a value."""

    name: str
    verb: str
    """How it runs: `encode`, `generate`, `compute`, `infer`, `train` or `update`."""
    level: Level
    body: BodyRef
    where: SourceLocation
    models: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    provided: tuple[tuple[str, str], ...] = ()
    """Parameters that hflow provides, each with its kind: `engine output sequences tokenizer state`; for
    several engines `engine:MODEL`, for an update `target` and `source`, for a train node `first_pass`."""
    returns: tuple[Returned, ...] = ()
    metrics: bool = False
    opens_stream: bool = False
    streams: tuple[str, ...] = ()
    """Names of the streams that it opens, in the order in which its body returns their trajectories."""
    group: int = 1
    """Number of samples per prompt (G), for nodes that open a stream."""
    on: str | None = None
    data: str | None = None
    reads_weights: tuple[str, ...] = ()
    writes_weights: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Decorator options: `reduce minibatches epochs prox timeout retries concurrency
    temperature max_tokens min_group mask ...`, all with their values, defaults included."""
    every: int = 1
    after: int = 0
    layouts: tuple[tuple[str, str], ...] = ()
    """(field, layout) from `NodeType.layout`: `sharded` or `single`."""
    cost: tuple[tuple[str, float], ...] = ()
    """Seconds of one call from `NodeType.cost`, as coefficients of `constant tokens sequences groups`; empty
    if the planner estimates them."""
    shape: str = "box"
    """Graphviz shape, from `NodeType.draw`."""
    memory: int = 0
    """Bytes on each worker that runs it, from `NodeType.memory`."""
    has_setup: bool = False
    """Whether its NodeType has a `setup`, which prepares each worker that runs it."""
    kind: str = ""
    """The name of its NodeType if the recipe defines it, otherwise empty."""
    implicit: bool = False
    """Whether hflow added it (`actor_inf` for `prox="recompute"`). It is dropped if no node reads it."""

    @property
    def has_first_pass(self) -> bool:
        """Whether a forward pass over the whole minibatch comes before each loss (`dsl/first_pass.py`)."""
        return any(kind == FIRST_PASS for _, kind in self.provided)

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of a decorator option."""
        return dict(self.options).get(name, default)

    @property
    def returns_list(self) -> bool:
        """Whether it is a generate node whose episodes return any number of trajectories."""
        return self.verb == "generate" and self.returns[-len(EPISODE_FIELDS) :] == EPISODE_FIELDS

    @property
    def knob_values(self) -> dict[str, Any]:
        """Knob of its body -> its value."""
        return {knob.name: knob.value for knob in self.knobs}

    @property
    def kind_name(self) -> str:
        """The name of its NodeType: a user's own, or the verb."""
        return self.kind or self.verb


@dataclass(frozen=True)
class RecipeSpec:
    """The declarations of a recipe."""

    name: str
    dataset: str
    nodes: tuple[NodeSpec, ...]
    models: tuple[Model, ...]
    datasets: tuple[DatasetSpec, ...]
    unlisted: tuple[tuple[str, SourceLocation], ...] = ()
    """(name, location) of decorated functions in the recipe's file that no recipe lists."""
    doc: str = ""

    @property
    def learns(self) -> bool:
        """Whether a node changes a model. Otherwise the recipe only evaluates, and has no steps."""
        return any(node.writes_weights for node in self.nodes)


@dataclass(frozen=True)
class Read:
    """A parameter that is bound to a field: the producer of the field, its stream and its unit."""

    parameter: str
    """The body's parameter. A name with `@` is a field that hflow itself needs and the body does not receive:
    `@mask` and `@observed` (options), `@behav_logprobs` and `@versions` (for `prox="loglinear"` and
    `"metrics"`, and to compare the engine's log-probs with the trainer's), `@group` (groups stay whole), and
    records that are
    replayed, such as `@routed_experts` (an option of the stream's source)."""
    field: str
    stream: str
    """The stream that has the field. If it is not the reader's stream, the two are joined by sample."""
    producer: str
    """The node that produces the field; for dataset columns and trajectory fields, the source of the stream.
    It is the reader itself if nothing has to be moved: for the dataset columns that a source reads, and for
    the prox_logprobs that a train node computes itself (`prox="loglinear"`)."""
    source_unit: Unit
    unit: Unit
    scalar: str


@dataclass(frozen=True)
class Node:
    """A node of the graph: its spec, the stream that it works on, and its bound parameters."""

    spec: NodeSpec
    stream: str
    reads: tuple[Read, ...] = ()
    unbound: tuple[str, ...] = ()
    """Optional parameters whose field no node produces. The body's default is used."""

    @property
    def name(self) -> str:
        """The name of its spec."""
        return self.spec.name


@dataclass(frozen=True)
class Stream:
    """The samples of one encode or generate node."""

    name: str
    source: str
    dataset: str | None
    """The dataset that feeds it; None if it derives from another stream."""
    parent: str | None
    group: int
    every: int = 1
    after: int = 0
    trained: bool = False
    """Whether the recipe's dataset feeds it and the recipe learns. Its batches make the steps."""


@dataclass(frozen=True)
class Edge:
    """A dependency between two nodes."""

    kind: EdgeKind
    src: str
    dst: str
    lag: int = 0
    fields: tuple[str, ...] = ()
    model: str | None = None
    at_most: bool = False
    """Whether the lag is an upper bound, `lag + max_staleness`: for weight edges into generation."""


@dataclass(frozen=True)
class Graph:
    """The checked graph of one recipe."""

    name: str
    dataset: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    streams: tuple[Stream, ...]
    models: tuple[Model, ...]
    datasets: tuple[DatasetSpec, ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)
    skipped: tuple[str, ...] = ()
    """Listed nodes that do not run because no node reads their field (`actor_inf`)."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for each optional parameter that stays unbound, with the most similar field name."""

    @property
    def learns(self) -> bool:
        """Whether a node changes a model. Otherwise every stream is evaluated once, without steps."""
        return any(node.spec.writes_weights for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node with a name."""
        return self._by_name[name]

    def stream(self, name: str) -> Stream:
        """Return the stream with a name."""
        return next(s for s in self.streams if s.name == name)

    def root_stream(self, name: str) -> Stream:
        """Return the stream, fed by a dataset, whose samples the stream `name` shares.

        Of several streams that one source opens, it is the first.
        """
        stream = self.stream(name)
        while stream.parent is not None:
            stream = self.stream(stream.parent)
        return next(s for s in self.streams if s.source == stream.source)

    def model(self, name: str) -> Model:
        """Return the model with a name."""
        return next(m for m in self.models if m.name == name)

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}
