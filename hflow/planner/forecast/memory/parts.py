"""The quantities that memory formulas share: named bytes, micro-batches, and the load of an engine.

`Items` are named bytes that add up. A micro-batch is the largest one of a train or infer node, by the bounds
of its batch. Bounds and not means are used, so that a plan that is accepted fits for the longest samples that
the run allows. A prompt that a group shares counts once where the budget does, and its keys and values for
every sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Node
from hflow.graph.queries import keeps_groups_whole, root_stream
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.rows import BatchCut, Plan, ScheduledStream
from hflow.planner.plan.workload import Workload
from hflow.planner.weights.sharding import padded_units
from hflow.shapes.model_shape import CACHE_BYTES, nf4_bytes
from hflow.types import Unit

if TYPE_CHECKING:
    pass


class ItemKey(NamedTuple):
    """The name and category of an item's bytes."""

    name: str
    category: MemoryCategory


class Items(dict[ItemKey, int]):
    """Bytes by name and category. The sum of two adds items of one name.

    A search adds many of them, for which `Counter` takes twice as long.
    """

    __slots__ = ()

    def __missing__(self, key: ItemKey) -> int:
        return 0

    def __add__(self, other: Items) -> Items:
        return Items(self).__iadd__(other)

    def __iadd__(self, other: Items) -> Self:
        for key, num_bytes in other.items():
            if num_bytes:
                self[key] = self.get(key, 0) + num_bytes
        return self

    def total(self) -> int:
        """Return the bytes of all items."""
        return sum(self.values())


def item(category: MemoryCategory, num_bytes: int, name: str | None = None) -> Items:
    """Return a single item, or none if it has 0 bytes. Without a name it is called like its category."""
    return Items({ItemKey(name or category.value, category): num_bytes} if num_bytes else {})


def largest(moments: Iterable[Items]) -> Items:
    """Return the moment with the most bytes."""
    return max(moments, key=Items.total)


