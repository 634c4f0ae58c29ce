"""What NVIDIA's compilers make of the kernels: registers, memory, and the accesses in the code."""

from __future__ import annotations

import collections
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from dataparallel.kernels import compiler
from dataparallel.kernels.native import cache_directory

#: A100, H100 and H200, B200.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

#: The one for which every run of the tests compiles; for all of them it takes a minute and a half.
USUAL = ("sm_90",)

_FLAGS = (
    *compiler.COMPILER_OPTIONS,
    "-Werror=all-warnings",
    "-Xptxas=-v,-warn-spills",
    "-fatbin",
)

_PROPERTIES = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<architecture>sm_\w+)'\n"
    r".*Function properties for .*\n"
    r" *(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?P<others>.*)\n"
)
_SHARED = re.compile(r"(\d+) bytes smem")
_ENTRY = re.compile(r"\.entry (\w+)\(")
_ACCESS = re.compile(r"^\s*(?:@!?%\w+\s+)?((?:ld|st|atom|red)\.\S*global\S*)", re.MULTILINE)
_TYPE = re.compile(r"(?:\.v(\d))?\.[busf](\d+)$")


class Usage(NamedTuple):
    """One kernel on one architecture.

    Attributes:
        registers: Of a thread.
        shared: Bytes of shared memory of a block.
        stack: Bytes of a thread's memory for what registers do not hold by design.
        spilled: Bytes that are stored to and loaded from it for want of registers.
        accesses: How often each instruction that accesses global memory is in the code.
    """

    registers: int
    shared: int
    stack: int
    spilled: int
    accesses: dict[str, int]

    def widest(self, kind: str) -> int:
        """The most bytes that one ``"ld"`` or ``"st"`` accesses."""
        return max((_width(each) for each in self.accesses if each.startswith(kind)), default=0)


@functools.cache
def version() -> str | None:
    """The compiler's, or None where there is none."""
    if shutil.which("nvcc") is None:
        return None
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, timeout=60)
    found = re.search(r"release [\d.]+, V([\d.]+)", said.stdout)
    return found[1] if found else None


def digest_of(source: str) -> str:
    """A few characters that change with a source and the options for it."""
    parts = (compiler.source_text(source), *_FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@functools.cache
def build(source: str, architectures: tuple[str, ...] = USUAL) -> dict[str, dict[str, Usage]]:
    """Compile a source, or find what was said about it before.

    Returns:
        By architecture and kernel.
    """
    text = compiler.source_text(source)
    parts = (text, *_FLAGS, *architectures, str(version()), Path(__file__).read_text())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cache_directory() / f"nvcc-{digest}" / f"{source}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = compile_text(source, text, architectures)
            path.with_suffix(".new").write_text(json.dumps(made))
            os.replace(path.with_suffix(".new"), path)
    read = json.loads(path.read_text())
    return {
        architecture: {name: Usage(*usage) for name, usage in kernels.items()}
        for architecture, kernels in read.items()
    }


def compile_text(
    name: str, text: str, architectures: tuple[str, ...] = USUAL
) -> dict[str, dict[str, Usage]]:
    """Compile a text for some architectures; a warning is an error."""
    codes = [f"-gencode=arch={_virtual(each)},code={each}" for each in architectures]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / f"{name}.cu").write_text(text)
        done = subprocess.run(
            ["nvcc", *_FLAGS, *codes, "-keep", "-o", "all.fatbin", f"{name}.cu"],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=240,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, "\n".join(re.findall(".*(?:error|warning).*", said)) or said
        accesses = {
            each: _accesses(_intermediate(place, name, each).read_text()) for each in architectures
        }
    usages: dict[str, dict[str, Usage]] = {each: {} for each in architectures}
    for found in _PROPERTIES.finditer(said):
        shared = _SHARED.search(found["others"])
        usages[found["architecture"]][found["kernel"]] = Usage(
            int(found["registers"]),
            int(shared[1]) if shared else 0,
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
            accesses[found["architecture"]][found["kernel"]],
        )
    return usages


def _virtual(architecture: str) -> str:
    return architecture.replace("sm", "compute")


def _intermediate(folder: Path, name: str, architecture: str) -> Path:
    several = folder / f"{name}.{_virtual(architecture)}.ptx"
    return several if several.exists() else folder / f"{name}.ptx"


def _accesses(ptx: str) -> dict[str, dict[str, int]]:
    _, *parts = _ENTRY.split(ptx)
    return {
        name: dict(collections.Counter(_ACCESS.findall(body)))
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def _width(instruction: str) -> int:
    found = _TYPE.search(instruction)
    assert found, f"no type in {instruction}"
    return int(found[1] or 1) * int(found[2]) // 8


# --- the runtime compiler, without CuPy --------------------------------------------------------


@functools.cache
def runtime_compiler() -> ctypes.CDLL | None:
    """The library of torch's or pip's packages or of an installed toolkit; None without one."""
    for path in (*_libraries(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _libraries() -> list[Path]:
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
    text = compiler.source_text(source).encode()
    options = (*compiler.COMPILER_OPTIONS, f"--gpu-architecture={architecture}")
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
