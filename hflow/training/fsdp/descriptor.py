"""The descriptor of the torch backend, which imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.planner.models.descriptors import Backend
from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.architectures import KNOWN_FAMILIES, read_shape
from hflow.shapes.model_shape import tensors
from hflow.training.fsdp import memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hflow.models.settings import ModelSettings


def _make_model(*args: Any) -> Any:
    from hflow.training.fsdp.backend import TorchModel

    return TorchModel(*args)


def _check_model(settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Check the packages and the checkpoint's tensors once, before workers start."""
    from hflow.models.adapter import check_installed
    from hflow.models.hf_config import translate_errors
    from hflow.models.weight_files import check_weight_files

    check_installed(settings)
    if settings.path is None:
        return
    shape = read_shape(config.to_dict()) if config.model_type in KNOWN_FAMILIES else None
    expected = {} if shape is None else {spec.name: spec.shape for spec in tensors(shape)}
    if settings.head != "lm":
        expected.pop("lm_head.weight", None)
    with translate_errors(settings.name):
        check_weight_files(Path(settings.path), config.model_type, expected)


BACKEND = Backend(
    name="torch",
    traits=BackendTraits(
        sharded_over_data="everything",
        shares_prompts=True,
        has_adapters=True,
        rounds_base=True,
        compiles_layers=True,
    ),
    factory=_make_model,
    memory=memory,
    packages=("torch", "transformers"),
    check_model=_check_model,
    install="make env",
    purpose="training and inference",
    is_required=True,
)
