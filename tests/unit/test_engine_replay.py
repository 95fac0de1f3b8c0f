"""Engines that record what they draw, and engines that replay a record."""

from __future__ import annotations

import pytest
import torch
from test_engine import PROMPTS, full_logprobs, generate, reference, run, settings

from hflow.base.errors import RunError
from hflow.engines.embedded.replay import Draws, RecordingEngine, ReplayingEngine
from hflow.engines.interface import SamplingParams

DRAWN = [SamplingParams(max_tokens=6, seed=seed) for seed in range(len(PROMPTS))]


def test_other_weights_replay_the_tokens_with_their_own_log_probs() -> None:
    draws: Draws = {}
    recorded = generate(RecordingEngine(draws, settings()), PROMPTS, DRAWN)
    other = ReplayingEngine(draws, settings(initializer_range=0.1))
    replayed = generate(other, PROMPTS, DRAWN)
    assert {i: g.ids for i, g in replayed.items()} == {i: g.ids for i, g in recorded.items()}
    model = reference()
    for i, prompt in enumerate(PROMPTS):
        wanted = full_logprobs(model, prompt, recorded[i].ids, 1.0)
        torch.testing.assert_close(torch.tensor(recorded[i].logprobs), wanted, atol=1e-4, rtol=0)
        assert (torch.tensor(replayed[i].logprobs) - wanted).abs().max() > 1e-2


def test_interruptions_are_part_of_the_record() -> None:
    draws: Draws = {}
    engine = RecordingEngine(draws, settings())
    never = SamplingParams(max_tokens=6, seed=7, stop_ids=())
    engine.add(0, PROMPTS[0], never)
    for _ in range(2):
        engine.step()
    ((_, begun),) = engine.interrupt()
    rest = SamplingParams(max_tokens=4, seed=7, num_resumed=2)
    engine.add(1, [*PROMPTS[0], *begun.ids], rest)
    ids = begun.ids + run(engine)[1].ids
    assert draws == {(7, tuple(PROMPTS[0])): list(ids)}

    replaying = ReplayingEngine(draws, settings(initializer_range=0.1))
    assert generate(replaying, [PROMPTS[0]], [never])[0].ids == ids
    assert generate(replaying, [[*PROMPTS[0], *ids[:2]]], [rest])[0].ids == ids[2:]


def test_a_missing_record_is_an_error() -> None:
    draws: Draws = {}
    generate(RecordingEngine(draws, settings()), PROMPTS[:1], DRAWN[:1])
    with pytest.raises(RunError, match=r"no token 0 after the prompt \[7\]; the recorded run had other"):
        generate(ReplayingEngine(draws, settings()), PROMPTS[2:3], DRAWN[:1])
    with pytest.raises(RunError, match="no token 6"):
        generate(ReplayingEngine(draws, settings()), PROMPTS[:1], [SamplingParams(max_tokens=9, seed=0)])
