"""Clones that stay: the same module objects at every forward, with leaves of their own.

Note [Standing clones]
~~~~~~~~~~~~~~~~~~~~~~
Filling a clone costs more than the forward of a small layer. Since the parameters of these clones
are always the same leaves, an earlier forward may still need a clone (activation checkpointing runs
it again) when a later one uses it, as it is with the bare module. So the objects stay, and are
filled again only if something has changed: an attribute, parameter, buffer or submodule of the
original or of a clone is another object than before, or an empty container, such as a table of
hooks, is not empty any more.
Modules with attributes that lead to tensors or modules are filled anew each time, as are all where
buffers are merged after the forward.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from dataparallel.replicas.clone import blank, fill, given_to, own_tables
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.parts import REGISTRIES, Parts
from dataparallel.replicas.replica_parameters import ReplicaParameters
from dataparallel.replicas.replicate import check_placement
from dataparallel.replicas.tensor_copies import Sharing, is_being_stepped, steps_taken

_CONTAINERS = frozenset({dict, OrderedDict, list, set})


class OtherParameters(Exception):
    """The module has other parameters than the leaves are for, which have to be made anew."""


class StandingClones(ModuleClones):
    """The clones of a module whose parameters are leaves. See Note [Standing clones].

    Args:
        module: The original.
        devices: One device per slot.
        leaves: The parameters of the clones, in the order of ``module.parameters()``.
        buffer_sharing: Whose buffers are the original's.
        keep: Whether clones stay filled as long as nothing has changed.
        spread: Whether the one clone is on several devices itself.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        leaves: ReplicaParameters,
        buffer_sharing: Sharing = "first",
        *,
        keep: bool = True,
        spread: bool = False,
    ) -> None:
        self._leaves = leaves
        self._keep = keep
        self._spread = spread
        self._filled = False
        self._detach = True
        self._all: list[dict[int, Any]] = [{} for _ in devices]
        # Holds the modules whose ids are keys of `_all`.
        self._modules: list[nn.Module] = []
        self._original_tables: list[dict[str, Any]] = []
        self._clone_tables: list[list[dict[str, Any]]] = []
        self._original_values: list[Any] = []
        self._clone_values: list[list[Any]] = []
        self._is_forward = False
        self._empty: list[Any] = []
        self._intricate: list[int] = []
        self._parameter_versions: list[int] = []
        self._steps_before = 0
        self._touched: bool | None = None
        super().__init__(module, devices, buffer_sharing)

    def release(self) -> None:
        """End a forward. If it was not committed, nothing is known of the clones any more."""
        if self._is_forward:
            self._buffer_copies.forget()
            self._filled = self._is_forward = False

    def commit(self) -> None:
        """Assign to the original what replica 0 has assigned to itself."""
        if self._is_touched():
            super().commit()
            self._filled = False
        elif self._intricate:
            self._take_back([self.parts.modules[i] for i in self._intricate])
        self._is_forward = False

    def refresh(self, num_replicas: int, *, detach: bool) -> list[nn.Module]:
        """Bring the clones up to date.

        Args:
            num_replicas: How many slots take part; the first ones.
            detach: Whether tensors that require grad, and are no parameters, are left without edges
                to the originals. The leaves serve with and without gradients.

        Returns:
            One clone per replica, the same objects as last time.
        """
        self._detach = detach
        self._counterparts = self._all
        if not (self._keep and self._filled and self._is_unchanged()):
            self._fill_all()
        else:
            self._leaves.refresh()
            self._fill_changing()
        self._counterparts = self._all[:num_replicas]
        if not self._clone_tables or self._intricate:
            self._clone_tables = [_tables(self._clones_of(c)) for c in self._all]
            self._clone_values = []
        # Otherwise they are as the forward before has left them.
        if not self._clone_values or self.parts.buffers:
            self._clone_values = [_values(tables) for tables in self._clone_tables]
        self._is_forward = True
        self._parameter_versions = self._leaves.versions()
        self._touched = None
        self._steps_before = steps_taken()
        self._versions = [
            {id(buffer): _version(c[id(buffer)]) for buffer in self.parts.buffers}
            for c in self._counterparts
        ]
        return [counterparts[id(self.module)] for counterparts in self._counterparts]

    # --- filling ---------------------------------------------------------------------------------

    def _fill_all(self) -> None:
        if not self._spread:
            check_placement(self.module, self._devices[0])
        # Until all is filled nothing is known of the clones.
        self._filled = False
        parts = self._parts = Parts(self.module)
        known = {id(module) for module in self._modules}
        before = self._all
        self._all = self._counterparts = [{} for _ in self._devices]
        self._modules = parts.modules
        if not self._leaves.stands_for(parts.parameters):
            _refuse_replaced(self.module)
            raise OtherParameters
        self._leaves.refresh()
        for replica, counterparts in enumerate(self._all):
            leaves = self._leaves.of(replica)
            counterparts.update(
                (id(original), leaf)
                for original, leaf in zip(parts.parameters, leaves, strict=True)
            )
            for module in parts.modules:
                old = before[replica].get(id(module)) if id(module) in known else None
                counterparts[id(module)] = blank(module) if old is None else old
        self._give_buffers(parts.buffers)
        self._give_loose()
        self._given = {}
        for index in range(len(parts.modules)):
            self._fill_one(index)
        self._names = {}
        self._intricate = [i for i, names in enumerate(parts.references) if names]
        self._original_tables = _tables(parts.modules)
        self._original_values = _values(self._original_tables)
        # Filling has given the clones other tables.
        self._clone_tables = []
        self._empty = [
            value
            for module in parts.modules
            for name, value in vars(module).items()
            if type(value) in _CONTAINERS and not value and name not in REGISTRIES
        ]
        for counterparts in self._all:
            for clone in self._clones_of(counterparts):
                self._empty += own_tables(clone).values()
        self._filled = True

    def _fill_one(self, index: int) -> None:
        module, names = self.parts.modules[index], self.parts.references[index]
        for counterparts in self._all:
            fill(module, counterparts[id(module)], names, counterparts)
        self._given[id(module)] = given_to(self._all[0][id(module)])

    def _fill_changing(self) -> None:
        """What may be another tensor at each forward, though the original is as it was."""
        parts = self.parts
        if parts.buffers:
            self._give_buffers(parts.buffers)
            for module in parts.modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        for counterparts in self._all:
                            clone = counterparts[id(module)]
                            clone._buffers[name] = counterparts[id(buffer)]
                        given = self._given[id(module)].registries["_buffers"]
                        given[name] = self._all[0][id(buffer)]
        if self._intricate:
            self._give_loose()
            for index in self._intricate:
                self._fill_one(index)

    def _give_buffers(self, buffers: list[torch.Tensor]) -> None:
        if self._spread:
            self._all[0].update((id(buffer), buffer) for buffer in buffers)
        else:
            self._give_tensors(self._buffer_copies, buffers, detach=self._detach)

    def _give_loose(self) -> None:
        home = self._devices[0]
        loose = self.parts.loose_tensors()
        own = [t for t in loose if t.device == home and t.grad_fn is None]
        self._give_tensors(self._loose_copies, own, detach=self._detach)

    def stands_for_module(self) -> bool:
        """Whether the leaves are those for the parameters that the module has now.

        Raises:
            RuntimeError: Tensors that are no parameters have taken the place of some.
        """
        if self._filled and self._is_unchanged():
            return True
        if self._leaves.stands_for(Parts(self.module).parameters):
            return True
        _refuse_replaced(self.module)
        return False

    # --- what has changed ------------------------------------------------------------------------

    def _is_unchanged(self) -> bool:
        now = _values(self._original_tables)
        before = self._original_values
        return len(now) == len(before) and all(map(is_, now, before)) and not any(self._empty)

    def _clones_of(self, counterparts: dict[int, Any]) -> list[nn.Module]:
        return [counterparts[id(module)] for module in self._modules]

    def _is_touched(self) -> bool:
        """Whether a clone has other attributes than before its forward."""
        if self._touched is None:
            self._touched = not self._keep or any(self._empty)
            taking_part = self._clone_tables[: len(self._counterparts)]
            for tables, before in zip(taking_part, self._clone_values, strict=False):
                now = _values(tables)
                self._touched |= len(now) != len(before) or not all(map(is_, now, before))
        return self._touched

    def created_parameters(self) -> list[str]:
        """Names of the parameters that the forward of replica 0 has made."""
        return super().created_parameters() if self._is_touched() else []

    def written_parameters(self) -> list[str]:
        """Names of the parameters that a replica has written since :meth:`refresh`."""
        before, now = self._parameter_versions, self._leaves.versions()
        # If an optimizer took a step, another thread trains the module, which is its own affair.
        if now == before or steps_taken() != self._steps_before:
            return []
        count = len(self.parts.parameters)
        pairs = enumerate(zip(now, before, strict=True))
        written = {i % count for i, (version, earlier) in pairs if version != earlier}
        parameters = [self.parts.parameters[i] for i in written]
        ids = {id(parameter) for parameter in parameters if not is_being_stepped(parameter)}
        return [name for name, p in self.module.named_parameters() if id(p) in ids]


def _refuse_replaced(module: nn.Module) -> None:
    """Say what to do where ``torch.func.functional_call`` has put tensors for the parameters."""
    replaced = [n for n, p in module.named_parameters() if not isinstance(p, nn.Parameter)]
    if replaced:
        listed = ", ".join(replaced[:3]) + (", ..." if len(replaced) > 3 else "")
        raise RuntimeError(
            f"torch.func.functional_call has replaced parameters of the wrapped module ({listed}) "
            "by other tensors, but DistributedDataParallel computes with its own copies of the "
            "parameters, and reduces the gradients of these alone; call functional_call on the "
            "bare module (.module of the wrapper), or wrap it in DataParallel, which takes the "
            "tensors"
        )


def _tables(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The tables of the attributes and of the registered parts of some modules."""
    return [
        table
        for attributes in map(vars, modules)
        for table in (attributes, *[attributes[name] for name in REGISTRIES])
    ]


def _values(tables: Sequence[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, tables)))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
