"""Sphinx configuration of the documentation site; `python -m sphinx -W --keep-going docs site` builds it offline."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from site_pages import adapted, generate  # noqa: E402

from confed.system.release import VERSION  # noqa: E402

project = "confed"
author = "the maintainers of confed"
copyright = "the maintainers of confed, Apache-2.0"
version = release = VERSION

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
nb_execution_mode = "off"  # notebooks are executed by a test
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header", "toc.empty_glob"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"confed {VERSION}"
html_copy_source = False
html_show_sphinx = False
# The theme's search and scripts are part of the site: no page loads anything from elsewhere.
html_theme_options = {"source_repository": "", "navigation_with_keys": True}


def setup(app):
    """Pages from code before reading starts, and links of the Markdown that lead out of docs/ while pages are read."""
    app.connect("builder-inited", lambda app: generate(Path(app.srcdir) / "reference"))
    app.connect("source-read", lambda app, name, text: text.__setitem__(0, adapted(name, text[0])))
