"""`SampleTexts`: the texts and numbers of a few samples, for people to read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hflow.base.errors import shorten
from hflow.data.batches.batch import Batch
from hflow.data.batches.trajectory_rows import cut_trajectories
from hflow.data.images.files import read_image
from hflow.data.images.thumbnails import thumbnail
from hflow.data.text.messages import image_urls
from hflow.data.text.tokenizer import TextTokenizer
from hflow.planner.plan.rows import Plan
from hflow.types.image import PlacedImage, ProcessedImage
from hflow.types.trajectory import PIXELS, TRAJECTORIES, TRAJECTORY
from hflow.vision.processor import image_rows
from hflow.workers.interface import SampleText, SampleTurn, WorkerSetup
from hflow.workers.storage.sample_store import SampleStore

MAX_TOKENS = 500
"""The longest generated turn whose tokens are listed one by one."""
MAX_CHARACTERS = 20_000
"""The longest text of one turn. The middle of longer ones is left out."""


class SampleTexts:
    """Decodes samples of a worker's store. Any thread may call it. The first call loads tokenizers."""

    def __init__(self, setup: WorkerSetup, store: SampleStore) -> None:
        self._plan = setup.plan
        self._settings = setup.tokenizers
        self._store = store
        self._tokenizers: dict[str, TextTokenizer] = {}
        self._lock = threading.Lock()

    def texts(self, stream: str, samples: Sequence[int]) -> list[SampleText]:
        """Return the texts of samples of a root stream, in every stream that its source opens."""
        with self._lock:
            return [
                text
                for name, model in _opened_streams(self._plan, stream)
                for text in self._texts(name, self._tokenizer(model), samples)
            ]

    def _texts(self, stream: str, tokenizer: TextTokenizer, samples: Sequence[int]) -> Iterator[SampleText]:
        names: tuple[str, ...] = ("input_ids", "loss_mask", "behav_logprobs", "versions", "messages")
        names += (TRAJECTORY, TRAJECTORIES) if self._returns_list(stream) else ()
        names += (PIXELS,) if tokenizer.images is not None else ()
        fields = [f"{stream}/{name}" for name in names]
        batch = self._store.gather_if_present(stream, fields, samples)
        if batch is None:  # one of them was released meanwhile
            return
        if self._returns_list(stream):
            batch = cut_trajectories(batch)
        turns: dict[int, list[SampleTurn]] = {}
        messages = _messages_of(batch)
        ids, mask, logprobs, versions = (batch.columns[name].values for name in names[:4])
        offsets = batch.offsets.tolist()
        for row, sample in enumerate(batch.samples.tolist()):
            tokens = slice(offsets[row], offsets[row + 1])
            drawn = list(zip(map(float, logprobs[tokens]), map(int, versions[tokens]), strict=True))
            images = batch.columns[PIXELS].values[row] if PIXELS in batch.columns else ()
            turns.setdefault(sample, []).extend(
                split_turns(list(ids[tokens]), list(mask[tokens]), messages[row], tokenizer, drawn, images)
            )
        groups = dict(zip(batch.samples.tolist(), batch.groups.tolist(), strict=True))
        for sample, parts in turns.items():
            yield SampleText(stream, sample, groups[sample], tuple(parts))

    def _returns_list(self, stream: str) -> bool:
        graph = self._plan.graph
        return graph.node(graph.stream(stream).source).spec.returns_list

    def _tokenizer(self, model: str) -> TextTokenizer:
        if model not in self._tokenizers:
            self._tokenizers[model] = TextTokenizer(self._settings[model])
        return self._tokenizers[model]


def _messages_of(batch: Batch) -> list[Any]:
    """Return the messages of each row: those of its sample, or of its trajectory of the sample."""
    if TRAJECTORIES not in batch.columns:
        return list(batch.columns["messages"].values)
    numbers = np.asarray(batch.columns[TRAJECTORY].values)[batch.offsets[:-1]]
    members = batch.columns[TRAJECTORIES].values
    return [of_sample[number]["messages"] for of_sample, number in zip(members, numbers, strict=True)]


