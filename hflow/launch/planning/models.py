"""Reads the sizes and the precision of models without torch, for the planner.

Sizes come from the checkpoint's `config.json` if it exists, else from the configured architecture, else from
the model in `init_from`.

Checks that checkpoints have the heads, and models the tokenizers, that a recipe uses them with.
"""

from __future__ import annotations

import filecmp
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hflow.base.devices import is_gpu
from hflow.base.errors import ConfigError, PlanError
from hflow.base.files import read_json_object
from hflow.base.model_files import check_model_config
from hflow.config import ModelConfig, RunConfig
from hflow.data.text.chat import written_template_problem
from hflow.data.text.vocabulary import opening_token, read_vocabulary
from hflow.graph.errors import recipe_error
from hflow.graph.ir import Graph, Node, RecipeSpec
from hflow.graph.model import Model
from hflow.graph.queries import is_library_node
from hflow.models.hub import local_directory
from hflow.planner.plan.traits import first_with, traits
from hflow.shapes.architectures import ONLY_PLANNED, read_shape
from hflow.shapes.model_shape import ModelShape
from hflow.shapes.vision_shape import whole_vision_config
from hflow.vision.interface import FAMILIES, VisionFamily, vision_family
from hflow.vision.processor import PROCESSOR_FILES, saved_settings

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
        _check_vision(architecture, spec)
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


