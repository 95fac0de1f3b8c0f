"""The Ray cluster under a run: started if there is none, one bundle of resources a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hflow.errors import RunError
from hflow.planner.ir import ClusterSpec

PLACEMENT_SECONDS = 60.0
"""Longest wait for the resources of a run."""


@dataclass(frozen=True)
class Reservation:
    """Resources for every device of the plan's cluster."""

    bundles: PlacementGroup
    order: tuple[int, ...]
    """Worker -> its bundle, so that neighbouring workers share a machine, as the plan assumes."""
    num_cpus: int
    """CPUs of one worker; Ray sets OMP_NUM_THREADS to it."""
    num_gpus: int
    owns_ray: bool
    """Whether this run started Ray."""

    def options(self, worker: int, environment: Mapping[str, str]) -> dict[str, object]:
        """Actor options that put a worker onto its bundle, with environment variables of its own."""
        bundle = self.order[worker]
        strategy = PlacementGroupSchedulingStrategy(self.bundles, placement_group_bundle_index=bundle)
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "scheduling_strategy": strategy,
            **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
        }

    def free(self) -> None:
        """Give the resources back, and stop Ray if this run started it."""
        if not self.owns_ray:
            remove_placement_group(self.bundles)
        else:
            ray.shutdown()


def reserve(cluster: ClusterSpec) -> Reservation:
    """Connect to Ray, or start it on this machine, and reserve a bundle for every device.

    Raises:
        RunError: when the Ray cluster is too small.
    """
    owns_ray = not ray.is_initialized()
    num_gpus = int(cluster.device == "cuda")
    if owns_ray:
        _start(cluster)
    num_cpus = max(1, int(ray.available_resources().get("CPU", 0)) // cluster.num_devices)
    bundle = {"CPU": float(num_cpus), **({"GPU": 1.0} if num_gpus else {})}
    bundles = placement_group([bundle] * cluster.num_devices, strategy="PACK")
    if not bundles.wait(PLACEMENT_SECONDS):
        have = {name: ray.cluster_resources().get(name, 0) for name in bundle}
        raise RunError(
            f"Ray cannot hold {cluster.num_devices} workers with {bundle} each, it has {have} in all; "
            "use a smaller cluster, or free what other runs hold"
        )
    machines = placement_group_table(bundles)["bundles_to_node_id"]
    return Reservation(bundles, by_machine(machines), num_cpus, num_gpus, owns_ray)


def by_machine(machines: Mapping[int, str]) -> tuple[int, ...]:
    """Bundles machine after machine, given where Ray put each of them, which it does in any order."""
    found = list(dict.fromkeys(machines[bundle] for bundle in sorted(machines)))
    return tuple(sorted(machines, key=lambda bundle: (found.index(machines[bundle]), bundle)))


def _start(cluster: ClusterSpec) -> None:
    """Start Ray here, with at least a CPU for every worker, however few cores there are."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if cluster.num_nodes > 1:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        return
    ray.init(
        num_cpus=max(cluster.num_devices, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
