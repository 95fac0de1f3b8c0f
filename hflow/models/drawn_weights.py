"""Models on the meta device, and their random weights drawn one at a time.

transformers draws the weights of a whole model while it builds it. Here the model is built on the meta
device, and the operations that initialise parameters are recorded. They are then applied to one parameter
after the other. The numbers are the same, as all are drawn in the same order, but only one parameter has
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from typing_extensions import override

from hflow.models.hf_config import auto_model

_OVERWRITES = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operations besides draws after which the earlier values of a tensor are gone."""


@contextmanager
def parameters_on_meta(keep: Callable[[Tensor, Tensor], None] | None = None) -> Iterator[None]:
    """Let modules that are built now have their parameters on the meta device.

    Their buffers are real, unlike under `torch.device("meta")`: a checkpoint does not hold those that a model
    computes, such as the frequencies of rotary embeddings. `keep` is called with each parameter on the meta
    device and the values that it had.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        if weight is not None and not weight.is_meta:  # a tied weight stays the same object
            values, weight = weight.detach(), nn.Parameter(weight.to("meta"), weight.requires_grad)
            if keep is not None:
                keep(weight, values)
        register(module, name, weight)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def drawn_weights(config: PreTrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a causal language model with random weights once, whole, in fp32 on the CPU.

    These are the weights that transformers gives the model after `torch.manual_seed(seed)`. torch draws other
    numbers in other dtypes, so cast what is yielded.
    """
    recorder = _Recorder()
    with parameters_on_meta(recorder.keep), recorder:
        model = _from_config(config)
    if recorder.is_complete:
        yield from recorder.replay(dict(model.named_parameters()), seed)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _from_config(config)
    yield from ((name, weight.detach()) for name, weight in model.named_parameters())


def _from_config(config: PreTrainedConfig) -> nn.Module:
    model: nn.Module = auto_model(config).from_config(copy.deepcopy(config), dtype=torch.float32)
    return model


@dataclass(frozen=True)
class _Step:
    """An operation that changes a parameter, or a view of it, in place."""

    operation: Any
    target: Tensor
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def storage(self) -> int:
        """The key of the parameter's storage."""
        return _key(self.target)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.operation.tags

    @property
    def overwrites(self) -> bool:
        """Whether nothing is left of the parameter's earlier values."""
        is_whole = self.target.nbytes == self.target.untyped_storage().nbytes()
        return is_whole and (self.draws or self.operation in _OVERWRITES)

    def apply(self, storage: Tensor, generator: torch.Generator) -> None:
        """Apply the operation to a storage with values, one-dimensional."""
        size, stride, start = self.target.size(), self.target.stride(), self.target.storage_offset()
        options = self.options | ({"generator": generator} if self.draws else {})
        self.operation(storage.as_strided(size, stride, start), *self.arguments, **options)


class _Recorder(TorchDispatchMode):
    """Records the operations that change parameters on the meta device, which have no effect there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_complete = True
        """Whether the values of parameters depend on nothing that was not recorded."""
        self._steps: list[_Step] = []
        self._initial: dict[int, tuple[Tensor, Tensor]] = {}
        """Key of a storage -> a parameter, which keeps the key from being used again, and its values."""

    def keep(self, weight: Tensor, values: Tensor) -> None:
        """Keep the values that a parameter was made with."""
        self._initial[_key(weight)] = weight, values

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:  # a parameter, most often
            return func(*args, **options | {"device": "meta"})
        changes = func._schema.arguments and func._schema.is_mutable
        if changes and args[0].is_meta:
            self._steps.append(_Step(func, args[0], args[1:], options))
            read = [x for x in (*args[1:], *options.values()) if isinstance(x, Tensor)]
            is_drawn = torch.Tag.nondeterministic_seeded in func.tags
            has_generator = any(argument.name == "generator" for argument in func._schema.arguments)
            if any(x.is_meta for x in read) or (is_drawn and not has_generator):
                self.is_complete = False
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.is_complete = False
        return func(*args, **options)

    def replay(self, parameters: dict[str, nn.Parameter], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, by name on the meta device, with their values, each when it is complete.

        What others draw is drawn, and not kept.
        """
        generator = torch.Generator().manual_seed(seed)
        names = {_key(weight): name for name, weight in parameters.items()}
        first = {step.storage: number for number, step in enumerate(self._steps) if step.overwrites}
        last = {step.storage: number for number, step in enumerate(self._steps)}
        whole: dict[int, Tensor] = {}
        for number, step in enumerate(self._steps):
            key = step.storage
            is_kept = key in names and number >= first.get(key, 0)
            if is_kept and key not in whole:
                whole[key] = self._values(key, step.target)
            if is_kept:
                step.apply(whole[key], generator)
            elif step.draws:
                step.apply(_empty_storage(step.target), generator)
            if key in names and number == last[key]:
                name = names.pop(key)
                yield name, whole.pop(key).view(parameters[name].shape)
        for key, name in names.items():
            yield name, self._values(key, parameters[name]).view(parameters[name].shape)

    def _values(self, key: int, target: Tensor) -> Tensor:
        """Return the values that a parameter was made with, one-dimensional."""
        if key not in self._initial:
            return _empty_storage(target)
        _, values = self._initial.pop(key)
        return values.reshape(-1)


def _key(tensor: Tensor) -> int:
    """Return the key of a tensor's storage, which views share."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _empty_storage(target: Tensor) -> Tensor:
    """Return values for the whole storage of a tensor, one-dimensional and not initialised."""
    return torch.empty(target.untyped_storage().nbytes() // target.itemsize, dtype=target.dtype)
