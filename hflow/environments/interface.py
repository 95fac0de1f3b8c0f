"""`Adapter`: what makes a node of environments that were written outside hflow.

To add one, write the node in `environments/NAME/adapter.py` and `environments/NAME/remote.py`, which the
other interpreter runs, and add one line to `ENVIRONMENTS`. `docs/environments.md` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.registry import Registry

ENVIRONMENTS = Registry(
    "environment",
    "hflow.environments",
    {
        "gymnasium": "hflow.environments.gymnasium.adapter:ADAPTER",
        "mcp": "hflow.environments.mcp.adapter:ADAPTER",
        "openenv": "hflow.environments.openenv.adapter:ADAPTER",
        "verifiers": "hflow.environments.verifiers.adapter:ADAPTER",
    },
)
"""The adapters. `nodes.NAME` is the node of the one with that name."""

COMMON_KNOBS = ("python", "requirements", "start_timeout")
"""Knobs of the nodes of all adapters, which `read_host_settings` reads."""

ATTRIBUTE = "__hflow_environment__"
"""The attribute of a node's body that holds its adapter."""


@dataclass(frozen=True)
class HostSettings:
    """A server of environments. Episodes with equal settings share it."""

    remote: str
    """The file that the other interpreter runs. It has a function `load`, see `Adapter`."""
    load: str
    """The arguments of `load`, as JSON."""
    packages: str
    """What pip installs where they are missing, for messages."""
    python: str | None = None
    """Path of the interpreter; None: this one's, or one with what `requirements` names."""
    requirements: str | None = None
    """A file of requirements, installed once on each machine."""
    start_timeout: float = field(default=300.0, compare=False)
    """Longest wait for the server to import the package and load its environments, in seconds."""
    starts_containers: bool = False
    """Whether it starts containers of Docker, with `hflow_host.CONTAINER_LABEL`, which its end removes."""

    def __post_init__(self) -> None:
        """Check the limit.

        Raises:
            ConfigError: if it is no time.
        """
        if not self.start_timeout > 0:
            raise ConfigError(f"start_timeout is {self.start_timeout}; set it to seconds, such as 300")


@dataclass(frozen=True)
class Adapter:
    """Environments of one package.

    `remote.py` runs in the other interpreter. Of hflow, its functions may import `hflow_host` only, which is
    `host.py`. Its `load(**arguments)` is called once in the server: it imports the package, refuses wrong
    arguments by an exception, and returns an object. Each episode calls `open(**arguments)` of that object in
    a process of its own, and then methods of what `open` returned. If the object has `one_process = True`,
    all episodes are tasks of the server's event loop instead, which suits environments that wait for a
    network. Arguments and results are JSON values.
    """

    name: str
    """The name in `ENVIRONMENTS`."""
    node: Callable[..., Any]
    """The body of a generate node."""
    host_settings: Callable[[Mapping[str, Any]], HostSettings]
    """Return the server that a node with these knobs needs.

    Raises:
        ConfigError: for wrong knobs.
    """

    def __post_init__(self) -> None:
        """Let `adapter_of` find it."""
        setattr(self.node, ATTRIBUTE, self)


def adapter_of(body: Callable[..., Any]) -> Adapter | None:
    """Return the adapter whose node has this body; None if there is none."""
    return getattr(body, ATTRIBUTE, None)


def adapter_named(name: str) -> Adapter:
    """Import and return an adapter.

    Raises:
        PlanError: for an unknown name, or when what another package adds cannot be imported.
    """
    return ENVIRONMENTS.describe(name, Adapter)


def read_host_settings(
    adapter_file: str, load: Mapping[str, Any], packages: str, knobs: Mapping[str, Any]
) -> HostSettings:
    """Return the server of an adapter whose node has the knobs `python`, `requirements` and `start_timeout`.

    Args:
        adapter_file: the adapter's `__file__`, which is beside its `remote.py`.
        load: the arguments of `load`, JSON values.
        packages: what pip installs where they are missing, for messages.
        knobs: the node's.

    Raises:
        ConfigError: for a wrong limit.
    """
    remote = str(Path(adapter_file).with_name("remote.py"))
    common = {name: knobs[name] for name in COMMON_KNOBS if name in knobs}
    return HostSettings(remote, json.dumps(load), packages, **common)


def json_object(text: str, knob: str) -> dict[str, Any]:
    """Return the JSON object in a knob.

    Raises:
        ConfigError: if it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{knob} is {text!r}, which is no JSON ({error}); write it as '{{\"a\": 1}}'"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{knob} is {text!r}; write a JSON object of arguments, as '{{\"a\": 1}}'")
    return value
