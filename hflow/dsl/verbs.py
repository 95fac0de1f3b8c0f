"""The six decorators. Each is a `NodeType`; recipes use the lower-case names."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from hflow.dsl.annotations import Form
from hflow.dsl.dataset import Dataset
from hflow.dsl.nodetype import NodeType, typed_options
from hflow.dsl.options import COMMON, GROUPED, LEARNING, POOLED, RETRIED, SAMPLING, STREAM, Option, Options
from hflow.dsl.return_types import ErrorFactory, ReturnTypes, read_loss, read_trajectories, read_weight
from hflow.graph.ir import Level
from hflow.graph.model import Model

_PER = Option("'sample' | 'group' | 'batch'", "batch")


class StreamSource(NodeType, abstract=True):
    """A node that opens a stream of samples: `encode` or `generate`."""

    level: ClassVar[Level] = Level.SAMPLE
    objects: ClassVar = {"data": Dataset}
    opens_stream: ClassVar[bool] = True

    def read_results(self, hint: Any, function: str, error: ErrorFactory) -> ReturnTypes:
        """Return the trajectories, which open streams, and the fields after them."""
        results = read_trajectories(hint, self.return_names, function, error)
        if results.grouped and self.runs_as != "encode":
            raise error(
                "an episode returns one Trajectory, not a list. Set group=n to run it n times per prompt"
            )
        return results

    def layout(self, field: str) -> str:
        """Keep a field with its sample, on the worker that created it."""
        return "sharded"


class Encode(StreamSource):
    """Decorate a function that encodes the texts of one sample: `@encode(actor)`.

    The body returns a `Trajectory`, or a list of them, which is one group. It runs on the CPUs of workers.
    """

    runs_as: ClassVar[str] = "encode"
    num_models: ClassVar[tuple[int, int | None]] = (1, 1)
    options: ClassVar[Options] = COMMON | STREAM | POOLED | GROUPED
    provides: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @typed_options
    def __init__(
        self,
        model: Model | None = None,
        /,
        *,
        group: int = 1,
        returns: str | tuple[str, ...] | None = None,
        on: str | None = None,
        data: Dataset | None = None,
        every: int = 1,
        after: int = 0,
        timeout: float | None = None,
        retries: int = 0,
        concurrency: int | None = None,
        min_group: int | None = None,
    ) -> None:
        """Set the options of an encode node.

        Args:
            model: the model whose tokenizer the body receives. Nodes of a library leave it open.
            group: number of trajectories in the returned list.
            returns: names of the fields that the body returns after its trajectory.
            on: the stream from whose samples the new stream derives. Default: a dataset feeds it, unless its
                columns do not provide all of the body's parameters; then the stream that the recipe's dataset
                feeds.
            data: the dataset that feeds the stream, for evaluation. Default: the recipe's dataset.
            every: run in every n-th step only. For evaluation.
            after: the first step in which the node runs, counted from 0. For evaluation.
            timeout: seconds that one attempt may take. Default: no limit.
            retries: number of further attempts after one that failed.
            concurrency: number of samples that one worker encodes at once. Default: its number of processes.
            min_group: smallest group (samples of one prompt) that the body can work on. Default: 1.

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
        if results.grouped != (self.option_values["group"] > 1):
            raise error(
                "group=n and '-> list[Trajectory]' belong together: the list is one group of n. "
                "Use both or neither"
            )
        return results


