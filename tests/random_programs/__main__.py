"""Run more random programs: `python -m tests.random_programs --count 500 --processes 2`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.cluster import Cluster
from tests.random_programs.judge import MEANINGS, Report, run_programs
from tests.random_programs.program import Program, make, smaller


def main() -> int:
    """Print how programs went, and make those that failed smaller."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs",
        description="Run random programs with the wrappers, and compare what they show.",
        epilog="results: "
        + "; ".join(f"{verdict}: {meaning}" for verdict, meaning in MEANINGS.items()),
    )
    parser.add_argument("--seed", type=int, default=0, help="the first program")
    parser.add_argument("--count", type=int, default=1, help="how many programs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2, help="of each process")
    parser.add_argument("--virtual", action="store_true", help="replicas on virtual devices")
    options = parser.parse_args()
    world, virtual = (options.processes, options.replicas), options.virtual
    seeds = range(options.seed, options.seed + options.count)
    programs = [make(seed, *world, virtual=virtual) for seed in seeds]
    cluster = Cluster()
    try:
        reports = run_programs(cluster, programs)
        print(*Counter(report.verdict for report in reports).items())
        failed = [
            pair for pair in zip(programs, reports, strict=True) if pair[1].verdict == "failed"
        ]
        for program, report in failed:
            print(f"\nFAILED: seed {program.seed}")
            program, report = _shrink(cluster, program, report)
            print(program.text(), *report.text.splitlines()[:40], sep="\n", flush=True)
    finally:
        cluster.close()
    return int(bool(failed))


def _shrink(cluster: Cluster, program: Program, report: Report) -> tuple[Program, Report]:
    """The program with as few parts as show the same kind of failure, and its report."""
    known = ("raises", "hang", "disagree", "bit by bit", "")

    def kind(report: Report) -> str:
        return next(word for word in known if word in report.text)

    deadline, wanted = time.monotonic() + 60, kind(report)
    candidates = smaller(program)
    while candidates and time.monotonic() < deadline:
        some, candidates = candidates[:6], candidates[6:]
        reports = run_programs(cluster, some)
        for candidate, one in zip(some, reports, strict=True):
            if one.verdict == "failed" and kind(one) == wanted:
                program, report, candidates = candidate, one, smaller(candidate)
                break
    return program, report


if __name__ == "__main__":
    sys.exit(main())
