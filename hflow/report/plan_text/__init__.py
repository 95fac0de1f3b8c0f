"""`hflow plan` on a terminal: what runs where, which bytes move, what limits the speed.

One file a section; `report.py` puts them together.
"""

from hflow.report.plan_text.report import render_plan

__all__ = ["render_plan"]