def image_model(
    config: RunConfig, graph: Graph, spec: Model
) -> tuple[VisionFamily, Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the family, the HF config and the processor's settings of a model that sees.

    The config has the defaults of the tower. None if the architecture is not known.
    """
    source = _architecture(config, graph, spec)
    family = None if source is None else vision_family(source[1])
    if source is None or family is None:
        return None
    own, model = (config.models.get(m.name, ModelConfig()) for m in (spec, source_model(config, spec)))
    directory = None if model.path is None else local_directory(model.path)
    is_known = directory is not None and any((directory / name).is_file() for name in PROCESSOR_FILES)
    saved, whole = saved_settings(directory if is_known else None), whole_vision_config(source[1])
    images = own.images.over(model.images)
    limits = family.pixel_settings(whole, saved, images.min_pixels, images.max_pixels)
    return family, whole, {**saved, **limits}


def model_dtype(config: RunConfig, spec: Model, device: str) -> Literal["fp32", "bf16"]:
    """Return the precision of a model: as configured, else that of its `init_from`, else the device's."""
    dtype = config.models.get(spec.name, ModelConfig()).dtype
    if dtype is not None:
        return dtype
    if spec.init_from is not None:
        return model_dtype(config, spec.init_from, device)
    return "bf16" if is_gpu(device) else "fp32"


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


def missing_text(name: str, model: ModelConfig) -> str:
    """Return a clause about a path without a checkpoint, with what was probably meant."""
    assert model.path is not None, "only a path can be missing"
    directory = local_directory(model.path)
    if directory.is_dir():
        problem = "has no config.json"
        inside = (directory / name, directory / "checkpoints" / "latest" / name)
        problem += "".join(f" ({found} has one)" for found in inside if (found / "config.json").is_file())
    else:
        problem = "does not exist on this machine"
        problem += " (a model of the Hub is OWNER/NAME)" if "/" not in model.path else ""
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


def with_bases(spec: RecipeSpec, config: RunConfig) -> RecipeSpec:
    """Return a recipe in which models with `base_of` start from the model that this names."""
    models = {model.name: model for model in spec.models}

    def with_base(model: Model) -> Model:
        base = config.models.get(model.name, ModelConfig()).base_of
        if base in models:
            return replace(model, init_from=models[base])
        return model if model.init_from is None else replace(model, init_from=with_base(model.init_from))

    return replace(spec, models=tuple(map(with_base, spec.models)))


def has_chat_template(config: RunConfig, spec: Model) -> bool:
    """Return whether a model's tokenizer has a chat template, as far as its files are here."""
    own, model = (config.models.get(m.name, ModelConfig()) for m in (spec, source_model(config, spec)))
    if own.chat_template is not None or model.chat_template is not None:
        return True
    return model.path is not None and _own_template(local_directory(model.path)) is not None


def replaced_templates(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each model whose configuration replaces the chat template of its checkpoint."""
    for name, model in config.models.items():
        own = None if model.path is None else _own_template(local_directory(model.path))
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
            template = _own_template(local_directory(model.path))
        token = opening_token(_local(model.path), model.alphabet)
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
        known = None if model.path is None else _vocabulary(model)
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


def _vocabulary(model: ModelConfig) -> Mapping[str, int] | None:
    """Return the ids of the tokens of a model's tokenizer, as `read_vocabulary`."""
    return read_vocabulary(_local(model.path), model.alphabet)


def _local(path: str | None) -> str | None:
    return None if path is None else str(local_directory(path))


def _own_template(path: Path) -> Any:
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
    file = None if model.path is None else local_directory(model.path) / "config.json"
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


def _check_vision(architecture: Mapping[str, Any], spec: Model) -> None:
    """Check that a recipe declares a model that sees, and no other one, with `vision=True`."""
    family, declared = architecture.get("model_type"), f"Model({spec.name!r}, vision=True)"
    if spec.vision and vision_family(architecture) is None:
        raise PlanError(
            f"model_type {family!r} only reads text, as far as hflow knows, but the recipe declares "
            f"{declared}; use one of {', '.join(FAMILIES)}, or remove vision=True"
        )
    if not spec.vision and vision_family(architecture) is not None:
        raise PlanError(f"model_type {family!r} sees images; declare {declared} in the recipe")


def _check_family(config: RunConfig, name: str, location: str, architecture: Mapping[str, Any]) -> None:
    """Check that the backend builds models of this family, or that it is one that is only planned."""
    backend, family = config.models.get(name, ModelConfig()).backend, architecture.get("model_type")
    families = traits(backend).families
    if families is not None and isinstance(family, str) and family not in (*families, *ONLY_PLANNED):
        raise ConfigError(
            f"{location}: the {backend} backend does not build model_type {family!r} (it builds "
            f"{', '.join(families)}); set models.{name}.backend={first_with('has_all_families')}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - wanted), -n))


CLASSIFIER = "ForSequenceClassification"
NUM_BLOCKS, BLOCK_BYTES = 256, 1 << 16
"""How much of two matrices is compared."""
LONGEST_HEADER = 100_000_000
"""Bytes; longer ones are not safetensors."""


def check_model_fit(config: RunConfig, graph: Graph) -> None:
    """Check heads and tokenizers, as far as the configured checkpoints exist on this machine.

    Raises:
        ConfigError: for a checkpoint without the head that the recipe declares, or an unusable chat template.
        RecipeError: for a model that would read the tokens of another tokenizer.
    """
    for name, model in config.models.items():
        if model.chat_template and (problem := written_template_problem(model.chat_template)) is not None:
            raise ConfigError(f"models.{name}.chat_template {problem}")
    for spec in graph.models:
        _check_head(config, spec)
    for node in graph.nodes:
        if node.spec.verb in ("infer", "train"):
            _check_tokens(config, graph, node)
        if is_library_node(node.spec, "chat_gen"):
            spec = graph.model(node.spec.models[0])
            source = _source(config, spec)
            is_known = has_config(source) or (source.path is None and source.alphabet is not None)
            if is_known and not has_chat_template(config, spec):
                raise missing_template(node.name, spec.name)


def missing_template(node: str, model: str) -> ConfigError:
    """Return the error for a node that encodes messages for a model without a chat template."""
    return ConfigError(
        f"{node} encodes messages, but the tokenizer of {model} has no chat template; set "
        f"models.{model}.chat_template to one, or use nodes.actor_gen with texts"
    )


def _source(config: RunConfig, spec: Model) -> ModelConfig:
    return config.models.get(source_model(config, spec).name, ModelConfig())


def _check_head(config: RunConfig, spec: Model) -> None:
    path = _source(config, spec).path
    file = None if path is None else local_directory(path) / "config.json"
    if path is None or file is None or not file.is_file():
        return
    saved = read_json_object(file)
    name = next(iter(saved.get("architectures") or ()), None)
    if not isinstance(name, str):
        return
    key = f"models.{spec.name}.path"
    if spec.head == "lm" and name.endswith(CLASSIFIER):
        raise ConfigError(
            f"{key}: {path} is a {name}, which cannot generate or return log-probs; set it to a causal "
            f"language model, or declare Model({spec.name!r}, head='score')"
        )
    if spec.head == "score" and name.endswith(CLASSIFIER) and _num_labels(saved) != 1:
        raise ConfigError(
            f"{key}: {path} is a {name} with {_num_labels(saved)} labels, but a reward model has one; set it "
            "to a model with num_labels=1"
        )
    if spec.head == "score" and not name.endswith(CLASSIFIER) and not spec.trainable:
        raise ConfigError(
            f"{key}: {path} is a {name}, which has no score head; set it to a reward model (*{CLASSIFIER})"
        )
    if spec.head == "lm" and _is_tied(saved):
        _check_output_matrix(key, file.parent)
    if spec.head == "value" and not spec.trainable and not (file.parent / "value_head.safetensors").is_file():
        raise ConfigError(
            f"{key}: {path} is a {name} without a value head (value_head.safetensors); set it to the "
            "checkpoint of a critic"
        )


def _is_tied(saved: Mapping[str, Any]) -> bool:
    shape = read_shape(saved)
    return bool(saved.get("tie_word_embeddings")) if shape is None else shape.is_tied


def _check_output_matrix(key: str, directory: Path) -> None:
    """Check that a checkpoint with tied embeddings has no other output matrix, which some programs would use.

    Blocks at equal distances are compared, as the matrices of a large model take seconds to read.

    Raises:
        ConfigError: if it has.
    """
    found = {
        place.name: place for file in sorted(directory.glob("*.safetensors")) for place in _tensors(file)
    }
    output = next((place for name, place in found.items() if name.endswith("lm_head.weight")), None)
    embedding = next((place for name, place in found.items() if name.endswith("embed_tokens.weight")), None)
    if output is None or embedding is None:
        return
    distance = max(output.num_bytes // NUM_BLOCKS, BLOCK_BYTES)
    starts = range(0, output.num_bytes, distance)
    if (output.form, output.num_bytes) != (embedding.form, embedding.num_bytes) or any(
        output.read(start) != embedding.read(start) for start in starts
    ):
        raise ConfigError(
            f"{key}: {directory} has tie_word_embeddings in its config.json, but {output.name} differs from "
            f"{embedding.name}. Set tie_word_embeddings to false there to use {output.name}, or remove this "
            "tensor"
        )


@dataclass(frozen=True)
class _StoredTensor:
    """Where a safetensors file has a tensor."""

    file: Path
    name: str
    form: tuple[str, tuple[int, ...]]
    """The tensor's dtype and shape."""
    start: int
    num_bytes: int

    def read(self, start: int) -> bytes:
        with self.file.open("rb") as opened:
            opened.seek(self.start + start)
            return opened.read(min(BLOCK_BYTES, self.num_bytes - start))


def _tensors(file: Path) -> Iterator[_StoredTensor]:
    """Yield the tensors of a safetensors file; none if it is damaged, which is reported when it is loaded.

    Source: the format's description, https://github.com/huggingface/safetensors#format.
    """
    with file.open("rb") as opened, suppress(struct.error, ValueError, KeyError, TypeError, AttributeError):
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > LONGEST_HEADER:
            return
        for name, entry in json.loads(opened.read(length)).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                form = entry["dtype"], tuple(entry["shape"])
                yield _StoredTensor(file, name, form, 8 + length + begin, end - begin)


def _num_labels(saved: Mapping[str, Any]) -> int:
    """Return the number of labels of a Hugging Face config. It has two if it does not say."""
    labels = saved.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(saved.get("num_labels", 2))


def _check_tokens(config: RunConfig, graph: Graph, node: Node) -> None:
    writer, reader = _writer(graph, node.stream), graph.model(node.spec.models[0])
    if writer is None or writer == reader or _same_tokens(_source(config, writer), _source(config, reader)):
        return
    fix = (
        f"List use(nodes.reward_view, {reader.name}), and set on='reward_view'"
        if reader.head == "score"
        else f"Set models.{reader.name}.path to a model with the tokenizer of {writer.name}"
    )
    raise recipe_error(
        node.spec.where,
        node.name,
        f"model {reader.name!r} would read the tokens of {node.stream}, but {writer.name} made them with "
        f"another tokenizer. {fix}",
    )


def _writer(graph: Graph, stream: str) -> Model | None:
    """Return the model whose tokenizer made a stream; None if it is one of several."""
    models = graph.node(graph.stream(stream).source).spec.models
    return graph.model(models[0]) if len(models) == 1 else None


def _same_tokens(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two tokenizers have the same ids. True if it is not known."""
    if (one.path, one.alphabet) == (other.path, other.alphabet):
        return True
    files = [
        local_directory(source.path) / "tokenizer.json" for source in (one, other) if source.path is not None
    ]
    if (
        len(files) == 2
        and all(file.is_file() for file in files)
        and filecmp.cmp(files[0], files[1], shallow=False)
    ):
        return True
    first, second = (_vocabulary(source) for source in (one, other))
    return first is None or second is None or first == second
