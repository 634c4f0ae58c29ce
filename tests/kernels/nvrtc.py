"""NVIDIA's runtime compiler without CuPy, from wherever its library is."""

from __future__ import annotations

import ctypes
import functools
import re
import site
from pathlib import Path

from dataparallel.kernels import sources


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library of torch's or pip's packages or of an installed toolkit; None without one."""
    for path in (*_files(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _files() -> list[Path]:
    folders = [Path(folder, "nvidia") for folder in site.getsitepackages()]
    folders += Path("/usr/local").glob("cuda*")
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("libnvrtc.so*"))
        if not path.name.endswith(".alt")
    ]


def entries(library: ctypes.CDLL, source: str, architecture: str) -> set[str]:
    """Compile a source as CuPy's users do, and tell which kernels came out."""
    text = sources.read(source).encode()
    options = (*sources.COMPILER_OPTIONS, f"--gpu-architecture={architecture}")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    name = f"{source}.cu".encode()
    failed = library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    assert not failed, f"nvrtcCreateProgram returned {failed}"
    try:
        failed = library.nvrtcCompileProgram(program, len(options), given)
        assert not failed, _text(library, "ProgramLog", program)
        return set(re.findall(r"\.entry (\w+)\(", _text(library, "PTX", program)))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    assert not getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    assert not getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode()
