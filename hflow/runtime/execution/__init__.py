"""Performs the state machine's instructions with real workers, and writes the files of a run.

`executor` is the entry point. `run_directory`, `checkpoint`, `metrics_log` and `trace` are the files.
"""
