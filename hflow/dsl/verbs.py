"""The six verbs. Each is a `NodeType`; the lower-case names are what recipes write."""

from __future__ import annotations

from typing import Any, ClassVar

from hflow.dsl.annotations import Form
from hflow.dsl.dataset import Dataset
from hflow.dsl.model import Model
from hflow.dsl.nodetype import NodeType
from hflow.dsl.options import COMMON, GROUPED, LEARNING, POOLED, SAMPLING, STREAM, Option
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_loss, read_trajectories, read_weight
from hflow.graph.ir import Level


class Source(NodeType, abstract=True):
    """Opens a stream of samples: what encode and generate have in common."""

    level: ClassVar[Level] = Level.SAMPLE
    objects: ClassVar = {"data": Dataset}
    opens_stream: ClassVar[bool] = True

    def read_results(self, hint: Any, function: str, fault: ErrorFactory) -> ReturnTypes:
        """Trajectories, then fields."""
        results = read_trajectories(hint, self.names, function, fault)
        if results.grouped and self.verb != "encode":
            raise fault("an episode returns one Trajectory; group=n runs it n times")
        return results

    def layout(self, field: str) -> str:
        """With the sample, on the worker that made it."""
        return "sharded"


class Encode(Source):
    """Texts of a sample -> `Trajectory`, or a list of them: one group. Runs on worker CPUs."""

    num_models: ClassVar = (1, 1)
    options: ClassVar = COMMON | STREAM | POOLED | GROUPED
    provides: ClassVar = ("tokenizer",)

    @property
    def reads_weights(self) -> tuple[str, ...]:
        """None: it needs the model's tokenizer only."""
        return ()

    def read_results(self, hint: Any, function: str, fault: ErrorFactory) -> ReturnTypes:
        """One trajectory, or a list of them: a group."""
        results = super().read_results(hint, function, fault)
        if results.grouped != (self.settings["group"] > 1):
            raise fault("group=n and '-> list[Trajectory]' go together: the list is one group of n")
        return results


class Generate(Source):
    """An asynchronous episode for one prompt. Runs beside the engines."""

    num_models: ClassVar = (1, None)
    options: ClassVar = COMMON | STREAM | POOLED | SAMPLING | GROUPED
    provides: ClassVar = ("engine", "tokenizer")
    needs: ClassVar = ("engine",)
    is_async: ClassVar = True

    def draw(self) -> str:
        """Its Graphviz shape."""
        return "parallelogram"


class Compute(NodeType):
    """Plain Python on a sample or group, or tensors on a batch -> fields. Runs in a CPU pool."""

    num_models: ClassVar = (0, 0)
    options: ClassVar = COMMON | POOLED | GROUPED | {"per": Option("'sample' | 'group' | 'batch'", "batch")}
    is_async: ClassVar = None

    def draw(self) -> str:
        """Its Graphviz shape."""
        return "ellipse"


class Infer(NodeType):
    """`Output` of a forward without gradient -> what to keep. Runs on all ranks of a replica."""

    num_models: ClassVar = (1, 1)
    options: ClassVar = COMMON | GROUPED | {"per": Option("'sample' | 'group' | 'batch'", "batch")}
    provides: ClassVar = ("output", "sequences")
    needs: ClassVar = ("output",)

    @property
    def form(self) -> Form:
        """Tensors at every level."""
        return "tensor"

    def layout(self, field: str) -> str:
        """On the dp-heads of its replica."""
        return "sharded"


class Train(NodeType):
    """`Output` and fields -> the loss, in its natural unit. Runs on all ranks of a replica."""

    num_models: ClassVar = (1, 1)
    options: ClassVar = COMMON | LEARNING | GROUPED
    provides: ClassVar = ("output", "sequences")
    needs: ClassVar = ("output",)

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """The model that it trains."""
        return tuple(model.name for model in self.models)

    def read_results(self, hint: Any, function: str, fault: ErrorFactory) -> ReturnTypes:
        """A loss."""
        if self.names:
            raise fault("a loss is no field: drop returns=")
        return read_loss(hint, fault)

    def draw(self) -> str:
        """Its Graphviz shape."""
        return "box3d"


class Update(NodeType):
    """Per weight tensor `(target, source)` -> new target. Runs on all ranks of a replica."""

    num_models: ClassVar = (1, 1)
    options: ClassVar = {name: COMMON[name] for name in ("every", "after")}
    objects: ClassVar = {"source": Model}
    provides: ClassVar = ()

    @property
    def form(self) -> Form:
        """Weight tensors."""
        return "weights"

    @property
    def all_models(self) -> tuple[Model, ...]:
        """Target and source."""
        return (*self.models, *self.bound.values())

    @property
    def is_open(self) -> bool:
        """Whether target or source are missing."""
        return len(self.all_models) < 2

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """The target."""
        return tuple(model.name for model in self.models)

    def read_results(self, hint: Any, function: str, fault: ErrorFactory) -> ReturnTypes:
        """A weight tensor."""
        return read_weight(hint, fault)

    def draw(self) -> str:
        """Its Graphviz shape."""
        return "box3d"


encode = Encode
generate = Generate
compute = Compute
infer = Infer
train = Train
update = Update
