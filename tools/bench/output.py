"""What the benchmarks share at the terminal: progress, the setting of a run, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Told what happens next, and how many turns of the whole measurement begin with it.
Tell = Callable[[str, int], None]

#: What changes speed or memory without being seen in the command. Idle threads that spin, for
#: one, decide much where other programs use the cores too.
_TELLING = ("OMP_", "MKL_", "KMP_", "MALLOC_", "LD_PRELOAD", "ATEN_", "GLOO_", "NCCL_", "TORCH_")


@contextlib.contextmanager
def progress(console: Console, turns: int) -> Iterator[Tell]:
    """A bar in the terminal while something is measured.

    Args:
        console: Where it is shown.
        turns: How many there will be.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=turns)

        def tell(what: str, turns_begun: int) -> None:
            shown.update(task, description=what, advance=turns_begun)

        yield tell


def teller(tell: Tell, name: str) -> Callable[[str], None]:
    """A listener for one measurement among several.

    Args:
        tell: That of the whole run.
        name: Of the measurement.
    """

    def on_turn(what: str) -> None:
        tell(f"{name}: {what}", int(what.startswith("round")))

    return on_turn


def bucket_view(given: str | None, processes: int) -> bool:
    """Whether our DDP's gradients are views of buckets.

    Args:
        given: The value of the option.
        processes: Number of processes of ours.
    """
    return processes > 1 if given is None else given == "on"


def environment() -> dict[str, Any]:
    """Command, date, machine, versions: what has to be known beside any figure."""
    import torch

    return {
        "command": ["dataparallel", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_TELLING)},
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write to a file, whole or not at all, or to the standard output.

    Args:
        path: Of the file; ``-`` for the standard output.
        content: What to write.
    """
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = pathlib.Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_text(text)
    temporary.replace(target)
