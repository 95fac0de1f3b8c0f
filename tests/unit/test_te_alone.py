"""Layers of Transformer Engine in one process, with a stand-in for it, and installations that do not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import te_cases as cases

from hflow.types.kernels import Fp8Recipe


@pytest.mark.long
def test_one_process():
    """The modules of a model, the slices that it sends, and doctor's comparison, also of wrong layers."""
    script = Path(cases.__file__).with_name("te_alone.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed, *findings = done.stdout.splitlines()
    assert installed == "installed TransformerEngine(version='2.10.0', mismatch='')"
    assert findings[:6] == [f"fp8 {recipe} {node}" for node in cases.FP8_MODELS for recipe in Fp8Recipe]
    assert findings[6] == (
        "refused model 'actor': fp8 is tensorwise, which Transformer Engine does not compute here: Device is "
        "too old. Set another recipe, or models.actor.fp8=null"
    )
    parts, in_fp8 = ("layers", "experts"), [f" fp8={recipe}" for recipe in Fp8Recipe]
    right, wrong_fp8, wrong, failing = findings[7:15], findings[15:21], findings[21:23], findings[23:]
    names = [f"{part}{kind}" for kind in ("", *in_fp8) for part in parts]
    line = "transformer-engine 2.10.0: logits and gradients differ"
    assert all(got.startswith(f"{name} True {line}") for got, name in zip(right, names, strict=True))
    assert all(got.startswith(f"wrong {x} False {line}") for got, x in zip(wrong_fp8, names[2:], strict=True))
    assert all(got.startswith(f"wrong {part} False {line}") for got, part in zip(wrong, parts, strict=True))
    assert failing == [f"failing {part} False transformer-engine 2.10.0: no kernel" for part in parts]


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
        pytest.param(
            "raise RuntimeError('Found empty `transformer-engine` meta package installed.')",
            "transformer-engine 2.10.0 cannot be imported with torch .*: Found empty `transformer-engine` "
            "meta .* Install a build for this torch, or uninstall transformer-engine",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "raise ImportError('undefined symbol: x\\nmore')",
            ".* cannot be imported with torch .*: undefined symbol: x",
            marks=pytest.mark.long,
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
