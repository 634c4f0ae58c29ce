"""The collectives over process groups as operators of torch, which compilers can trace.

Note [Operators]
~~~~~~~~~~~~~~~~
Each takes the name of the process group and plain numbers, returns new memory, and does not wait:
``wait_tensor`` does. Outside of compiled code nobody calls that one: there the result is an
AsyncCollectiveTensor, which waits without a copy.

Compilers move operators and reuse memory, so everything that must not happen is said in a way that
they understand:

- An operator must not return its argument, so ``wait_tensor`` copies. What the backend writes is in
  use until then; what was given to the collective may be overwritten, see Note [What is sent] in
  ``process_kernels.py``.
- Nothing may be removed, since the other members wait for it, and the collectives of two members
  may not be swapped at one of them, even if sizes differ and another order would save memory there.
  They are registered as having ordered effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.node
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives import pending
from dataparallel.collectives.async_tensor import can_wrap
from dataparallel.collectives.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dataparallel.collectives.derivatives import derivative, needs_inputs
from dataparallel.collectives.operators import OPERATORS, Operator
from dataparallel.collectives.operators import group_rank as group_rank
from dataparallel.collectives.operators import group_size as group_size

_library: Any = torch.library.Library("dataparallel", "DEF")  # type: ignore[no-untyped-call]


# --- calls -----------------------------------------------------------------------------------


def run(collective: Collective, tensor: Tensor, name: str) -> Tensor:
    """Check the arguments and launch; the result must be waited for.

    Args:
        collective: What to compute.
        tensor: What this process gives.
        name: The name of the process group.

    Raises:
        ValueError: The collective does not take such a tensor.
    """
    size = group_size(name)
    if isinstance(collective, AllToAll) and not _are_plain_numbers(collective, tensor):
        _check_rows(collective, tensor, size)
        return launch(collective, tensor, name)
    return launch(collective.checked(tensor, size), tensor, name)


def _are_plain_numbers(collective: AllToAll, tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    (gets,), (gives,) = collective.output_splits, collective.input_splits
    return all(type(rows) is int for rows in (*gets, *gives, *tensor.shape[:1]))


def _check_rows(collective: AllToAll, tensor: Tensor, size: int) -> None:
    """Check split sizes that may become known only when compiled code runs."""
    check = torch_internals.check
    (gets,), (gives,) = collective.output_splits, collective.input_splits
    for name, splits in (("output_split_sizes", gets), ("input_split_sizes", gives)):
        if len(splits) != size:
            raise ValueError(
                f"{name} has one number of rows, at least 0, for each of the {size} members, "
                f"but has {len(splits)}"
            )
        for rows in splits:
            check(rows >= 0, lambda: "split sizes are at least 0, but one is negative")
    # torch 2.11 compiles no text that is in a variable of this function.
    check(
        sum(gives) == tensor.size(0),
        lambda: "input_split_sizes do not add up to the rows of the tensor",
    )


def launch(collective: Collective, tensor: Tensor, name: str) -> Tensor:
    """Launch what has been checked; the result must be waited for.

    Args:
        collective: What to compute, with dimensions counted from the front.
        tensor: What this process gives.
        name: The name of the process group.
    """
    operator, *options = _call_of(collective, name)
    if torch.compiler.is_compiling() or not _is_plain(tensor):
        result: Tensor = getattr(torch.ops.dataparallel, operator)(tensor, *options, name)
        return result
    # The operator does nothing else here, and costs as much time again.
    described = _BY_NAME[operator]
    if _is_recorded(tensor):
        return _apply(_Launch, tensor, described, None, *options, name)
    return described.kernel(tensor, *options, name)


def _call_of(collective: Collective, name: str) -> tuple[Any, ...]:
    """The name of the operator, and its arguments between the tensor and the group."""
    size = group_size(name)
    if isinstance(collective, AllReduce):
        return "all_reduce", collective.op
    if isinstance(collective, Reduce):
        return "reduce", collective.op, collective.root
    if isinstance(collective, ReduceScatter):
        return "reduce_scatter", collective.op, collective.dim, size
    if isinstance(collective, Broadcast):
        return "broadcast", collective.root
    if isinstance(collective, AllGather):
        return "all_gather", collective.dim, size
    if isinstance(collective, Gather):
        copies = size if group_rank(name) == collective.root else 0
        return "gather", collective.dim, collective.root, copies
    if isinstance(collective, Scatter):
        return "scatter", collective.dim, collective.root, size
    assert isinstance(collective, AllToAll), collective
    (gets,), (gives,) = collective.output_splits, collective.input_splits
    return "all_to_all", list(gets), list(gives)


def _is_plain(tensor: Tensor) -> bool:
    """Whether nobody but autograd would notice that an operator is called."""
    return (
        can_wrap(tensor)
        and not torch_internals.num_dispatch_modes()
        and not torch_internals.num_function_modes()
        and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())
    )


def wait(tensor: Tensor) -> None:
    """Wait for what writes the memory of ``tensor``, if anything does."""
    pending.wait(tensor)


def waited(result: Tensor) -> Tensor:
    """A copy of a result, after its collective, as an operator. See Note [Operators].

    Args:
        result: What :func:`launch` returned.
    """
    copy: Tensor = torch.ops.dataparallel.wait_tensor(result)
    return copy


# --- derivatives -----------------------------------------------------------------------------


class _Launch(torch_internals.OneStepFunction):
    """The node of an operator that launches a collective."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, operator: Operator, keys: Any, *options: Any) -> Tensor:
        *plain, ctx.name = options
        ctx.collective = operator.collective(*plain)
        ctx.shape = tensor.shape
        if needs_inputs(ctx.collective):
            ctx.save_for_backward(tensor)
        if keys is None:
            return operator.kernel(tensor, *options)
        return _below_autograd(operator.overload, keys, tensor, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def run(collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [_run_and_wait(collective, tensor, ctx.name) for tensor in tensors]

        members, size = [group_rank(ctx.name)], group_size(ctx.name)
        inputs = ctx.saved_tensors or [grad.new_empty(()).expand(ctx.shape)]
        found = derivative(ctx.collective, run, members, size, inputs, [grad])[0]
        return found, None, None, *(None for _ in ctx.needs_input_grad[3:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


class _Wait(torch_internals.OneStepFunction):
    """The node of the operator that waits."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, keys: Any) -> Tensor:
        return _below_autograd(torch.ops.dataparallel.wait_tensor.default, keys, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


def _run_and_wait(collective: Collective, tensor: Tensor, name: str) -> Tensor:
    result = launch(collective, tensor, name)
    if not can_wrap(result):
        return waited(result)
    wait(result)
    return result


def _apply(function: Any, *arguments: Any) -> Tensor:
    apply = function.apply
    if torch_internals.innermost_transform() is None:
        result: Tensor = apply(*arguments)
        return result
    with torch_internals.single_level_function():
        result = apply(*arguments)
    return result


def _below_autograd(overload: Any, keys: Any, *arguments: Any) -> Tensor:
    with torch_internals.below_autograd():
        result: Tensor = overload.redispatch(keys & torch_internals.AFTER_AUTOGRAD, *arguments)
    return result


def _refuse_forward_mode() -> None:
    raise NotImplementedError(
        "collectives have no forward-mode derivative; compute Jacobian-vector products with two "
        "backward passes (torch.autograd.functional.jvp)"
    )


# --- registration ----------------------------------------------------------------------------


def _register(operator: Operator) -> None:
    schema = f"{operator.name}(Tensor self, {operator.options}, str group) -> Tensor"
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    qualified = f"dataparallel::{operator.name}"

    def fake(tensor: Tensor, *options: Any) -> Tensor:
        return tensor.new_empty(operator.shape(tensor, *options[:-1]))

    def recorded(keys: Any, tensor: Tensor, *options: Any) -> Tensor:
        if _is_recorded(tensor):
            return _apply(_Launch, tensor, operator, keys, *options)
        return _below_autograd(operator.overload, keys, tensor, *options)

    def batched(info: Any, dims: Any, tensor: Tensor, *options: Any) -> tuple[Tensor, int]:
        place = 1 if operator.rows else 0
        moved = tensor.movedim(dims[0], place)
        *plain, name = options
        return operator.overload(moved, *operator.batched(*plain), name), place

    _library.impl(operator.name, operator.kernel, "CompositeExplicitAutograd")
    _library.impl(operator.name, recorded, "Autograd", with_keyset=True)
    _finish_registration(qualified, fake, batched)


def _register_wait() -> None:
    schema = "wait_tensor(Tensor self) -> Tensor"
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    overload = torch.ops.dataparallel.wait_tensor.default

    def kernel(tensor: Tensor) -> Tensor:
        wait(tensor)
        return tensor.clone()

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def recorded(keys: Any, tensor: Tensor) -> Tensor:
        if _is_recorded(tensor):
            return _apply(_Wait, tensor, keys)
        return _below_autograd(overload, keys, tensor)

    def batched(info: Any, dims: Any, tensor: Tensor) -> tuple[Tensor, int]:
        return overload(tensor), dims[0]

    _library.impl("wait_tensor", kernel, "CompositeExplicitAutograd")
    _library.impl("wait_tensor", recorded, "Autograd", with_keyset=True)
    _finish_registration("dataparallel::wait_tensor", fake, batched)


def _is_recorded(tensor: Tensor) -> bool:
    # A level of forward mode may hold a tangent, which must not get lost.
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    return recorded or torch_internals.forward_mode_level() >= 0


def _finish_registration(
    qualified: str, fake: Callable[..., Tensor], batched: Callable[..., Any]
) -> None:
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_vmap(qualified, batched, lib=_library)
    torch.fx.node.has_side_effect(getattr(torch.ops.dataparallel, qualified.split("::")[1]).default)
    torch_internals.register_ordered(_library, qualified)


_BY_NAME = {operator.name: operator for operator in OPERATORS}

for _operator in OPERATORS:
    _register(_operator)
_register_wait()
