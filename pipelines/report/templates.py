"""The templates of the pages: the report's, and the one of `vlmdistill serve`.

Pages load nothing: their styles and scripts are inline, shared ones included by their templates, and the
policy of a page names its script by hash.
"""

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

FORMATS = {
    "fixed": "{:.2f}",
    "tenths": "{:.1f}",
    "percent": "{:.0%}",
    "short": "{:g}",
    "grouped": "{:,.0f}",
}


def templates() -> "Environment":
    """All templates of `pipelines`, named by folder and file; they escape the values that they show."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(source),
    )
    for name, form in FORMATS.items():
        environment.filters[name] = form.format
    return environment


def source(name: str) -> str:
    """The text of a template, such as `report/page.css`."""
    return (resources.files("vlmdistill.pipelines") / name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """A script as `script-src` of a policy names it, with the digest of its text."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
