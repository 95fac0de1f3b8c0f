"""Rates of a layer's kernels by shape: products of matrices, attention, and everything else.

A model's FLOPs take longer on small matrices than on large ones (`MatmulRate`), attention reaches another
rate than products, and norms, activation functions, rotary embeddings and residuals are bound by memory.
Source of the split: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
and the roofline of each kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hflow.planner.forecast.cost.flops import (
    Work,
    layer_parameters,
    stage_flops,
    touched_experts,
    tower_attention,
    tower_products,
)
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import (
    ModelShape,
    adapter_widths,
    inactive_parameters,
    layer_template,
    mean_active_experts,
    mean_mlp_rows,
    measured_matrices,
    num_parameters,
)

FP8_TRAFFIC = 6
"""Bytes of memory traffic for each value that becomes FP8 in training: bf16 is read for the largest value
and again, and a byte is written in two layouts."""

Product = tuple[float, float, float]
"""Rows, inner size and columns of a product of matrices."""


def layer_products(
    shape: ModelShape, rows: float, num_tensor_ranks: int, num_expert_ranks: int = 1
) -> tuple[Product, ...]:
    """Return the products of one layer's forward pass on a tensor rank.

    They are queries, keys and values in one; the attention's output; gate and up in one; and down. Experts
    are computed in one kernel, as matrices with the columns of all that are touched, on the rows of each.
    Tensor ranks divide heads and the intermediate size. Rows are tokens.
    """
    t = num_tensor_ranks
    heads = shape.num_heads * shape.head_dim / t
    keys = max(1, shape.num_kv_heads / t) * shape.head_dim
    attention = (rows, shape.hidden, heads + 2 * keys), (rows, heads, shape.hidden)
    experts, touched = shape.experts, touched_experts(shape, rows * num_expert_ranks)
    intermediate = shape.intermediate if experts is None else experts.shared
    mlp = (rows, shape.hidden, 2 * intermediate / t), (rows, intermediate / t, shape.hidden)
    if experts is None or touched is None:
        return *attention, *mlp
    num = touched / num_expert_ranks
    rows_of_each, f = rows * experts.per_token / num, experts.intermediate / t
    routed = (rows_of_each, shape.hidden, 2 * f * num), (rows_of_each, f, shape.hidden * num)
    return *attention, *(mlp if intermediate else ()), *routed


def product_rate(replica: ReplicaCosts, rows: float, is_captured: bool = False) -> float:
    """Return the FLOP/s of a layer's products with some rows, or tokens, on one rank.

    If a CUDA graph launches them, `is_captured`, a kernel takes no time besides (`HostTimes.gap_us`).
    """
    peak = replica.peak_flops
    rate = replica.captured_matmul if is_captured else replica.matmul
    products = layer_products(replica.shape, max(rows, 1.0), replica.layout.tensor, replica.layout.expert)
    flops: float = 0
    seconds: float = 0
    for num, inner, columns in products:
        flops += 2 * num * inner * columns
        seconds += rate.seconds(num, inner, columns, peak)
    return flops / seconds


def attention_rate(replica: ReplicaCosts) -> float:
    """Return the FLOP/s of attention kernels on one device, which run in the compute dtype."""
    calibration = replica.hardware.calibration
    reached = replica.host.attention or calibration.attention_share(replica.attention_kernel)
    return replica.hardware.device.tflops[replica.config.compute_dtype] * 1e12 * reached


def elementwise_bytes(replica: ReplicaCosts, rows: float) -> float:
    """Return the memory traffic of one layer's other kernels in a forward pass on one rank.

    Each expert of a token has a copy of its hidden state, which is sorted by expert and back.
    """
    shape = replica.shape
    copies = 1 + mean_active_experts(shape)
    width = copies * shape.hidden / replica.token_share + mean_mlp_rows(shape) / replica.layout.tensor
    return _passes(replica) * rows * width * replica.itemsize


def _passes(replica: ReplicaCosts) -> float:
    """Return the reads and writes of a layer's activations by element-wise kernels in a forward pass."""
    passes = replica.host.passes
    return replica.hardware.calibration.memory.passes if passes is None else passes


def adapter_bytes(replica: ReplicaCosts, rows: float) -> float:
    """Return the memory traffic of one layer's adapters in a forward pass on one rank.

    The first matrix of an adapter reads the input of the adapted one. What the second makes is written, and
    read with the output that it is added to, which is written again. Nothing where no traffic counts.
    """
    if replica.config.lora is None:
        return 0.0
    sizes, is_counted = adapter_widths(replica.trained_shape), min(1.0, _passes(replica))
    values = sizes.inputs + 4 * sizes.outputs
    return is_counted * rows * values / replica.layout.tensor * replica.itemsize


def fp8_bytes(replica: ReplicaCosts, rows: float, num: int, layer_passes: int) -> float:
    """Return the memory traffic in which one layer's products in FP8 get their values, on one rank.

    Each forward pass quantises the weights and the inputs, a backward pass the gradients of the outputs. Rows
    are those of all `num` micro-batches, and `layer_passes` is as in `pass_seconds`.
    """
    if replica.config.fp8 is None:
        return 0.0
    shape, layout = replica.shape, replica.layout
    forwards, backwards = (layer_passes - 2, 1) if layer_passes > 1 else (1, 0)
    experts = None if shape.experts is None else shape.experts.num / layout.expert
    hidden = (1 + max(1, mean_active_experts(shape))) * shape.hidden / replica.token_share
    heads, keys = (n * shape.head_dim / layout.tensor for n in (shape.num_heads, shape.num_kv_heads))
    mlp = mean_mlp_rows(shape) / layout.tensor
    values = forwards * (hidden + heads + mlp) + backwards * (heads + 2 * keys + 2 * mlp + hidden)
    return FP8_TRAFFIC * (rows * values + forwards * num * layer_parameters(shape, experts) / layout.tensor)


