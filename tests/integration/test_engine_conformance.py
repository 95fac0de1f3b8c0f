"""What every generation engine must do: the embedded engine, and vLLM with one and with two tensor ranks.

vLLM's scheduling is synchronous on a CPU; `async` is vLLM as on GPUs, with asynchronous scheduling.

Models have grouped queries and a vocabulary that vLLM pads. One ties its embeddings; the other does not, and
has fewer key-value heads than tensor ranks. Those with adapters get these alone, of a rank that vLLM pads.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import os
import pickle
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_script import Script

from hflow.base.errors import BackendError, RunError
from hflow.config.schema import LoraConfig
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import EngineSetup, GenerationEngine, GenerationResult, SamplingParams
from hflow.engines.process.engine import EngineLaunch, ProcessEngine, write_config
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.vllm.engine import vllm_launch
from hflow.engines.vllm.memory import CPU_BLOCK_TOKENS
from hflow.models.expert_replay import routers_of
from hflow.models.expert_tensors import stacked_views
from hflow.models.hf_config import read_config
from hflow.models.settings import ModelSettings
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.request import trained_shape
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import tensors
from hflow.types.engine import SleepLevel
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.sampling_mask import SAMPLING_MASK, unpack_ids
from hflow.weights.buckets import pack_buckets
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.checksum import weights_checksum
from hflow.weights.delta import DeltaSender
from hflow.weights.incoming import IncomingWeights
from hflow.weights.outgoing import whole_slices

MAX_RUNNING, MAX_LENGTH = 6, 2000
TOLERANCE = 1e-4
TOKENIZER = TextTokenizer(TokenizerSettings(alphabet=string.printable[:80]))
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True, "attention_bias": True},
    "experts": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "untied": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": False, "num_key_value_heads": 1},
    "windows": {
        "model_type": "gemma3_text",
        **SIZES,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
MIXED = {
    **SIZES,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    **{key: size for key, size in MIXED.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale_all_dim": 0.7}
ARCHITECTURES |= {
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {"model_type": "glm4", **SIZES, "attention_bias": True},
    "glm4_moe": {"model_type": "glm4_moe", **MIXED, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "grouped": {"model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        "rope_parameters": {**YARN, "mscale": 0.7, "rope_theta": 10000.0},
    },
}
ARCHITECTURES |= {
    "gpt_oss": {
        "model_type": "gpt_oss",
        **{name: size for name, size in SIZES.items() if name != "tie_word_embeddings"},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        "num_attention_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
}
"""Families that vLLM computes by modules of their own. The first layer of most has no experts."""
ADAPTED = {
    "adapters": (
        "untied",
        LoraConfig(r=6, alpha=18, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    ),
    "experts-adapters": ("experts", LoraConfig(r=4, alpha=2)),
    "adapters-of-experts": (
        "experts",
        LoraConfig(r=4, alpha=8, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj")),
    ),
    "dora": ("untied", LoraConfig(r=4, alpha=2, dora=True)),
    "outer-adapters": ("untied", LoraConfig(r=4, alpha=2, targets=("q_proj", "embed_tokens", "lm_head"))),
    "rounded": ("untied", LoraConfig(r=4, alpha=2, base="nf4")),
}
"""Name -> the architecture of the weights, whose seed is `BASE`, and the adapters beside them."""
RECORDED = ("experts", "mixtral", "gpt_oss", "qwen2_moe", "adapters-of-experts")
"""The architectures whose experts are recorded."""
BASE = 3
PROMPTS = ([1, 5, 6], [1, 9, 9, 4, 7, 11, 3, 8], [7], list(range(3, 99)), [1, 5, 6], [44, 30])

Results = Mapping[int, GenerationResult]


@dataclass
class Subject:
    """An engine, and the models whose weights it gets."""

    name: str
    architecture: str
    tensor: int
    engine: GenerationEngine
    next_id: int = 0
    version: int = 0

    def load(self, seed: int) -> nn.Module:
        """Load the weights of a seed as the next version; return the model that has them."""
        self.version += 1
        loaded = self.engine.load_weights([weights_of(self.architecture, seed)] * self.tensor, self.version)
        assert len(set(loaded.checksums)) == 1
        return reference(self.architecture, seed)

    def add(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> range:
        """Add requests; return their ids."""
        ids = range(self.next_id, self.next_id + len(prompts))
        self.next_id = ids.stop
        for request_id, prompt, of_request in zip(ids, prompts, params, strict=True):
            self.engine.add(request_id, prompt, of_request)
        return ids

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        """Generate for all prompts; return results in their order."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        ids = self.add(prompts, params)
        results = finish(self.engine)
        assert sorted(results) == list(ids)
        return [results[request_id] for request_id in ids]

    def run_for(self, num_tokens: int) -> dict[int, GenerationResult]:
        """Let the requests that run draw about this many tokens each; return those that have finished."""
        (clock,) = self.add([[2]], [SamplingParams(max_tokens=num_tokens)])
        results: dict[int, GenerationResult] = {}
        while clock not in results:
            results.update(self.engine.step())
        del results[clock]
        return results


