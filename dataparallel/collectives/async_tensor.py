"""A result that waits for itself before its first use.

An AsyncCollectiveTensor has the shape of the result and no memory. Every operation arrives in its
``__torch_dispatch__``, below autograd, which waits and hands on the plain tensor. Views are made of
the plain tensor without waiting, and wrapped again.

For autograd it is a view of the plain tensor, and what ``wait()`` returns is a view of it. So all
of them share one history and one version counter. A change in place through any of them has the
right gradient in all, or raises the error of plain tensors. The view is made by torch's own
``alias``, whose result a dispatch mode replaces. (Were it no view, a compiler that is given a view
of it could not tell where the sizes of its base come from.)

If autograd is off (inference mode), operators that torch composes of others arrive whole. The
signatures of ``to`` and ``contiguous`` then say "may be a view". They are taken apart first; only
what is a view for any arguments counts as one.

Torch's own class of that name forgets the work at the first wait, so a second use of a failed
result would read garbage. This one is derived from it, since compiled functions ask their arguments
for that class and then call ``trigger_wait()``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.torch_internals import AsyncCollectiveTensor as _TorchAsync

_aten = torch.ops.aten
_AS_IT_IS = contextlib.nullcontext()


class Work(Protocol):
    """An operation that has been started and writes a tensor."""

    @property
    def completed(self) -> bool:
        """True if somebody has waited, without an error, and this thread can use the tensor."""

    def wait(self) -> None:
        """Wait until it is written: the host on the CPU, the current stream on an accelerator."""


class _Done:
    completed = True

    def wait(self) -> None:
        """Nothing is under way."""


def waiting(tensor: Tensor, work: Work) -> AsyncCollectiveTensor:
    """Return a view of a plain tensor that waits, before its first use, for its writer."""
    with _as_itself(tensor):
        torch_internals.push_bare_mode(_Wrapping(work))
        try:
            wrapped: AsyncCollectiveTensor = _aten.alias.default(tensor)
        finally:
            torch_internals.pop_bare_mode(None)
    return wrapped


def _as_itself(tensor: Tensor) -> AbstractContextManager[object]:
    """Modes in which a view of ``tensor`` can do whatever ``tensor`` can.

    A view that was made while gradients were off may not be changed once they are on again.
    """
    if torch.is_grad_enabled() and tensor.is_inference() == torch.is_inference_mode_enabled():
        return _AS_IT_IS
    modes = contextlib.ExitStack()
    modes.enter_context(torch.inference_mode(tensor.is_inference()))
    modes.enter_context(torch.enable_grad())
    return modes


class _Wrapping:
    """A dispatch mode that wraps what ``alias`` returns; torch's class costs several times this."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # In between, torch asks a fake tensor for its device, too.
        return _wrapped(result, self._work) if func is _aten.alias.default else result


