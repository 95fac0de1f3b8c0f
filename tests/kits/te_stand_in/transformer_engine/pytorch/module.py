"""The modules, computed by torch.

Axes: U tokens of this rank's input, D columns of a weight, F rows, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, pad, rms_norm

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class _Base(nn.Module):
    """What all modules with weights have in common."""

    def __init__(
        self,
        *,
        tp_group: ProcessGroup | None,
        tp_size: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        parallel_mode: str | None,
        bias: bool,
        return_bias: bool,
        init_method: Callable[[Tensor], Any],
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode in (None, "column", "row")
        assert tp_group is not None or tp_size == 1, "the group of tensor ranks is missing"
        self.tp_group = tp_group
        self.tp_size = 1 if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self._init_method = init_method
        self._tracker, self._tracker_name = get_rng_state_tracker, rng_tracker_name
        self.save_original_input = False
        self._workspaces: dict[str, Tensor] = {}

    def _split(self, in_features: int, out_features: int) -> None:
        """Set the sizes of this rank's weight."""
        self.in_features = in_features // (self.tp_size if self.parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if self.parallel_mode == "column" else 1)

    def _add_weight(self, name: str, *shape: int, dtype: torch.dtype, device: Any) -> None:
        weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.register_parameter(name, weight)
        axis = 1 if self.parallel_mode == "row" else 0
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, axis, 1
        if self._tracker is None:
            self._init_method(weight)
        elif self._tracker_name:
            with self._tracker().fork(self._tracker_name):
                self._init_method(weight)
        else:
            with self._tracker().fork():
                self._init_method(weight)

    def _add_bias(self, name: str, *, dtype: torch.dtype, device: Any) -> None:
        if not self.use_bias:
            setattr(self, name, torch.empty(0, dtype=dtype, device=device))
            return
        bias = nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        self.register_parameter(name, bias)
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the input of a column-parallel product, whose gradient is summed over the tensor ranks."""
        if self.tp_size == 1:
            return x
        return (_Gather if self.sequence_parallel else _Copy).apply(x, self.tp_group)

    def _summed(self, x: Tensor) -> Tensor:
        """Return the sum of a row-parallel product over the tensor ranks, or this rank's part of it."""
        if self.tp_size == 1:
            return x
        return (_Scatter if self.sequence_parallel else _Sum).apply(x, self.tp_group)

    def _linear(self, x: Tensor, is_first_microbatch: bool | None) -> Any:
        """Multiply by `weight`, with the collectives of the parallel mode and the bias."""
        bias = self.bias if self.use_bias else None
        if FP8GlobalStateManager.is_fp8_enabled() and self.sequence_parallel:
            multiple = FP8GlobalStateManager.get_fp8_recipe().gathered_multiple
            rows = len(x) // (self.tp_size if self.parallel_mode == "row" else 1)
            assert rows % multiple == 0, f"All-gather requires quantizable tensor, but it has {rows} rows"
        if self.parallel_mode == "column":
            x = self._gathered(x)
        out = self._product(x, "weight", is_first_microbatch)
        if self.parallel_mode == "row":
            out = self._summed(out)
        if self.apply_bias:
            out = out + bias
        return (out, bias) if self.return_bias else out

    def _product(self, x: Tensor, name: str, is_first_microbatch: bool | None) -> Tensor:
        weight, recipe = getattr(self, name), FP8GlobalStateManager.get_fp8_recipe()
        is_fused = self.fuse_wgrad_accumulation and weight.requires_grad
        if recipe is None and not is_fused:
            return linear(x, weight)
        source = weight.detach()
        if recipe is not None:
            sizes = (x[..., 0].numel(), *weight.shape)
            assert not any(size % recipe.multiple for size in sizes), f"FP8 execution of {sizes}"
            if is_first_microbatch is not None:
                if is_first_microbatch:
                    self._workspaces[name] = source.clone()
                source = self._workspaces[name]
        return _Product.apply(x, weight, source, recipe, is_fused, not is_first_microbatch)

    def get_extra_state(self) -> Tensor:
        """Return what is beside the parameters in a state dict: nothing, without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Take nothing."""