@cache
def reference(architecture: str, seed: int) -> nn.Module:
    """Build a model with the engine's architecture in transformers, with adapters merged."""
    if architecture in ADAPTED:
        return merged(architecture, adapters(architecture, seed))
    options = dict(ARCHITECTURES[architecture])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, values in module.state_dict().items():
            if values.ndim == 1:  # biases and norms, which transformers sets to 0 and 1
                torch.nn.init.normal_(values, mean=float("norm" in name), std=0.2)
    return module.requires_grad_(False)


def adapters(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Draw the adapters of an architecture of `ADAPTED`, by the names that trainers send them with."""
    base, lora = ADAPTED[architecture]
    shape = read_shape(ARCHITECTURES[base])
    assert shape is not None
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: 0.1 * torch.randn(spec.shape, generator=generator) + (len(spec.shape) == 1)
        for spec in tensors(trained_shape(shape, lora))
    }


def merged(
    architecture: str, of_adapters: Mapping[str, torch.Tensor], base: nn.Module | None = None
) -> nn.Module:
    """Return the model of an architecture of `ADAPTED` with adapters added to its weights: W + a/r B A.

    With DoRA rows get the lengths that are learned. Weights in 4 bits are rounded before.
    """
    name_of_base, lora = ADAPTED[architecture]
    module = copy.deepcopy(base or reference(name_of_base, BASE))
    if lora.base:
        functional = pytest.importorskip("bitsandbytes.functional")
        for name, weight in module.named_parameters():
            if "layers" in name and weight.ndim == 2:
                packed = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
                weight.copy_(functional.dequantize_4bit(*packed))
    for name, a in of_adapters.items():
        if "lora_embedding_A" in name:
            b = of_adapters[name.replace("_A", "_B")]
            module.get_parameter(name.replace("lora_embedding_A", "weight")).add_(
                lora.alpha / lora.r * (b @ a).T
            )
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            parts = [path.replace("gate_up", x) for x in ("gate", "up")] if "gate_up" in path else [path]
            b = torch.cat([of_adapters[f"{part}.lora_B.weight"] for part in parts], -2)
            weight = module.get_parameter(path if ".experts." in path else f"{path}.weight")
            weight.add_(lora.alpha / lora.r * b @ a)
            if lora.dora:
                weight.mul_(
                    (of_adapters[name.replace("_A", "_magnitude_vector")] / weight.norm(dim=1))[:, None]
                )
    return module


def sent(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that a trainer sends, by name."""
    if architecture in ADAPTED:
        return adapters(architecture, seed)
    return named_weights(reference(architecture, seed))


def weights_of(architecture: str, seed: int) -> IncomingWeights:
    """Return the tensors of a model that a trainer sends, as the weights that a rank receives."""
    return IncomingWeights.of_tensors(partial(list, list(sent(architecture, seed).items())))


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names that trainers send them with, tied ones once."""
    tied = {*dict(module.named_parameters(remove_duplicate=False))} - {*dict(module.named_parameters())}
    named = ((name, values) for name, values in module.state_dict().items() if name not in tied)
    return dict(stacked_views(module.config.model_type, named))


def finish(engine: GenerationEngine) -> dict[int, GenerationResult]:
    """Step until all requests have finished."""
    results = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return results


def logprobs(
    module: nn.Module, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of drawn tokens, by one forward pass."""
    logits = module(torch.tensor([[*prompt, *ids]])).logits[0].float() / temperature
    drawn = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return drawn.gather(-1, torch.tensor(ids)[:, None])[:, 0]


def assert_logprobs(
    result: GenerationResult, module: nn.Module, prompt: Sequence[int], temperature: float = 1.0
) -> None:
    expected = logprobs(module, prompt, result.ids, temperature)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=TOLERANCE, rtol=0)


def setup_of(architecture: str, tensor: int, **more: int) -> EngineSetup:
    base, lora = ADAPTED.get(architecture, (architecture, None))
    path = None if lora is None else saved_base(base)
    shape = ARCHITECTURES[base] if lora is None else None
    settings = ModelSettings(name="actor", trainable=True, architecture=shape, path=path, seed=3, lora=lora)
    options = {"max_running": MAX_RUNNING, "max_model_len": MAX_LENGTH, **more}
    count = os.cpu_count() or 1
    cores = tuple((rank % count,) for rank in range(tensor)) if tensor > 1 else ()
    records = (SAMPLING_MASK, *((ROUTED_EXPERTS,) if architecture in RECORDED else ()))
    return EngineSetup(settings, options, TOKENIZER, tensor=tensor, cores=cores, records=records)


