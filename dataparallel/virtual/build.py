"""Compiles the C++ backend, once for each version of torch and Python, and loads it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from dataparallel.virtual.extension import Extension

_NAME = "dataparallel_virtual_backend"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
# Nearly all the time goes into torch's headers, so the sources are compiled as two units at once
# instead of one by one. These need the headers that the others do not.
_FIRST_UNIT = ("autocast", "bindings", "generator", "hooks")


def cache_directory() -> Path:
    """Where compiled backends are kept.

    Example::

        shutil.rmtree(cache_directory())    # compile anew next time

    Returns:
        ``$DATAPARALLEL_CACHE_DIR``, else ``$XDG_CACHE_HOME/dataparallel``, else
        ``~/.cache/dataparallel``.
    """
    if own := os.environ.get("DATAPARALLEL_CACHE_DIR"):
        return Path(own).expanduser()
    if general := os.environ.get("XDG_CACHE_HOME"):
        return Path(general).expanduser() / "dataparallel"
    return Path.home() / ".cache" / "dataparallel"


def load() -> Extension:
    """Load the backend; compile it first where that has not been done.

    Returns:
        The extension module.

    Raises:
        RuntimeError: It has to be compiled and cannot be; the message names what is missing.
    """
    path = cache_directory() / f"virtual-{_fingerprint()}" / f"{_NAME}.so"
    if not path.exists():
        _prepare_directory(path.parent)
        # The operating system takes the lock from a process that is killed.
        with _locked(path.parent / "lock"):
            if not path.exists():
                _compile(path)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast(Extension, module)


def _fingerprint() -> str:
    """A short hash of all that the compiled file depends on."""
    digest = hashlib.sha256()
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        str(sys.implementation.cache_tag),
        sysconfig.get_config_var("SOABI") or "",
        platform.machine(),
        *_FLAGS,
    ]
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            parts += [source.name, source.read_text(encoding="utf-8")]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _prepare_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"cannot create {directory} for the compiled virtual device ({error.strerror}): "
            "set DATAPARALLEL_CACHE_DIR to a directory that can be written"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(path.open("w"))
        except OSError as error:
            raise RuntimeError(
                f"cannot write {path} ({error.strerror}): "
                "set DATAPARALLEL_CACHE_DIR to a directory that can be written"
            ) from error
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    """The command of the C++ compiler."""
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        raise RuntimeError(
            f"cannot compile the virtual device: CXX is {chosen!r}, and there is no such command"
        )
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError(
        "cannot compile the virtual device: there is no C++ compiler (c++, g++ or clang++) on the "
        "PATH; install one, for instance the package g++, or set CXX"
    )


def _python_headers() -> str:
    directory = sysconfig.get_path("include")
    if not (Path(directory) / "Python.h").exists():
        raise RuntimeError(
            f"cannot compile the virtual device: there is no Python.h in {directory}; install the "
            "headers of this Python, for instance the package python3-dev"
        )
    return directory


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _include_flags() -> list[str]:
    include = _torch_root() / "include"
    directories = [_SOURCES, include, include / "torch" / "csrc" / "api" / "include"]
    return [f"-I{directory}" for directory in directories] + [f"-I{_python_headers()}"]


def _link_flags() -> list[str]:
    libraries = _torch_root() / "lib"
    names = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    return ["-shared", f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}", "-lpthread"]


def _write_units(directory: Path) -> list[Path]:
    sources = sorted(_SOURCES.glob("*.cpp"))
    units = []
    for number, wanted in enumerate((True, False)):
        lines = [f'#include "{s}"' for s in sources if (s.stem in _FIRST_UNIT) is wanted]
        unit = directory / f"unit{number}.cpp"
        unit.write_text("\n".join(lines) + "\n", encoding="utf-8")
        units.append(unit)
    return units


def _compile(target: Path) -> None:
    compiler = _compiler()
    flags = [
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *_include_flags(),
    ]
    started = time.monotonic()
    _say("compiling the virtual device, once for this version of torch: some 20 seconds ...")
    # Beside the target, because only a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        directory = Path(name)
        units = _write_units(directory)
        objects = [unit.with_suffix(".o") for unit in units]
        _run_all(
            [
                [*compiler, *flags, "-c", str(unit), "-o", str(made)]
                for unit, made in zip(units, objects, strict=True)
            ]
        )
        linked = directory / target.name
        _run_all([[*compiler, *map(str, objects), *_link_flags(), "-o", str(linked)]])
        os.replace(linked, target)
    _say(f"compiled in {time.monotonic() - started:.0f} seconds")


def _run_all(commands: list[list[str]]) -> None:
    """Run commands side by side; RuntimeError with the output of the first that fails."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, command, output in zip(running, commands, outputs, strict=True):
        if process.returncode != 0:
            shown = "\n".join(output.strip().splitlines()[:40])
            raise RuntimeError(
                f"cannot compile the virtual device for torch {torch.__version__}: "
                f"exit status {process.returncode} of\n{shlex.join(command)}\n{shown}"
            )


def _say(text: str) -> None:
    print(f"dataparallel: {text}", file=sys.stderr, flush=True)