def split_turns(
    ids: Sequence[int],
    mask: Sequence[bool],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: TextTokenizer,
    drawn: Sequence[tuple[float, int]] = (),
    images: Sequence[PlacedImage] = (),
) -> Iterator[SampleTurn]:
    """Yield the parts of a sample that are trained, and those between them, as text with special tokens.

    Args:
        ids: the sample's tokens.
        mask: which of them are trained.
        messages: the sample's conversation, of which the parts get their roles.
        tokenizer: the model's tokenizer.
        drawn: log-prob and version of each token; the version of a token that no engine drew is -1.
        images: the images among the tokens. In the text, each is one token.
    """
    runs = [
        (is_trained, [token for token, _ in run])
        for is_trained, run in groupby(zip(ids, map(bool, mask), strict=True), key=lambda pair: pair[1])
    ]
    roles = _roles([is_trained for is_trained, _ in runs], messages)
    pictures = _pictures(messages, len(images))
    first = 0
    for (is_trained, tokens), role in zip(runs, roles, strict=True):
        end = first + len(tokens)
        placed = [(start - first, image) for start, image in images if first <= start < end]
        text = shorten(tokenizer.decode_with_special(_with_marks(tokens, placed, tokenizer)), MAX_CHARACTERS)
        details = drawn[first : first + len(tokens)] if is_trained and len(tokens) <= MAX_TOKENS else ()
        shown = tuple(pictures[number] for number, (start, _) in enumerate(images) if first <= start < end)
        yield SampleTurn(role, text, is_trained, tuple(_details(tokens, details, tokenizer)), shown)
        first = end


def _with_marks(
    tokens: Sequence[int], images: Sequence[tuple[int, ProcessedImage]], tokenizer: TextTokenizer
) -> list[int]:
    """Return tokens with only the first token of each image."""
    if not images or tokenizer.images is None:
        return list(tokens)
    rows = image_rows(
        np.array(tokens), [PlacedImage(*x) for x in images], tokenizer.images.config["image_token_id"]
    )
    left_out = set(rows.tolist()) - {start for start, _ in images}
    return [token for number, token in enumerate(tokens) if number not in left_out]


def _pictures(messages: Sequence[Mapping[str, Any]], num_images: int) -> list[str]:
    """Return small copies of the images of a sample; as many as it has, or none if messages lack some."""
    urls = image_urls(messages) if num_images else []
    if len(urls) != num_images:
        return [""] * num_images
    return [thumbnail(read_image(url)) or "" for url in urls]


def _details(
    tokens: Sequence[int], drawn: Sequence[tuple[float, int]], tokenizer: TextTokenizer
) -> Iterator[tuple[str, float, int]]:
    """Yield text, log-prob and version of tokens that an engine drew."""
    if all(version >= 0 for _, version in drawn):
        for token, (logprob, version) in zip(tokens, drawn, strict=False):
            yield tokenizer.decode_token(token), round(logprob, 4), version


def _roles(trained: Sequence[bool], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the roles of the messages in each part, such as `system, user`.

    Trained parts are the last messages of the assistant: earlier ones may be examples in the prompt.
    """
    blocks = [
        (is_assistant, [str(message.get("role", "")) for message in block])
        for is_assistant, block in groupby(messages, key=lambda message: message.get("role") == "assistant")
    ]
    roles: list[list[str]] = []
    for is_trained in reversed(trained):
        is_next = bool(blocks) and blocks[-1][0] == is_trained
        roles.append(blocks.pop()[1] if is_next else ["assistant"] * is_trained)
    roles.reverse()
    if roles and not trained[0]:
        roles[0] = [role for _, block in blocks for role in block] + roles[0]
    return [", ".join(part) for part in roles]


def _opened_streams(plan: Plan, stream: str) -> list[tuple[str, str]]:
    """Return the streams that the source of a root stream opens, each with the model that generates it."""
    source = plan.graph.stream(stream).source
    names = [other.name for other in plan.graph.streams if other.source == source]
    models = plan.graph.node(source).spec.models
    by_stream = models if len(models) == len(names) else models[:1] * len(names)
    return list(zip(names, by_stream, strict=True))
