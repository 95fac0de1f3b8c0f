"""`render_page`: a plan as one self-contained HTML file.

`view.py` decides what is shown, templates write it as HTML and SVG, and the script only reacts to the reader.
Equal plans give equal bytes.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_plain
from hflow.report.page.tables import Table
from hflow.report.page.view import PageView, page_view

STYLES = ("base.css", "graph.css", "charts.css", "devices.css", "print.css")
SCRIPTS = ("select.js", "devices.js", "tips.js", "theme.js", "wide.js")
SECTIONS = (
    ("graph", "Graph"),
    ("devices", "Devices"),
    ("schedule", "Schedule"),
    ("memory", "Memory"),
    ("tables", "Tables"),
    ("words", "Words"),
)
"""(id, title) of the sections that the page's head links to."""
IN_SCRIPT = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""Characters that could end a script element, as JSON escapes."""


def render_page(plan: Plan, sizes: Table | None = None) -> str:
    """Return the HTML page of a plan, for `hflow plan --html FILE`.

    Args:
        plan: what the page shows.
        sizes: the clusters among which `hflow size` chose the plan's.
    """
    view = page_view(plan)
    return (
        page_environment(__name__)
        .get_template("page.html.jinja")
        .render(
            view=view,
            sizes=sizes,
            sections=(*((("sizes", "Sizes"),) if sizes else ()), *SECTIONS),
            style=joined_files(__name__, STYLES),
            script=joined_files(__name__, SCRIPTS),
            data=script_json(_for_script(view)),
        )
    )


def page_environment(package: str) -> Environment:
    """Return the environment of a package's templates, which may use those of this one."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__name__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _for_script(view: PageView) -> dict[str, Any]:
    """Return the data that the script needs; everything else is in the page's text."""
    row = to_plain(view.devices)
    names = ("per_machine", "replicas", "routes", "sets", "peaks")
    return {"devices": {name: row[name] for name in names}, "routing": to_plain(view.tables.routing)}


def joined_files(package: str, names: tuple[str, ...]) -> Markup:
    """Return the contents of a package's template files that are included unchanged."""
    folder = files(package) / "templates"
    return Markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.translate(IN_SCRIPT))
