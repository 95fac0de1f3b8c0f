"""Code that runs for each decode step or micro-batch waits for the device only where it says so."""

from pathlib import Path

import hot_loops
import pytest

PACKAGE = Path(__file__).parents[2] / "hflow"
COLD = {
    "algo": "__init__",
    "engines/embedded": "__init__ descriptor families memory module",
    "models": "__init__ device drawn_weights dtypes expert_tensors hf_config hub merged settings smollm2 "
    "weight_files",
    "training": "__init__ fsdp hf_files interface loop megatron optimizers sharded_checkpoint rank_groups",
    "training/fsdp": "__init__ build descriptor held_weights memory shards weight_export",
    "training/loop": "__init__",
    "training/megatron": "__init__ backend checkpoint_reader config cpu_shim descriptor device hf_export "
    "hf_mapping memory parallel_state shards supported_models weight_export",
    "weights": "__init__ channels rendezvous",
}
"""Modules that build, load, save and move models, or describe them."""


@pytest.mark.parametrize("name", hot_loops.HOT)
def test_hot_code_does_not_wait_for_the_device(name: str):
    functions, source = hot_loops.HOT[name], (PACKAGE / name).read_text()
    assert not hot_loops.missing_functions(source, functions or ())
    assert [f"{name}:{wait.line}: {wait.what}" for wait in hot_loops.find_waits(source, functions)] == []


def test_every_module_of_hot_packages_is_hot_or_cold():
    for package, cold in COLD.items():
        hot = {Path(name).stem for name in hot_loops.HOT if str(Path(name).parent) == package}
        names = {path.stem for path in (PACKAGE / package).iterdir() if path.name != "__pycache__"}
        assert names == hot | set(cold.split()), package
        assert not hot & set(cold.split())


WAITING = {
    "x.item()": ".item()",
    "x.sum().tolist()": ".tolist()",
    "x[0].cpu()": ".cpu()",
    "x.cuda()": ".cuda()",
    "x.numpy()": ".numpy()",
    "x.nonzero()": ".nonzero()",
    "torch.nonzero(x)": ".nonzero()",
    "torch.where(x > 0)": "torch.where() of one argument",
    "x.masked_select(y)": ".masked_select()",
    "x.unique()": ".unique()",
    "torch.cuda.synchronize()": ".synchronize()",
    "x.repeat_interleave(y)": "repeat_interleave() without output_size",
    "torch.tensor([1.0], device=device)": "torch.tensor() on a device",
    "torch.as_tensor(rows, device=x.device)": "torch.as_tensor() on a device",
    "torch.from_numpy(rows).to(device)": ".to(device) without non_blocking",
    "y.to(x.device)": ".to(device) without non_blocking",
    "y.to('cuda')": ".to(device) without non_blocking",
    "y.to(device=self.device, dtype=torch.int32)": ".to(device) without non_blocking",
    "y.to(device, non_blocking=False)": ".to(device) without non_blocking",
    "bool(x)": "bool() of what may be a tensor",
    "bool((x > 0).all())": "bool() of a tensor",
    "int(x.max()) + 1": "int() of a tensor",
    "float(x.norm())": "float() of a tensor",
    "[row for row in x if row.any()]": "a condition of row.any()",
    "1 if x.all() else 2": "a condition of x.all()",
}
"""An expression that may wait -> what the check says."""
HARMLESS = [
    "x.to(torch.int32)",
    "x.to('meta')",
    "x.pin_memory().to(device, non_blocking=True)",
    "torch.tensor([1.0])",
    "torch.full((), 1.0, device=device)",
    "torch.where(x > 0, x, y)",
    "x.repeat_interleave(num_shared, dim=1)",
    "x.repeat_interleave(y, output_size=7)",
    "np.unique(values).tolist()",
    "(np.flatnonzero(values) + 1).tolist()",
    "int(len(x))",
]


@pytest.mark.parametrize("expression", WAITING)
def test_each_kind_of_wait_is_found(expression: str):
    (wait,) = hot_loops.find_waits(f"import torch\n\ndef step(x):\n    y = {expression}\n")
    assert (wait.line, wait.what) == (4, WAITING[expression])
    for mark in ("waits: once per update", "host: numpy"):
        assert hot_loops.find_waits(f"def step(x):\n    y = {expression}  # {mark}\n") == []
        assert hot_loops.find_waits(f"def step(x):\n    # {mark}\n    y = {expression}\n") == []


@pytest.mark.parametrize("expression", HARMLESS)
def test_what_does_not_wait_is_not_found(expression: str):
    assert hot_loops.find_waits(f"def step(x):\n    y = {expression}\n") == []


@pytest.mark.parametrize("statement", ["if not x.any():", "while x.sum() > 0 and y:", "assert x.all()"])
def test_conditions_are_found(statement: str):
    body = "\n        pass" if statement.endswith(":") else ""
    (wait,) = hot_loops.find_waits(f"def step(x):\n    {statement}{body}\n")
    assert wait.what.startswith("a condition of x.")


def test_values_of_numpy_are_on_the_host():
    source = """
def step(lengths: npt.NDArray[np.int64], x: Tensor) -> None:
    starts, device = np.cumsum(lengths) - lengths, x.device
    moves = starts != lengths
    if moves.any():
        y = int(lengths[moves].max())
    moved = to_device(torch.from_numpy(starts), device)
    {}
"""
    assert hot_loops.find_waits(source.format("z = starts.tolist()")) == []
    for found in ("z = moved.tolist()", "z = x[lengths].tolist()", "z = (x * np.pi).tolist()"):
        assert [wait.line for wait in hot_loops.find_waits(source.format(found))] == [8]
    # A name that is anything else once counts as a tensor everywhere.
    assert len(hot_loops.find_waits(source.format("moves = x > 0"))) == 1


def test_marks_need_a_reason_and_a_wait():
    (wait,) = hot_loops.find_waits("def step(x):\n    return x.shape  # waits: once\n")
    assert wait.what == "nothing waits here, so remove the mark"
    whats = [wait.what for wait in hot_loops.find_waits("def step(x):\n    return x.item()  # waits\n")]
    assert whats == [".item()", "the mark has no reason"]
    assert hot_loops.find_waits('def step(x):\n    """# waits: once"""\n') == []


def test_only_hot_functions_are_read():
    source = "def build(x):\n    x.item()  # waits: once\n    x.cpu()\n\ndef step(x):\n    x.cpu()\n"
    assert [wait.line for wait in hot_loops.find_waits(source, ("step",))] == [6]
    assert hot_loops.missing_functions(source, ("step", "forward")) == {"forward"}
