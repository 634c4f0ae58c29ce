"""Random programs show what the bare module and torch's wrapper show."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.random_programs.judge import run_programs
from tests.random_programs.program import Program, make

#: How many programs, by the number of processes: those of more processes take longer.
COUNTS = {1: 28, 2: 11, 3: 7}


def _assert_right(cluster: Cluster, programs: list[Program]) -> None:
    reports = run_programs(cluster, programs)
    failures = [
        f"{program.text()}\n\n{report.text}"
        for program, report in zip(programs, reports, strict=True)
        if report.verdict == "failed"
    ]
    assert not failures, "\n\n".join(failures)
    compared = sum(report.verdict in ("exact", "rounding", "better") for report in reports)
    assert compared > len(programs) / 2


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_random_programs(cluster: Cluster, processes: int, replicas: int) -> None:
    # Each world has programs of its own.
    first = 1000 * (3 * processes + replicas)
    seeds = range(first, first + COUNTS[processes])
    _assert_right(cluster, [make(seed, processes, replicas) for seed in seeds])


@pytest.mark.parametrize("processes", [1, 2])
def test_random_programs_on_virtual_devices(cluster: Cluster, processes: int) -> None:
    seeds = range(100 * processes, 100 * processes + 6)
    _assert_right(cluster, [make(seed, processes, 2, virtual=True) for seed in seeds])
