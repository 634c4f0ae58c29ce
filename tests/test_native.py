"""Compiling, caching and loading extensions: a small one, which is compiled in a moment."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import textwrap
import threading
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
    (sources / "module.cpp").write_text(textwrap.dedent(MODULE))
    return NativeExtension("small_extension", "the small extension", "small", sources)


def compiler_that_notes(directory: Path, before: str = "") -> Path:
    """A compiler that notes each call in ``log``, beside it."""
    compiler = directory / "compiler"
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {directory}/log\n{before}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def calls(directory: Path) -> list[str]:
    log = directory / "log"
    return log.read_text().splitlines() if log.exists() else []


def program(extension: NativeExtension) -> str:
    """Prints the answer of an extension, in another process."""
    return f"""
from pathlib import PosixPath
from dataparallel.kernels.native import NativeExtension
print({extension!r}.load().answer)
"""


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATAPARALLEL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert native.cache_directory() == Path.home() / ".cache" / "dataparallel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_directory() == tmp_path / "dataparallel"
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "own"))
    assert native.cache_directory() == tmp_path / "own"


def test_path_depends_on_sources_and_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    before = small.path()
    assert before.name == "small_extension.so"
    assert before.parent.name.startswith("small-")
    assert before.parent.parent == native.cache_directory()
    shutil.copytree(small.sources, tmp_path / "copy")
    copy = dataclasses.replace(small, sources=tmp_path / "copy")
    assert copy.path() == before
    paths = {before}
    for name in ("answer.cpp", "answer.h"):
        with (copy.sources / name).open("a") as file:
            file.write("// changed\n")
        paths.add(copy.path())
    monkeypatch.setattr(native.torch, "__version__", "9.9")  # type: ignore[attr-defined]
    paths.add(copy.path())
    assert len(paths) == 4
    (copy.sources / "notes.txt").write_text("no source")
    assert copy.path() in paths


# --- loading ---------------------------------------------------------------------------------


def test_module_is_compiled_and_loaded(
    small: NativeExtension, capfd: pytest.CaptureFixture[str]
) -> None:
    module = small.load()
    assert (module.__name__, module.answer) == ("small_extension", 42)
    said = capfd.readouterr().err
    assert "dataparallel: compiling the small extension, once for this version of torch" in said
    assert [path.name for path in small.path().parent.iterdir() if path.is_dir()] == []


def test_first_module_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    first = small.load()
    (small.sources / "answer.cpp").write_text("int answer() { return 43; }\n")
    assert small.load() is first
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert dataclasses.replace(small).load() is first
    other = dataclasses.replace(small, name="other_extension").load()
    assert (other.__name__, other.answer) == ("other_extension", 43)
    assert small.load() is first


def test_threads_that_start_together_get_one_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    monkeypatch.setenv("CXX", str(compiler_that_notes(tmp_path)))
    load_file, initialized = native._load_file, []

    def slow_load_file(name: str, path: Path) -> ModuleType:
        initialized.append(name)
        time.sleep(0.1)
        return load_file(name, path)

    monkeypatch.setattr(native, "_load_file", slow_load_file)
    together = threading.Barrier(4)

    def load(_: int) -> int:
        together.wait(60)
        return id(small.load())

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(load, range(4)))) == 1
    assert initialized == ["small_extension"]
    assert len(calls(tmp_path)) == 3  # Two units and the link.


def test_other_process_finds_the_cache(small: NativeExtension) -> None:
    small.load()
    done = run_python(program(small), CXX="/nonexistent", PATH="")
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_processes_that_start_together_compile_once(tmp_path: Path, small: NativeExtension) -> None:
    compiler = compiler_that_notes(tmp_path, "sleep 0.5")

    def start(_: int) -> str:
        return run_python(program(small), CXX=str(compiler)).stdout

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(start, range(3))) == ["42\n"] * 3
    assert len(calls(tmp_path)) == 3  # Two units and the link.


def test_killed_builder_leaves_no_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 2\n")
    sleeper.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(sleeper))
        builder = subprocess.Popen(
            [sys.executable, "-c", program(small)], stderr=subprocess.PIPE, text=True
        )
    assert builder.stderr is not None
    assert "compiling" in builder.stderr.readline()
    builder.kill()
    builder.wait()
    builder.stderr.close()
    assert small.load().answer == 42


# --- what can be missing ---------------------------------------------------------------------


def test_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        with pytest.raises(RuntimeError, match=r"the small extension: there is no C\+\+ compiler"):
            small.load()
        patch.setenv("CXX", "my-compiler -m64")
        with pytest.raises(RuntimeError, match="CXX is 'my-compiler -m64', and there is no such"):
            small.load()
    assert small.load().answer == 42, "a failed load must not keep the next one from working"


def test_no_python_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: str(tmp_path))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"small extension: .* no Python\.h in .*python3-dev"):
        small.load()


def test_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such luck\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        RuntimeError,
        match=r"(?s)compile the small extension for torch.*status 4 of.*compiler.*no such luck",
    ):
        small.load()
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: NativeExtension
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(blocked))
    message = r"cannot keep compiled code in .*set DATAPARALLEL_CACHE_DIR to a directory"
    with pytest.raises(RuntimeError, match=message):
        small.load()


# --- units -----------------------------------------------------------------------------------


def units(extension: NativeExtension, directory: Path) -> list[list[str]]:
    """The stems of the sources in each unit."""
    return [
        [Path(line.split('"')[1]).stem for line in unit.read_text().splitlines()]
        for unit in extension._write_units(directory)
    ]


def test_first_unit_is_as_named(tmp_path: Path, small: NativeExtension) -> None:
    for stem in ("b", "a"):
        (small.sources / f"{stem}.cpp").write_text("// " + "long " * 1000)
    named = dataclasses.replace(small, first_unit=frozenset({"b", "a"}))
    assert units(named, tmp_path) == [["a", "b"], ["answer", "module"]]
    assert named.load().answer == 42


@pytest.mark.parametrize("named", [False, True])
def test_single_source_is_a_single_unit(
    tmp_path: Path, small: NativeExtension, named: bool
) -> None:
    (small.sources / "answer.cpp").unlink()
    (small.sources / "answer.h").write_text("static int answer() { return 44; }\n")
    single = dataclasses.replace(small, first_unit=frozenset({"module"} if named else ()))
    assert units(single, tmp_path) == [["module"]]
    assert single.load().answer == 44
