"""Checks that checkpoints have the heads, and models the tokenizers, that a recipe uses them with."""

from __future__ import annotations

import filecmp
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.config import ModelConfig, RunConfig
from hflow.data.chat import written_template_problem
from hflow.data.vocabulary import read_vocabulary
from hflow.errors import ConfigError
from hflow.graph.errors import recipe_error
from hflow.graph.ir import Graph, Node
from hflow.graph.model import Model
from hflow.json_text import read_json_object
from hflow.launch.model_metadata import source_model
from hflow.planner.models.architectures import read_shape

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


def _source(config: RunConfig, spec: Model) -> ModelConfig:
    """Return the configuration that a model's weights and tokenizer come from."""
    return config.models.get(source_model(config, spec).name, ModelConfig())


def _check_head(config: RunConfig, spec: Model) -> None:
    path = _source(config, spec).path
    file = None if path is None else Path(path) / "config.json"
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
        _check_output_matrix(key, Path(path))
    if spec.head == "value" and not spec.trainable and not (Path(path) / "value_head.safetensors").is_file():
        raise ConfigError(
            f"{key}: {path} is a {name} without a value head (value_head.safetensors); set it to the "
            "checkpoint of a critic"
        )


def _is_tied(saved: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face config says that the output matrix is the embedding."""
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
    """Its dtype and shape."""
    start: int
    num_bytes: int

    def read(self, start: int) -> bytes:
        """Return up to `BLOCK_BYTES` of the tensor."""
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
    files = [Path(source.path) / "tokenizer.json" for source in (one, other) if source.path is not None]
    if (
        len(files) == 2
        and all(file.is_file() for file in files)
        and filecmp.cmp(files[0], files[1], shallow=False)
    ):
        return True
    first, second = (read_vocabulary(source.path, source.alphabet) for source in (one, other))
    return first is None or second is None or first == second
