"""Memory of devices: what each holds in each phase of a step, and what to change when it does not fit."""

from hflow.planner.memory.default_layouts import default_layouts
from hflow.planner.memory.phases import memory_phases, unknown_models
from hflow.planner.memory.suggestions import check_memory

__all__ = ["check_memory", "default_layouts", "memory_phases", "unknown_models"]
