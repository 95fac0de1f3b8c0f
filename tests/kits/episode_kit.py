"""Tiny models, tokenizers and engines for tests of episodes. None of them is a mock."""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.driver import EngineDriver
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.episodes.endpoint.server import EndpointServer
from hflow.episodes.episode_engine import EpisodeEngine, sample_seed
from hflow.episodes.journal import Journal
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.models.settings import ModelSettings
from hflow.sandboxes.providers import Sandboxes
from hflow.types import Trajectory

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=_ \n\"{}[]<>/:,.'?"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[ai]{% endif %}"
)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def merging_tokenizer(directory: Path, template: str | None) -> TextTokenizer:
    """Return a tokenizer that encodes every pair of digits, and "ab", as one token.

    Text that a model generated character by character is encoded differently, so tests notice if a generated
    text is encoded again.
    """
    pairs = [("a", "b"), *((x, y) for x in "0123456789" for y in "0123456789")]
    words = [*SPECIAL, *LETTERS, *("".join(pair) for pair in pairs)]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    core.decoder = decoders.Fuse()
    build: Any = PreTrainedTokenizerFast
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    made = build(tokenizer_object=core, **names)
    made.save_pretrained(directory)
    return TextTokenizer(TokenizerSettings(path=str(directory), chat_template=template))


def byte_tokenizer(directory: Path, template: str | None = None, *, adds_bos: bool = True) -> TextTokenizer:
    """Return a tokenizer of bytes with tokens as published ones have.

    `<tool_call>` and `<think>` are special tokens without a name, and `<|im_end|>` (263) is not special.

    Args:
        directory: where it is saved, beside any config that is there.
        template: its chat template.
        adds_bos: whether it puts its `<s>` in front of texts. Many tokenizers have one and do not add it.
    """
    core = Tokenizer(
        models.BPE({x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<pad>", "<tool_call>", "</tool_call>", "<think>", "</think>")
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    build: Any = PreTrainedTokenizerFast
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    build(tokenizer_object=core, chat_template=template, **names).save_pretrained(directory)
    return TextTokenizer(TokenizerSettings(path=str(directory)))


def chatml_tokenizer(directory: Path) -> TextTokenizer:
    """Return a tokenizer of bytes with the special tokens and the turns of Qwen3."""
    core = Tokenizer(
        models.BPE({x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in turns])
    parts = [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in parts])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    build: Any = PreTrainedTokenizerFast
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    build(tokenizer_object=core, chat_template=template, **names).save_pretrained(directory)
    return TextTokenizer(TokenizerSettings(path=str(directory)))


class Written(EngineDriver):
    """A driver whose model writes the given turns, one per request."""

    def __init__(self, *turns: Sequence[int]) -> None:
        self.turns = list(turns)
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []

    async def submit(self, prompt_ids: Any, params: SamplingParams, *rest: Any) -> GenerationResult:
        """Return the next turn, and record the request."""
        self.requests.append((tuple(prompt_ids), params))
        ids = tuple(self.turns.pop(0))
        return GenerationResult(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop")


def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Fixture: `merging_tokenizer` without a chat template."""
    return merging_tokenizer(tmp_path_factory.mktemp("plain"), None)


def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Fixture: `merging_tokenizer` with a chat template."""
    return merging_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE)


def model_settings(num_tokens: int, seed: int = 1, num_positions: int = 1000) -> ModelSettings:
    """Return the settings of a tiny random model."""
    architecture = {
        "model_type": "qwen2",
        "vocab_size": num_tokens,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": num_positions,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    return ModelSettings(name="actor", architecture=architecture, seed=seed)


def new_engine(tokenizer: TextTokenizer, seed: int = 1, **options: int) -> EmbeddedEngine:
    """Return an engine with a random model."""
    settings = model_settings(tokenizer.num_tokens, seed)
    return EmbeddedEngine(settings, {"max_model_len": 1000, **options}, None, tokenizer.decode_answer)


class Gated(EmbeddedEngine):
    """An engine that makes `num_allowed` further steps and then waits until this is increased."""

    num_allowed = 0

    def step(self) -> list[tuple[int, GenerationResult]]:
        """Make a step if one is allowed."""
        if self.num_allowed == 0:
            time.sleep(0.001)
            return []
        self.num_allowed -= 1
        return super().step()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.001)


class Heard(EngineDriver):
    """A driver that records prompts and results."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.heard: list[tuple[tuple[int, ...], GenerationResult]] = []

    async def submit(self, prompt_ids: Any, params: SamplingParams, *rest: Any) -> GenerationResult:
        """Generate, and record the request."""
        drawn = await super().submit(prompt_ids, params, *rest)
        self.heard.append((tuple(prompt_ids), drawn))
        return drawn


@contextmanager
def driving(engine: EmbeddedEngine) -> Iterator[EngineDriver]:
    """Drive an engine."""
    driver = EngineDriver(engine)
    try:
        yield driver
    finally:
        driver.close()


@contextmanager
def heard(engine: EmbeddedEngine) -> Iterator[Heard]:
    """Drive an engine, and record requests."""
    driver = Heard(engine)
    try:
        yield driver
    finally:
        driver.close()


def heard_driver(plain: TextTokenizer) -> Iterator[Heard]:
    """Fixture: a driver that records requests."""
    with heard(new_engine(plain)) as driver:
        yield driver


@cache
def shared_sandboxes() -> Sandboxes:
    """Return the sandboxes of all tests, as starting the process of a tool takes longer than a test."""
    made = Sandboxes(1)
    atexit.register(made.close)
    return made


def new_effects(journal: Journal | None = None) -> RecordedEffects:
    """Return the effects of a new episode."""
    return RecordedEffects(shared_sandboxes(), journal=journal)


def episode(
    driver: EngineDriver,
    tokenizer: TextTokenizer,
    effects: RecordedEffects,
    *,
    sample: int = 0,
    tools: str | None = None,
    model: str = "actor",
    server: EndpointServer | None = None,
    **params: Any,
) -> EpisodeEngine:
    """Return the engine of one sample."""
    sampling = SamplingParams(**{"max_tokens": 12, **params})
    seed = sample_seed(0, "gen", sample, model)
    return EpisodeEngine(driver, tokenizer, sampling, seed, effects, model, tools, server)


def check_tokens(talk: Trajectory, heard: list[tuple[tuple[int, ...], Any]]) -> None:
    """Check that generated tokens are unchanged and learned, and all others masked."""
    rest = talk.input_ids
    for prompt_ids, drawn in heard:
        end = len(prompt_ids) + len(drawn.ids)
        assert rest[: len(prompt_ids)] == prompt_ids
        at = slice(len(prompt_ids), end)
        assert talk.input_ids[at] == drawn.ids
        assert talk.behav_logprobs[at] == drawn.logprobs
        assert talk.versions[at] == drawn.versions
        assert talk.loss_mask[at] == (True,) * len(drawn.ids)
    generated = sum(len(drawn.ids) for _, drawn in heard)
    assert talk.num_tokens == generated
    masked = [i for i, learned in enumerate(talk.loss_mask) if not learned]
    assert len(masked) == len(talk.input_ids) - generated
    assert {(talk.behav_logprobs[i], talk.versions[i]) for i in masked} == {(0.0, -1)}
