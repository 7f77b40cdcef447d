"""Hook of MkDocs: links in notebooks lead to pages of the site. MkDocs itself looks at Markdown pages alone."""

from __future__ import annotations

import logging
import posixpath
import re

from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

logger = logging.getLogger("mkdocs.hooks.notebook_links")
LINK = re.compile(r'href="(?P<path>[^":#?]+\.(?:md|ipynb))(?P<anchor>#[^"]*)?"')


def on_page_content(html: str, *, page: Page, files: Files, **_: object) -> str:
    """Replace the path of a source file by the address of its page; warn of a file that is no page."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def mended(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link["path"]))
        file = files.get_file_from_path(target)
        if file is None:
            logger.warning("%s: no page %s", page.file.src_uri, target)
            return link[0]
        return f'href="{get_relative_url(file.url, page.url)}{link["anchor"] or ""}"'

    return LINK.sub(mended, html)
