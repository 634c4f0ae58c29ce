"""Random programs show what the bare module shows, with gradients averaged over processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.cluster import Cluster
from tests.random_programs.comparison import check
from tests.random_programs.program import Program

#: The number of programs, by the number of processes: those of more processes take longer.
#: `make random` runs others, and many.
COUNTS = {1: 10, 2: 4, 3: 2}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_random_programs(
    cluster: Cluster, processes: int, replicas: int, pytestconfig: pytest.Config
) -> None:
    count = COUNTS[processes] * (20 if pytestconfig.getoption("--faults") == "long" else 1)
    # Each world has programs of its own.
    first = 1000 * (3 * processes + replicas)
    seeds = range(first, first + count)
    _assert_right(cluster, [Program(seed, processes, replicas) for seed in seeds])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_random_programs_on_virtual_devices(cluster: Cluster, processes: int, spread: bool) -> None:
    seeds, options = range(100 * processes, 100 * processes + 4), {"virtual": True}
    _assert_right(cluster, [Program(s, processes, 2, **options, spread=spread) for s in seeds])


def _assert_right(cluster: Cluster, programs: Sequence[Program]) -> None:
    failures, compared = check(cluster, programs)
    assert not failures, "\n\n".join(failures)
    # Few end early since both sides raise.
    assert 4 * compared > len(programs)
