"""The compiled stand-in for NVIDIA's library, and how tests tell it what to answer."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest

SOURCE = pathlib.Path(__file__).with_name("stub.c")

#: A device that tells everything that an H100 tells.
EVERYTHING = """
    set 0 busy 40; set 0 memory-busy 25
    set 0 total 80000000000; set 0 used 20000000000; set 0 reserved 500000000
    set 0 power 300500; set 0 limit 700000; set 0 energy 5000000
    set 0 temperature 61; set 0 sm 1755; set 0 sm-max 1980; set 0 mem 2619
    set 0 corrected 3; set 0 uncorrected 0; set 0 fan 35; set 0 throttle 0
    field 0 82 0 1 70
    field 0 197 0 3 1000; field 0 198 0 3 2000
    field 0 138 * 3 10; field 0 139 * 3 20
"""


def of_device(index: int, script: str) -> str:
    """A script for device 0, as one for another."""
    commands = [line.split() for part in script.splitlines() for line in part.split(";")]
    return "\n".join(" ".join([c[0], str(index), *c[2:]]) for c in commands if c) + "\n"


def compile_stub(folder: pathlib.Path, *options: str) -> pathlib.Path:
    """Compile it, under the name under which the real one is looked for."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler: apt install gcc")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-O0", "-shared", "-fPIC", *options, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return library


class Stub:
    """A library that is loaded into this process.

    Args:
        path: Where it is.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.stub_calls.restype = ctypes.c_ulonglong
        self.library.stub_reset()

    def script(self, text: str) -> None:
        """Do what the commands say that stub.c describes."""
        self.library.stub_script(";".join(text.split("\n")).encode())

    @property
    def opened(self) -> int:
        """How often it was initialized, less how often it was shut down."""
        return int(self.library.stub_opened())

    @property
    def samples(self) -> int:
        """How many GPM samples are held."""
        return int(self.library.stub_samples())

    @property
    def calls(self) -> int:
        """How many questions it has got."""
        return int(self.library.stub_calls())
