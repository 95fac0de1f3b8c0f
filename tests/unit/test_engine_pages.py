"""Pages of the embedded engine: who has them, and the same samples as with slots when few are left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_decode_graphs import CapturingEngine
from test_engine import settings

from hflow.base.errors import ConfigError
from hflow.engines.embedded.decode_graphs import DecodeGraphs
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.pages import PAGE_TOKENS, PagedCache
from hflow.engines.interface import SamplingParams
from hflow.engines.request import GenerationRequest
from hflow.types.engine import SleepLevel

MAX_LENGTH = 7 * PAGE_TOKENS
CPU = torch.device("cpu")


class PagedEngine(EmbeddedEngine):
    """An engine on a CPU with pages, without graphs, as on an accelerator that has no API of CUDA."""

    _has_pages = True

    def _decode_graphs(self, decoder: DenseDecoder) -> DecodeGraphs | None:
        return None


def request(ids: list[int]) -> GenerationRequest:
    return GenerationRequest(0, SamplingParams(), ids, len(ids), MAX_LENGTH)


def check_owners(cache: PagedCache, running: list[GenerationRequest]) -> None:
    """All pages are free or have the owners that they count; shared ones hold the same tokens."""
    rows = [cache._rows[i, : cache._counts[i]].tolist() for i in range(len(running))]
    owners = Counter(page for row in rows for page in row)
    assert 0 not in owners
    assert {page: int(num) for page, num in enumerate(cache._num_owners) if num} == owners
    assert sorted([*owners, *cache._free]) == list(range(1, cache._num_pages))
    assert len(set(cache._free)) == len(cache._free)
    contents: dict[int, tuple[int, ...]] = {}
    for one, row in zip(running, rows, strict=True):
        assert len(row) == -(-len(one.ids) // PAGE_TOKENS)
        for index, page in enumerate(row):
            before = tuple(one.ids[: (index + 1) * PAGE_TOKENS])
            assert contents.setdefault(page, before) == before
            assert owners[page] == 1 or len(before) == (index + 1) * PAGE_TOKENS, "a shared page is full"
    assert (cache.table[len(running) :, 0] == 0).all()
    for one, row in enumerate(rows):
        assert cache.table[one, : len(row)].tolist() == row
    assert set(cache._page_of.values()) == cache._key_of.keys() <= owners.keys()


@given(st.data())
def test_every_page_is_free_or_counts_its_owners(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1 + MAX_LENGTH // PAGE_TOKENS, 30), "pages")
    cache = PagedCache(num_pages, 6, MAX_LENGTH, CPU)
    running: list[GenerationRequest] = []
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        for one in running:
            one.ids.append(data.draw(st.integers(0, 1), "token"))
        if running:
            kept = cache.grow(np.array([len(one.ids) for one in running]))
            assert kept >= 1, "the oldest always has room"
            del running[kept:]
        check_owners(cache, running)
        entering = []
        while len(running) + len(entering) < 6 and data.draw(st.booleans(), "enters"):
            new = request([data.draw(st.integers(0, 1), "prompt")] * data.draw(st.integers(1, 50), "length"))
            if not cache.admit(new):
                assert running or entering, "a sequence alone has room"
                break
            entering.append(new)
        if entering:
            before = len(running)
            running += entering
            skipped = cache.enter(entering)
            check_owners(cache, running)
            for i, (one, num) in enumerate(zip(entering, skipped.tolist(), strict=True)):
                row = cache._rows[before + i]
                others = {page for j in range(before + i) for page in cache._rows[j, : cache._counts[j]]}
                pages = row[: -(-len(one.ids) // PAGE_TOKENS)].tolist()
                assert [page in others for page in pages] == [
                    index < num // PAGE_TOKENS for index in range(len(pages))
                ], "exactly the pages that others store are left out"
        is_kept = [data.draw(st.booleans(), "stays") and len(one.ids) < MAX_LENGTH for one in running]
        cache.arrange(np.flatnonzero(is_kept), np.zeros(0, np.int64))
        running = [one for one, stays in zip(running, is_kept, strict=True) if stays]
        check_owners(cache, running)
    cache.leave(0)
    assert sorted(cache._free) == list(range(1, num_pages))
    assert not cache._page_of


def test_members_of_a_group_share_the_full_pages_of_their_prompt() -> None:
    cache = PagedCache(20, 8, MAX_LENGTH, CPU)
    group = [request([7] * 37) for _ in range(4)]
    assert all(cache.admit(member) for member in group)
    assert cache.enter(group).tolist() == [0, 32, 32, 32]
    assert len(cache._free) == 19 - 2 - 4
    late = request([7] * 48)
    assert cache.admit(late), "and so does one that enters later, with more tokens"
    assert cache.enter([late]).tolist() == [32]
    other = request([8, *[7] * 36])
    assert cache.admit(other)
    assert cache.enter([other]).tolist() == [0]
    cache.leave(1)
    assert len(cache._free) == 19 - 3


Outcomes = dict[int, tuple[list[int], list[float]]]


def outcomes(engine: EmbeddedEngine) -> Outcomes:
    """Tokens and log-probs of sequences that are cancelled, interrupted and prefilled again at times."""
    random, params = Random(5), {}
    sizes = (1, 15, 16, 17, 40, 70)
    prompts = [[random.randrange(3, 31) for _ in range(random.choice(sizes))] for _ in range(9)]
    found: Outcomes = {}
    for i in range(36):  # groups of four
        params[i] = SamplingParams(max_tokens=random.randrange(1, 80), seed=i, top_p=0.9 if i % 3 else 1.0)
        engine.add(i, prompts[i // 4], params[i])
        found[i] = [], []
    num_steps = 0
    while engine.num_unfinished:
        num_steps += 1
        ended = engine.step()
        if num_steps == 9:
            engine.cancel(2)
            engine.cancel(35)
        if num_steps % 45 == 0:
            engine.set_version(num_steps)
        if num_steps % 50 == 0:
            engine.sleep(SleepLevel.KEEP_WEIGHTS)
            engine._cache.drop()  # as on a GPU
            engine.wake_weights()
            engine.wake_cache()
        if num_steps % 57 == 0:
            ended += engine.interrupt()
        for i, result in ended:
            found[i][0].extend(result.ids)
            found[i][1].extend(result.logprobs)
            if result.stop_reason == "abort":
                num_drawn = len(found[i][0])
                resumed = replace(
                    params[i], max_tokens=params[i].max_tokens - num_drawn, num_resumed=num_drawn
                )
                engine.add(i, [*prompts[i // 4], *found[i][0]], resumed)
    assert not found.pop(35)[0]
    del found[2]
    return found


@pytest.mark.parametrize("made", [PagedEngine, CapturingEngine])
def test_samples_are_those_of_slots_however_few_pages_there_are(
    made: type[EmbeddedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are equal, and log-probs but for rounding, though sequences run at other times."""
    longest, options = 160 // PAGE_TOKENS, {"max_running": 12}
    expected = outcomes(EmbeddedEngine(settings("qwen3"), options))
    page_bytes = 2 * 2 * 1 * PAGE_TOKENS * 16 * 4  # keys and values, layers, heads, tokens, size, fp32
    for num_pages in (None, 13, 1 + longest):
        size = {} if num_pages is None else {"cache_bytes": num_pages * page_bytes + 7}
        engine = made(settings("qwen3"), options | size)
        found = outcomes(engine)
        assert {i: tokens for i, (tokens, _) in found.items()} == {i: t for i, (t, _) in expected.items()}
        if num_pages is None and made is PagedEngine:
            assert found == expected, "bit for bit, where sequences run at the same times"
        for i, (_, logprobs) in found.items():
            torch.testing.assert_close(logprobs, expected[i][1], atol=1e-5, rtol=0)
        assert (engine.num_requeued > 0) == (num_pages is not None)
        assert isinstance(engine._cache, PagedCache)
        assert engine._cache._num_pages == (num_pages or 1 + 12 * longest)
        assert sorted(engine._cache._free) == list(range(1, engine._cache._num_pages))
    assert caplog.text.count("the KV cache is full") == 2


def test_captured_steps_survive_growth_and_other_sequences() -> None:
    """A graph is captured once for a number of rows, until memory is freed."""
    engine = CapturingEngine(settings("qwen3"), {"max_running": 4})
    for i in range(12):
        engine.add(i, [1, 5, 6 + i], SamplingParams(max_tokens=20 + 11 * i, seed=i))
    while engine.num_unfinished:
        engine.step()
    assert len(engine.captured_rows) == 1


def test_the_size_of_slots_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="cache_bytes has no effect on a CPU"):
        EmbeddedEngine(settings(), {"cache_bytes": 2**30})
