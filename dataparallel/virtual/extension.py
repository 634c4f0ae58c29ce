"""The loaded C++ extension, or the error that says how to get it."""

from __future__ import annotations

from typing import Protocol

import torch


class Extension(Protocol):
    """What ``csrc/bindings.cpp`` offers."""

    def initialize(self, count: int) -> None: ...
    def device_count(self) -> int: ...
    def strict(self) -> bool: ...
    def set_strict(self, value: bool) -> None: ...
    def in_forked_child(self) -> bool: ...
    def counters(self, device: int) -> dict[str, int]: ...
    def reset_counters(self, device: int) -> None: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...
    def set_memory_limit(self, device: int, limit: int | None) -> None: ...
    def default_generators(self) -> list[torch.Generator]: ...
    def pending_on_stream(self, device: int, stream: int) -> int: ...
    def pending_on_device(self, device: int) -> int: ...


_loaded: Extension | None = None


def loaded() -> Extension | None:
    """The extension, or None before the devices were enabled."""
    return _loaded


def required() -> Extension:
    """The extension; RuntimeError before the devices were enabled."""
    if _loaded is None:
        raise RuntimeError(
            "virtual devices are not enabled: call dataparallel.virtual.enable() first, "
            "or set DATAPARALLEL_VIRTUAL_DEVICES"
        )
    return _loaded


def keep(extension: Extension) -> None:
    """Remember the extension of this process."""
    global _loaded
    _loaded = extension
