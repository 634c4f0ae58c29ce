"""Which kernels a source has, as the preprocessor sees them."""

from __future__ import annotations

import functools
import re
import subprocess

from dataparallel.kernels import sources

_MARK = re.compile(r"@kernel (\w+) ([^@]+)@")


@functools.cache
def kernels_of(source: str) -> dict[str, str]:
    """The structs that the kernels of a source take, by the name of the kernel."""
    text = "#define KERNELS_ON_HOST\n#define KERNEL(name, Parameters) @kernel name Parameters@\n"
    done = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-"],
        input=text + sources.read(source),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = _MARK.findall(done.stdout)
    assert len(found) == len(dict(found)), f"{source}.cu has two kernels of one name"
    return dict(found)
