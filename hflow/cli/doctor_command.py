"""`hflow doctor`."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from hflow.doctor import Finding, check_machine
from hflow.terminal import show


def doctor() -> None:
    """Show what this machine can run, and how to install or fix the rest."""
    findings = list(check_machine())
    show(_table(findings))
    if any(finding.required and not finding.ok for finding in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("no", "red" if finding.required else "yellow")
        fix = "" if finding.ok else finding.fix
        table.add_row(finding.topic, finding.name, mark, Text(finding.detail), Text(fix, "dim"))
    return table
