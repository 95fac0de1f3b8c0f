"""Layers of Transformer Engine, with a stand-in for it: megatron's wrappers and hflow's code are real.

Outputs, gradients, weights and checkpoints are compared with transformers, training with the torch backend.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megatron_kit as kit
import megatron_twins as twins
import pytest
import ranks
import shard_cases
import te_cases as cases
import torch
from test_megatron_model import (  # the same tests, of other ranks
    test_exported_weights_equal_the_loaded_ones,
    test_gradients,
    test_megatron_counts_every_weight_once_in_norms,
    test_outputs,
    test_ranks_hold_blocks_of_the_weights,
    test_saved_models_load_in_transformers,
)

__all__ = [
    "test_exported_weights_equal_the_loaded_ones",
    "test_gradients",
    "test_megatron_counts_every_weight_once_in_norms",
    "test_outputs",
    "test_ranks_hold_blocks_of_the_weights",
    "test_saved_models_load_in_transformers",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("te")
    for case in kit.CASES.values():
        kit.write_checkpoint(case, path)
    twins.save_checkpoint(path / "checkpoint")
    ranks.start(cases.run, (str(path),), 4, is_fresh=True)
    return path


@pytest.mark.parametrize("name", cases.TWINS)
def test_training_equals_one_process_of_the_torch_backend(directory, name):
    twin = cases.TWINS[name]
    wanted = twins.expected(twin.node, twin.dtype, directory / "checkpoint")
    for rank in range(twin.num_ranks):
        metrics, weights = torch.load(directory / f"{name}.{rank}.pt", weights_only=False)
        if rank in twin.heads:
            for got, expected in zip(metrics, wanted.metrics, strict=True):
                assert twins.comparable(got) == pytest.approx(expected, rel=2e-5, abs=1e-6)
        assert weights.keys() == wanted.weights.keys()
        for key, tensor in wanted.weights.items():
            torch.testing.assert_close(weights[key], tensor, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("writer", "reader"), cases.PAIRS)
def test_sharded_checkpoints_go_between_kernels_and_backends(directory, writer, reader):
    name = shard_cases.read(cases.SIDES[writer], cases.SIDES[reader])
    wanted = twins.expected("experts", "fp32", directory / "checkpoint")
    metrics = torch.load(directory / f"{name}.metrics.pt", weights_only=False)
    assert twins.comparable(metrics) == pytest.approx(
        wanted.metrics[shard_cases.NUM_WRITTEN], rel=2e-5, abs=1e-6
    )
    weights = torch.load(directory / f"{name}.weights.pt")
    for tensor, values in wanted.weights.items():
        torch.testing.assert_close(weights[tensor], values, atol=1e-5, rtol=0)


def test_one_process():
    """The modules of a model, the slices that it sends, and doctor's comparison, also of wrong layers."""
    script = Path(cases.__file__).with_name("te_alone.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed, *findings = done.stdout.splitlines()
    assert installed == "installed TransformerEngine(version='2.10.0', mismatch='')"
    right, wrong, failing = (findings[i : i + 2] for i in (0, 2, 4))
    assert [line.split()[:2] for line in right] == [["layers", "True"], ["experts", "True"]]
    assert all("transformer-engine 2.10.0: logits and gradients differ" in line for line in right)
    assert [line.split()[:3] for line in wrong] == [["wrong", x, "False"] for x in ("layers", "experts")]
    assert failing == [
        f"failing {x} False transformer-engine 2.10.0: no kernel" for x in ("layers", "experts")
    ]


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
from hflow.training.megatron.device import prepare
from hflow.base.errors import HflowError
try:
    prepare("cpu")
except HflowError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "raise RuntimeError('Found empty `transformer-engine` meta package installed.')",
            "transformer-engine 2.10.0 cannot be imported with torch .*: Found empty `transformer-engine` "
            "meta .* Install a build for this torch, or uninstall transformer-engine",
        ),
        (
            "raise ImportError('undefined symbol: x\\nmore')",
            ".* cannot be imported with torch .*: undefined symbol: x",
        ),
        (
            "__version__ = '2.10.0'",
            "megatron-core .* cannot be imported with transformer-engine 2.10.0: cannot import name .* "
            "Install the versions that fit together",
        ),
    ],
)
def test_a_transformer_engine_that_does_not_fit_is_one_line(tmp_path, source, line):
    metadata = tmp_path / "transformer_engine-2.10.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.10.0\n")
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    (package / "pytorch" / "__init__.py").write_text("")
    (package / "pytorch" / "distributed.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (printed,) = done.stdout.splitlines()
    assert re.match(line, printed), printed
