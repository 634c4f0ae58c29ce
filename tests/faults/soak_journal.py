"""What the processes of a soak test wrote down, and what comes of it."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.faults.injector import Fault

#: What a run has to reach.
FAULTS_PER_HOUR, GOODPUT, LOST_STEPS = 120, 0.80, 1

#: Steps of the training without faults that keep the pace, and tell what a step takes.
PACED = 100


@dataclass(frozen=True)
class Summary:
    """What has happened so far.

    Attributes:
        seconds: From the first start to the last line.
        done: Steps that are done.
        faults: What has happened, as :meth:`Injector.happened` has it.
        restarts: How often torchrun started the processes again.
        recoveries: How often they went on without that.
        lost: Per time that they loaded, how many steps had to be made again.
        typical: Seconds of a step without faults, the median.
        loss: Of the last step.
        digests: Of weights and statistics in the end, per process.
        parameters: Of the weights alone.
        gaps: Seconds from one step to the next, where faults lay between them.
    """

    steps: int
    seconds: float
    done: int
    faults: tuple[str, ...]
    restarts: int
    recoveries: int
    lost: tuple[int, ...]
    typical: float
    loss: float
    digests: tuple[str, ...]
    parameters: tuple[str, ...]
    gaps: tuple[float, ...]

    @property
    def goodput(self) -> float:
        """The share of the time that the steps that stayed would have taken without faults."""
        return min(1.0, self.done * self.typical / max(self.seconds, 1e-9))

    @property
    def per_hour(self) -> float:
        """Faults per hour."""
        return len(self.faults) / max(self.seconds, 1e-9) * 3600

    def line(self) -> str:
        """How it gets on."""
        return (
            f"step {self.done}/{self.steps}  {len(self.faults)} faults ({self.per_hour:.0f}/h)  "
            f"{self.restarts} restarts  {self.recoveries} recoveries in place  "
            f"{max(self.lost, default=0)} steps lost at most  goodput {self.goodput:.1%}  "
            f"loss {self.loss:.4f}"
        )

    def is_right(self, reference: Summary, plan: Sequence[Fault]) -> bool:
        """Whether everything has happened that was planned, and has changed nothing."""
        return (
            sorted(self.faults) == sorted(map(str, plan))
            and max(self.lost, default=0) <= LOST_STEPS
            and self.has_same_end(reference)
        )

    def is_fast(self) -> bool:
        """Whether there was as much training, under as many faults, as there has to be."""
        return self.per_hour >= FAULTS_PER_HOUR and self.goodput >= GOODPUT

    def has_same_end(self, reference: Summary) -> bool:
        """Whether loss and weights are those of the training without faults, in all processes."""
        same = len(self.digests) > 0 and self.digests == reference.digests
        return same and self.loss == reference.loss and self.is_same_everywhere()

    def is_same_everywhere(self) -> bool:
        """Whether the processes have the same weights; statistics are kept by each for itself."""
        return len(self.parameters) > 1 and len(set(self.parameters)) == 1

    def report(self, reference: Summary, plan: Sequence[Fault], options: argparse.Namespace) -> str:
        """The result as Markdown."""
        kinds = collections.Counter(fault.kind for fault in plan)
        planned = ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items()))
        gaps = sorted(self.gaps) or [0.0]
        table = "\n".join(
            f"| {what} | {value} | {bar} | {'yes' if fine else '**no**'} |"
            for what, value, bar, fine in self._rows(reference, plan)
        )
        return f"""# Soak test, {time.strftime("%Y-%m-%d")}

