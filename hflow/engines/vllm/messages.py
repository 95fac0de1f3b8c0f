"""What a worker and the process of its vLLM engine send each other. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hflow.data.text.tokenizer import TokenizerSettings
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.models.settings import ModelSettings


@dataclass(frozen=True)
class ProcessSettings:
    """What the process builds its engine from; the first message that it receives."""

    settings: ModelSettings
    arguments: Mapping[str, Any]
    """Of vLLM's engine (`launch_options.engine_arguments`)."""
    temporary: str
    """The worker's temporary directory for the engine, removed when the worker has ended."""
    tokenizer: TokenizerSettings | None
    cores: tuple[int, ...]
    """Processor cores of all tensor ranks; empty: those of the worker."""
    reads_checkpoint: bool
    """Whether the engine starts with the weights of a checkpoint; otherwise it has none before others are
    loaded."""
    sleeps: bool
    """Whether vLLM frees its device memory while the engine sleeps."""
    records_experts: bool
    """Whether vLLM returns the experts of tokens."""


class EngineCall(NamedTuple):
    """A method of `engine_main.EngineLoop` to call. Calls are performed in the order of their sending."""

    method: str
    arguments: tuple[Any, ...]
    has_reply: bool
    """Whether the process answers with a `EngineReply`."""


class AddedRequest(NamedTuple):
    """A request for the engine, as in `GenerationEngine.add`."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class EngineReply(NamedTuple):
    """The answer to a call."""

    value: Any = None
    error: Exception | None = None
    """The `HflowError` that the call raised. The process continues."""


class FinishedRequests(NamedTuple):
    """Requests that have finished."""

    results: list[tuple[int, GenerationResult]]


class EngineFailed(NamedTuple):
    """The last message of a process that cannot continue."""

    error: Exception
    """A `HflowError`."""
