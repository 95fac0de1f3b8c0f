"""`hflow serve`: an endpoint with the APIs of OpenAI and Anthropic on a checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from hflow.base.errors import ConfigError, DataError, RecipeError, RunError
from hflow.base.files import read_json_object
from hflow.base.waiting import print_waits
from hflow.config.schema import GenConfig
from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import ApiServer, EngineSetup, SamplingParams
from hflow.episodes.endpoint.conversations import check_stop_ids
from hflow.episodes.endpoint.replies import Reply, StreamedTurn, generated_ids, reply_of
from hflow.episodes.endpoint.requests import CompletionRequest, RequestRefused, TokenPrompt
from hflow.episodes.endpoint.server import EndpointServer, base_url
from hflow.episodes.episode_engine import EpisodeEngine, Prompt
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.episodes.trajectories import prompt_trajectory
from hflow.launch.checkpoints.served import ServedCheckpoint, find_checkpoint
from hflow.launch.running.stop_signals import stop_signals
from hflow.models.hf_config import max_length, read_config
from hflow.models.settings import ModelSettings
from hflow.planner.models.descriptors import EngineKind, engine_kind
from hflow.planner.plan.traits import ENGINES, traits
from hflow.sandboxes.providers import Sandboxes
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.types import Trajectory

_PROMPTS = ("Say hello.", "17+25=")
"""Prompts for the example; the first that the tokenizer can encode is used."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeOptions:
    """An endpoint's address and key."""

    host: str
    port: int
    api_key: str | None
    """None: requests need no key."""


@dataclass(frozen=True)
class ServedEndpoint:
    """An endpoint that is ready."""

    url: str
    model: str
    directory: Path
    engine: str
    why: str
    """Why this engine."""
    example: str
    """A shell command that completes something."""


def serve(
    target: str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    engine: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
    on_ready: Callable[[ServedEndpoint], None] = lambda endpoint: None,
) -> bool:
    """Serve a checkpoint with OpenAI's API until Ctrl-C, SIGTERM or SIGHUP.

    Args:
        target: a checkpoint directory, a run's directory, or NAME for the latest run in `runs/NAME`.
        overrides: keys of `models.NAME` as `key=value`, such as `gen.max_model_len=4096`.
        model: the model of a run; None: the only one that generates.
        engine: `embedded` or `vllm`; None: vLLM on CUDA where it is installed, else the embedded engine.
        host: address to listen on.
        port: 0 for a free one.
        api_key: key that requests need; None: none.
        report_progress: called with a line when the engine starts.
        on_ready: called when requests can be sent.

    Returns:
        Whether Ctrl-C ended it.

    Raises:
        ConfigError: if there is no checkpoint, the port is in use, or the engine cannot serve the model.
        BackendError: if the engine cannot be built.
        RunError: if the engine fails.
    """
    checkpoint = find_checkpoint(target, overrides, model)
    options = ServeOptions(host, port, api_key)
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine, why = _choose_engine(engine, device)
    tokenizer = TextTokenizer(checkpoint.tokenizer)
    settings = ModelSettings(
        name=checkpoint.name, path=str(checkpoint.directory), dtype=checkpoint.dtype, device=device
    )
    longest = max_length(read_config(settings))
    gen = checkpoint.config.gen
    setup = EngineSetup(
        settings,
        {**gen.engine_options, "max_model_len": min(gen.max_model_len, longest or gen.max_model_len)},
        tokenizer,
        tensor=_tensor_size(checkpoint, engine),
    )
    _check_served(setup, gen, engine)

    waiting = ExitStack()

    def ready(url: str) -> None:
        waiting.close()
        example = _example(url, checkpoint.name, tokenizer, options.api_key)
        on_ready(ServedEndpoint(url, checkpoint.name, checkpoint.directory, engine, why, example))

    if options.api_key is None and options.host not in _LOOPBACK:
        report_progress(
            f"every machine that reaches {options.host} may send requests; --api-key asks for a key"
        )
    report_progress(f"starting {engine} on {checkpoint.directory}")
    kind = engine_kind(engine)
    with waiting:
        waiting.enter_context(print_waits(report_progress)(f"{engine} to start"))
        if kind.server is not None:
            server = kind.server(setup, options.host, options.port, options.api_key)
            return _serve_by_own_server(server, options.host, ready)
        return asyncio.run(_serve_by_endpoint(kind, setup, tokenizer, options, ready))


