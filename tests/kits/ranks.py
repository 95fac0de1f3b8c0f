"""Starts the ranks of a test quickly: their imports happen once, in a server that is then forked."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def start(function: Callable[..., None], args: tuple[Any, ...], num_ranks: int, preload: str) -> None:
    """Run `function(rank, *args)` in `num_ranks` processes; return when all have succeeded.

    Args:
        function: of a module that is cheap to import.
        args: what follows the rank.
        num_ranks: how many processes.
        preload: the module that the ranks need, of this folder. The server that forks them is this
            process's only one: the first module asked for is the one that it has.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        mp.start_processes(function, args, num_ranks, start_method="forkserver")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
