"""Starts the ranks of a test quickly: their imports happen once, in a server that is then forked."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["megatron_twin_ranks", "peft"]
"""What ranks import: the first imports torch, transformers and megatron."""


def start(
    function: Callable[..., None], args: tuple[Any, ...], num_ranks: int, *, is_fresh: bool = False
) -> None:
    """Run `function(rank, *args)` in `num_ranks` processes; return when all have succeeded.

    The server that forks them is this process's only one. Fresh processes have imported nothing before.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        mp.start_processes(function, args, num_ranks, start_method="spawn" if is_fresh else "forkserver")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
