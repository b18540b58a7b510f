"""Settings of Sphinx: `make docs` builds build/site from the pages of this folder and the docstrings."""

from importlib import metadata

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "vlmdistill"
version = release = metadata.version("vlmdistill")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["methods"]  # figures
suppress_warnings = [
    "toc.not_included"
]  # the log and records of single questions: linked, not listed
myst_heading_anchors = 4  # links to headings work as on GitHub
default_role = "literal"  # single backticks in docstrings are code, as in the pages

autodoc_typehints = "none"  # the docstrings say more, and in fewer words
autodoc_member_order = "bysource"
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"vlmdistill {version}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False

OUTSIDE = {
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "examples/demo_target/README": "demo-targets",
    "embedded/demo/README": "demo-target-card",
    "embedded/demo-small/README": "demo-small-target-card",
    "embedded/demo-video/README": "demo-video-target-card",
}
"""Pages of the repository outside this folder -> the page here that includes each."""


class LinksOutside(SphinxPostTransform):
    """Links to a page outside this folder lead to the page here that includes it."""

    default_priority = 1  # before MyST looks for their targets

    def run(self) -> None:
        """Change the targets."""
        for link in self.document.findall(pending_xref):
            for path, page in OUTSIDE.items():
                if link["reftarget"].removesuffix(".md").endswith(path):
                    link["refdomain"], link["reftarget"], link["reftargetid"] = (
                        "doc",
                        page,
                        None,
                    )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_post_transform(LinksOutside)
