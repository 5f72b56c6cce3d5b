"""Sphinx configuration of the site: the repository's own Markdown files, read where they stand. Introduced in phase 3.

    make docs

The source folder is the root of the repository, so that links between README, chapters, design pages and source files
are the same on the site as in the checkout. What Markdown cannot say (the difference of two phases, pages for source
files, the way through the course) is made by the extension beside this file, `course_site`.
"""

import gc
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from course_site.repository import DOCUMENTS  # noqa: E402

# The trees of all pages live until the end; visiting them in each garbage collection takes half of the build.
gc.disable()

project = "infer"
html_title = "infer"
extensions = ["myst_parser", "course_site"]

root_doc = "README"
include_patterns = list(DOCUMENTS)
exclude_patterns = ["**/.*", "**/__pycache__", "build", "dist", "site", "workspace", "*.egg-info"]

myst_heading_anchors = 6
myst_fence_as_directive = ["python", "diff", "output", "console"]
highlight_language = "text"
smartquotes_action = "q"

html_theme = "furo"
templates_path = ["templates"]
html_additional_pages = {"index": "landing.html"}
html_context = {"master_doc": "index"}  # where the name of the site leads
html_static_path = ["static", "../../shared/tracing/page/elements.js"]
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_favicon = "static/favicon.svg"
html_copy_source = False
html_show_copyright = False
html_use_index = False
pygments_style = "course_site.code_style.Light"
pygments_dark_style = "course_site.code_style.Dark"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0f766e",
        "color-brand-content": "#0b6a63",
        "color-brand-visited": "#4b5a8a",
        "color-background-primary": "#fefdfb",
        "color-background-secondary": "#f7f5ef",
        "color-background-border": "#e4e1d8",
        "color-sidebar-background-border": "#e4e1d8",
        "color-inline-code-background": "#f3f1ea",
        "color-highlight-on-target": "#edf3ee",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5ac8bc",
        "color-brand-content": "#6fd0c5",
        "color-brand-visited": "#a9b6e6",
        "color-background-primary": "#14171b",
        "color-background-secondary": "#191d22",
        "color-background-border": "#2c323a",
        "color-sidebar-background-border": "#2c323a",
        "color-inline-code-background": "#22282f",
        "color-highlight-on-target": "#1c2b2c",
    },
}
