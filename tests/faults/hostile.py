"""Data that runs code where it is loaded carelessly, and a canary that shows whether it did."""

from __future__ import annotations

import contextlib
import io
import json
import marshal
import os
import pathlib
import pickle
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import torch


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.path}'",))


class Canary:
    """A file that must not be there at the end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "canary"

    @property
    def is_alive(self) -> bool:
        return not self.path.exists()

    def payloads(self) -> dict[str, bytes]:
        """Hostile data, by what would run it."""
        command = f"__import__('os').system(\"touch '{self.path}'\")"
        saved, legacy = io.BytesIO(), io.BytesIO()
        torch.save({"weight": Touch(str(self.path))}, saved)
        torch.save({"weight": Touch(str(self.path))}, legacy, _use_new_zipfile_serialization=False)
        scripted = io.BytesIO()
        with zipfile.ZipFile(scripted, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Touch(str(self.path))))
            archive.writestr("archive/code/__torch__.py", command)
            archive.writestr("archive/version", "3\n")
        return {
            "pickle": pickle.dumps(Touch(str(self.path))),
            "old pickle": pickle.dumps(Touch(str(self.path)), protocol=0),
            "torch.save": saved.getvalue(),
            "old torch.save": legacy.getvalue(),
            "TorchScript": scripted.getvalue(),
            "marshal": marshal.dumps(compile(command, "x", "exec")),
            "Python": command.encode(),
            "YAML": f"!!python/object/apply:os.system [\"touch '{self.path}'\"]".encode(),
            "JSON": json.dumps(
                {"py/reduce": [{"py/function": "os.system"}, [f"touch {self.path}"]]}
            ).encode(),
        }


#: The names of the payloads, for parametrize.
KINDS = sorted(Canary(pathlib.Path("/nowhere")).payloads())

_events: list[str] = []
_LOUD = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "marshal.load")
_installed = False
_active = 0


def _hear(event: str, args: tuple[object, ...]) -> None:
    if _active and event in _LOUD:
        _events.append(f"{event}{args!r}"[:200])


@contextlib.contextmanager
def no_code_from_data() -> Iterator[None]:
    """Fail if anything in this process is unpickled in the block, or starts a program.

    Python tells of every name that an unpickler looks up, in whatever library that happens.
    """
    global _installed, _active
    if not _installed:
        # For ever: such a hook cannot be removed.
        sys.addaudithook(_hear)
        _installed = True
    _events.clear()
    _active += 1
    try:
        yield
    finally:
        _active -= 1
    assert not _events, f"code was taken from data: {_events}"
