"""The parameters whose optimizer state is on one device, and their steps there.

Note [Stand-ins]
~~~~~~~~~~~~~~~~
The parameters are all on the first device. A shard there steps the parameters themselves. A shard
on another device has a stand-in for each of its parameters: a copy that stays there, next to the
state. In a step it gets the gradient, is stepped, and its new value is written to the parameter.

Between steps others may write the parameter (loading, clipping of weights, ``.data``). Its value is
carried in before the step, see Note [What counts as a change]. What can be seen from outside is
compared first: address, version, dtype, shape. Where that is as before, checksums of the values
are: they read both sides once and move 4 KB, where a copy would move everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from dataparallel import comm, torch_internals
from dataparallel.comm.checksum import checksum
from dataparallel.graph.edges import plan_buckets
from dataparallel.optim.part import OptimizerPart

_Pair: TypeAlias = tuple[Tensor, Tensor]


class OptimizerShard:
    """Some parameters of an optimizer, whose state is on one device. See Note [Stand-ins].

    Example::

        shard = OptimizerShard(0, torch.device("cpu"))
        shard.own([weight], whole, torch.optim.AdamW, {"lr": 0.1})
        shard.part.take(whole)
        shard.step()
        shard.part.give(whole)

    Args:
        index: The index of the shard within its optimizer.
        device: Where it steps, and has the state.

    Attributes:
        stand_ins: For each parameter the tensor that is stepped: itself, or a copy.
        part: The optimizer over the stand-ins; there is none before the first parameter.
    """

    part: OptimizerPart

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self.stand_ins: dict[Tensor, Tensor] = {}
        # How each original that has a copy looked when the copy was known to be equal.
        self._seen: dict[Tensor, tuple[Any, ...]] = {}

    def own(
        self,
        parameters: Iterable[Tensor],
        whole: Optimizer,
        optimizer_class: type[Optimizer],
        arguments: Mapping[str, Any],
    ) -> None:
        """Have exactly these parameters.

        Args:
            parameters: Some of the parameters of ``whole``.
            whole: The optimizer to which this shard belongs.
            optimizer_class: The class that steps, and its keyword ``arguments``.
            arguments: See there.
        """
        before, self.stand_ins = self.stand_ins, {}
        # A copy that was made in inference mode could never be stepped outside of it.
        with torch.inference_mode(False):
            for p in parameters:
                known = before.get(p)
                if known is None or not self._serves(known, p):
                    known = p if p.device == self.device else _copy_of(p, self.device)
                self.stand_ins[p] = known
            self._seen = {p: seen for p, seen in self._seen.items() if p in self.stand_ins}
            self.refresh()
            if not hasattr(self, "part"):
                self.part = OptimizerPart(
                    optimizer_class, arguments, whole, self.stand_ins, self.device
                )
        self.part.stand_ins = self.stand_ins

    def is_placed(self) -> bool:
        """Whether all parameters are still on the devices on which they were."""
        return all(self._serves(stand_in, p) for p, stand_in in self.stand_ins.items())

    def _serves(self, stand_in: Tensor, parameter: Tensor) -> bool:
        return (stand_in is parameter) == (parameter.device == self.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Carry in what others have written to the originals."""
        for pairs in _by_device(self._copies()):
            stale = [(p, copy) for p, copy in pairs if self._seen.get(p) != _look(p)]
            others = [(p, copy) for p, copy in pairs if self._seen.get(p) == _look(p)]
            if others and not _equal(others):
                stale = pairs
            for p, copy in pairs:
                _dress(copy, p)
            _write([p for p, _ in stale], [copy for _, copy in stale])
            self._seen.update({p: _look(p) for p, _ in stale})

    def step(self) -> None:
        """Step, between taking the options and the state from the whole and giving it back."""
        self.refresh()
        copies = self._copies()
        versions = [copy._version for _, copy in copies]
        # Until the end of the step nothing is known to be equal.
        seen, self._seen = self._seen, {}
        try:
            self._fetch_gradients(copies)
            self.part.step(hooks=False)
            changed = [
                (p, copy)
                for (p, copy), version in zip(copies, versions, strict=True)
                if copy.grad is not None or copy._version != version
            ]
        finally:
            for _, copy in copies:
                copy.grad = None
        for pairs in _by_device(changed):
            _write([copy for _, copy in pairs], [p for p, _ in pairs])
        self._seen = {**seen, **{p: _look(p) for p, _ in changed}}

    def _copies(self) -> list[_Pair]:
        return [(p, stand_in) for p, stand_in in self.stand_ins.items() if stand_in is not p]

    def _fetch_gradients(self, copies: Sequence[_Pair]) -> None:
        for pairs in _by_device([(p.grad, c) for p, c in copies if p.grad is not None]):
            moved = comm.broadcast_coalesced([grad for grad, _ in pairs], [self.device])[0]
            for (_, copy), grad in zip(pairs, moved, strict=True):
                if grad.dtype != copy.dtype:
                    copy.grad_dtype = grad.dtype
                copy.grad = grad


def _by_device(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    """The pairs, grouped by the device of the first: a coalesced copy has one source."""
    groups: dict[torch.device, list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].device, []).append(pair)
    return list(groups.values())


def _look(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride())


def _equal(pairs: Sequence[_Pair]) -> bool:
    parameters, copies = [p for p, _ in pairs], [copy for _, copy in pairs]
    ours, theirs = checksum(copies, parameters), checksum(parameters, copies)
    return torch.equal(theirs.cpu(), ours.cpu())


def _copy_of(parameter: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy, of the parameter's own class."""
    values = torch.empty_like(parameter.detach(), device=device)
    if isinstance(parameter, torch.nn.Parameter):
        kind, wanted = type(parameter), parameter.requires_grad
        copy: Tensor = torch_internals.make_subclass(kind, values, wanted)
        return copy
    return values.requires_grad_(parameter.requires_grad)


def _dress(copy: Tensor, original: Tensor) -> None:
    """Give a copy the form and the attributes of its original."""
    if copy.shape != original.shape or copy.dtype != original.dtype:
        copy.data = torch.empty_like(original.detach(), device=copy.device)
    if copy.requires_grad != original.requires_grad:
        copy.requires_grad_(original.requires_grad)
    if vars(original):
        vars(copy).update(vars(original))


def _write(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Write values to tensors on another device, a few at a time, so that little is alive twice."""
    for bucket in plan_buckets(sources):
        sent = [sources[i].detach() for i in bucket]
        written = [targets[i] for i in bucket]
        torch_internals.foreach_copy_(
            written, comm.broadcast_coalesced(sent, [written[0].device])[0]
        )
