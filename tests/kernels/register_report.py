"""Writes docs/measurements/kernels-registers.md: ``make registers``, where nvcc is."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import THREADS
from tests.kernels import nvcc

PATH = Path(__file__).parents[2] / "docs" / "measurements" / "kernels-registers.md"

# Of a multiprocessor of each of these architectures.
_REGISTERS, _MOST_THREADS = 65536, 2048

_HEAD = """\
# Registers and memory of the kernels, {date}

What nvcc {version} says, with the options of a real run (`{options}`). Written by `make registers`.
Three numbers in one column are of {architectures}; one number is of all.

Blocks: how many blocks of {threads} threads a multiprocessor holds at a time with these registers,
{most} at most; shared memory is not counted. Wide: the most bytes that one instruction reads and
writes. No kernel keeps anything on the stack, and none spills registers, where these columns are 0.
"""
_COLUMNS = "| kernel | registers | blocks | shared memory | stack | spilled | wide, read/write |"


def kernels_in(report: str) -> list[str]:
    """The names of the kernels in a report, sorted."""
    return sorted(re.findall(r"^\| `(\w+)` \|", report, re.MULTILINE))


def digests_in(report: str) -> dict[str, str]:
    """Of which sources and options a report is: by source, what :func:`nvcc.digest_of` gave."""
    found = re.findall(r"^## (\w+)\.cu\n\nSource and options: `(\w+)`$", report, re.MULTILINE)
    return dict(found)


def report() -> str:
    """The text of the page."""
    return "\n".join(
        [
            _HEAD.format(
                date=datetime.date.today(),
                version=nvcc.version(),
                options=" ".join(compiler.COMPILER_OPTIONS),
                architectures=", ".join(nvcc.ARCHITECTURES),
                threads=THREADS,
                most=_MOST_THREADS // THREADS,
            ),
            *(line for source in compiler.source_names() for line in _table(source)),
        ]
    )


def _table(source: str) -> Iterator[str]:
    built = nvcc.build(source, nvcc.ARCHITECTURES)
    yield f"## {source}.cu\n"
    yield f"Source and options: `{nvcc.digest_of(source)}`\n"
    yield _COLUMNS
    yield "|---" * (_COLUMNS.count("|") - 1) + "|"
    for kernel in sorted(next(iter(built.values()))):
        usages = [built[each][kernel] for each in nvcc.ARCHITECTURES]
        cells = (
            _cell(usage.registers for usage in usages),
            _cell(_blocks(usage.registers) for usage in usages),
            _cell(usage.shared for usage in usages),
            _cell(usage.stack for usage in usages),
            _cell(usage.spilled for usage in usages),
            _cell(f"{usage.widest('ld')}/{usage.widest('st')}" for usage in usages),
        )
        yield f"| `{kernel}` | {' | '.join(cells)} |"
    yield ""


def _cell(values: Iterator[object]) -> str:
    shown = [str(value) for value in values]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def _blocks(registers: int) -> int:
    # Registers are given to a warp in units of 256, which are 8 for each of its threads.
    held = -(-registers // 8) * 8
    return min(_MOST_THREADS // THREADS, _REGISTERS // (held * THREADS))


if __name__ == "__main__":
    PATH.write_text(report())
    print(PATH)
