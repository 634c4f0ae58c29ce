"""The package, laid out as if it were installed, without installing anything.

In the checkout ``kernels/`` and ``tools/`` lie beside the package whose parts they are; to install
it takes setuptools of the right version, and mostly a network.
"""

from __future__ import annotations

import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).parents[3]

#: Where what lies in the checkout is to be found.
_PLACES = {
    "dataparallel": "dataparallel",
    "kernels": "dataparallel/kernels",
    "tools": "dataparallel/tools",
    "benchmarks": "benchmarks",
    "tests": "tests",
}


def lay_out(folder: pathlib.Path) -> None:
    """Copy the package and its tests into an empty folder, in which they can be imported.

    Args:
        folder: The current folder of whoever imports them.
    """
    left_out = shutil.ignore_patterns("__pycache__")
    for source, place in _PLACES.items():
        shutil.copytree(ROOT / source, folder / place, ignore=left_out)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    # The command line and the doctor ask Python for the version.
    found = re.search(r'^version = "(.+)"$', settings, re.MULTILINE)
    assert found, "pyproject.toml names no version"
    described = folder / f"dataparallel-{found[1]}.dist-info"
    described.mkdir()
    text = f"Metadata-Version: 2.1\nName: dataparallel\nVersion: {found[1]}\n"
    (described / "METADATA").write_text(text, encoding="utf-8")


def marked_tests() -> list[str]:
    """The files, and the folder, with tests that need a GPU; relative to the checkout."""
    marked = re.compile(r"mark\.(multi_)?gpu\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(path.read_text(encoding="utf-8"))
    ]
    return ["tests/gpu", *(path for path in found if not path.startswith("tests/gpu/"))]
