"""The CUDA sources, each as the one text that a compiler gets."""

from __future__ import annotations

import functools
import re
from pathlib import Path

#: Where the sources are.
FOLDER = Path(__file__).parent / "csrc"

#: Options of NVIDIA's compilers. Without them a product and a sum would be rounded once where torch
#: rounds twice, and results would differ in the last bit.
COMPILER_OPTIONS = ("-std=c++17", "--fmad=false")

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def names() -> list[str]:
    """The names of all sources, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@functools.cache
def read(name: str) -> str:
    """The text of a source, with the headers in the place where they are included.

    What was compiled is found again by this text, and a change of a header must be seen in it.

    Args:
        name: One of :func:`names`.
    """
    seen: set[str] = set()

    def inlined(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
        return _INCLUDE.sub(lambda found: inlined(found[1]), text)

    return inlined(f"{name}.cu")
