"""What vLLM is started with for models that see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.base.errors import BackendError
from hflow.engines.interface import EngineSetup
from hflow.models.hf_config import family_of, read_config

_RANK_EXTENSION = "hflow.engines.vllm.seeing_rank.SeeingRankExtension"
_SECTIONS = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20]}
"""How transformers divides the frequencies of M-RoPE among its axes where a config does not say it."""
SERVED = (*_SECTIONS, "smolvlm")
"""The families whose images `images` gives to vLLM."""


def model_overrides(setup: EngineSetup) -> dict[str, Any]:
    """Return the changes to the config of a model that sees with which vLLM computes as transformers does.

    transformers always interleaves the axes of Qwen3-VL's M-RoPE, vLLM only where the config says so.
    """
    config = read_config(setup.settings)
    family = family_of(config)
    if family is None or family.name not in _SECTIONS:
        return {}
    known = config.get_text_config().rope_parameters or {}
    rope = {"mrope_section": known.get("mrope_section", _SECTIONS[family.name])}
    if family.name == "qwen3_vl":
        rope["mrope_interleaved"] = True
    return {"hf_overrides": {"text_config": {"rope_parameters": rope}}}


def image_options(setup: EngineSetup) -> Mapping[str, Any]:
    """Return the options with which vLLM's engine takes images that hflow has prepared.

    Raises:
        BackendError: if it is not known how vLLM takes those of the model's family, or if it shall quantise
            the model.
    """
    family = family_of(read_config(setup.settings))
    if family is None:
        return {}
    if family.name not in SERVED:
        raise BackendError(
            f"model {setup.settings.name!r}: the vllm engine takes images of {', '.join(SERVED)}, but not of "
            f"{family.name}. Set models.{setup.settings.name}.gen.engine=embedded."
        )
    if setup.options.get("quantization") is not None:
        raise BackendError(
            f"model {setup.settings.name!r}: vllm would quantise the tower too, which was not "
            f"tried. Remove models.{setup.settings.name}.gen.quantization."
        )
    options = {
        "worker_extension_cls": _RANK_EXTENSION,
        # Both would run the model's processor, which vLLM has no need of here.
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        # vLLM would normalise colours a second time where the checkpoint has a processor's settings.
        "mm_device_do_normalize": False,
        **model_overrides(setup),
    }
    if family.name in _SECTIONS:  # each rank has the whole tower, and computes a part of the images
        options["mm_encoder_tp_mode"] = "data"
    return options
