"""The graph as a value: frozen specs from the recipe, frozen nodes and edges after the build.

`RecipeSpec` is what `dsl` hands over: nodes with unresolved parameters. `build_graph` turns it
into a `Graph`, in which every parameter is bound to a producer and every edge has a lag.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from hflow.types import Unit

TRAJECTORY_FIELDS: Mapping[str, Unit] = {
    "input_ids": Unit.TOKEN,
    "loss_mask": Unit.TOKEN,
    "behav_logprobs": Unit.TOKEN,
    "versions": Unit.TOKEN,
    "completion": Unit.TEXT,
    "messages": Unit.JSON,
    "stop_reason": Unit.TEXT,
    "num_tokens": Unit.SEQUENCE,
    "num_turns": Unit.SEQUENCE,
    "group": Unit.SEQUENCE,
}
"""Fields that every stream carries from its source, besides the dataset's columns."""


class Level(enum.StrEnum):
    """When a node fires: once a sample, once a group, or once a batch (a step)."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


class EdgeKind(enum.StrEnum):
    """The four kinds of edge."""

    DATA = "data"
    WEIGHTS = "weights"
    OVERWRITE = "overwrite"
    ORDER = "order"


@dataclass(frozen=True)
class SourceLocation:
    """A place in the user's source, for messages."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class BodyRef:
    """A body by name and content; the callable itself travels beside the plan."""

    module: str
    qualname: str
    digest: str


@dataclass(frozen=True)
class Parameter:
    """One parameter before `*`: an edge, not yet bound."""

    name: str
    field: str
    unit: Unit
    scalar: str
    """The type that the body receives: `tensor`, `str`, `float`, `list[float]`, `dict` ..."""
    optional: bool = False


@dataclass(frozen=True)
class Knob:
    """One parameter after `*`: a hyper-parameter with its bound value."""

    name: str
    type: str
    value: Any


@dataclass(frozen=True)
class Returned:
    """One field that a body returns (for a train node: the loss, which is no field)."""

    field: str
    unit: Unit
    scalar: str = "tensor"
    """The type that the body returns: `tensor`, `float`, `bool`, `list[float]`, `dict` ..."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as the recipe declares it."""

    name: str
    head: str = "lm"
    trainable: bool = False
    init_from: str | None = None
    where: SourceLocation | None = None


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset as the recipe declares it: its name and typed columns."""

    name: str
    columns: tuple[tuple[str, Unit], ...]
    where: SourceLocation | None = None


@dataclass(frozen=True)
class NodeSpec:
    """A decorated function, or a `use` of one, as a value."""

    name: str
    verb: str
    """`encode generate compute infer train update`, or the name of a user's NodeType."""
    level: Level
    body: BodyRef
    where: SourceLocation
    models: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    provided: tuple[tuple[str, str], ...] = ()
    """(parameter, kind) with kind among `engine output sequences tokenizer state`, for several
    engines `engine:MODEL`, for an update `target` and `source`."""
    returns: tuple[Returned, ...] = ()
    metrics: bool = False
    opens_stream: bool = False
    streams: tuple[str, ...] = ()
    """Names of the streams that it opens. A body returns their trajectories first, in this order."""
    group: int = 1
    """Samples a prompt (G), for nodes that open a stream."""
    on: str | None = None
    data: str | None = None
    reads_weights: tuple[str, ...] = ()
    writes_weights: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Decorator options: `reduce minibatches epochs prox timeout retries concurrency
    temperature max_tokens min_group mask ...`, every one with its value, defaults included."""
    every: int = 1
    after: int = 0
    layouts: tuple[tuple[str, str], ...] = ()
    """For a user's NodeType: field -> layout, filled by `NodeType.layout`."""
    cost: tuple[tuple[str, float], ...] = ()
    """For a user's NodeType: seconds per firing, as coefficients of `constant tokens sequences groups`."""
    shape: str = "box"
    """Graphviz shape, from `NodeType.draw`."""
    implicit: bool = False
    """Added by the framework (`actor_inf` for `prox="recompute"`); dropped when nobody reads it."""

    def option(self, name: str, default: Any = None) -> Any:
        """The value of a decorator option."""
        return dict(self.options).get(name, default)

    @property
    def runs_as_compute(self) -> bool:
        """Whether it is a compute or of a user's kind, which runs like one."""
        return self.verb not in ("encode", "generate", "infer", "train", "update")


