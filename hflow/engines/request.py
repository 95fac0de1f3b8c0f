"""A request of a generation engine: what it has drawn, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hflow.base.errors import BackendError
from hflow.engines.interface import DrawnTokens, GenerationResult, SamplingParams
from hflow.types.engine import find_sampling_problem
from hflow.types.image import PlacedImage
from hflow.types.recorded import recorded_kind
from hflow.types.sampling_mask import SAMPLING_MASK

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4
"""Maximum tokens of one character: the bytes of its UTF-8 code."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt and the tokens drawn after it so far.

    `ids` is the prompt followed by the drawn tokens. `logprobs` and `versions` have entries for drawn tokens
    only, `recorded` has what is asked for of the first of `ids`, those that were computed or drawn, by kind.
    """

    request_id: int
    params: SamplingParams
    ids: list[int]
    num_prompt: int
    max_length: int
    """Number of tokens, prompt included, at which the request ends with `length`."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    recorded: dict[str, list[bytes]] = field(default_factory=dict)
    stop_ids: frozenset[int] = frozenset()
    images: tuple[PlacedImage, ...] = ()
    """The images of the prompt."""

    def append(self, token: int, logprob: float, version: int, kept: bytes = b"") -> None:
        """Append a token, drawn by weights of a version; `kept` is its entry of `sampling_mask`, if recorded.

        Raises:
            BackendError: if its log-prob is NaN.
        """
        if logprob != logprob:
            raise BackendError(
                "the model's logits are NaN, so its weights have diverged; lower the learning rate"
            )
        if SAMPLING_MASK in self.params.record:
            entries = self.recorded.setdefault(SAMPLING_MASK, [])
            entries += [b""] * (len(self.ids) - len(entries))
            entries.append(kept)
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def drawn(self, start: int) -> DrawnTokens:
        """Return the drawn tokens without the first ones."""
        return DrawnTokens(tuple(self.ids[self.num_prompt + start :]), tuple(self.logprobs[start:]))

    def result(self, stop_reason: str) -> GenerationResult:
        """Return the request's result."""
        return GenerationResult(
            ids=tuple(self.ids[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
            recorded={name: tuple(rows) for name, rows in self.recorded.items()},
        )


def new_request(
    request_id: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_length: int,
    vocab_size: int,
    decode: Decode | None,
    records: Collection[str] = (),
    images: Sequence[PlacedImage] = (),
) -> GenerationRequest:
    """Return a request of an engine that can serve it.

    Args:
        max_length: maximum tokens of a sequence, prompt included.
        records: the kinds that the engine records (`RecordedKind`).

    Raises:
        BackendError: if the prompt is empty, too long or has unknown tokens, if no token can be drawn with
            the parameters, if there are stop strings and the engine has no `decode`, or if it does not record
            what is asked for.
    """
    if not 0 < len(prompt_ids) < max_length:
        raise BackendError(
            f"a prompt has {len(prompt_ids)} tokens, but the engine takes 1 to {max_length - 1}; "
            "shorten it, or raise models.NAME.gen.max_model_len"
        )
    if max(prompt_ids) >= vocab_size:
        raise BackendError(
            f"a prompt holds token {max(prompt_ids)}, but the model's vocabulary has {vocab_size}; "
            "set the model's vocab_size to its tokenizer's"
        )
    if (
        found := find_sampling_problem(params.temperature, params.top_p, params.top_k, params.min_p)
    ) is not None:
        raise BackendError(found[1])
    if "" in params.stop:
        raise BackendError("a stop string is empty, which would end every completion at once; remove it")
    if params.stop and decode is None:
        raise BackendError("stop strings need an engine with a tokenizer; pass decode=")
    for name in params.record:
        if name not in records:
            raise BackendError(
                f"{recorded_kind(name).option} is set, but the engine does not record {name} of its model; "
                "remove it"
            )
    return GenerationRequest(
        request_id=request_id,
        params=params,
        ids=list(prompt_ids),
        num_prompt=len(prompt_ids),
        max_length=min(len(prompt_ids) + params.max_tokens, max_length),
        stop_ids=frozenset(params.stop_ids),
        images=tuple(images),
    )


def stop_reason(request: GenerationRequest, decode: Decode | None) -> str | None:
    """Return `stop` or `length` if the token just drawn ends the request, else None."""
    if request.ids[-1] in request.stop_ids:
        return "stop"
    if request.params.stop and decode is not None and _ends_with_stop(request, decode):
        return "stop"
    return "length" if len(request.ids) >= request.max_length else None


def _ends_with_stop(request: GenerationRequest, decode: Decode) -> bool:
    """Return whether a stop string is in the last drawn characters.

    Only as many tokens as the longest stop string can span are decoded. An earlier occurrence would have
    ended the request earlier.
    """
    stops = request.params.stop
    window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    first_drawn = request.num_prompt - request.params.num_resumed
    text = decode(request.ids[max(first_drawn, len(request.ids) - window) :])
    return any(stop in text for stop in stops)
