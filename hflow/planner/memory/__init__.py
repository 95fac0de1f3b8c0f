"""Memory of devices: what each holds in each phase of a step, and what to change when it does not fit.

`phases` adds up the items of a device. The formulas of training steps and engines are in the folders of their
backends (`hflow/backends/*/memory.py`); what these share is here: `rank`, `microbatch`, `activations`,
`engine_load`, `transfer`. `default_layouts` and `suggestions` search for a plan that fits.
"""

from hflow.planner.memory.default_layouts import ChosenLayout, default_layouts
from hflow.planner.memory.phases import engine_caches, memory_phases, unknown_models
from hflow.planner.memory.suggestions import check_memory

__all__ = [
    "ChosenLayout",
    "check_memory",
    "default_layouts",
    "engine_caches",
    "memory_phases",
    "unknown_models",
]
