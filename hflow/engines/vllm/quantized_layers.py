"""Layers that vLLM quantises while weights are loaded (`models.NAME.gen.quantization`), and their checks.

vLLM assembles such a layer as in the checkpoint, quantises it, and copies the result to its place. What
arrived can be compared with the assembled layer alone, so `QuantizedLayers` keeps checksums of both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from hflow.base.errors import RunError
from hflow.types.tensor_slices import Block
from hflow.weights.checksum import checksums_of, weights_checksum

BlocksOf = Callable[[nn.Module, str, Mapping[str, Tensor]], Iterator[Block]]
"""Yields the parts of checkpoint tensors that are in a module: `hf_mapping.held_by_module`."""


def is_quantized(module: nn.Module) -> bool:
    """Return whether vLLM quantises the weights of a module while it loads them."""
    return isinstance(getattr(module, "quant_method", None), (OnlineLinearBase, OnlineMoEMethodBase))


def loaded_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters in the form in which they are loaded.

    Those that vLLM quantises are on the meta device.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    if not is_quantized(module):
        return parameters
    quantized: Mapping[str, Tensor] = get_layerwise_info(module).restore_metadata[0]
    return {**quantized} | {name: values for name, values in parameters.items() if name in SKIP_TENSORS}


class QuantizedLayers:
    """The quantised layers of a rank, with the checksums of what was last loaded into them.

    `blocks_of` finds tensors of the checkpoint in a module.
    """

    def __init__(self, model: nn.Module, blocks_of: BlocksOf) -> None:
        self._blocks_of = blocks_of
        self._layers = {path: module for path, module in model.named_modules() if is_quantized(module)}
        self._assembled: dict[str, int] = {}
        """Tensor of the checkpoint -> the checksum of the rank's part, before it was quantised."""
        self._quantized: dict[str, int] = {}
        """Path of a layer -> the checksum of its parameters when they had been quantised."""
        for path, module in self._layers.items():
            method: Any = module.quant_method
            method.process_weights_after_loading = partial(
                self._quantize, path, method.process_weights_after_loading
            )

    def start(self) -> None:
        """Forget what was loaded before."""
        self._assembled.clear()
        self._quantized.clear()

    def checksums(self, blocks: Sequence[Block]) -> list[int]:
        """Return the checksums of what was loaded: of quantised layers, what they were quantised from.

        Raises:
            RunError: if vLLM has not quantised a layer of these blocks since `start`.
        """
        plain = iter(checksums_of([block for block in blocks if not block.values.is_meta]))
        return [self._checksum(block.tensor) if block.values.is_meta else next(plain) for block in blocks]

    def check(self) -> None:
        """Check that every layer holds what vLLM quantised since `start`.

        Raises:
            RunError: naming the first layer that does not.
        """
        for path, module in self._layers.items():
            if path not in self._quantized:
                raise _not_quantized(path)
            if _parameters_checksum(module) != self._quantized[path]:
                raise RunError(
                    f"the engine does not hold {path} as vllm quantised it: its weights changed after they "
                    "were quantised. If it happens again, vllm's loader of quantised layers has a bug"
                )

    def _quantize(self, path: str, quantize: Callable[[nn.Module], None], module: nn.Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        blocks = list(self._blocks_of(module, path, parameters))
        self._assembled |= zip((block.tensor for block in blocks), checksums_of(blocks), strict=True)
        quantize(module)
        self._quantized[path] = _parameters_checksum(module)

    def _checksum(self, tensor: str) -> int:
        if tensor not in self._assembled:
            raise _not_quantized(tensor)
        return self._assembled[tensor]


def _not_quantized(what: str) -> RunError:
    return RunError(
        f"new weights of {what} did not reach the engine: vllm has not quantised them. If it happens again, "
        "vllm's loader of quantised layers has a bug"
    )


def _parameters_checksum(module: nn.Module) -> int:
    return weights_checksum(dict(module.named_parameters(recurse=False)))
