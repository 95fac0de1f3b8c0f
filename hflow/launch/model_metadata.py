"""Reads the sizes and the precision of models without torch, for the planner.

Sizes come from the checkpoint's `config.json` if it exists, else from the configured architecture, else from
the model in `init_from`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from hflow.config import ModelConfig, RunConfig
from hflow.data.vocabulary import opening_token, read_vocabulary
from hflow.errors import ConfigError, PlanError
from hflow.graph.ir import Graph
from hflow.graph.model import Model
from hflow.json_text import read_json_object
from hflow.launch.merged_checkpoint import is_adapter
from hflow.model_config import check_model_config
from hflow.planner.models.architectures import ONLY_PLANNED, read_shape
from hflow.planner.plan.model_shape import ModelShape
from hflow.planner.plan.traits import backend_of_any_family, traits

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
)
"""Keys of a Hugging Face config that a checkpoint and a configured architecture are compared by."""


CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files of a checkpoint that hold a chat template, if its `tokenizer_config.json` does not."""


def model_shape(config: RunConfig, graph: Graph, spec: Model) -> ModelShape | None:
    """Return the sizes of a model with the head that the recipe declares, or None if they are unknown.

    Raises:
        ConfigError: for a `config.json` that cannot be read, sizes that do not fit together, or a family that
            the model's backend does not build.
    """
    source = _architecture(config, graph, spec)
    if source is None:
        return None
    location, architecture = source
    _check_family(config, spec.name, location, architecture)
    try:
        check_model_config(architecture, architecture.get("model_type") in ONLY_PLANNED)
        shape = read_shape(architecture, spec.head)
        if shape is not None:
            _check_heads(shape)
    except (ConfigError, PlanError) as error:
        raise ConfigError(f"{location}: {error}") from error
    return shape


def model_family(config: RunConfig, graph: Graph, spec: Model) -> str | None:
    """Return the `model_type` of a model, or None if neither a checkpoint nor the configuration names it."""
    source = _architecture(config, graph, spec)
    family = None if source is None else source[1].get("model_type")
    return family if isinstance(family, str) else None


def model_dtype(config: RunConfig, spec: Model, device: str) -> Literal["fp32", "bf16"]:
    """Return the precision of a model: as configured, else that of its `init_from`, else the device's.

    Args:
        config: of the run.
        spec: the model.
        device: `cpu` or `cuda`.
    """
    dtype = config.models.get(spec.name, ModelConfig()).dtype
    if dtype is not None:
        return dtype
    if spec.init_from is not None:
        return model_dtype(config, spec.init_from, device)
    return "bf16" if device == "cuda" else "fp32"


def overruled_architectures(config: RunConfig) -> tuple[str, ...]:
    """Return a warning for each model whose checkpoint has other sizes than its configured architecture."""
    warnings = []
    for name, model in config.models.items():
        if (size := differing_size(model)) is not None:
            key, saved, configured = size
            warnings.append(
                f"models.{name}: the checkpoint {model.path} ({key} {saved}) is used, not the "
                f"architecture ({key} {configured}). To silence this, remove model@models.{name} from "
                f"the defaults of the YAML or from the command line, or set models.{name}.architecture=null. "
                f"To train the architecture from random weights, set models.{name}.path=null."
            )
    return tuple(warnings)


def differing_size(model: ModelConfig) -> tuple[str, Any, Any] | None:
    """Return the first size in which a model's checkpoint and its architecture differ, with both values."""
    file, configured = _checkpoint_config(model), model.architecture
    if file is None or configured is None:
        return None
    saved = read_json_object(file)
    in_both = (key for key in SIZES if saved.get(key) and configured.get(key))
    return next(
        ((key, saved[key], configured[key]) for key in in_both if saved[key] != configured[key]), None
    )


def has_config(model: ModelConfig) -> bool:
    """Return whether the path of a model has a checkpoint."""
    return _checkpoint_config(model) is not None


def check_is_whole(name: str, model: ModelConfig) -> None:
    """Check that the path of a model is not that of an adapter.

    Raises:
        ConfigError: if it is.
    """
    if model.path is not None and is_adapter(Path(model.path)):
        raise ConfigError(
            f"models.{name}.path is {model.path}, which holds an adapter; merge it by hflow export "
            f"{model.path} DIRECTORY, and set that"
        )


def missing_text(name: str, model: ModelConfig) -> str:
    """Return a clause about a path without a checkpoint."""
    assert model.path is not None, "only a path can be missing"
    problem = "has no config.json" if Path(model.path).is_dir() else "does not exist on this machine"
    return f"models.{name}.path is {model.path}, which {problem}"


def missing_checkpoints(config: RunConfig, graph: Graph) -> tuple[str, ...]:
    """Return a warning for each model without an architecture whose checkpoint is not on this machine."""
    warnings = []
    for spec in graph.models:
        model = config.models.get(spec.name, ModelConfig())
        if model.path is None or model.architecture is not None or has_config(model):
            continue
        warnings.append(
            f"{missing_text(spec.name, model)}. A run needs a checkpoint there. "
            f"Correct the path, or plan with an architecture, as model@models.{spec.name}=qwen2.5-0.5b."
        )
    return tuple(warnings)


