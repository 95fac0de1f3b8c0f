"""The report of `hflow plan` on a terminal.

One file per section; `report.py` combines them.
"""

from hflow.report.plan_text.report import render_plan

__all__ = ["render_plan"]
