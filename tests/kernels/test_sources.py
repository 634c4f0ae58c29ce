"""The files in ``kernels/csrc``: what a compiler gets, and that a wheel has them."""

from __future__ import annotations

import collections
import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest

from dataparallel.kernels import sources
from dataparallel.kernels.backend import THREADS
from tests.kernels.host_backend import library
from tests.kernels.kernel_names import kernels_of

ROOT = Path(__file__).parents[2]
FILES = sorted(sources.FOLDER.iterdir())

# What CUDA allows the parameters of a kernel, on all devices.
MOST_BYTES = 4096
MOST_LINES = 400


def test_names_are_those_of_the_files() -> None:
    assert "reduce_add" in sources.names()
    assert [f"{name}.cu" for name in sources.names()] == [
        path.name for path in FILES if path.suffix == ".cu"
    ]
    assert {path.suffix for path in FILES} == {".cu", ".cuh"}


@pytest.mark.parametrize("name", sources.names())
def test_headers_are_in_the_text_once(name: str) -> None:
    text = sources.read(name)
    assert "#include" not in text and "#pragma once" not in text
    assert re.findall(r"constexpr int THREADS = (\d+);", text) == [str(THREADS)]
    definitions = re.findall(r"^(?:struct|class) (?:alignas\(\d+\) )?(\w+) \{", text, re.MULTILINE)
    twice = [each for each, n in collections.Counter(definitions).items() if n > 1]
    assert not twice


def test_a_header_comes_where_it_is_included_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\nint b;\n')
    (tmp_path / "main.cu").write_text('// Main.\n#include "b.cuh"\n#include "a.cuh"\nint c;\n')
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    sources.read.cache_clear()
    try:
        text = sources.read("main")
    finally:
        sources.read.cache_clear()
    assert [line for line in text.splitlines() if line] == [
        "// Main.",
        "int a;",
        "int b;",
        "int c;",
    ]


@pytest.mark.parametrize("name", sources.names())
def test_parameters_fit_into_a_launch(name: str) -> None:
    assert kernels_of(name)
    for kernel in kernels_of(name):
        # Of the host's compiler, which lays out structs as NVIDIA's does.
        assert 0 < getattr(library(name), f"{kernel}_bytes")() <= MOST_BYTES, kernel


def test_kernels_have_names_of_their_own() -> None:
    names = collections.Counter(kernel for name in sources.names() for kernel in kernels_of(name))
    assert not [name for name, n in names.items() if n > 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_short_and_begin_with_what_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("// ")
    assert max(map(len, lines)) <= 100


def test_a_wheel_has_the_sources() -> None:
    tomllib = pytest.importorskip("tomllib")
    setup: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]
    folder = ROOT / setup["package-dir"]["dataparallel.kernels"]
    modules = {path.parent.relative_to(folder) for path in folder.rglob("*.py")}
    packages = {".".join(("dataparallel.kernels", *each.parts)) for each in modules}
    assert packages == {each for each in setup["packages"] if "kernels" in each}
    data = setup["package-data"]["dataparallel.kernels"]
    assert FILES
    for path in FILES:
        name = path.relative_to(folder).as_posix()
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in data), name
