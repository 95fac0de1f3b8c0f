"""vLLM with a fault in the loading of adapters, while the version `FAULTY` is loaded.

The process of the engine imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor
from typing_extensions import override

from hflow.engines.vllm.adapters import HeldAdapters
from hflow.engines.vllm.stepper import VllmStepper
from hflow.weights.loading import LoadedWeights

FAULTY = 101
STALE = "model.layers.1.self_attn.v_proj.lora_B.weight"
"""The matrix that keeps its old values."""

_load: Any = HeldAdapters._load


def _leave_one(self: HeldAdapters, weights: Iterator[tuple[str, Tensor]]) -> None:
    kept = self._held[STALE].values.clone()
    _load(self, weights)
    self._held[STALE].values.copy_(kept)


class FaultyStepper(VllmStepper):
    """Loads all versions but `FAULTY` as it should."""

    @override
    def load_weights(self, incoming: Sequence[bytes], version: int) -> LoadedWeights:
        fault = _leave_one if version == FAULTY else _load
        with mock.patch.object(HeldAdapters, "_load", fault):
            return super().load_weights(incoming, version)
