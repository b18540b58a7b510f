"""Charts as files of their own, and the templates of the report that draw charts."""

import re
import time
from typing import TYPE_CHECKING, Literal

from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.templates import source, templates

if TYPE_CHECKING:
    from jinja2 import Template

PlotFormat = Literal["svg", "pdf", "png"]

PIXELS = 1.5  # of a PNG, for each pixel of the SVG
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
COLOR = re.compile(r"--([\w-]+): (#\w+)")
USED_COLOR = re.compile(r"var\(--([\w-]+)\)")


def chart_file(chart: charts.Chart, form: PlotFormat) -> bytes:
    """A chart in a format; ModuleNotFoundError without vl-convert, which draws PDF and PNG."""
    svg = as_svg(chart)
    if form == "svg":
        return svg.encode(errors="replace")
    import vl_convert

    if form == "pdf":
        return bytes(vl_convert.svg_to_pdf(svg))
    return bytes(vl_convert.svg_to_png(svg, scale=PIXELS))


def as_svg(chart: charts.Chart) -> str:
    """A chart as an SVG file that loads nothing."""
    template = report_template("chart.svg.jinja")
    svg = template.render(chart=chart, styles=_light_styles())
    return NOT_IN_XML.sub("", svg)


def _light_styles() -> str:
    """The styles of charts on light paper, with plain colors: many programs know no variables."""
    light_theme, _, _ = source("report/page.css").partition("@media")
    colors = dict(COLOR.findall(light_theme))
    return USED_COLOR.sub(lambda used: colors[used[1]], source("report/charts.css"))


def report_template(name: str) -> "Template":
    """A template of the report, with the sizes of charts as `plane`."""
    environment = templates()
    environment.filters["at"] = _local_time
    environment.globals["plane"] = {
        "width": charts.WIDTH,
        "bar": charts.BAR,
        "left": charts.LEFT,
        "right": charts.RIGHT,
        "top": charts.TOP,
        "below": charts.BELOW,
    }
    return environment.get_template(f"report/{name}")


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
