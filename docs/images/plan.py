"""Makes plan.png beside this file, the picture of a plan's page: `python docs/images/plan.py`.

PPO on 8 x 8 H100: actor, critic and reference on one half, engines of the actor on the other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from hflow import launch
from hflow.report.page import render_page

ROOT = Path(__file__).parents[2]
OVERRIDES = (
    "cluster=h100-8x8",
    "placement=actor=0-31:d8t4 actor.gen=32-63:d16t2 critic=0-31:d32 ref=0-31:d32",
    "model@models.actor=qwen2.5-7b",
    "models.actor.path=null",
    "models.actor.backend=megatron",
    "models.actor.gen.engine=vllm",
    "models.actor.activation_checkpointing=true",
    "models.critic.activation_checkpointing=true",
    "models.actor.gen.max_model_len=4096",
    "models.actor.gen.max_running=256",
    "nodes.actor_gen.max_tokens=2048",
    "nodes.eval_gen.max_tokens=2048",
    "workload.prompt=512",
    "workload.response_mean=800",
    "workload.response_cv=0.6",
    "batch=1024",
    "schedule.max_concurrent=4096",
    "schedule.max_staleness=1",
)
WIDTH, HEIGHT = 1440, 1542


def main() -> None:
    """Plan, render, and take the picture."""
    plan = launch.compile_recipe(ROOT / "recipes" / "ppo.py", list(OVERRIDES)).plan
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "plan.html"
        page.write_text(render_page(plan), encoding="utf-8")
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        window.goto(page.as_uri())
        window.screenshot(path=Path(__file__).with_suffix(".png"))
        browser.close()


if __name__ == "__main__":
    main()
