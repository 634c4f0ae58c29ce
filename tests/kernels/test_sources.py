"""The files in ``kernels/csrc``: what compilers get and make of them, and that a wheel has them."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import THREADS
from dataparallel.kernels.native import cache_directory
from tests.kernels.host_backend import library

ROOT = Path(__file__).parents[2]
FILES = sorted(compiler.FOLDER.iterdir())

# CUDA's limit for the parameters of a kernel, on all devices.
MOST_BYTES = 4096

_MARK = re.compile(r"@kernel (\w+) [^@]+@")


@functools.cache
def kernels_of(source: str) -> list[str]:
    """Return the names of the kernels of a source."""
    text = "#define KERNELS_ON_HOST\n#define KERNEL(name, Parameters) @kernel name Parameters@\n"
    done = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-"],
        input=text + compiler.source_text(source),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = _MARK.findall(done.stdout)
    assert len(found) == len({*found}), f"{source}.cu has two kernels of one name"
    return found


@pytest.mark.parametrize("name", compiler.source_names())
def test_a_source_is_one_text_with_kernels_of_its_own(name: str) -> None:
    text = compiler.source_text(name)
    assert text.startswith("// ") and max(map(len, text.splitlines())) <= 100
    assert "#include" not in text and "#pragma once" not in text
    assert re.findall(r"constexpr int THREADS = (\d+);", text) == [str(THREADS)]
    definitions = re.findall(r"^(?:struct|class) (?:alignas\(\d+\) )?(\w+) \{", text, re.MULTILINE)
    assert len(definitions) == len({*definitions})
    assert kernels_of(name)
    for kernel in kernels_of(name):
        # The host's compiler lays out structs as NVIDIA's does.
        assert 0 < getattr(library(name), f"{kernel}_bytes")() <= MOST_BYTES, kernel
    others = {
        each for other in compiler.source_names() if other != name for each in kernels_of(other)
    }
    assert others.isdisjoint(kernels_of(name))


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


# --- NVIDIA's compiler -------------------------------------------------------------------------

#: A kernel, and the bytes that it keeps outside of registers: by design, and for want of them.
_PROPERTIES = re.compile(
    r"Compiling entry function '(\w+)'.*\n.*\n *(\d+) bytes stack frame, (\d+) bytes spill stores"
)


def said_by_nvcc(text: str) -> str:
    """Return nvcc's output for a source, with the options of a real run; kept for later runs."""
    options = (*compiler.COMPILER_OPTIONS, "-Werror=all-warnings", "-Xptxas=-v", "-arch=sm_90")
    digest = hashlib.sha256("\0".join((text, *options)).encode()).hexdigest()[:16]
    kept = cache_directory() / f"nvcc-{digest}.txt"
    if kept.exists():
        return kept.read_text()
    command = ["nvcc", *options, "-cubin", "-o", os.devnull, "-x", "cu", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=240)
    if done.returncode == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout + done.stderr)
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("source", compiler.source_names())
def test_nvcc_warns_of_nothing_and_keeps_all_in_registers(source: str) -> None:
    said = said_by_nvcc(compiler.source_text(source))
    wanted = [(kernel, "0", "0") for kernel in sorted(kernels_of(source))]
    assert sorted(_PROPERTIES.findall(said)) == wanted, said
