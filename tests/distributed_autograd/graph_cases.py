"""Programs that have broken other implementations, written by hand.

Each comes with the leaves that get a gradient, as pairs of worker and name.
"""

from __future__ import annotations

from tests.distributed_autograd.random_graphs import (
    Backward,
    Body,
    Call,
    Compute,
    Counted,
    Ids,
    Leaf,
    Load,
    Overwrite,
    Program,
    Step,
    Store,
    Wait,
)

Gradients = set[tuple[int, str]]


def _program(*steps: Step) -> Program:
    return Program(4, Body(steps))


def _body(*steps: Step, results: tuple[int, ...] = ()) -> Body:
    return Body(steps, results)


def _compute(kind: str, *operands: int) -> Compute:
    return Compute(kind, operands)


#: x -> tanh(matrix x), with the matrix of the worker.
_LINEAR = _body(Leaf("matrix"), _compute("linear", 0, 1), results=(2,))


CASES: dict[str, tuple[Program, Gradients]] = {
    # The gradient of x is complete only once that of f(x) has come back.
    "a residual over a border": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(1, (1,), _LINEAR),
            _compute("add", 1, 2),
            Backward((3,), False),
        ),
        {(0, "bias"), (1, "matrix")},
    ),
    "residuals on both sides of each border": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(
                1,
                (1,),
                _body(
                    Counted(0, 2),
                    Call(0, (1,), _LINEAR),
                    _compute("add", 1, 2),
                    _compute("add", 0, 3),
                    results=(4,),
                ),
            ),
            _compute("add", 1, 2),
            _compute("add", 0, 3),
            Backward((4,), False),
        ),
        {(0, "bias"), (0, "matrix")},
    ),
    "one weight on both sides of a border": (
        _program(
            Leaf("bias"),
            Leaf("matrix"),
            _compute("linear", 0, 1),
            Call(
                1,
                (2, 1),
                _body(
                    _compute("linear", 0, 1),
                    Call(0, (2,), _LINEAR),
                    _compute("linear", 3, 1),
                    results=(4,),
                ),
            ),
            _compute("linear", 3, 1),
            Backward((4,), False),
        ),
        {(0, "bias"), (0, "matrix")},
    ),
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
    # No gradient will ever come for the first two calls, in which the second uses the first.
    "a dead send that feeds a dead call": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(1, (1,), _LINEAR),
            Call(2, (2,), _LINEAR),
            Call(1, (1,), _body(Leaf("gain"), _compute("mul", 0, 1), results=(2,))),
            Backward((4,), False),
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
    "a sparse gradient over a border, and a dense one": (
        _program(
            Leaf("table"),
            Call(
                1,
                (0,),
                _body(
                    Ids(1),
                    _compute("lookup", 0, 1),
                    Ids(2),
                    _compute("lookup", 0, 3),
                    Leaf("table"),
                    _compute("lookup", 5, 1),
                    _compute("mean", 5),
                    _compute("mul", 2, 4),
                    _compute("mul", 6, 7),
                    results=(8, 9),
                ),
            ),
            _compute("mul", 1, 2),
            Backward((3,), False),
        ),
        {(0, "table"), (1, "table")},
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
    "a call in a call in a call, all on one worker": (
        _program(
            Leaf("bias"),
            Counted(0, 1),
            Call(
                0,
                (1,),
                _body(
                    Call(0, (0,), _body(Call(0, (0,), _LINEAR), results=(0, 1))),
                    _compute("mul", 1, 2),
                    results=(3, 1),
                ),
            ),
            _compute("add", 2, 3),
            Backward((4,), False),
        ),
        {(0, "bias"), (0, "matrix")},
    ),
}
