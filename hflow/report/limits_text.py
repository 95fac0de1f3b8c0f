"""What makes a step longer than necessary, as sentences: one wording for `hflow plan` and its page."""

from __future__ import annotations

import shlex

from hflow.planner.plan.forecast import Limit, Remedy
from hflow.report.formatting import share_text

NO_REMEDY = "More staleness and other placements were tried: none makes a step noticeably shorter."


def limit_text(limit: Limit) -> str:
    """Return what limits a step, and by how much each remedy shortens it."""
    if not limit.remedies:
        return f"{limit.cause}. {NO_REMEDY}" if limit.idle else f"{limit.cause}."
    first, *others = limit.remedies
    more = "".join(f", with {_settings(other)} {share_text(other.gain)} less" for other in others)
    return f"{limit.cause}. With {_settings(first)} a step takes {share_text(first.gain)} less{more}."


def _settings(remedy: Remedy) -> str:
    return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in remedy.settings)
