"""The tensor that waits for itself, against the plain tensor in every use."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as torch_collectives
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dataparallel import torch_internals
from dataparallel.collectives.async_tensor import AsyncCollectiveTensor, waiting

MATRIX = torch.arange(1.0, 7.0, dtype=torch.double).view(2, 3)
COMPLEX = torch.complex(MATRIX, -MATRIX)
SCALAR = torch.tensor(2.5)
VALUES = {
    "contiguous": MATRIX,
    "transposed": MATRIX.t(),
    "strided": torch.arange(12.0).view(3, 4)[:, ::2],
    "scalar": SCALAR,
    "empty": torch.ones(0, 3),
    "booleans": torch.tensor([[True, False], [False, True]]),
    "complex": COMPLEX,
}
Function = Callable[[Any], Any]


class Fill:
    """A work that writes a value when somebody first waits for it, and counts that."""

    def __init__(self, tensor: Tensor, value: Tensor, error: str = "") -> None:
        self.tensor, self.value, self.error = tensor, value, error
        self.waits = 0

    @property
    def completed(self) -> bool:
        return self.waits > 0 and not self.error

    def wait(self) -> None:
        if self.error:
            raise ValueError(self.error)
        if not self.waits:
            with torch_internals.below_versions():
                self.tensor.copy_(self.value)
            self.waits += 1


def asynchronous(value: Tensor, error: str = "") -> tuple[Any, Fill]:
    """Return a result with garbage in its memory, which a work is to fill with ``value``."""
    raw = value.clone() if value.dim() < 2 else value.clone(memory_format=torch.preserve_format)
    work = Fill(raw.data, raw.detach().clone(), error)
    raw.data.fill_(77)
    x = waiting(raw, work)
    assert type(x) is AsyncCollectiveTensor
    return x, work


def plain_of(x: Any) -> Tensor:
    """Return the result of ``wait``, or a plain tensor itself."""
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


def parts_of(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


# --- views -----------------------------------------------------------------------------------

VIEWS: dict[str, Function] = {
    "chunk": lambda x: x.chunk(2, -1),
    "contiguous": lambda x: x.contiguous() if x.is_contiguous() else x,
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "dtype": lambda x: x.view(torch.uint8) if x.dtype == torch.bool else x.view(torch.int16),
    "expand": lambda x: x.unsqueeze(0).expand(4, *x.shape),
    "flatten": lambda x: x.transpose(0, -1).flatten() if x.dim() < 2 else x.flatten(),
    "imag": lambda x: x.imag,
    "iteration": lambda x: list(x),
    "movedim": lambda x: x.movedim(0, -1),
    "select": lambda x: x[-1],
    "slice": lambda x: x[..., 1:],
    "split": lambda x: x.split([1, 2], -1),
    "strided": lambda x: torch.as_strided(x, (1,), (1,)),
    "to_same": lambda x: x.to(x.dtype),
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
            assert value != "contiguous" or view == "imag" or not isinstance(expected, type)
            got = outcome(function, x)
            copies = (view, value) == ("flatten", "transposed")
            assert work.waits == copies, view
            for part in parts_of(got):
                assert isinstance(part, (type, Tensor if copies else AsyncCollectiveTensor)), view
            assert_same(got, expected)
            # After the wait there is nothing left to wait for, and views are plain.
            plain_of(x)
            assert work.waits == 1 and type(torch.ops.aten.alias(x)) is Tensor


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


USES: dict[str, Function] = {
    "add": lambda x: x + x,
    "array": np.asarray,
    "array_of_dtype": lambda x: np.asarray(x, dtype=np.float32),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "cat": lambda x: torch.cat([x, x]),
    "contains": lambda x: 3.0 in x,
    "copied": copy.copy,
    "deepcopied": copy.deepcopy,
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x),
    "equal": lambda x: torch.equal(x, MATRIX),
    "for_each": lambda x: torch._foreach_add([x, x[0]], 1),
    "inner": lambda x: (x @ x.t(), x.sum(0), x.max(1)[0]),
    "item": lambda x: [x[0, 0].item(), float(x.detach()[0, 1]), int(x.detach()[1, 1]), len(x)],
    "list": lambda x: x.tolist(),
    "mask": lambda x: x[x > 2],
    "numpy_by_force": lambda x: x[1:].numpy(force=True),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": saved,
    "string": lambda x: f"{x.detach()[1, 2]:.3f} {x[0, 0].item():.1f}",
    "to": lambda x: [x.to(torch.float32), x.to("cpu", torch.int64), x.to(x, copy=True)],
    "type_as": lambda x: [x.type_as(SCALAR), x.half(), x.type(torch.int32), x.long()],
    "where": lambda x: torch.where(x > 2, x, -x),
    "written": written,
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_use_waits_once_and_is_that_of_the_plain_tensor(requires_grad: bool, mode: str) -> None:
    for use, function in USES.items():
        leaf = MATRIX.clone().requires_grad_(requires_grad)
        with MODES[mode]():
            expected = outcome(function, leaf.clone())
            x, work = asynchronous(leaf)
            got = outcome(function, x)
            assert_same(got, expected)
            for part in parts_of(got):
                assert use == "written" or not isinstance(part, AsyncCollectiveTensor), use
            assert work.waits == 1 or isinstance(got, type), use
            plain_of(x)
            assert work.waits == 1, use


@pytest.mark.parametrize(
    "use",
    [
        lambda x: [x.conj().is_conj(), x.conj().imag, x.conj().imag.is_neg(), x.mH.is_conj()],
        lambda x: x.conj().resolve_conj() * x,
        lambda x: torch.view_as_real(x.mH.resolve_conj()),
        lambda x: torch.view_as_real(x.conj()),
    ],
)
def test_conjugates(use: Function) -> None:
    x, _ = asynchronous(COMPLEX)
    assert_same(outcome(use, x), outcome(use, COMPLEX.clone()))


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
    assert isinstance(x, torch_collectives.AsyncCollectiveTensor) and work.waits == 0
    assert repr(x) == str(x) == f"{x}" == f"AsyncCollectiveTensor({MATRIX!r})"
    assert x.completed and type(x.wait()) is Tensor and type(x.trigger_wait()) is Tensor
    assert work.waits == 1
    assert x.wait().data_ptr() == work.tensor.data_ptr()


def test_an_error_reaches_every_use_of_every_view() -> None:
    x, _ = asynchronous(MATRIX, "member 3 is missing")
    row = x[0]
    for use in (repr, torch.neg, lambda y: y.tolist(), lambda y: y.add_(1), np.asarray):
        for y in (x, row):
            with pytest.raises(ValueError, match="member 3 is missing"):
                use(y)


def test_its_shape_and_memory_cannot_be_exchanged() -> None:
    x, _ = asynchronous(MATRIX)
    changes: list[Function] = [lambda x: x.t_(), lambda x: x.unsqueeze_(0)]
    for change in [*changes, lambda x: x.resize_(3, 2), lambda x: x.set_(MATRIX.clone())]:
        with pytest.raises(RuntimeError, match=r"belong to a collective; call .wait\(\) on it"):
            change(x)
    with pytest.raises(AttributeError, match="data"):
        x.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x)  # type: ignore[attr-defined]
    assert torch.equal(x, MATRIX)


def test_an_out_of_another_shape_is_refused() -> None:
    x, _ = asynchronous(MATRIX)
    with (
        pytest.warns(UserWarning, match="was resized"),
        pytest.raises(RuntimeError, match=r"out has shape \(2, 3\), but the result .* \(3, 2\)"),
    ):
        torch.add(MATRIX.t(), 1, out=x)


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


# --- gradients -------------------------------------------------------------------------------


def changed(x: Any, change: Function, result: Function = lambda x: x * x) -> Any:
    change(x)
    return result(x)


def item_assigned(x: Any) -> Any:
    x[0] = x[1] * 2
    return x * x


def waited_without_grad_and_changed(x: Any) -> Any:
    with torch.no_grad():
        plain = plain_of(x)
    plain.mul_(3)
    return x * plain


def used_and_changed(x: Any, use: Function, change: Function) -> Any:
    y = use(x)
    change(x)
    return y


GRADIENTS: list[Function] = [
    lambda x: x.add_(1).mul_(x.detach() + 1) * x,
    lambda x: changed(x, lambda x: x.view(-1)[1:].mul_(3)),
    lambda x: changed(x, lambda x: plain_of(x).mul_(3)),
    lambda x: changed(x, lambda x: x.mul_(3), lambda x: plain_of(x) * x),
    lambda x: changed(x, lambda x: x.detach().mul_(2)),
    item_assigned,
    waited_without_grad_and_changed,
    lambda x: x.unbind(0)[0] * x.unbind(0)[1] + x.split([1, 2], 1)[1].pow(2).sum(),
    lambda x: torch.utils.checkpoint.checkpoint(
        lambda y: y.view(-1).sin().pow(2), x, use_reentrant=False
    ),
    lambda x: x.t().reshape(-1).exp(),
    lambda x: plain_of(x) * x.view(-1).view(2, 3),
    lambda x: torch.complex(x, x).real * x,
    lambda x: x.float().double() * x.to("cpu"),
]

ERRORS: list[Function] = [
    lambda x: used_and_changed(x, lambda x: x * x, lambda x: x.add_(1)),
    lambda x: used_and_changed(x, lambda x: x * x, lambda x: plain_of(x).add_(1)),
    lambda x: used_and_changed(
        x, lambda x: plain_of(x).exp() * plain_of(x), lambda x: x.view(-1).add_(1)
    ),
    lambda x: used_and_changed(x, lambda x: x * x, lambda x: x.detach()[0].zero_()),
    lambda x: changed(x, lambda x: x.unbind(0)[0].add_(1)),
]


def derivatives(function: Function, make: Function) -> list[Tensor | None]:
    leaf = MATRIX.clone().requires_grad_()
    y = function(make(leaf * 2))
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    second: Tensor | None = None
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf, allow_unused=True)
    return [y.detach(), first.detach(), second]


@pytest.mark.parametrize("function", GRADIENTS)
def test_derivatives_are_those_of_the_plain_tensor(function: Function) -> None:
    expected = derivatives(function, lambda x: x)
    got = derivatives(function, lambda x: asynchronous(x)[0])
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b) and (a is None or b is None or torch.equal(a, b))


@pytest.mark.parametrize("function", ERRORS)
def test_what_autograd_rejects_is_rejected(function: Function) -> None:
    for make in (lambda x: x, lambda x: asynchronous(x)[0]):
        with pytest.raises(RuntimeError, match=r"modified by an inplace|is being modified inplace"):
            derivatives(function, make)


def test_as_a_leaf_with_hooks() -> None:
    x, work = asynchronous(MATRIX)
    assert x.requires_grad_() is x and x.is_leaf and work.waits == 0
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    (x.view(-1) * 3).sum().backward()
    assert work.waits == 1 and torch.equal(x.grad, torch.full_like(MATRIX, 3))
    assert torch.equal(seen[0], x.grad)
    with torch.no_grad():
        x.sub_(x.grad)
    assert torch.equal(x.detach(), MATRIX - 3)


@pytest.mark.parametrize("completed", [False, True])
def test_as_a_parameter(completed: bool) -> None:
    x, work = asynchronous(MATRIX)
    assert not completed or x.wait() is not None
    module = nn.Module()
    module.weight = nn.Parameter(x)
    assert isinstance(module.weight, nn.Parameter) and work.waits == completed
    twin = copy.deepcopy(module)
    assert type(twin.weight) is nn.Parameter and torch.equal(twin.weight, MATRIX)
    assert work.waits == 1 and twin.weight.requires_grad


def test_only_leaves_can_be_copied() -> None:
    x, _ = asynchronous(MATRIX)
    twin, again = copy.deepcopy([x.requires_grad_(), x])
    assert twin is again and type(twin) is Tensor and twin.requires_grad
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(asynchronous(MATRIX.clone().requires_grad_())[0])


# --- other machinery of torch ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_of_functions() -> None:
    def square(t: Tensor) -> Tensor:
        return (t * t).sum()

    for transform in (torch.vmap, torch.func.grad, torch.func.hessian):
        x, work = asynchronous(MATRIX)
        assert torch.equal(transform(square)(x), transform(square)(MATRIX))
        assert work.waits == 1
    x, _ = asynchronous(MATRIX)
    assert torch.func.jvp(square, (x,), (x,))[1].item() == 2 * MATRIX.pow(2).sum().item()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_as_an_argument_of_a_compiled_function(backend: str) -> None:
    def function(t: Tensor) -> Tensor:
        return (t * 2).view(-1) + t.view(-1).sin()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        x, work = asynchronous(MATRIX)
        torch.testing.assert_close(compiled(x), function(MATRIX))
        assert work.waits == 1
    leaf = MATRIX.clone().requires_grad_()
    for _ in range(2):
        x, work = asynchronous(leaf)
        compiled(x).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (2 + MATRIX.cos()))
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("select", [lambda t: t, lambda t: t[1:]], ids=["all", "row"])
def test_a_compiled_function_changes_its_argument(select: Function) -> None:
    torch._dynamo.reset()
    x, work = asynchronous(MATRIX)
    torch.compile(lambda t: t.mul_(3), backend="aot_eager", fullgraph=True)(select(x))
    expected = MATRIX.clone()
    select(expected).mul_(3)
    assert torch.equal(plain_of(x), expected) and work.waits == 1


def test_compiled_code_takes_views_of_several_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for size in (3, 4, 6):
        x, work = asynchronous(torch.ones(size, 2))
        assert compiled(x[1:]).tolist() == [[2.0, 2.0]] * (size - 1) and work.waits == 1
