"""vLLM's engine sees what the trainer sees: its log-probs are those of the trainer, in fp32 to 1e-5.

Prompts have no image, one or two, whose samples share them. SmolVLM has text between the tokens of an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_kit
import vision_kit as kit

from hflow.config.schema import LoraConfig
from hflow.data.images.files import read_image
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import EngineSetup, GenerationResult, SamplingParams
from hflow.engines.process.engine import ProcessEngine
from hflow.engines.vllm.memory import CPU_BLOCK_TOKENS, STEP_TOKENS
from hflow.models.adapter import adapter_weights
from hflow.models.settings import RankPosition
from hflow.planner.models.descriptors import engine_kind
from hflow.training.fsdp.backend import TorchModel
from hflow.types.engine import SleepLevel
from hflow.weights.incoming import IncomingWeights

pytest.importorskip("vllm")

SIZES = [[(40, 24)], [], [(16, 16), (24, 40)], [(40, 24)]]
GROUP = 3
LONG = 240
"""Tokens of requests that shall still run when something happens."""
ATTEMPTS = 20
"""The engine draws while the test does something else, and may have finished."""
OPTIONS = {"max_running": 40, "max_model_len": 510, "cache_bytes": 1 << 28}


@dataclass
class Subject:
    """An engine, and the trainers whose weights it gets."""

    family: str
    tensor: int
    engine: ProcessEngine
    next_id: int = 0
    version: int = 0
    results: dict[int, GenerationResult] = field(default_factory=dict)

    def load(self, seed: int) -> TorchModel:
        """Load the weights of a trainer as the next version."""
        self.version += 1
        incoming = weights_of(self.family, seed)
        loaded = self.engine.load_weights([incoming] * self.tensor, self.version)
        assert len(set(loaded.checksums)) == 1
        return trainer(self.family, seed)

    def add(self, samples: Sequence[Any], params: SamplingParams) -> list[int]:
        """Add a request for the prompt of each sample; return their ids."""
        ids = list(range(self.next_id, self.next_id + len(samples)))
        self.next_id += len(samples)
        for number, sample in zip(ids, samples, strict=True):
            prompt = sample.input_ids[: kit.prompt_length(sample)]
            self.engine.add(number, prompt, replace(params, seed=number), sample.pixels)
        return ids

    def finish(self) -> None:
        """Let all requests finish; `results` then has theirs."""
        while self.engine.num_unfinished:
            self.results.update(self.engine.step())

    def generate(self, samples: Sequence[Any], params: SamplingParams) -> list[Any]:
        """Return the trajectories that the engine draws for the prompts of samples."""
        ids = self.add(samples, params)
        self.finish()
        return [kit.drawn(sample, self.results[i]) for sample, i in zip(samples, ids, strict=True)]

    def start(self, samples: Sequence[Any], params: SamplingParams) -> list[int]:
        """Add requests and wait until the last has tokens, or has finished; return their ids."""
        ids = self.add(samples, params)
        while ids[-1] not in self.results and not self.engine.drawn({ids[-1]: 0}).get(ids[-1], ((),))[0]:
            self.results.update(self.engine.step())
        return ids


@cache
def trainer(family: str, seed: int) -> TorchModel:
    return kit.model(family, seed=seed)


@cache
def weights_of(family: str, seed: int) -> IncomingWeights:
    weights = [(name, x.clone()) for name, x in torch_kit.weights(trainer(family, seed)).items()]
    return IncomingWeights.of_tensors(partial(list, weights))


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_vl", 1),
        *(
            pytest.param(of_engine, marks=pytest.mark.long)
            for of_engine in [("qwen2_5_vl", 1), ("smolvlm", 1), ("qwen3_vl", 2), ("smolvlm", 2)]
        ),
    ],
    ids=lambda of_engine: f"{of_engine[0]}-t{of_engine[1]}",
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    family, tensor = request.param
    cores = tuple((rank % 2,) for rank in range(tensor)) if tensor > 1 else ()
    setup = EngineSetup(
        kit.settings(family, seed=3), OPTIONS, kit.tokenizer(family), tensor=tensor, cores=cores
    )
    engine = engine_kind("vllm").factory(setup)
    yield Subject(family, tensor, engine)
    engine.close()


def groups(family: str, text: str = "what? ") -> list[Any]:
    return [sample for sample in kit.trajectories(family, SIZES, text) for _ in range(GROUP)]


def test_random_weights_are_those_of_the_trainer(subject: Subject) -> None:
    """Before it has loaded any, the engine draws its weights as the trainer does."""
    subject.version += 1
    subject.engine.set_version(subject.version)
    samples = kit.trajectories(subject.family, SIZES)
    drawn = subject.generate(samples, SamplingParams(max_tokens=4))
    kit.assert_logprobs(trainer(subject.family, 3), drawn)


def test_groups_draw_what_the_trainer_computes(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    process, sent = subject.engine._process, []
    monkeypatch.setattr(process, "send", lambda calls, send=process.send: [sent.extend(calls), send(calls)])
    backend, samples = subject.load(4), groups(subject.family, "look! ")
    drawn = subject.generate(samples, SamplingParams(max_tokens=9))
    kit.assert_logprobs(backend, drawn)
    assert len({tuple(trajectory.input_ids) for trajectory in drawn}) > len(SIZES)
    images = {image.digest for sample in samples for _, image in sample.pixels}
    new = [image.digest for call in sent if call.method == "keep_images" for image in call.arguments[0]]
    assert set(new) <= images
    assert len(new) == len(set(new))


def test_it_is_as_greedy_as_the_embedded_engine(subject: Subject) -> None:
    backend, samples = subject.load(5), kit.trajectories(subject.family, SIZES)
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    embedded = EmbeddedEngine(kit.settings(subject.family), {}, backend.shared_module())
    embedded.wake_cache()
    for number, sample in enumerate(samples):
        embedded.add(number, sample.input_ids[: kit.prompt_length(sample)], greedy, sample.pixels)
    results = dict(finished for _ in range(12) for finished in embedded.step())
    expected = [kit.drawn(sample, results[number]) for number, sample in enumerate(samples)]
    assert [x.input_ids for x in subject.generate(samples, greedy)] == [x.input_ids for x in expected]


def test_new_weights_look_again_at_cached_images(subject: Subject) -> None:
    samples = groups(subject.family)
    for seed in (3, 4):
        backend = subject.load(seed)
        kit.assert_logprobs(backend, subject.generate(samples, SamplingParams(max_tokens=5)))


def test_requests_continue_with_new_weights(subject: Subject) -> None:
    """Requests that run when weights arrive, whose images the cache of their prompt had covered."""
    (sample,) = kit.trajectories(subject.family, SIZES[:1], "and this is a long question " * 6)
    ((start, image),) = sample.pixels
    assert start + image.num_tokens < CPU_BLOCK_TOKENS < kit.prompt_length(sample)
    weights_of(subject.family, 4)  # before the engine runs
    for _ in range(ATTEMPTS):
        old = subject.load(3)
        subject.generate([sample], SamplingParams(max_tokens=2))
        ids = subject.start([sample] * 2, SamplingParams(max_tokens=LONG))
        new = subject.load(4)
        subject.finish()
        drawn = [kit.drawn(sample, subject.results[number]) for number in ids]
        if any(subject.version in trajectory.versions for trajectory in drawn):
            break
    assert {len(trajectory.input_ids) for trajectory in drawn} == {kit.prompt_length(sample) + LONG}
    kit.assert_logprobs(old, drawn, subject.version - 1)
    kit.assert_logprobs(new, drawn, subject.version)


def test_interrupted_requests_continue_with_their_images(subject: Subject) -> None:
    backend, samples = subject.load(4), kit.trajectories(subject.family, SIZES)
    for _ in range(ATTEMPTS):
        ids = subject.start(samples, SamplingParams(max_tokens=LONG))
        parts = subject.results | dict(subject.engine.interrupt())
        if any(parts[number].stop_reason == "abort" for number in ids):
            break
    subject.engine.sleep(SleepLevel.KEEP_WEIGHTS)
    subject.engine.wake_weights()
    subject.engine.wake_cache()
    resumed = [i for i in range(len(ids)) if parts[ids[i]].stop_reason == "abort"]
    for i in resumed:
        part, sample = parts[ids[i]].ids, samples[i]
        rest = SamplingParams(max_tokens=LONG - len(part), num_resumed=len(part), seed=ids[i])
        prompt = [*sample.input_ids[: kit.prompt_length(sample)], *part]
        subject.engine.add(ids[i], prompt, rest, sample.pixels)
    subject.finish()
    whole = []
    for i in resumed:
        part, rest = parts[ids[i]], subject.results[ids[i]]
        logprobs, versions = part.logprobs + rest.logprobs, part.versions + rest.versions
        result = replace(rest, ids=part.ids + rest.ids, logprobs=logprobs, versions=versions)
        assert len(result.ids) == LONG
        whole.append(kit.drawn(samples[i], result))
    kit.assert_logprobs(backend, whole)


@pytest.mark.long
def test_prompts_are_computed_whole_though_images_do_not_fit_into_a_step(subject: Subject) -> None:
    """Prompts of which a step computes little, but has to compute the images, as others came since."""
    if subject.family != "qwen3_vl":
        pytest.skip("the scheduler is the same")
    tokens, more_tokens, side = (20, 20), (7, 8), 8
    num_first, num_both = math.prod(tokens), math.prod(tokens) + math.prod(more_tokens)
    assert STEP_TOKENS % num_both >= num_first  # a step has place for the first image of one more prompt
    num = STEP_TOKENS // num_both + 4

    def samples(first: int, *sizes: tuple[int, int]) -> list[Any]:
        pictures = [
            [read_image(kit.picture(side * x, side * y, first + i)) for x, y in sizes] for i in range(num)
        ]
        return [kit.tokenizer(subject.family).join("see", "it", images) for images in pictures]

    backend = subject.load(3)
    for first in (0, num):  # the others take the place of the first in the cache of images
        subject.generate(samples(first, tokens), SamplingParams(max_tokens=1))
    drawn = subject.generate(samples(0, tokens, more_tokens), SamplingParams(max_tokens=3))
    kit.assert_logprobs(backend, drawn)


@pytest.mark.long
@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_a_checkpoint_is_read_but_not_its_processor(family: str, tmp_path: Path) -> None:
    backend = trainer(family, 6)
    backend.save(str(tmp_path))()
    images = kit.tokenizer(family).images
    assert images is not None
    assert images.save(tmp_path)
    settings = replace(kit.settings(family), path=str(tmp_path), architecture=None)
    engine = engine_kind("vllm").factory(EngineSetup(settings, OPTIONS, kit.tokenizer(family)))
    engine.set_version(1)
    drawn = Subject(family, 1, engine).generate(groups(family), SamplingParams(max_tokens=4))
    engine.close()
    kit.assert_logprobs(backend, drawn)


@pytest.mark.long
@pytest.mark.parametrize(("family", "tensor"), [*((name, 1) for name in kit.ARCHITECTURES), ("smolvlm", 2)])
def test_adapters_are_beside_the_language_model(family: str, tensor: int, tmp_path: Path) -> None:
    """Modules of towers have the names of targets, too."""
    pytest.importorskip("peft")
    trainer(family, 6).save(str(tmp_path))()
    lora = LoraConfig(r=4, alpha=12)
    settings = replace(kit.settings(family, lora=lora), path=str(tmp_path), architecture=None)
    backend = TorchModel(settings, RankPosition())
    module = backend.shared_module()
    assert module is not None
    for weight in adapter_weights(module).values():
        torch.nn.init.normal_(weight, std=0.1)
    cores = tuple((rank % 2,) for rank in range(tensor)) if tensor > 1 else ()
    setup = EngineSetup(settings, OPTIONS, kit.tokenizer(family), tensor=tensor, cores=cores)
    engine = engine_kind("vllm").factory(setup)
    weights = [(name, x.detach()) for name, x in torch_kit.weights(backend).items()]
    engine.load_weights([IncomingWeights.of_tensors(partial(list, weights))] * tensor, 1)
    drawn = Subject(family, tensor, engine).generate(groups(family), SamplingParams(max_tokens=8))
    engine.close()
    kit.assert_logprobs(backend, drawn)
