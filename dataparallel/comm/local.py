"""Broadcast, sum, scatter and gather of one tensor between the devices of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.comm import nccl
from dataparallel.comm.copies import arrive, copy_to, may_be_deferred
from dataparallel.comm.sums import add
from dataparallel.errors import listed


def broadcast(
    tensor: torch.Tensor,
    devices: Iterable[_devices.DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to several devices.

    Example::

        first, second = broadcast(weight, ["cuda:0", "cuda:1"])

    Args:
        tensor: On any device, with any layout and strides.
        devices: One device per result; repeats allowed.
        out: Tensors to copy into, instead of ``devices``.

    Returns:
        One tensor per device with the strides of ``tensor``, or ``out``. On the tensor's own
        device, and between slots of one device, memory is shared. No result requires grad.

    Raises:
        ValueError: Both or none of ``devices`` and ``out`` are given, a device doesn't exist, or a
            tensor of ``out`` has another size.
    """
    if (devices is None) == (out is None):
        raise ValueError(
            f"give either devices or out, but got devices={devices} and "
            f"out={None if out is None else f'{len(out)} tensors'}"
        )
    if devices is None:
        assert out is not None
        return _write(out, [copy_to(tensor, target.device) for target in out])
    slots = _devices.parse_devices(list(devices))
    source = tensor.detach()
    if nccl.can_broadcast(source, slots):
        copies = nccl.broadcast(source, dict.fromkeys(slots))
    else:
        copies = {slot: copy_to(source, slot) for slot in dict.fromkeys(slots)}
    return tuple([copies[slot].detach() for slot in slots])


def reduce_add(
    inputs: Iterable[torch.Tensor], destination: _devices.DeviceLike | None = None
) -> torch.Tensor:
    """Sum tensors of several devices.

    Example::

        total = reduce_add([grad_of_replica_0, grad_of_replica_1], destination=0)

    Args:
        inputs: One tensor per replica, of equal sizes and dtypes, dense or sparse COO. Where only
            some are sparse, the sum is dense.
        destination: Where the sum is. Default: the device of the first input.

    Returns:
        The sum in replica order, see Note [Order of a sum], in new memory; a single input is
        returned as it is if it is on ``destination`` already.

    Raises:
        ValueError: There is no input, sizes or dtypes disagree, or ``destination`` doesn't exist.
    """
    given = list(inputs)
    terms = [tensor.detach() for tensor in given]
    if not terms:
        raise ValueError("reduce_add needs at least one tensor, got none")
    _check_terms(terms)
    target = terms[0].device if destination is None else _devices.parse_device(destination)
    if len(terms) == 1:
        as_it_is = given[0].device == target and not given[0].requires_grad
        return given[0] if as_it_is else copy_to(terms[0], target)
    if len({term.layout for term in terms}) > 1:
        terms = [term if term.layout == torch.strided else term.to_dense() for term in terms]
    return add(terms, target)


def chunk_lengths(size: int, num_chunks: int) -> tuple[int, ...]:
    """How ``torch.chunk`` divides ``size`` into at most ``num_chunks``; one empty chunk for 0."""
    length = -(-size // num_chunks)
    if length == 0:
        return (0,)
    return tuple(min(length, size - start) for start in range(0, size, length))


def scatter(
    tensor: torch.Tensor,
    devices: Iterable[_devices.DeviceLike] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    streams: Sequence[_devices.Stream | None] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split a tensor along one dimension over several devices.

    Example::

        first, second = scatter(batch, [0, 1])              # halves
        first, second = scatter(batch, [0, 1], [24, 8])     # along dimension 0

    Args:
        tensor: On any device.
        devices: One device per chunk; repeats allowed.
        chunk_sizes: Length of each chunk, one per device. Default: as ``torch.chunk`` divides,
            which may give fewer chunks than devices.
        dim: Dimension to split.
        streams: For each device a stream of it to copy on. Default: its copy stream. Either way
            the chunks are ready on the current stream.
        out: Tensors to copy the chunks into, instead of ``devices`` and ``chunk_sizes``.

    Returns:
        One tensor per chunk, or ``out``. A chunk on the tensor's own device is a view of it. No
        result requires grad.

    Raises:
        ValueError: ``dim`` is out of range, the chunks don't add up to the tensor, a device doesn't
            exist, or ``out`` is given together with ``devices`` or ``chunk_sizes``.
    """
    dim = check_dim(tensor, dim)
    if out is not None:
        if devices is not None or chunk_sizes is not None:
            raise ValueError(
                "out already says where the chunks go and how long they are, but got it together "
                f"with devices={devices} and chunk_sizes={chunk_sizes}; leave those out"
            )
        slots: Sequence[torch.device] = [target.device for target in out]
        lengths: Sequence[int] = [target.size(dim) for target in out]
    else:
        slots = _devices.parse_devices(None if devices is None else list(devices))
        lengths = (
            chunk_lengths(tensor.size(dim), len(slots))
            if chunk_sizes is None
            else tuple(chunk_sizes)
        )
    _check_lengths(tensor, dim, lengths, len(slots), given=chunk_sizes is not None)
    narrow = torch.narrow if tensor.layout == torch.strided else torch.narrow_copy
    chunks, start = [], 0
    for i, (length, slot) in enumerate(zip(lengths, slots, strict=False)):
        stream = None if streams is None else streams[i]
        chunks.append(copy_to(narrow(tensor.detach(), dim, start, length), slot, stream))
        start += length
    return tuple(chunks) if out is None else _write(out, chunks)


def gather(
    tensors: Iterable[torch.Tensor],
    dim: int = 0,
    destination: _devices.DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate tensors of several devices on one.

    Example::

        batch = gather([output_of_replica_0, output_of_replica_1], destination="cpu")

    Args:
        tensors: Equal in all dimensions but ``dim``. Tensors without dimensions are stacked.
        dim: Dimension to concatenate along.
        destination: Where the result is; -1 means the CPU. Default: the device of the first tensor.
        out: Tensor to write to, instead of ``destination``.

    Returns:
        A new tensor, or ``out``. It doesn't require grad.

    Raises:
        ValueError: Sizes disagree, ``dim`` is out of range, there is no tensor, ``destination``
            doesn't exist or is given together with ``out``.
    """
    parts = [tensor.detach() for tensor in tensors]
    if not parts:
        raise ValueError("gather needs at least one tensor, got none")
    if out is not None and destination is not None:
        raise ValueError(
            f"out already says where the result goes, but got it together with "
            f"destination={destination}; leave that out"
        )
    if all(part.dim() == 0 for part in parts):
        parts = [part.view(1) for part in parts]
    dim = check_dim(parts[0], dim)
    shape = _concatenated_shape(parts, dim)
    if out is not None:
        whole = _concatenate(parts, dim, shape, parts[0].device)
        return _write([out], [copy_to(whole, out.device)])[0]
    target = _devices.parse_output_device(destination, parts[0].device)
    return _concatenate(parts, dim, shape, target)


def _concatenate(
    parts: Sequence[torch.Tensor], dim: int, shape: torch.Size, device: torch.device
) -> torch.Tensor:
    if all(part.device == device for part in parts):
        return torch.cat(list(parts), dim)
    if any(part.layout != torch.strided for part in parts):
        return torch.cat([copy_to(part, device) for part in parts], dim)
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)

    def make() -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype, device=device, memory_format=_memory_format(parts))
        start = 0
        for part in parts:
            length = part.size(dim)
            deferred = may_be_deferred(part, device)
            result.narrow(dim, start, length).copy_(part, non_blocking=deferred)
            start += length
        return result

    return arrive(device, parts, make)