class _Unwrapping:
    """A dispatch mode that makes a view of the plain tensor for which another stands."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.alias.default and isinstance(args[0], AsyncCollectiveTensor):
            args = (args[0].elem,)
        return func(*args, **(kwargs or {}))


def _wrapped(elem: Tensor, work: Work) -> AsyncCollectiveTensor:
    """Return a stand-in for a tensor, without its history."""
    if elem.is_inference() != torch.is_inference_mode_enabled():
        with torch.inference_mode(elem.is_inference()):
            return _wrapped(elem, work)
    made: AsyncCollectiveTensor = torch_internals.make_wrapper_subclass(
        AsyncCollectiveTensor,
        elem.size(),
        strides=elem.stride(),
        storage_offset=elem.storage_offset(),
        dtype=elem.dtype,
        layout=elem.layout,
        device=elem.device,
    )
    # Code in C++ that asks for memory gets an error instead of a null pointer.
    torch_internals.refuse_memory(made)
    made._stand_for(elem, work)
    return made


class AsyncCollectiveTensor(_TorchAsync):
    """The result of a collective that may still be under way.

    The first operation on it waits. Its shape and its views are there at once. Operations return
    plain tensors.

    Example::

        total = all_reduce(x, "sum", group)
        y = compute_something_else()
        y += total                          # waits here
    """

    elem: Tensor
    _work: Work

    __torch_function__ = torch_internals.no_torch_function

    def _stand_for(self, elem: Tensor, work: Work) -> None:
        self.elem, self._work = elem, work

    # --- waiting -----------------------------------------------------------------------------

    @property
    def completed(self) -> bool:  # type: ignore[override]
        """True if this thread can use the result without a wait."""
        return self._work.completed

    def wait(self) -> Tensor:
        """Wait, and return the plain tensor, which has the same memory and history."""
        self._work.wait()
        with _as_itself(self):
            # The stream waits, and the result may still be under way.
            torch_internals.push_bare_mode(_Unwrapping())
            try:
                plain: Tensor = _aten.alias.default(self)
            finally:
                torch_internals.pop_bare_mode(None)
        return plain

    def trigger_wait(self) -> Tensor:
        """Return the same as :meth:`wait`, by torch's name."""
        return self.wait()

    # --- operations --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind == "composite":
            return func.decompose(*args, **kwargs)
        if kind == "view" and isinstance(args[0], AsyncCollectiveTensor):
            return _view(func, args[0], args[1:], kwargs)
        if kind == "reshaping" and isinstance(args[0], AsyncCollectiveTensor):
            raise RuntimeError(
                f"{func.overloadpacket.__name__}() would change the shape or the memory of an "
                "AsyncCollectiveTensor, which belong to a collective; call .wait() on it and use "
                "what that returns"
            )
        wrappers: list[AsyncCollectiveTensor] = []
        result = func(*_ready(args, wrappers), **_ready(kwargs, wrappers))
        for wrapper in wrappers if kind == "mutable" else ():
            if wrapper.shape != wrapper.elem.shape:
                raise RuntimeError(
                    f"out has shape {tuple(wrapper.shape)}, but the result has shape "
                    f"{tuple(wrapper.elem.shape)}, and an AsyncCollectiveTensor cannot be resized; "
                    "call .wait() on it and use what that returns"
                )
            if result is wrapper.elem:
                return wrapper
        return result

    # --- what asks for no operator -----------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def tolist(self) -> Any:
        return self.wait().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wait().__dlpack__(*args, **kwargs)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.wait()!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.wait(), format_spec) if format_spec else str(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        if type(self.elem) is not Tensor:
            # A fake tensor, as a compiler's cache pickles it: by its type, through its own table.
            return copy.copy, (self._leaf(),)
        return self._leaf().__reduce_ex__(proto)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # If the tensor is no leaf, torch raises that only leaves can be copied.
        return copy.deepcopy(self._leaf() if self.is_leaf else self.wait(), memo)

    def _leaf(self) -> Tensor:
        """Return the plain tensor without a history, as a copy of it starts."""
        leaf = self.wait().detach().requires_grad_(self.requires_grad)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return torch.nn.Parameter(leaf, self.requires_grad) if is_parameter else leaf

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The plain tensor without its history; waits, since it may be assigned to another's."""
        return self.wait().data

    # --- compilation -------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self._work.wait()
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Mapping[str, Tensor], meta: None, outer_size: Any, outer_stride: Any
    ) -> AsyncCollectiveTensor:
        return _wrapped(inner_tensors["elem"], _Done())

    def _view_func_unsafe(self, new_base: Tensor, on_int: Any = None, on: Any = None) -> Tensor:
        """Return the same view of another base, as a compiler makes it of a fake one.

        Torch's own replays what autograd recorded, and so returns a plain view. Torch 2.11 would
        compile for that, and hand the code the tensor that has no memory. Numbers stay as they are:
        for unknowns in their place, torch may find no value later, and fail.
        """
        return waiting(torch_internals.replay_view(self, new_base, None, on), _Done())


def _view(
    func: Any, tensor: AsyncCollectiveTensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    work = tensor._work
    views = func(tensor.elem, *args, **kwargs)
    # `Parameter` insists on a `detach` that keeps the class.
    if work.completed and func is not _aten.detach.default:
        return views
    if isinstance(views, Tensor):
        return _wrapped(views, work)
    return [_wrapped(view, work) for view in views]


@functools.cache
def _kind_of(func: Any) -> str:
    """Decide how to handle an operator."""
    if not isinstance(func, torch_internals.OpOverload):
        return "other"
    if torch_internals.has_kernel(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    if torch.Tag.inplace_view in func.tags:
        return "reshaping"
    # It never reads memory, and always shares it. Others' operators only say so.
    if (
        func.is_view
        and func.namespace == "aten"
        and func.overloadpacket not in torch_internals.marking_views
    ):
        return "view"
    return "mutable" if torch_internals.schema_of(func).is_mutable else "other"


def _ready(value: Any, wrappers: list[AsyncCollectiveTensor]) -> Any:
    """Return the value with all tensors waited for and unwrapped; those go to ``wrappers``."""
    if isinstance(value, AsyncCollectiveTensor):
        value._work.wait()
        wrappers.append(value)
        return value.elem
    if isinstance(value, (list, tuple)):
        return type(value)([_ready(item, wrappers) for item in value])
    if isinstance(value, dict):
        return {key: _ready(item, wrappers) for key, item in value.items()}
    return value
