"""NVIDIA's runtime compiler, through CuPy: from a source to a file with machine code.

Given a source, `cupy.RawModule` compiles it with ``-ftz=true``, which no other option undoes:
numbers below the smallest normal float32 would become zero, unlike torch's. It also asks for CUDA's
headers, which these sources do not include. So they are compiled here, with our options alone.
`cupy.RawModule` gets the file with the result, which it loads on each device that needs it. The
file stays in the cache of this package, because compiling one source takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from dataparallel.kernels.cache_folder import (
    cache_directory,
    close_to_others,
    is_trusted,
    keeping_code,
)

#: The folder of the CUDA sources.
FOLDER = Path(__file__).parent / "csrc"

#: Options of NVIDIA's compilers. Without them a product and a sum would be rounded once where torch
#: rounds twice, and results would differ in the last bit.
COMPILER_OPTIONS = ("-std=c++17", "--fmad=false")

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
# The name of a kernel: a section of machine code, or an entry of the intermediate code.
_KERNEL = re.compile(rb"\0\.text\.(\w+)(?=\0)|\.entry (\w+)\(")


def source_names() -> list[str]:
    """Return the names of all sources, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@functools.cache
def source_text(name: str) -> str:
    """Return the text of a source, with the headers in the place where they are included first.

    This text finds a compiled kernel again, and must show a change of a header.
    """
    seen: set[str] = set()

    def inlined(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
        return _INCLUDE.sub(lambda found: inlined(found[1]), text)

    return inlined(f"{name}.cu")


class Compiled(NamedTuple):
    """The kernels of one source, for one kind of device.

    Attributes:
        path: A file that ``cupy.RawModule(path=...)`` takes.
        kernels: The names of the kernels in it.
    """

    path: str
    kernels: tuple[str, ...]


@functools.cache
def compile_source(nvrtc: Any, source: str, capability: tuple[int, int]) -> Compiled:
    """Compile a source, or find it in the cache.

    Args:
        nvrtc: The module ``cupy.cuda.nvrtc``.
        source: One of :func:`source_names`.
        capability: Compute capability of the device, for example ``(9, 0)``.

    Raises:
        RuntimeError: The compiler refuses the source, with what it says; or the result cannot be
            kept where nobody else can write.
    """
    architecture = _architecture(nvrtc, capability)
    options = (*COMPILER_OPTIONS, f"--gpu-architecture={architecture}")
    parts = (source_text(source), *options, *map(str, nvrtc.getVersion()))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    suffix = "cubin" if architecture.startswith("sm_") else "ptx"
    path = cache_directory() / f"kernels-{digest}" / f"{source}.{suffix}"
    close_to_others(path.parent)
    names = _names(path.read_bytes()) if is_trusted(path) else ()
    if not names:
        # Not there, or damaged.
        code = _compile(nvrtc, source, options, suffix)
        _keep(path, code)
        names = _names(code)
    return Compiled(str(path), names)


def _names(code: bytes) -> tuple[str, ...]:
    return tuple(sorted({(found[1] or found[2]).decode() for found in _KERNEL.finditer(code)}))


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    """Return the device's own; for one newer than the compiler, one that the driver extends."""
    device = 10 * capability[0] + capability[1]
    known = [number for number in nvrtc.getSupportedArchs() if number <= device]
    if not known:
        major, minor = nvrtc.getVersion()
        raise RuntimeError(
            f"the device has compute capability {capability[0]}.{capability[1]}, for which the "
            f"compiler of CUDA {major}.{minor} is too new; install one that still supports it"
        )
    newest = max(known)
    return f"sm_{device}" if newest == device else f"compute_{newest}"


def _compile(nvrtc: Any, source: str, options: tuple[str, ...], suffix: str) -> bytes:
    program = nvrtc.createProgram(source_text(source), f"{source}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"{source}.cu does not compile: {error}\n{log}") from error
        code: bytes = nvrtc.getCUBIN(program) if suffix == "cubin" else nvrtc.getPTX(program)
        return code
    finally:
        nvrtc.destroyProgram(program)


def _keep(path: Path, code: bytes) -> None:
    """Write the file at once, since other processes may look for it."""
    with keeping_code(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as name:
        made = Path(name) / path.name
        made.write_bytes(code)
        made.chmod(0o644)
        os.replace(made, path)
