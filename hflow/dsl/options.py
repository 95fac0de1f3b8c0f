"""`Option`: the type, default, bounds and meaning of a decorator's option.

Each option is written once, as an annotation. A `TypedDict` lists the options of a decorator: it types the
decorator's constructor, and `options_of` makes its table of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from hflow.base.validation import check_value, text_of_type
from hflow.dsl.dataset import Dataset
from hflow.graph.model import Model
from hflow.types.engine import MAX_TEMPERATURE


@dataclass(frozen=True)
class Option:
    """One option of a decorator: `Option("float", 1.0, minimum=0.0)`.

    Args:
        type: alternatives joined by ` | `: `int`, `float`, `bool`, `str`, `None`, a quoted choice such as
            `'none'`, or `tuple[T, ...]` of one of these.
        default: the value if the recipe does not set the option.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        text: what the option means, for `hflow nodes` and the reference.
    """

    type: str
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    text: str = ""

    def check(self, value: Any) -> Any:
        """Return the value in the option's type: an int becomes a float, a list a tuple.

        Raises:
            ValueError: if it has another type or is out of bounds. The message continues a sentence that
                begins with "X is".
        """
        return check_value(value, self.type, self.minimum, self.maximum)


Options = dict[str, Option]

_option = partial(Option, "")
"""An option whose type is that of its annotation."""

Returns = Annotated[
    str | tuple[str, ...] | None,
    _option(
        text="name of the returned field, or one name for each. Default: the function's name. A bool "
        "field named `keep` of a compute node removes its sample or group from the batch where it "
        "is False."
    ),
]
StreamReturns = Annotated[
    str | tuple[str, ...] | None,
    _option(
        text="names of the streams, if the body returns several trajectories, and of the fields after "
        "them. A single stream is named after the function."
    ),
]
On = Annotated[
    str | None,
    _option(text="the stream that the node works on. Default: the stream that the recipe's dataset feeds."),
]
DerivedFrom = Annotated[
    str | None,
    _option(
        text="the stream from whose samples the new stream derives. Default: a dataset feeds it. If "
        "its columns do not provide all parameters of an encode body, the default is the stream "
        "that the recipe's dataset feeds."
    ),
]
Every = Annotated[
    int,
    _option(1, minimum=1, text="run in every n-th step only. Nodes that open a stream: for evaluation."),
]
After = Annotated[
    int,
    _option(
        0,
        minimum=0,
        text="the first step in which the node runs, counted from 0. Nodes that open a stream: for "
        "evaluation.",
    ),
]
MinGroup = Annotated[
    int | None,
    _option(
        minimum=1,
        text="smallest group (samples of one prompt) that the body can work on. Default: 2 if it reads "
        "groups or returns a loss per group, otherwise 1.",
    ),
]
Per = Annotated[
    Literal["sample", "group", "batch"],
    _option(
        "batch", text="run once per sample, once per group (the samples of one prompt), or once per batch."
    ),
]
Timeout = Annotated[
    float | None, _option(minimum=0.001, text="seconds that one attempt may take. Default: no limit.")
]
Retries = Annotated[int, _option(0, minimum=0, text="number of further attempts after one that failed.")]
ComputeRetries = Annotated[
    int | None,
    _option(
        minimum=0,
        text="number of further attempts after one that failed. Default: 2 if its process was killed, "
        "otherwise none.",
    ),
]
Backoff = Annotated[
    float,
    _option(
        1.0,
        minimum=0.0,
        text="seconds before the first further attempt. Each wait is twice as long as the one before, "
        "up to a minute.",
    ),
]
Concurrency = Annotated[
    int | None,
    _option(
        minimum=1,
        text="number of samples that one worker works on at once. Default: no limit for episodes, 64 "
        "for other asynchronous bodies, otherwise the worker's number of processes.",
    ),
]
Group = Annotated[
    int,
    _option(
        1,
        minimum=1,
        text="number of samples per prompt; of an encode node, of trajectories in the returned list.",
    ),
]
Temperature = Annotated[
    float,
    _option(
        1.0,
        minimum=0.0,
        maximum=MAX_TEMPERATURE,
        text="logits are divided by it before sampling, from 0.01 to 100; 0 takes the most likely token.",
    ),
]
TopP = Annotated[
    float,
    _option(
        1.0,
        minimum=0.0,
        maximum=1.0,
        text="sample among the most likely tokens whose probabilities add up to this; 1.0 means all.",
    ),
]
TopK = Annotated[int, _option(0, minimum=0, text="sample among this many most likely tokens; 0 means all.")]
MinP = Annotated[
    float,
    _option(
        0.0,
        minimum=0.0,
        maximum=1.0,
        text="sample among the tokens with at least this part of the most likely one's probability, before "
        "top_k and top_p; 0.0 means all.",
    ),
]
MaxTokens = Annotated[int, _option(128, minimum=1, text="largest number of tokens of one completion.")]
Stop = Annotated[tuple[str, ...], _option((), text="texts that end a completion.")]
ToolFormat = Annotated[
    str | None,
    _option(
        text="how the model writes tool calls: `hermes`, `llama3_json`, `pythonic`, `mistral`, "
        "`deepseek_v3`, `deepseek_v31`, `glm` or `qwen3_coder`, or the two characters around a call, such "
        "as `[]`. "
        "Default: the chat template's, or `hermes`."
    ),
]
RoutingReplay = Annotated[
    bool,
    _option(
        False,
        text="record which experts of a mixture-of-experts model the engine chooses for each token, "
        "and use the same ones wherever a node trains or infers with the model on these samples.",
    ),
]
SamplingReplay = Annotated[
    bool | None,
    _option(
        text="record which tokens top_p, top_k and min_p leave, and compute log-probs over the same ones "
        "wherever a node trains or infers with a language model on these samples. Default: where a node "
        "reads behav_logprobs, which are over these tokens.",
    ),
]
Reduce = Annotated[
    str | None,
    _option(
        text="how the loss becomes one number. Per token: `token-mean`, `seq-mean-token-sum`, "
        "`seq-mean-token-mean` or `token-sum/N` with a whole number N; per sequence: `seq-mean`; "
        "per group: `group-mean`. It must be set."
    ),
]
Minibatches = Annotated[
    int, _option(1, minimum=1, text="number of minibatches in a batch, each one optimizer step.")
]
Epochs = Annotated[int, _option(1, minimum=1, text="number of passes over the batch.")]
Prox = Annotated[
    Literal["recompute", "loglinear", "metrics", "none"] | None,
    _option(
        text="source of the field `prox_logprobs`. `recompute`: a forward pass with the weights at the "
        "start of the step; `loglinear`: an interpolation without a forward pass; `metrics`: "
        "`recompute`, and the error of `loglinear` as metrics; `none`: `behav_logprobs`. Default: "
        "`recompute` if the body reads `prox_logprobs`, otherwise `none`."
    ),
]
Mask = Annotated[
    str | None,
    _option(
        text="name of a bool field; learned tokens where it is False are left out of the loss. Whole numbers "
        "of a batch node, one per sequence: how often each counts, as if it were so often in the minibatch."
    ),
]
ComputedMask = Annotated[
    str | None,
    _option(
        text="name of a bool field of samples; those where it is False are not computed. Their results are "
        "NaN, and -1 of whole numbers."
    ),
]
Observed = Annotated[
    str | None,
    _option(
        text="name of a bool field; tokens where it is True and that are not learned have log-probs in "
        "`Output.observed_logprobs`. The loss's entries there are averaged over all such tokens of a "
        "minibatch, whatever `reduce` and `mask`."
    ),
]


Data = Annotated[
    Dataset | None,
    "the dataset that feeds the stream, for evaluation. Default: the recipe's dataset.",
]
Source = Annotated[Model | None, "the model that is read. Nodes of a library leave it open."]


class NodeOptions(TypedDict, total=False):
    """Options of a node type that is derived from `NodeType` itself."""

    returns: Returns
    on: On
    every: Every
    after: After
    min_group: MinGroup


class EncodeOptions(TypedDict, total=False):
    """Options of `encode`."""

    returns: StreamReturns
    on: DerivedFrom
    every: Every
    after: After
    group: Group
    timeout: Timeout
    retries: Retries
    concurrency: Concurrency
    min_group: MinGroup
    data: Data


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`."""

    returns: StreamReturns
    on: DerivedFrom
    every: Every
    after: After
    group: Group
    timeout: Timeout
    retries: Retries
    concurrency: Concurrency
    temperature: Temperature
    top_p: TopP
    top_k: TopK
    min_p: MinP
    max_tokens: MaxTokens
    stop: Stop
    tool_format: ToolFormat
    routing_replay: RoutingReplay
    sampling_replay: SamplingReplay
    min_group: MinGroup
    data: Data


