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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "small-0123"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_it_is_made_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        close_to_others(folder)
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder.parent)) == (0o755, 0o755)
    # What a loose umask has made is closed, and its files are not trusted.
    folder.chmod(0o775)
    code = folder / "code.so"
    code.write_bytes(b"code")
    code.chmod(0o775)
    close_to_others(folder)
    assert mode(folder) == 0o755 and not is_trusted(code)
    code.chmod(0o755)
    assert is_trusted(code)
    (folder / "link.so").symlink_to(code)
    (folder / "folder.so").mkdir()
    assert not any(map(is_trusted, (folder / "link.so", folder / "folder.so", folder / "none.so")))


def test_a_link_to_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=r"a link.*set DATAPARALLEL_CACHE_DIR"):
        close_to_others(folder)


@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_folder_above_that_all_can_change_is_refused(
    folder: Path, tmp_path: Path, behind_a_link: bool
) -> None:
    open_folder = folder.parent
    open_folder.mkdir()
    open_folder.chmod(0o777)
    if behind_a_link:
        (tmp_path / "link").symlink_to(open_folder)
        folder = tmp_path / "link" / folder.name
    with pytest.raises(RuntimeError, match=f"chmod o-w {open_folder}|chmod o-w {tmp_path}/link"):
        close_to_others(folder)
    # As /tmp is.
    open_folder.chmod(0o1777)
    close_to_others(folder)


# --- extensions ------------------------------------------------------------------------------


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
    """What somebody else would like to be loaded."""
    path = extension.path()
    path.parent.mkdir(parents=True)
    path.write_text("hostile")
    path.chmod(0o644)
    return path


def put_behind_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize(
    ("change", "loaded"),
    [
        pytest.param(lambda path: None, "hostile", id="a trusted file"),
        pytest.param(lambda path: path.chmod(0o666), "ours\n", id="one that others can write"),
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


def test_in_an_open_folder_nothing_is_loaded(extension: NativeExtension, planted: Path) -> None:
    planted.parent.parent.chmod(0o777)
    told = r"cannot keep compiled code in .*: every user can .*chmod"
    with pytest.raises(RuntimeError, match=told):
        extension.load()
    planted.parent.parent.chmod(0o755)
    planted.unlink()
    assert str(extension.load()) == "ours\n"


@needs_root
def test_in_the_folder_of_somebody_else_nothing_is_loaded(
    extension: NativeExtension, planted: Path
) -> None:
    os.chown(planted.parent, STRANGER, -1)
    told = f"belongs to the user with number {STRANGER}, not to 0.*DATAPARALLEL_CACHE_DI"
    with pytest.raises(RuntimeError, match=told):
        extension.load()
