"""Decode steps on a GPU as CUDA graphs.

A decode step of a small model is hundreds of kernels of a few microseconds each, so its time is that of
launching them. A graph launches all of them at once. It has fixed shapes and fixed addresses: there is one
for each of a few numbers of rows, to which a step is filled up, and it is captured again when the memory of
the cache or the weights was freed. It finds pages by a table, so sequences may enter, grow and leave.

Axes: B decoding sequences, R rows of a graph (at least B), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.data.batches.device_copy import to_device
from hflow.engines.embedded.attention import PackedStep
from hflow.engines.embedded.cache import padded_length
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.memory import graph_rows
from hflow.engines.embedded.pages import PAGE_TOKENS, PageAttention, PagedCache

Ints = npt.NDArray[np.int64]

Replay = Callable[[], None]
"""Runs captured work again, on the tensors that it was captured with."""
Capture = Callable[[Callable[[], None]], Replay]
"""Captures the kernels that a function launches."""


@dataclass(frozen=True)
class _Graph:
    """A captured step."""

    inputs: Tensor
    """int64 `[2, R]`: the last token of each sequence, and its position."""
    hidden: Tensor
    """`[R, D]`, what the step computes."""
    replay: Replay


class DecodeGraphs:
    """Captured decode steps of one engine."""

    def __init__(
        self,
        decoder: DenseDecoder,
        cache: PagedCache,
        device: torch.device,
        max_running: int,
        max_length: int,
        capture: Capture,
    ) -> None:
        """Capture nothing yet: a graph is captured when it is first needed.

        Args:
            cache: the engine's cache, for `graph_rows(max_running)[-1]` sequences.
            capture: captures a step; of CUDA graphs it is `cuda_capture()`.
        """
        self._decoder, self._cache, self._device = decoder, cache, device
        self._rows = graph_rows(max_running)
        self._max_length = padded_length(max_length)
        """Rows of the rotary table, of the longest packed step, so that no step replaces what graphs read."""
        self._capture = capture
        self._graphs: dict[int, _Graph] = {}
        self._addresses: tuple[int, int] | None = None

    def drop(self) -> None:
        """Free the memory of graphs, which read a cache that is gone."""
        self._graphs.clear()

    def logits(self, last_ids: Ints, positions: Ints) -> Tensor:
        """Run a step, which stores its keys and values in the cache; return its logits, `[B, V]`.

        It takes the last token of each sequence, for which the cache has room, and its position: both `[B]`.
        """
        num = len(last_ids)
        rows = next(rows for rows in self._rows if rows >= num)
        inputs = np.zeros((2, rows), np.int64)
        inputs[0, :num], inputs[1, :num] = last_ids, positions
        table = self._cache.table[:rows]  # sends the pages of this step
        addresses = (self._cache.num_drops, self._decoder.address)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        filled = to_device(torch.from_numpy(inputs), self._device)
        if rows not in self._graphs:
            self._graphs[rows] = self._captured(filled, table)
        graph = self._graphs[rows]
        graph.inputs.copy_(filled)
        graph.replay()
        return self._decoder.head(graph.hidden[:num])

    def _captured(self, inputs: Tensor, table: Tensor) -> _Graph:
        rows = len(table)
        inputs = inputs.clone()
        hidden = self._decoder.new_hidden(rows)

        def run() -> None:
            positions = inputs[1]
            pages = table.gather(1, positions[:, None] // PAGE_TOKENS)[:, 0]
            step = PackedStep(
                cache=self._cache,
                num_decoding=rows,
                stored_blocks=pages.long(),
                stored_offsets=positions % PAGE_TOKENS,
                max_length=self._max_length,
                decoding=PageAttention(table, (positions + 1).int()),
            )
            hidden.copy_(self._decoder.hidden(inputs[0], inputs[1], step))

        run()  # what is allocated or compiled at the first call must be there before a capture
        return _Graph(inputs, hidden, self._capture(run))


def cuda_capture() -> Capture:
    """Return a function that captures CUDA graphs, which share their memory for intermediate results."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Replay:
        # cuBLAS allocates its workspace at the first product on a stream. This one cannot be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may allocate memory, or wait for events, meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return capture
