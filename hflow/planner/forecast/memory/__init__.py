"""Memory of devices: what each holds in each phase of a step.

`phases` adds up the items of a device. The formulas of training steps and engines are in the folders of their
backends and engines (`memory.py` of each); what these share is here: `rank`, `microbatch`, `activations`,
`engine_load`, `transfer`, `offload`. `host` adds up what is in the memory of machines. `hflow.planner.search`
looks for a plan that fits.
"""

from hflow.planner.forecast.memory.capacity import MEMORY_MARGIN, check_memory, fullest_phase, margin_warnings
from hflow.planner.forecast.memory.host import (
    check_host_memory,
    host_memory,
    host_memory_warnings,
    pinning_seconds,
)
from hflow.planner.forecast.memory.phases import engine_caches, memory_phases, unknown_models
from hflow.planner.forecast.memory.zero_stage import check_zero_stages

__all__ = [
    "MEMORY_MARGIN",
    "check_host_memory",
    "check_memory",
    "check_zero_stages",
    "engine_caches",
    "fullest_phase",
    "host_memory",
    "host_memory_warnings",
    "margin_warnings",
    "memory_phases",
    "pinning_seconds",
    "unknown_models",
]
