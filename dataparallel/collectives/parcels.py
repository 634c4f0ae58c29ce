"""Tensors of any kinds as the bytes of one collective, and out of them again.

Note [Parcels]
~~~~~~~~~~~~~~
Both sides know what travels between them, so only the bytes have to. But if they know different
things, bytes would silently be read as what they are not. So every parcel begins with a label that
says what is in it, parcels of nothing too, and the receiver compares. The label is as long as it
is for the sake of alignment: what follows it can be viewed as any dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dataparallel.comm.checks import Call
from dataparallel.comm.link import ProcessLink

#: What a tensor is: its shape, its dtype and the device on which it is wanted.
Kind = tuple[torch.Size, torch.dtype, torch.device]

_ALIGNMENT = 16
_LABEL = 64


def kind_of(tensor: torch.Tensor) -> Kind:
    """The kind of a tensor that exists."""
    return tensor.shape, tensor.dtype, tensor.device


def parcel_sizes(kinds: Sequence[Kind]) -> list[int]:
    """How many bytes the parcel with each tensor has; see Note [Parcels]."""
    padded = [_num_bytes(kind) + -_num_bytes(kind) % _ALIGNMENT for kind in kinds]
    return [_LABEL + num_bytes for num_bytes in padded]


def meeting_place(kinds: Sequence[Kind], devices: frozenset[str]) -> torch.device:
    """Where parcels are packed: where the tensors are, if the backend takes that, or the host.

    Args:
        kinds: Of the tensors that leave, and of those that arrive.
        devices: Types of the devices that the backend takes.
    """
    places = [device for _, _, device in kinds]
    if len({device.type for device in places}) == 1 and places[0].type in devices:
        return places[0]
    return torch.device("cpu")


def pack_parcels(tensors: Sequence[torch.Tensor], place: torch.device) -> torch.Tensor:
    """One flat tensor of bytes on ``place`` with the parcel of each tensor, in order."""
    kinds = [kind_of(tensor) for tensor in tensors]
    sizes = parcel_sizes(kinds)
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
    for parcel, tensor, kind in zip(torch.split(flat, sizes), tensors, kinds, strict=True):
        parcel[:_LABEL].copy_(torch.frombuffer(bytearray(_label(kind)), dtype=torch.uint8))
        _contents(parcel, kind).copy_(tensor.detach())
    return flat


def unpack_parcels(
    flat: torch.Tensor, kinds: Sequence[Kind], senders: Sequence[int], what: str
) -> list[torch.Tensor]:
    """The tensors in the parcels, each as a new tensor on the device where it is wanted.

    They have no memory in common, since whoever keeps one must not keep all of them.

    Args:
        flat: Parcels, as :func:`pack_parcels` lays them out.
        kinds: What is expected in them.
        senders: The rank from which each comes, for messages.
        what: What the tensors are, for messages.

    Returns:
        Contiguous tensors.

    Raises:
        ValueError: Something else is in them.
    """
    parcels = torch.split(flat, parcel_sizes(kinds))
    faults = []
    for parcel, kind, sender in zip(parcels, kinds, senders, strict=True):
        label = bytes(parcel[:_LABEL].tolist())
        if label != _label(kind):
            sent = label.rstrip(b"\0").decode(errors="replace")
            faults.append(f"rank {sender} sent {sent} where {_text(kind)} was expected")
    if faults:
        raise ValueError(
            f"all_to_all of {what}: {'; '.join(faults)}; every process must pass as `like` what "
            "the others send to it"
        )
    found = []
    for parcel, (shape, dtype, device) in zip(parcels, kinds, strict=True):
        tensor = torch.empty(shape, dtype=dtype, device=device)
        found.append(tensor.copy_(_contents(parcel, (shape, dtype, device))))
    return found


def all_to_all(
    link: ProcessLink, tensors: Sequence[torch.Tensor], *, what: str, like: Sequence[Kind]
) -> list[torch.Tensor]:
    """Send a strided tensor to each process of a link and get one from each, in one collective.

    Shapes and dtypes may differ from pair to pair, and bits arrive as they are.

    Args:
        link: The processes.
        tensors: One for each process. Read on the current stream of their device.
        what: What the tensors are, for messages.
        like: At ``i`` the kind of the tensor that process ``i`` has for this one. The bytes travel
            from device to device if all tensors here are on devices of one type, which the backend
            takes, else through the host; the same in all processes.

    Returns:
        New tensors, contiguous, the one at ``i`` from process ``i``.

    Raises:
        ValueError: What comes from a process is not as in ``like``. (Gloo ends a process that gets
            more bytes than it expects, so processes that may disagree tell each other the sizes
            first.)
    """
    kinds = [kind_of(tensor) for tensor in tensors]
    place = meeting_place([*kinds, *like], link.devices)
    packed = pack_parcels(tensors, place)
    given, sizes = parcel_sizes(kinds), parcel_sizes(like)
    arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
    link.run(
        Call("all_to_all", "", torch.uint8, (), what, given, sizes),
        packed,
        lambda group: dist.all_to_all_single(arrived, packed, sizes, given, group, async_op=True),
    )
    return unpack_parcels(arrived, like, dist.get_process_group_ranks(link.group), what)


def _contents(parcel: torch.Tensor, kind: Kind) -> torch.Tensor:
    shape, dtype, _ = kind
    return parcel[_LABEL : _LABEL + _num_bytes(kind)].view(dtype).view(shape)


def _num_bytes(kind: Kind) -> int:
    shape, dtype, _ = kind
    return math.prod(shape) * dtype.itemsize


def _text(kind: Kind) -> str:
    shape, dtype, _ = kind
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def _label(kind: Kind) -> bytes:
    text = _text(kind).encode()
    if len(text) > _LABEL:
        digest = hashlib.sha256(text).hexdigest()[:16].encode()
        text = text[: _LABEL - 20] + b"... " + digest
    return text.ljust(_LABEL, b"\0")
