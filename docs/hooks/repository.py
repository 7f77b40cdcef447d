"""Pages from outside docs/ get into the site, and links that a forge can follow lead somewhere there, too.

Pages link to each other, to ``lab/`` and to files of the repository by relative paths. In the site, ``lab/`` and the
pages at the top of the repository are beside the manual. A link to a file that is no page becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LAB = sorted(f"lab/{page.name}" for page in ROOT.glob("lab/*.md"))
BROUGHT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *LAB)
ASIDE = ("lab/", "decisions/", "CHANGELOG.md")
"""Pages that a search in the manual leaves out."""
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for path in BROUGHT:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Make the links of a page those of the site."""
    if page.file.src_uri.startswith(ASIDE):
        page.meta.setdefault("search", {"exclude": True})
    here = page.file.src_uri
    in_repository = here if here in BROUGHT else f"docs/{here}"

    def mended(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
        uri = found.removeprefix("docs/")
        if (found.startswith("docs/") or found in BROUGHT) and files.get_file_from_path(uri):
            relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
            return f"[{text}]({relative}{mark}{anchor})"
        if found.startswith("docs/") and not (ROOT / found).exists() and here != "CHANGELOG.md":
            return link[0]  # mkdocs says that it leads nowhere; a change's links are of its own time
        return text

    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(mended, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(mended, markdown[end:])])
