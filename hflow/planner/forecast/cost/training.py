"""Seconds of forward and backward passes and of the optimizer, on the rank with most work.

FSDP is assumed to gather the next layer and scatter the gradients of the last one while a layer computes,
and Megatron to scatter gradients during the last backward pass, and to gather weights during the next forward
pass. Only one layer's collectives and what takes longer than the computation cost time, but on a CPU, which
hides nothing. Inputs that tensor ranks gather again in the backward pass are hidden by products. Nothing else
overlaps: sums over tensor ranks and activations between stages come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hflow.base.devices import is_gpu
from hflow.planner.forecast.cost.collectives import send
from hflow.planner.forecast.cost.flops import Work, stage_parameters
from hflow.planner.forecast.cost.kernels import PassSeconds, kernel_seconds, pass_seconds
from hflow.planner.forecast.cost.rank_collectives import (
    Collectives,
    Passes,
    Ranks,
    bucket_collectives,
    context_collectives,
    expert_collectives,
    fsdp_gathers,
    fsdp_scatters,
    gradient_norm,
    is_sharded,
    num_units,
    replicated_gradients,
    shared_gradients,
    stage_messages,
    tensor_collectives,
    total_time,
)
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts, expert_exchange
from hflow.planner.forecast.cost.roofline import COMPUTE, HOST, MEMORY, Part, roofline
from hflow.planner.forecast.cost.transfers import offload
from hflow.planner.forecast.memory.activations import CHUNK_BYTES
from hflow.planner.forecast.memory.rank import divides_matrices, layer_matrices
from hflow.planner.plan.optimizers import optimizer_traits
from hflow.planner.plan.request import trained_shape
from hflow.shapes.layout import stage_layers

NORM_BYTES, COPIED_BYTES = 12, 12
"""Bytes for each weight: memory traffic of the gradient's norm and clipping, and what is copied between a GPU
and its host where that steps, which is a weight with its gradient, and the new weight."""
HOST_GB_PER_S = 200.0
"""Memory bandwidth of the host of a GPU machine that an optimizer reaches, an assumption."""
LERP_BYTES = 12
"""Memory traffic of an update node per weight: two are read, one is written."""


def forward(replica: ReplicaCosts, work: Work) -> list[Part]:
    """Return the seconds of a forward pass over one rank's samples."""
    return _layer_passes("forward", replica, work, num_passes=1, head_passes=1)


def train(replica: ReplicaCosts, work: Work, num_updates: int) -> list[Part]:
    """Return the seconds of forward and backward passes with an optimizer step for each minibatch.

    `work` is one rank's part of one minibatch; there are minibatches times epochs updates.
    """
    num_passes, head_passes = train_passes(replica, work)
    passes = _layer_passes("forward and backward", replica, work, num_passes, head_passes)
    one_microbatch = passes[0].seconds / num_microbatches(replica, work)
    once = [
        *passes,
        *_offloaded_activations(replica, work, passes[0].seconds, num_passes),
        *_distributed_optimizer(replica, one_microbatch, num_passes),
        *_optimizer_step(replica),
    ]
    return [part.times(num_updates) for part in once]


def _offloaded_activations(replica: ReplicaCosts, work: Work, compute: float, num_passes: int) -> list[Part]:
    """Return the seconds of copying the input of each layer to host memory and back.

    Copies run beside the computation: one layer's is seen, and what takes longer than the forward pass on the
    way out, or than the backward pass on the way back. `compute` are the seconds of all passes.
    """
    if not replica.config.offload_activations:
        return []
    first, last = stage_layers(replica.shape.num_layers, replica.layout.pipe)[0]
    inputs = work.rows * replica.shape.hidden * replica.itemsize / replica.token_share
    forward = compute / (num_passes + 1)
    parts = []
    for computing in (forward, compute - forward):
        for part in offload((last - first) * inputs, replica):
            hidden = (
                min(part.seconds, computing) * (1 - 1 / (last - first)) if replica.launches_ahead else 0.0
            )
            parts.append(part._replace(name="layer inputs", seconds=part.seconds - hidden))
    return parts


