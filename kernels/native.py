"""The compiler of C++ extensions, once for each version of torch and Python."""

from __future__ import annotations

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
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from dataparallel.kernels.cache_folder import (
    cache_directory,
    close_to_others,
    is_trusted,
    keeping_code,
)

__all__ = ["NativeExtension", "cache_directory"]

#: Without NDEBUG, some of torch's classes have members that those of its libraries have not.
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w")

_loaded: dict[str, ModuleType] = {}
_loading = threading.Lock()


@dataclass(frozen=True)
class NativeExtension:
    """A folder of C++ sources that become one extension module.

    Nearly all the time goes into torch's headers, so the sources are compiled as two units at once
    instead of one by one. A name that is local to a source, in an anonymous namespace or static, is
    therefore seen by the others of its unit. It must be one that none of them has.

    Example::

        EXTENSION = NativeExtension(
            name="dataparallel_virtual_backend",
            label="the virtual device",
            prefix="virtual",
            sources=Path(__file__).parent / "csrc",
        )
        module = EXTENSION.load()

    Args:
        name: The name of the module, which the sources find as ``TORCH_EXTENSION_NAME``.
        label: The name in messages, with its article.
        prefix: How its folders in the cache begin.
        sources: The folder of the ``.cpp`` and ``.h`` files.
        first_unit: The stems of the sources that are compiled together, for instance since they
            need headers that the others do not. The rest is the second unit. Empty: every other
            source.
    """

    name: str
    label: str
    prefix: str
    sources: Path
    first_unit: frozenset[str] = frozenset()

    def load(self) -> ModuleType:
        """Load the extension, once per process; compile it first if that has not been done.

        RuntimeError if it has to be compiled and cannot be; the message names what is missing.
        """
        with _loading:
            if self.name not in _loaded:
                _loaded[self.name] = _load_file(self.name, self._compiled())
            return _loaded[self.name]

    def path(self) -> Path:
        """Return the compiled file, which need not be there yet.

        Its place in the cache depends on the sources, torch, Python and the machine.
        """
        return cache_directory() / f"{self.prefix}-{self._fingerprint()}" / f"{self.name}.so"

    def _fingerprint(self) -> str:
        """Return a short hash of all that the compiled file depends on."""
        digest = hashlib.sha256()
        parts = [
            torch.__version__,
            str(torch.version.git_version),
            str(torch.compiled_with_cxx11_abi()),
            str(sys.implementation.cache_tag),
            sysconfig.get_config_var("SOABI") or "",
            platform.machine(),
            *_FLAGS,
        ]
        for source in sorted(self.sources.iterdir()):
            if source.suffix in (".cpp", ".h"):
                parts += [source.name, source.read_text(encoding="utf-8")]
        for part in parts:
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:16]

    def _compiled(self) -> Path:
        path = self.path()
        close_to_others(path.parent)
        if not is_trusted(path):
            with keeping_code(path.parent):
                lock = (path.parent / "lock").open("w")
            # The operating system takes the lock from a process that is killed.
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_trusted(path):
                    self._compile(path)
        return path

    def _compile(self, target: Path) -> None:
        compiler = self._compiler()
        flags = [
            *_FLAGS,
            f"-DTORCH_EXTENSION_NAME={self.name}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *self._include_flags(),
        ]
        started = time.monotonic()
        _say(f"compiling {self.label}, once for this version of torch: some 20 seconds ...")
        # Beside the target, because only a rename within one file system is atomic.
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            directory = Path(name)
            units = self._write_units(directory)
            objects = [unit.with_suffix(".o") for unit in units]
            self._run_all(
                [
                    [*compiler, *flags, "-c", str(unit), "-o", str(made)]
                    for unit, made in zip(units, objects, strict=True)
                ]
            )
            linked = directory / target.name
            self._run_all([[*compiler, *map(str, objects), *_link_flags(), "-o", str(linked)]])
            linked.chmod(0o755)
            os.replace(linked, target)
        _say(f"compiled in {time.monotonic() - started:.0f} seconds")

    def _compiler(self) -> list[str]:
        """Return the command of the C++ compiler."""
        if chosen := os.environ.get("CXX"):
            command = shlex.split(chosen)
            if command and shutil.which(command[0]):
                return command
            raise RuntimeError(
                f"cannot compile {self.label}: CXX is {chosen!r}, and there is no such command"
            )
        for name in ("c++", "g++", "clang++"):
            if shutil.which(name):
                return [name]
        raise RuntimeError(
            f"cannot compile {self.label}: there is no C++ compiler (c++, g++ or clang++) on the "
            "PATH; install one, for instance the package g++, or set CXX"
        )

    def _include_flags(self) -> list[str]:
        include = _torch_root() / "include"
        directories = [self.sources, include, include / "torch" / "csrc" / "api" / "include"]
        return [f"-I{directory}" for directory in directories] + [f"-I{self._python_headers()}"]

    def _python_headers(self) -> str:
        directory = sysconfig.get_path("include")
        if not (Path(directory) / "Python.h").exists():
            raise RuntimeError(
                f"cannot compile {self.label}: there is no Python.h in {directory}; install the "
                "headers of this Python, for instance the package python3-dev"
            )
        return directory

    def _write_units(self, directory: Path) -> list[Path]:
        """Write the files that include the sources; one if the other would be empty."""
        stems = {source.stem for source in self.sources.glob("*.cpp")}
        first = self.first_unit or {*sorted(stems)[::2]}
        units: list[Path] = []
        for part in (stems & first, stems - first):
            if part:
                lines = [f'#include "{self.sources / stem}.cpp"\n' for stem in sorted(part)]
                unit = directory / f"unit{len(units)}.cpp"
                unit.write_text("".join(lines), encoding="utf-8")
                units.append(unit)
        return units

    def _run_all(self, commands: list[list[str]]) -> None:
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
                    f"cannot compile {self.label} for torch {torch.__version__}: "
                    f"exit status {process.returncode} of\n{shlex.join(command)}\n{shown}"
                )


def _load_file(name: str, path: Path) -> ModuleType:
    # Nobody else can write to the folder, see Note [Trusted code].
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))  # noqa: TID251
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _link_flags() -> list[str]:
    libraries = _torch_root() / "lib"
    names = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    return ["-shared", f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}", "-lpthread"]


def _say(text: str) -> None:
    print(f"dataparallel: {text}", file=sys.stderr, flush=True)
