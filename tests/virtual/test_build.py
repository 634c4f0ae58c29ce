"""The backend as an extension; how extensions are compiled and cached is in test_native.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from dataparallel.virtual import backend
from tests.virtual.oracle import run_python


def test_backend_of_this_process_is_loaded_once() -> None:
    assert backend.native_extension().load() is backend.required()


def test_second_process_finds_the_cache(tmp_path: Path) -> None:
    compiled = backend.native_extension().path().parent
    shutil.copytree(compiled, tmp_path / compiled.name)
    code = "import dataparallel.virtual as v; v.enable(2); print(v.device_count())"
    done = run_python(code, DATAPARALLEL_CACHE_DIR=str(tmp_path), CXX="/nonexistent", PATH="")
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_first_unit_names_sources() -> None:
    stems = {source.stem for source in backend.native_extension().sources.glob("*.cpp")}
    assert backend.native_extension().first_unit < stems


def test_enable_tells_why_it_cannot_compile(tmp_path: Path) -> None:
    code = "import dataparallel.virtual as v; v.enable(2)"
    done = run_python(code, DATAPARALLEL_CACHE_DIR=str(tmp_path), CXX="/nonexistent")
    message = "cannot compile the virtual device: CXX is '/nonexistent', and there is no such"
    assert f"RuntimeError: {message}" in done.stderr
