"""`EmbeddedEngine`: continuous batching over a Hugging Face decoder, with one packed forward per step.

At every step finished sequences leave and waiting ones enter. The last tokens of all running sequences and
the prompts of the entering ones go through the model in one forward. Equal prompts that enter together are
computed once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hflow.base.devices import has_cuda_api
from hflow.base.errors import BackendError, ConfigError, nearest
from hflow.engines.embedded.attention import PackedStep
from hflow.engines.embedded.cache import Ints, KVCache, SlotCache
from hflow.engines.embedded.decode_graphs import DecodeGraphs, cuda_capture
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.expert_recorder import ExpertRecorder
from hflow.engines.embedded.families import THROUGH_MODULES, own_forward_objection
from hflow.engines.embedded.memory import graph_rows
from hflow.engines.embedded.module import (
    CommonParameters,
    FreedParameters,
    build_module,
    changing_tensors,
    load_in_place,
)
from hflow.engines.embedded.packing import PromptGroup, admit, last_tokens, pack_step
from hflow.engines.embedded.pages import PAGE_TOKENS, PagedCache
from hflow.engines.embedded.sampling import SamplingRows, draw
from hflow.engines.embedded.step_images import StepImages
from hflow.engines.interface import DrawnTokens, GenerationEngine, GenerationResult, SamplingParams
from hflow.engines.request import Decode, GenerationRequest, new_request, stop_reason
from hflow.models.adapter import adapter_weights, base_parameters
from hflow.models.hf_config import family_of
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.types.image import PlacedImage
from hflow.types.sampling_mask import SAMPLING_MASK
from hflow.types.tensor_slices import whole_box
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import HeldBoxes, LoadedWeights, load_verified


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine. They change speed and memory, but not what is drawn."""

    max_running: int = 256
    """Maximum sequences that draw a token in one step; the others wait."""
    max_tokens_per_step: int = 8192
    """Maximum prompt tokens prefilled in one step. A longer prompt is prefilled alone."""
    max_model_len: int = 2048
    """Maximum tokens of a sequence, prompt included, if the model's `max_position_embeddings` is not
    smaller."""
    cache_bytes: int | None = None
    """Bytes of the KV cache on an accelerator, in which sequences that find no room wait. None: what
    `max_running` of the longest need, up to half of the memory that is free when the engine is built."""
    cuda_graphs: bool = True
    """Whether decode steps on a GPU are CUDA graphs, where their model can be captured."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """Read options from a mapping.

        Raises:
            ConfigError: if a name is unknown or a value is below 1.
        """
        names = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise ConfigError(f"the embedded engine has no option {name!r}{nearest(name, names)}")
            if name != "cuda_graphs" and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"engine option {name} is {value!r}; set an integer of at least 1")
        return cls(**options)


class EmbeddedEngine(GenerationEngine):
    """A generation engine in this process, stepped by its owner; not thread-safe.

    A drawn token depends only on its sequence, the weights and (seed, position), up to rounding in the matrix
    products: not on the other sequences of the batch, nor on time. Positions count from the sequence's first
    token, so a request that is resumed after an interruption draws with the same random numbers.

    Attributes:
        version: version of the weights in use, recorded with every drawn token.
        num_requeued: how often a running request had to wait because the cache had no page for it.
    """

    def __init__(
        self,
        settings: ModelSettings,
        options: Mapping[str, Any] | None = None,
        module: nn.Module | None = None,
        decode: Decode | None = None,
        base: EmbeddedEngine | None = None,
    ) -> None:
        """Build the model. `options` are fields of `EngineOptions`.

        Args:
            module: a trainer's module whose parameters the engine shares. Its owner calls `set_version` after
                an update; `load_weights` raises.
            decode: token ids to text, for requests with stop strings.
            base: an engine whose weights but adapters this one uses, if it shares none with a trainer.

        Raises:
            BackendError: if the engine does not support the model.
            ConfigError: if an option is unknown or has a wrong value, or the KV cache is too small.
        """
        self.version = self.num_requeued = 0
        self._options = EngineOptions.of(options or {})
        self._decode = decode
        self._shares_weights = module is not None
        self._module: nn.Module = build_module(settings, module, None if base is None else base._module)
        decoder = _find_decoder(settings, self._module)
        family = family_of(self._module.config)
        self._vision = None if family is None else StepImages(self._module, family)
        self._run_model: RunModel = _run_modules(self._module) if decoder is None else decoder.logits
        self._decoder = decoder
        self._recorder = ExpertRecorder(self._module)
        self._has_adapters = settings.lora is not None
        """Whether adapters change while the other weights stay, so that it keeps these when it sleeps."""
        self._device = next(self._module.parameters()).device
        self._is_accelerated = self._device.type != "cpu"
        self._dtype = next(self._module.parameters()).dtype
        whole: Any = self._module.config
        config = whole.get_text_config()
        self._vocab_size = int(config.vocab_size)
        self._num_layers = int(config.num_hidden_layers)
        self._max_length = min(self._options.max_model_len, int(config.max_position_embeddings))
        self._graphs: DecodeGraphs | None = None
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[GenerationRequest] = []
        """The requests that have room in the cache, by their numbers in it."""
        self._rows: SamplingRows | None = None
        """Sampling parameters of the running requests; None after these have changed."""
        self._asleep = False
        if base is None or self._shares_weights:
            base_weights = base_parameters(self._module).values()
            self._base = CommonParameters(() if self._shares_weights else base_weights)
        else:
            self._base = base._base
        self._base.use()
        """All weights but adapters."""
        self._freed: FreedParameters | None = None
        """The memory of its adapters, while it is free."""
        self._has_weights = True
        """False from the time that they are dropped until others are loaded."""
        self._cache: KVCache = self._new_cache(_PROBED_PAGES)
        self._probe(settings.name)
        self._cache = self._new_cache(self._num_pages(self._cache.nbytes // _PROBED_PAGES))
        self._graphs = None if decoder is None else self._decode_graphs(decoder)

    @property
    @override
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        """Number of requests that have room in the cache."""
        return len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        return self._cache.nbytes

    @override
    def add(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        request = new_request(
            request_id,
            prompt_ids,
            params,
            self._max_length,
            self._vocab_size,
            self._decode,
            (*self._recorder.kinds, SAMPLING_MASK),
            images,
        )
        self._waiting.append(request)

    @torch.inference_mode()
    @override
    def cancel(self, request_id: int) -> None:
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self._arrange([request.request_id == request_id for request in self._running])

    @torch.inference_mode()
    @override
    def step(self) -> list[tuple[int, GenerationResult]]:
        assert not self._asleep, "step() called while asleep"
        if not self._has_weights:
            raise BackendError(
                "the engine dropped its weights when it slept and has not loaded others, which is a bug in "
                "hflow; resume the run from its last checkpoint"
            )
        self._make_room()
        groups = admit(self._waiting, self._num_free_slots(), self._options.max_tokens_per_step, self._cache)
        if not self._running and not groups:
            return []
        logits = self._forward(groups)
        if groups:
            self._running.extend(member for group in groups for member in group.members)
            self._rows = None
            if self._vision is not None:
                self._vision.keep([*self._running, *self._waiting])
        self._draw(logits)
        return self._finish()

    @override
    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        streamed = [request for request in self._running if request.request_id in starts]
        return {request.request_id: request.drawn(starts[request.request_id]) for request in streamed}

    @override
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        self._requeue(0)
        unfinished = list(self._waiting)
        self._waiting.clear()
        return [(request.request_id, request.result("abort")) for request in unfinished]

    @override
    def load_weights(self, incoming: Sequence[IncomingWeights], version: int) -> LoadedWeights:
        if self._shares_weights:
            raise BackendError(
                "this engine shares its trainer's weights, so it cannot load others; call set_version"
            )
        (rank,) = incoming
        tensors = changing_tensors(self._module)

        def held(name: str) -> HeldBoxes:
            return [(whole_box(tuple(tensors[name].shape)), tensors[name])] if name in tensors else []

        loaded = load_verified(rank, lambda weights: load_in_place(self._module, weights), held)
        self._has_weights = True
        self.set_version(version)
        return loaded

    @override
    def set_version(self, version: int) -> None:
        self._requeue(0)
        self.version = version
        if self._decoder is not None:
            self._decoder.reset()
        if self._vision is not None:
            self._vision.keep(())

    @override
    def sleep(self, level: SleepLevel) -> None:
        """Free memory on an accelerator. On a CPU, allocating pages again costs more than a short turn."""
        self._requeue(0)
        self._asleep = True
        if self._decoder is not None:
            self._decoder.reset()
        keep = level is SleepLevel.KEEP_WEIGHTS
        self._has_weights &= keep or self._shares_weights
        if not self._is_accelerated:
            return
        self._cache.drop()
        if self._graphs is not None:
            self._graphs.drop()
        own = () if self._shares_weights else adapter_weights(self._module).values()
        self._freed = FreedParameters(own, keep or self._has_adapters)
        self._base.release(keep or self._has_adapters)

    @override
    def wake_weights(self) -> None:
        if self._freed is not None:
            self._freed.restore()
            self._freed = None
            self._base.use()

    @override
    def wake_cache(self) -> None:
        """Let `step` run. It allocates the cache when it needs it."""
        self._asleep = False

    @override
    def close(self) -> None:
        """Do nothing: the engine is in this process only."""

    @property
    def _has_pages(self) -> bool:
        """Whether the cache has pages. On a CPU they would be copied for each layer."""
        return self._is_accelerated

    def _new_cache(self, num_pages: int) -> KVCache:
        if not self._has_pages:
            return SlotCache(self._options.max_running)
        most = graph_rows(self._options.max_running)[-1]
        return PagedCache(num_pages, most, self._max_length, self._device)

    def _num_pages(self, page_bytes: int) -> int:
        """Return the number of pages of the cache: page 0, and those that sequences get. Slots are no pages.

        Raises:
            ConfigError: if they do not hold the longest sequence, or slots get a size.
        """
        num_bytes = self._options.cache_bytes
        if not self._has_pages:
            if num_bytes is not None:
                raise ConfigError("engine option cache_bytes has no effect on a CPU; remove it")
            return 0
        of_longest = -(-self._max_length // PAGE_TOKENS)
        if num_bytes is None:
            num_bytes = (1 + self._options.max_running * of_longest) * page_bytes
            if has_cuda_api(self._device.type):
                num_bytes = min(num_bytes, int(_FREE_SHARE * torch.cuda.mem_get_info(self._device)[0]))
        if num_bytes < (1 + of_longest) * page_bytes:
            raise ConfigError(
                f"the KV cache has {num_bytes} bytes, but a sequence of {self._max_length} tokens needs "
                f"{(1 + of_longest) * page_bytes}; set a smaller models.NAME.gen.max_model_len"
            )
        return num_bytes // page_bytes

    def _decode_graphs(self, decoder: DenseDecoder) -> DecodeGraphs | None:
        """Return the captured decode steps; None where kernels are not launched by a host."""
        has_graphs = self._options.cuda_graphs and has_cuda_api(self._device.type)
        if not has_graphs or not isinstance(self._cache, PagedCache):
            return None
        limits = self._options.max_running, self._max_length
        return DecodeGraphs(decoder, self._cache, self._device, *limits, cuda_capture())

    def _num_free_slots(self) -> int:
        """Return the number of sequences that may enter.

        Prompts are no part of a captured step and are launched one by one. So where more sequences wait than
        there are slots, one sixteenth of the slots has to be free before some enter together.
        """
        num_free = self._options.max_running - len(self._running)
        are_too_few = len(self._waiting) > num_free and num_free < self._options.max_running // _SLOTS_SHARE
        return 0 if self._graphs is not None and are_too_few else num_free

    def _forward(self, groups: Sequence[PromptGroup]) -> Tensor:
        """Return logits `[S, V]` for the running sequences and the members of `groups`, in this order."""
        if self._graphs is None:
            return self._forward_packed(self._running, groups)
        logits = [self._graphs.logits(*last_tokens(self._running))] if self._running else []
        if groups:
            logits.append(self._forward_packed((), groups))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _forward_packed(self, decoding: Sequence[GenerationRequest], groups: Sequence[PromptGroup]) -> Tensor:
        """Return logits of all running sequences, or of none, and of the members of `groups`."""
        if self._decoder is not None and decoding:
            self._decoder.count_decode()
        packed = pack_step(decoding, groups, self._cache, self._dtype, self._device, len(self._running))
        with self._recorder.recording(decoding, groups):
            if self._vision is not None:
                logits = self._vision.logits(packed, decoding, groups)
            else:
                logits = self._run_model(packed.input_ids, packed.positions, packed.logit_rows, packed.step)
        if packed.sequence_logits is None:
            return logits[: len(decoding)]
        return logits[packed.sequence_logits]

    def _draw(self, logits: Tensor) -> None:
        """Append one token to every running request."""
        if self._rows is None:
            params = [request.params for request in self._running]
            self._rows = SamplingRows.of(params, logits.shape[1], self._device)
        drawn = draw(logits, self._rows, self._lengths(), self._forced_tokens())
        tokens, logprobs = drawn.values.tolist()  # host: drawn tokens are copied together
        for request, token, logprob, kept in zip(self._running, tokens, logprobs, drawn.kept, strict=True):
            request.append(int(token), logprob, self.version, kept)

    def _forced_tokens(self) -> Tensor | None:
        """Return tokens `[S]` to use in place of drawn ones; None to draw. A replay overrides it."""
        return None

    def _finish(self) -> list[tuple[int, GenerationResult]]:
        """Remove and return finished sequences."""
        reasons = [stop_reason(request, self._decode) for request in self._running]
        finished = [
            (request.request_id, request.result(reason))
            for request, reason in zip(self._running, reasons, strict=True)
            if reason is not None
        ]
        self._arrange([reason is not None for reason in reasons])
        return finished

    def _arrange(self, is_gone: Sequence[bool]) -> None:
        """Let running sequences leave the cache, which may number the others anew."""
        kept = np.flatnonzero(np.logical_not(is_gone))
        order = self._cache.arrange(kept, self._lengths()[kept])
        if not np.array_equal(order, np.arange(len(self._running))):
            self._running = [self._running[number] for number in order]
            self._rows = None if self._rows is None else self._rows.take(order)

    def _make_room(self) -> None:
        """Make room for the last token of each running request, and requeue those that find none."""
        num_kept = self._cache.grow(self._lengths()) if self._running else 0
        if num_kept < len(self._running) and not self.num_requeued:
            _LOG.warning(
                "the KV cache is full: the sequences that entered last wait, and compute their tokens again; "
                "a smaller models.NAME.gen.max_running avoids that"
            )
        self.num_requeued += len(self._running) - num_kept
        self._requeue(num_kept)

    def _lengths(self) -> Ints:
        """Return the tokens of each running sequence."""
        return np.fromiter((len(request.ids) for request in self._running), np.int64, len(self._running))

    def _requeue(self, first: int) -> None:
        """Move running requests, from number `first` on, to the front of the queue, with their tokens."""
        requeued = self._running[first:]
        if requeued:
            self._cache.leave(first)
            self._waiting.extendleft(reversed(requeued))
            self._running, self._rows = self._running[:first], None

    @torch.inference_mode()
    def _probe(self, name: str) -> None:
        """Check the architecture by running two tokens.

        Raises:
            BackendError: if not every layer uses the engine's attention.
        """
        probe = GenerationRequest(-1, SamplingParams(), [0, 0], num_prompt=2, max_length=3)
        self._forward(admit(deque([probe]), 1, len(probe.ids), self._cache))
        num_pluggable = self._cache.num_layers
        if num_pluggable != self._num_layers:
            raise BackendError(
                f"model {name!r}: {num_pluggable} of {self._num_layers} layers of "
                f"{type(self._module).__name__} have pluggable attention, but the engine needs all; "
                "choose another architecture"
            )


RunModel = Callable[[Tensor, Tensor, Tensor, PackedStep], Tensor]
"""Makes logits `[len(logit_rows), V]` of input ids `[R]`, positions `[R]`, logit rows and a step."""

_PROBED_PAGES = 2
"""Pages with which the engine finds out how many bytes a page has."""
_FREE_SHARE = 0.5
"""Part of the free memory that the KV cache takes at most where no plan knows what else needs memory."""
_SLOTS_SHARE = 16
"""Waiting sequences enter when one of so many slots is free."""
_LOG = logging.getLogger(__name__)


def _find_decoder(settings: ModelSettings, module: nn.Module) -> DenseDecoder | None:
    """Return hflow's own forward pass of a module; None, and log it, if it has none."""
    config: Any = module.config
    objection = own_forward_objection(config.to_dict(), settings.lora is not None)
    if objection is None:
        return DenseDecoder(module)
    _LOG.warning("engine of %s: %s: %s", settings.name, THROUGH_MODULES, objection)
    return None


def _run_modules(module: nn.Module) -> RunModel:
    """Return the forward pass of transformers."""

    def run(input_ids: Tensor, positions: Tensor, logit_rows: Tensor, step: PackedStep) -> Tensor:
        logits: Tensor = module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            packed_step=step,
        ).logits[0]
        return logits

    return run
