"""The API reference has an entry for each public name, and makes Markdown of docstrings."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import types
from typing import Any

import pytest

import dataparallel

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
#: The name that is shown for an entry, and the one under which the documentation finds it.
ENTRIES = {
    shown or path: path
    for page in PAGES
    for path, shown in re.findall(
        r"^::: (\S+)$(?:\n    options:\n      heading: (\S+)$)?", page.read_text(), re.MULTILINE
    )
}
MODULES = [
    "dataparallel",
    "dataparallel.kernels",
    *(
        f"dataparallel.{name}"
        for name in dataparallel.__all__
        if inspect.ismodule(getattr(dataparallel, name))
    ),
]


def find(path: str) -> object:
    """The object of a full name: from a module as users call it, or as the files lie."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:length]))
            return functools.reduce(getattr, parts[length:], module)
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(module: str) -> None:
    found: Any = find(module)
    names = [name for name in found.__all__ if not inspect.ismodule(getattr(found, name))]
    assert not [name for name in names if f"{module}.{name}" not in ENTRIES]


def test_every_entry_is_what_users_call_so() -> None:
    assert not [shown for shown, path in ENTRIES.items() if find(shown) is not find(path)]


def extension() -> types.ModuleType:
    path = ROOT / "docs" / "_site" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings_of_the_site", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("Do it.\n\nExample::\n\n    a = 1\n    b = 2\n\nArgs:\n    x: It.",
         "Do it.\n\nExample:\n\n```python\na = 1\nb = 2\n```\n\nArgs:\n    x: It."),
        ("Example, alone::\n\n    for x in y:\n\n        f(x)",
         "Example, alone:\n\n```python\nfor x in y:\n\n    f(x)\n```\n\n"),
        ("Args:\n    a, b: See\n        it.",
         "Args:\n    a: See\n        it.\n    b: See\n        it."),
        ("As :class:`DataParallel` does.", "As [`DataParallel`][dataparallel.DataParallel] does."),
        ("As :func:`~dataparallel.collectives.functional.reduce` does.",
         "As [`reduce`][dataparallel.collectives.reduce] does."),
        # Of this name there are two, and of the other none.
        ("As :func:`broadcast` and :meth:`forward` do.", "As `broadcast` and `forward` do."),
        ("Added up, see Note [Order of a sum], here.", "Added up, here."),
        ("First. See Note [A], Note [B c] and\nNote [D]. Last.", "First. Last."),
        ("Note [A title]\n~~~~~~~~~~~~~~\nText.", "**A title**\n\nText."),
        (".. note::\n    Text.", "Note:\n    Text."),
    ],
)  # fmt: skip
def test_docstrings_become_markdown(text: str, markdown: str) -> None:
    assert extension().as_markdown(text) == markdown