class PassSeconds(NamedTuple):
    """Seconds of the kernels of passes, by kind."""

    products: float
    """Products of the layers' matrices."""
    head: float
    """Products of the output matrix."""
    attention: float
    others: float
    """Norms, activation functions and other element-wise kernels, which are bound by memory."""
    tower: float
    """All kernels of the tower of a model that sees."""


def pass_seconds(
    replica: ReplicaCosts, work: Work, num: int, layer_passes: int, product_passes: int, head_passes: int
) -> float:
    """Return the seconds of all kernels of the heaviest stage, with the arguments of `kernel_seconds`."""
    return sum(kernel_seconds(replica, work, num, layer_passes, product_passes, head_passes))


def kernel_seconds(
    replica: ReplicaCosts, work: Work, num: int, layer_passes: int, product_passes: int, head_passes: int
) -> PassSeconds:
    """Return the seconds of the kernels of the heaviest stage.

    Adapters count by their FLOPs, in each pass of a layer.

    Args:
        layer_passes: cost of attention and other kernels in forward passes; 3 with the backward pass.
        product_passes: the same for the layers' matrices; 2 if their own gradients are left out.
        head_passes: the argument of `stage_flops` with this name.
    """
    shape, layout = replica.shape, replica.layout
    no_pairs = replace(work, squares=0.0)
    all_flops = stage_flops(shape, work, layout.pipe, layer_passes, head_passes)
    of_products = stage_flops(shape, no_pairs, layout.pipe, layer_passes, head_passes)
    attention = (all_flops - of_products) / layout.tensor
    products = stage_flops(shape, no_pairs, layout.pipe, product_passes, 0) / layout.tensor
    head = stage_flops(shape, no_pairs, layout.pipe, product_passes, head_passes) / layout.tensor - products
    if replica.config.lora is not None:
        products += 2 * _adapter_weights(replica) * work.rows * layer_passes
    tower_passes = layer_passes if replica.trains_tower else 1
    tower = tower_passes * tower_seconds(replica, work, num)
    first, last = stage_layers(shape.num_layers, layout.pipe)[0]
    of_layer = layer_passes * (elementwise_bytes(replica, work.rows) + adapter_bytes(replica, work.rows))
    others = (last - first) * (of_layer + fp8_bytes(replica, work.rows, num, layer_passes))
    others += (last - first) * _matrix_bytes(replica, num, layer_passes)
    factor = replica.trainer.factor * replica.expert_wait
    return PassSeconds(
        factor * products / product_rate(replica, work.rows / num),
        factor * head / product_rate(replica.unquantized, work.rows / num),
        attention / attention_rate(replica),
        factor * others / replica.rates.stream,
        factor * tower,
    )


def _matrix_bytes(replica: ReplicaCosts, num: int, layer_passes: int) -> float:
    """Return the bytes of memory traffic beside a layer's products that adapters need in all micro-batches.

    DoRA writes and reads a matrix with its adapter in forward passes. A matrix in 4 bits is read and made
    whole in every pass.
    """
    lora, width = replica.config.lora, replica.itemsize
    if lora is None:
        return 0.0
    forwards, backwards = (layer_passes - 2, 1) if layer_passes > 1 else (1, 0)
    traffic = 0.0
    if lora.dora:
        matrices = sum(measured_matrices(replica.trained_shape)) / replica.layout.tensor
        traffic = num * forwards * 3 * width * matrices
    if lora.base is not None:
        matrices = sum(spec.numel for spec in layer_template(replica.shape) if spec.is_quantizable)
        traffic += num * (forwards + backwards) * (0.5 + width) * matrices
    return traffic


def _adapter_weights(replica: ReplicaCosts) -> float:
    """Return the elements of adapters by which a rank multiplies each of its tokens, on average.

    With sequence parallelism tensor ranks divide the tokens where they have the same matrices.
    """
    shape, layout = replica.trained_shape, replica.layout
    if replica.token_share == layout.expert == 1:
        return replica.trained_weights - inactive_parameters(shape) / layout.pipe
    return (num_parameters(shape) - inactive_parameters(shape)) / layout.pipe / layout.tensor


def tower_seconds(replica: ReplicaCosts, work: Work, num: int) -> float:
    """Return the seconds of a tower's forward pass over `num` micro-batches, whole on every tensor rank."""
    tower = replica.shape.vision
    if tower is None or not work.patches:
        return 0.0
    rows, d, f = max(work.patches / num, 1.0), tower.hidden, tower.intermediate
    mlp = (rows, d, (tower.num_mlp - 1) * f), (rows, f, d)
    products: tuple[Product, ...] = ((rows, d, 3 * d), (rows, d, d), *mlp)
    of_block = 2 * rows * tower.block_matrices
    taken = sum(replica.matmul.seconds(*product, replica.peak_flops) for product in products)
    others = _passes(replica) * tower.num_layers * work.patches * (d + f) * replica.itemsize
    return (
        tower_products(tower, work) * taken / of_block
        + tower_attention(tower, work) / attention_rate(replica)
        + others / replica.rates.stream
    )
