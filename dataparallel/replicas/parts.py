"""The modules and tensors that a module tree consists of."""

from __future__ import annotations

from collections import OrderedDict
from typing import NoReturn

import torch
from torch import nn

from dataparallel.errors import listed
from dataparallel.replicas.remap import OPAQUE, may_refer, tensors_in

#: Where a module keeps its named parts.
REGISTRIES = ("_parameters", "_buffers", "_modules")
_TABLES = frozenset({dict, OrderedDict, set, list, tuple})


class Parts:
    """The parts of a module tree, each once, in registration order.

    Example::

        parts = Parts(net)
        len(parts.modules), len(parts.parameters)

    Args:
        root: The module.

    Raises:
        TypeError: A module in the tree cannot be cloned; the message lists all of them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        #: Per module, the names of attributes that may lead to a tensor or a module.
        self.references: list[list[str]] = []
        self._seen: set[int] = set()
        self._visit(root)

    def _visit(self, root: nn.Module) -> None:
        pending = [root]
        while pending:
            module = pending.pop()
            if id(module) in self._seen:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                _refuse(root)
            self._seen.add(id(module))
            attributes = module.__dict__
            self.modules.append(module)
            self._add(attributes["_parameters"], self.parameters)
            self._add(attributes["_buffers"], self.buffers)
            self.references.append(
                [
                    name
                    for name, value in attributes.items()
                    # Most values are numbers and empty tables of hooks, gone over at every forward.
                    if not (type(value) in _TABLES and not value)
                    and type(value) not in OPAQUE
                    and name not in REGISTRIES
                    and may_refer(value)
                ]
            )
            children = attributes["_modules"].values()
            pending.extend(child for child in reversed(children) if child is not None)

    def _add(self, registry: dict[str, torch.Tensor | None], found: list[torch.Tensor]) -> None:
        for tensor in registry.values():
            if tensor is not None and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                found.append(tensor)

    def loose_tensors(self) -> list[torch.Tensor]:
        """Tensors that are in plain attributes now, neither parameters nor buffers."""
        found = {
            id(tensor): tensor
            for module, names in zip(self.modules, self.references, strict=True)
            for name in names
            for tensor in tensors_in(module.__dict__[name])
        }
        return [tensor for key, tensor in found.items() if key not in self._seen]


def _refuse(root: nn.Module) -> NoReturn:
    found = [
        f"{name or 'the module itself'!r} ({type(module).__name__})"
        for name, module in root.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    raise TypeError(
        f"cannot replicate {listed(found)}: scripted modules hold on to their own parameters, "
        "so a clone cannot have others; wrap the module before it is scripted, or use "
        "torch.compile"
    )
