"""Hook of MkDocs: writes the reference from the package's own objects while the site is built."""

from __future__ import annotations

from typing import Any

import catalogue_pages
import command_pages
import setting_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = "reference"


def generated() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the title and the Markdown text of every generated page, by folder (empty for none) and name."""
    return {
        "": {
            "variants": ("Variants", setting_pages.variants_page()),
            "presets": ("Presets", setting_pages.presets_page()),
            "metrics": ("Metrics", catalogue_pages.metrics_page()),
            "datasets": ("Data sets", catalogue_pages.datasets_page()),
        },
        "commands": command_pages.pages(),
        "configuration": setting_pages.pages(),
    }


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, and put those of a folder into the navigation where it names the folder."""
    folders: dict[str, list[dict[str, str]]] = {}
    for folder, pages in generated().items():
        place = f"{FOLDER}/{folder}/" if folder else f"{FOLDER}/"
        for name, (_, text) in pages.items():
            files.append(File.generated(config, f"{place}{name}.md", content=text))
        folders[place] = [{title: f"{place}{name}.md"} for name, (title, _) in pages.items()]
    config.nav = _expanded(config.nav, folders)
    return files


def _expanded(item: Any, folders: dict[str, list[dict[str, str]]]) -> Any:
    """Return a part of the navigation with the folders in it replaced by lists of their pages."""
    if isinstance(item, list):
        return [_expanded(part, folders) for part in item]
    if isinstance(item, dict):
        return {title: _expanded(part, folders) for title, part in item.items()}
    return folders.get(item, item)
