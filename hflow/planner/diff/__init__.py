"""Differences between two plans, and what they mean for a resume.

`plan_values` reads the rows of a plan as values with texts, `compare` compares them, and `effects` says what
each difference means.
"""

from hflow.planner.diff.compare import Change, PlanDiff, and_more, diff_plans
from hflow.planner.diff.effects import Effect

__all__ = ["Change", "Effect", "PlanDiff", "and_more", "diff_plans"]
