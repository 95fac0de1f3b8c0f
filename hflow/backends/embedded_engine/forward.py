"""Chooses how the engine computes a step: by `DenseDecoder`, or by the modules of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hflow.backends.embedded_engine.attention import PackedStep
from hflow.backends.embedded_engine.dense_decoder import DenseDecoder
from hflow.backends.embedded_engine.families import THROUGH_MODULES, own_forward_objection
from hflow.backends.settings import ModelSettings

RunModel = Callable[[Tensor, Tensor, Tensor, PackedStep], Tensor]
"""Makes logits `[len(logit_rows), V]` of input ids `[R]`, positions `[R]`, logit rows and a step."""

_LOG = logging.getLogger(__name__)


def choose_forward(settings: ModelSettings, module: nn.Module) -> RunModel:
    """Return the function that runs a step of a module; log if it is that of transformers' modules."""
    config: Any = module.config
    objection = own_forward_objection(config.to_dict(), settings.lora is not None)
    if objection is None:
        return DenseDecoder(module).logits
    _LOG.warning("engine of %s: %s: %s", settings.name, THROUGH_MODULES, objection)

    def run_modules(input_ids: Tensor, positions: Tensor, logit_rows: Tensor, step: PackedStep) -> Tensor:
        logits: Tensor = module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            packed_step=step,
        ).logits[0]
        return logits

    return run_modules
