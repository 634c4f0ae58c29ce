"""Compiling and caching the backend."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dataparallel.virtual import build
from tests.virtual.oracle import run_python


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATAPARALLEL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_directory() == Path.home() / ".cache" / "dataparallel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / "dataparallel"
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "own"))
    assert build.cache_directory() == tmp_path / "own"


def test_fingerprint_depends_on_sources_and_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = build._fingerprint()
    assert build._fingerprint() == before
    sources = tmp_path / "csrc"
    shutil.copytree(build._SOURCES, sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build._fingerprint() == before
    with (sources / "devices.cpp").open("a") as file:
        file.write("// changed\n")
    changed = build._fingerprint()
    assert changed != before
    monkeypatch.setattr(build.torch, "__version__", "9.9")  # type: ignore[attr-defined]
    assert build._fingerprint() not in (before, changed)


def test_second_process_finds_the_cache(tmp_path: Path) -> None:
    compiled = build.cache_directory() / f"virtual-{build._fingerprint()}"
    shutil.copytree(compiled, tmp_path / compiled.name)
    code = "import dataparallel.virtual as v; v.enable(2); print(v.device_count())"
    done = run_python(code, DATAPARALLEL_CACHE_DIR=str(tmp_path), CXX="/nonexistent", PATH="")
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler"):
        build.load()
    monkeypatch.setenv("CXX", "my-compiler -m64")
    with pytest.raises(RuntimeError, match="CXX is 'my-compiler -m64', and there is no such"):
        build.load()


def test_no_python_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"there is no Python\.h in .*python3-dev"):
        build.load()


def test_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such luck\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"(?s)exit status 4 of.*compiler.*no such luck"):
        build.load()
    assert "compiling the virtual device, once" in capfd.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(blocked))
    with pytest.raises(RuntimeError, match="set DATAPARALLEL_CACHE_DIR to a directory"):
        build.load()


def fake_compiler(directory: Path, log: Path) -> Path:
    """A compiler that is slow, notes its calls, and copies the real result."""
    real = build.cache_directory() / f"virtual-{build._fingerprint()}" / f"{build._NAME}.so"
    compiler = directory / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys, time\n"
        f"open({str(log)!r}, 'a').write('called\\n')\n"
        "time.sleep(0.5)\n"
        f"shutil.copy({str(real)!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    compiler.chmod(0o755)
    return compiler


def test_processes_that_start_together_compile_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    compiler = fake_compiler(tmp_path, log)
    results: list[str] = []
    code = "import dataparallel.virtual as v; v.enable(2); print(v.device_count())"

    def start() -> None:
        done = run_python(code, DATAPARALLEL_CACHE_DIR=str(tmp_path / "cache"), CXX=str(compiler))
        results.append(done.stdout)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["2\n"] * 3
    assert len(log.read_text().splitlines()) == 3  # Two units and the link.


def test_killed_builder_leaves_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho started\nsleep 2\n")
    sleeper.chmod(0o755)
    code = f"""
import os, threading, time
os.environ.update(DATAPARALLEL_CACHE_DIR={str(cache)!r}, CXX={str(sleeper)!r})
import dataparallel.virtual as v
v.enable(2)
"""
    builder = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert builder.stderr is not None
    assert "compiling" in builder.stderr.readline()
    builder.kill()
    builder.wait()
    builder.stderr.close()
    compiler = fake_compiler(tmp_path, tmp_path / "log")
    done = run_python(
        "import dataparallel.virtual as v; v.enable(2); print(v.device_count())",
        DATAPARALLEL_CACHE_DIR=str(cache),
        CXX=str(compiler),
    )
    assert done.stdout == "2\n", done.stderr
