"""The six decorators. Each is a `NodeType`; recipes use the lower-case names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Unpack

from hflow.dsl.annotations import Form
from hflow.dsl.dataset import Dataset
from hflow.dsl.nodetype import NodeType, typed_options
from hflow.dsl.options import (
    ComputeOptions,
    EncodeOptions,
    GenerateOptions,
    InferOptions,
    Option,
    Options,
    TrainOptions,
    UpdateOptions,
    options_of,
)
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_loss, read_trajectories, read_weight
from hflow.graph.ir import EPISODE_FIELDS, Level
from hflow.graph.model import Model


class StreamSource(NodeType, abstract=True):
    """A node that opens a stream of samples: `encode` or `generate`."""

    level: ClassVar[Level] = Level.SAMPLE
    objects: ClassVar = {"data": Dataset}
    opens_stream: ClassVar[bool] = True

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return the trajectories, which open streams, and the fields after them."""
        return read_trajectories(hint, self.return_names, function, error)

    def layout(self, field: str) -> str:
        """Keep a field with its sample, on the worker that created it."""
        return "sharded"


class Encode(StreamSource):
    """Decorate a function that encodes the texts of one sample: `@encode(actor)`.

    The body returns a `Trajectory`, or a list of them, which is one group. It runs on the CPUs of workers.
    """

    runs_as: ClassVar[str] = "encode"
    num_models: ClassVar[tuple[int, int | None]] = (1, 1)
    options: ClassVar[Options] = options_of(EncodeOptions)
    provides: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @typed_options
    def __init__(self, model: Model | None = None, /, **options: Unpack[EncodeOptions]) -> None:
        """Set the options of an encode node.

        Args:
            model: the model whose tokenizer the body receives. Nodes of a library leave it open.
            **options: see `EncodeOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    @property
    def reads_weights(self) -> tuple[str, ...]:
        """No models: the body receives the tokenizer only."""
        return ()

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return one trajectory, or a list of them for a group."""
        results = super().read_results(hint, function, error)
        if results.is_list and results.fields:
            raise error("a list of trajectories (one group) must be the only result")
        if results.is_list != (self.option_values["group"] > 1):
            raise error(
                "group=n and '-> list[Trajectory]' belong together: the list is one group of n. "
                "Use both or neither"
            )
        return results


class Generate(StreamSource):
    """Decorate an asynchronous function that is one episode for one prompt: `@generate(actor, group=8)`.

    The body receives an `Engine` and returns a `Trajectory`, or a list of them, which are one sample. It runs
    on the workers that hold the engines.
    """

    runs_as: ClassVar[str] = "generate"
    num_models: ClassVar[tuple[int, int | None]] = (1, None)
    options: ClassVar[Options] = options_of(GenerateOptions)
    provides: ClassVar[tuple[str, ...]] = ("engine", "tokenizer")
    needs: ClassVar[tuple[str, ...]] = ("engine",)
    is_async: ClassVar[bool | None] = True

    @typed_options
    def __init__(self, *models: Model, **options: Unpack[GenerateOptions]) -> None:
        """Set the options of a generate node.

        Args:
            *models: the models that generate. With several, the body has one `Engine` parameter named after
                each. Nodes of a library leave the model open.
            **options: see `GenerateOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return one trajectory per stream, or a list of them with the fields that hflow makes of it."""
        results = super().read_results(hint, function, error)
        if not results.is_list:
            if results.fields[-len(EPISODE_FIELDS) :] == EPISODE_FIELDS:
                names = " and ".join(repr(made.field) for made in EPISODE_FIELDS)
                raise error(f"hflow makes the fields {names} of episodes that return a list. Rename yours")
            return results
        reserved = {made.field for made in EPISODE_FIELDS}
        if taken := sorted(reserved & {result.field for result in results.fields}):
            raise error(f"hflow makes the field {taken[0]!r} of episodes that return a list. Rename yours")
        if len(self.models) > 1:
            raise error(
                "a list of trajectories is for episodes of one model. Return one Trajectory for each model"
            )
        return replace(results, fields=(*results.fields, *EPISODE_FIELDS))

    def draw(self) -> str:
        """Return the node's Graphviz shape."""
        return "parallelogram"


