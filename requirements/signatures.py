"""Write the parameters of functions of packages that need CUDA to a file of the tests.

    python requirements/signatures.py ARCHIVE ...

`make signatures FLASH_ATTN_3=ARCHIVE` downloads those of Transformer Engine and flash-attn. Sources are read,
not imported. A parameter `**name` takes all others.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "signatures.json"
TE_MODULE = "transformer_engine/pytorch/module"
FUNCTIONS = {
    "flash-attn": {"flash_attn/flash_attn_interface.py": ("flash_attn_varlen_func",)},
    "flash-attn-3": {"hopper/flash_attn_interface.py": ("flash_attn_varlen_func",)},
    "transformer-engine": {
        f"{TE_MODULE}/linear.py": ("Linear.__init__", "Linear.forward"),
        f"{TE_MODULE}/layernorm_linear.py": ("LayerNormLinear.__init__", "LayerNormLinear.forward"),
        f"{TE_MODULE}/grouped_linear.py": ("GroupedLinear.__init__", "GroupedLinear.forward"),
        f"{TE_MODULE}/rmsnorm.py": ("RMSNorm.__init__",),
        f"{TE_MODULE}/fp8_padding.py": ("Fp8Padding.__init__", "Fp8Padding.forward"),
        f"{TE_MODULE}/fp8_unpadding.py": ("Fp8Unpadding.forward",),
        "transformer_engine/pytorch/quantization.py": (
            "fp8_autocast",
            "is_fp8_available",
            "is_fp8_block_scaling_available",
            "is_mxfp8_available",
        ),
        "transformer_engine/pytorch/distributed.py": ("checkpoint",),
    },
}
"""Package -> its files -> functions in them."""


def sources(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each of the wanted files that a wheel or an archive of sources has."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in set(wanted) & set(wheel.namelist()):
                yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            name = member.name.partition("/")[2]
            if name in wanted and (file := files.extractfile(member)) is not None:
                yield name, file.read().decode()


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters, in their order."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a file, as `function` or `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def main() -> int:
    """Read the archives, and write the file. Return 1 if a function is missing."""
    found: dict[str, dict[str, list[str]]] = {}
    missing = {(package, file) for package, files in FUNCTIONS.items() for file in files}
    for archive in map(Path, sys.argv[1:]):
        match = re.match(r"(\w+)-([\d.]+(?:post\d+)?)", archive.name)
        assert match is not None, f"{archive} is not named after a package and its version"
        name = match[1].replace("_", "-")
        package = found.setdefault(f"{name} {match[2].rstrip('.')}", {})
        for file, source in sources(archive, FUNCTIONS[name]):
            known = dict(functions(ast.parse(source)))
            package.update({wanted: parameters(known[wanted]) for wanted in FUNCTIONS[name][file]})
            missing.remove((name, file))
    OUT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{OUT}: {', '.join(found)}" + (f"; missing: {sorted(missing)}" if missing else ""))
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
