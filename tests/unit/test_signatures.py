"""Calls of packages that do not run here, or only with a cluster, fit the parameters of their functions."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "kits" / "te_stand_in" / "transformer_engine" / "pytorch" / "module.py"
PACKAGES: dict[str, dict[str, list[str]]] = json.loads(
    (ROOT / "tests" / "fixtures" / "signatures.json").read_text()
)
FLASH = {name: of["flash_attn_varlen_func"] for name, of in PACKAGES.items() if name.startswith("flash-attn")}
(TE,) = (functions for name, functions in PACKAGES.items() if name.startswith("transformer-engine"))


def calls(tree: ast.AST, functions: set[str]) -> Iterator[ast.Call]:
    """Yield the calls of functions by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
            yield node


@pytest.mark.parametrize("names", FLASH.values(), ids=FLASH.keys())
def test_flash_attn_takes_what_its_kernel_is_called_with(names: list[str]) -> None:
    """The seven tensors and lengths are positional: q, k, v, two of `cumulative` and two of `longest`."""
    tree = ast.parse((ROOT / "hflow" / "models" / "attention_kernels.py").read_text())
    (call,) = calls(tree, {"flash"})
    assert [ast.unparse(one) for one in call.args] == ["*(q, k, v, *cumulative, *longest)"]
    first = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert names[:7] == first
    assert {one.arg for one in call.keywords} <= set(names[7:])


@pytest.mark.parametrize("name", [name for name in TE if "." in name])
def test_the_stand_in_takes_no_more_than_transformer_engine(name: str) -> None:
    """Megatron passes arguments by name, so it would not notice that the stand-in has other ones."""
    owner, _, method = name.partition(".")
    tree = ast.parse(STAND_IN.read_text())
    (of_class,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [one for one in of_class.body if isinstance(one, ast.FunctionDef) and one.name == method]
    assert found, f"the stand-in has no {name}"
    given = [one.arg for one in (*found[0].args.args, *found[0].args.kwonlyargs)]
    takes_all = TE[name][-1].startswith("**")
    assert takes_all or set(given) <= set(TE[name])
    positional = [one.arg for one in found[0].args.args if method == "forward"]
    assert positional == TE[name][: len(positional)]


@pytest.mark.parametrize("file", ["fp8.py", "distributed.py"])
def test_the_functions_of_the_stand_in_take_no_more_than_those_of_transformer_engine(file: str) -> None:
    functions = [
        one
        for one in ast.parse((STAND_IN.parent / file).read_text()).body
        if isinstance(one, ast.FunctionDef) and one.name in TE
    ]
    assert functions
    for function in functions:
        known = TE[function.name]
        given = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
        assert known[-1].startswith("**") or set(given) <= set(known)


def test_transformer_engine_takes_what_experts_pad_with() -> None:
    """The sizes are positional, as are the rows and their numbers."""
    tree = ast.parse((ROOT / "hflow" / "training" / "megatron" / "te_layers.py").read_text())
    made = [*calls(tree, {"te.Fp8Padding", "te.Fp8Unpadding"})]
    assert [len(one.args) for one in made] == [2, 2]
    assert TE["Fp8Padding.__init__"][:3] == ["self", "num_gemms", "align_size"]
    assert TE["Fp8Padding.forward"] == TE["Fp8Unpadding.forward"] == ["self", "inp", "m_splits"]
    (check,) = calls(tree, {"check"})
    names = {"is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"}
    assert [one.arg for one in check.keywords] == ["return_reason"]
    assert all(TE[name] == ["return_reason"] for name in names)


def test_ray_takes_what_its_functions_are_called_with() -> None:
    ray = pytest.importorskip("ray")
    functions = {
        f"ray.{name}": function
        for name, function in vars(ray).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    num_calls = 0
    for path in (ROOT / "hflow").rglob("*.py"):
        if "ray." not in (source := path.read_text()):
            continue
        for call in calls(ast.parse(source), set(functions)):
            name = ast.unparse(call.func)
            if any(isinstance(one, ast.Starred) for one in call.args) or None in {
                one.arg for one in call.keywords
            }:
                continue
            num_calls += 1
            by_name = {str(one.arg): one.value for one in call.keywords}
            signature = inspect.signature(functions[name])
            signature.bind(*call.args, **by_name)  # raises TypeError
            if name != "ray.method":  # its parameters have no names
                assert by_name.keys() <= signature.parameters.keys(), f"{path.name}: {name}"
    assert num_calls
