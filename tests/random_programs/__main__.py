"""Runs as many random programs as are asked for, of any world, and prints those that fail."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.cluster import Cluster
from tests.random_programs.comparison import check
from tests.random_programs.program import Program

#: The number of programs in the same processes before the next world's turn.
AT_ONCE = 20

EXAMPLES = """examples:
  python -m tests.random_programs --programs 5000
  python -m tests.random_programs --programs 40 --first 123456 --processes 2 --replicas 2
  python -m tests.random_programs --programs 200 --virtual
"""


def main() -> int:
    """Return 1 if a program fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", type=int, default=500, help="how many; default 500")
    parser.add_argument("--first", type=int, default=int(time.time()), help="the first seed")
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "default": [1, 2, 3]}
    parser.add_argument("--processes", **numbers, help="numbers of processes; default 1 2 3")
    parser.add_argument("--replicas", **numbers, help="replicas per process; default 1 2 3")
    parser.add_argument("--virtual", action="store_true", help="on virtual devices")
    parser.add_argument("--spread", action="store_true", help="with originals on all of them")
    options = parser.parse_args()
    worlds = [(p, r) for p in options.processes for r in options.replicas]
    cluster, begin = Cluster(), time.monotonic()
    seed, last, num_failed, num_compared = options.first, options.first + options.programs, 0, 0
    turn = 0
    while seed < last:
        processes, replicas = worlds[turn % len(worlds)]
        seeds, turn = range(seed, min(seed + AT_ONCE, last)), turn + 1
        programs = [
            Program(s, processes, replicas, virtual=options.virtual, spread=options.spread)
            for s in seeds
        ]
        failures, compared = check(cluster, programs)
        seed, num_compared = seeds.stop, num_compared + compared
        num_failed += len(failures)
        for text in failures:
            print(f"{text}\n", flush=True)
        print(
            f"\r{seed - options.first} of {options.programs} programs, {num_failed} failed, "
            f"{time.monotonic() - begin:.0f} s ",
            end="",
            file=sys.stderr,
            flush=True,
        )
    cluster.close()
    print(
        f"\n{options.programs} programs from seed {options.first} on: {num_failed} failed, "
        f"{num_compared} ran to their end with the wrapper and without"
    )
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