class CheckpointResponder:
    """Completes requests with a model that is not being trained. Each request is on its own.

    `longest` is the most tokens of a sequence, and `on_failure` is called when the engine has failed.
    """

    def __init__(
        self,
        model: str,
        driver: EngineDriver,
        tokenizer: TextTokenizer,
        longest: int,
        on_failure: Callable[[RunError], None],
    ) -> None:
        self._model = model
        self._driver = driver
        self._tokenizer = tokenizer
        self._longest = longest
        self._on_failure = on_failure
        self._sandboxes = Sandboxes(1)
        self._numbers = itertools.count()

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    async def reply(self, request: CompletionRequest, turn: StreamedTurn | None = None) -> Reply:
        """Complete a request."""
        reply_id = str(next(self._numbers))
        if turn is not None:
            turn.reply_id = reply_id
        params = SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            max_tokens=self._longest,
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        effects = RecordedEffects(self._sandboxes)
        engine = EpisodeEngine(self._driver, self._tokenizer, params, seed, effects, self._model)
        check_stop_ids(request, engine.stop_ids)
        before = Trajectory((), (), (), ())
        prompt: Prompt = before
        if isinstance(request.prompt, TokenPrompt):
            prompt = before = prompt_trajectory(request.prompt.ids, ())
        else:
            prompt = request.prompt
        try:
            after = await engine.complete(
                prompt,
                tools=request.tools,
                max_tokens=request.max_tokens,
                stop=request.stop,
                on_part=None if turn is None else turn.add,
            )
        except RecipeError as error:
            raise RequestRefused(str(error), param="tools") from error
        except RunError as error:
            self._on_failure(error)
            raise
        ids = generated_ids(before, after)
        tokens = [engine.token_text(token) for token in ids]
        stop = engine.found_stop(ids, request.stop or ())
        return reply_of(reply_id, before, after, engine.text_before_calls(after), tokens, stop)


async def _serve_by_endpoint(
    kind: EngineKind,
    setup: EngineSetup,
    tokenizer: TextTokenizer,
    options: ServeOptions,
    ready: Callable[[str], None],
) -> bool:
    server = EndpointServer(options.host, options.port)
    failure: list[RunError] = []
    with _stopped_by_signals() as (stopped, received):

        def fail(error: RunError) -> None:
            failure.append(error)
            stopped.set()

        try:
            server.announce(options.api_key)
            await server.start()  # before the model is loaded, as the port may be in use
            engine = await asyncio.to_thread(kind.factory, setup)
            with closing(EngineDriver(engine)) as driver:
                longest = setup.options["max_model_len"]
                responder = CheckpointResponder(setup.settings.name, driver, tokenizer, longest, fail)
                async with server.admit_key(options.api_key, responder):
                    if not stopped.is_set():
                        ready(server.url)
                    await stopped.wait()
        finally:
            await server.close()
    if failure:
        raise failure[0]
    return signal.SIGINT in received


