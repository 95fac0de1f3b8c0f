"""Builds the HF model and head that `ModelSettings` describe, and checks that packing supports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from hflow.base.errors import BackendError, nearest
from hflow.models.adapter import add_adapter
from hflow.models.drawn_weights import parameters_on_meta
from hflow.models.dtypes import DTYPES
from hflow.models.heads import SCORE, ScalarHead, missing_head
from hflow.models.hf_config import attention_names, auto_model, read_config, translate_errors
from hflow.models.packed_attention import PACKED, check_supported
from hflow.models.settings import ModelSettings
from hflow.models.weight_files import check_tensors
from hflow.training.fsdp.held_weights import holds_parameters_of

HEADS = ("lm", "value", "score")

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Config keys of models whose logits are not just hidden states times a matrix."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a forward, so results would depend on packing."""


def build_model(
    settings: ModelSettings, *, is_sharded: bool = False, has_base: bool = False
) -> tuple[PreTrainedModel, nn.Module]:
    """Build the HF model and its head on the CPU, with packed attention and without dropout.

    Every rank builds the same weights, from the same checkpoint or the same seed: in fp32, but beside
    adapters, which are fp32, in the model's dtype.

    Args:
        is_sharded: leave parameters but adapters on the meta device, for `load_held_weights` and
            `draw_held_weights`. Checkpoints that transformers converts are read whole all the same.
        has_base: leave them there, as those of another model take their place.

    Raises:
        BackendError: if the settings, the architecture or the checkpoint are unusable.
    """
    check_choice("head", settings.head, HEADS)
    disable_progress_bar()
    config = read_config(settings)
    dtype = torch.float32 if settings.lora is None else DTYPES[settings.dtype]
    is_empty = is_sharded or has_base
    with translate_errors(settings.name):
        if settings.path is not None:
            path = Path(settings.path)
            model = model_without_weights(config, dtype) if is_empty else None
            if model is None or not (has_base or holds_parameters_of(path, model, settings.head)):
                model = _from_checkpoint(path, config, settings.head, dtype)
        else:
            model = model_without_weights(config) if is_empty else _from_scratch(config, settings.seed)
            for weight in model.parameters():  # not its buffers, which have dtypes of their own
                weight.data = weight.data.to(dtype)
        _check_architecture(model)
    _turn_off_dropout(model)
    _train_padding_token(model)
    if settings.lora is not None:
        add_adapter(model, settings)
    if settings.head == "lm":
        output: Any = model.get_output_embeddings  # peft's module, if it has an adapter
        return model, output()
    _remove_output_matrix(model)
    return model, scalar_head(settings, model.config.get_text_config().hidden_size)


def scalar_head(settings: ModelSettings, hidden_size: int) -> ScalarHead:
    """Return the checkpoint's head, or a new one if the model will be trained or has random weights."""
    head = ScalarHead(hidden_size, settings.seed, settings.head)
    if settings.path is None:
        return head
    directory = Path(settings.path)
    if not head.load(directory, settings.head) and not settings.trainable:
        raise missing_head(directory, settings.head)
    return head


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Check that a setting has one of its known values.

    Raises:
        BackendError: if not; suggests the nearest value.
    """
    if value not in known:
        raise BackendError(f"{name} {value!r} is not one of {', '.join(known)}{nearest(value, known)}")


def _from_scratch(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _from_config(config, torch.float32)
    return model


def model_without_weights(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model with parameters on the meta device."""
    with parameters_on_meta():
        model: PreTrainedModel = _from_config(config, dtype)
    return model


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    attention = attention_names(config, PACKED)
    model: PreTrainedModel = auto_model(config).from_config(
        config, dtype=dtype, attn_implementation=attention
    )
    return model


def _from_checkpoint(path: Path, config: PreTrainedConfig, head: str, dtype: torch.dtype) -> PreTrainedModel:
    verbosity = get_verbosity()
    set_verbosity_error()  # a head that is not loaded here is no news; all else is checked below
    try:
        model, report = auto_model(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_names(config, PACKED),
            local_files_only=True,
            use_safetensors=True,  # other formats are pickles
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(
            f"{path} has no readable weights: {reason}; check that its files are complete"
        ) from None
    finally:
        set_verbosity(verbosity)
    _check_loaded(path, model, report, head)
    loaded: PreTrainedModel = model
    return loaded


def _check_loaded(path: Path, model: PreTrainedModel, report: Mapping[str, Any], head: str) -> None:
    """Check that a checkpoint has exactly the model's tensors.

    A scalar head needs no output matrix, and a critic may start from a reward model, without its head.
    """
    output = _output_matrix(model)
    unneeded = set() if head == "lm" else {n for n, p in model.named_parameters() if p is output.weight}
    mismatched = {str(entry[0]) for entry in report["mismatched_keys"]}
    missing = set(report["missing_keys"]) - unneeded
    unknown = set(report["unexpected_keys"]) - (set() if head == "lm" else {SCORE})
    check_tensors(path, missing, unknown, mismatched - unneeded)


def _check_architecture(model: PreTrainedModel) -> None:
    """Check that packed results are the HF model's own."""
    check_supported(model)
    name, config = type(model).__name__, model.config.get_text_config()
    for key in _LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise BackendError(
                f"{name} transforms its logits ({key}), which is not supported; choose another architecture"
            )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise BackendError(
            f"{name} uses {rope!r} rotary embeddings, whose results depend on packing; choose another "
            "architecture"
        )


def _turn_off_dropout(model: nn.Module) -> None:
    """Set dropout to 0, so that training, inference and generation compute log-probs of one policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _train_padding_token(model: PreTrainedModel) -> None:
    """Give the padding token's embedding a gradient. Nothing is padded, so it is a token like others."""
    embeddings: Any = model.get_input_embeddings  # untyped in transformers
    embeddings().padding_idx = None


def _output_matrix(model: PreTrainedModel) -> nn.Linear:
    output: Any = model.get_output_embeddings  # untyped in transformers
    matrix = output()
    if not isinstance(matrix, nn.Linear):
        raise BackendError(
            f"{type(model).__name__} has no linear output layer, which hflow computes logits with; choose "
            "another architecture"
        )
    return matrix


def _remove_output_matrix(model: PreTrainedModel) -> None:
    """Remove the output layer, which a value or score model does not use."""
    matrix = _output_matrix(model)
    for name, module in list(model.named_children()):
        if module is matrix:
            delattr(model, name)
