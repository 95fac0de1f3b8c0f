"""vLLM with faults in its loader of quantised layers, by the version that is loaded.

The process of the engine imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from typing_extensions import override
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader.reload import layerwise

from hflow.engines.vllm.stepper import VllmStepper
from hflow.weights.loading import LoadedWeights

_process: Any = layerwise._layerwise_process
_copy: Any = layerwise._copy_and_restore_kernel_tensors


def _lose_a_tensor(layer: Any, info: Any) -> None:
    """Assemble the queries, keys and values of a layer without the last one that arrived."""
    if isinstance(layer, QKVParallelLinear):  # biases are written as they arrive
        del info.loaded_weights[max(i for i, (name, _) in enumerate(info.loaded_weights) if name == "weight")]
    _process(layer, info)


def _skip(layer: Any, info: Any) -> None:
    """Leave a layer as it was."""
    if isinstance(layer, QKVParallelLinear):
        layerwise._place_kernel_tensors(layer, info)
        info.reset()
    else:
        _process(layer, info)


def _keep_old(layer: Any, info: Any) -> None:
    """Do not copy what was quantised to its place."""
    (layerwise._place_kernel_tensors if isinstance(layer, QKVParallelLinear) else _copy)(layer, info)


FAULTS: dict[int, tuple[str, Callable[[Any, Any], None]]] = {
    101: ("_layerwise_process", _lose_a_tensor),
    102: ("_layerwise_process", _skip),
    103: ("_copy_and_restore_kernel_tensors", _keep_old),
}
"""Version -> the function of vLLM that has a fault while it is loaded."""


class FaultyStepper(VllmStepper):
    """Loads the versions of `FAULTS` with their faults."""

    @override
    def load_weights(self, incoming: Sequence[bytes], version: int) -> LoadedWeights:
        if version not in FAULTS:
            return super().load_weights(incoming, version)
        name, fault = FAULTS[version]
        with mock.patch.object(layerwise, name, fault):
            return super().load_weights(incoming, version)
