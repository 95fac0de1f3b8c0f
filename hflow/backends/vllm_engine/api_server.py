"""`VllmApiServer`: vLLM's own OpenAI-compatible server, in a process that ends with this one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from hflow.backends.hf_config import read_config
from hflow.backends.interface import EngineSetup
from hflow.backends.vllm_engine.cache_size import cache_bytes
from hflow.backends.vllm_engine.engine_process import exit_text, import_path, last_error
from hflow.backends.vllm_engine.memory import MEMORY_BUDGET, STEP_TOKENS
from hflow.backends.vllm_engine.messages import DTYPES
from hflow.errors import ConfigError, RunError

_MODULE = "hflow.backends.vllm_engine.api_server_process"
_CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Prompts are not divided, for the reason that `stepper` gives."""
_END_SECONDS = 20.0
"""Longest wait for the server to end by itself."""


class VllmApiServer:
    """vLLM's server as a child process.

    It has a process group of its own, so that it receives no Ctrl-C of the terminal, and so that all of vLLM
    can be killed at once.

    Args:
        setup: the model, and the limits of the engine.
        host: address to listen on.
        port: 0 for a free one.
        api_key: None: requests need no key.
    """

    def __init__(self, setup: EngineSetup, host: str, port: int, api_key: str | None) -> None:
        self._setup = setup
        self._host = host
        self._port = port
        self._api_key = api_key
        self._temporary = tempfile.TemporaryDirectory(prefix="hflow-vllm-")
        self._log = Path(self._temporary.name) / "log"
        self._process: subprocess.Popen[bytes]
        self._connection: socket.socket
        self._is_closing = False

    @property
    def port(self) -> int:
        """The port that the server listens on, once it was started."""
        return self._port

    def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: if the port is in use, or the host is not this machine's.
        """
        self._port = _free_port(self._host, self._port)
        self._connection, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), *self._arguments()],
                env={**os.environ, **import_path(), **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until requests can be sent, or until `close`.

        Raises:
            RunError: if the process ends before.
        """
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        while not self._is_closing:
            if self._process.poll() is not None:
                raise self._death()
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://{host}:{self._port}/health", timeout=5).close()
                return
            time.sleep(0.2)

    def wait(self) -> None:
        """Wait until `close`.

        Raises:
            RunError: if the process ends before.
        """
        self._process.wait()
        if not self._is_closing:
            raise self._death()

    def close(self) -> None:
        """End the process and all of its children. Safe to call twice."""
        self._is_closing = True
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and engines that outlived it
        self._process.wait()
        self._temporary.cleanup()

    def _death(self) -> RunError:
        reason = last_error(self._log)
        return RunError(
            f"vLLM's server {exit_text(self._process.returncode)}"
            + (f": {reason}" if reason else "; try --engine embedded")
        )

    def _arguments(self) -> list[str]:
        """Return the arguments of vLLM's server."""
        settings, setup = self._setup.settings, self._setup
        longest, max_running = setup.options["max_model_len"], setup.options["max_running"]
        arguments: dict[str, Any] = {
            "model": settings.path,
            "served-model-name": settings.name,
            "host": self._host,
            "port": self._port,
            "dtype": DTYPES[settings.dtype],
            "max-model-len": longest,
            "max-num-seqs": max_running,
            "tensor-parallel-size": setup.tensor,
            "generation-config": "vllm",
        }
        if settings.device == "cpu":
            config = read_config(settings)
            cache = cache_bytes(config, settings.dtype, max_running, longest, setup.tensor)
            arguments["kv-cache-memory-bytes"] = cache
            arguments["max-num-batched-tokens"] = max(STEP_TOKENS, max_running, longest)
        else:
            arguments["gpu-memory-utilization"] = MEMORY_BUDGET
        flags = ["--disable-uvicorn-access-log", *(_CPU_FLAGS if settings.device == "cpu" else ())]
        if setup.tokenizer is not None:
            # The tokenizer as hflow configured it, in a directory of its own, as beside a model's config it
            # may be loaded as another class.
            arguments["tokenizer"] = Path(self._temporary.name) / "tokenizer"
            setup.tokenizer.save(str(arguments["tokenizer"]))
            if setup.tokenizer.chat_template is not None:
                flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        named = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        return [*named, *flags]

    def _environment(self) -> dict[str, str]:
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if self._api_key is not None:
            variables["VLLM_API_KEY"] = self._api_key  # arguments can be read by all users of the machine
        if self._setup.settings.device == "cpu":
            variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return variables


def _free_port(host: str, port: int) -> int:
    """Return the port if it is free, and for 0 any free one.

    Raises:
        ConfigError: if it is not free, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}. Choose another port or "
                "host"
            ) from error
        return int(probe.getsockname()[1])