def _memory_format(parts: Sequence[torch.Tensor]) -> torch.memory_format:
    """What ``torch.cat`` gives: the format that all parts have, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(parts[0].dim())
    if wanted is None or any(part.is_contiguous() for part in parts):
        return torch.contiguous_format
    together = all(part.is_contiguous(memory_format=wanted) for part in parts)
    return wanted if together else torch.contiguous_format


# --- checks --------------------------------------------------------------------------------------


def check_dim(tensor: torch.Tensor, dim: int, name: str = "the tensor") -> int:
    """``dim`` counted from the front; raises ValueError where it is out of range."""
    if not -tensor.dim() <= dim < tensor.dim():
        there = f"the dimensions {-tensor.dim()} to {tensor.dim() - 1}"
        there = there if tensor.dim() else "no dimension"
        raise ValueError(
            f"dim {dim} is out of range for {name} of shape {tuple(tensor.shape)}: it has {there}"
        )
    return dim % tensor.dim()


def check_same_device(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of several devices where one is expected."""
    found = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    if len(found) > 1:
        raise ValueError(
            f"the tensors must be on one device, but they are on {listed(found)}; "
            "call once per device"
        )


def _check_terms(terms: Sequence[torch.Tensor]) -> None:
    first = (terms[0].shape, terms[0].dtype)
    if all([(term.shape, term.dtype) == first for term in terms]):
        return
    faults = [
        f"input {i} has {name} {value} but input 0 has {name} {expected}"
        for i, term in enumerate(terms)
        for name, value, expected in (
            ("size", tuple(term.shape), tuple(first[0])),
            ("dtype", term.dtype, first[1]),
        )
        if value != expected
    ]
    raise ValueError(f"tensors to add must have one size and dtype: {listed(faults, '; ')}")


def _check_lengths(
    tensor: torch.Tensor, dim: int, lengths: Sequence[int], num_slots: int, *, given: bool
) -> None:
    if given and len(lengths) != num_slots:
        raise ValueError(
            f"chunk_sizes has {len(lengths)} entries, but there are {num_slots} devices; "
            "give one length per device"
        )
    if any(length < 0 for length in lengths):
        raise ValueError(f"a chunk cannot have a negative length, but got {tuple(lengths)}")
    if sum(lengths) != tensor.size(dim):
        raise ValueError(
            f"the chunks {tuple(lengths)} have {sum(lengths)} samples together, but the tensor "
            f"has {tensor.size(dim)} along dim {dim}"
        )


def _write(
    out: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The tensors of ``out``, with some content."""
    faults = [
        f"out[{i}] has shape {tuple(target.shape)} but its content has shape {tuple(content.shape)}"
        for i, (target, content) in enumerate(zip(out, contents, strict=True))
        if target.shape != content.shape
    ]
    if faults:
        raise ValueError(listed(faults, "; "))
    for target, content in zip(out, contents, strict=True):
        target.detach().copy_(content)
    return tuple(out)


def _concatenated_shape(parts: Sequence[torch.Tensor], dim: int) -> torch.Size:
    rest = [(part.shape[:dim], part.shape[dim + 1 :]) for part in parts]
    faults = [
        f"tensor {i} has shape {tuple(part.shape)} but tensor 0 has {tuple(parts[0].shape)}"
        for i, part in enumerate(parts)
        if part.dim() != parts[0].dim() or rest[i] != rest[0]
    ]
    if faults:
        raise ValueError(
            f"tensors to gather must agree in every dimension but {dim}: {listed(faults, '; ')}"
        )
    length = sum(part.size(dim) for part in parts)
    return torch.Size((*parts[0].shape[:dim], length, *parts[0].shape[dim + 1 :]))