def source_model(config: RunConfig, spec: Model) -> Model:
    """Return the model whose configuration says what a model's weights and tokenizer are.

    That is the model itself, or where it has neither a path nor an architecture, that of its `init_from`.
    """
    own = config.models.get(spec.name, ModelConfig())
    is_own = own.path is not None or own.architecture is not None
    return spec if is_own or spec.init_from is None else source_model(config, spec.init_from)


def has_chat_template(config: RunConfig, spec: Model) -> bool:
    """Return whether a model's tokenizer has a chat template, as far as its files are here."""
    own, model = (config.models.get(m.name, ModelConfig()) for m in (spec, source_model(config, spec)))
    if own.chat_template is not None or model.chat_template is not None:
        return True
    return model.path is not None and _own_template(Path(model.path)) is not None


def replaced_templates(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each model whose configuration replaces the chat template of its checkpoint."""
    for name, model in config.models.items():
        own = None if model.path is None else _own_template(Path(model.path))
        if own is not None and model.chat_template not in (None, own):
            yield (
                f"models.{name}.chat_template replaces the chat template of {model.path}: the model sees "
                f"messages in another form than it was trained on. Set models.{name}.chat_template=null to "
                "use its own."
            )


def unopened_templates(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each model whose tokenizer begins texts with a token that its chat template lacks.

    The template is the whole prompt, as in transformers and vLLM, so such conversations begin without it.
    """
    for spec in graph.models:
        own, model = (config.models.get(m.name, ModelConfig()) for m in (spec, source_model(config, spec)))
        template = own.chat_template or model.chat_template
        if template is None and model.path is not None:
            template = _own_template(Path(model.path))
        token = opening_token(model.path, model.alphabet)
        if not isinstance(template, str) or token is None or token in template or "bos_token" in template:
            continue
        yield (
            f"the tokenizer of {spec.name} begins texts with {token}, but its chat template does not, so "
            f"conversations begin without it. If the model was trained with it, set models.{spec.name}."
            "chat_template to a template that begins with {{ bos_token }}."
        )


def overruled_alphabets(config: RunConfig, graph: Graph) -> Iterator[str]:
    """Yield a warning for each model whose tokenizer is another than that of its `alphabet`."""
    for spec in graph.models:
        model = config.models.get(spec.name, ModelConfig())
        source = source_model(config, spec)
        if model.alphabet is None:
            continue
        known = None if model.path is None else read_vocabulary(model.path, model.alphabet)
        if source != spec:
            used = f"the tokenizer of {source.name}, from which it starts,"
        elif known not in (None, read_vocabulary(None, model.alphabet)):
            used = f"the tokenizer in {model.path}"
        else:
            continue
        yield (
            f"models.{spec.name}.alphabet is not used, but {used} is. To silence this, set "
            f"models.{spec.name}.alphabet=null."
        )


def _own_template(path: Path) -> Any:
    """Return the chat template of the tokenizer in a checkpoint, or None."""
    jinja, of_processor = (path / name for name in CHAT_TEMPLATES)
    if jinja.is_file():
        return jinja.read_text("utf-8", "replace")
    settings = path / "tokenizer_config.json"
    in_settings = read_json_object(settings).get("chat_template") if settings.is_file() else None
    if not in_settings and of_processor.is_file():
        return of_processor.read_text("utf-8", "replace")
    return in_settings or None


def _architecture(config: RunConfig, graph: Graph, spec: Model) -> tuple[str, Mapping[str, Any]] | None:
    """Return the Hugging Face config of a model, and its file or key for messages."""
    model = config.models.get(spec.name, ModelConfig())
    file = _checkpoint_config(model)
    if file is not None:
        return str(file), read_json_object(file)
    if model.architecture is not None:
        return f"models.{spec.name}", model.architecture
    return None if spec.init_from is None else _architecture(config, graph, spec.init_from)


def _checkpoint_config(model: ModelConfig) -> Path | None:
    file = None if model.path is None else Path(model.path) / "config.json"
    return file if file is not None and file.is_file() else None


def _check_heads(shape: ModelShape) -> None:
    """Check that numbers of heads and sizes divide each other, as the backends require."""
    heads, kv_heads, hidden = shape.num_heads, shape.num_kv_heads, shape.hidden
    if hidden % heads and shape.head_dim == hidden // heads:
        raise PlanError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set "
            f"num_attention_heads to {_nearest_divisor(hidden, heads)}, or set head_dim"
        )
    if heads % kv_heads:
        raise PlanError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; set "
            f"num_key_value_heads to {_nearest_divisor(heads, kv_heads)}"
        )


def _check_family(config: RunConfig, name: str, location: str, architecture: Mapping[str, Any]) -> None:
    """Check that the backend builds models of this family, or that it is one that is only planned."""
    backend, family = config.models.get(name, ModelConfig()).backend, architecture.get("model_type")
    families = traits(backend).families
    if families is not None and isinstance(family, str) and family not in (*families, *ONLY_PLANNED):
        raise ConfigError(
            f"{location}: the {backend} backend does not build model_type {family!r} (it builds "
            f"{', '.join(families)}); set models.{name}.backend={backend_of_any_family()}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - wanted), -n))
