"""Names on the Hugging Face Hub, of models and of datasets, and a client that logs no error twice."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

DATASET_PREFIX = "hf:"
"""Prefix of a path that names a dataset of the Hub, as in `hf:openai/gsm8k/main`."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that never changes."""


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Keep libraries from logging what their errors say again, such as every attempt to connect."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
