"""Compiled code is loaded only from where nobody else can have put it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dataparallel.kernels import native
from dataparallel.kernels.cache_folder import close_to_others, is_trusted
from dataparallel.kernels.native import NativeExtension

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: takes root")

STRANGER = 54321


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_it_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "small-0123"
    before = os.umask(0)
    try:
        close_to_others(folder)
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder.parent)) == (0o755, 0o755)
    # A folder that a loose umask has opened is closed.
    folder.chmod(0o775)
    close_to_others(folder)
    assert mode(folder) == 0o755


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeExtension:
    """One whose compiler writes a word in place of code, and whose loader reads it."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_load_file", lambda name, path: path.read_text())
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "cache"))
    compiler = tmp_path / "compiler"
    script = 'for word; do previous="$last"; last="$word"; done; echo ours > "$last"'
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text("")
    return NativeExtension("small", "the small extension", "small", sources)


@pytest.fixture
def planted(extension: NativeExtension) -> Path:
    """Write a file that somebody else would like to be loaded."""
    path = extension.path()
    path.parent.mkdir(parents=True)
    path.write_text("hostile")
    path.chmod(0o644)
    return path


def put_behind_a_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("change", "loaded"),
    [
        pytest.param(lambda path: None, "hostile", id="a trusted file"),
        pytest.param(lambda path: path.parents[1].chmod(0o1777), "hostile", id="as in /tmp"),
        pytest.param(lambda path: path.chmod(0o666), "ours\n", id="one that others can write"),
        pytest.param(lambda path: path.chmod(0o775), "ours\n", id="one that a group can write"),
        pytest.param(put_behind_a_link, "ours\n", id="one behind a link"),
        pytest.param(
            lambda path: os.chown(path, STRANGER, -1),
            "ours\n",
            id="one of somebody else",
            marks=needs_root,
        ),
    ],
)
def test_what_is_not_trusted_is_compiled_anew(
    change: Any, loaded: str, extension: NativeExtension, planted: Path
) -> None:
    change(planted)
    assert str(extension.load()) == loaded
    assert is_trusted(planted)


def put_above_behind_a_link(folder: Path) -> None:
    folder.parent.chmod(0o777)
    put_behind_a_link(folder.parent)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda folder: folder.parent.chmod(0o777),
            "cannot keep compiled code in .*: every user can .*chmod o-w .*/cache",
        ),
        (put_above_behind_a_link, r"chmod o-w .*/(other|cache)"),
        (put_behind_a_link, "a link.*set DATAPARALLEL_CACHE_DIR"),
        pytest.param(
            lambda folder: os.chown(folder, STRANGER, -1),
            f"belongs to the user with number {STRANGER}, not to 0.*DATAPARALLEL_CACHE_DI",
            marks=needs_root,
        ),
    ],
    ids=["open above", "open above behind a link", "a link", "of somebody else"],
)
def test_in_a_folder_that_is_refused_nothing_is_loaded(
    change: Any, told: str, extension: NativeExtension, planted: Path
) -> None:
    change(planted.parent)
    with pytest.raises(RuntimeError, match=told):
        extension.load()
