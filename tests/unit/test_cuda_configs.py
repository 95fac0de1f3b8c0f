"""vLLM's choices for GPUs that are in the repository are those of the recipes and models that it ships."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = max((ROOT / "benchmarks" / "results").glob("*-cuda-configs.json"))


def test_every_shipped_setup_and_model_was_validated():
    """`make cuda-configs` writes the file."""
    rows = json.loads(RESULTS.read_text())
    script = runpy.run_path(str(ROOT / "requirements" / "cuda_configs.py"))
    of_models = {row["case"].partition(", ")[0] for row in rows if ", " in row["case"]}
    of_setups = {row["case"] for row in rows if ", " not in row["case"]}
    assert of_models == {name for name, *_ in script["models"]()}
    assert of_setups == {str(case) for case in script["cases"]()}
    assert [row for row in rows if "error" in row] == []
