"""How the library is found, opened and shut down, and whose module ``pynvml`` is."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pynvml
import pytest

from dataparallel.tools.monitor.sources.nvml_errors import package_problem
from dataparallel.tools.monitor.sources.nvml_library import Library
from tests.monitor.nvml.stub import EVERYTHING, Stub

ROOT = pathlib.Path(__file__).parents[3]


def test_a_process_finds_the_library_as_it_finds_the_driver_s(
    libraries: Callable[[str], pathlib.Path],
) -> None:
    program = """
        import json
        from dataparallel.tools.monitor.sources.nvml import NvmlSource
        source = NvmlSource()
        early = "nvidia-ml" in open("/proc/self/maps").read()
        reading = source.read()
        source.close()
        maps = open("/proc/self/maps").read()
        print(json.dumps([
            early,
            [[one.device, one.name, one.value("power")] for one in reading.devices],
            sorted({line.split("/")[-1] for line in maps.splitlines() if "nvidia-ml" in line}),
            "libcuda.so" in maps,
        ]))
    """
    folder = libraries("").parent
    script = "devices 2\n" + EVERYTHING + "set 1 power 50000\nname 1 NVIDIA Stub 2"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "NVML_STUB": script,
            "CUDA_VISIBLE_DEVICES": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        False,
        [["nvml:0", "Stub", 300.5], ["cuda:0", "NVIDIA Stub 2", 50.0]],
        ["libnvidia-ml.so.1"],
        False,
    ]


# --- opening and shutting down ---------------------------------------------------------------


def test_it_is_opened_once_by_many_threads(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    barrier = threading.Barrier(8, timeout=10)
    second = threading.Barrier(2, timeout=0.2)
    init = pynvml.nvmlInit

    def slowly() -> None:
        # Long enough for another thread to come here too, if it may.
        with contextlib.suppress(threading.BrokenBarrierError):
            second.wait()
        init()

    monkeypatch.setattr(pynvml, "nvmlInit", slowly)
    modules: list[Any] = []

    def opens() -> None:
        barrier.wait()
        modules.append(library.open())

    threads = [threading.Thread(target=opens) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(modules) == 8
    assert stub.opened == 1
    library.close()
    library.close()
    assert stub.opened == 0


def test_others_who_use_it_are_not_disturbed(stub: Stub) -> None:
    library = Library()
    module = library.open()
    module.nvmlInit()
    library.close()
    assert stub.opened == 1
    assert module.nvmlDeviceGetCount() == 1
    module.nvmlShutdown()


def test_a_forked_process_opens_its_own(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    library.open()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    library.open()
    assert stub.opened == 2
    monkeypatch.undo()
    # What belongs to another process is not shut down here.
    library.close()
    assert stub.opened == 2


# --- whose module it is ----------------------------------------------------------------------


class Installed:
    """An installed distribution."""

    def __init__(self, *files: metadata.PackagePath) -> None:
        self.files = list(files)


def file(folder: pathlib.Path, name: str, size: int | None) -> metadata.PackagePath:
    path = metadata.PackagePath(name)
    path.size = size
    path.dist = type("Dist", (), {"locate_file": lambda self, one: folder / one})()
    return path


def problem(**installed: Installed) -> str | None:
    def find(name: str) -> Installed:
        if name.replace("-", "_") not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    found = package_problem(find)
    assert found is None or found[1].endswith("pip install nvidia-ml-py")
    return found[0] if found else None


def test_whose_module_it_is(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pynvml.py").write_text("x" * 100)
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml" / "__init__.py").write_text("")
    right = Installed(file(tmp_path, "pynvml.py", 100), file(tmp_path, "example.py", 3))
    other_size = Installed(file(tmp_path, "pynvml.py", 99))
    gone = Installed(file(tmp_path / "nowhere", "pynvml.py", 99))
    old = Installed(file(tmp_path, "pynvml/__init__.py", 0))
    # Newer ones bring nothing but the dependence on the right one.
    renamed = Installed(file(tmp_path, "pynvml_utils/smi.py", 5))
    assert problem() is None
    assert problem(nvidia_ml_py=right) is None
    assert problem(nvidia_ml_py=right, pynvml=renamed) is None
    assert problem(nvidia_ml_py=Installed(file(tmp_path, "pynvml.py", None))) is None
    overwritten = "something has overwritten the module pynvml of nvidia-ml-py"
    assert problem(nvidia_ml_py=other_size) == overwritten
    assert problem(nvidia_ml_py=gone) == overwritten
    assert problem(nvidia_ml_py=right, pynvml=old) == (
        "nvidia-ml-py and pynvml have overwritten each other's module pynvml"
    )
    assert problem(nvidia_ml_py3=right) == (
        "the module pynvml comes from nvidia-ml-py3, which is not maintained"
    )


def test_the_module_of_this_python_is_the_right_one() -> None:
    assert package_problem() is None
