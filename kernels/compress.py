"""Numbers in fewer bits, for sending: 16 bits each, or 8 bits with a scale for each block.

Note [Format of int8]
~~~~~~~~~~~~~~~~~~~~~
n numbers, in the order of indices, are divided into blocks of 256; the last one may be shorter.
One uint8 tensor has all of it, so that it travels in one collective:

- a float32 scale s for each block. The number of blocks is rounded up to a multiple of 4; what is
  too many has the scale 0;
- an int8 q for each number. Their number is rounded up to a multiple of 16; what is too many is 0.

The value is q * s, one product in float32. With m the largest magnitude in a block, s is m / 127
and q is v * (127 / m) rounded to the nearest integer, halves to the even one. One reciprocal for
all numbers of a block costs less than a division for each; the value is off by s / 2 at most, as
with a division, but for the rounding of float32. There are three exceptions:

- s would be smaller than the smallest normal number (2^-126): s and all q are 0, since quotients
  would have lost their precision, or be infinite. An error that is kept loses nothing by it.
- 127 * s would be infinite, which can be where m is among the largest floats: s is the largest one
  for which it is not.
- A number is infinite or no number: s is NaN and all q are 0. So the whole block becomes NaN, and
  nobody takes it for a valid one. The errors of the block become 0, or every later step would be
  NaN too. In 16 bits this holds for each element: what is sent as infinity or NaN leaves no error.
"""

from __future__ import annotations

import ctypes

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import THREADS, Backend, backend_of
from dataparallel.kernels.memory import is_dense, is_plain, mark_written, overlap
from dataparallel.kernels.reference.compress import blocks_of, compressed_size

_ALIGNMENT = 16
_WARPS = THREADS // 32
_SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8"}
#: How many blocks a warp takes at a time; see compress.cu.
_PER_WARP = {torch.bfloat16: 1, torch.float16: 1, torch.int8: 2}


