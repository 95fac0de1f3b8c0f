"""`VllmStepper`: vLLM's engine with hflow's requests, stepped by the loop of its process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from torch import Tensor
from typing_extensions import override
from vllm import envs
from vllm.config import CompilationMode, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine

from hflow.base.errors import BackendError
from hflow.engines.interface import DrawnTokens
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.process.stepper import Results, Stepper
from hflow.engines.request import Decode, GenerationRequest, stop_reason
from hflow.engines.vllm import rank
from hflow.engines.vllm.adapters import AdapterSizes, adapter_request
from hflow.engines.vllm.compile_turn import compile_turn
from hflow.engines.vllm.expert_rows import ExpertRows
from hflow.engines.vllm.images import ImageInputs
from hflow.engines.vllm.kept_rows import kept_entry, num_candidates
from hflow.engines.vllm.launch_options import buffers_of
from hflow.models.drawn_weights import drawn_weights
from hflow.models.dtypes import DTYPES
from hflow.models.expert_tensors import stacked_views
from hflow.models.hf_config import read_config, translate_errors
from hflow.models.seeds import request_seed
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.types.image import ProcessedImage
from hflow.types.routed_experts import ROUTED_EXPERTS, routing_format
from hflow.types.sampling_mask import SAMPLING_MASK
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import LoadedWeights

_LOG = init_logger(f"vllm.{__name__}")
"""A logger with vLLM's level and format, whose lines are in the engine's log."""


@dataclass(frozen=True)
class SeededWeights:
    """Random weights of a model that no trainer owns, as the embedded engine draws them.

    They are drawn when they are iterated, one at a time.
    """

    settings: ModelSettings

    def incoming(self) -> IncomingWeights:
        """Return them as what a rank receives. They can be pickled."""
        return IncomingWeights.of_tensors(self._tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = DTYPES[self.settings.dtype]
        with translate_errors(self.settings.name):
            config = read_config(self.settings)
            # Drawn as by the trainer: torch draws other numbers in bf16.
            drawn = ((name, x.to(dtype)) for name, x in drawn_weights(config, self.settings.seed))
            yield from stacked_views(config.model_type, drawn)


class VllmStepper(Stepper):
    """Serves the methods of `GenerationEngine` that need vLLM, in its process.

    vLLM schedules and samples. With asynchronous scheduling, a step is in flight while this process handles
    the tokens of the one before. It ends before weights change or requests are removed, so a token has the
    version of the weights that its step started with.

    There is one for each model on the weights. All have the same vLLM, whose steps are for all requests.
    """

    def __init__(self, settings: ProcessSettings, decode: Decode | None) -> None:
        """Build vLLM's engine, in this process and its ranks."""
        self._settings = settings
        config = engine_config(settings)
        with _compile_turn(config):
            self._engine = LLMEngine.from_vllm_config(
                config, disable_log_stats=settings.arguments["disable_log_stats"]
            )
        self._core = self._engine.engine_core
        self._num_ranks: int = settings.arguments["tensor_parallel_size"]
        self._tasks = self._engine.get_supported_tasks()
        self._adapter_requests = self._add_adapters() if _has_adapter_buffers(settings) else {}
        """Model with adapters beside the weights -> its name in requests."""
        self._expert_rows = self._read_expert_rows() if ROUTED_EXPERTS in settings.records else None
        self._vocab_size = int(config.model_config.get_vocab_size())
        self._counter = itertools.count()
        self._steppers: dict[str, VllmStepper] = {}
        """Model -> its stepper."""
        self._asleep: set[str] = set()
        """Models that sleep."""
        self._without_cache: set[str] = set()
        """Models that have slept and did not need the cache since."""
        self._start(settings.settings, decode)

    def _start(self, model: ModelSettings, decode: Decode | None) -> None:
        """Begin to serve one of the models."""
        self._model = model
        self._decode = decode
        self._steppers[model.name] = self
        self._request = self._adapter_requests.get(model.name)
        """The name of its adapters, if they are beside the weights."""
        self._inputs = ImageInputs(model)
        self._version = 0
        self._has_weights = self._settings.reads_checkpoint
        """Whether the weights are those of a version: those of a checkpoint, or what was loaded, until they
        are dropped."""
        self._requests: dict[str, GenerationRequest] = {}
        self._finished: Results = []
        """What steps finished that a change of weights waited for, until the next `step` returns it."""
        self._names: dict[int, str] = {}
        """Request id -> the name that vLLM knows it by, which it must not see twice."""

    @override
    def make_guest(self, settings: ModelSettings, decode: Decode | None) -> VllmStepper:
        guest = copy.copy(self)
        guest._start(settings, decode)
        return guest

    def _add_adapters(self) -> dict[str, LoRARequest]:
        """Register adapters of all models that have some; return the names in their requests."""
        models = (self._settings.settings, *(model for model, _ in self._settings.guests))
        adapters: list[tuple[LoRARequest, AdapterSizes]] = []
        for model in models:
            if model.lora is not None:
                _, targets = buffers_of(model)
                sizes = AdapterSizes(model.lora.r, targets)
                adapters.append((adapter_request(model.name, len(adapters)), sizes))
        self._engine.collective_rpc("hflow_add_adapters", args=(adapters,))
        return {request.lora_name: request for request, _ in adapters}

    @property
    @override
    def num_unfinished(self) -> int:
        return len(self._requests) + len(self._finished)

    @override
    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            name = str(next(self._counter))
            core_request = self._engine.input_processor.process_inputs(
                name,
                self._inputs.of(request),
                _sampling_params(request, self._vocab_size),
                self._tasks,
                lora_request=self._request,
            )
            self._core.add_request(core_request)
            self._requests[name] = request
            self._names[request.request_id] = name

    @override
    def keep_images(self, new: Sequence[ProcessedImage], forgotten: Sequence[str]) -> None:
        self._inputs.keep(new, forgotten)

    @override
    def cancel(self, request_ids: Sequence[int]) -> None:
        names = [self._names.pop(request_id) for request_id in request_ids if request_id in self._names]
        self._core.abort_requests(names)
        for name in names:
            del self._requests[name]

    @override
    def step(self) -> Results:
        """Draw one token for each request that vLLM schedules; return the finished requests.

        With asynchronous scheduling, these are the tokens of the step before, and the first step has none.

        Raises:
            BackendError: if log-probs are NaN, or vLLM gives a request up.
        """
        if not self._has_weights:
            raise BackendError(
                "the engine has no weights: it dropped them when it slept, or has loaded none; resume the "
                "run from its last checkpoint"
            )
        if self._requests:
            self._take_step()
        finished, self._finished = self._finished, []
        return finished

    @override
    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        names = {number: self._names[number] for number in starts if number in self._names}
        return {number: self._requests[name].drawn(starts[number]) for number, name in names.items()}

    @override
    def interrupt(self) -> Results:
        self._end_steps()
        self._core.abort_requests(list(self._requests))
        results, self._finished = self._finished, []
        results += [(request.request_id, request.result("abort")) for request in self._requests.values()]
        self._requests.clear()
        self._names.clear()
        return results

    @override
    def load_weights(self, incoming: Sequence[bytes], version: int) -> LoadedWeights:
        self._end_steps()
        self._has_weights = False
        outcomes = self._load_weights(incoming) if self._request is None else self._load_adapters(incoming)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        self._has_weights = True
        self._use(version)
        return LoadedWeights.of_ranks(outcome.loaded for outcome in outcomes if outcome.loaded is not None)

    def _load_weights(self, incoming: Sequence[bytes]) -> list[rank.Outcome]:
        """Let every rank replace its weights; adapters are merged into them."""
        self._engine.collective_rpc("start_weight_update")
        lora = self._model.lora
        of_adapters = {} if lora is None else {"scale": lora.scale, "rounds_base": lora.base is not None}
        updates = [{"incoming": data, **of_adapters} for data in incoming]
        self._engine.collective_rpc("update_weights", args=(updates,))
        self._engine.collective_rpc("finish_weight_update")
        outcomes: list[rank.Outcome] = self._engine.collective_rpc("hflow_outcome")
        return outcomes

    def _load_adapters(self, incoming: Sequence[bytes]) -> list[rank.Outcome]:
        """Let every rank replace the adapters beside its weights."""
        assert self._model.lora is not None
        outcomes: list[rank.Outcome] = self._engine.collective_rpc(
            "hflow_load_adapters", args=(self._model.name, list(incoming), self._model.lora.scale)
        )
        return outcomes

    @override
    def set_version(self, version: int) -> None:
        self._end_steps()
        if not self._has_weights and self._model.path is None:
            seeded = cloudpickle.dumps(SeededWeights(self._model).incoming())
            self.load_weights([seeded] * self._num_ranks, version)
        self._use(version)

    @override
    def sleep(self, level: SleepLevel) -> None:
        self._has_weights &= level is SleepLevel.KEEP_WEIGHTS
        self._asleep.add(self._model.name)
        self._without_cache.add(self._model.name)
        if self._settings.sleeps and len(self._asleep) == len(self._steppers):
            # The weights beside adapters stay the same.
            self._engine.sleep((SleepLevel.KEEP_WEIGHTS if self._adapter_requests else level).value)

    @override
    def wake_weights(self) -> None:
        if self._settings.sleeps and len(self._asleep) == len(self._steppers):
            self._engine.wake_up(["weights"])
        self._asleep.discard(self._model.name)

    @override
    def wake_cache(self) -> None:
        if self._settings.sleeps and len(self._without_cache) == len(self._steppers):
            self._engine.wake_up(["kv_cache"])
        self._without_cache.discard(self._model.name)

    def _use(self, version: int) -> None:
        """Drop all that older weights have computed."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        core: EngineCore = self._core.engine_core
        # Not by the engine's own method, which warns of requests that still use the outputs of the tower.
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
        self._engine.set_weight_version(str(version))
        self._version = version

    def _read_expert_rows(self) -> ExpertRows:
        """Return the format of the experts that vLLM returns for the model."""
        layers: list[list[int]] = self._engine.collective_rpc("hflow_expert_layers")
        config = self._engine.vllm_config.model_config
        per_token, num_experts = config.get_num_experts_per_tok(), config.get_num_experts()
        return ExpertRows(layers[0], per_token, routing_format(len(layers[0]), per_token, num_experts))

    def _take_step(self) -> None:
        """Append the tokens of a step to their requests, and keep the requests that end with it.

        With asynchronous scheduling, it starts a step, and takes the tokens of the one before.
        """
        surplus = list[str]()
        for output in self._core.get_output().outputs:  # each token of a run passes here
            for stepper in self._steppers.values():
                if output.request_id in stepper._requests:
                    stepper._take(output, surplus)
        self._core.abort_requests(surplus)

    def _take(self, output: EngineCoreOutput, surplus: list[str]) -> None:
        """Append the token of a step to its request; add the request to `surplus` if only hflow ends it."""
        request = self._requests[output.request_id]
        if output.new_token_ids:
            (token,) = output.new_token_ids
            logprobs = output.new_logprobs
            kept = kept_entry(logprobs, self._vocab_size) if SAMPLING_MASK in request.params.record else b""
            request.append(token, logprobs.logprobs.item(0), self._version, kept)
            if ROUTED_EXPERTS in request.params.record:
                self._record_experts(request, output.routed_experts)
        if output.finish_reason is None and not request.params.stop:
            return
        reason = stop_reason(request, self._decode) if output.new_token_ids else None
        if output.finish_reason is not None and reason is None:
            raise BackendError(f"vLLM ended a request with {output.finish_reason!s}")
        if reason is not None:
            self._finished.append((request.request_id, request.result(reason)))
            del self._requests[output.request_id], self._names[request.request_id]
            if output.finish_reason is None:
                surplus.append(output.request_id)

    def _end_steps(self) -> None:
        """Wait for steps in flight, and take their tokens. No other step starts meanwhile."""
        core: EngineCore = self._core.engine_core
        if core.batch_queue:
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.batch_queue:
                self._take_step()
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _record_experts(self, request: GenerationRequest, experts: Any) -> None:
        """Append the experts of the tokens that a step computed; the one that it drew is not computed yet."""
        assert self._expert_rows is not None, "the worker refuses requests that cannot be recorded"
        recorded = request.recorded.setdefault(ROUTED_EXPERTS, [])
        recorded += self._expert_rows.pack(experts, len(request.ids) - 1 - len(recorded))


def _compile_turn(config: VllmConfig) -> AbstractContextManager[None]:
    """Return the turn in which an engine that compiles is built; it has vLLM's key of its cache."""
    if config.compilation_config.mode in (None, CompilationMode.NONE):
        return nullcontext()
    return compile_turn(config.compute_hash(), Path(envs.VLLM_CACHE_ROOT) / "hflow", _LOG)


