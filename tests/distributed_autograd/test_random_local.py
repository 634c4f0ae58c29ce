"""Random programs over workers that are threads have the gradients of ordinary autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from dataparallel.distributed_autograd import LocalWorkers
from tests.distributed_autograd.graph_cases import CASES
from tests.distributed_autograd.graph_runs import compare, run_alone, run_on_workers
from tests.distributed_autograd.random_graphs import PROFILE, WORKERS, Program, programs


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    others = {f"worker{number}": "cpu" for number in range(1, WORKERS)}
    with LocalWorkers(others, main="worker0"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_what_has_broken_others(name: str) -> None:
    program, reached = CASES[name]
    expected = run_alone(program)
    assert set(expected.gradients) == reached
    compare(run_on_workers(program), expected)


@PROFILE
@given(program=programs())
def test_random_programs(program: Program) -> None:
    compare(run_on_workers(program), run_alone(program))
