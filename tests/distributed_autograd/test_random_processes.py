"""Random programs over processes have the gradients of ordinary autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.distributed_autograd.graph_cases import CASES
from tests.distributed_autograd.graph_processes import Processes
from tests.distributed_autograd.graph_runs import compare, run_alone
from tests.distributed_autograd.random_graphs import EXAMPLES, PROFILE, Program, programs


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes(250.0 + EXAMPLES)
    yield started
    started.close()


@pytest.mark.parametrize("name", CASES)
def test_what_has_broken_others(processes: Processes, name: str) -> None:
    program, reached = CASES[name]
    expected = run_alone(program)
    assert set(expected.gradients) == reached
    compare(processes.run(program), expected)


@PROFILE
@given(program=programs())
def test_random_programs(processes: Processes, program: Program) -> None:
    compare(processes.run(program), run_alone(program))
