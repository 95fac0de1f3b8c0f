"""Tiny models, tokenizers and engines for the tests of episodes; all of them the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hflow.backends.base import Generated, ModelSettings, SamplingParams
from hflow.backends.embedded_engine import EmbeddedEngine
from hflow.data.tokenizer import TextTokenizer, TokenizerSettings
from hflow.workers.effects import Effects
from hflow.workers.engine_driver import EngineDriver
from hflow.workers.episode import EpisodeEngine, sample_seed
from hflow.workers.journal import Journal
from hflow.workers.sandboxes import Sandboxes

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=_ \n\"{}[]<>/:,.'?"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[ai]{% endif %}"
)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def merging_tokenizer(directory: Path, template: str | None) -> TextTokenizer:
    """One that writes every pair of digits, and "ab", as one token.

    What a model draws character by character is encoded otherwise: encoding it again would be seen.
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


def new_engine(tokenizer: TextTokenizer, seed: int = 1, **options: int) -> EmbeddedEngine:
    """An engine whose model is random: it says anything."""
    architecture = {
        "model_type": "qwen2",
        "vocab_size": tokenizer.num_tokens,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    settings = ModelSettings("actor", architecture=architecture, seed=seed)
    return EmbeddedEngine(settings, {"max_model_len": 1000, **options}, None, tokenizer.decode)


class Heard(EngineDriver):
    """A driver that remembers what it was asked and what it answered."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.heard: list[tuple[tuple[int, ...], Generated]] = []

    async def submit(self, prompt_ids: Any, params: SamplingParams, *rest: Any) -> Generated:
        """Generate, and remember it."""
        drawn = await super().submit(prompt_ids, params, *rest)
        self.heard.append((tuple(prompt_ids), drawn))
        return drawn


@contextmanager
def heard(engine: EmbeddedEngine) -> Iterator[Heard]:
    """Drive an engine."""
    driver = Heard(engine)
    try:
        yield driver
    finally:
        driver.close()


@contextmanager
def new_effects(journal: Journal | None = None) -> Iterator[Effects]:
    """An episode's effects, with sandboxes of their own."""
    sandboxes = Sandboxes(1)
    try:
        yield Effects(sandboxes, journal=journal)
    finally:
        sandboxes.close()


def episode(
    driver: EngineDriver,
    tokenizer: TextTokenizer,
    effects: Effects,
    *,
    sample: int = 0,
    tools: str | None = None,
    model: str = "actor",
    **params: Any,
) -> EpisodeEngine:
    """The engine of one sample."""
    sampling = SamplingParams(**{"max_tokens": 12, **params})
    seed = sample_seed(0, "gen", sample, model)
    return EpisodeEngine(driver, tokenizer, sampling, seed, effects, model, tools)
