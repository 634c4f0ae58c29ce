"""The calls of `bench kernels`: ours and torch's on the same buffers, and are ours right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel import kernels, torch_internals
from dataparallel.kernels import reference
from dataparallel.tools.bench.kernels_buffers import BufferSet, is_close, tensor_list, values
from dataparallel.tools.bench.kernels_cases import DTYPES, KernelCase, moved
from dataparallel.tools.bench.kernels_steps import fused_adamw, fused_sgd
from dataparallel.tools.bench.kernels_timing import FOOTPRINT, Call, Contestant, num_sets

#: The contestants beside torch's alternatives.
OURS, COPY = "ours", "copy"

#: Of gradients, as between two replicas.
_SCALE = 0.5
#: Elements that share a scale in torch's expression for int8.
_BLOCK = 256


@dataclass(frozen=True)
class Work:
    """All that is measured for one case.

    Attributes:
        contestants: By name: :data:`OURS`, :data:`COPY`, and torch's alternatives.
        agrees: Whether ours gives what torch does, to rounding.
        left_out: Alternatives that torch does not have on this device or for this type.
    """

    contestants: dict[str, Contestant]
    agrees: bool
    left_out: tuple[str, ...]


def prepare(case: KernelCase, device: torch.device, footprint: int = FOOTPRINT) -> Work:
    """Make buffers for a case, and compare results.

    Args:
        case: What is called.
        device: Where.
        footprint: Bytes of all sets of buffers together, if the number of sets allows.
    """
    build, size = _BUILDERS[case.kernel], moved(case)
    sets = [build(case, device) for _ in range(num_sets(size, footprint))]
    agrees = sets[0].is_right()
    left_out = tuple(name for name, call in sets[0].others.items() if not _exists(call))
    contestants = {
        OURS: Contestant([each.ours for each in sets]),
        COPY: Contestant([_copy(size, device) for _ in sets]),
    }
    for name in sets[0].others:
        if name not in left_out:
            contestants[name] = Contestant([each.others[name] for each in sets])
    return Work(contestants, agrees, left_out)


def _exists(call: Call) -> bool:
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True


def _copy(size: int, device: torch.device) -> Call:
    # Half is read, half written.
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _reduce_add(case: KernelCase, device: torch.device) -> BufferSet:
    inputs = [values(case.numel, DTYPES[case.dtype], device) for _ in range(case.count)]
    out = torch.empty_like(inputs[0])
    total = torch.empty_like(out)

    def add() -> Tensor:
        torch.add(inputs[0], inputs[1], out=total)
        for term in inputs[2:]:
            total.add_(term)
        return total

    def foreach_add() -> None:
        # As with buckets that are summed in place: the numbers grow, the time does not.
        for term in inputs[1:]:
            torch_internals.foreach_add_([total], [term])

    def is_right() -> bool:
        expected = torch.stack([term.double() for term in inputs]).sum(0)
        bound = case.count * 4 * torch.finfo(out.dtype).eps
        return is_close(kernels.reduce_add(inputs, out=out), expected, bound)

    return BufferSet(
        lambda: kernels.reduce_add(inputs, out=out),
        {
            "stack": lambda: torch.stack(inputs).sum(0),
            "foreach": foreach_add,
            "add_": add,
        },
        is_right,
    )


def _flatten(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    bucket = torch.empty(case.numel, dtype=DTYPES[case.dtype], device=device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))

    layout = kernels.BucketLayout(bucket, views)

    def foreach_copy() -> None:
        torch_internals.foreach_copy_(views, tensors)
        bucket.mul_(_SCALE)

    def is_right() -> bool:
        kernels.flatten(tensors, bucket, _SCALE, views=layout)
        return is_close(bucket, torch.cat(tensors) * _SCALE)

    return BufferSet(
        lambda: kernels.flatten(tensors, bucket, _SCALE, views=layout),
        {
            "cat": lambda: torch.cat(tensors, out=bucket).mul_(_SCALE),
            "foreach": foreach_copy,
        },
        is_right,
    )


def _unflatten(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    bucket = values(case.numel, DTYPES[case.dtype], device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))

    layout = kernels.BucketLayout(bucket, views)

    def is_right() -> bool:
        kernels.unflatten(bucket, tensors, views=layout)
        return is_close(torch.cat(tensors), bucket)

    return BufferSet(
        lambda: kernels.unflatten(bucket, tensors, views=layout),
        {"foreach": lambda: torch_internals.foreach_copy_(tensors, views)},
        is_right,
    )


def _compress(case: KernelCase, device: torch.device) -> BufferSet:
    tensor, dtype = values(case.numel, DTYPES[case.dtype], device), case.compressed
    compressed = kernels.compress(tensor, dtype)
    error = torch.zeros(case.numel, device=device) if "error" in case.variant else None

    def ours() -> Tensor:
        return kernels.compress(tensor, dtype, error=error, out=compressed)

    def is_right() -> bool:
        restored = kernels.decompress(ours(), torch.empty(case.numel, device=device))
        kept = error is None or is_close(restored + error, tensor.float())
        return kept and _restored_well(restored, tensor, dtype)

    if dtype == torch.int8:
        return BufferSet(ours, {"eager": lambda: quantise(tensor, error)}, is_right)
    rounded = torch.empty_like(tensor, dtype=dtype)
    others: dict[str, Call] = {
        ".to": lambda: tensor.to(dtype),
        "copy_": lambda: rounded.copy_(tensor),
    }
    return BufferSet(ours, others, is_right)


def _decompress(case: KernelCase, device: torch.device) -> BufferSet:
    tensor, dtype = values(case.numel, DTYPES[case.dtype], device), case.compressed
    compressed = kernels.compress(tensor, dtype)
    out = torch.empty_like(tensor)

    def is_right() -> bool:
        kernels.decompress(compressed, out)
        return _restored_well(out, tensor, dtype)

    def ours() -> object:
        return kernels.decompress(compressed, out)

    if dtype == torch.int8:
        numbers, scales = quantise(tensor)
        others: dict[str, Call] = {
            "eager": lambda: dequantise(numbers, scales, out),
        }
        return BufferSet(ours, others, is_right)
    rounded = tensor.to(dtype)
    others = {".to": lambda: rounded.to(tensor.dtype), "copy_": lambda: out.copy_(rounded)}
    return BufferSet(ours, others, is_right)


def quantise(tensor: Tensor, error: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """To int8 with a scale for each block, in torch's operations.

    Args:
        tensor: Of one dimension; elements after the last whole block are left out.
        error: Added to the tensor, and replaced by what is rounded off.

    Returns:
        Numbers ``(blocks, 256)`` and scales ``(blocks, 1)``.
    """
    whole = len(tensor) // _BLOCK * _BLOCK
    blocks = tensor[:whole].view(-1, _BLOCK).float()
    if error is not None:
        blocks = blocks + error[:whole].view_as(blocks)
    scales = blocks.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-30)
    rounded = (blocks / scales).round_()
    if error is not None:
        torch.addcmul(blocks, rounded, scales, value=-1, out=error[:whole].view_as(blocks))
    return rounded.to(torch.int8), scales


def dequantise(numbers: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Undo :func:`quantise`.

    Args:
        numbers: Its first result.
        scales: Its second.
        out: Where the elements of all whole blocks are written.
    """
    torch.mul(numbers, scales, out=out[: numbers.numel()].view_as(numbers))
    return out


def _restored_well(restored: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    # Half a step of the coarsest block, and what rounding to the type adds.
    step = 0.5 / 127 if dtype == torch.int8 else torch.finfo(dtype).eps / 2
    return is_close(restored, tensor, step * 1.01 + torch.finfo(tensor.dtype).eps)


def _fingerprint(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    return BufferSet(
        lambda: kernels.fingerprint(tensors),
        {"reference": lambda: reference.fingerprint(tensors)},
        lambda: bool((kernels.fingerprint(tensors) == reference.fingerprint(tensors)).all()),
    )


_BUILDERS: dict[str, Callable[[KernelCase, torch.device], BufferSet]] = {
    "reduce_add": _reduce_add,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "compress": _compress,
    "decompress": _decompress,
    "fingerprint": _fingerprint,
    "fused_sgd": fused_sgd,
    "fused_adamw": fused_adamw,
}
