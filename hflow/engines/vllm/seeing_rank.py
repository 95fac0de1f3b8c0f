"""Stand-ins for what vLLM prepares images with, as hflow has prepared them before.

hflow has expanded the prompt and made the pixels of its images. So the processors of vLLM and transformers, a
tokenizer and torchvision are not needed.

Importing this module replaces them in its process: that of the engine, and those of tensor ranks, which
import it as their `worker_extension_cls`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from typing_extensions import override
from vllm.model_executor.models import registry as models
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    InputProcessingContext,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched import output
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from hflow.engines.vllm.images import IMAGE
from hflow.engines.vllm.rank import RankExtension

_QWEN = "transformers.models.qwen2_vl.image_processing_"


class SeeingRankExtension(RankExtension):
    """Methods of vLLM's worker of a rank whose model sees."""


class _Limits(BaseProcessingInfo):
    """Says what requests can have: images of any number and size that fit into a sequence."""

    @override
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    @override
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)


class _NoProcessor(BaseMultiModalProcessor[_Limits]):
    """Stands where vLLM expects the processor of a model. It processes nothing."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def _get_prompt_updates(self, *_: Any) -> NoReturn:
        raise NotImplementedError


class _NoDummies(BaseDummyInputsBuilder[_Limits]):
    def get_dummy_text(self, *_: Any) -> NoReturn:
        """Raise: nothing asks for it without profiling."""
        raise NotImplementedError

    def get_dummy_mm_data(self, *_: Any) -> NoReturn:
        """Raise: nothing asks for it without profiling."""
        raise NotImplementedError


def _limits(model_config: Any) -> _Limits:
    return _Limits(InputProcessingContext(model_config, None))


def _replace_processors() -> None:
    registry: Any = MULTIMODAL_REGISTRY
    registry.get_processing_info = _limits
    registry.create_processor = lambda model_config, **_: _NoProcessor(
        _limits(model_config), _NoDummies(_limits(model_config))
    )


def _replace_torchvision() -> None:
    """Let vLLM import its models without torchvision, of which it needs a function that does not use it."""
    if importlib.util.find_spec("torchvision") is None:
        sys.modules[f"{_QWEN}qwen2_vl"] = importlib.import_module(f"{_QWEN}pil_qwen2_vl")
        models._run_in_subprocess = lambda inspect: inspect()  # another process could not import them


def _keep_pixels() -> None:
    """Let the scheduler send the pixels of cached images too.

    vLLM's first model runner gets them with a new request only. It needs them if the request is computed
    again from its first token, after new weights or for want of memory.
    """
    output.strip_covered_mm_data = lambda features, *_, **__: features


def _compute_prompts_whole() -> None:
    """Let a prompt wait whose images do not fit into a step any more.

    vLLM would compute it up to such an image, but a CPU cannot divide prompts (`engine_arguments`). The
    images of a prompt always fit into a step of its own.
    """
    schedule = Scheduler._try_schedule_encoder_inputs

    def whole_or_none(
        self: Scheduler,
        request: Request,
        num_computed: int,
        num_new: int,
        budget: int,
        *rest: Any,
        **more: Any,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        found = schedule(self, request, num_computed, num_new, budget, *rest, **more)
        return found if found[1] == num_new else ([], 0, budget, [], [])

    Scheduler._try_schedule_encoder_inputs = whole_or_none


_replace_processors()
_replace_torchvision()
if current_platform.is_cpu():
    _keep_pixels()
    _compute_prompts_whole()
