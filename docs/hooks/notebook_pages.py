"""Hook of MkDocs for notebooks: their links lead to pages of the site, and their figures say what they show."""

from __future__ import annotations

import html as markup
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from nbformat import NotebookNode

logger = logging.getLogger("mkdocs.hooks.notebook_pages")
LINK = re.compile(r'href="(?P<path>[^":#?]+\.(?:md|ipynb))(?P<anchor>#[^"]*)?"')
_FIGURE = re.compile(r'<img alt="[^"]*"(?=[^>]* src="data:image/png)')
_WORDS = re.compile(r"^# alt: (.+)$", re.MULTILINE)


def figure_words(notebook: NotebookNode) -> Iterator[str]:
    """Yield what each figure of a notebook shows: the comment ``# alt: …`` of its cell, empty if there is none."""
    for cell in notebook.cells:
        words = " ".join(_WORDS.findall(cell.source))
        yield from (words for output in cell.get("outputs", []) if "image/png" in output.get("data", {}))


def on_page_content(html: str, *, page: Page, files: Files, **_: object) -> str:
    """Replace the path of a source file by the address of its page, and describe figures for those who cannot see.

    A link to a file that is no page is a warning. MkDocs itself mends the links of Markdown pages alone.
    """
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def mended(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link["path"]))
        file = files.get_file_from_path(target)
        if file is None:
            logger.warning("%s: no page %s", page.file.src_uri, target)
            return link[0]
        return f'href="{get_relative_url(file.url, page.url)}{link["anchor"] or ""}"'

    notebook = nbformat.read(Path(page.file.abs_src_path or ""), as_version=4)
    words = figure_words(notebook)
    described = _FIGURE.sub(lambda _: f'<img alt="{markup.escape(next(words, ""))}"', html)
    return LINK.sub(mended, described)
