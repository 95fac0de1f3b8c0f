"""Captured decode steps: the same samples as without them, from fixed addresses alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_engine import ARCHITECTURES, PROMPTS, generate, run, settings

from hflow.engines.embedded.decode_graphs import DecodeGraphs
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.memory import graph_rows
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.models.attention_kernels import decode_attention
from hflow.types.engine import SleepLevel


class CapturingEngine(EmbeddedEngine):
    """An engine on a CPU that decodes as on a GPU: what a graph holds is run again at each replay.

    A function that is captured sees what it saw then, so a value that is not in the graph's inputs is stale.
    A replay fails if the rotary table is another tensor than when it was captured, which graphs do not see.
    """

    _has_pages = True

    def _decode_graphs(self, decoder: DenseDecoder) -> DecodeGraphs:
        self.captured_rows: list[int] = []

        def capture(step: Callable[[], None]) -> Callable[[], None]:
            self.captured_rows.append(len(self._running))
            table = decoder._cos.data_ptr()

            def replay() -> None:
                assert decoder._cos.data_ptr() == table, "a graph reads a rotary table that was replaced"
                step()

            return replay

        limits = self._options.max_running, self._max_length
        return DecodeGraphs(decoder, self._cache, self._device, *limits, capture)


def assert_equal(found: dict[int, GenerationResult], expected: dict[int, GenerationResult]) -> None:
    assert {i: result.ids for i, result in found.items()} == {i: r.ids for i, r in expected.items()}
    for i, result in found.items():
        torch.testing.assert_close(result.logprobs, expected[i].logprobs, atol=1e-5, rtol=0)
        assert result.versions == expected[i].versions


def sampled(num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num)]
    return prompts, [SamplingParams(max_tokens=4 + 7 * i % 50, seed=i) for i in range(num)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_samples_are_those_without_graphs(name: str) -> None:
    options = {"max_running": 9}
    expected = generate(EmbeddedEngine(settings(name), options), *sampled(24))
    engine = CapturingEngine(settings(name), options)
    assert_equal(generate(engine, *sampled(24)), expected)
    assert len(engine.captured_rows) < sum(len(result.ids) for result in expected.values()) / 9


def test_graphs_follow_new_weights_and_sleep() -> None:
    engines = [cls(settings(), {"max_running": 4}) for cls in (EmbeddedEngine, CapturingEngine)]
    for engine in engines:
        for i, (prompt, params) in enumerate(zip(*sampled(6), strict=True)):
            engine.add(i, prompt, params)
    results: list[dict[int, GenerationResult]] = []
    for engine in engines:
        ended = dict(engine.step() + engine.step() + engine.step())
        with torch.no_grad():
            for parameter in engine._module.parameters():
                parameter.mul_(1.1)
        engine.set_version(1)
        ended |= dict(engine.step() + engine.step())
        engine._is_accelerated = True  # it frees its memory
        engine.sleep(SleepLevel.KEEP_WEIGHTS)
        assert engine._graphs is None or not engine._graphs._graphs
        engine.wake_weights()
        engine.wake_cache()
        results.append(ended | run(engine))
    assert_equal(results[1], results[0])


@pytest.mark.gpu
def test_decode_steps_are_launched_one_by_one_where_asked() -> None:
    on_gpu = replace(settings("qwen3"), device="cuda")
    has_graphs = [EmbeddedEngine(on_gpu, {"cuda_graphs": x})._graphs is not None for x in (True, False)]
    assert has_graphs == [True, False]


def test_graphs_survive_prompts_of_any_length() -> None:
    """100 is no multiple of 16, to which the lengths of prompts are filled up."""
    results = []
    for cls in (EmbeddedEngine, CapturingEngine):
        engine = cls(settings(), {"max_running": 4, "max_model_len": 100})
        engine.add(0, PROMPTS[0], SamplingParams(max_tokens=400, seed=1))
        for _ in range(98 - len(PROMPTS[0])):
            assert not engine.step()
        engine.set_version(1)  # the sequence enters again, as a prompt of 98 tokens
        results.append(run(engine))
    assert_equal(results[1], results[0])


def test_few_free_slots_wait_for_more_and_all_sequences_end() -> None:
    engine = CapturingEngine(settings(), {"max_running": 32})
    for i in range(80):
        engine.add(i, [1, 5, 6], SamplingParams(max_tokens=3 + i % 17, seed=i))
    num_running = []
    num_ended = 0
    while engine.num_unfinished:
        num_ended += len(engine.step())
        num_running.append(engine.num_running)
    assert num_ended == 80
    assert max(num_running) == 32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cuda_graphs_draw_the_tokens_of_a_cpu(dtype: str) -> None:
    """Greedy tokens in fp32. In bf16 log-probs of the tokens that a CPU computes in bf16 too."""
    params = [SamplingParams(max_tokens=12 + i, temperature=0.0) for i in range(len(PROMPTS))]
    chosen = replace(settings("qwen3"), dtype=dtype)
    expected = generate(EmbeddedEngine(chosen), PROMPTS, params)
    engine = EmbeddedEngine(replace(chosen, device="cuda"), {"max_running": 3})
    found = generate(engine, PROMPTS, params)
    for i, result in found.items():
        same = next(
            (n for n, (a, b) in enumerate(zip(result.ids, expected[i].ids, strict=True)) if a != b), None
        )
        assert same is None or dtype == "bf16"
        tolerance = 1e-4 if dtype == "fp32" else 0.1
        torch.testing.assert_close(
            result.logprobs[:same], expected[i].logprobs[:same], atol=tolerance, rtol=0
        )


def test_rows_of_graphs() -> None:
    assert graph_rows(1) == (4,)
    assert graph_rows(16) == (4, 8, 16)
    assert graph_rows(100) == (4, 8, 16, 32, 64, 96, 100)
    assert graph_rows(128) == (4, 8, 16, 32, 64, 96, 128)


def test_attention_over_pages_is_that_over_one_piece() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(12, 2, 16, 8), torch.randn(12, 2, 16, 8)
    lengths = torch.tensor([1, 40, 17], dtype=torch.int32)
    table = torch.tensor([[3, 0, 0], [11, 2, 7], [1, 4, 9]], dtype=torch.int32)
    found = decode_attention(q, k, v, table, lengths, 0.3)
    for i, (pages, n) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        keys, values = (torch.cat([x[page] for page in pages], dim=1)[:, :n] for x in (k, v))
        one = torch.nn.functional.scaled_dot_product_attention(
            q[i, :, None], keys, values, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[i], one[:, 0])
