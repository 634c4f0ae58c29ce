"""What the guides define, for tests of more than their examples show."""

from __future__ import annotations

import ast
import pathlib

from tests.test_docstrings import LAUNCHED, ROOT, blocks_of

GUIDES = ROOT / "docs" / "guides"


def blocks(guide: str) -> list[str]:
    """The Python of a guide, block by block."""
    return [each.code for each in blocks_of(pathlib.Path(GUIDES / f"{guide}.md"))]


def definitions(guide: str) -> str:
    """The imports and classes of a guide, without its scripts, as a text to run."""
    kept = []
    for code in blocks(guide):
        if not code.startswith(LAUNCHED):
            for each in ast.parse(code).body:
                if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef):
                    kept.append(ast.get_source_segment(code, each) or "")
    return "\n".join(kept) + "\n"
