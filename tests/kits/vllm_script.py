"""Runs a stepper of vLLM through a script of calls, one after the other, in a process of its own.

    python -m vllm_script SCRIPT RESULT

Both are files. SCRIPT has a pickled tuple: the stepper's `ProcessSettings`, the pickled `IncomingWeights` of
each version, and a `Script`. RESULT gets the pickled results by request.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.process.stepper import Results, Stepper
from hflow.engines.request import new_request
from hflow.types.recorded import extend_recorded


@dataclass(frozen=True)
class Script:
    """What to call."""

    requests: list[tuple[list[int], SamplingParams]]
    calls: list[tuple[str, int]]
    """`step` N times; `load` the next version; `add` or `cancel` request N; `interrupt`, and add all again.
    Before them the first version is loaded, and after them all requests finish."""


class Runner:
    """Performs the calls of a script."""

    def __init__(self, settings: ProcessSettings, weights: list[bytes], script: Script) -> None:
        """Build the stepper."""
        assert settings.tokenizer is not None
        module, _, name = settings.stepper.partition(":")
        decode = TextTokenizer(settings.tokenizer).decode_answer
        self._stepper: Stepper = getattr(importlib.import_module(module), name)(settings, decode)
        self._script, self._weights, self._records = script, weights, settings.records
        self._decode, self._version = decode, 0
        self.results: dict[int, GenerationResult] = {}

    def run(self) -> None:
        """Perform all calls, then finish."""
        self.load(0)
        for name, argument in self._script.calls:
            getattr(self, name)(argument)
        while self._stepper.num_unfinished:
            self.step(1)

    def load(self, _: int) -> None:
        self._version += 1
        self._stepper.load_weights([self._weights[self._version - 1]], self._version)

    def add(self, number: int) -> None:
        prompt, params = self._script.requests[number]
        drawn = self.results.get(number)
        if drawn is not None:
            prompt = [*prompt, *drawn.ids]
            rest = params.max_tokens - len(drawn.ids)
            params = replace(params, max_tokens=rest, num_resumed=len(drawn.ids))
        request = new_request(number, prompt, params, 1000, 100, self._decode, self._records)
        self._stepper.add([request])

    def step(self, times: int) -> None:
        for _ in range(times):
            if self._stepper.num_unfinished:
                self._keep(self._stepper.step())

    def cancel(self, number: int) -> None:
        self._stepper.cancel([number])

    def interrupt(self, _: int) -> None:
        results = self._stepper.interrupt()
        assert self._stepper.num_unfinished == 0
        self._keep(results)
        for number, result in sorted(results):
            if result.stop_reason == "abort":
                self.add(number)

    def _keep(self, results: Results) -> None:
        for number, result in results:
            earlier = self.results.get(number)
            self.results[number] = result if earlier is None else joined(earlier, result)


def joined(earlier: GenerationResult, later: GenerationResult) -> GenerationResult:
    """Return both as one result."""
    if not earlier.ids:
        return later
    return GenerationResult(
        earlier.ids + later.ids,
        earlier.logprobs + later.logprobs,
        earlier.versions + later.versions,
        later.stop_reason,
        extend_recorded(earlier.recorded, later.recorded),
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    runner = Runner(*pickle.loads(source.read_bytes()))
    runner.run()
    target.write_bytes(pickle.dumps(runner.results))
