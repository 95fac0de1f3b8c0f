"""Fills the pages of the reference with tables, for readers of the repository.

`python docs/site/repository.py` writes them between a page's comments, `<!-- module: hflow.algo -->` and
`<!-- end -->`; with `--check` it writes nothing, and exits with 1 if a page is not up to date. The site has
whole docstrings in their place (`hooks.py`, which lists the comments).
"""

from __future__ import annotations

import ast
import inspect
import os.path
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_origin

from command_line import command_sections
from configuration import key_tables
from families import family_table

import hflow
import hflow.extend

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
COMMENT = re.compile(
    r"^<!-- (names|module|configuration|commands|families):([^\n]*) -->\n.*?^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)


def filled(page: str) -> str:
    """Return a page with the tables of its comments."""

    def block(comment: re.Match[str]) -> str:
        kind, text = comment[1], comment[2].strip()
        return f"<!-- {kind}:{comment[2]} -->\n\n{_tables(kind, text)}\n\n<!-- end -->"

    return COMMENT.sub(block, page)


def _tables(kind: str, text: str) -> str:
    if kind == "configuration":
        return key_tables()
    if kind == "commands":
        return command_sections()
    if kind == "families":
        return family_table()
    if kind == "module":
        return _name_table(_public(import_module(text)))
    names = [name.removesuffix("()") for name in text.split()]
    return _name_table((name, attrgetter(name)(hflow)) for name in names)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module: those of `__all__`, or those that it defines."""
    for name, value in vars(module).items():
        is_defined = inspect.isclass(value) or inspect.isfunction(value)
        is_own = is_defined and value.__module__ == module.__name__ and not name.startswith("_")
        if name in getattr(module, "__all__", ()) or (not hasattr(module, "__all__") and is_own):
            yield name, value


def _name_table(values: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(["| name | meaning |", "|-|-|", *(_row(name, value) for name, value in values)])


def _row(name: str, value: Any) -> str:
    is_alias = not (inspect.isclass(value) or callable(value)) or get_origin(value) is Annotated
    text = _alias_docs().get(name) if is_alias else inspect.getdoc(value)
    paragraph = (text or "").partition("\n\n")[0]
    meaning = " ".join(paragraph.split()).replace("|", "\\|")
    source = next(_sources(value), None)
    linked = f"`{name}`" if source is None else f"[`{name}`]({source})"
    return f"| {linked} {_parameters(value)}| {meaning} |"


@cache
def _alias_docs() -> dict[str, str]:
    """Return the docstrings below aliases of types."""
    docs = {}
    for path in (ROOT / "hflow/types").glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for alias, text in pairwise(body):
            match alias, text:
                case (
                    ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    docs[name] = inspect.cleandoc(meaning)
    return docs


def _sources(value: Any) -> Iterator[str]:
    """Yield the path of the file that defines a class or function, from the pages' folder."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is not None and module.__name__.startswith("hflow") and module.__file__:
        yield os.path.relpath(module.__file__, PAGES)


def _parameters(value: Any) -> str:
    """Return the parameters of a function with their defaults; empty for classes and other values."""
    if not inspect.isfunction(value):
        return ""
    parameters = inspect.signature(value).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    signature = re.sub(r"=(<.*? at 0x\w+>|Ellipsis)", "=...", str(inspect.Signature(plain)))
    return f"`{signature}` ".replace("|", "\\|")


def main(arguments: list[str]) -> str | None:
    """Write the pages, or check them: return those that are out of date."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
    outdated = {page: text for page, old in pages.items() if (text := filled(old)) != old}
    if "--check" in arguments:
        names = ", ".join(str(page.relative_to(ROOT)) for page in outdated)
        return (
            f"run python docs/site/repository.py, as these are not up to date: {names}" if outdated else None
        )
    for page, text in outdated.items():
        page.write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