@cache
def saved_base(architecture: str) -> str:
    """Return the directory of a checkpoint with the weights of the seed `BASE`."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    module: Any = reference(architecture, BASE)
    module.save_pretrained(directory)
    return directory


def build(name: str, architecture: str, tensor: int, **of_cache: int) -> GenerationEngine:
    setup = setup_of(architecture, tensor, **of_cache)
    is_async = name == "async"
    engine = ProcessEngine(setup, launch_of(name, setup)) if is_async else engine_kind(name).factory(setup)
    assert isinstance(engine, GenerationEngine)
    return engine


def launch_of(name: str, setup: EngineSetup) -> EngineLaunch:
    """Return the launch of vLLM, with asynchronous scheduling for `async` (`tests/kits/async_vllm.py`)."""
    launch = vllm_launch(setup)

    def arguments(directory: str, max_length: int) -> dict[str, Any]:
        of_vllm = launch.arguments(directory, max_length)
        worker = "AsyncRecordingWorker" if "worker_cls" in of_vllm else "AsyncWorker"
        return {**of_vllm, "async_scheduling": True, "worker_cls": f"async_vllm.{worker}"}

    kits = Path(__file__).parents[1] / "kits"
    variables = {**launch.environment, "PYTHONPATH": os.pathsep.join([str(kits), *sys.path])}
    if name == "vllm":
        return replace(launch, environment=variables)
    return EngineLaunch("vLLM", "async_vllm:AsyncStepper", variables, arguments)


ENGINES = {
    f"{name}-t{tensor}-{architecture}": (name, architecture, tensor)
    for name, architecture, tensor in (
        ("embedded", "tied", 1),
        ("embedded", "untied", 1),
        ("embedded", "adapters", 1),
        ("embedded", "dora", 1),
        ("embedded", "adapters-of-experts", 1),
        ("embedded", "outer-adapters", 1),
        ("embedded", "rounded", 1),
        ("embedded", "windows", 1),
        ("vllm", "tied", 1),
        ("vllm", "untied", 2),
        ("vllm", "windows", 1),
        ("vllm", "experts", 1),
        ("vllm", "experts", 2),
        ("vllm", "mixtral", 2),
        ("vllm", "gpt_oss", 1),
        ("vllm", "gpt_oss", 2),
        ("vllm", "qwen2_moe", 1),
        ("vllm", "qwen2_moe", 2),
        ("vllm", "glm4", 1),
        ("vllm", "glm4_moe", 1),
        ("vllm", "glm4_moe", 2),
        ("vllm", "deepseek_v2", 1),
        ("vllm", "grouped", 1),
        ("vllm", "deepseek_v3", 1),
        ("vllm", "deepseek_v3", 2),
        ("vllm", "adapters", 1),
        ("vllm", "adapters", 2),
        ("vllm", "experts-adapters", 1),
        ("async", "untied", 1),
        ("async", "adapters", 1),
        ("async", "experts", 1),
        ("async", "experts", 2),
    )
}
"""vLLM with tied embeddings on two tensor ranks is in a process of its own: see `OWNER`."""
OFTEN = ("embedded-t1-tied", "embedded-t1-untied", "vllm-t1-experts")
"""Tested with every change. Runs on Ray have vLLM engines of tied models."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(engine, id=name, marks=() if name in OFTEN else pytest.mark.long)
        for name, engine in ENGINES.items()
    ],
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name, architecture, tensor = request.param
    engine = build(name, architecture, tensor)
    subject = Subject(name, architecture, tensor, engine)
    subject.load(3)
    yield subject
    engine.close()


def test_logprobs_are_those_of_the_sampling_distribution(subject: Subject) -> None:
    module = subject.load(3)
    for temperature in (1.0, 0.7, 1.6):
        results = subject.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=temperature, seed=5))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert len(result.ids) == 30
            assert set(result.versions) == {subject.version}
            assert_logprobs(result, module, prompt, temperature)