class Compute(NodeType):
    """Decorate a function that computes fields without a model: `@compute(per="sample")`.

    The body receives plain values of one sample, lists over one group, or packed tensors of the batch. It
    runs in a pool of CPU processes.
    """

    runs_as: ClassVar[str] = "compute"
    num_models: ClassVar[tuple[int, int | None]] = (0, 0)
    options: ClassVar[Options] = options_of(ComputeOptions)
    is_async: ClassVar[bool | None] = None

    @typed_options
    def __init__(self, **options: Unpack[ComputeOptions]) -> None:
        """Set the options of a compute node.

        Args:
            **options: see `ComputeOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    def draw(self) -> str:
        """Return the node's Graphviz shape."""
        return "ellipse"


class Infer(NodeType):
    """Decorate a function that reads a model's forward pass without gradient: `@infer(ref)`.

    The body receives the model's `Output` and returns the fields to keep. It runs on all ranks of a replica.
    """

    runs_as: ClassVar[str] = "infer"
    num_models: ClassVar[tuple[int, int | None]] = (1, 1)
    options: ClassVar[Options] = options_of(InferOptions)
    provides: ClassVar[tuple[str, ...]] = ("output", "sequences", "separate_sequences", "tensordict")
    needs: ClassVar[tuple[str, ...]] = ("output",)

    @typed_options
    def __init__(self, model: Model | None = None, /, **options: Unpack[InferOptions]) -> None:
        """Set the options of an infer node.

        Args:
            model: the model whose forward pass is read. Nodes of a library leave it open.
            **options: see `InferOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    @property
    def form(self) -> Form:
        """Tensors, whether the node runs per sample, group or batch."""
        return "tensor"

    def layout(self, field: str) -> str:
        """Keep a field on the first rank of each data-parallel group of the replica."""
        return "sharded"


class Train(NodeType):
    """Decorate a function that returns a loss: `@train(actor, reduce="token-mean")`.

    The body receives the model's `Output` and fields, and returns the loss per token, sequence or group. It
    runs on all ranks of a replica. Micro-batches, gradient clipping and the optimizer step are hflow's.
    """

    runs_as: ClassVar[str] = "train"
    num_models: ClassVar[tuple[int, int | None]] = (1, 1)
    options: ClassVar[Options] = {"returns": Option("None | str | tuple[str, ...]")} | options_of(
        TrainOptions
    )
    provides: ClassVar[tuple[str, ...]] = ("output", "sequences", "separate_sequences", "tensordict")
    needs: ClassVar[tuple[str, ...]] = ("output",)

    @typed_options
    def __init__(self, model: Model | None = None, /, **options: Unpack[TrainOptions]) -> None:
        """Set the options of a train node.

        Args:
            model: the model that is trained. Nodes of a library leave it open.
            **options: see `TrainOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """The model that is trained."""
        return tuple(model.name for model in self.models)

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return the loss."""
        if self.return_names:
            raise error("train nodes return a loss, not a field. Remove returns=")
        return read_loss(hint, error)

    def draw(self) -> str:
        """Return the node's Graphviz shape."""
        return "box3d"


class Update(NodeType):
    """Decorate a function that changes weights elementwise: `@update(ref, source=actor)`.

    The body receives one weight tensor of the target and the same tensor of the source, and returns the
    target's new value. It runs on all ranks of a replica.
    """

    runs_as: ClassVar[str] = "update"
    num_models: ClassVar[tuple[int, int | None]] = (1, 1)
    options: ClassVar[Options] = options_of(UpdateOptions)
    objects: ClassVar = {"source": Model}
    provides: ClassVar[tuple[str, ...]] = ()

    @typed_options
    def __init__(self, target: Model | None = None, /, **options: Unpack[UpdateOptions]) -> None:
        """Set the options of an update node.

        Args:
            target: the model whose weights are changed. Nodes of a library leave it open.
            **options: see `UpdateOptions`.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

    @property
    def form(self) -> Form:
        """Single weight tensors."""
        return "weights"

    @property
    def all_models(self) -> tuple[Model, ...]:
        """The target and the source."""
        return (*self.models, *self.given_objects.values())

    @property
    def has_open_models(self) -> bool:
        """Whether the target or the source is missing."""
        return len(self.all_models) < 2

    @property
    def writes_weights(self) -> tuple[str, ...]:
        """The target."""
        return tuple(model.name for model in self.models)

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return nothing: the result is a weight tensor, not a field."""
        return read_weight(hint, error)

    def draw(self) -> str:
        """Return the node's Graphviz shape."""
        return "box3d"


encode = Encode
generate = Generate
compute = Compute
infer = Infer
train = Train
update = Update
