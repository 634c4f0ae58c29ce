"""Pages of the site link to files of the repository, and those that are linked to come with it.

In the repository links are relative paths, so that they work where it is browsed. A file outside
of docs/ becomes a part of the site, under ``repository/``; a folder without a page is no link.
Pictures for light and dark follow the site's switch, not the browser alone.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)


def on_config(config: MkDocsConfig) -> None:
    """Expand the patterns in the navigation."""
    config.nav = _expand(config.nav)


def _expand(entry: Any) -> Any:
    if isinstance(entry, list):
        return [each for part in entry for each in _as_list(_expand(part))]
    if isinstance(entry, dict):
        return {name: _expand(part) for name, part in entry.items()}
    if "*" in entry:
        return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(entry))
    return entry


def _as_list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Take in the files of the repository that pages link to, and those that these link to."""
    pages = list(files.documentation_pages())
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        pages.append(_add(files, config, ROOT / name))
    for page in pages:
        for path in _targets(page):
            if path.is_file() and _uri(path) not in files.src_uris:
                added = _add(files, config, path)
                if added.is_documentation_page():
                    pages.append(added)


def _add(files: Files, config: MkDocsConfig, path: pathlib.Path) -> File:
    inclusion = InclusionLevel.NOT_IN_NAV
    file = File.generated(config, _uri(path), abs_src_path=str(path), inclusion=inclusion)
    files.append(file)
    return file


def _targets(file: File) -> Iterator[pathlib.Path]:
    for found in _LINK.finditer(file.content_string):
        path = _resolve(file, found[3])
        if path.is_relative_to(ROOT):
            yield path


def _resolve(file: File, target: str) -> pathlib.Path:
    assert file.abs_src_path is not None
    path = (pathlib.Path(file.abs_src_path).parent / target).resolve()
    return path / "README.md" if (path / "README.md").is_file() else path


def _uri(path: pathlib.Path) -> str:
    """Return the place of a file in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the places in the site."""

    def change(found: re.Match[str]) -> str:
        path = _resolve(page.file, found[3])
        if path.is_dir():
            return found[2]
        if not path.is_file() or not path.is_relative_to(ROOT):
            # A link that leads nowhere stays, and is an error of the strict build.
            return found[0]
        here = posixpath.dirname(page.file.src_uri)
        return (
            f"{found[1]}[{found[2]}]({posixpath.relpath(_uri(path), here or '.')}{found[4] or ''})"
        )

    markdown = _PICTURE.sub(r"![\2](\3#only-light) ![\2](\1#only-dark)", markdown)
    return _LINK.sub(change, markdown)
