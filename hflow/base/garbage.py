"""How often this process's garbage is collected."""

from __future__ import annotations

import gc

GC_THRESHOLDS = (20_000, 20, 50)
"""Arguments of `gc.set_threshold`. A controller holds some 100,000 objects of samples in flight, which are
freed without the collector's help. At Python's own thresholds the collector visits all of them several times
a step, for 0.1 s each time."""


_has_run = False
"""Whether a run has begun in this process."""


def freeze_imports() -> None:
    """Exclude what is imported, which is never garbage, from garbage collection, and let it run less often.

    Torch and transformers are a million objects: to visit them once takes half a second.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def freeze_gc() -> None:
    """Exclude all existing objects but garbage from garbage collection, and let it run less often.

    Episodes allocate enough for several full collections a step. Each would visit all that is imported, which
    takes more time than the episodes themselves.
    """
    global _has_run
    if _has_run:
        gc.unfreeze()  # objects of an earlier run
    _has_run = True
    gc.collect()
    freeze_imports()
