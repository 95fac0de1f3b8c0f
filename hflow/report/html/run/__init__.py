"""`render_run_page` and `render_compare_page`: runs as self-contained HTML files.

They look like the page of a plan and share its layout and styles. `view.py` and `compare_view.py` decide what
is shown, templates write it as HTML and SVG, and the script only reacts to the reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hflow.report.html.plan import joined_files, page_environment, script_json
from hflow.report.html.run.compare_view import compare_page_view
from hflow.report.html.run.curves import CurveView
from hflow.report.html.run.view import run_page_view

if TYPE_CHECKING:
    from hflow.launch.results.compare import Comparison
    from hflow.launch.results.runs import RunReport

STYLES, SCRIPTS = ("base.css", "charts.css", "print.css"), ("tips.js", "theme.js", "wide.js")
"""Files of the page of a plan that these pages use too."""
RUN_SECTIONS = (
    ("curves", "Curves"),
    ("timeline", "Timeline"),
    ("samples", "Samples"),
    ("losses", "Faults"),
    ("config", "Configuration"),
)
COMPARE_SECTIONS = (("curves", "Curves"), ("values", "Values"), ("config", "Configuration"))
"""(id, title) of the sections that a page's head links to."""


def render_run_page(report: RunReport, now: float | None = None) -> str:
    """Return the HTML page of a run, which follows the run if `now`, in seconds since the epoch, is given."""
    view, is_live = run_page_view(report, now), now is not None
    curves = [curve for _, members in view.groups for curve in members]
    return _render("run.html.jinja", view, RUN_SECTIONS, (*curves, *view.others), is_live=is_live)


def render_compare_page(comparison: Comparison) -> str:
    """Return the HTML page of a comparison, for `hflow compare RUN RUN --html FILE`."""
    view = compare_page_view(comparison)
    return _render("compare.html.jinja", view, COMPARE_SECTIONS, view.curves)


def _render(
    template: str,
    view: Any,
    sections: tuple[tuple[str, str], ...],
    curves: Iterable[CurveView],
    *,
    is_live: bool = False,
) -> str:
    scripts = ("run.js", "watch.js") if is_live else ("run.js",)
    points = {curve.name: [line.points for line in curve.lines] for curve in curves}
    return (
        page_environment(__name__)
        .get_template(template)
        .render(
            view=view,
            is_live=is_live,
            sections=sections,
            style=joined_files("hflow.report.html.plan", STYLES) + joined_files(__name__, ("run.css",)),
            script=joined_files("hflow.report.html.plan", SCRIPTS) + joined_files(__name__, scripts),
            data=script_json(points),
        )
    )
