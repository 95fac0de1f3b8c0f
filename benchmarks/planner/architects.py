"""Plans for clusters that an architect would ask about, beside published recipes for the same models.

    python -m benchmarks.planner.architects [CASE ...]

A published recipe is planned with its placement, layouts, backend and recomputation; micro-batches and what
it leaves open are the planner's best for it. Both columns of seconds are estimates, for a machine with
megatron, Transformer Engine and vLLM. Other numbers of devices than the source's are scaled by data ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.base.errors import PlanError
from hflow.base.text import format_seconds
from hflow.graph.ir import Graph
from hflow.launch.planning.compile import free_keys
from hflow.launch.planning.read_recipe import RecipeReader
from hflow.launch.planning.request import plan_request
from hflow.planner.plan.request import PlanRequest
from hflow.planner.search import SearchResult, search
from hflow.runtime.simulation.simulate_plan import simulated_period
from hflow.types.kernels import TransformerEngine

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRANSFORMER_ENGINE = TransformerEngine("2.9", "")


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a load, with what is published for it."""

    recipe: str
    cluster: str
    model: str
    load: Mapping[str, object]
    """Settings of both plans."""
    source: str
    published: Mapping[str, object]
    """Settings of the published recipe."""


def lengths(prompt: int, response: int, mean: int) -> dict[str, object]:
    """Return the settings of prompts and responses."""
    return {
        "workload.prompt": prompt,
        "workload.response_mean": mean,
        "workload.response_cv": 0.6,
        "nodes.actor_gen.max_tokens": response,
        "models.actor.gen.max_model_len": prompt + response,
    }


def backends(name: str, *models: str) -> dict[str, object]:
    """Return the settings of a backend of some models."""
    return {f"models.{model}.backend": name for model in models}


VERL, NEMO, OPENRLHF = "verl", "NeMo-RL", "OpenRLHF"
CASES = {
    "PPO 7B on 64": Case(
        "ppo",
        "h100-8x8",
        "qwen2.5-7b",
        {"batch": 1024, **lengths(512, 512, 256)},
        f"{VERL} examples/ppo_trainer/run_qwen2-7b_megatron.sh (16 GPUs)",
        {
            "placement": "actor,critic,ref=all:d4t4p4 actor.gen=all:d16t4",
            "models.actor.activation_checkpointing": True,
            "models.critic.activation_checkpointing": True,
            **backends("megatron", "actor", "critic", "ref"),
        },
    ),
    "GRPO 32B on 128": Case(
        "grpo",
        "h800-16x8",
        "qwen2.5-32b",
        {"batch": 512, **lengths(2048, 20480, 6000)},
        f"{VERL} recipe/dapo/run_dapo_qwen2.5_32b.sh",
        {
            "placement": "actor=all:d128 actor.gen=all:d32t4",
            "models.actor.activation_checkpointing": True,
            "models.actor.offload": "all",
            **backends("torch", "actor"),
        },
    ),
    "PPO 70B on 512": Case(
        "ppo",
        "h100-64x8",
        "llama-3.1-70b",
        {"batch": 1024, **lengths(1024, 1024, 512)},
        f"{OPENRLHF} examples/scripts/train_ppo_llama_ray_70b.sh (16 GPUs, without its reward model)",
        {
            "placement": "actor=0-127:d128 critic=128-255:d128 ref=256-383:d128 actor.gen=384-511:d64t2",
            "models.actor.activation_checkpointing": True,
            "models.critic.activation_checkpointing": True,
            **backends("torch", "actor", "critic", "ref"),
        },
    ),
    "GRPO 30B-A3B on 32": Case(
        "grpo",
        "h100-4x8",
        "qwen3-30b-a3b",
        {"batch": 256, **lengths(512, 3584, 1500)},
        f"{NEMO} examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml",
        {"placement": "actor=all:d32e8 actor.gen=all:d16t2", **backends("megatron", "actor")},
    ),
    "GRPO 235B on 256": Case(
        "grpo",
        "h100-32x8",
        "qwen3-235b-a22b",
        {"batch": 64, **lengths(1024, 7168, 3000)},
        f"{NEMO} examples/configs/recipes/llm/performance/grpo-qwen3-235b-32n8g.yaml",
        {
            "placement": "actor=all:d8t2p8c2e16 actor.gen=all:d16t16",
            "models.actor.activation_checkpointing": True,
            **backends("megatron", "actor"),
        },
    ),
    "PPO 0.5B on one 24 GB": Case(
        "ppo",
        "rtx-4090-1x1",
        "qwen2.5-0.5b",
        {"batch": 8, **lengths(1024, 1024, 400)},
        f"{VERL} examples/ppo_trainer/run_qwen2.5-0.5b.sh",
        {
            "placement": "actor,critic,ref,actor.gen=all",
            "models.actor.activation_checkpointing": True,
            **backends("torch", "actor", "critic", "ref"),
        },
    ),
    "GRPO DeepSeek-V3 on 256": Case(
        "grpo",
        "h100-32x8",
        "deepseek-v3",
        {"batch": 64, **lengths(512, 1024, 600), **backends("megatron", "actor")},
        f"{NEMO} examples/configs/recipes/llm/performance/grpo-deepseek-v3-32n8g.yaml",
        {
            "placement": "actor=all:d16p16e16 actor.gen=all",
            "models.actor.activation_checkpointing": True,
        },
    ),
    "GRPO 7B on 3x8": Case(
        "grpo",
        "h100-3x8",
        "qwen2.5-7b",
        {"batch": 192, **lengths(512, 1024, 400)},
        f"{VERL} examples/grpo_trainer/run_qwen2-7b_seq_balance.sh (8 GPUs)",
        {
            "placement": "actor=all:d24 actor.gen=all:d12t2",
            "models.actor.activation_checkpointing": True,
            **backends("torch", "actor"),
        },
    ),
    "GRPO 7B on 5x6": Case(
        "grpo",
        "a100-80g-5x6",
        "qwen2.5-7b",
        {"batch": 240, **lengths(512, 1024, 400)},
        f"{VERL} examples/grpo_trainer/run_qwen2-7b_seq_balance.sh (8 GPUs)",
        {
            "placement": "actor=all:d30 actor.gen=all:d15t2",
            "models.actor.activation_checkpointing": True,
            **backends("torch", "actor"),
        },
    ),
    "GRPO 14B on unequal": Case(
        "grpo",
        "h800-2x8+h20-4x8",
        "qwen2.5-14b",
        {"batch": 256, "schedule.max_staleness": 2, **lengths(1024, 27648, 8000)},
        "AReaL-Hex (arXiv:2511.00796): H800 for training, H20 for generation; layouts are the planner's",
        {"placement": "actor=0-15 actor.gen=16-47"},
    ),
}