def test_temperature_0_takes_the_likeliest_token(subject: Subject) -> None:
    module = subject.load(3)
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    sampled = SamplingParams(max_tokens=20, temperature=0.7, seed=2)
    results = subject.generate(PROMPTS, [greedy, sampled] * 3)
    for prompt, result in list(zip(PROMPTS, results, strict=True))[::2]:
        logits = module(torch.tensor([[*prompt, *result.ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(result.ids)
        assert_logprobs(result, module, prompt)
    assert_logprobs(results[1], module, PROMPTS[1], 0.7)
    assert [result.ids for result in subject.generate(PROMPTS[:1], replace(sampled, top_k=1))] == [
        results[0].ids
    ]


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 7}, {"top_k": 30, "top_p": 0.7}, {"top_k": 50, "min_p": 0.1}, {"top_k": 100, "top_p": 0.9}],
    ids=str,
)
def test_the_tokens_that_sampling_leaves_are_recorded(subject: Subject, limits: dict[str, Any]) -> None:
    """They are those of whole logits, and the log-probs are over them. Others that run record nothing."""
    module = subject.load(3)
    recorded = SamplingParams(max_tokens=20, temperature=0.8, seed=3, record=(SAMPLING_MASK,), **limits)
    others = [SamplingParams(max_tokens=9, temperature=0.0), SamplingParams(max_tokens=9, top_p=0.5)]
    results = subject.generate(PROMPTS, [recorded, *others, *[recorded] * 3])
    assert results[1].recorded == results[2].recorded == {}
    sizes = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        if SAMPLING_MASK not in result.recorded:
            continue
        entries = result.recorded[SAMPLING_MASK]
        assert [bool(entry) for entry in entries] == [False] * len(prompt) + [True] * 20
        logits = module(torch.tensor([[*prompt, *result.ids]])).logits[0, len(prompt) - 1 : -1].float() / 0.8
        for row, token, logprob, entry in zip(
            logits, result.ids, result.logprobs, entries[len(prompt) :], strict=True
        ):
            kept = unpack_ids(entry).tolist()
            sizes.append(len(kept))
            assert len(set(kept)) == len(kept)
            assert len(kept) <= limits["top_k"]
            assert row[kept].min() >= row.sort(descending=True).values[len(kept) - 1] - TOLERANCE
            p = row.softmax(-1)
            if limits.get("min_p"):
                likely = (p >= limits["min_p"] * p.max() + TOLERANCE).nonzero()[:, 0].tolist()
                assert {*kept} >= {*likely} & {*p.topk(limits["top_k"]).indices.tolist()}
            elif "top_p" not in limits:
                assert len(kept) == limits["top_k"]
            else:
                of_top_k = p.topk(limits["top_k"]).values.sum()
                assert p[kept].sum() >= limits["top_p"] * of_top_k - TOLERANCE
                assert p[kept].sum() - p[kept].min() <= limits["top_p"] * of_top_k + TOLERANCE
            over_kept = row[kept].log_softmax(-1)[kept.index(token)]
            assert logprob == pytest.approx(over_kept.item(), abs=TOLERANCE)
    assert len({*sizes}) > 1 or limits == {"top_k": 7}


def test_tokens_follow_from_the_seed(subject: Subject) -> None:
    subject.load(3)
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (0, 1, -1, 2**63, 2**63 + 1, 0)]
    same_prompt = [PROMPTS[0]] * len(params)
    first, second = subject.generate(same_prompt, params), subject.generate(same_prompt, params)
    assert [result.ids for result in first] == [result.ids for result in second]
    assert len({result.ids for result in first}) == len(params) - 1
    assert first[0].ids == first[-1].ids


def test_stop_tokens_end_a_request(subject: Subject) -> None:
    subject.load(3)
    params = SamplingParams(max_tokens=20, seed=4)
    whole = subject.generate(PROMPTS[:2], params)
    assert [result.stop_reason for result in whole] == ["length"] * 2
    stop = whole[0].ids[6]
    cut = whole[0].ids.index(stop) + 1
    (result,) = subject.generate(PROMPTS[:1], replace(params, stop_ids=(99, stop)))
    assert (result.ids, result.stop_reason) == (whole[0].ids[:cut], "stop")
    assert len(result.logprobs) == len(result.versions) == cut


def test_stop_strings_end_a_request_also_across_an_interruption(subject: Subject) -> None:
    subject.load(3)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    prompt, (whole,) = PROMPTS[1], subject.generate(PROMPTS[1:2], params)
    texts = [TOKENIZER.decode(whole.ids[:length]) for length in range(len(whole.ids) + 1)]
    end = next(n for n in range(8, 41) if len(texts[n]) > len(texts[n - 1]) >= 2)
    stop = texts[end][-2:]
    cut = next(n for n in range(41) if stop in texts[n])
    with_stop = replace(params, stop=("no such text", stop))
    (result,) = subject.generate([prompt], with_stop)
    assert (result.ids, result.stop_reason) == (whole.ids[:cut], "stop")
    resumed = replace(with_stop, max_tokens=40 - (cut - 1), num_resumed=cut - 1)
    (result,) = subject.generate([[*prompt, *whole.ids[: cut - 1]]], resumed)
    assert (result.ids, result.stop_reason) == (whole.ids[cut - 1 : cut], "stop")


