"""`EmbeddedEngine`: continuous batching over a Hugging Face decoder, one packed forward a step.

At every step finished sequences leave and waiting ones enter. The last tokens of all running
sequences and the prompts that enter go through the model in one forward; prompts that are
equal and enter together are computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hflow.backends.embedded_engine.admission import PromptGroup, admit
from hflow.backends.embedded_engine.cache import KVCache, arrange, outgrows_band
from hflow.backends.embedded_engine.module import build_module, load_in_place
from hflow.backends.embedded_engine.options import EngineOptions
from hflow.backends.embedded_engine.packing import pack
from hflow.backends.embedded_engine.request import GenerationRequest
from hflow.backends.embedded_engine.sampling import SamplingRows, draw
from hflow.backends.interface import GenerationEngine, GenerationResult, ModelSettings, SamplingParams
from hflow.errors import BackendError

# -------------------- When a sequence ends.


Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4
"""Most tokens that one character can take: the bytes of its UTF-8 code."""


def stop_reason(request: GenerationRequest, decode: Decode | None) -> str | None:
    """`stop` or `length` when the token just drawn ends the request, else None."""
    if request.ids[-1] in request.stop_ids:
        return "stop"
    if request.params.stop and decode is not None and _ends_with_stop(request, decode):
        return "stop"
    return "length" if len(request.ids) >= request.max_length else None


def _ends_with_stop(request: GenerationRequest, decode: Decode) -> bool:
    """Whether a stop string is in the last drawn characters.

    Only as many tokens as the longest stop string can span are decoded; an earlier occurrence
    would have ended the request earlier.
    """
    stops = request.params.stop
    window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    first_drawn = request.num_prompt - request.params.num_resumed
    text = decode(request.ids[max(first_drawn, len(request.ids) - window) :])
    return any(stop in text for stop in stops)


class EmbeddedEngine(GenerationEngine):
    """One engine in this process, stepped by its owner (not thread-safe).

    A drawn token depends on its sequence, the weights and (seed, position) only: neither on
    the batch it was drawn in nor on when (up to rounding in the matrix products). Position
    counts from the sequence's first token, so that a request continued after an interruption
    goes on with the numbers that it would have had.

    Attributes:
        version: of the weights in use; every token drawn is stamped with it.
    """

    def __init__(
        self,
        settings: ModelSettings,
        options: Mapping[str, Any] | None = None,
        module: nn.Module | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Build the model.

        Args:
            settings: architecture or checkpoint, dtype and device.
            options: bounds of the engine, fields of `EngineOptions`.
            module: a trainer's module whose parameters the engine shares; its owner calls
                `set_version` after an update, and `load_weights` is refused.
            decode: ids to text; needed by requests with stop strings only.

        Raises:
            BackendError: when the model cannot be served.
            ConfigError: for an option that does not exist or a value that does not fit.
        """
        self.version = 0
        self._options = EngineOptions.of(options or {})
        self._decode = decode
        self._shares_weights = module is not None
        self._module = build_module(settings, module)
        self._device = next(self._module.parameters()).device
        self._is_accelerated = self._device.type != "cpu"
        self._dtype = next(self._module.parameters()).dtype
        config: Any = self._module.config
        self._vocab_size = int(config.vocab_size)
        self._num_layers = int(config.num_hidden_layers)
        self._max_length = min(self._options.max_model_len, int(config.max_position_embeddings))
        self._cache = KVCache(self._options.max_running)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[GenerationRequest] = []
        """Slot -> request."""
        self._rows: SamplingRows | None = None
        """Sampling parameters of the running; None when membership changed."""
        self._asleep = False
        self._probe(settings.name)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values allocated."""
        return self._cache.nbytes

    def add(self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            BackendError: when the prompt is empty, too long or holds unknown tokens, or when
                there are stop strings and the engine has nothing to decode with.
        """
        if not 0 < len(prompt_ids) < self._max_length:
            raise BackendError(
                f"a prompt has {len(prompt_ids)} tokens, the engine takes 1 to {self._max_length - 1}; "
                "shorten it or raise max_model_len"
            )
        if max(prompt_ids) >= self._vocab_size:
            raise BackendError(
                f"a prompt holds token {max(prompt_ids)}, the model's vocabulary has {self._vocab_size}; "
                "give the model its tokenizer's vocabulary size"
            )
        if params.stop and self._decode is None:
            raise BackendError("stop strings need an engine that was given a tokenizer's decode")
        self._waiting.append(
            GenerationRequest(
                request_id=request_id,
                params=params,
                ids=list(prompt_ids),
                num_prompt=len(prompt_ids),
                max_length=min(len(prompt_ids) + params.max_tokens, self._max_length),
                stop_ids=frozenset(params.stop_ids),
            )
        )

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Forget a request, wherever it is; nothing is returned for it."""
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self._arrange([slot for slot, r in enumerate(self._running) if r.request_id == request_id])

    @torch.inference_mode()
    def step(self) -> list[tuple[int, GenerationResult]]:
        """Admit what fits, draw one token for every running sequence; return the finished."""
        assert not self._asleep, "step() of a sleeping engine"
        free_slots = self._options.max_running - len(self._running)
        groups = admit(self._waiting, free_slots, self._options.max_tokens_per_step)
        if not self._running and not groups:
            return []
        logits = self._forward(groups)
        if groups:
            self._running.extend(member for group in groups for member in group.members)
            self._rows = None
        self._draw(logits)
        return self._finish(has_entered=bool(groups))

    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        """Abort everything and return what there is, the running in slot order, then the waiting."""
        unfinished = [*self._running, *self._waiting]
        self._running, self._rows = [], None
        self._waiting.clear()
        return [(request.request_id, request.generated("abort")) for request in unfinished]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in place; running sequences keep their tokens and are prefilled anew.

        Raises:
            BackendError: when names or shapes are not this model's, or the weights are shared.
        """
        if self._shares_weights:
            raise BackendError(
                "this engine shares its trainer's weights, which cannot be loaded; use set_version"
            )
        load_in_place(self._module, weights)
        self.set_version(version)

    def weights(self) -> Mapping[str, Tensor]:
        """The module's own tensors."""
        held: Mapping[str, Tensor] = self._module.state_dict()
        return held

    def set_version(self, version: int) -> None:
        """Declare that the weights have changed (the trainer's own, in sharing mode).

        What is cached is never read again, as whatever runs is prefilled anew.
        """
        self._requeue()
        self.version = version

    def sleep(self) -> None:
        """Leave an accelerator: free the cache, move weights of one's own to host memory.

        On a CPU both stay where they are, since fresh pages cost more than a short turn computes.
        """
        self._requeue()
        self._asleep = True
        if self._is_accelerated:
            self._cache.drop()
            if not self._shares_weights:
                self._module.to("cpu")

    def wake(self) -> None:
        """Bring the weights back; a cache that was freed grows again with the first step."""
        if self._is_accelerated:
            self._module.to(self._device)
        self._asleep = False

    def _forward(self, groups: Sequence[PromptGroup]) -> Tensor:
        """Logits `[S, V]` for the running sequences and the members of `groups`, in this order."""
        packed = pack(self._running, groups, self._cache, self._dtype, self._device)
        logits: Tensor = self._module(
            input_ids=packed.input_ids,
            position_ids=packed.positions,
            use_cache=False,
            logits_to_keep=packed.logit_rows,
            packed_step=packed.step,
        ).logits[0]
        if packed.sequence_logits is None:
            return logits[: len(self._running)]
        return logits[packed.sequence_logits]

    def _draw(self, logits: Tensor) -> None:
        """Append one token to every running request."""
        if self._rows is None:
            params = [request.params for request in self._running]
            self._rows = SamplingRows.of(params, logits.shape[1], self._device)
        positions = np.fromiter((len(r.ids) for r in self._running), np.int64, len(self._running))
        tokens, logprobs = draw(logits, self._rows, positions, self._forced()).tolist()
        for request, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            if logprob != logprob:
                raise BackendError(
                    "the model's logits are NaN; its weights have diverged, lower the learning rate"
                )
            request.ids.append(int(token))
            request.logprobs.append(logprob)
            request.versions.append(self.version)

    def _forced(self) -> Tensor | None:
        """The tokens that the running requests go on with, `[S]`; None: they are drawn."""
        return None

    def _finish(self, has_entered: bool) -> list[tuple[int, GenerationResult]]:
        """Take finished sequences out of their slots, and see to it that the others are arranged."""
        reasons = [stop_reason(request, self._decode) for request in self._running]
        left = [slot for slot, reason in enumerate(reasons) if reason is not None]
        finished = [
            (self._running[slot].request_id, self._running[slot].generated(str(reasons[slot])))
            for slot in left
        ]
        if left or has_entered or any(outgrows_band(len(request.ids)) for request in self._running):
            self._arrange(left)
        return finished

    def _arrange(self, left: Sequence[int]) -> None:
        """Free the slots of those that left, and arrange the others by their lengths."""
        gone = frozenset(left)
        slots = np.array([slot for slot in range(len(self._running)) if slot not in gone], np.int64)
        lengths = np.array([len(self._running[slot].ids) for slot in slots], np.int64)
        arranged = arrange(slots, lengths)
        moves = arranged != slots
        if moves.any():
            sources, targets = self._tensor(slots[moves]), self._tensor(arranged[moves])
            self._cache.move(sources, targets, int(lengths[moves].max()))
        if gone or moves.any():
            self._running = [self._running[slot] for slot in slots[np.argsort(arranged)]]
            self._rows = None

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _requeue(self) -> None:
        """Send the running back to the front of the queue, keeping their tokens."""
        self._waiting.extendleft(reversed(self._running))
        self._running, self._rows = [], None

    @torch.inference_mode()
    def _probe(self, name: str) -> None:
        """Run two tokens, so that an architecture that does not fit is refused here."""
        probe = GenerationRequest(-1, SamplingParams(), [0, 0], 2, 3)
        self._forward([PromptGroup((0, 0), (probe,))])
        num_seen = self._cache.num_layers
        if num_seen != self._num_layers:
            raise BackendError(
                f"model {name!r}: {num_seen} of {self._num_layers} layers of {type(self._module).__name__} "
                "have pluggable attention, the engine needs all; choose another architecture"
            )
        self._cache.drop()
