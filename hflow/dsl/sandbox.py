"""`@sandbox`: run the calls of a tool in processes that can do no harm."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from hflow.dsl.options import Option
from hflow.graph.errors import caller_location, recipe_error
from hflow.types.sandbox import ATTRIBUTE, SANDBOX_PROVIDERS, Sandbox, provider_problem

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {
    "timeout": Option("float", 10.0, minimum=0.001),
    "memory_mb": Option("int", 512, minimum=16),
    "processes": Option("bool", False),
    "readable": Option("tuple[str, ...]", ()),
    "without_landlock": Option("bool", False),
    "provider": Option("str", SANDBOX_PROVIDERS.default),
    "image": Option("str", ""),
}


def sandbox(
    *,
    timeout: float = 10.0,
    memory_mb: int = 512,
    processes: bool = False,
    readable: Sequence[str] = (),
    without_landlock: bool = False,
    provider: str = SANDBOX_PROVIDERS.default,
    image: str = "",
) -> Callable[[Function], Function]:
    """Decorate a tool so that `engine.call` runs each call in a sandbox.

    The function itself is returned unchanged; a direct call runs it in the caller's process. A call has no
    network and no environment variables. It reads Python, installed packages and system libraries, and
    writes to a directory of its own, which is its working directory and is removed after it.

    Args:
        timeout: seconds that one call may take. Waiting for a processor does not count.
        memory_mb: address space in MiB that each process of a call may use, and the size of a file.
        processes: whether a call may start processes.
        readable: further files and directories that a call may read.
        without_landlock: whether calls may run on a kernel without Landlock, where they can read and write
            all files of the user. Otherwise such a kernel is an error.
        provider: what runs the calls. `process` runs each in a confined process of this machine; others run
            it elsewhere (docs/security.md).
        image: the image of a call's container or machine, if the provider has images. Its Python must have
            this one's minor version. Default: the provider's own.

    Raises:
        RecipeError: if a limit has a wrong type or is out of bounds, or there is no such provider.
    """
    where = caller_location()
    given = {
        "timeout": timeout,
        "memory_mb": memory_mb,
        "processes": processes,
        "readable": readable,
        "without_landlock": without_landlock,
        "provider": provider,
        "image": image,
    }
    limits = {}
    for name, value in given.items():
        try:
            limits[name] = _OPTIONS[name].check(value)
        except ValueError as error:
            raise recipe_error(where, "sandbox", f"{name} is {error}") from error
    if (problem := provider_problem(provider)) is not None:
        raise recipe_error(where, "sandbox", problem)
    limits["readable"] = tuple(map(os.path.abspath, limits["readable"]))

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, asdict(Sandbox(**limits)))
        return function

    return decorate