class Linear(_Base):
    """`te.pytorch.Linear` with the arguments that megatron passes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parallel_mode=parallel_mode,
            bias=bias,
            return_bias=return_bias,
            init_method=init_method,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        self._split(in_features, out_features)
        self._add_weight("weight", self.out_features, self.in_features, dtype=params_dtype, device=device)
        self._add_bias("bias", dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._linear(inp, is_first_microbatch)


class LayerNormLinear(_Base):
    """`te.pytorch.LayerNormLinear`: an RMS norm and a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        assert not zero_centered_gamma
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parallel_mode=parallel_mode,
            bias=bias,
            return_bias=return_bias,
            init_method=init_method,
            get_rng_state_tracker=get_rng_state_tracker,
        )
        self.eps = eps
        self._split(in_features, out_features)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        self._add_weight("weight", self.out_features, self.in_features, dtype=params_dtype, device=device)
        self._add_bias("bias", dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._linear(_normalized(inp, self.layer_norm_weight, self.eps), is_first_microbatch)


class GroupedLinear(_Base):
    """`te.pytorch.GroupedLinear`: a linear layer for each group of rows, without collectives."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        assert not bias
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parallel_mode=parallel_mode,
            bias=bias,
            return_bias=return_bias,
            init_method=init_method,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        self.num_gemms = num_gemms
        self._split(in_features, out_features)
        shape = (self.out_features, self.in_features)
        for i in range(num_gemms):
            self._add_weight(f"weight{i}", *shape, dtype=params_dtype, device=device)
            self._add_bias(f"bias{i}", dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        assert len(inp), "what the kernels do with no rows at all is not known"
        parts = [
            self._product(rows, f"weight{i}", is_first_microbatch)
            for i, rows in enumerate(inp.split(m_splits))
        ]
        return torch.cat(parts)


class RMSNorm(nn.Module):
    """`te.pytorch.RMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _normalized(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """A name; no model here has this norm."""


class DotProductAttention(nn.Module):
    """A name that megatron derives from; attention is hflow's."""


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in fp32 and round once, as the fused kernel does."""
    return rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


class Fp8Padding(nn.Module):
    """`te.pytorch.Fp8Padding`: appends rows of zeros to those of each group."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms
        return [-(-num // self.align_size) * self.align_size for num in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = self._padded(m_splits)
        pairs = zip(inp.split(m_splits), padded, strict=True)
        return torch.cat([pad(rows, (0, 0, 0, num - len(rows))) for rows, num in pairs]), padded


class Fp8Unpadding(Fp8Padding):
    """`te.pytorch.Fp8Unpadding`: takes them away."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        pairs = zip(inp.split(self._padded(m_splits)), m_splits, strict=True)
        return torch.cat([rows[:num] for rows, num in pairs])


def quantize(x: Tensor, rows: int, columns: int | None, dtype: torch.dtype) -> Tensor:
    """Round `[R, C]` to FP8 and back, in blocks of `rows` x `columns` whose largest entry is FP8's largest.

    With None, the block is the whole tensor. Blocks of 32 have scales that are powers of 2.
    """
    if not x.numel():
        return x.float()
    if columns is None:
        rows, columns = x.shape
    padded = pad(x.float(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = torch.finfo(dtype).max / blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    if 32 in (rows, columns):
        scale = scale.log2().floor().exp2()
    return ((blocks * scale).to(dtype).float() / scale).flatten(2, 3).flatten(0, 1)[: len(x), : x.shape[1]]


class _Product(torch.autograd.Function):
    """A product in FP8, or one that adds the gradient of its weight to `main_grad`, or both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        source: Tensor,
        recipe: Recipe | None,
        is_fused: bool,
        accumulates: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, source)
        ctx.weight, ctx.recipe, ctx.is_fused, ctx.accumulates = weight, recipe, is_fused, accumulates
        if recipe is None:
            return linear(x, source)
        dtype = recipe.fp8_format.value[0]
        rows = quantize(x.flatten(0, -2), 1, recipe.columns, dtype)
        matrix = quantize(source, recipe.of_weights, recipe.columns, dtype)
        return (rows @ matrix.t()).to(x.dtype).view(*x.shape[:-1], len(source))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source = ctx.saved_tensors
        weight, recipe = ctx.weight, ctx.recipe
        flat, of_rows, inputs = (one.flatten(0, -2).float() for one in (grad, grad, x))
        matrix = source.float()
        if recipe is not None:  # the sums are over another axis than in the forward pass
            of_input, of_output = recipe.fp8_format.value
            across = recipe.columns or 1
            columns = recipe.columns and 1
            of_rows = quantize(flat, 1, recipe.columns, of_output)
            matrix = quantize(matrix, across, recipe.columns and recipe.of_weights, of_input)
            flat, inputs = (
                quantize(flat, across, columns, of_output),
                quantize(inputs, across, columns, of_input),
            )
        of_x = (of_rows @ matrix).to(x.dtype).view(x.shape)
        of_weight = None
        if weight.requires_grad:
            of_weight = flat.t() @ inputs
            if ctx.is_fused:
                (weight.main_grad.add_ if ctx.accumulates else weight.main_grad.copy_)(of_weight)
                weight.grad_added_to_main_grad = True
                of_weight = torch.full_like(weight, torch.nan)
            of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None, None, None, None


class _Gather(torch.autograd.Function):
    """Gather the rows of all tensor ranks; scatter the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Scatter the sum over all tensor ranks; gather its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Copy(torch.autograd.Function):
    """Take the same input on all tensor ranks; sum its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over all tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return _all_reduce(x, group).chunk(group.size())[group.rank()].contiguous()
