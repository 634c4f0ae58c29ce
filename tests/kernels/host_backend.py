"""Compiles the kernels for the host and launches them on CPU tensors. See host/host.h."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import Backend
from dataparallel.kernels.native import cache_directory

_HEADERS = Path(__file__).parent / "host"

# Products and sums are rounded one by one, as with the options for NVIDIA's compilers. Undefined
# behavior of C++, above all an address that is not a multiple of what it has to be, ends the
# process.
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-shared",
    "-fPIC",
    # Two sources may have functions of the same name, each with shared memory of its own.
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    # Memory that a kernel reads before it was written must not happen to hold zeros.
    "-ftrivial-auto-var-init=pattern",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fsanitize=float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    # It checks that jumps go up a stack; those between fibers do not.
    "-U_FORTIFY_SOURCE",
)


class HostBackend(Backend):
    """Kernels on CPU tensors.

    Args:
        schedule: The order in which the threads of a block run: 0 forwards, 1 backwards, others
            shuffled.
        blocks: The answer of :meth:`most_blocks`: few, so that every kernel has to loop.

    Attributes:
        launches: The names of the kernels that were launched, in order.
    """

    def __init__(self, schedule: int = 0, blocks: int = 3) -> None:
        self._schedule = schedule
        self._blocks = blocks
        self.launches: list[str] = []

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def most_blocks(self, device: torch.device) -> int:
        return self._blocks

    def load(self, device: torch.device, source: str) -> None:
        library(source)

    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        blocks: int,
        parameters: ctypes.Structure,
    ) -> None:
        if blocks == 0:
            return
        found = library(source)
        assert blocks > 0, f"{kernel} was launched with {blocks} blocks"
        size = getattr(found, f"{kernel}_bytes")()
        assert size == ctypes.sizeof(parameters), "the struct in Python is not that of the kernel"
        self.launches.append(kernel)
        status = getattr(found, kernel)(blocks, self._schedule, ctypes.byref(parameters))
        assert status == 0, f"some threads of {kernel} never reached a barrier that others wait at"


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """Return the kernels of one source of ``csrc/``, compiled for the host."""
    return library_of(compiler.source_text(source), source)


def library_of(text: str, name: str) -> ctypes.CDLL:
    """Kernels compiled for the host; kept for the next process.

    Args:
        text: Their source, with all that it includes.
        name: The name of the file, for a reader of error messages.
    """
    text = f'#include "{_header()}"\n{text}'
    path = _cached(text) / f"{name}.so"
    with _locked(path.parent):
        if not path.exists():
            _compile(text, f"{name}.cpp", path)
    return ctypes.CDLL(str(path))


def _header() -> Path:
    """Return a header with all that the kernels find, beside what g++ has made of it.

    To compile it takes half of the time of a small kernel.
    """
    text = '#include "host.h"\n'
    path = _cached(text) / "all.h"
    made = path.with_suffix(".h.gch")
    with _locked(path.parent):
        if not made.exists():
            path.write_text(text, encoding="utf-8")
            _compile(text, path.name, made)
    return path


def _cached(text: str) -> Path:
    """Return the folder of what becomes of a text."""
    headers = (path.read_text(encoding="utf-8") for path in sorted(_HEADERS.glob("*.h")))
    parts = (text, *headers, *_FLAGS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_directory() / f"kernels-{digest}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(text: str, name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, made = Path(folder) / name, Path(folder) / path.name
        source.write_text(text, encoding="utf-8")
        # The place of the headers changes nothing: the result of another checkout is as good.
        command = ["g++", *_FLAGS, f"-I{_HEADERS}", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        os.replace(made, path)
