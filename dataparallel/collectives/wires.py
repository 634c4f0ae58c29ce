"""The operations with which tensors of several processes become one, and what travels for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Note [What can be added]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# Backends add the types in TAKEN. Others have no sum anywhere. Integers travel as int64, where the
# sum is exact and wraps on return as it would have; small floats travel as float32, complex ones as
# complex64, and are rounded once, on return. What is only moved travels as bytes.

#: What every backend takes.
TAKEN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

#: What each does with two tensors of one shape and dtype.
COMBINED: dict[str, Any] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BITWISE = frozenset({"band", "bor", "bxor"})
EXTREMES = frozenset({"min", "max"})

# Note [Minimum and maximum]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# Gloo compares as C++ does, so that whether a NaN survives depends on the order of the processes,
# and NCCL drops every NaN. An integer has no NaN: floats travel as the integers that stand in the
# same order, with every NaN as the one that wins. They are the bits of the float, but negative ones
# count downwards from -1, where their magnitudes count upwards. -0.0 is below 0.0. An unsigned
# integer of 64 bits has no wider type; it travels as if it began at the lowest signed one.

# Bool has no sum: gloo adds the bytes, and a bool whose byte is 2 is neither True nor False.
_OF_BOOLS = {"sum": "max", "bor": "max", "product": "min", "band": "min"}

# A backend that has the bitwise operations.
_HAVE_BITWISE = frozenset({"gloo", "mpi"})


@dataclass(frozen=True)
class Wire:
    """How the values of a tensor look while a backend computes with them.

    Args:
        dtype: Of what travels.
        op: ``"min"`` or ``"max"`` if integers travel in place of what they stand for; see
            Note [Minimum and maximum]. Default: values travel as values.
    """

    dtype: torch.dtype
    op: str | None = None

    def load(self, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write what travels for ``tensor`` to a flat ``buffer`` of :attr:`dtype`."""
        values = self._values(buffer, tensor)
        values.copy_(tensor)
        if self.op is None:
            return
        if values.is_floating_point():
            lost = values.view(-1).isnan()
            _turn_negative(buffer)
            limits = torch.iinfo(self.dtype)
            buffer.masked_fill_(lost, limits.max if self.op == "max" else limits.min)
        else:
            buffer.bitwise_xor_(torch.iinfo(self.dtype).min)

    def restore(self, buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The values in a ``buffer``, in the shape of ``tensor``. Changes the buffer."""
        values = self._values(buffer, tensor)
        if self.op is not None:
            if values.is_floating_point():
                _turn_negative(buffer)
            else:
                buffer.bitwise_xor_(torch.iinfo(self.dtype).min)
        return values

    def _values(self, buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if self.op is None:
            return buffer.view(tensor.shape)
        meaning = tensor.dtype
        if meaning.is_floating_point and meaning != torch.float64:
            meaning = torch.float32
        return buffer.view(meaning).view(tensor.shape)


@dataclass(frozen=True)
class Reduction:
    """How tensors of several processes become one.

    Args:
        op: One of :data:`COMBINED`, applied to what travels.
        wire: What travels.
        gathered: Whether every process gets the tensors of all, and reduces them itself.
    """

    op: str
    wire: Wire
    gathered: bool


def plan_reduction(op: str, tensor: torch.Tensor, backend: str | None) -> Reduction:
    """Decide how a reduction is done: the same wherever dtype, layout and backend are the same.

    Args:
        op: One of :data:`COMBINED`.
        tensor: What is reduced.
        backend: Name of the backend that does it; ``None`` if none takes the device.

    Returns:
        The plan.
    """
    dtype = tensor.dtype
    if dtype == torch.bool:
        op = _OF_BOOLS.get(op, op)
    if op in EXTREMES and dtype.is_floating_point:
        narrow = dtype != torch.float64
        return Reduction(op, Wire(torch.int32 if narrow else torch.int64, op), gathered=False)
    if op in EXTREMES and dtype == torch.uint64:
        return Reduction(op, Wire(torch.int64, op), gathered=False)
    # No backend multiplies complex numbers.
    gathered = op == "product" and dtype.is_complex
    gathered |= op in BITWISE and backend not in _HAVE_BITWISE
    return Reduction(op, Wire(_summed_as(dtype)), gathered)


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    """The type in which to add values; see Note [What can be added]."""
    if dtype in TAKEN:
        return dtype
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else torch.int64


def _turn_negative(bits: torch.Tensor) -> None:
    """From the bits of floats to integers in the same order, in place; its own inverse."""
    limits = torch.iinfo(bits.dtype)
    bits.bitwise_xor_((bits >> (limits.bits - 1)).bitwise_and_(limits.max))
