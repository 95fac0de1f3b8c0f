"""Low-rank adapters of a layer's experts: every matrix of every expert has its own.

transformers has the gates and ups of all experts in one parameter `[N, 2F, D]`, and the downs in another one,
`[N, D, F]`. Each matrix W of a parameter computes `W x + scale * B A x`, so a gate and its up share A, as in
peft (`target_parameters`). peft adds B A to all matrices in every forward pass; here tokens pass A and B.

Axes: N experts, F rows of an expert, D hidden, I inputs, O outputs, r rank, U computed tokens, K experts of a
token, R = U K rows, which are sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.moe import _grouped_linear

from hflow.shapes.model_shape import EXPERT_TARGETS, A, B

_ALIGNMENT = 16
"""Rows of the matrices of a grouped product begin at multiples of this many bytes."""
_MODULE = "experts."
"""The module that has `EXPERT_TARGETS`, as their names begin."""


class ExpertAdapter(nn.Module):
    """The adapters of one parameter of experts, `[N, O, I]`."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        """Take weights `[N, r, I]` and `[N, O, r]`, and the factor of the adapters' output."""
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self._scale = scale
        self._disable_adapters = False  # as peft's modules have it

    def forward(self, x: Tensor, output: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Add the adapters' output for `x`, `[R, I]`, to that of the matrices, `[R, O]`, in place.

        `multiply` multiplies the rows of each expert by its matrix, `[R, I]`, `[N, O, I]` -> `[R, O]`.
        """
        if self._disable_adapters:
            return output
        a: Tensor = self.lora_A
        b: Tensor = self.lora_B
        if unused := -a.shape[1] % (_ALIGNMENT // a.element_size()):
            a, b = pad(a, (0, 0, 0, unused)), pad(b, (0, unused))
        return output.add_(multiply(self._scale * multiply(x, a), b))


def _drawn_adapter(shape: Sequence[int], r: int, scale: float) -> ExpertAdapter:
    """Return new adapters of a parameter, in fp32: A is drawn as peft draws it, and B is 0."""
    num_experts, num_outputs, num_inputs = shape
    a = torch.empty(num_experts, r, num_inputs)
    nn.init.kaiming_uniform_(a.flatten(0, 1), a=math.sqrt(5))
    return ExpertAdapter(a, torch.zeros(num_experts, num_outputs, r), scale)


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules with experts that can have adapters: without biases, and `[N, O, I]`."""
    return [
        module
        for path, module in model.named_modules()
        if f".{path}.".endswith(f".{_MODULE}")
        and all(hasattr(module, target.removeprefix(_MODULE)) for target in EXPERT_TARGETS)
        and not getattr(module, "has_bias", True)
        and not getattr(module, "is_transposed", True)
    ]


def add_expert_adapters(model: nn.Module, targets: Iterable[str], r: int, scale: float) -> None:
    """Add adapters of rank `r` to experts in place, on the CPU; targets are some of `EXPERT_TARGETS`."""
    names = [target.removeprefix(_MODULE) for target in EXPERT_TARGETS if target in set(targets)]
    for experts in experts_of(model) if names else ():
        experts.adapters = nn.ModuleDict(
            {name: _drawn_adapter(getattr(experts, name).shape, r, scale) for name in names}
        )
        experts.forward = partial(_forward, experts)


def _forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts with adapters, as `grouped_mm_experts_forward` of transformers does without.

    Hidden states are `[U, D]`, each token's experts and their weights `[U, K]`.
    """
    per_token = index.shape[1]
    chosen, order = index.flatten().sort()
    numbers = torch.arange(len(experts.gate_up_proj), device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _grouped_linear(x, weight, ends)
        return product

    def adapted(x: Tensor, name: str) -> Tensor:
        output = multiply(x, getattr(experts, name))
        return experts.adapters[name](x, output, multiply) if name in experts.adapters else output

    activated = experts._apply_gate(adapted(hidden[order // per_token], "gate_up_proj"))
    rows = adapted(activated, "down_proj") * weights.flatten()[order, None]
    return rows[order.argsort()].view(len(index), per_token, -1).sum(1).to(hidden.dtype)


def as_in_peft(weights: Mapping[str, Tensor], targets: Sequence[str]) -> dict[str, Tensor]:
    """Return adapters as peft saves them: those of a parameter of experts as `[N r, I]` and `[O, r N]`.

    Args:
        weights: adapters by name, `[N, r, I]` and `[N, O, r]` if they are those of experts. B of gates and B
            of ups may be apart, as `stacked_views` yields them.
        targets: members of `EXPERT_TARGETS` that have adapters; adapters of others stay as they are.
    """
    of_gate, of_up = (f".{_MODULE}{x}_proj.{B}" for x in ("gate", "up"))
    named = {}
    for name, x in weights.items():
        if name.endswith(of_gate):
            path = name.removesuffix(of_gate)
            named[f"{path}.{EXPERT_TARGETS[0]}.{B}"] = torch.cat([x, weights[path + of_up]], 1)
        elif not name.endswith(of_up):
            named[name] = x
    return dict(_as_in_peft(name, x, targets) for name, x in named.items())


def _as_in_peft(name: str, x: Tensor, targets: Sequence[str]) -> tuple[str, Tensor]:
    """Return its name and values. peft wraps a module once for each parameter, the first one innermost."""
    end = A if name.endswith(A) else B
    path = name.removesuffix(f".{end}")
    target = next((target for target in targets if path.endswith(f".{target}")), None)
    if target is None:
        return name, x
    wrappers = [one for one in EXPERT_TARGETS if one in targets]
    inner = "base_layer." * (len(wrappers) - 1 - wrappers.index(target))
    values = x.flatten(0, 1) if end == A else x.permute(1, 2, 0).flatten(1)
    return f"{path.removesuffix(target)}{_MODULE}{inner}{end}", values
