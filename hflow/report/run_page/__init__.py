"""`render_run_page`: a run as one self-contained HTML file.

It looks like the page of a plan and shares its styles. `view.py` decides what is shown, the template writes
it as HTML and SVG, and the script only reacts to the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hflow.report.page import joined_files, page_environment, script_json
from hflow.report.run_page.view import run_page_view

if TYPE_CHECKING:
    from hflow.launch.run_report import RunReport

STYLES, SCRIPTS = ("base.css", "charts.css", "print.css"), ("tips.js", "theme.js", "wide.js")
"""Files of the page of a plan that this page uses too."""


def render_run_page(report: RunReport) -> str:
    """Return the HTML page of a run, for `hflow report RUN --html FILE`."""
    view = run_page_view(report)
    curves = [curve for group in view.groups for curve in group.curves]
    points = {curve.name: curve.points for curve in (*curves, *view.others)}
    return (
        page_environment(__name__)
        .get_template("run.html.jinja")
        .render(
            view=view,
            style=joined_files("hflow.report.page", STYLES) + joined_files(__name__, ("run.css",)),
            script=joined_files("hflow.report.page", SCRIPTS) + joined_files(__name__, ("run.js",)),
            data=script_json(points),
        )
    )
