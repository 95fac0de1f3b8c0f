"""Reads and checks the Hugging Face config of a model.

The launcher and the backends read it in the same way, so that the launcher finds errors before a run starts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.activations import ACT2FN

from hflow.base.errors import BackendError, HflowError, nearest
from hflow.base.files import read_json_object
from hflow.base.model_files import check_model_config
from hflow.models.settings import ModelSettings
from hflow.vision.interface import VisionFamily, vision_family

_BUILD_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Errors that transformers and torch raise for a model that cannot be built."""

TOWER = "sdpa"
"""The attention of towers, within each image."""
_COUNTS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
_TYPO_SIMILARITY = 0.8
"""An unknown key is an error if it is this similar to a known one. transformers accepts some keys that its
configs do not list, so others pass."""


def read_config(settings: ModelSettings) -> PreTrainedConfig:
    """Return the checked config of a model's checkpoint or architecture.

    Raises:
        BackendError: if there is none, or no causal language model can be built from it.
    """
    with translate_errors(settings.name):
        if settings.path is not None:
            config = _read_checkpoint(Path(settings.path))
        elif settings.architecture is not None:
            config = _read_architecture(settings.architecture)
        else:
            raise BackendError("it has neither a path nor an architecture; set one")
        _check_causal_lm(config)
        _check_numbers(config.get_text_config())
    return config


def family_of(config: PreTrainedConfig) -> VisionFamily | None:
    """Return the family of a model that sees; None if it only reads text."""
    return vision_family(config.to_dict())


def auto_model(config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds a model with an output layer from its config."""
    return AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText


def attention_names(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return `attn_implementation` for a model whose language model has an attention of ours."""
    return name if family_of(config) is None else {"text_config": name, "vision_config": TOWER}


def max_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that a model has positions for; None if it has no bound."""
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn errors of transformers and torch into a `BackendError` of one line that names the model.

    Raises:
        BackendError: if the block fails to build the model.
    """
    subject = f"model {name!r}: "
    try:
        yield
    except HflowError as error:
        raise BackendError(subject + str(error).removeprefix(subject)) from error
    except _BUILD_ERRORS as error:
        reason = " ".join(str(error).split())
        raise BackendError(f"{subject}it cannot be built: {type(error).__name__}: {reason:.200}") from error


def _read_checkpoint(path: Path) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise BackendError(
            f"{path} is not an HF checkpoint: it has no config.json; set the path to a directory that "
            "save_pretrained wrote"
        )
    check_model_config(read_json_object(path / "config.json"))
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    return config


def _read_architecture(architecture: Mapping[str, Any]) -> PreTrainedConfig:
    # The configuration is frozen, but transformers accepts lists only, and changes mappings.
    options: dict[str, Any] = json.loads(json.dumps(dict(architecture)))
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise BackendError("its architecture needs a model_type, such as 'qwen2'")
    check_model_config(architecture)
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError:
        raise BackendError(
            f"transformers has no architecture of model_type {model_type!r}; correct it, or install a "
            "version of transformers that has it"
        ) from None
    names = [*known.to_dict(), *known.attribute_map]
    for key in options:
        if not {key, f"_{key}"} & set(names) and difflib.get_close_matches(
            key, names, n=1, cutoff=_TYPO_SIMILARITY
        ):
            raise BackendError(f"a {model_type} architecture has no key {key!r}{nearest(key, names)}")
    # A family's own ids are those of its published vocabulary; the tokenizer of this model has another one.
    own_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(model_type, **{**own_ids, **options})


def _check_causal_lm(config: PreTrainedConfig) -> None:
    if type(config) not in auto_model(config)._model_mapping:
        raise BackendError(
            f"model_type {config.model_type!r} is not a causal language model; use one that is, such as "
            "'qwen2'"
        )
    if getattr(config, "is_decoder", True) is False:
        raise BackendError(
            f"model_type {config.model_type!r} attends to later tokens; use a decoder, such as 'qwen2', or "
            "call this model from a @compute body, to score with it"
        )


def _check_numbers(config: PreTrainedConfig) -> None:
    """Check sizes that would make a forward pass fail."""
    for name in _COUNTS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            raise BackendError(f"{name} is {value}; it must be at least 1")
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise BackendError(f"hidden_act {activation!r} is not an activation{nearest(activation, ACT2FN)}")
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None)
    if size in (None, hidden // heads) and hidden % heads:
        raise BackendError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set num_attention_heads "
            f"to {_nearest_divisor(hidden, heads, groups)}"
        )
    if heads % groups:
        raise BackendError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}; set "
            f"num_key_value_heads to {_nearest_divisor(heads, groups)}"
        )


def _nearest_divisor(number: int, wanted: int, factor: int = 1) -> int:
    """Return the divisor of a number that is nearest to `wanted`, if possible a multiple of `factor`."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    multiples = [n for n in divisors if n % factor == 0]
    return min(multiples or divisors, key=lambda n: (abs(n - wanted), n))
