"""The clones of one module, one per device slot, made anew for each forward.

Note [Clones follow the original]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A clone is an object of the original's class that is filled before a forward with the original's
attributes: hooks, submodules, flags and everything that the user has set since. Tensors and modules
in them are replaced by the replica's own. After a forward that succeeded, what replica 0 assigned
to itself is assigned to the original, as if the original itself had run: this is what "replica 0
is the wrapped module" means where gradients need a clone. What other replicas assign to themselves
is dropped, as in ``torch.nn.DataParallel``.

Only copies of tensors are kept from forward to forward. The objects are new each time, because the
graph of an earlier forward may still need the old ones as they were: activation checkpointing runs
a clone's forward again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dataparallel.graph.edges import connect
from dataparallel.replicas.clone import (
    Given,
    as_parameter,
    blank,
    created_parameters,
    fill,
    given_to,
    take_back,
)
from dataparallel.replicas.parts import Parts
from dataparallel.replicas.tensor_copies import (
    Sharing,
    TensorCopies,
    is_being_stepped,
    last_step_of,
)


class ModuleClones:
    """The clones of one module.

    Example::

        clones = ModuleClones(module, devices)
        replicas = clones.refresh(num_replicas=2, detach=False)
        ...
        clones.commit()
        clones.release()

    Args:
        module: The original.
        devices: One device per slot.
        buffer_sharing: Whose buffers are the original's. Default: those of the first replica on
            the original's device.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        buffer_sharing: Sharing = "first",
    ) -> None:
        self.module = module
        self._devices = tuple(devices)
        self._parameter_copies = TensorCopies(devices)
        self._buffer_copies = TensorCopies(devices, buffer_sharing)
        self._loose_copies = TensorCopies(devices, "first")
        # Whether a forward has begun whose end nobody has told.
        self._is_forward = False
        self.release()

    def release(self) -> None:
        """Let go of the clones and of all that their forward left in them."""
        if self._is_forward:
            # It has failed; batch norm writes its statistics without a trace.
            self._buffer_copies.forget()
            self._is_forward = False
        self._parts: Parts | None = None
        self._counterparts: list[dict[int, Any]] = []
        # Per replica and tensor, the version of the replica's tensor before the forward.
        self._versions: list[dict[int, int]] = []
        self._steps: dict[int, int | None] = {}
        # What each clone of replica 0 was given, by the id of its original.
        self._given: dict[int, Given] = {}
        self._names: dict[int, str] = {}

    def refresh(self, num_replicas: int, *, detach: bool) -> list[nn.Module]:
        """Make clones of the module as it is now.

        Args:
            num_replicas: How many slots take part; the first ones.
            detach: Whether to leave out the gradient edges to the originals.

        Returns:
            One clone per replica.
        """
        self.release()
        parts = self._parts = Parts(self.module)
        self._counterparts = [{} for _ in range(num_replicas)]
        self._give_parameters(parts.parameters, detach=detach)
        self._give_tensors(self._buffer_copies, parts.buffers, detach=detach)
        # A tensor that is put elsewhere on purpose, such as a table on the CPU, stays there, and
        # one that a forward computed belongs to the graph of that forward.
        home = self._devices[0]
        loose = [t for t in parts.loose_tensors() if t.device == home and t.grad_fn is None]
        self._give_tensors(self._loose_copies, loose, detach=detach)
        for counterparts in self._counterparts:
            counterparts.update((id(module), blank(module)) for module in parts.modules)
        for module, names in zip(parts.modules, parts.references, strict=True):
            for counterparts in self._counterparts:
                fill(module, counterparts[id(module)], names, counterparts)
            self._given[id(module)] = given_to(self._counterparts[0][id(module)])
        self._versions = [self._versions_of(c) for c in self._counterparts]
        self._steps = {id(p): last_step_of(p) for p in parts.parameters}
        self._is_forward = True
        return [counterparts[id(self.module)] for counterparts in self._counterparts]

    def _give_parameters(self, parameters: list[torch.Tensor], *, detach: bool) -> None:
        self._give_tensors(self._parameter_copies, parameters, detach=detach)

    def _give_tensors(
        self, copies: TensorCopies, originals: list[torch.Tensor], *, detach: bool
    ) -> None:
        values = copies.update(originals, len(self._counterparts))
        chosen = [i for i, original in enumerate(originals) if original.requires_grad]
        trained = [[replica[i] for i in chosen] for replica in values]
        if detach:
            # Without gradients in the caller a forward may still turn them on for itself.
            wanted = not torch.is_grad_enabled()
            aliases = [[v.detach().requires_grad_(wanted) for v in replica] for replica in trained]
        else:
            aliases = connect(trained, [originals[i] for i in chosen])
        for replica, replacements in zip(values, aliases, strict=True):
            for i, alias in zip(chosen, replacements, strict=True):
                replica[i] = as_parameter(alias, replica[i])
        for counterparts, replica in zip(self._counterparts, values, strict=True):
            for original, value in zip(originals, replica, strict=True):
                counterparts[id(original)] = value

    def _versions_of(self, counterparts: dict[int, Any]) -> dict[int, int]:
        return {
            id(original): _version(counterparts[id(original)])
            for original in (*self.parts.parameters, *self.parts.buffers)
        }

    def _written(self, originals: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            original
            for original in originals
            if any(
                _version(counterparts[id(original)]) != before[id(original)]
                for counterparts, before in zip(self._counterparts, self._versions, strict=True)
            )
        ]

    def written_parameters(self) -> list[str]:
        """Names of the parameters that a replica has written since :meth:`refresh`."""
        written = {
            id(parameter)
            for parameter in self._written(self.parts.parameters)
            # Otherwise another thread trains the module meanwhile, which is its own affair.
            if not is_being_stepped(parameter)
            and last_step_of(parameter) == self._steps[id(parameter)]
        }
        if not written:
            return []
        return [name for name, p in self.module.named_parameters() if id(p) in written]

    def created_parameters(self) -> list[str]:
        """Names of the parameters that the forward of replica 0 has made."""
        forward = self._counterparts[0]
        return [
            f"{self.name_of(module)}.{name}".lstrip(".")
            for module in self.parts.modules
            for name in created_parameters(forward[id(module)], self._given[id(module)])
        ]

    def written_buffers(self) -> list[torch.Tensor]:
        """The originals of the buffers that a replica has written since :meth:`refresh`.

        Batch norm on the CPU writes its statistics without counting a version, so values that
        differ count, too: replicas whose buffers are merged have them in memory of their own.
        """
        known = {id(buffer) for buffer in self._written(self.parts.buffers)}
        return [
            buffer
            for buffer in self.parts.buffers
            if id(buffer) in known
            or any(_differs(c[id(buffer)], buffer) for c in self._counterparts)
        ]

    def assigned_buffers(self) -> Iterator[tuple[nn.Module, str, list[torch.Tensor]]]:
        """Buffers that every replica has assigned anew: clone of replica 0, name, the tensors."""
        for module in self.parts.modules:
            for name, original in module._buffers.items():
                registries = [c[id(module)]._buffers for c in self._counterparts]
                values = [registry.get(name) for registry in registries]
                given = [None if original is None else c[id(original)] for c in self._counterparts]
                if all(
                    value is not None and value is not before
                    for value, before in zip(values, given, strict=True)
                ):
                    yield self._counterparts[0][id(module)], name, values

    def override(self, module: nn.Module, name: str, values: Sequence[Any]) -> None:
        """Give the clones of ``module`` an attribute of their own.

        Args:
            module: A module of the original.
            name: The attribute's name; it is not carried back by :meth:`commit`.
            values: One value per replica.
        """
        for counterparts, value in zip(self._counterparts, values, strict=True):
            counterparts[id(module)].__dict__[name] = value
        self._given[id(module)].attributes[name] = values[0]

    def name_of(self, module: nn.Module) -> str:
        """The qualified name of a module of the original."""
        if not self._names:
            self._names = {id(part): name for name, part in self.module.named_modules()}
        return self._names[id(module)]

    def commit(self) -> None:
        """Assign to the originals what replica 0 has assigned to itself.

        See Note [Clones follow the original].
        """
        self._take_back(self.parts.modules)
        self._is_forward = False

    def _take_back(self, modules: Sequence[nn.Module]) -> None:
        forward = self._counterparts[0]
        everything = (*self.parts.parameters, *self.parts.buffers, *self.parts.modules)
        back = {id(forward[id(part)]): part for part in everything}
        for module in modules:
            take_back(module, forward[id(module)], self._given[id(module)], back)

    @property
    def counterparts(self) -> list[dict[int, Any]]:
        """Per replica, from the id of an original part to the replica's."""
        return self._counterparts

    @property
    def parts(self) -> Parts:
        """The parts of the original at the last :meth:`refresh`."""
        assert self._parts is not None, "refresh() comes first"
        return self._parts


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _differs(value: torch.Tensor, original: torch.Tensor) -> bool:
    if value is original or value.layout != torch.strided or value.is_quantized:
        return False
    return not torch.equal(value.to(original.device), original)
