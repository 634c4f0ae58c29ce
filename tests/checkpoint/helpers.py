"""The folder of a generation, ways to damage it, and a simple object with a state."""

from __future__ import annotations

import pathlib
from typing import Any


def folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    """Return the folder of a generation."""
    return directory / f"generation-{number:08d}"


def complete(directory: pathlib.Path) -> list[bool]:
    """Return for each generation that was begun, the oldest first, if it counts."""
    folders = sorted(directory.glob("generation-*"))
    return [(each / "manifest.json").exists() for each in folders]


def spoil(directory: pathlib.Path, number: int) -> None:
    """Change one bit of each file of tensors of a generation."""
    for path in folder(directory, number).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)


class Box:
    """Keeps the very value that it is given; the next load may fail after that."""

    def __init__(self, value: Any, error: type[BaseException] | None = None) -> None:
        self.value, self.error = value, error

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        error, self.error = self.error, None
        if error is not None:
            raise error("the user's own")
