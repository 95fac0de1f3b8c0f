"""What machines of two kinds gain over equal ones of about the same price, by the plans of both.

    python -m benchmarks.planner.unequal

GRPO that generates at most two steps ahead, 256 prompts with 8 responses of 8,000 tokens on average, and one
model of each size that AReaL-Hex reports (Yan et al. 2025, "AReaL-Hex: Accommodating Asynchronous RL Training
over Heterogeneous GPUs", arXiv:2511.00796): up to 1.50 times the throughput of equal GPUs for the same
budget, with H800 for training and H20 for generation. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from pathlib import Path

from hflow.launch.planning.compile import compile_recipe
from hflow.planner.forecast.figures import PlanFigures, plan_figures

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_async.py"
MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b")
EQUAL = ("h800-4x8", "h20-8x8")
UNEQUAL = ("h800-1x8+h20-6x8", "h800-2x8+h20-4x8", "h800-3x8+h20-2x8")
SETTINGS = (
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    "models.actor.gen.max_model_len=32768",
    "nodes.actor_gen.max_tokens=27648",
    "workload.prompt=1024",
    "workload.response_mean=8000",
    "workload.response_cv=0.9",
    "schedule.max_staleness=2",
    "batch=256",
    "placement=auto",
    "schedule.max_concurrent=null",
)


def figures(model: str, cluster: str) -> PlanFigures:
    """The figures of the plan of a model on a cluster."""
    settings = (f"cluster={cluster}", f"model@models.actor={model}", *SETTINGS)
    return plan_figures(compile_recipe(RECIPE, settings).plan)


def main() -> None:
    """Print samples for a dollar of every cluster, beside the best equal one."""
    for model in MODELS:
        rows = {cluster: figures(model, cluster) for cluster in (*EQUAL, *UNEQUAL)}
        a_dollar = {
            cluster: 3600 * (row.samples_per_second or 0.0) / (row.dollars_per_hour or 1.0)
            for cluster, row in rows.items()
        }
        best = max(a_dollar[cluster] for cluster in EQUAL)
        for cluster, row in rows.items():
            print(
                f"{model:13} {cluster:18} {row.dollars_per_hour:6.1f} dollars an hour  "
                f"{row.seconds_per_step:7.1f} s a step  {a_dollar[cluster]:6.0f} samples a dollar  "
                f"{a_dollar[cluster] / best:5.2f}"
            )


if __name__ == "__main__":
    main()
