"""Hooks of mkdocs. Pages have the paths of the repository, so one link works on GitHub and in the site.

Pages outside `docs/`, such as the recipes' README, are pages of the site. A source file or a folder that a
page links to becomes a page too, so that no link leaves the site. Comments fill the pages of the reference:

    <!-- names: Engine Recipe() -->     the docstrings of names of `hflow`; with () without their members
    <!-- module: hflow.algo -->         those of all public names of a module
    <!-- configuration: -->             the keys of the configuration
    <!-- commands: -->                  the commands of `hflow`
    <!-- families: -->                  the families of models, and what runs them

They take the place of what `repository.py` writes below each comment for readers of the repository, down to
`<!-- end -->`.
"""

from __future__ import annotations

import inspect
import os.path
import posixpath
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from command_line import command_sections
from configuration import key_tables
from families import family_table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from repository import COMMENT

import hflow
from hflow.extend import NodeType

ROOT = Path(__file__).parents[2]
STATIC = (".png", ".svg", ".css", ".js")
"""What is copied as it is."""
LINK = re.compile(r"(?<=\]\()(?!https?://)([^)#\s]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Name the pages by their paths in the repository, and add those that are not in `docs/`."""
    docs = Path(config.docs_dir)
    inside = {path for path in docs.rglob("*") if path.suffix in (".md", *STATIC)} | {ROOT / "README.md"}
    linked: set[Path] = set()
    pages = [path for path in inside if path.suffix == ".md"]
    while pages:
        new = {path for path in _linked_files(pages.pop()) if path not in inside | linked}
        pages += (path for path in new if path.suffix == ".md")
        linked |= new

    site = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in sorted(inside | linked):
        if _has_source_page(path):
            file = File.generated(config, f"{_name(path)}.md", content=_source_page(path))
        else:
            file = File(_name(path), str(ROOT), config.site_dir, config.use_directory_urls)
        if path in linked and path.name != "README.md":
            file.inclusion = InclusionLevel.NOT_IN_NAV
        site.append(file)
    return site


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to source files to their pages, and fill the comments of the reference."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = ROOT / folder / match[1]
        return f"{match[1].rstrip('/')}.md" if _has_source_page(target) else match[1]

    return COMMENT.sub(_filled, LINK.sub(link, markdown))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _linked_files(page: Path) -> Iterator[Path]:
    """Yield the existing files and folders that a page links to."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = Path(os.path.normpath(page.parent / target))
        if path.exists():
            yield path


def _has_source_page(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix not in (".md", *STATIC))


def _source_page(path: Path) -> str:
    """Return the page of a source file, or of a folder: the names in it."""
    lines = ["---", "search: {exclude: true}", "---", "", f"# {_name(path)}", ""]
    if path.is_dir():
        names = (entry.name for entry in path.iterdir() if not entry.name.startswith((".", "__pycache__")))
        return "\n".join([*lines, *(f"- `{name}`" for name in sorted(names))])
    return "\n".join([*lines, f"````{LANGUAGES.get(path.suffix, 'text')}", path.read_text("utf-8"), "````"])


def _filled(comment: re.Match[str]) -> str:
    """Return what takes the place of a comment: directives of mkdocstrings, or tables."""
    kind, text = comment[1], comment[2].strip()
    if kind == "configuration":
        return key_tables()
    if kind == "commands":
        return command_sections()
    if kind == "families":
        return family_table()
    if kind == "module":
        options = {"heading_level": 2, "show_root_heading": False, "show_root_toc_entry": False}
        return _directive(text, options)
    return "\n\n".join(_name_of_hflow(name) for name in text.split())


def _name_of_hflow(text: str) -> str:
    """Return the directive for a name of `hflow`. Its heading is that name, wherever it is defined."""
    name = text.removesuffix("()")
    value = attrgetter(name)(hflow)
    is_defined_elsewhere = inspect.isclass(value) or inspect.isfunction(value)
    path = f"{value.__module__}.{value.__qualname__}" if is_defined_elsewhere else f"hflow.{name}"
    options = {"heading": name, "toc_label": name, **({} if text == name else {"members": False})}
    anchor = "" if path == f"hflow.{name}" else f'<a id="hflow.{name}"></a>\n\n'
    return anchor + _directive(path, options) + _options(value)


def _options(value: Any) -> str:
    """Return a list of a decorator's options, which its signature does not show; empty for other values."""
    if not (inspect.isclass(value) and issubclass(value, NodeType)) or value is NodeType:
        return ""
    lines = [
        f"- **`{name}`** (`{option.type}`, default `{option.default!r}`): {option.text}"
        for name, option in value.options.items()
        if option.text
    ]
    return "\n".join(["\n\n**Options**\n", *lines])


def _directive(path: str, options: Mapping[str, Any]) -> str:
    lines = (f"      {key}: {value}" for key, value in options.items())
    return "\n".join([f"::: {path}", "    options:", *lines])
