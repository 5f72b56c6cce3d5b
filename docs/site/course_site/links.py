"""Links that leave the pages: to source files and folders, and from a figure to its report. Introduced in phase 3.

A link to a file of the repository leads to that file's page on the site. So does a path or dotted name in backticks,
which is a link on the site alone. A figure followed by ``<!-- {{report:FILE#KEY}} -->`` leads to the report. Invariant:
what a page shows is what its Markdown says; only destinations are added.
"""

import re
from pathlib import PurePosixPath

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

from course_site import reports
from course_site.repository import anchor, find, page_name, relative

_CITATION = re.compile(r"<!--\s*\{\{report:([^#}]+)#([^}]+)\}\}\s*-->")
_FIGURE = re.compile(r"(?:[-+≈]?[\d.,]*\d )?[^\s\d]+$|\S+$")  # with its unit


def source_uri(env: BuildEnvironment, path: str, line: int | None = None) -> str | None:
    """The address of a file or folder of the repository as seen from the document that is read; None if not shown."""
    page = page_name(path)
    if page is None:
        return None
    return relative(env.current_document.docname, page) + (f"#{anchor(line)}" if line else "")


class SourceLinks(SphinxTransform):
    """Links to files that are no documents, and to folders."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            self._lead(node, node["reftarget"])
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["refdomain"] == "doc" and node["reftarget"] not in self.env.found_docs:
                self._lead(node, f"/{node['reftarget']}.md")
            elif node["refdomain"] is None and node["reftype"] == "myst":
                self._lead(node, node["reftarget"])

    def _lead(self, node: nodes.Element, target: str) -> None:
        path, _ = self.env.relfn2path(target, self.env.current_document.docname)
        if uri := source_uri(self.env, str(PurePosixPath(path))):
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


class NameLinks(SphinxTransform):
    """Paths and dotted names in backticks."""

    default_priority = 410

    def apply(self, **kwargs: object) -> None:
        for node in list(self.document.findall(nodes.literal)):
            if _is_linked(node) or (found := find(node.astext())) is None:
                continue
            if uri := source_uri(self.env, *found):
                link = nodes.reference("", "", refuri=uri, internal=True, classes=["name"])
                node.replace_self(link)
                link += node


class Citations(SphinxTransform):
    """The figure before a citation becomes a link to the report that it was read from."""

    default_priority = 420

    def apply(self, **kwargs: object) -> None:
        for node in list(self.document.findall(nodes.raw)):
            if (match := _CITATION.search(node.astext())) is not None:
                self._cite(node, report=match[1].strip(), key=match[2].strip())
            if node.astext().lstrip().startswith("<!--") and node.astext().rstrip().endswith("-->"):
                node.parent.remove(node)

    def _cite(self, comment: nodes.raw, report: str, key: str) -> None:
        parent = comment.parent
        while (index := parent.index(comment)) and not parent[index - 1].astext():
            del parent[index - 1]  # the parser leaves an empty text between two inline elements
        uri = source_uri(self.env, f"{reports.FOLDER}/{report.removesuffix('.json')}.md") or source_uri(
            self.env, f"{reports.FOLDER}/{report}"
        )
        if index == 0 or uri is None or _is_linked(comment):
            return
        title = f"measured: {report}, {key}"
        link = nodes.reference("", "", refuri=uri, internal=True, classes=["cited"], reftitle=title)
        before = parent[index - 1]
        if not isinstance(before, nodes.Text):
            parent.remove(before)
            link += before
            parent.insert(index - 1, link)
        elif word := _FIGURE.search(before):
            link += nodes.Text(word[0])
            parent[index - 1 : index] = [nodes.Text(before[: word.start()]), link]


def _is_linked(node: nodes.Element) -> bool:
    """Whether a node stands in a link already, or in a heading, which the table of contents makes one."""
    while (parent := node.parent) is not None:
        if isinstance(parent, nodes.reference | nodes.title | addnodes.pending_xref | addnodes.download_reference):
            return True
        node = parent
    return False


def register(app: Sphinx) -> None:
    for transform in (SourceLinks, NameLinks, Citations):
        app.add_transform(transform)