class Generate(StreamSource):
    """Decorate an asynchronous function that is one episode for one prompt: `@generate(actor, group=8)`.

    The body receives an `Engine` and returns a `Trajectory`. It runs on the workers that hold the engines.
    """

    runs_as: ClassVar[str] = "generate"
    num_models: ClassVar[tuple[int, int | None]] = (1, None)
    options: ClassVar[Options] = COMMON | STREAM | POOLED | SAMPLING | GROUPED
    provides: ClassVar[tuple[str, ...]] = ("engine", "tokenizer")
    needs: ClassVar[tuple[str, ...]] = ("engine",)
    is_async: ClassVar[bool | None] = True

    @typed_options
    def __init__(
        self,
        *models: Model,
        group: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int = 128,
        stop: tuple[str, ...] = (),
        tool_format: str | None = None,
        routing_replay: bool = False,
        returns: str | tuple[str, ...] | None = None,
        on: str | None = None,
        data: Dataset | None = None,
        every: int = 1,
        after: int = 0,
        timeout: float | None = None,
        retries: int = 0,
        concurrency: int | None = None,
        min_group: int | None = None,
    ) -> None:
        """Set the options of a generate node.

        Args:
            *models: the models that generate. With several, the body has one `Engine` parameter named after
                each. Nodes of a library leave the model open.
            group: number of samples per prompt.
            temperature: logits are divided by it before sampling, from 0.01 to 100; 0 takes the most likely
                token.
            top_p: sample among the most likely tokens whose probabilities add up to this; 1.0 means all.
            top_k: sample among this many most likely tokens; 0 means all.
            max_tokens: largest number of tokens of one completion.
            stop: texts that end a completion.
            tool_format: how the model writes tool calls: `hermes`, or the two characters around a call, such
                as `[]`. Default: `hermes`.
            routing_replay: record which experts of a mixture-of-experts model the engine chooses for each
                token, and use the same ones wherever a node trains or infers with the model on these samples.
            returns: names of the streams, if the body returns several trajectories, and of the fields after
                them. A single stream is named after the function.
            on: the stream from whose samples the new stream derives. Default: a dataset feeds it.
            data: the dataset that feeds the stream, for evaluation. Default: the recipe's dataset.
            every: run in every n-th step only. For evaluation.
            after: the first step in which the node runs, counted from 0. For evaluation.
            timeout: seconds that one attempt may take. Default: no limit.
            retries: number of further attempts after one that failed.
            concurrency: number of episodes that one worker runs at once. Default: no limit.
            min_group: smallest group (samples of one prompt) that the body can work on. Default: 1.

        Raises:
            RecipeError: for an unknown option or a value that does not fit.
        """

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
    options: ClassVar[Options] = COMMON | POOLED | RETRIED | GROUPED | {"per": _PER}
    is_async: ClassVar[bool | None] = None

    @typed_options
    def __init__(
        self,
        *,
        per: Literal["sample", "group", "batch"] = "batch",
        returns: str | tuple[str, ...] | None = None,
        on: str | None = None,
        every: int = 1,
        after: int = 0,
        timeout: float | None = None,
        retries: int | None = None,
        backoff: float = 1.0,
        concurrency: int | None = None,
        min_group: int | None = None,
    ) -> None:
        """Set the options of a compute node.

        Args:
            per: run once per sample, once per group (the samples of one prompt), or once per batch.
            returns: name of the returned field, or one name for each. Default: the function's name. A bool
                field named `keep` removes its sample or group from the batch where it is False.
            on: the stream that the node works on. Default: the stream that the recipe's dataset feeds.
            every: run in every n-th step only.
            after: the first step in which the node runs, counted from 0.
            timeout: seconds that one attempt may take. Default: no limit.
            retries: number of further attempts after one that failed. Default: 2 if its process was killed,
                otherwise none.
            backoff: seconds before the first further attempt. Each wait is twice as long as the one before,
                up to a minute.
            concurrency: number of samples that one worker computes at once. Default: its number of processes,
                or 64 if the body is asynchronous.
            min_group: smallest group (samples of one prompt) that the body can work on. Default: 2 if it
                reads groups, otherwise 1.

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
    options: ClassVar[Options] = COMMON | GROUPED | {"per": _PER}
    provides: ClassVar[tuple[str, ...]] = ("output", "sequences", "tensordict")
    needs: ClassVar[tuple[str, ...]] = ("output",)

    @typed_options
    def __init__(
        self,
        model: Model | None = None,
        /,
        *,
        per: Literal["sample", "group", "batch"] = "batch",
        returns: str | tuple[str, ...] | None = None,
        on: str | None = None,
        every: int = 1,
        after: int = 0,
        min_group: int | None = None,
    ) -> None:
        """Set the options of an infer node.

        Args:
            model: the model whose forward pass is read. Nodes of a library leave it open.
            per: run once per batch, or on single samples or groups as they arrive.
            returns: name of the returned field, or one name for each. Default: the function's name.
            on: the stream that the node works on. Default: the stream that the recipe's dataset feeds.
            every: run in every n-th step only.
            after: the first step in which the node runs, counted from 0.
            min_group: smallest group (samples of one prompt) that the body can work on. Default: 2 if it
                reads groups, otherwise 1.

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
    options: ClassVar[Options] = COMMON | LEARNING | GROUPED
    provides: ClassVar[tuple[str, ...]] = ("output", "sequences", "tensordict")
    needs: ClassVar[tuple[str, ...]] = ("output",)

    @typed_options
    def __init__(
        self,
        model: Model | None = None,
        /,
        *,
        reduce: str | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        prox: Literal["recompute", "loglinear", "metrics", "none"] | None = None,
        mask: str | None = None,
        on: str | None = None,
        every: int = 1,
        after: int = 0,
        min_group: int | None = None,
    ) -> None:
        """Set the options of a train node.

        Args:
            model: the model that is trained. Nodes of a library leave it open.
            reduce: how the loss becomes one number. Per token: `token-mean`, `seq-mean-token-sum`,
                `seq-mean-token-mean` or `token-sum/N` with a whole number N; per sequence: `seq-mean`; per
                group: `group-mean`. It must be set.
            minibatches: number of minibatches in a batch, each one optimizer step.
            epochs: number of passes over the batch.
            prox: source of the field `prox_logprobs`. `recompute`: a forward pass with the weights at the
                start of the step; `loglinear`: an interpolation without a forward pass; `metrics`:
                `recompute`, and the error of `loglinear` as metrics; `none`: `behav_logprobs`. Default:
                `recompute` if the body reads `prox_logprobs`, otherwise `none`.
            mask: name of a bool field; tokens where it is False are left out of the loss.
            on: the stream that the node works on. Default: the stream that the recipe's dataset feeds.
            every: run in every n-th step only.
            after: the first step in which the node runs, counted from 0.
            min_group: smallest group (samples of one prompt) that the body can work on. Default: 2 if it
                reads groups or returns a loss per group, otherwise 1.

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
    options: ClassVar[Options] = {name: COMMON[name] for name in ("every", "after")}
    objects: ClassVar = {"source": Model}
    provides: ClassVar[tuple[str, ...]] = ()

    @typed_options
    def __init__(
        self,
        target: Model | None = None,
        /,
        *,
        source: Model | None = None,
        every: int = 1,
        after: int = 0,
    ) -> None:
        """Set the options of an update node.

        Args:
            target: the model whose weights are changed. Nodes of a library leave it open.
            source: the model that is read. Nodes of a library leave it open.
            every: run in every n-th step only.
            after: the first step in which the node runs, counted from 0.

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