{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python
{platform.python_version()}, torch {torch.__version__}.

    python -m tests.faults.soak --minutes {options.minutes:g} --per-hour {options.per_hour:g} \
--pace {options.pace:g} --seed {options.seed}

Two processes under torchrun, each with two replicas, train for {self.steps} steps of at least
{options.pace:g} s, while things go wrong: {planned}. Every step is saved to memory, every hundredth
to the disk, too. Nobody helps.

| | measured | has to be | reached |
|---|---|---|---|
{table}

It took {self.seconds / 60:.1f} minutes. The processes were started again {self.restarts} times, and
went on in place {self.recoveries} times. From the last step before a fault to the next one it took
{statistics.median(gaps):.2f} s (median) and {gaps[-1]:.2f} s at most. A step took
{self.typical * 1000:.0f} ms (median) in the training without faults, which saves nothing to memory.
Goodput is the steps times that, over the whole time.
"""

    def _rows(self, reference: Summary, plan: Sequence[Fault]) -> list[tuple[str, str, str, bool]]:
        """What was measured, what it has to be, and whether it is."""
        count, per_hour, goodput = len(self.faults), self.per_hour, self.goodput
        happened = sorted(self.faults) == sorted(map(str, plan))
        lost = max(self.lost, default=0)
        enough = f"at least {FAULTS_PER_HOUR}"
        digests, weights = (
            " ".join(digest[:8] for digest in kind) or "none"
            for kind in (self.digests, self.parameters)
        )
        return [
            ("faults that happened", f"{count}", f"all {len(plan)} planned", happened),
            ("faults per hour", f"{per_hour:.0f}", enough, per_hour >= FAULTS_PER_HOUR),
            ("goodput", f"{goodput:.1%}", f"at least {GOODPUT:.0%}", goodput >= GOODPUT),
            (
                "steps made again after a fault, at most",
                f"{lost}",
                f"{LOST_STEPS}",
                lost <= LOST_STEPS,
            ),
            (
                "final loss",
                f"{self.loss:.6f}",
                f"{reference.loss:.6f}, as without faults",
                self.loss == reference.loss,
            ),
            (
                "weights and statistics of both processes",
                digests,
                "the same bits as without faults",
                self.has_same_end(reference),
            ),
            (
                "weights of one process and of the other",
                weights,
                "the same bits",
                self.is_same_everywhere(),
            ),
        ]


class Journal:
    """Reads what the processes write, while they do; see :mod:`tests.faults.soak_worker`.

    Args:
        folder: Where they write.
        typical: Seconds of a step without faults. Default: that of the first steps here.
    """

    def __init__(self, folder: str, typical: float | None = None) -> None:
        self._typical = typical
        self._path = pathlib.Path(folder, "journal")
        self._happened = pathlib.Path(folder, "happened")
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def summary(self, steps: int) -> Summary:
        """What has happened until now."""
        self._read()
        made = [line for line in self._lines if line["event"] == "step"]
        loads = [line for line in self._lines if line["event"] in ("start", "recovered")]
        times = [line["time"] for line in self._lines]
        happened = self._happened.read_text().splitlines() if self._happened.exists() else []
        durations = [line["seconds"] for line in made[:PACED]]
        typical = statistics.median(durations) if durations else 0.0
        ends = {line["rank"]: line for line in self._lines if line["event"] == "end"}
        return Summary(
            steps=steps,
            seconds=times[-1] - times[0] if times else 0.0,
            done=made[-1]["step"] + 1 if made else 0,
            faults=tuple(happened),
            restarts=max((line["restart"] for line in loads), default=0),
            recoveries=sum(line["event"] == "recovered" and line["rank"] == 0 for line in loads),
            lost=tuple(self._lost()),
            typical=typical if self._typical is None else self._typical,
            loss=made[-1]["loss"] if made else float("nan"),
            digests=tuple(ends[rank]["digest"] for rank in sorted(ends)),
            parameters=tuple(ends[rank]["parameters"] for rank in sorted(ends)),
            gaps=tuple(self._gaps()),
        )

    def _read(self) -> None:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                # The last one may not be complete yet.
                if line.endswith(b"\n"):
                    self._lines.append(json.loads(line))
                    self._offset += len(line)

    def _lost(self) -> list[int]:
        """Of every load of process 0, how many steps were done and are done again."""
        done, lost = 0, []
        for line in self._lines:
            if line["event"] == "step":
                done = max(done, line["step"] + 1)
            elif line["event"] in ("start", "recovered") and line["rank"] == 0:
                lost.append(max(0, done - line["step"]))
        return lost

    def _gaps(self) -> list[float]:
        """Seconds between the two steps around each load of process 0."""
        last, interrupted, found = None, False, []
        for line in self._lines:
            if line["event"] == "step":
                if interrupted and last is not None:
                    found.append(line["time"] - last)
                last, interrupted = line["time"], False
            elif line["rank"] == 0:
                interrupted = True
        return found