def update(replica: ReplicaCosts) -> list[Part]:
    """Return the seconds of updating every weight by that of another model."""
    return [Part("update", local_weights(replica) * LERP_BYTES / replica.rates.stream, MEMORY)]


def local_weights(replica: ReplicaCosts) -> float:
    """Return the number of weights whose optimizer state a rank holds."""
    layout = replica.layout
    num_parts = layout.fsdp_size if replica.traits.shards_weights else layout.num_copies
    if replica.config.lora is not None or replica.config.freeze is not None:
        return replica.trained_weights / num_parts
    return stage_parameters(replica.shape, layout.pipe) / layout.tensor / num_parts


def num_microbatches(replica: ReplicaCosts, work: Work) -> int:
    """Return the number of micro-batches of a rank, whose tokens its context ranks divide."""
    rows = work.rows * replica.layout.context
    return max(1, math.ceil(rows / replica.config.tokens_per_microbatch))


def _passes_by_kind(replica: ReplicaCosts, num_passes: int) -> tuple[int, int]:
    """Return the cost of passes in forward passes: of layers, and of matrices that may be frozen."""
    layer_passes = num_passes + (num_passes > 1)
    return layer_passes, layer_passes if replica.config.lora is None else num_passes


def train_passes(replica: ReplicaCosts, work: Work) -> tuple[int, int]:
    """Return the passes of a micro-batch through a layer in training, and the cost of the output matrix."""
    head_passes = 4 if _recomputes_logits(replica, work) else 3
    if replica.config.lora is not None:  # the output matrix has no gradient
        head_passes -= 1
    return 3 if replica.config.activation_checkpointing else 2, head_passes


def compute_seconds(replica: ReplicaCosts, work: Work, *, trains: bool) -> PassSeconds:
    """Return the seconds of the kernels of `forward`, or of the passes of one minibatch of `train`."""
    num_passes, head_passes = train_passes(replica, work) if trains else (1, 1)
    num = num_microbatches(replica, work)
    return kernel_seconds(replica, work, num, *_passes_by_kind(replica, num_passes), head_passes)


def _layer_passes(
    name: str, replica: ReplicaCosts, work: Work, num_passes: int, head_passes: int
) -> list[Part]:
    """Return the seconds of all micro-batches in the layers.

    Args:
        num_passes: passes of a micro-batch through a layer: forward, backward, and forward again with
            recomputation. A backward pass costs as much as two forward passes, and where only adapters are
            trained, the matrices beside them as much as one.
        head_passes: cost of the output matrix in forward passes.
    """
    num, passes_by_kind = num_microbatches(replica, work), _passes_by_kind(replica, num_passes)
    compute = roofline(
        name,
        pass_seconds(replica, work, num, *passes_by_kind, head_passes),
        num * passes_by_kind[1] * _stage_bytes(replica) / replica.rates.memory,
        num * num_passes * replica.host_seconds,
        is_ahead=replica.launches_ahead,
    )
    passes = Passes.of(num, num_passes)
    all_reduces = total_time(tensor_collectives(replica, work, passes), replica)
    stage_transfers = total_time(stage_messages(replica, work, passes), replica)
    keys = total_time(context_collectives(replica, work, passes), replica)
    if replica.traits.sends_expert_copies:
        tokens = total_time(expert_collectives(replica, work, passes), replica)
    else:
        tokens = expert_exchange(replica, work.rows / num).times(num * num_passes)
    tokens = tokens.times(replica.expert_wait)
    waiting = Part("experts' host", num * num_passes * replica.expert_seconds, HOST)
    of_trainer = Part("host", num * num_passes * replica.trainer_seconds, HOST)
    exchanged = keys.seconds + tokens.seconds + waiting.seconds + of_trainer.seconds
    busy = compute.seconds + all_reduces.seconds + stage_transfers.seconds + exchanged
    return [
        compute,
        all_reduces.part("tensor all-reduce"),
        stage_transfers.part("between stages"),
        keys.part("keys and values"),
        tokens.part("tokens to experts"),
        waiting,
        of_trainer,
        Part(
            "pipeline bubble",
            bubble(replica.layout.pipe, num, replica.virtual_stages) * busy,
            compute.limit,
        ),
        *_fsdp_collectives(replica, passes, compute.seconds),
        *_replicated_gradients(replica, passes, compute.seconds),
    ]


