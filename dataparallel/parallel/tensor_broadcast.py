"""Brings tensors of one process to all processes, in few messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from dataparallel.comm.processes import ProcessLink
from dataparallel.errors import lines
from dataparallel.reducer.verify import differences, gather_if_different
from dataparallel.torch_internals import foreach_copy_, is_wrapper

# As in torch; more is sent in several messages.
_MESSAGE_BYTES = 250 * 2**20
# Memory for a message up to this size is kept for the next one.
_KEPT_BYTES = 2**20

_Signature: TypeAlias = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class _Message:
    """Memory for the bytes of some tensors on one device, and views of it in their shapes.

    Args:
        members: Positions of the tensors among those that are sent.
        likes: The tensors, from large elements to small ones: each view then begins at a multiple
            of its elements' size.
    """

    def __init__(self, members: Sequence[int], likes: Sequence[torch.Tensor]) -> None:
        self.members = list(members)
        size = sum(like.nbytes for like in likes)
        # Made in inference mode it could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(size, dtype=torch.uint8, device=likes[0].device)
            self._views: list[torch.Tensor] = []
            offset = 0
            for like in likes:
                part = self.flat[offset : offset + like.nbytes]
                self._views.append(part.view(like.dtype).view(like.shape))
                offset += like.nbytes

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            foreach_copy_(self._views, self._own(tensors))

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            foreach_copy_(self._own(tensors), self._views)

    def _own(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[position].detach() for position in self.members]


class Broadcast:
    """Replaces tensors in all processes by those of one process.

    Tensors of any dtypes travel together, as bytes: one message for each device and 250 MiB.

    Example::

        Broadcast().run(dict(module.named_buffers()), 0, link, what="the buffers")
    """

    def __init__(self) -> None:
        self._kept: tuple[_Signature, list[_Message]] | None = None

    def run(
        self, tensors: Mapping[str, torch.Tensor], source: int, link: ProcessLink, *, what: str
    ) -> None:
        """Send and receive; every process calls it.

        Args:
            tensors: By name, with the same names, shapes and dtypes in all processes; written in
                place.
            source: The rank whose tensors all processes get.
            link: The processes.
            what: What the tensors are, for messages.

        Raises:
            ValueError: A tensor is sparse or quantized.
            CollectiveTimeout: Another process did not come in time.
        """
        found = [part for name, tensor in tensors.items() for part in _plain(name, tensor)]
        parts = [part for part in found if part.numel()]
        for message in self._messages(parts):
            if link.rank == source:
                message.load(parts)
            link.broadcast(message.flat, source, what=what).wait()
            if link.rank != source:
                message.store(parts)

    def _messages(self, parts: Sequence[torch.Tensor]) -> Iterable[_Message]:
        now = tuple((part.shape, part.dtype, part.device) for part in parts)
        if self._kept is not None and self._kept[0] == now:
            return self._kept[1]
        if sum(part.nbytes for part in parts) > _KEPT_BYTES:
            # One after the other, so that there is memory for one of them only.
            return _plan(parts)
        self._kept = (now, list(_plan(parts)))
        return self._kept[1]


def _plan(parts: Sequence[torch.Tensor]) -> Iterator[_Message]:
    places: dict[torch.device, list[int]] = {}
    for position, part in enumerate(parts):
        places.setdefault(part.device, []).append(position)
    for positions in places.values():
        members: list[int] = []
        size = 0
        for position in sorted(positions, key=lambda p: -parts[p].element_size()):
            if members and size + parts[position].nbytes > _MESSAGE_BYTES:
                yield _Message(members, [parts[member] for member in members])
                members, size = [], 0
            members.append(position)
            size += parts[position].nbytes
        yield _Message(members, [parts[member] for member in members])


def _plain(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or the tensors of which it consists."""
    if is_wrapper(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
        return
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(
            f"{name!r} is {kind}, and only dense tensors are sent to other processes; make it "
            "dense, or let each process keep its own with DistributedDataParallel."
            f"_set_params_and_buffers_to_ignore_for_model(module, [{name!r}])"
        )
    yield tensor


def check_same(tensors: Mapping[str, torch.Tensor], link: ProcessLink, *, what: str) -> None:
    """Check that all processes have tensors of the same names, shapes and dtypes.

    Example::

        check_same(dict(module.named_buffers()), link, what="the comparison of buffers")

    Args:
        tensors: By name.
        link: The processes; every process calls it, and all raise the same error or none does.
        what: What messages call this.

    Raises:
        ValueError: They have not; the message has the first differences.
    """
    looks = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
    gathered = gather_if_different(list(looks.items()), link, what=what)
    if gathered is None:
        return
    ranks = {f"rank {rank}": dict(entries) for rank, entries in enumerate(gathered)}
    found = [f"{name!r}: {text}" for name, text in differences(ranks).items()]
    difference = lines(found) or "\n  only the order in which they are registered"
    raise ValueError(
        f"the parameters and buffers of the processes are not the same:{difference}\nBuild the "
        "same model in every process; or let each process keep its own tensor with "
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)"
    )
