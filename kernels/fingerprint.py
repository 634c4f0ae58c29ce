"""A hash of the bits of each tensor, computed where the tensors are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import Backend, backend_of
from dataparallel.kernels.memory import bytes_of, is_plain
from dataparallel.kernels.tables import chunk_table, hold
from dataparallel.torch_internals import is_wrapper

_MOST_TENSORS = 480
# In bytes; of fingerprint.cu.
_CHUNK = 32 * 1024


class _Parameters(ctypes.Structure):
    """`Fingerprint` of fingerprint.cu."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * _MOST_TENSORS),
        ("chunks", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
    )


@torch.no_grad()
def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute one number per tensor, which depends on every bit and its place.

    Equal bits at equal places give equal numbers on every device and in every process, for all
    strides. If two tensors of one shape and dtype differ in one element only, their numbers differ.
    Other different tensors have equal numbers with a probability of about ``2**-64``. The number of
    a tensor without elements is 0.

    Example::

        here, there = fingerprint([weight]), fingerprint([weight.to("cuda:1")])
        assert here.tolist() == there.tolist()

    Args:
        tensors: Strided tensors of any dtypes, all on one device. There may be none.

    Returns:
        A new int64 tensor of shape ``(len(tensors),)`` on the tensors' device; on the CPU if there
        are none. The host does not wait for it.

    Raises:
        ValueError: The tensors are on several devices, or one is sparse, quantized, without
            memory, or wraps others.

    Source: the row-major bytes are read as little-endian 64-bit words, the last one filled up with
    zeros. Each is added to its place times an odd number and mixed by the finalizer of MurmurHash3
    (Austin Appleby, public domain), with shifts by 32. The results are added up modulo ``2**64``.
    Places count from 1: the word at 0 is the number of bytes.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    _check(tensors)
    device = tensors[0].device
    backend = backend_of(device)
    if backend is None:
        return reference.fingerprint(tensors)
    results = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for begin in range(0, len(tensors), _MOST_TENSORS):
        some = slice(begin, begin + _MOST_TENSORS)
        _launch(backend, tensors[some], results[some])
    return results


def _launch(backend: Backend, tensors: Sequence[torch.Tensor], results: torch.Tensor) -> None:
    # Copies are held until the launch is queued: what uses their memory next is queued after it.
    held = [t if is_plain(t) and t.is_contiguous() else bytes_of(t) for t in tensors]
    table = chunk_table(tuple([tensor.nbytes for tensor in held]), _CHUNK, results.device)
    parameters = _Parameters(
        chunks=table.pairs.data_ptr(), sizes=table.sizes.data_ptr(), results=results.data_ptr()
    )
    parameters.tensors[: len(held)] = [tensor.data_ptr() for tensor in held]
    backend.launch(results.device, "fingerprint", "fingerprint", table.blocks, parameters)
    hold(results.device, table.pairs, table.sizes)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    device = tensors[0].device
    for i, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(
                f"tensors must be on one device, but tensor 0 is on {device} and tensor {i} on "
                f"{tensor.device}; call fingerprint once for each device"
            )
        if kind := _kind(tensor):
            raise ValueError(
                f"tensors must be strided and have values in memory, but tensor {i} is {kind}; "
                "give the tensors that it is made of, or leave it out"
            )


def _kind(tensor: torch.Tensor) -> str:
    """Name what makes the bits of a tensor unreadable; empty if they can be read."""
    if is_wrapper(tensor):
        return f"a {type(tensor).__name__}, which wraps others"
    if tensor.layout != torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')}"
    return "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else ""
