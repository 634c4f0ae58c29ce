"""Docstrings of the package as Markdown, for the API reference."""

from __future__ import annotations

import pathlib
import re
import textwrap
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parents[2]
#: Everything that has an entry in the reference, by its full name.
ENTRIES = frozenset(
    entry
    for page in (ROOT / "docs" / "api").glob("*.md")
    for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)
#: A paragraph that ends with two colons, and the indented lines after it.
_BLOCK = re.compile(r"^([^\s.].*):: *\n\n((?:[ ]{4}.*(?:\n|\Z)|\n)+)", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_DIRECTIVE = re.compile(r"^\.\. (note|warning)::", re.MULTILINE)
#: Several arguments with one description.
_JOINT = re.compile(r"^(    )(\w+(?:,\s+\w+)+)(: .*(?:\n {5,}.*)*)", re.MULTILINE)
#: The title of a note, and what points to notes in the source.
_TITLE = re.compile(r"^Note \[([^]]*)\]\n~+$", re.MULTILINE)
_NOTES = r"[Ss]ee\s+Note\s+\[[^]]*\](?:,?(?:\s+and)?\s+Note\s+\[[^]]*\])*"
_NOTE = re.compile(rf"(?:^|(?<=\.))\s*{_NOTES}\.|[;,] {_NOTES}")


class Docstrings(griffe.Extension):
    """Reads the folders ``kernels/`` and ``tools/`` under the names by which they are imported."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Take in the two folders."""
        if pkg.path == "dataparallel":
            for name in ("kernels", "tools"):
                pkg.set_member(name, loader.load(name, try_relative_path=False))
                del loader.modules_collection.members[name]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Convert Sphinx's markup to Markdown."""
    text = _DIRECTIVE.sub(lambda found: f"{found[1].title()}:", text)
    text = _BLOCK.sub(_fence, _TITLE.sub(r"**\1**\n", text))
    text = _JOINT.sub(
        lambda found: "\n".join(
            f"{found[1]}{name}{found[3]}" for name in re.split(r",\s+", found[2])
        ),
        text,
    )
    return _ROLE.sub(lambda found: _reference(found[1]), _NOTE.sub("", text))


def _fence(found: re.Match[str]) -> str:
    code = textwrap.dedent(found[2]).strip("\n")
    return f"{found[1]}:\n\n```python\n{code}\n```\n\n"


def _reference(name: str) -> str:
    """Return the name as code; a link if exactly one entry has it."""
    *folders, last = name.split(".")
    named = [
        entry
        for entry in ENTRIES
        if entry.endswith(f".{last}") and (not folders or set(entry.split(".")[:-1]) <= {*folders})
    ]
    return f"[`{last}`][{named[0]}]" if len(named) == 1 else f"`{last}`"