def test_more_requests_than_slots_and_the_longest_sequence(subject: Subject) -> None:
    subject.load(3)
    params = [SamplingParams(max_tokens=5 + i % 7, seed=i) for i in range(3 * MAX_RUNNING)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    results = subject.generate(prompts, params)
    assert [len(result.ids) for result in results] == [of_request.max_tokens for of_request in params]
    (longest,) = subject.generate([[1] * (MAX_LENGTH - 9)], SamplingParams(max_tokens=50))
    assert (len(longest.ids), longest.stop_reason) == (9, "length")


def test_prompts_with_more_tokens_than_one_step_computes(subject: Subject) -> None:
    module = subject.load(3)
    prompts = [[3 + (i * (j + 1)) % 90 for i in range(MAX_LENGTH - 100)] for j in range(MAX_RUNNING)]
    for prompt, result in zip(prompts, subject.generate(prompts, SamplingParams(max_tokens=2)), strict=True):
        assert_logprobs(result, module, prompt)


def test_a_request_that_does_not_fit_is_refused(subject: Subject) -> None:
    with pytest.raises(BackendError, match=f"a prompt has {MAX_LENGTH} tokens, but the engine takes 1 to"):
        subject.add([[1] * MAX_LENGTH], [SamplingParams()])
    with pytest.raises(BackendError, match="holds token 100, but the model's vocabulary has 100"):
        subject.add([[100]], [SamplingParams()])
    with pytest.raises(BackendError, match=r"temperature is 1e-40; it must be from 0.01 to 100, or 0"):
        subject.add([[1]], [SamplingParams(temperature=1e-40)])
    if subject.architecture not in RECORDED:
        with pytest.raises(BackendError, match="does not record routed_experts of its model"):
            subject.add([[1]], [SamplingParams(record=(ROUTED_EXPERTS,))])
    assert subject.engine.num_unfinished == 0


def test_tokens_can_be_read_while_a_request_runs(subject: Subject) -> None:
    subject.load(3)
    engine = subject.engine
    for number, prompt in enumerate(PROMPTS[:2]):
        engine.add(number, prompt, SamplingParams(max_tokens=400, seed=number))
    seen: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {0: ((), ()), 1: ((), ())}
    results: dict[int, GenerationResult] = {}
    while engine.num_unfinished:
        results.update(engine.step())
        for number, drawn in engine.drawn({number: len(seen[number][0]) for number in seen}).items():
            ids, logprobs = seen[number]
            seen[number] = (ids + drawn.ids, logprobs + drawn.logprobs)
    for number, (ids, logprobs) in seen.items():
        assert len(ids) > 1
        assert results[number].ids[: len(ids)] == ids
        assert results[number].logprobs[: len(ids)] == logprobs
    assert engine.drawn({0: 0}) == {}


def test_cancelled_requests_return_nothing(subject: Subject) -> None:
    """Whether they have not been sent yet, run, or wait for a slot."""
    subject.load(3)
    lengths = [1900, 30, 1900, 30, 30, 30, 30, 1900]
    ids = subject.add([PROMPTS[0]] * 8, [SamplingParams(max_tokens=n, seed=n) for n in lengths])
    subject.engine.cancel(ids[0])
    results = dict(subject.engine.step())
    subject.engine.cancel(ids[2])
    subject.engine.cancel(ids[7])
    results.update(finish(subject.engine))
    assert {request_id: len(result.ids) for request_id, result in results.items()} == {
        request_id: 30 for request_id, length in zip(ids, lengths, strict=True) if length == 30
    }


def test_each_token_has_the_version_that_drew_it(subject: Subject) -> None:
    """An update while requests run keeps their tokens, and drops what older weights have cached."""
    old = subject.load(3)
    first = subject.version
    reference(subject.architecture, 11)  # building it takes longer than these requests
    ids = subject.add(PROMPTS[:5], [SamplingParams(max_tokens=1900, seed=7)] * 5)
    assert subject.run_for(10) == {}
    new = subject.load(11)
    assert subject.run_for(10) == {}
    results = dict(subject.engine.interrupt())
    for request_id, prompt in zip(ids, PROMPTS, strict=False):
        result = results[request_id]
        before = result.versions.count(first)
        assert result.versions == (first,) * before + (subject.version,) * (len(result.ids) - before)
        assert 0 < before < len(result.ids)
        drawn = torch.tensor(result.logprobs)
        for module, part in ((old, slice(None, before)), (new, slice(before, None))):
            expected = logprobs(module, prompt, result.ids)
            torch.testing.assert_close(drawn[part], expected[part], atol=TOLERANCE, rtol=0)


def experts_of(module: nn.Module, ids: Sequence[int]) -> list[bytes]:
    """Return the experts that the routers of a model choose for the tokens of a sequence."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda *of: chosen.append(of[2][2])) for router in routers_of(module)
    ]
    module(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return [bytes(row) for row in torch.cat(chosen, 1).tolist()]


def same_experts(one: Sequence[bytes], other: Sequence[bytes], per_token: int = 2) -> float:
    """Return the share of tokens and layers for which two records have the same experts, in any order."""
    first, second = (torch.tensor([list(row) for row in rows]) for rows in (one, other))
    first, second = (rows.view(len(rows), -1, per_token).sort(-1).values for rows in (first, second))
    return float((first == second).all(-1).float().mean())


@pytest.fixture
def recording(subject: Subject) -> Subject:
    if subject.architecture not in RECORDED:
        pytest.skip("the model has no experts")
    return subject


def test_recorded_experts_are_those_of_the_models_routers(recording: Subject) -> None:
    """Also of prompts that are cached in part, of groups, and beside requests that record nothing."""
    module, params = recording.load(3), SamplingParams(max_tokens=20, seed=2, record=(ROUTED_EXPERTS,))
    long = [3 + (i * 7) % 90 for i in range(300)]
    prompts = [*PROMPTS, long, long, long[:270], [*long[:256], 5]]
    for _ in range(2):  # the second time from the cache
        of_request = [
            replace(params, seed=i, record=params.record if i != 1 else ()) for i in range(len(prompts))
        ]
        results = recording.generate(prompts, of_request)
        assert results[1].recorded == {}
        for prompt, result in zip([PROMPTS[0], *prompts[2:]], [results[0], *results[2:]], strict=True):
            assert len(result.recorded[ROUTED_EXPERTS]) == len(prompt) + 19
            expected = experts_of(module, [*prompt, *result.ids])[:-1]
            assert same_experts(result.recorded[ROUTED_EXPERTS], expected) > 0.998


def test_tokens_keep_the_experts_of_older_weights_and_of_an_interruption(recording: Subject) -> None:
    old = recording.load(3)
    first = recording.version
    reference(recording.architecture, 11)  # building it takes longer than these requests
    params = SamplingParams(max_tokens=1900, seed=7, record=(ROUTED_EXPERTS,))
    ids = recording.add(PROMPTS[:5], [params] * 5)
    assert recording.run_for(10) == {}
    new = recording.load(11)
    assert recording.run_for(10) == {}
    results = dict(recording.engine.interrupt())
    for request_id, prompt in zip(ids, PROMPTS, strict=False):
        result = results[request_id]
        assert len(result.recorded[ROUTED_EXPERTS]) == len(prompt) + len(result.ids) - 1
        # The new weights computed the last token that the old ones drew.
        of_old = len(prompt) + result.versions.count(first) - 1
        sequence = (*prompt, *result.ids)
        by_old, by_new = experts_of(old, sequence), experts_of(new, sequence)
        assert same_experts(result.recorded[ROUTED_EXPERTS][:of_old], by_old[:of_old]) > 0.998
        assert same_experts(result.recorded[ROUTED_EXPERTS][of_old:], by_new[of_old:-1]) > 0.998
        assert same_experts(by_old, by_new) < 0.9
    resumed = [(*prompt, *results[i].ids) for i, prompt in zip(ids, PROMPTS, strict=False)]
    rest = [replace(params, max_tokens=8, num_resumed=len(results[i].ids)) for i in ids]
    for sequence, result in zip(resumed, recording.generate(resumed, rest), strict=True):
        expected = experts_of(new, [*sequence, *result.ids])[:-1]
        assert len(result.recorded[ROUTED_EXPERTS]) == len(expected)
        assert same_experts(result.recorded[ROUTED_EXPERTS], expected) > 0.998


@pytest.mark.long
@pytest.mark.parametrize("name", ["vllm", "async"])
def test_requests_that_a_full_cache_preempts_keep_their_experts(name: str) -> None:
    """Six blocks for each of four requests, in a cache of seventeen."""
    num_layers, num_heads, head_size = 3, 2, 32
    block = CPU_BLOCK_TOKENS * 2 * num_layers * num_heads * head_size * 4
    subject = Subject(name, "experts", 1, build(name, "experts", 1, cache_bytes=18 * block))
    module = subject.load(3)
    params = [SamplingParams(max_tokens=700, seed=seed, record=(ROUTED_EXPERTS,)) for seed in range(4)]
    for prompt, result in zip(PROMPTS, subject.generate(PROMPTS[:4], params), strict=False):
        expected = experts_of(module, [*prompt, *result.ids])[:-1]
        assert len(result.recorded[ROUTED_EXPERTS]) == len(expected)
        assert same_experts(result.recorded[ROUTED_EXPERTS], expected) > 0.998
    subject.engine.close()


def test_new_weights_drop_cached_prompts(subject: Subject) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for seed in (3, 11, 3):
        module = subject.load(seed)
        for _ in range(2):  # the second time from the cache
            (result,) = subject.generate([PROMPTS[3]], params)
            assert_logprobs(result, module, PROMPTS[3])


def test_only_what_has_changed_arrives(subject: Subject) -> None:
    """The whole weights first, then the changes of a few entries, through shared memory."""
    settings, module = ChannelSettings("shared", "trainer", ""), copy.deepcopy(subject.load(3))
    has_adapters = subject.architecture in ADAPTED
    weights = sent(subject.architecture, 3) if has_adapters else named_weights(module)
    channel, sender = make_channel(settings), DeltaSender("trainer")
    receivers = tuple(range(subject.tensor))
    num_bytes = []
    for changes in range(3):
        if changes:
            for name, weight in weights.items():
                if weight.ndim == 1 or "embed" in name or "lora_A" in name:
                    weight.view(-1)[changes::50] += 0.5
        if has_adapters:
            module = merged(subject.architecture, weights)
        subject.version += 1
        sender.start(subject.version)
        buckets = pack_buckets((piece, x.detach()) for piece, x in whole_slices(weights.items()))
        handles = [channel.send(receivers, sender.encode(receivers, bucket)) for bucket in buckets]
        incoming = [IncomingWeights(settings, receiver, streams=[handles]) for receiver in receivers]
        loaded = subject.engine.load_weights(incoming, subject.version)
        channel.free(handles)
        sender.loaded()
        num_bytes.append(loaded.num_bytes)
        assert set(loaded.checksums) == {weights_checksum(weights)}
        results = subject.generate(PROMPTS, SamplingParams(max_tokens=5, seed=changes))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert_logprobs(result, module, prompt)
    channel.close()
    for whole, *changed in zip(*num_bytes, strict=True):
        assert whole == sum(weight.nbytes for weight in weights.values())
        assert all(0 < size < whole / 10 for size in changed)


def test_an_interrupted_request_continues_as_if_it_had_not_been(subject: Subject) -> None:
    """Where tokens do not depend on the position alone, as in vLLM, at temperature 0 only."""
    subject.load(3)
    temperatures = (0.0, 1.0) if subject.name == "embedded" else (0.0,)
    for temperature in temperatures:
        params = SamplingParams(max_tokens=1900, temperature=temperature, seed=9)
        ids = subject.add(PROMPTS[:5], [params] * 5)
        assert subject.run_for(10) == {}
        aborted = dict(subject.engine.interrupt())
        assert subject.engine.num_unfinished == 0
        assert sorted(aborted) == list(ids)
        drawn = [aborted[request_id].ids for request_id in ids]
        assert all(drawn)
        rest = subject.generate(
            [[*prompt, *ids] for prompt, ids in zip(PROMPTS, drawn, strict=False)],
            [replace(params, max_tokens=10, num_resumed=len(ids)) for ids in drawn],
        )
        whole = subject.generate(PROMPTS[:5], [replace(params, max_tokens=len(ids) + 10) for ids in drawn])
        joined = [(*ids, *result.ids) for ids, result in zip(drawn, rest, strict=True)]
        assert joined == [result.ids for result in whole]


def test_an_engine_wakes_as_it_slept(subject: Subject) -> None:
    subject.load(3)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    before = subject.generate(PROMPTS, params)
    for level in (SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS):
        subject.engine.interrupt()
        subject.engine.sleep(level)
        subject.engine.wake_weights()
        if level is SleepLevel.DROP_WEIGHTS:
            subject.load(3)
        subject.engine.wake_cache()
        assert [result.ids for result in subject.generate(PROMPTS, params)] == [
            result.ids for result in before
        ]


def test_weights_of_another_model_are_refused(subject: Subject) -> None:
    weights = {name: tensor.clone() for name, tensor in sent(subject.architecture, 3).items()}
    one = next(name for name in weights if "layernorm" in name or "lora_B" in name)
    changed = {
        "new weights hold 'other', which the engine's model lacks": {**weights, "other": torch.zeros(2)},
        f"new weights have {one!r} of shape": {**weights, one: torch.zeros(7)},
        f"new weights lack 1 tensors of the engine's model, the first is {one!r}": {
            name: tensor for name, tensor in weights.items() if name != one
        },
    }
    for message, other in changed.items():
        incoming = IncomingWeights.of_tensors(partial(list, list(other.items())))
        with pytest.raises(BackendError, match=message):
            subject.engine.load_weights([incoming] * subject.tensor, subject.version + 1)
    module = subject.load(3)
    (result,) = subject.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert_logprobs(result, module, PROMPTS[0])


@pytest.mark.long
def test_an_adapter_that_keeps_old_values_is_found() -> None:
    setup = setup_of("adapters", 1)
    launch = replace(launch_of("vllm", setup), stepper="faulty_adapters:FaultyStepper")
    subject = Subject("vllm", "adapters", 1, ProcessEngine(setup, launch))
    subject.load(3)
    subject.version = 100
    stale = r"does not hold \[0:32, 0:6\] of 'model.layers.1.self_attn.v_proj.lora_B.weight' as received"
    with pytest.raises(RunError, match=stale):
        subject.load(11)
    module = subject.load(11)
    (result,) = subject.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert_logprobs(result, module, PROMPTS[0])
    subject.engine.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("adapted", "tensor"),
    [
        *[("adapters", 1), ("adapters", 2), ("dora", 1), ("dora", 2)],
        *[("outer-adapters", 1), ("outer-adapters", 2), ("rounded", 1)],
        *[("adapters-of-experts", 1), ("adapters-of-experts", 2)],
    ],
)
def test_adapters_can_be_merged(adapted: str, tensor: int) -> None:
    """Where vLLM cannot have them beside its weights. Tensor ranks that divide rows sum their squares."""
    setup = setup_of(adapted, tensor, merges_adapters=True)
    subject = Subject("vllm", adapted, tensor, engine_kind("vllm").factory(setup))
    for seed in (3, 11):
        module = subject.load(seed)
        results = subject.generate(PROMPTS, SamplingParams(max_tokens=20, seed=seed))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert_logprobs(result, module, prompt)
    subject.engine.close()


WEIGHTS = (3, 11, 12, 3)
"""The seeds of the weights of each version in a script."""


def script(seed: int, records: tuple[str, ...]) -> Script:
    """Return a random script: six requests, as many as run at once, and three changes of weights."""
    rng = random.Random(seed)
    requests = [
        (
            list(prompt),
            SamplingParams(
                max_tokens=rng.randint(4, 40),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                stop_ids=tuple(rng.sample(range(100), rng.choice([0, 4]))),
                stop=rng.choice([(), ("a", "b")]),
                seed=rng.randint(0, 9),
                record=records,
            ),
        )
        for prompt in PROMPTS
    ]
    calls = [
        *(("add", number) for number in range(MAX_RUNNING)),
        *[("load", 0)] * 3,
        *[("interrupt", 0)] * 2,
        *(("step", rng.randint(1, 8)) for _ in range(12)),
    ]
    rng.shuffle(calls)
    return Script(requests, [*calls, ("cancel", rng.randrange(MAX_RUNNING))])


def run_script(name: str, seed: int, directory: Path) -> dict[int, GenerationResult]:
    """Return the results of a vLLM engine, by request."""
    setup = setup_of("experts", 1)
    launch = launch_of(name, setup)
    model = write_config(setup.settings, read_config(setup.settings), directory / "model")
    settings = ProcessSettings(
        name=name,
        library=launch.library,
        stepper=launch.stepper,
        settings=setup.settings,
        arguments=launch.arguments(model, MAX_LENGTH),
        temporary=str(directory),
        tokenizer=TOKENIZER.settings,
        cores=(),
        reads_checkpoint=False,
        sleeps=False,
        records=setup.records,
    )
    weights = [cloudpickle.dumps(weights_of("experts", of_version)) for of_version in WEIGHTS]
    paths = (directory / "script", directory / "result")
    paths[0].write_bytes(pickle.dumps((settings, weights, script(seed, setup.records))))
    command = [sys.executable, "-m", "vllm_script", *map(str, paths)]
    subprocess.run(command, env={**os.environ, **launch.environment}, check=True)
    results: dict[int, GenerationResult] = pickle.loads(paths[1].read_bytes())
    return results


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_asynchronous_scheduling_changes_no_sample(seed: int, tmp_path: Path) -> None:
    """Tokens, versions, reasons and experts are the same, with new weights and interruptions meanwhile."""
    expected, found = (run_script(name, seed, tmp_path) for name in ("vllm", "async"))
    assert found.keys() == expected.keys()
    assert len({version for result in found.values() for version in result.versions}) > 2
    for number, result in found.items():
        other, prompt = expected[number], PROMPTS[number]
        assert (result.ids, result.versions) == (other.ids, other.versions)
        assert result.stop_reason == other.stop_reason
        rows, other_rows = result.recorded[ROUTED_EXPERTS], other.recorded[ROUTED_EXPERTS]
        assert len(rows) == len(other_rows)
        assert same_experts(rows, other_rows) > 0.99
        temperature = script(seed, ()).requests[number][1].temperature or 1.0
        for version, of_version in enumerate(WEIGHTS, 1):
            chosen = torch.tensor(result.versions) == version
            drawn = logprobs(reference("experts", of_version), prompt, result.ids, temperature)
            torch.testing.assert_close(
                torch.tensor(result.logprobs)[chosen], drawn[chosen], atol=TOLERANCE, rtol=0
            )


DEATHS = {
    1: r"the generation engine stopped: the vLLM engine of 'actor' \(process \d+\) was killed by SIGKILL",
    2: r"the generation engine stopped: tensor rank \d of the vLLM engine of 'actor' \(process \d+\) died",
}
"""Number of tensor ranks -> what a request is answered with after the last of them was killed."""


def test_a_killed_engine_ends_its_requests(subject: Subject) -> None:
    """The last test of each engine."""
    if not isinstance(subject.engine, ProcessEngine):
        pytest.skip("the embedded engine is in the worker's process")
    driver, directory = EngineDriver(subject.engine), subject.engine._process.directory
    engine = psutil.Process(subject.engine._process._process.pid)
    sockets = [
        connection.laddr
        for process in (engine, *engine.children(recursive=True))
        for connection in process.net_connections("unix")
        if str(connection.laddr).startswith("/")
    ]
    assert bool(sockets) == (subject.tensor > 1)
    assert {os.path.dirname(path) for path in sockets} <= {str(directory)}

    async def main() -> None:
        request = asyncio.ensure_future(driver.submit(PROMPTS[0], SamplingParams(max_tokens=1900)))
        await asyncio.sleep(0.1)
        ranks = [p for p in engine.children(recursive=True) if "Worker_TP" in " ".join(p.cmdline())]
        (ranks[-1] if ranks else engine).kill()
        await request

    with pytest.raises(RunError, match=DEATHS[subject.tensor]):
        asyncio.run(asyncio.wait_for(main(), 60))
    driver.close()
    assert not directory.exists()


OWNER = """
import test_engine_conformance as suite
engine = suite.build("vllm", "tied", 2)
subject = suite.Subject("vllm", "tied", 2, engine)
suite.test_logprobs_are_those_of_the_sampling_distribution(subject)
print(engine._process.directory, flush=True)
input()
"""
"""A process with an engine, of the combination that is not in `ENGINES`."""


@pytest.mark.long
def test_an_engine_ends_when_its_owner_is_killed() -> None:
    """With its ranks and its files."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    directory = Path(owner.stdout.readline().strip())
    try:
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len(processes) >= 3
        assert directory.is_dir()
    finally:
        owner.kill()
        owner.communicate()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    assert not directory.exists()
