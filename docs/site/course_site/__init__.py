"""The Sphinx extension of the site, a module for each thing that the Markdown files leave to it. Introduced in phase 3.

Invariant: it reads the repository and writes the site; no page of the repository is changed for the site's sake, and
nothing that stands in the repository is written down here a second time.
"""

from sphinx.application import Sphinx

from course_site import (
    code_lines,
    fences,
    instruments,
    links,
    navigation,
    phase_sections,
    pictures,
    recordings,
    source_code,
    source_pages,
    units,
)

PARTS = (
    navigation,
    code_lines,
    fences,
    phase_sections,
    instruments,
    links,
    pictures,
    recordings,
    units,
    source_code,
    source_pages,
)


def setup(app: Sphinx) -> dict[str, bool]:
    for module in PARTS:
        module.register(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
