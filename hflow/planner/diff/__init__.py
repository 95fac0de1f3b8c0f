"""What changed between two plans, and what that means for a resume."""

from hflow.planner.diff.compare import Change, PlanDiff, diff_plans, more
from hflow.planner.diff.effects import Effect

__all__ = ["Change", "Effect", "PlanDiff", "diff_plans", "more"]
