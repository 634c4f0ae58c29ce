"""Python objects on their way to another worker, their tensors taken out."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.distributed_autograd.extension import Context, Worker


@dataclass(frozen=True)
class Envelope:
    """What travels: built of what torch's RPC can send."""

    sender: int
    context: int
    #: The number of its send, or -1 if none of its tensors requires grad.
    message: int
    #: The pickled object, with numbers in place of tensors and remote references.
    body: bytes
    #: Detached.
    tensors: list[torch.Tensor]
    #: Of each tensor at the sender if it was copied to the host, else "".
    devices: list[str]
    #: Which of the tensors require grad, as indices.
    attached: list[int]
    references: list[Any]
    #: What the sender tells of the messages of the context, see Note [Live sends].
    news: list[int]


class _Pickler(pickle.Pickler):
    """Takes tensors and torch's remote references out, wherever they are in an object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self._seen: dict[int, tuple[str, int]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            _refuse_transformed(obj)
            return self._number("tensor", obj, self.tensors)
        if isinstance(obj, torch_rpc.PyRRef):  # type: ignore[attr-defined]
            return self._number("reference", obj, self.references)
        return None

    def _number(self, kind: str, obj: Any, found: list[Any]) -> tuple[str, int]:
        # By identity, and `found` keeps each object alive: a tensor sent twice arrives as one.
        if id(obj) not in self._seen:
            self._seen[id(obj)] = (kind, len(found))
            found.append(obj)
        return self._seen[id(obj)]


# Comes over torch's RPC, which runs what a worker sends anyway.
class _Unpickler(pickle.Unpickler):  # noqa: TID251
    def __init__(self, body: bytes, found: dict[str, list[Any]]) -> None:
        super().__init__(io.BytesIO(body))
        self._found = found

    def persistent_load(self, pid: Any) -> Any:
        kind, number = pid
        return self._found[kind][number]


def seal(obj: Any, worker: Worker, context: Context | None, to: int) -> Envelope:
    """Pack an object for worker ``to``; a context that has not ended records its tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    tensors = pickler.tensors
    if context is not None and not context.meet(to):
        context = None
    attached = [
        index
        for index, tensor in enumerate(tensors)
        if context is not None and tensor.requires_grad and torch.is_grad_enabled()
    ]
    message = -1
    if context is not None and attached:
        message = context.add_send([tensors[index] for index in attached])
    staged = [_stage(tensor.detach(), worker.id(), to) for tensor in tensors]
    return Envelope(
        sender=worker.id(),
        context=-1 if context is None else context.id(),
        message=message,
        body=file.getvalue(),
        tensors=[tensor for tensor, _ in staged],
        devices=[device for _, device in staged],
        attached=attached if message >= 0 else [],
        references=pickler.references,
        news=[] if context is None else context.news(to),
    )


def unseal(envelope: Envelope, context: Context | None) -> Any:
    """The object of an envelope; in a context, its tensors connected to those that were sent."""
    tensors = [
        tensor.to(device) if device else tensor
        for tensor, device in zip(envelope.tensors, envelope.devices, strict=True)
    ]
    _separate(tensors)
    if context is not None:
        context.learn(envelope.news, envelope.sender)
        if envelope.attached:
            received = [tensors[index] for index in envelope.attached]
            context.add_receive(envelope.message, received)
    found = {"tensor": tensors, "reference": envelope.references}
    return _Unpickler(envelope.body, found).load()


def _refuse_transformed(tensor: torch.Tensor) -> None:
    if torch_internals.is_transformed(tensor):
        raise TypeError(
            "a tensor inside of torch.func.vmap, grad or jvp cannot be sent to another worker: "
            "make the call outside of the transform"
        )


def _separate(tensors: list[torch.Tensor]) -> None:
    """Give each tensor memory of its own.

    Tensors of one memory arrive as such, but know nothing of each other: autograd would not notice
    that a change of one in place changes what it has saved of another.
    """
    seen = set()
    for index, tensor in enumerate(tensors):
        # A subclass may have no memory, and then shares none.
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            continue
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            tensors[index] = tensor.clone()
        seen.add(memory)


def _stage(tensor: torch.Tensor, sender: int, to: int) -> tuple[torch.Tensor, str]:
    """A tensor as torch's RPC can send it, and the device that it was copied from, or ""."""
    if not _devices.is_accelerator(tensor.device):
        return tensor, ""
    if tensor.device in torch_internals.rpc_device_map(to):
        return tensor, ""
    return tensor.cpu(), str(tensor.device)
