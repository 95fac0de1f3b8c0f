"""Makes the pictures of pages beside this file.

    python docs/images/pages.py                    # plan.png
    python docs/images/pages.py grpo grpo_slow     # also report.png of the first run, compare.png of all

The plan is PPO on 8 x 8 H100: actor, critic and reference on one half, engines of the actor on the other. The
runs are those of recipes/grpo.py with workers=inproc, cluster=cpu-1x1, steps=100 and nodes.eval_gen.every=10,
the second also with name=grpo_slow and models.actor.optim.lr=5e-5.
"""

from __future__ import annotations

import shutil
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

from hflow import launch
from hflow.report.html.plan import render_page
from hflow.report.html.run import render_compare_page, render_run_page

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
WIDTH, HEIGHT = 1440, 1500
NUM_COLOURS = 256
"""Colours of a picture, so that its file is small."""


def main() -> None:
    """Write the pages, and take a picture of the upper part of each."""
    recipe = ROOT / "recipes" / "ppo.py"
    plan = launch.compile_recipe(recipe, list(OVERRIDES), with_limits=True).plan
    pages = {"plan": render_page(plan)}
    if runs := sys.argv[1:]:
        pages["report"] = render_run_page(launch.read_report(runs[0]))
        pages["compare"] = render_compare_page(launch.compare(runs))
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        for name, page in pages.items():
            file = Path(folder) / f"{name}.html"
            file.write_text(page, encoding="utf-8")
            window.goto(file.as_uri())
            picture = Image.open(BytesIO(window.screenshot())).convert("RGB")
            method = Image.Quantize.MAXCOVERAGE
            few_colours = picture.quantize(NUM_COLOURS, method, kmeans=2, dither=Image.Dither.NONE)
            few_colours.save(Path(__file__).with_name(f"{name}.png"), optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