def problem(case: Case, settings: Mapping[str, object]) -> tuple[Graph, PlanRequest]:
    """Return the graph and request of a case with some settings; what these leave open is free."""
    given = {
        "cluster": case.cluster,
        "models.actor.path": "null",
        "models.actor.dtype": "bf16",
        "models.actor.gen.engine": "vllm",
        "schedule.max_concurrent": "null",
        **case.load,
        **settings,
    }
    keys = [f"model@models.actor={case.model}"]
    for key, value in given.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        keys.append(f"{key}='{shown}'" if key == "placement" else f"++{key}={shown}")
    file = RECIPES / f"{case.recipe}.py"
    read = RecipeReader(file).read(keys)
    request = plan_request(read.config, read.graph, file)
    request = replace(request, backend_problems={}, transformer_engine=TRANSFORMER_ENGINE)
    free = free_keys(read.config, read.set_keys, read.graph, request)
    return read.graph, replace(request, free=free)


def planned(case: Case, settings: Mapping[str, object]) -> tuple[SearchResult | str, float]:
    """Return the plan of a case, or why there is none, and the processor seconds of its search."""
    start = time.process_time()
    try:
        found: SearchResult | str = search(*problem(case, settings), simulate=simulated_period)
    except PlanError as error:
        found = str(error)
    return found, time.process_time() - start


def main() -> None:
    """Print a row for each case."""
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        (ours, seconds), (theirs, _) = planned(case, {}), planned(case, case.published)
        print(f"### {name} ({case.cluster}, {case.model})\n\n{case.source}, planned in {seconds:.1f} s\n")
        for title, found in (("planner", ours), ("published", theirs)):
            if isinstance(found, str):
                print(f"- {title}: {found}")
                continue
            chosen = {k: v for k, v in found.overrides.items() if k != "placement"}
            settings = " ".join(f"{key}={value}" for key, value in sorted(chosen.items()))
            candidate = found.candidates[0]
            print(f"- {title}: {format_seconds(found.seconds)}, `{candidate.placement}` `{settings}`")
            print(f"  {found.backend} {'; '.join(found.warnings)}")
        print(flush=True)


if __name__ == "__main__":
    main()