@dataclass(frozen=True)
class RecipeSpec:
    """What a recipe file declares."""

    name: str
    dataset: str
    nodes: tuple[NodeSpec, ...]
    models: tuple[ModelSpec, ...]
    datasets: tuple[DatasetSpec, ...]
    unlisted: tuple[tuple[str, SourceLocation], ...] = ()
    """Decorated functions in the recipe's file that no recipe lists (name, place)."""
    doc: str = ""


@dataclass(frozen=True)
class Read:
    """A bound parameter: where its value comes from and what is repeated on the way."""

    parameter: str
    """The body's parameter. A name that starts with `@` is a field which the framework itself needs
    and the body is not given: `@mask` (option `mask`), `@behav_logprobs` and `@versions` (for
    `prox="loglinear"` and `"metrics"`)."""
    field: str
    stream: str
    """The stream that holds the field; another than the reader's means a join by sample."""
    producer: str
    """The node that makes the field; for dataset columns and trajectory fields, the source. It is
    the reader itself where nothing has to be moved: a source's dataset columns, and prox_logprobs
    that a train node makes on its way (`prox="loglinear"`)."""
    source_unit: Unit
    unit: Unit
    scalar: str


@dataclass(frozen=True)
class Node:
    """A node of the graph: its spec, the stream it works on, its bound reads."""

    spec: NodeSpec
    stream: str
    reads: tuple[Read, ...] = ()
    unbound: tuple[str, ...] = ()
    """Optional parameters that nobody produces; the body's default is used."""

    @property
    def name(self) -> str:
        """Its spec's name."""
        return self.spec.name


@dataclass(frozen=True)
class Stream:
    """Samples opened by one source node."""

    name: str
    source: str
    dataset: str | None
    """The dataset whose rows feed it; None when it derives from another stream."""
    parent: str | None
    group: int
    every: int = 1
    after: int = 0
    trained: bool = False
    """Whether it is fed by the recipe's dataset: its batches make the steps."""


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
    """For weight edges into generation: the lag is an upper bound, `lag + max_staleness`."""


@dataclass(frozen=True)
class Graph:
    """The checked graph of one recipe."""

    name: str
    dataset: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    streams: tuple[Stream, ...]
    models: tuple[ModelSpec, ...]
    datasets: tuple[DatasetSpec, ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)
    skipped: tuple[str, ...] = ()
    """Listed nodes that do not run, as nobody reads what they make (`actor_inf`)."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for every optional parameter that stays unbound, with the nearest name."""

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self._by_name[name]

    def stream(self, name: str) -> Stream:
        """The stream of that name."""
        return next(s for s in self.streams if s.name == name)

    def root_stream(self, name: str) -> Stream:
        """Return the stream, fed by a dataset, whose samples the stream `name` shares.

        Of several streams that one source opens, it is the first.
        """
        stream = self.stream(name)
        while stream.parent is not None:
            stream = self.stream(stream.parent)
        return next(s for s in self.streams if s.source == stream.source)

    def model(self, name: str) -> ModelSpec:
        """The model of that name."""
        return next(m for m in self.models if m.name == name)

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def nx(self) -> nx.DiGraph[str]:
        """A DiGraph of node names; each arc holds its `edges`, a tuple of `Edge`."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(node.name for node in self.nodes)
        for edge in self.edges:
            before = graph.get_edge_data(edge.src, edge.dst, {}).get("edges", ())
            graph.add_edge(edge.src, edge.dst, edges=(*before, edge))
        return graph
