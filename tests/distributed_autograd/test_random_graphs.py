"""Random programs over workers have the gradients of ordinary autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.distributed_autograd.graph_runs import compare, run_alone, run_on_workers
from tests.distributed_autograd.random_graphs import (
    PROFILE,
    Backward,
    Body,
    Call,
    Compute,
    Counted,
    Leaf,
    Load,
    Overwrite,
    Program,
    Step,
    Store,
    Wait,
    programs,
)
from tests.distributed_autograd.rpc_workers import World

Gradients = set[tuple[int, str]]


def _program(*steps: Step) -> Program:
    return Program(4, Body(steps))


def _body(*steps: Step, results: tuple[int, ...] = ()) -> Body:
    return Body(steps, results)


def _compute(kind: str, *operands: int) -> Compute:
    return Compute(kind, operands)


#: x -> tanh(matrix x), with the matrix of the worker.
_LINEAR = _body(Leaf("matrix"), _compute("linear", 0, 1), results=(2,))

#: What has broken other implementations, and the leaves that get a gradient.
CASES: dict[str, tuple[Program, Gradients]] = {
    "a chain A-B-A-B with state on both": (
        _program(
            Leaf("bias"),
            Call(1, (0,), _body(Leaf("gain"), _compute("mul", 0, 1), Store(1, 2), results=(2,))),
            Counted(1, 1),
            Store(2, 2),
            Call(
                1,
                (2,),
                _body(
                    Load(1),
                    _compute("add", 0, 1),
                    Counted(2, 2),
                    Call(
                        0,
                        (3,),
                        _body(Load(2), _compute("mul", 0, 1), Store(3, 2), results=(2, 0)),
                    ),
                    Store(4, 4),
                    results=(4,),
                ),
            ),
            Load(3),
            Call(
                1,
                (3, 4),
                _body(Load(4), _compute("mul", 0, 2), Load(1), _compute("add", 3, 4), results=(5,)),
            ),
            Backward((5,), False),
        ),
        {(0, "bias"), (1, "gain")},
    ),
    "a send that lives on in state, and a dead one of the same call": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(1, (1,), _body(Store(1, 0), Counted(0, 2), results=(1,))),
            Call(2, (2,), _LINEAR),
            Call(1, (), _body(Load(1), Leaf("gain"), _compute("mul", 0, 1), results=(2,))),
            Backward((4,), False),
        ),
        {(0, "bias"), (1, "gain")},
    ),
    # What made the first result must not run: nothing of it is needed.
    "a message of which one tensor is needed": (
        _program(
            Call(1, (), _body(Leaf("bias"), Counted(0, 1), Leaf("gain"), results=(1, 2))),
            Backward((1,), False),
        ),
        {(1, "gain")},
    ),
    "inputs that come back unchanged, and twice": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(1, (1, 0, 1), _body(results=(0, 1, 2, 0))),
            _compute("mul", 2, 5),
            _compute("mul", 3, 6),
            Backward((7,), False),
        ),
        {(0, "bias")},
    ),
    "backward on another worker, then on the first, over one graph": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(1, (1,), _body(Leaf("gain"), _compute("mul", 0, 1), Store(1, 2), results=(2,))),
            Call(1, (), _body(Load(1), Counted(0, 2), Backward((1,), True))),
            Call(2, (2,), _LINEAR, 7),
            Call(1, (), _body(Load(1), Backward((0, 0), True)), 8),
            Wait(7),
            Backward((3, 2), True),
            Wait(8),
            Backward((3,), False),
        ),
        {(0, "bias"), (1, "gain"), (2, "matrix")},
    ),
    # The receiver may change one of them in place; the other was saved for backward.
    "two tensors of one memory in one message": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            _compute("detach", 1),
            Call(
                1,
                (1, 2),
                _body(Leaf("gain"), _compute("mul", 1, 2), Overwrite(0), results=(3, 0)),
            ),
            Backward((3, 4), False),
        ),
        {(0, "bias"), (1, "gain")},
    ),
}


def _check(world: World, program: Program) -> set[tuple[int, str]]:
    expected = run_alone(program)
    # Torch 2.11 warns where it makes a sparse gradient without checks.
    with torch.sparse.check_sparse_tensor_invariants():
        compare(world.run(run_on_workers, program), expected)
    return set(expected.gradients)


@pytest.mark.parametrize("name", CASES)
def test_what_has_broken_others(world: World, name: str) -> None:
    program, reached = CASES[name]
    assert _check(world, program) == reached


@PROFILE
@given(program=programs())
def test_random_programs(world: World, program: Program) -> None:
    _check(world, program)