def _serve_by_own_server(server: ApiServer, host: str, ready: Callable[[str], None]) -> bool:
    async def serve() -> bool:
        with _stopped_by_signals() as (stopped, received):
            started = asyncio.create_task(asyncio.to_thread(server.wait_ready))
            stop = asyncio.create_task(stopped.wait())
            try:
                await asyncio.wait({started, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not stopped.is_set():
                    await started
                    ready(base_url(host, server.port))
                    ended = asyncio.create_task(asyncio.to_thread(server.wait))
                    await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if not stopped.is_set():
                        await ended
            finally:
                stop.cancel()
                await asyncio.to_thread(server.close)
        return signal.SIGINT in received

    server.start()
    return asyncio.run(serve())


@contextmanager
def _stopped_by_signals() -> Iterator[tuple[asyncio.Event, list[signal.Signals]]]:
    """Set an event at Ctrl-C, SIGTERM or SIGHUP; yields it and the signals that have come."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        stopped.set()

    signals = stop_signals()
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopped, received
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _choose_engine(wanted: str | None, device: str) -> tuple[str, str]:
    """Return the engine and why it was chosen.

    Raises:
        ConfigError: if the wanted engine is unknown or cannot run on this machine.
    """
    if wanted is not None:
        if wanted not in ENGINES:
            raise ConfigError(f"--engine is {wanted!r}; it must be {' or '.join(map(repr, ENGINES))}")
        problem = engine_kind(wanted).find_problem(device)
        if problem is not None:
            raise ConfigError(f"--engine {wanted}: {problem}")
        return wanted, "as configured"
    for kind in map(engine_kind, ENGINES):
        if device in kind.preferred_on:
            problem = kind.find_problem(device)
            if problem is not None:
                return ENGINES.default, str(problem)
            return kind.name, f"installed, {device.upper()}"
    return ENGINES.default, f"the device is {device}"


def _tensor_size(checkpoint: ServedCheckpoint, engine: str) -> int:
    """Return the number of tensor ranks: those of `gen.layout`, if the engine has such ranks."""
    layout = checkpoint.config.gen.layout
    tensor = 1 if layout is None else Layout.parse(layout).tensor
    return tensor if traits(engine).is_model_parallel else 1


def _check_served(setup: EngineSetup, gen: GenConfig, engine: str) -> None:
    """Check what an engine would only find out, at length, when it has started."""
    architecture = read_json_object(Path(str(setup.settings.path)) / "config.json")
    shape = read_shape(architecture, "lm")
    problem = None if shape is None else engine_kind(engine).find_unservable(shape, setup.settings.device)
    if problem is not None:
        raise ConfigError(f"{problem}; use --engine {ENGINES.default}")
    for key, asked in gen.precisions.items():
        if (key, asked) not in traits(engine).precisions:
            raise ConfigError(
                f"gen.{key} is {asked}, but the engine {engine} uses the model's dtype only; set "
                f"gen.{key}=null"
            )
        if setup.settings.dtype != "bf16":
            raise ConfigError(
                f"gen.{key} is {asked}, but the model is in {setup.settings.dtype}; set dtype=bf16 or "
                f"gen.{key}=null"
            )


def _example(url: str, model: str, tokenizer: TextTokenizer, api_key: str | None) -> str:
    """Return a curl command that works with this model."""
    prompt = next((prompt for prompt in _PROMPTS if _can_encode(tokenizer, prompt)), "")
    body: dict[str, Any] = {"model": model, "max_tokens": 16}
    if tokenizer.chat_template is not None:
        if _rendered(tokenizer, prompt).endswith("=="):
            prompt = prompt.removesuffix("=")  # the template appends it
        path, body["messages"] = "chat/completions", [{"role": "user", "content": prompt}]
    else:
        path, body["prompt"] = "completions", prompt
    headers = ["Content-Type: application/json"]
    if api_key is not None:
        headers.append(f"Authorization: Bearer {api_key}")
    words: Sequence[str] = [f"-H {shlex.quote(header)}" for header in headers]
    return f"curl {url}/{path} {' '.join(words)} -d {shlex.quote(json.dumps(body))}"


def _rendered(tokenizer: TextTokenizer, prompt: str) -> str:
    """Return the model's text of a user's `prompt`; empty if the tokenizer cannot encode it."""
    try:
        return tokenizer.decode_with_special(
            tokenizer.template().prompt([{"role": "user", "content": prompt}])
        )
    except DataError:
        return ""


def _can_encode(tokenizer: TextTokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except DataError:
        return False
    return True
