"""Memory of devices: what each holds in each phase of a step, and what to change when it does not fit."""

from hflow.plan.memory.check import check_memory
from hflow.plan.memory.defaults import default_layouts
from hflow.plan.memory.phases import memory_phases, unknown_models

__all__ = ["check_memory", "default_layouts", "memory_phases", "unknown_models"]
