"""The command line: parse, call the launcher, print."""

from hflow.cli.commands import app
from hflow.cli.entry import main

__all__ = ["app", "main"]
