"""`VllmApiServer`: vLLM's own OpenAI-compatible server, in a process that ends with this one."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress

from typing_extensions import override

from hflow.base.errors import ConfigError, RecipeError
from hflow.data.text.tool_formats.registry import tool_format
from hflow.engines.interface import ApiServer, EngineSetup
from hflow.engines.vllm.launch_options import command_line, engine_arguments, environment
from hflow.engines.vllm.vision_options import model_overrides
from hflow.processes.child import ChildProcess

_MODULE = "hflow.engines.vllm.api_server_main"


class VllmApiServer(ApiServer):
    """vLLM's server as a child process, on a free port if `port` is 0; without `api_key` it needs none."""

    def __init__(self, setup: EngineSetup, host: str, port: int, api_key: str | None) -> None:
        self._setup = setup
        self._host = host
        self._port = port
        self._api_key = api_key
        self._process = ChildProcess("vLLM's server", _MODULE, "try --engine embedded")
        self._is_closing = False

    @property
    @override
    def port(self) -> int:
        return self._port

    @override
    def start(self) -> None:
        self._port = _free_port(self._host, self._port)
        variables = environment(self._setup)
        if self._api_key is not None:
            variables["VLLM_API_KEY"] = self._api_key  # arguments can be read by all users of the machine
        self._process.start(variables, self._arguments())

    @override
    def wait_ready(self) -> None:
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        while not self._is_closing:
            if self._process.has_ended:
                raise self._process.exit_error()
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://{host}:{self._port}/health", timeout=5).close()
                return
            time.sleep(0.2)

    @override
    def wait(self) -> None:
        self._process.wait()
        if not self._is_closing:
            raise self._process.exit_error()

    @override
    def close(self) -> None:
        self._is_closing = True
        self._process.close()

    def _arguments(self) -> list[str]:
        """Return the arguments of vLLM's server."""
        settings, tokenizer = self._setup.settings, self._setup.tokenizer
        arguments = engine_arguments(self._setup, str(settings.path), self._setup.options["max_model_len"])
        arguments |= model_overrides(self._setup)
        arguments |= {"served_model_name": settings.name, "host": self._host, "port": self._port}
        arguments["disable_uvicorn_access_log"] = True
        if tokenizer is not None:
            # The tokenizer as hflow configured it, in a directory of its own, as beside a model's config it
            # may be loaded as another class.
            arguments["tokenizer"] = self._process.directory / "tokenizer"
            tokenizer.save_for_server(arguments["tokenizer"])
            arguments["generation_config"] = arguments["tokenizer"]
            if tokenizer.chat_template is not None:
                with suppress(RecipeError):  # without a parser, the server refuses requests with tools
                    parser = tool_format(None, tokenizer.template_text).server_parser
                    arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
            if tokenizer.settings.template_kwargs:
                arguments["default_chat_template_kwargs"] = json.dumps(
                    dict(tokenizer.settings.template_kwargs)
                )
        return command_line(arguments)


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
