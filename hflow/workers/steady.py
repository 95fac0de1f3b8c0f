"""Keeps Python's garbage collector from walking through the libraries in every step."""

import gc

THRESHOLDS = (20_000, 20, 50)
"""Objects that are made before the collector looks at the young ones, and how often it then looks at older
ones. A controller holds some hundred thousand objects of samples in flight, which it lets go without the
collector's help; at Python's own thresholds all were visited several times a step, 0.1 s each time."""


def forget_garbage() -> None:
    """Take everything that exists now out of the collector's sight, and let it look at the rest less often.

    Episodes allocate enough for several full collections a step, each of which would visit the half
    a million objects of torch and transformers: more time than the episodes themselves take.
    """
    gc.unfreeze()  # what an earlier run in this process left
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
