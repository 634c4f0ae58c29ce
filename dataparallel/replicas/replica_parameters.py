"""The parameters that the replicas compute with: leaves of their own, kept from forward to forward.

Note [Leaves of the replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each replica has its own leaf for each parameter of the module, with its own ``.grad``. On the
device of the original a leaf shares the original's memory and version counter, so an optimizer
step serves all such replicas at once, and one between forward and backward raises the error that
the bare module raises. Elsewhere, and where the replicas compute in another dtype, leaves have
memory of their own that is written in place when the originals have changed; that counts as a
write to them, too.

Replica 0 has leaves of its own as well. The originals' ``.grad`` is then touched by nothing but the
reduced gradient, and hooks on the originals see that, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.comm.checksum import checksum
from dataparallel.replicas.tensor_copies import signature

_Signature: TypeAlias = tuple[Any, ...]


class _Place:
    """Memory of its own for all leaves on one device, and what it was last filled with."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values
        self.filled_with: list[_Signature] | None = None
        self.checksum: torch.Tensor | None = None


class ReplicaParameters:
    """The leaves of all replicas.

    Example::

        leaves = ReplicaParameters(list(module.parameters()), devices)
        leaves.refresh()
        leaves.of(replica=1)[0].grad

    Args:
        originals: Parameters of the module, all on ``devices[0]``.
        devices: One device per replica.
        dtype: What floating-point leaves are converted to. Default: as the originals are.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        devices: Sequence[torch.device],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._originals = list(originals)
        self._home = devices[0]
        # A single replica may be on several devices itself.
        self._single = len(devices) == 1
        self._dtype = dtype
        self._state = self._state_of_originals()
        self._places: dict[torch.device, _Place] = {}
        self._leaves = [self._make(device) for device in devices]
        #: Those of replicas that use the originals' memory.
        self._sharing = [
            leaves
            for leaves, device in zip(self._leaves, devices, strict=True)
            if device not in self._places
        ]

    def on(self, devices: Sequence[torch.device]) -> ReplicaParameters:
        """Other leaves for the same parameters.

        Args:
            devices: One device per replica; the first as before.
        """
        return ReplicaParameters(self._originals, devices, self._dtype)

    def of(self, replica: int) -> list[nn.Parameter]:
        """The leaves of one replica, in the order of the originals."""
        return self._leaves[replica]

    def follow(self) -> bool:
        """Let the leaves be what the originals are now: frozen or not, and in the same memory.

        Returns:
            Whether they can be; not if an original has another dtype, shape or device.
        """
        now = self._state_of_originals()
        if now == self._state:
            return True
        if not all(map(self._can_follow, self._leaves[0], self._originals)):
            return False
        self._state = now
        for leaves in self._leaves:
            for leaf, original in zip(leaves, self._originals, strict=True):
                if leaf.requires_grad != original.requires_grad:
                    leaf.requires_grad_(original.requires_grad)
        for leaves in self._sharing:
            for leaf, original in zip(leaves, self._originals, strict=True):
                if leaf.data_ptr() != original.data_ptr():
                    # Keeps its version counter, which is the original's.
                    leaf.data = original.data
        return True

    def stands_for(self, originals: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters for which the leaves were made."""
        return len(originals) == len(self._originals) and all(map(is_, originals, self._originals))

    def versions(self) -> list[int]:
        """How often each piece of memory was written: of the originals, and of each other place."""
        tensors = [*self._originals, *itertools.chain(*(p.values for p in self._places.values()))]
        try:
            return [tensor._version for tensor in tensors]
        except RuntimeError:
            # Tensors made in inference mode, such as frozen parameters, have no counter.
            return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]

    def refresh(self, *, read_values: bool = True) -> None:
        """Bring the leaves with memory of their own up to date; a change is as for all copies.

        Args:
            read_values: Whether to look for changes that left no other trace than the values. See
                Note [What counts as a change].
        """
        if not self._places:
            return
        now = [signature(original) for original in self._originals]
        for place in self._places.values():
            if place.filled_with == now and not (read_values and self._is_written(place)):
                continue
            with torch.inference_mode(False), torch.no_grad():
                torch_internals.foreach_copy_(place.values, [o.detach() for o in self._originals])
            place.filled_with = now
            place.checksum = None

    def _is_written(self, place: _Place) -> bool:
        """Whether somebody wrote an original through ``.data``, which leaves no other trace."""
        originals = [original.detach() for original in self._originals]
        if place.checksum is None:
            place.checksum = checksum(place.values, originals).cpu()
        if self._dtype is not None:
            originals = [o.to(v.dtype) for o, v in zip(originals, place.values, strict=True)]
        return not torch.equal(checksum(originals, place.values).cpu(), place.checksum)

    def _make(self, device: torch.device) -> list[nn.Parameter]:
        if self._dtype is None and (device == self._home or self._single):
            return [_leaf(original, original) for original in self._originals]
        if device not in self._places:
            with torch.inference_mode(False), torch.no_grad():
                values = [
                    torch.empty_like(
                        original,
                        dtype=self._dtype_of(original),
                        device=original.device if self._single else device,
                    )
                    for original in self._originals
                ]
            self._places[device] = _Place(values)
        values = self._places[device].values
        return [_leaf(v, original) for v, original in zip(values, self._originals, strict=True)]

    def _dtype_of(self, original: torch.Tensor) -> torch.dtype:
        converted = self._dtype is not None and original.is_floating_point()
        return self._dtype if converted and self._dtype else original.dtype

    def _state_of_originals(self) -> tuple[list[Any], ...]:
        """What changes when an original does, other than its values."""
        originals = self._originals
        return (
            [original.requires_grad for original in originals],
            [original.dtype for original in originals],
            list(map(torch.Tensor.data_ptr, originals)),
            list(map(torch.Tensor.stride, originals)),
            [original.shape for original in originals],
        )

    def _can_follow(self, leaf: torch.Tensor, original: torch.Tensor) -> bool:
        return (
            original.device == leaf.device
            and leaf.dtype == self._dtype_of(original)
            and leaf.shape == original.shape
            and leaf.stride() == original.stride()
        )


def _leaf(value: torch.Tensor, original: nn.Parameter) -> nn.Parameter:
    """A leaf with the memory and version counter of ``value``, dressed as ``original``."""
    leaf: nn.Parameter = torch_internals.make_subclass(
        type(original), value.detach(), original.requires_grad
    )
    for name, attribute in vars(original).items():
        on_device = attribute.to(value.device) if isinstance(attribute, torch.Tensor) else attribute
        setattr(leaf, name, on_device)
    return leaf
