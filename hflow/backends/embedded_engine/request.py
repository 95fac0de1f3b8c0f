"""`GenerationRequest`: one sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hflow.backends.interface import GenerationResult, SamplingParams


@dataclass(eq=False)
class GenerationRequest:
    """A prompt and what was drawn after it so far.

    `ids` is the prompt followed by the drawn tokens; `logprobs` and `versions` speak of the
    drawn tokens only.
    """

    request_id: int
    params: SamplingParams
    ids: list[int]
    num_prompt: int
    max_length: int
    """Tokens, prompt included, at which the request ends with `length`."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()

    def generated(self, stop_reason: str) -> GenerationResult:
        """What the request has drawn, as its owner receives it."""
        return GenerationResult(
            ids=tuple(self.ids[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
        )
