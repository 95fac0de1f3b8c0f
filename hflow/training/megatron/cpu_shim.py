"""Runs megatron-core on a CPU, or a device that is no GPU, by rewriting its source while it is imported.

In the rewritten source, `torch.cuda` is a namespace for the device, `"cuda"` is its name,
`.cuda()` moves to it, and pinned memory is removed. Nothing outside megatron changes, and nothing is looked
up at run time. Machines with CUDA never import this module.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from hflow.base.errors import BackendError

_PACKAGE = "megatron.core"
_NAME = "__cpu_as_cuda__"
"""Name of the namespace in rewritten modules."""
_TOUCHED = re.compile(rb"cuda|pin_memory")
_TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w+Tensor)")


def install(device: str = "cpu") -> None:
    """Rewrite megatron-core when it is imported; safe to call again.

    Raises:
        BackendError: if it is already imported without the rewriting.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            assert finder.device == device, f"megatron-core is imported for {finder.device}"
            return
    if _PACKAGE in sys.modules:
        raise BackendError(
            "megatron.core was imported before it was prepared for the CPU; "
            "call hflow.training.megatron.device.prepare('cpu') first"
        )
    sys.meta_path.insert(0, _Finder(device))


class _Nothing:
    """A stream, event or context that does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **options: self


class _CpuAsCuda:
    """The members of `torch.cuda` that megatron uses, for one device; other members are torch's."""

    def __init__(self, name: str) -> None:
        self._name = name

    Stream = Event = stream = device = _Nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @property
    def random(self) -> _CpuAsCuda:
        return self

    def current_device(self) -> torch.device:
        return torch.device(self._name)

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, device: object = None) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory_allocated(self, device: object = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = memory_allocated


class _Rewrite(ast.NodeTransformer):
    def __init__(self, device: str) -> None:
        self._device = device
        self._tensor_type = r"torch.\1" if device == "cpu" else rf"torch.{device}.\1"

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        text = self._device if node.value == "cuda" else _TENSOR_TYPE.sub(self._tensor_type, node.value)
        return ast.copy_location(ast.Constant(text), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAME, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args, node.keywords = "to", [ast.Constant(self._device)], []
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source. Its byte code is not cached, as Python would use it for the original."""

    def __init__(self, fullname: str, path: str, device: str) -> None:
        super().__init__(fullname, path)
        self._device = device

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Rewrite(self._device).visit(ast.parse(self.get_data(path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _NAME, _CpuAsCuda(self._device))
        super().exec_module(module)
        if module.__name__ in _AFTER:
            _AFTER[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, device: str) -> None:
        self.device = device

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = spec.loader if spec else None
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return spec
        if fullname in _AFTER or _TOUCHED.search(Path(loader.path).read_bytes()):
            assert spec is not None
            spec.loader = _Loader(fullname, loader.path, self.device)
        return spec


def _run_eagerly(module: ModuleType) -> None:
    """Turn off torch.compile, which takes seconds to import and gains nothing on small models."""
    module.disable_jit_fuser()


def _keep_cpu_states(module: ModuleType) -> None:
    """Use the CPU's random states; the original functions call CUDA's C++ code."""
    namespace: Any = module
    namespace._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    namespace._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _silence_warning(module: ModuleType) -> None:
    """Silence the warning about the number of CUDA connections."""
    module.linear_with_grad_accumulation_and_async_allreduce.warned = True


def _gather_unequal_parts(module: ModuleType) -> None:
    """Gather parts of different sizes by an exchange, as gloo gathers equal ones only."""
    namespace: Any = module
    gather = namespace._gather_along_first_dim

    def gather_parts(
        part: torch.Tensor,
        group: Any,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            gathered: torch.Tensor = gather(part, group, output_split_sizes, use_global_buffer)
            return gathered
        whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        copies = torch.cat([part] * group.size())
        torch.distributed.all_to_all_single(
            whole, copies, output_split_sizes, [len(part)] * group.size(), group=group
        )
        return whole

    namespace._gather_along_first_dim = gather_parts


def _count_in_lists(module: ModuleType) -> None:
    """Return numbers of tokens as numpy arrays where the original does so for tensors of a GPU only."""
    namespace: Any = module

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    namespace.maybe_move_tensor_to_cpu = moved


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _run_eagerly,
    "megatron.core.tensor_parallel.random": _keep_cpu_states,
    "megatron.core.tensor_parallel.layers": _silence_warning,
    "megatron.core.tensor_parallel.mappings": _gather_unequal_parts,
    "megatron.core.transformer.moe.moe_utils": _count_in_lists,
}
"""Module name -> change to make after the module is loaded."""
