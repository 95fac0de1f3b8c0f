"""The descriptor of the torch backend, which imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.backends.torch_model import memory
from hflow.planner.models.architectures import FAMILIES, read_shape
from hflow.planner.models.descriptors import Backend
from hflow.planner.plan.model_shape import tensors
from hflow.planner.plan.traits import BackendTraits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hflow.backends.settings import ModelSettings


def _make_model(*args: Any) -> Any:
    from hflow.backends.torch_model.backend import TorchModel

    return TorchModel(*args)


def _check_model(settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Check the packages and the checkpoint's tensors once, before workers start."""
    from hflow.backends.common.adapter import check_installed
    from hflow.backends.common.weight_files import check_weight_files
    from hflow.backends.hf_config import translate_errors

    check_installed(settings)
    if settings.path is None:
        return
    shape = read_shape(config.to_dict()) if config.model_type in FAMILIES else None
    expected = {} if shape is None else {spec.name: spec.shape for spec in tensors(shape)}
    if settings.head != "lm":
        expected.pop("lm_head.weight", None)
    with translate_errors(settings.name):
        check_weight_files(Path(settings.path), expected)


BACKEND = Backend(
    name="torch",
    traits=BackendTraits(sharded_over_data="everything", shares_prompts=True, has_adapters=True),
    factory=_make_model,
    memory=memory,
    packages=("torch", "transformers"),
    check_model=_check_model,
    install="make env",
    purpose="training and inference",
    is_required=True,
)
