"""Python objects on their way to another worker of this process, their tensors copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel import devices
from dataparallel.batch import tree
from dataparallel.distributed_autograd.endpoint import refuse_transformed
from dataparallel.distributed_autograd.extension import Context

#: The streams that some thread uses, by device.
Streams = Mapping[torch.device, devices.Stream]


@dataclass(frozen=True)
class Parcel:
    """An object without its tensors, and copies of them.

    Args:
        sender: The id of the worker that sent it.
        message: The number of its send, or -1 if none of its tensors requires grad.
        structure: How the containers are built.
        leaves: What is in them: copies of tensors, and everything else itself.
        copies: Each copy once.
        attached: Those whose originals require grad.
        streams: Where the copies are being made.
        news: What the sender tells of the messages of the context, see Note [Live sends].
    """

    sender: int
    message: int
    structure: tree.Structure
    leaves: list[Any]
    copies: list[torch.Tensor]
    attached: list[torch.Tensor]
    streams: list[devices.Stream]
    news: list[int]


def pack(
    obj: Any, name: str, context: Context | None, sender: int, to: int, device: torch.device | None
) -> Parcel:
    """Copy the tensors of an object for worker ``to`` and record their send in the context.

    Args:
        obj: Any object. What is no container and no tensor is not copied.
        name: What it is called in error messages.
        context: The context of the call, or None: then nothing is recorded.
        sender: The id of the worker that this code runs on.
        to: The id of the other worker.
        device: Where the copies go. None: where the originals are.
    """
    leaves, structure = tree.flatten(obj, name=name)
    originals = list({id(leaf): leaf for leaf in leaves if _has_memory(leaf)}.values())
    recording = context is not None and torch.is_grad_enabled()
    copied: dict[int, Any] = {}
    copies: list[torch.Tensor] = []
    attached: list[tuple[torch.Tensor, torch.Tensor]] = []
    for original in originals:
        refuse_transformed(original.data if isinstance(original, PackedSequence) else original)
        if isinstance(original, PackedSequence):
            packed = _copy_packed(original, device)
            copies += [part for part in packed if part is not None]
            pair = (original.data, packed.data)
            copied[id(original)] = packed
        else:
            copy = _copy(original, device)
            copies.append(copy)
            pair = (original, copy)
            copied[id(original)] = copy
        if recording and pair[0].requires_grad:
            attached.append(pair)
    message = -1
    news: list[int] = []
    if context is not None and context.meet(to):
        if attached:
            message = context.add_send([original for original, _ in attached])
        news = context.news(to)
    if message < 0:
        attached = []
    return Parcel(
        sender=sender,
        message=message,
        structure=structure,
        leaves=[copied.get(id(leaf), leaf) for leaf in leaves],
        copies=copies,
        attached=[copy for _, copy in attached],
        streams=[devices.current_stream(device) for device in {copy.device for copy in copies}],
        news=news,
    )


def unpack(parcel: Parcel, context: Context | None) -> Any:
    """The object of a parcel, its tensors ready on the streams that are current here.

    Args:
        parcel: What arrived.
        context: The context that it belongs to; None leaves the tensors without connection.
    """
    for stream in parcel.streams:
        devices.wait_stream(devices.current_stream(stream.device), stream)
    for copy in parcel.copies:
        devices.record_stream(copy, devices.current_stream(copy.device))
    if context is not None:
        context.learn(parcel.news, parcel.sender)
        if parcel.attached:
            context.add_receive(parcel.message, parcel.attached)
    return parcel.structure.rebuild(parcel.leaves)


@contextlib.contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Queue work of this thread where another thread does, within a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for device, stream in streams.items():
            if devices.current_stream(device) != stream:
                stack.enter_context(devices.use_stream(stream))
        yield


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, PackedSequence))


def _copy(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    # An inference tensor could not take part in autograd at the other worker.
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach()
        if device is None or device == tensor.device:
            return plain.clone()
        return plain.to(device)


def _copy_packed(packed: PackedSequence, device: torch.device | None) -> PackedSequence:
    def copied(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else _copy(part, device)

    # The lengths stay on the host: torch wants them there.
    return PackedSequence(
        _copy(packed.data, device),
        packed.batch_sizes.clone(),
        copied(packed.sorted_indices),
        copied(packed.unsorted_indices),
    )