def engine_config(settings: ProcessSettings) -> VllmConfig:
    """Return the configuration of vLLM's engine, which vLLM has validated for the machine's devices."""
    resolve_obj_by_qualname(settings.arguments["worker_extension_cls"])  # imports it, as the ranks do
    arguments = EngineArgs(
        load_format="auto" if settings.reads_checkpoint else "dummy",
        skip_tokenizer_init=True,
        enable_sleep_mode=settings.sleeps,
        weight_transfer_config=_weight_transfer(settings),
        **settings.arguments,
    )
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if ROUTED_EXPERTS in settings.records:
        # vLLM refuses it with the first model runner, beside which `RecordingWorker` records on CPUs.
        config.aux_output_config.enable_return_routed_experts = True
    return config


def _weight_transfer(settings: ProcessSettings) -> WeightTransferConfig | None:
    """Return the loader of new weights; None where these stay the same, beside adapters."""
    if _has_adapter_buffers(settings):
        return None
    merges = settings.settings.lora is not None
    return WeightTransferConfig(backend=rank.ADAPTER_BACKEND if merges else rank.TRANSFER_BACKEND)


def _has_adapter_buffers(settings: ProcessSettings) -> bool:
    """Return whether adapters are beside the weights, and not merged."""
    return "enable_lora" in settings.arguments


def _sampling_params(request: GenerationRequest, vocab_size: int) -> VllmSamplingParams:
    params = request.params
    return VllmSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=request_seed(params.seed, request.num_prompt) if params.temperature else None,
        max_tokens=request.max_length - request.num_prompt,
        stop_token_ids=list(request.stop_ids),
        ignore_eos=True,
        logprobs=num_candidates(params.top_k, vocab_size) if SAMPLING_MASK in params.record else 0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
