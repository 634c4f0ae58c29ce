"""Processes that run many random programs, one after the other."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import pathlib
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from tests.cluster import Cluster
from tests.random_programs.judge import Report, judge
from tests.random_programs.program import Program

#: Seconds after which a program hangs.
HANGS = 40.0

#: Seconds that a collective of a program waits, with our wrapper and with torch's: one rank
#: may raise in the latter and leave the others waiting.
WAITS = (15.0, 3.0)

#: Called with how many programs are done.
Progress = Callable[[int], None]


def run_programs(
    cluster: Cluster,
    programs: Sequence[Program],
    *,
    hangs: float = HANGS,
    progress: Progress | None = None,
) -> list[Report]:
    """Run programs of one world, all in the same processes.

    Processes that hang or end take the program with them, and others go on with the next one.

    Args:
        cluster: Whose processes run them.
        programs: Of one number of processes, and all on the CPU or all on virtual devices.
        hangs: Seconds that one program may take.
        progress: Is told how many are done, about each second.
    """
    processes = programs[0].processes if programs else 1
    reports: list[Report] = []
    while len(reports) < len(programs):
        left = programs[len(reports) :]
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            files = [pathlib.Path(folder) / str(rank) for rank in range(processes)]
            error = ""
            with _watched(files, len(reports), progress):
                try:
                    cluster.run(
                        _work,
                        processes,
                        folder,
                        left,
                        hangs,
                        timeout=60 + hangs * len(left),
                        virtual=programs[0].virtual,
                    )
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}\n{raised.__cause__}"
            done = [_reports(file) for file in files]
            finished = min(len(each) for each in done)
            reports += done[0][:finished]
            if error and finished < len(left):
                stacks = [_stacks(file) for file in files]
                text = "\n".join([f"the processes hang or end: {error}", *stacks])
                reports.append(Report("failed", text))
            elif error:
                raise RuntimeError(f"after all programs: {error}")
    return reports


def _reports(file: pathlib.Path) -> list[Report]:
    """What a rank has written so far; the last entry may be there in part."""
    found: list[Report] = []
    if file.exists():
        with file.open("rb") as opened, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                found.append(pickle.load(opened))
    return found


def _stacks(file: pathlib.Path) -> str:
    path = file.with_suffix(".stacks")
    return f"rank {file.name}:\n{path.read_text()}" if path.exists() else ""


@contextlib.contextmanager
def _watched(files: list[pathlib.Path], before: int, progress: Progress | None) -> Iterator[None]:
    """Tell how many programs are done, for the length of a ``with`` block."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            if progress is not None:
                progress(before + len(_reports(files[0])))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# --- in a process --------------------------------------------------------------------------------


def _work(
    rank: int,
    world_size: int,
    folder: str,
    programs: Sequence[Program],
    hangs: float,
) -> None:
    path = pathlib.Path(folder) / str(rank)
    groups: list[Any] = []
    with path.open("ab") as file, path.with_suffix(".stacks").open("w") as stacks:
        for program in programs:
            # Ends the process, and so the others: their time is over, too.
            faulthandler.dump_traceback_later(hangs, exit=True, file=stacks)
            try:
                if world_size > 1 and not groups:
                    limits = [datetime.timedelta(seconds=seconds) for seconds in WAITS]
                    groups = [dist.new_group(timeout=limit) for limit in limits]
                report, in_disorder = judge(program, rank, groups)
                if in_disorder:
                    gc.collect()
                    for group in groups:
                        dist.destroy_process_group(group)
                    groups = []
            finally:
                faulthandler.cancel_dump_traceback_later()
            pickle.dump(report, file)
            file.flush()
