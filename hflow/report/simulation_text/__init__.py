"""`hflow simulate` on a terminal: how fast, how stale, who waits."""

from hflow.report.simulation_text.report import render_simulation

__all__ = ["render_simulation"]
