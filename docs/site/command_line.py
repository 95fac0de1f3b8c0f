"""Sections on the commands of `hflow`, from what `hflow COMMAND --help` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from hflow.cli.commands import app


def command_sections() -> str:
    """Return a section for each command in Markdown: usage, arguments and options, examples."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join("\n".join(_section(name, command)) for name, command in group.commands.items())


def _section(name: str, command: Any) -> Iterator[str]:
    visible = [parameter for parameter in command.params if not parameter.hidden]
    arguments = [parameter for parameter in visible if parameter.param_type_name == "argument"]
    options = [parameter for parameter in visible if parameter.param_type_name == "option"]
    usage = ["hflow", name, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)]
    yield from (f"## hflow {name}", "", command.help, "", "```sh", " ".join(usage), "```", "")
    if visible:
        yield from ("| argument or option | meaning |", "|-|-|")
        yield from (f"| `{_argument(parameter)}` | {_meaning(parameter)} |" for parameter in arguments)
        yield from (f"| `{_option(parameter)}` | {_meaning(parameter)} |" for parameter in options)
    examples = re.findall(r"\[bold\](.+?)\[/bold\]", command.epilog or "")
    if examples:
        yield from ("", "```sh", *examples, "```")


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    text = f"{name}..." if parameter.nargs == -1 else name
    return text if parameter.required else f"[{text}]"


def _option(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    shown = "" if isinstance(default, bool) or not default else f" Default: `{default}`."
    return f"{parameter.help or ''}{shown}".replace("|", "\\|")