@dataclass(frozen=True)
class MicroBatch:
    """The samples that a dp rank computes at once."""

    tokens: int
    """U: tokens that are computed. T without repeated prompt prefixes."""
    num_learned: int
    """N: the tokens whose logits are needed. With `observed=`, these may be all."""
    num: int
    """Micro-batches of a minibatch."""
    pads: bool
    """Whether its sequences may have different lengths, or share a prompt."""
    patches: int = 0
    """Patches of its distinct images, which pass the tower."""
    image_tokens: int = 0
    """Tokens that these are merged into."""
    repeated: int = 0
    """T - U: tokens of shared prompts whose keys and values attention has again for another sample. With
    context ranks, all of them have these."""
    mask: int = 0
    """Entries of the mask of samples behind such prompts, for a kernel that needs one."""
    longest: int = 0
    """Tokens of the longest sequence."""

    def divided(self, num_ranks: int) -> MicroBatch:
        """Return the part of one of several context ranks, which divide the tokens of every sequence."""
        if num_ranks == 1:
            return self
        tokens, num_learned = -(-self.tokens // num_ranks), -(-self.num_learned // num_ranks)
        return replace(self, tokens=tokens, num_learned=num_learned)


def largest_microbatch(
    plan: Plan, node: Node, workload: Workload, config: ModelConfig, data: int, *, shares_prompts: bool = True
) -> MicroBatch:
    """Return the largest micro-batch of a dp rank at a node.

    It fills the token budget. It has at least one unit of the greatest length (a sequence, or a group that is
    not split), and at most the rank's share of a minibatch. Prompts are repeated most where each response has
    one token.

    Args:
        data: dp ranks that share a minibatch.
        shares_prompts: whether the backend computes a group's prompt once. Images are not taken to be shared.
    """
    stream = plan.schedule.streams[0]
    group_size = root_stream(plan.graph, node).group
    cut = dict(plan.cuts).get(node.name, BatchCut(1, 1, keeps_groups_whole(node)))
    num_groups = -(-(stream.batch or 1) // cut.minibatches)
    unit_size = group_size if cut.by_group else 1
    num_samples = -(-num_groups * group_size // (data * unit_size)) * unit_size
    longest = workload.prompt + workload.max_response
    share = num_samples * longest
    unit = longest * (group_size if _packs_groups(node) else 1)
    tokens = min(max(config.tokens_per_microbatch, unit), share)
    images, num_images = workload.images, 0
    if images is not None:  # most of them where each response has one token and belongs to another prompt
        fitting = max(1, tokens // (workload.prompt + 1))
        num_images = images.count * min(fitting, num_groups, num_samples)
    prompt, size = workload.prompt, group_size if shares_prompts and images is None else 1
    outputs = workload.max_response if node.spec.option("observed") is None else longest
    num_learned = -(-tokens * size * outputs // (prompt + size * workload.max_response))
    repeated = min(share - tokens, tokens * prompt * (size - 1) // (prompt + size))
    return MicroBatch(
        tokens=tokens,
        num_learned=min(num_learned, tokens, num_samples * outputs),
        num=-(-share // tokens),
        pads=workload.response_cv > 0 or repeated > 0,
        patches=0 if images is None else num_images * images.load.patches,
        image_tokens=0 if images is None else num_images * images.load.tokens,
        repeated=repeated,
        mask=workload.max_response * longest if repeated else 0,
        longest=longest,
    )


def _packs_groups(node: Node) -> bool:
    """Return whether a group is never split over micro-batches, as its body returns or reads groups."""
    returns_groups = any(returned.unit is Unit.GROUP for returned in node.spec.returns)
    return returns_groups or any(read.field == "group" for read in node.reads)


QUANTIZED_ROWS = 128
"""Rows, and columns, of the weights that have a scale in common where `gen.quantization` is `fp8`."""
GRAPH_BYTES = 256 << 10
"""Estimated bytes of a captured graph per layer: vLLM logs 0.5 to 0.6 GiB for 67 batch sizes of models with
32 layers."""
PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill. A longer prompt is prefilled alone."""


@dataclass(frozen=True)
class EngineLoad:
    """The most that one engine has to hold and compute at once."""

    num_running: int
    """Sequences that decode together."""
    prompt: int
    """Tokens of a prompt."""
    longest: int
    """Tokens of the longest sequence."""
    prefill: int
    """Tokens of the largest prefill."""
    patches: int = 0
    """Patches of the images in it."""
    image_tokens: int = 0
    """Tokens of the images whose features are kept for sequences that run or wait."""


def engine_load(plan: Plan, rank: Rank, workloads: dict[str, Workload]) -> EngineLoad:
    """Return the largest load of each engine of a generation replica, from the streams that use it."""
    streams = [stream for stream in plan.schedule.streams if rank.replica.name in stream.replicas]
    group_size = max(stream.group_size for stream in streams)
    num_groups = -(-plan.schedule.settings.max_concurrent // group_size)
    num_running = min(rank.config.gen.max_running, -(-num_groups // rank.data) * group_size)
    prompt = max(workloads[stream.name].prompt for stream in streams)
    longest = max(workloads[stream.name].prompt + workloads[stream.name].max_response for stream in streams)
    if (
        plan.schedule.settings.max_staleness
    ):  # interrupted sequences are prefilled with the tokens that they have
        num_tokens = num_running * longest
    else:  # a group's prompt is prefilled once
        num_tokens = -(-num_running // group_size) * prompt
    prefill = min(max(PREFILL_TOKENS, longest), num_tokens)
    return EngineLoad(
        num_running, prompt, longest, prefill, *_engine_images(streams, workloads, prefill, num_running)
    )


def _engine_images(
    streams: Sequence[ScheduledStream], workloads: dict[str, Workload], prefill: int, num_running: int
) -> tuple[int, int]:
    """Return the most patches of a prefill, and tokens of the images of all running sequences' groups."""
    patches = tokens = 0
    for stream in streams:
        images = workloads[stream.name].images
        if images is not None:
            num = max(1, prefill // workloads[stream.name].prompt) * images.count
            patches = max(patches, num * images.load.patches)
            tokens = max(tokens, -(-num_running // stream.group_size) * images.tokens)
    return patches, tokens


def engine_weights(rank: Rank) -> int:
    """Return the bytes of the engine's own weights on one rank, with the padding of the vocabulary.

    Adapters are beside them in an engine that does not merge them, in buffers whose rank may be larger. An
    engine that uses the weights of another one has its adapters alone. Quantised weights have scales, and so
    have those in 4 bits beside adapters.
    """
    shape = rank.shape
    rows = padded_units(shape.vocab, rank.traits, rank.tensor) // rank.tensor
    num_matrices = 1 if shape.is_tied else 2
    padding = (rows - min(shape.vocab, rows)) * shape.hidden * num_matrices
    lora = None if rank.replica.merges_adapters else rank.config.lora
    adapters = 0 if lora is None else rank.trained.total * rank.traits.padded_rank(lora.r) // lora.r
    if rank.replica.base_of:
        return rank.width * adapters
    if rank.rounds_base:
        return rank.width * (rank.stored.total + padding + adapters) + nf4_bytes(shape)
    num_quantized = rank.sizes.quantizable if rank.config.gen.quantization else 0
    quantized = num_quantized + -(-FP32_BYTES * num_quantized // QUANTIZED_ROWS**2)
    return rank.width * (rank.sizes.total - num_quantized + padding + adapters) + quantized


MEMORY_BUDGET = 0.9
"""Fraction of a device's memory that everything on it takes at most while an engine generates whose cache has
a fixed size."""


def fitting_cache(block: int, wanted: int, available: int, smallest: int) -> int:
    """Return the bytes of a cache in whole blocks, one of which belongs to no sequence.

    Args:
        wanted: blocks that the load needs.
        available: bytes that the cache may take.
        smallest: bytes of the smallest cache with which the engine starts.
    """
    return max(block * min(1 + wanted, available // block), smallest)


def cache_bytes_per_token(rank: Rank) -> int:
    """Return the bytes of one token's keys and values on one rank, in layers without a window.

    The vectors of latent attention are those of all heads, so every tensor rank holds them.
    """
    width = CACHE_BYTES[rank.config.gen.cache_dtype or rank.config.compute_dtype]
    if rank.shape.latent is not None:
        return width * rank.sizes.num_layers * rank.shape.latent.cached
    return 2 * width * rank.sizes.num_layers * rank.key_value_size // rank.tensor