class _Compress(ctypes.Structure):
    """`Compress` of compress.cu."""

    _fields_ = (
        ("tensor", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("compressed", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("blocks", ctypes.c_longlong),
        ("scale", ctypes.c_double),
    )


class _Decompress(ctypes.Structure):
    """`Decompress` of compress.cu."""

    _fields_ = (
        ("compressed", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("blocks", ctypes.c_longlong),
        ("scale", ctypes.c_double),
    )


@torch.no_grad()
def compress(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    *,
    error: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round a tensor, times a scale, to fewer bits.

    With ``error``, what rounding takes away is not lost, but added at the next call: the sum of all
    that was sent differs from the sum of all tensors by the last error only.

    Example::

        error = torch.zeros_like(gradient)
        sent = compress(gradient, torch.int8, scale=1 / 4, error=error)
        received = decompress(sent, torch.empty_like(gradient))

    Args:
        tensor: Any shape, of a floating-point dtype; computed in float32.
        dtype: ``torch.bfloat16`` and ``torch.float16`` (to the nearest, ties to even), or
            ``torch.int8``; see Note [Format of int8].
        scale: Factor of the tensor. Default: 1.
        error: A float32 tensor of the shape and on the device of ``tensor``: added after the
            scale, and then replaced by what was rounded off. Default: that is lost.
        out: Where the result is written: of ``dtype`` with the shape of ``tensor``; for int8, a
            contiguous uint8 tensor with :func:`compressed_size` elements. Default: new memory.

    Returns:
        ``out``, or a new tensor like it.

    Raises:
        TypeError: ``dtype`` is none of the three, or the tensor has no floating-point numbers.
        ValueError: ``error`` or ``out`` do not fit, or share memory with something.
    """
    size = _check_compress(tensor, dtype, error)
    if out is None and dtype == torch.int8:
        out = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    elif out is None:
        out = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    else:
        _check_out(out, tensor, dtype, error)
    backend = backend_of(tensor.device)
    sources = [tensor] if error is None else [tensor, error]
    if backend is not None and _is_served(out, dtype, sources):
        parameters = _Compress(
            tensor=tensor.data_ptr(),
            error=0 if error is None else error.data_ptr(),
            compressed=out.data_ptr(),
            size=tensor.numel(),
            blocks=blocks_of(tensor.numel(), dtype),
            scale=scale,
        )
        name = "compress" if error is None else "compress_error"
        _launch(backend, name, dtype, parameters, [out, *sources[1:]])
    else:
        reference.compress(tensor, dtype, scale, error=error, out=out)
    return out


@torch.no_grad()
def decompress(
    compressed: torch.Tensor, out: torch.Tensor, scale: float = 1.0, *, add: bool = False
) -> torch.Tensor:
    """The numbers of which :func:`compress` has made fewer bits, times a scale.

    Example::

        total = torch.zeros(size)
        for part in received:
            decompress(part, total, add=True)

    Args:
        compressed: A result of :func:`compress`.
        out: Where the numbers are written, of any floating-point dtype: of the shape of
            ``compressed``; for int8, of any shape with as many elements as were compressed.
        scale: Factor of the numbers. Default: 1.
        add: Add the numbers to what ``out`` has. Default: replace it.

    Returns:
        ``out``.

    Raises:
        TypeError: ``compressed`` or ``out`` has a dtype that cannot be.
        ValueError: Sizes or devices do not fit, or the two share memory.
    """
    dtype = torch.int8 if compressed.dtype == torch.uint8 else compressed.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.int8):
        raise TypeError(
            f"compressed is {compressed.dtype}, but compress gives torch.bfloat16, torch.float16 "
            "or, for torch.int8, torch.uint8; pass what it returned"
        )
    if not out.is_floating_point():
        raise TypeError(f"out is {out.dtype}, but numbers are floating-point; give torch.float32")
    _check_compressed(compressed, out, dtype, "out")
    _check_apart("out", out, "compressed", compressed)
    backend = backend_of(out.device)
    if backend is not None and _is_served(compressed, dtype, [out]):
        parameters = _Decompress(
            compressed=compressed.data_ptr(),
            out=out.data_ptr(),
            size=out.numel(),
            blocks=blocks_of(out.numel(), dtype),
            scale=scale,
        )
        _launch(backend, "decompress_add" if add else "decompress", dtype, parameters, [out])
    else:
        reference.decompress(compressed, out, scale, add=add)
    return out


def _is_served(compressed: torch.Tensor, dtype: torch.dtype, tensors: list[torch.Tensor]) -> bool:
    plain = is_plain(compressed) and all(map(is_plain, tensors))
    if not plain or not all(t.dtype == torch.float32 and is_dense(t) for t in tensors):
        return False
    if dtype == torch.int8:
        # The order of numbers is that of indices, not that of memory.
        aligned = compressed.data_ptr() % _ALIGNMENT == 0
        return aligned and all(tensor.is_contiguous() for tensor in tensors)
    return all(tensor.stride() == compressed.stride() for tensor in tensors)


def _launch(
    backend: Backend,
    name: str,
    dtype: torch.dtype,
    parameters: _Compress | _Decompress,
    written: list[torch.Tensor],
) -> None:
    device = written[0].device
    blocks = -(-parameters.blocks // (_WARPS * _PER_WARP[dtype]))
    blocks = min(blocks, backend.most_blocks(device))
    action, *variant = name.split("_")
    kernel = "_".join((action, _SUFFIXES[dtype], *variant))
    backend.launch(device, "compress", kernel, blocks, parameters)
    mark_written(written)


def _check_compress(tensor: torch.Tensor, dtype: torch.dtype, error: torch.Tensor | None) -> int:
    if not tensor.is_floating_point():
        raise TypeError(
            f"a tensor of {tensor.dtype} cannot be compressed; convert it to torch.float32, a "
            "complex one by torch.view_as_real"
        )
    size = compressed_size(tensor.numel(), dtype)
    if error is not None:
        wanted = (torch.float32, tensor.shape, tensor.device)
        if (error.dtype, error.shape, error.device) != wanted:
            raise ValueError(
                f"error is {_what(error)}, but the tensor has shape {list(tensor.shape)} on "
                f"{tensor.device}; give torch.float32 of that shape there"
            )
        _check_apart("error", error, "tensor", tensor)
    return size


def _check_out(
    out: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype, error: torch.Tensor | None
) -> None:
    _check_compressed(out, tensor, dtype, "tensor")
    _check_apart("out", out, "tensor", tensor)
    if error is not None:
        _check_apart("out", out, "error", error)


def _check_compressed(
    compressed: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype, name: str
) -> None:
    """Whether a compressed tensor can be that of a tensor."""
    shape, has = tensor.shape, dtype
    if dtype == torch.int8:
        shape, has = torch.Size([compressed_size(tensor.numel(), dtype)]), torch.uint8
    wanted = (has, shape, tensor.device)
    fits = (compressed.dtype, compressed.shape, compressed.device) == wanted
    if not fits or (dtype == torch.int8 and not compressed.is_contiguous()):
        raise ValueError(
            f"the compressed tensor is {_what(compressed)}, but {name}, {_what(tensor)}, has a "
            f"contiguous {has} {list(shape)} in {dtype}; give one alike"
        )


def _check_apart(name: str, first: torch.Tensor, of: str, second: torch.Tensor) -> None:
    if is_plain(first) and is_plain(second) and overlap(first, second):
        raise ValueError(
            f"{name} shares memory with {of}, so that numbers would be overwritten before they are "
            "read; give other memory"
        )


def _what(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