def bubble(num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Return idle time divided by busy time of a 1F1B pipeline, `(p - 1) / (v m)`, with v pieces a rank.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", 2.2.
    """
    return (num_stages - 1) / (num_microbatches * virtual_stages)


def _fsdp_collectives(replica: ReplicaCosts, passes: Passes, compute: float) -> list[Part]:
    """Return the seconds of FSDP's collectives that computation does not hide.

    On a CPU also those in which it copies shards into a buffer, weights out of it and gradients into one, and
    in which ranks wait for each other. On GPUs copies are about a hundredth of a step, and are left to the
    rates that were fitted to whole steps. What happens once for all micro-batches (`models.NAME.zero_stage`)
    is hidden by the first forward pass, or by the last backward pass.
    """
    if not is_sharded(replica, "everything"):
        return []
    gathers, scatters = list(fsdp_gathers(replica, passes)), list(fsdp_scatters(replica, passes))
    gather, scatter = total_time(gathers, replica), total_time(scatters, replica)
    if passes.backward and (stage := replica.config.zero_stage) < 3:
        first = _first_forward(passes, compute)
        computing = (compute / passes.num - first) * (1 if stage == 1 else passes.num)
        gather = gather.times(_visible(replica, gather.seconds, first))
        scatter = scatter.times(_visible(replica, scatter.seconds, computing))
    else:
        visible = _visible(replica, gather.seconds + scatter.seconds, compute)
        gather, scatter = gather.times(visible), scatter.times(visible)
    parts = [gather.part("all-gather"), scatter.part("reduce-scatter")]
    if replica.launches_ahead:
        return parts
    copied = sum(2 * (1 + 1 / replica.layout.fsdp_size) * one.num_bytes * one.times for one in gathers)
    copied += sum(2 * one.num_bytes * one.times for one in scatters)
    waiting = replica.host.step_us * 1e-6 if scatters else 0.0
    return [
        *parts,
        Part("copies of shards", copied / replica.rates.stream, MEMORY),
        Part("ranks", waiting, HOST),
    ]


def _replicated_gradients(replica: ReplicaCosts, passes: Passes, compute: float) -> list[Part]:
    """Return the seconds of summing gradients over a replicate axis that computation does not hide.

    Each unit is summed when the last micro-batch's backward pass has scattered its gradients, beside the
    computation of the next one and beside FSDP's own collectives, which take other links.
    """
    sums = total_time(replicated_gradients(replica, passes), replica)
    if not sums.seconds:
        return []
    backward = compute / passes.num - _first_forward(passes, compute)
    return [sums.times(_visible(replica, sums.seconds, backward)).part("gradient all-reduce")]


def _first_forward(passes: Passes, compute: float) -> float:
    """Return the seconds of a micro-batch's first forward pass, of those of all passes of a minibatch."""
    return compute / passes.num / (1 + passes.forward + passes.backward)


def _distributed_optimizer(replica: ReplicaCosts, pass_seconds: float, num_passes: int) -> list[Part]:
    """Return the seconds of scattering gradients to optimizer shards, and gathering new weights from them.

    A backend that overlaps them hides gradients behind the last backward pass, and weights behind the first
    forward pass, but for one layer. A stage in `v` pieces sums a piece's gradients while the pieces before it
    compute as many micro-batches as there are stages `p`, so that `(p (v - 1) + 1) / v` passes hide them;
    weights are gathered likewise. Source: `forward_backward_pipelining_with_interleaving` of Megatron-core.
    `pass_seconds` are those of all passes of one micro-batch, and `num_passes` its passes through a layer.
    """
    if not is_sharded(replica, "optimizer"):
        return []
    scatter = total_time(bucket_collectives("reduce-scatter", replica), replica)
    gather = total_time(bucket_collectives("all-gather", replica), replica)
    if replica.traits.overlaps_optimizer:
        pieces = replica.virtual_stages
        pass_seconds *= (replica.layout.pipe * (pieces - 1) + 1) / pieces
        first = pass_seconds / (num_passes + 1)
        scatter = scatter.times(_visible(replica, scatter.seconds, pass_seconds - first))
        gather = gather.times(_visible(replica, gather.seconds, first))
    return [scatter.part("reduce-scatter"), gather.part("all-gather")]


def _visible(replica: ReplicaCosts, seconds: float, computing: float) -> float:
    """Return the fraction of collectives that layers of a computation do not hide: at least one layer's.

    What they hide slows them down (`Calibration.overlap_cost`). On a CPU, the core that computes also
    exchanges, so nothing is hidden.
    """
    if not replica.launches_ahead:
        return 1.0
    others = (num_units(replica) - 1) / num_units(replica)
    visible = max(1 - others, 1 - computing * others / seconds)
    return visible + replica.hardware.calibration.overlap_cost * (1 - visible)


def _optimizer_step(replica: ReplicaCosts) -> list[Part]:
    norm = gradient_norm(replica).link_time(replica)
    shared = total_time(shared_gradients(replica), replica)
    return [
        shared.part("shared gradients"),
        norm.part("gradient norm"),
        *_stepping(replica),
        *_matrix_updates(replica),
    ]


def _stepping(replica: ReplicaCosts) -> list[Part]:
    """Return the seconds of reading and writing weights, gradients and states.

    On the host of a GPU, weights and gradients are copied there, and weights back, while the host computes:
    the longer of both counts. The GPUs of a machine share the host's memory.
    """
    optimizer, num = optimizer_traits(replica.config.optim.name), local_weights(replica)
    hardware = replica.hardware
    if not optimizer.is_on_host or not is_gpu(hardware.device.type):
        return [Part("optimizer", num * optimizer.step_bytes / replica.rates.stream, MEMORY)]
    on_device = Part("optimizer", num * NORM_BYTES / replica.rates.stream, MEMORY)
    copies = send(num * COPIED_BYTES, hardware.host, hardware).part("PCIe")
    sharing = math.prod(axis.per_machine for axis in (replica.data, replica.tensor, replica.pipe))
    on_host = num * (optimizer.step_bytes - NORM_BYTES) * sharing / (HOST_GB_PER_S * 1e9)
    stepping = Part("optimizer on the host", on_host, MEMORY)
    return [on_device, max(stepping, copies, key=lambda part: part.seconds)]


def _matrix_updates(replica: ReplicaCosts) -> Iterator[Part]:
    """Yield the seconds of updates of whole matrices, and of sending their parts and those of the result.

    The ranks that hold parts divide the matrices.
    """
    matrix_flops = optimizer_traits(replica.config.optim.name).matrix_flops
    if matrix_flops is None:
        return
    traits, layout = replica.traits, replica.layout
    num_ranks = layout.fsdp_size if traits.shards_weights else layout.world
    products = moved = num_sent = 0
    for (rows, columns, is_expert), num in layer_matrices(
        trained_shape(replica.shape, replica.config.lora)
    ).items():
        products += num * matrix_flops(rows, columns)
        if divides_matrices(traits, layout, is_expert=is_expert):
            moved, num_sent = moved + num * rows * columns, num_sent + num
    yield Part("updates of matrices", products / num_ranks / replica.rates.flops, COMPUTE)
    if num_sent:
        rounds = math.ceil(num_sent / num_ranks)
        axis: Ranks = "shard" if traits.shards_weights else "data" if layout.data > 1 else "tensor"
        num_bytes = replica.itemsize * moved / num_ranks / rounds
        yield (
            Collectives("all-to-all", axis, num_bytes, 2 * rounds)
            .link_time(replica)
            .part("parts of matrices")
        )


def _recomputes_logits(replica: ReplicaCosts, work: Work) -> bool:
    learned = work.learned / num_microbatches(replica, work)
    logits = learned * replica.shape.vocab / replica.layout.tensor
    return replica.shape.head == "lm" and logits * replica.itemsize > CHUNK_BYTES


def _stage_bytes(replica: ReplicaCosts) -> float:
    """Return the bytes of weights that one pass reads on a rank."""
    return replica.stage_weights * replica.itemsize
