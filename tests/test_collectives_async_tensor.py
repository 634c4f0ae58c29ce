"""The tensor that waits for itself, against the plain tensor in every use."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as torch_collectives
from torch import Tensor

from dataparallel.collectives import pending
from dataparallel.collectives.async_tensor import AsyncCollectiveTensor, wrap
from tests.test_collectives_pending import Broken, Fill

MATRIX = torch.arange(1.0, 7.0, dtype=torch.double).view(2, 3)
COMPLEX = torch.complex(MATRIX, -MATRIX)
SCALAR = torch.tensor(2.5)
COUNT = torch.tensor(2)
VALUES = {
    "contiguous": MATRIX,
    "transposed": MATRIX.t(),
    "strided": torch.arange(12.0).view(3, 4)[:, ::2],
    "scalar": SCALAR,
    "empty": torch.ones(0, 3),
    "integers": torch.arange(6).view(2, 3),
    "booleans": torch.tensor([[True, False], [False, True]]),
    "bfloat16": torch.arange(6.0).view(2, 3).bfloat16(),
    "complex": COMPLEX,
}
Function = Callable[[Any], Any]


def launched(value: Tensor, broken: bool = False) -> tuple[Tensor, Fill]:
    """A result with garbage in its memory, which a work is to fill with ``value``."""
    raw = value.clone() if value.dim() < 2 else value.clone(memory_format=torch.preserve_format)
    correct = raw.detach().clone()
    raw.data.fill_(77)
    work = (Broken if broken else Fill)(raw, correct)
    pending.register(raw, work)
    return raw, work


def asynchronous(value: Tensor) -> tuple[Any, Fill]:
    raw, work = launched(value)
    x = wrap(raw)
    assert type(x) is AsyncCollectiveTensor
    return x, work


def plain_of(x: Any) -> Tensor:
    """What ``wait`` returns, or a plain tensor itself."""
    tensor: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return tensor


def outcome(function: Function, x: Any) -> Any:
    try:
        return function(x)
    except (RuntimeError, TypeError, ValueError, IndexError, BufferError) as error:
        return type(error)


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        for name in ("dtype", "shape", "requires_grad", "is_leaf", "device", "layout"):
            assert getattr(got, name) == getattr(expected, name), name
        assert got.stride() == expected.stride()
        torch.testing.assert_close(plain_of(got).detach(), expected.detach(), rtol=0, atol=0)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    else:
        assert got == expected


@pytest.fixture(autouse=True)
def _ends_empty() -> Iterator[None]:
    yield
    if pending.count() or pending._registry._entries:
        gc.collect()
    left = pending.count(), dict(pending._registry._entries)
    # So that one fault is not the fault of every later test.
    pending._registry._entries.clear()
    assert left == (0, {})


# --- views -----------------------------------------------------------------------------------

VIEWS: dict[str, Function] = {
    "alias": lambda x: torch.ops.aten.alias(x),
    "chunk": lambda x: x.chunk(2, -1),
    "contiguous": lambda x: x.contiguous() if x.is_contiguous() else x,
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "dtype": lambda x: x.view(torch.uint8) if x.dtype == torch.bool else x.view(torch.int16),
    "ellipsis": lambda x: x[...],
    "expand": lambda x: x.unsqueeze(0).expand(4, *x.shape),
    "flatten": lambda x: x.transpose(0, -1).flatten() if x.dim() < 2 else x.flatten(),
    "imag": lambda x: x.imag,
    "iteration": lambda x: list(x),
    "mT": lambda x: x.mT if x.dim() > 1 else x,
    "movedim": lambda x: x.movedim(0, -1),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "real": lambda x: x.real,
    "select": lambda x: x[-1],
    "slice": lambda x: x[..., 1:],
    "split": lambda x: x.split([1, 2], -1),
    "strided": lambda x: torch.as_strided(x, (1,), (1,)),
    "to_same": lambda x: x.to(x.dtype),
    "to_same_device": lambda x: x.to("cpu"),
    "transpose": lambda x: x.T if x.dim() == 2 else x,
    "unbind": lambda x: x.unbind(0),
    "unfold": lambda x: x.unfold(-1, 1, 1),
    "unsqueeze": lambda x: x.unsqueeze(-1).squeeze(-1),
    "view_of_view": lambda x: x[None].transpose(0, -1)[0:1].squeeze().unsqueeze(0).detach(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_views_do_not_wait(value: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        for view, function in VIEWS.items():
            x, work = asynchronous(VALUES[value])
            expected = outcome(function, VALUES[value].clone())
            got = outcome(function, x)
            copies = (view, value) == ("flatten", "transposed")
            assert work.waits == copies, view
            for part in got if isinstance(got, (list, tuple)) else [got]:
                assert isinstance(part, (type, Tensor if copies else AsyncCollectiveTensor)), view
            assert_same(got, expected)
            # After the wait there is nothing left to wait for, and views are plain.
            plain_of(x)
            assert work.waits == 1 and type(torch.ops.aten.alias(x)) is Tensor


def test_most_views_are_views() -> None:
    failed = {
        view for view, function in VIEWS.items() if isinstance(outcome(function, MATRIX), type)
    }
    assert failed == {"imag"}


# --- uses ------------------------------------------------------------------------------------


def saved(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save({"x": x, "row": x[0]}, buffer)
    assert b"AsyncCollective" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded["x"]) is Tensor
    assert loaded["x"].untyped_storage().data_ptr() == loaded["row"].untyped_storage().data_ptr()
    return loaded["x"]


def written(x: Any) -> Any:
    view, column = x[0], x[:, 1:]
    x[0] = 1
    column.mul_(2)
    x.copy_(x + 1)
    torch.add(x, 1, out=x) if not x.requires_grad else None
    assert x.add_(0) is x and torch.ops.aten.add_(x, 0) is x
    return [view, column, x.clone(), view.clone()]


def scalars(x: Any) -> Any:
    return x[0, 0].item(), float(x[0, 1]), int(x[1, 1]), complex(x[1, 2]), bool(x[0, 0]), len(x)


USES: dict[str, Function] = {
    "add": lambda x: x + x,
    "array": np.asarray,
    "array_of_dtype": lambda x: np.asarray(x, dtype=np.float32),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "cast": lambda x: x.float(),
    "cat": lambda x: torch.cat([x, x]),
    "clone": lambda x: x.clone(),
    "close": lambda x: torch.allclose(x, x.clone()),
    "contains": lambda x: 3.0 in x,
    "copied": copy.copy,
    "deepcopied": copy.deepcopy,
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x),
    "equal": lambda x: torch.equal(x, MATRIX),
    "for_each": lambda x: torch._foreach_add([x, x[0]], 1),
    "index": lambda x: x[torch.tensor([0])],
    "inner": lambda x: (x @ x.t(), x.sum(0), x.max(1)[0]),
    "item": lambda x: scalars(x.detach()),
    "list": lambda x: x.tolist(),
    "mask": lambda x: x[x > 2],
    "memory": lambda x: [
        x.untyped_storage().nbytes(),
        x.data_ptr() > 0,
        bytes(x.untyped_storage()),
    ],
    "numpy": lambda x: x.numpy(),
    "numpy_by_force": lambda x: x[1:].numpy(force=True),
    "on_other": lambda x: torch.zeros_like(x.detach()).add_(x.detach()),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "reshaped": lambda x: x.t().reshape(-1),
    "saved": saved,
    "stacked": lambda x: torch.stack([x[0], x[1]]),
    "string": lambda x: f"{x.detach()[1, 2]:.3f} {x[0, 0].item():.1f}",
    "to": lambda x: [
        x.to(torch.float32),
        x.to("cpu", torch.int64),
        x.to(SCALAR),
        x.to(x, copy=True),
    ],
    "type_as": lambda x: [x.type_as(SCALAR), x.half(), x.type(torch.int32), x.long()],
    "where": lambda x: torch.where(x > 2, x, -x),
    "written": written,
}


@contextlib.contextmanager
def _mode(name: str) -> Iterator[None]:
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[name]():
        yield


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_use_waits_once_and_is_that_of_the_plain_tensor(requires_grad: bool, mode: str) -> None:
    for use, function in USES.items():
        leaf = MATRIX.clone().requires_grad_(requires_grad)
        with _mode(mode):
            expected = outcome(function, leaf.clone())
            x, work = asynchronous(leaf)
            got = outcome(function, x)
            assert_same(got, expected)
            for part in got if isinstance(got, (list, tuple)) else [got]:
                assert use == "written" or not isinstance(part, AsyncCollectiveTensor), use
            assert work.waits == 1 or isinstance(got, type), use
            plain_of(x)
            assert work.waits == 1, use


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.conj().imag,
        lambda x: [x.conj().is_conj(), x.conj().imag.is_neg(), x.mH.is_conj()],
        lambda x: x.conj().resolve_conj() * x,
        lambda x: torch.view_as_real(x.mH.resolve_conj()),
        lambda x: torch.view_as_real(x.conj()),
    ],
)
def test_conjugates(use: Function) -> None:
    x, _ = asynchronous(COMPLEX)
    assert_same(outcome(use, x), outcome(use, COMPLEX.clone()))
    plain_of(x)


def test_made_in_inference_mode_and_used_outside() -> None:
    for function in USES.values():
        with torch.inference_mode():
            plain = MATRIX.clone()
            x, _ = asynchronous(MATRIX)
        assert x.is_inference() and x[0].is_inference()
        assert_same(outcome(function, x), outcome(function, plain))
        plain_of(x)


def test_made_outside_of_inference_mode_and_waited_for_inside() -> None:
    leaf = MATRIX.clone().requires_grad_()
    x, _ = asynchronous(leaf)
    y, _ = asynchronous(leaf)
    with torch.inference_mode():
        plain, row = x.wait(), y[0]
    assert not plain.is_inference() and plain.requires_grad and not row.is_inference()
    plain.mul_(3)
    x.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full_like(leaf, 3))
    plain_of(y)


# --- the wrapper itself ----------------------------------------------------------------------


def test_it_says_what_it_is() -> None:
    x, work = asynchronous(MATRIX)
    assert not x.completed and x.shape == (2, 3) and x.dtype == torch.double
    assert isinstance(x, Tensor) and isinstance(x, torch_collectives.AsyncCollectiveTensor)
    assert work.waits == 0
    assert repr(x) == str(x) == f"{x}" == f"AsyncCollectiveTensor({MATRIX!r})"
    assert x.completed and type(x.wait()) is Tensor and type(x.trigger_wait()) is Tensor
    assert wrap(x) is x
    assert work.waits == 1
    assert x.wait().data_ptr() == x.data_ptr()


def test_only_what_is_under_way_is_wrapped() -> None:
    assert wrap(MATRIX) is MATRIX
    raw, _ = launched(COMPLEX)
    conjugate = raw.conj()
    assert wrap(conjugate) is conjugate and torch.equal(conjugate, COMPLEX.conj())


def test_a_wrapper_and_its_storage_are_found_by_the_registry() -> None:
    x, work = asynchronous(MATRIX)
    assert pending.claim(x) is pending.claim(x.view(-1)) is not None
    pending.wait(x.view(-1))
    assert work.waits == 1 and x.completed and pending.claim(x) is None


def test_freed_without_a_wait() -> None:
    x, work = asynchronous(MATRIX)
    views = x.view(-1), x[0]
    del x
    assert pending.count() == 1
    del views
    work.finished = True
    assert pending.count() == 0 and work.waits == 1


def test_a_second_work_in_place_is_waited_for_by_the_same_wrapper() -> None:
    x, first = asynchronous(MATRIX)
    row = x[0]
    assert row.tolist() == [1.0, 2.0, 3.0]
    second = Fill(x.elem, -MATRIX)
    pending.register(x.elem, second)
    assert not row.completed and not x.completed
    assert row.tolist() == [-1.0, -2.0, -3.0] and torch.equal(x, -MATRIX)
    assert first.waits == second.waits == 1


def test_an_error_reaches_every_use_of_every_view() -> None:
    raw, work = launched(MATRIX, broken=True)
    x = wrap(raw)
    row = x[0]
    for use in (repr, torch.neg, lambda y: y.tolist(), lambda y: y.add_(1), np.asarray):
        for y in (x, row):
            with pytest.raises(ValueError, match="member 3 is missing, number 1"):
                use(y)
    assert work.waits == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(3, 2),
        lambda x: x.set_(MATRIX.clone()),
        lambda x: setattr(x, "data", torch.ones(2)),
    ],
)
def test_its_shape_and_memory_cannot_be_exchanged(change: Function) -> None:
    x, _ = asynchronous(MATRIX)
    with pytest.raises(RuntimeError, match=r"belong to a collective; call .wait\(\) on it"):
        change(x)
    assert torch.equal(x, MATRIX)


def test_an_out_argument_of_another_shape() -> None:
    x, _ = asynchronous(torch.ones(0))
    with pytest.raises(
        RuntimeError, match=r"out has shape \(0,\), but the result has shape \(3,\)"
    ):
        torch.add(torch.ones(3), 1, out=x)


def test_memory_that_is_asked_for_in_cpp_is_an_error() -> None:
    x, _ = asynchronous(MATRIX)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x)  # type: ignore[attr-defined]
    plain_of(x)


def test_an_operator_of_somebody_else_that_says_view_is_waited_for() -> None:
    with torch.library._scoped_library("async_tensor_test", "DEF") as library:
        library.define("same(Tensor(a) x) -> Tensor(a)")
        library.impl("same", lambda x: x.view_as(x).add(0), "CPU")
        x, work = asynchronous(MATRIX)
        with torch.no_grad():
            assert torch.equal(torch.ops.async_tensor_test.same(x), MATRIX)
        assert work.waits == 1


def test_data_can_be_assigned_to_another_tensor() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    leaf.data = asynchronous(torch.ones(6))[0].view(2, 3)[0].data
    assert (leaf * 2).tolist() == [2.0] * 3
