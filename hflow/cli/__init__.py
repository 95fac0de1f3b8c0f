"""The command line: parses arguments, calls `hflow.launch`, and prints the result."""

from hflow.cli.commands import app, main

__all__ = ["app", "main"]
