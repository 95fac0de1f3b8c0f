"""Formats of tool calls. `registry` lists them, and finds that of a chat template."""
