"""The command: `python -m tests.random_programs`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.cluster import Cluster
from tests.random_programs.judge import MEANINGS, ORDER, Report
from tests.random_programs.program import FEATURES, Program, make, smaller
from tests.random_programs.worlds import run_programs

EXAMPLES = """examples:
  python -m tests.random_programs --count 500 --processes 2 --replicas 2
  python -m tests.random_programs --count 600 --every-world --without outside,inplace
  python -m tests.random_programs --seed 123 --processes 2 --replicas 2 --show
"""


def main(arguments: list[str] | None = None) -> int:
    """Run programs, print how they went, and make those that failed smaller."""
    options = _parse(arguments)
    without = tuple(name for name in options.without.split(",") if name)
    unknown = set(without) - set(FEATURES)
    if unknown:
        known = "\n".join(f"  {name:15} {text}" for name, text in FEATURES.items())
        print(f"--without has no {sorted(unknown)}; it has\n{known}", file=sys.stderr)
        return 2
    worlds = [(options.processes, options.replicas)]
    if options.every_world:
        worlds = [(p, r) for p in (1, 2, 3) for r in (1, 2, 3)]
    cluster = Cluster()
    failures = 0
    try:
        print(f"{'world':>8} {'programs':>9} {'seconds':>8}", *(f"{v:>9}" for v in ORDER))
        for processes, replicas in worlds:
            failures += _world(cluster, options, processes, replicas, without)
    finally:
        cluster.close()
    return 1 if failures else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    verdicts = "\n".join(f"  {name:10} {text}" for name, text in MEANINGS.items())
    features = "\n".join(f"  {name:15} {text}" for name, text in FEATURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs",
        description="Run random programs with the wrappers, and compare what they show.",
        epilog=f"{EXAMPLES}\nresults:\n{verdicts}\n\nfeatures for --without:\n{features}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first program (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many programs (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="1 (default) to 3")
    parser.add_argument("--replicas", type=int, default=2, help="of each process (default: 2)")
    parser.add_argument("--every-world", action="store_true", help="1 to 3 of both")
    parser.add_argument("--virtual", action="store_true", help="replicas on virtual devices")
    parser.add_argument("--without", default="", help="features to leave out, with commas")
    parser.add_argument("--show", action="store_true", help="print each program and its result")
    parser.add_argument("--shrink", type=int, default=3, help="failures made smaller (default: 3)")
    return parser.parse_args(arguments)


def _world(
    cluster: Cluster,
    options: argparse.Namespace,
    processes: int,
    replicas: int,
    without: tuple[str, ...],
) -> int:
    """Run the programs of one world; how many have failed."""
    seeds = range(options.seed, options.seed + options.count)
    programs = [make(seed, processes, replicas, without, virtual=options.virtual) for seed in seeds]
    begin = time.perf_counter()

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {len(programs)}", end="\r", file=sys.stderr, flush=True)

    reports = run_programs(cluster, programs, progress=progress)
    seconds = time.perf_counter() - begin
    counts = Counter(report.verdict for report in reports)
    row = f"{processes} x {replicas:<2} {len(programs):>9} {seconds:>8.0f}"
    print(f"{row:>27}", *(f"{counts[verdict]:>9}" for verdict in ORDER), flush=True)
    failed = [(p, r) for p, r in zip(programs, reports, strict=True) if r.verdict == "failed"]
    if options.show:
        for program, report in zip(programs, reports, strict=True):
            print(f"\n{program.text()}\n\n{report.verdict}: {report.text}")
    for number, (program, report) in enumerate(failed):
        command = f"--seed {program.seed} --processes {processes} --replicas {replicas}"
        command += f" --without {','.join(without)}" if without else ""
        command += " --virtual" if options.virtual else ""
        print(f"\nFAILED: python -m tests.random_programs {command}")
        if number < options.shrink:
            program, report = _shrink(cluster, program, report)
            print(f"{program.text()}\n")
        print("\n".join(report.text.splitlines()[:40]), flush=True)
    return len(failed)


def _shrink(cluster: Cluster, program: Program, report: Report) -> tuple[Program, Report]:
    """The program with as few parts as show a failure, and its report."""
    deadline = time.monotonic() + 60
    kind, found = _kind(report), True
    while found and time.monotonic() < deadline:
        candidates, found = smaller(program), False
        while candidates and not found and time.monotonic() < deadline:
            some, candidates = candidates[:6], candidates[6:]
            reports = run_programs(cluster, some, hangs=15.0)
            for candidate, one in zip(some, reports, strict=True):
                if not found and one.verdict == "failed" and _kind(one) == kind:
                    program, report, found = candidate, one, True
    return program, report


def _kind(report: Report) -> str:
    """What a failure is called, whatever its step and its values."""
    known = ("raises", "hang", "disagree", "bit by bit")
    return next((word for word in known if word in report.text), "different")


if __name__ == "__main__":
    sys.exit(main())
