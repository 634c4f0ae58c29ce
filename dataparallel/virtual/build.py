"""The C++ backend as an extension module."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from dataparallel.kernels.native import NativeExtension
from dataparallel.virtual.extension import Extension

EXTENSION = NativeExtension(
    name="dataparallel_virtual_backend",
    label="the virtual device",
    prefix="virtual",
    sources=Path(__file__).parent / "csrc",
    # These need the headers that the others do not.
    first_unit=frozenset({"autocast", "bindings", "generator", "hooks"}),
)


def load() -> Extension:
    """Load the backend; compile it first where that has not been done.

    Example::

        load().initialize(4)

    Returns:
        The extension module.

    Raises:
        RuntimeError: It has to be compiled and cannot be; the message names what is missing.
    """
    return cast(Extension, EXTENSION.load())
