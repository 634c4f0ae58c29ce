"""Compiling, caching and loading extensions: a small one, which is compiled in a moment."""

from __future__ import annotations

import dataclasses
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from dataparallel.kernels import native
from dataparallel.kernels.native import NativeExtension
from tests.virtual.oracle import run_python

MODULE = """
#include <Python.h>
#include "answer.h"

#define JOINED(prefix, name) prefix##name
#define INIT(name) JOINED(PyInit_, name)
#define QUOTED(name) #name
#define TEXT(name) QUOTED(name)

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, nullptr};

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
    PyObject* made = PyModule_Create(&definition);
    PyModule_AddIntConstant(made, "answer", answer());
    return made;
}
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeExtension:
    """An extension of two sources and a header, in a cache and a process without any other."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.h").write_text("int answer();\n")
    (sources / "answer.cpp").write_text('#include "answer.h"\nint answer() { return 42; }\n')
    (sources / "module.cpp").write_text(MODULE)
    return NativeExtension("small_extension", "the small extension", "small", sources)


def compiler_that_says(directory: Path, text: str) -> str:
    """Return a compiler that first runs a line of shell, and notes each call in ``log``."""
    compiler = directory / "compiler"
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {directory}/log\n{text}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    return str(compiler)


def calls(directory: Path) -> list[str]:
    return (directory / "log").read_text().splitlines()


def program(extension: NativeExtension) -> str:
    """Prints the answer of an extension, in another process."""
    return f"""
from pathlib import PosixPath
from dataparallel.kernels.native import NativeExtension
print({extension!r}.load().answer)
"""


def test_path_depends_on_sources_and_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    before = small.path()
    assert before.name == "small_extension.so"
    assert before.parent.parent == native.cache_directory()
    shutil.copytree(small.sources, tmp_path / "copy")
    copy = dataclasses.replace(small, sources=tmp_path / "copy")
    (copy.sources / "notes.txt").write_text("no source")
    assert copy.path() == before
    paths = {before}
    for name in ("answer.cpp", "answer.h"):
        with (copy.sources / name).open("a") as file:
            file.write("// changed\n")
        paths.add(copy.path())
    monkeypatch.setattr(native.torch, "__version__", "9.9")  # type: ignore[attr-defined]
    paths.add(copy.path())
    assert len(paths) == 4


def test_threads_and_processes_that_start_together_compile_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    small: NativeExtension,
    capfd: pytest.CaptureFixture[str],
) -> None:
    compiler = compiler_that_says(tmp_path, "sleep 0.3")
    monkeypatch.setenv("CXX", compiler)
    load_file, initialized = native._load_file, []

    def slow_load_file(name: str, path: Path) -> ModuleType:
        initialized.append(name)
        time.sleep(0.1)
        return load_file(name, path)

    monkeypatch.setattr(native, "_load_file", slow_load_file)
    with ThreadPoolExecutor(4) as pool:
        elsewhere = [pool.submit(run_python, program(small)) for _ in range(2)]
        # Until one of them compiles, and the other one waits.
        while not (tmp_path / "log").exists() and not all(each.done() for each in elsewhere):
            time.sleep(0.01)
        first, other = pool.map(lambda _: small.load(), range(2))
        said = [done.result() for done in elsewhere]
    assert (first.__name__, first.answer, other) == ("small_extension", 42, first)
    assert initialized == ["small_extension"]
    assert [done.stdout for done in said] == ["42\n"] * 2
    assert len(calls(tmp_path)) == 3  # Two units and the link.
    told = "dataparallel: compiling the small extension, once for this version of torch"
    assert [told in done.stderr for done in said].count(True) == 1
    assert [path.name for path in small.path().parent.iterdir() if path.is_dir()] == []
    # Whatever changes, this process has it.
    (small.sources / "answer.cpp").write_text("int answer() { return 43; }\n")
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert dataclasses.replace(small).load() is first
    assert capfd.readouterr().err == ""
    other = dataclasses.replace(small, name="other_extension").load()
    assert (other.__name__, other.answer) == ("other_extension", 43)
    assert told in capfd.readouterr().err


def test_what_can_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    (tmp_path / "file").write_text("")
    failing = compiler_that_says(tmp_path, "echo no such luck; exit 4")
    cases: list[tuple[dict[str, str], str]] = [
        ({"PATH": str(tmp_path), "CXX": ""}, r"the small extension: there is no C\+\+ compiler"),
        ({"CXX": "my-compiler -m64"}, "CXX is 'my-compiler -m64', and there is no such"),
        (
            {"CXX": failing},
            r"(?s)compile the small extension for torch.*status 4 of.*compiler.*no such luck",
        ),
        (
            {"DATAPARALLEL_CACHE_DIR": str(tmp_path / "file")},
            r"cannot keep compiled code in .*set DATAPARALLEL_CACHE_DIR to a directory",
        ),
    ]
    for environment, message in cases:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(RuntimeError, match=message):
                small.load()
        assert not list((tmp_path / "cache").rglob("*.so"))
        assert not list((tmp_path / "cache").rglob("*.o"))
    with monkeypatch.context() as patch:
        patch.setattr(native.sysconfig, "get_path", lambda name: str(tmp_path))  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"small ext.* no Python\.h in .*python3-dev"):
            small.load()
    assert small.load().answer == 42, "a failed load must not keep the next one from working"
