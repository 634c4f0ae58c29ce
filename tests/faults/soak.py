"""Trains for half an hour while something goes wrong every few seconds.

``python -m tests.faults.soak --minutes 30`` starts a training of two processes by torchrun, and
shows its progress. It lets the processes be killed and stopped, raise and exit. Nobody helps it.
Before, the same training runs without faults: the weights of both must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.cluster import free_port
from tests.faults.training import Fault, Settings, journal, started, torchrun

PROCESSES = 2

#: The number of faults in an hour, and the least seconds of a step.
FAULTS, PACE = 150, 0.1

#: The goals of a run.
GOODPUT, LOST_STEPS = 0.80, 1

#: Share of the time that is planned for steps; the rest is for what faults cost.
_SHARE = 0.85


def make_plan(steps: int, count: int) -> list[Fault]:
    """Faults of all kinds in turn, at random steps of equal parts of the training."""
    draw = random.Random(0)
    kinds = ["kill", "raise", "stop", "exit"]
    plan = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        step = (number * steps + draw.randrange(max(1, steps - steps // 4))) // count
        # Shorter than the time limit of a wait: a stopped process comes back.
        seconds = draw.uniform(1.0, 8.0) if kind == "stop" else 0.0
        plan.append(Fault(draw.randrange(PROCESSES), step, kind, seconds))
    return plan


# --- what has happened -----------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The events so far.

    Attributes:
        seconds: From the first start to the last line.
        done: Steps that are done.
        faults: The faults so far: "kind rank step".
        restarts: How often torchrun started the processes again.
        lost: Per time that process 0 loaded, how many steps had to be made again.
        gaps: Seconds between the two steps around each of these.
        digests: The digests of weights and statistics in the end, per process.
    """

    seconds: float
    done: int
    faults: list[str]
    restarts: int
    lost: list[int]
    gaps: list[float]
    digests: list[str]

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s  {self.done} steps  {len(self.faults)} faults  "
            f"{self.restarts} restarts  {max(self.lost, default=0)} steps lost at most  "
            f"over a fault from step to step {statistics.median(self.gaps or [0]):.2f} s, at most "
            f"{max(self.gaps, default=0):.2f} s"
        )


def summary(folder: str | pathlib.Path) -> Summary:
    """Sum up what the processes of a training have written until now."""
    lines, happened = journal(folder), pathlib.Path(folder, "happened")
    done, last, gaps, lost = 0, None, [], []
    is_interrupted = False
    for line in lines:
        if line["event"] == "step":
            if is_interrupted and last is not None:
                gaps.append(line["time"] - last)
            done, last, is_interrupted = max(done, line["step"] + 1), line["time"], False
        elif line["event"] in ("start", "recovered") and line["rank"] == 0:
            lost.append(max(0, done - line["step"]))
            is_interrupted = True
    made = [line for line in lines if line["event"] == "step"]
    ends = {line["rank"]: line["digest"] for line in lines if line["event"] == "end"}
    return Summary(
        seconds=lines[-1]["time"] - lines[0]["time"] if lines else 0.0,
        done=made[-1]["step"] + 1 if made else 0,
        faults=happened.read_text().splitlines() if happened.exists() else [],
        restarts=max((line["restart"] for line in lines), default=0),
        lost=lost,
        gaps=gaps,
        digests=[ends[rank] for rank in sorted(ends)],
    )


def compare(found: Summary, quiet: Summary, plan: Sequence[Fault]) -> list[tuple[str, str, bool]]:
    """Return rows of a table: each measurement, its goal, and if it reached that."""
    lost = max(found.lost, default=0)
    happened = sorted(found.faults) == sorted(map(str, plan))
    # The share of the time that the steps would have taken without faults.
    goodput = found.done * PACE / found.seconds
    as_quiet = len(found.digests) == PROCESSES and found.digests == quiet.digests
    digests = " ".join(digest[:8] for digest in found.digests)
    return [
        (f"faults that happened | {len(found.faults)}", f"all {len(plan)}", happened),
        (f"goodput | {goodput:.1%}", f"at least {GOODPUT:.0%}", goodput >= GOODPUT),
        (f"steps made again, at most | {lost}", f"{LOST_STEPS}", lost <= LOST_STEPS),
        (f"weights and statistics | {digests}", "the same bits as without faults", as_quiet),
    ]


def report(found: Summary, rows: Sequence[tuple[str, str, bool]]) -> str:
    """Return the result as Markdown."""
    kinds = collections.Counter(fault.split(" ")[0] for fault in found.faults)
    happened = ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items()))
    table = "\n".join(
        f"| {measured} | {bar} | {'yes' if fine else '**no**'} |" for measured, bar, fine in rows
    )
    return f"""# Soak test, {time.strftime("%Y-%m-%d")}

`make soak` on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},
torch {torch.__version__}. Two processes under torchrun, each with two replicas, take steps of at
least {PACE:g} s while things go wrong: {happened}. Every step is saved to memory, every hundredth
to the disk, too. Nobody helps. Goodput is the steps times {PACE:g} s, over the whole time.

| | measured | has to be | reached |
|---|---|---|---|
{table}

{found}.
"""


# --- the run ---------------------------------------------------------------------------------


def soak(settings: Settings, limit: float) -> Summary:
    """Train once with the planned faults; show the progress, and return what happened."""
    options = [f"--nproc-per-node={PROCESSES}", "--master-addr=127.0.0.1"]
    options += [f"--master-port={free_port()}", "--max-restarts=1000000", "--monitor-interval=0.1"]
    command = torchrun(settings, *options)
    log = pathlib.Path(settings.folder, "log")
    begin = time.monotonic()
    with started(command, log) as process:
        while process.poll() is None and time.monotonic() - begin < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            print(summary(settings.folder), flush=True)
        if process.returncode != 0:
            said = log.read_text(errors="replace")[-6000:]
            print(f"--- the end of {log}\n{said}", file=sys.stderr)
            raise RuntimeError(f"exit code of torchrun after {limit:.0f} s: {process.returncode}")
    return summary(settings.folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the training without faults, the soak, and the comparison.

    Returns:
        0 if all is well, 1 if something is wrong, 2 if it was only too slow.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--folder", help="keep the files here (default: a temporary folder)")
    parser.add_argument("--write", type=pathlib.Path, help="write the result to this file")
    options = parser.parse_args(arguments)
    steps = max(10, int(options.minutes * 60 * _SHARE / PACE))
    count = max(4, round(options.minutes / 60 * FAULTS))
    plan = make_plan(steps, count)
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        # Without a folder in memory another one does, and takes longer.
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir=shared))
        quiet, faulty = (os.path.join(folder, name) for name in ("quiet", "faults"))
        for name in (quiet, faulty):
            os.makedirs(name)
        undisturbed = Settings(quiet, steps, disk_every=100)
        settings = replace(undisturbed, folder=faulty, plan=plan, memory=memory, pace=PACE)
        limit = 60 * (2 * options.minutes + 3)
        print(f"{steps} steps without faults", flush=True)
        reference = soak(undisturbed, limit)
        print(f"{count} faults in {steps} steps of at least {PACE} s", flush=True)
        found = soak(settings, limit)
    rows = compare(found, reference, plan)
    text = report(found, rows)
    print(text)
    if options.write:
        options.write.write_text(text)
    missed = [measured.split()[0] for measured, _, fine in rows if not fine]
    return 0 if not missed else 2 if missed == ["goodput"] else 1


if __name__ == "__main__":
    # Ended by force, it still ends the training.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