class ComputeOptions(TypedDict, total=False):
    """Options of `compute`."""

    returns: Returns
    on: On
    every: Every
    after: After
    timeout: Timeout
    retries: ComputeRetries
    concurrency: Concurrency
    backoff: Backoff
    min_group: MinGroup
    per: Per


class InferOptions(TypedDict, total=False):
    """Options of `infer`."""

    returns: Returns
    on: On
    every: Every
    after: After
    min_group: MinGroup
    per: Per
    mask: ComputedMask


class TrainOptions(TypedDict, total=False):
    """Options of `train`."""

    on: On
    every: Every
    after: After
    reduce: Reduce
    minibatches: Minibatches
    epochs: Epochs
    prox: Prox
    mask: Mask
    observed: Observed
    min_group: MinGroup


class UpdateOptions(TypedDict, total=False):
    """Options of `update`."""

    every: Every
    after: After
    source: Source


def options_of(typed: type) -> Options:
    """Return the table of the options in a `TypedDict`, without objects of the recipe, in its order."""
    found: Options = {}
    for name, hint in get_type_hints(typed, include_extras=True).items():
        kind, about = get_args(hint)
        if isinstance(about, Option):
            text = text_of_type(kind)
            assert text is not None, f"option {name} has a type that cannot be checked"
            parts = sorted(text.split(" | "), key=lambda part: part != "None")  # as messages name them
            found[name] = replace(about, type=" | ".join(parts))
    return found


SPEC_FIELDS = ("returns", "on", "every", "after", "group", "per")
"""Options that are fields of their own in a `NodeSpec`."""
