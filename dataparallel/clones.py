"""The clones of one module, one per device slot, kept from forward to forward.

Note [Clones follow the original]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A clone is an object of the original's class that is filled anew before each forward with the
original's attributes: hooks, submodules, flags and everything that the user has set since. Tensors
and modules in them are replaced by the replica's own. After a forward that succeeded, what replica
0 assigned to itself is assigned to the original, as if the original itself had run: this is what
"replica 0 is the wrapped module" means where gradients need a clone. What other replicas assign to
themselves is dropped, as in ``torch.nn.DataParallel``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from dataparallel.gradient_edges import connect
from dataparallel.remap import OPAQUE, may_refer, remap, tensors_in
from dataparallel.tensor_copies import Sharing, TensorCopies

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_TABLES = frozenset({dict, OrderedDict, set, list, tuple})


class Parts:
    """The modules and tensors of a module tree, each once, in registration order."""

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
            self._seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):
                _refuse_scripted(root)
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
                    and name not in _REGISTRIES
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
        """Tensors in plain attributes, neither parameters nor buffers."""
        found = []
        for module, names in zip(self.modules, self.references, strict=True):
            for name in names:
                for tensor in tensors_in(module.__dict__[name]):
                    if id(tensor) not in self._seen:
                        self._seen.add(id(tensor))
                        found.append(tensor)
        return found


class ModuleClones:
    """The clones of one module, refreshed before each forward.

    Example::

        clones = ModuleClones(module, devices)
        replicas = clones.refresh(num_replicas=2, detach=False)
        ...
        clones.commit()

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
        self._loose_copies = TensorCopies(devices)
        # The clones of each module, with the module, so that its id cannot be taken by another.
        self._clones: dict[int, tuple[nn.Module, list[nn.Module]]] = {}
        self._parts: Parts | None = None
        self._counterparts: list[dict[int, Any]] = []
        self._versions: list[dict[int, int]] = []
        # What was put in the place of references, per module of replica 0.
        self._installed: dict[int, dict[str, Any]] = {}

    def refresh(self, num_replicas: int, *, detach: bool) -> list[nn.Module]:
        """Bring the clones up to date with the original.

        Args:
            num_replicas: How many slots take part; the first ones.
            detach: Whether to leave out the gradient edges to the originals.

        Returns:
            One clone per replica; the same objects at each call.
        """
        parts = self._parts = Parts(self.module)
        self._counterparts = [{} for _ in range(num_replicas)]
        self._give_tensors(self._parameter_copies, parts.parameters, detach=detach)
        self._give_tensors(self._buffer_copies, parts.buffers, detach=detach)
        if any(device != self._devices[0] for device in self._devices):
            # A tensor that is put elsewhere on purpose, such as a table on the CPU, stays there.
            loose = [t for t in parts.loose_tensors() if t.device == self._devices[0]]
            self._give_tensors(self._loose_copies, loose, detach=detach)
        known, self._clones = self._clones, {}
        for module in parts.modules:
            entry = known.get(id(module)) or (module, [])
            self._clones[id(module)] = entry
            clones = entry[1]
            while len(clones) < num_replicas:
                clones.append(_blank(module))
            for counterparts, clone in zip(self._counterparts, clones, strict=False):
                counterparts[id(module)] = clone
        for module, names in zip(parts.modules, parts.references, strict=True):
            installed = [_fill(module, names, c) for c in self._counterparts]
            self._installed[id(module)] = installed[0]
        self._versions = [self._versions_of(c) for c in self._counterparts]
        return self._clones[id(self.module)][1][:num_replicas]

    def _give_tensors(
        self, copies: TensorCopies, originals: list[torch.Tensor], *, detach: bool
    ) -> None:
        values = copies.update(originals, len(self._counterparts))
        chosen = [i for i, original in enumerate(originals) if original.requires_grad]
        trained = [[replica[i] for i in chosen] for replica in values]
        if detach:
            aliases = [[value.detach() for value in replica] for replica in trained]
        else:
            aliases = connect(trained, [originals[i] for i in chosen])
        for replica, replacements in zip(values, aliases, strict=True):
            for i, alias in zip(chosen, replacements, strict=True):
                replica[i] = _as_parameter(alias, replica[i])
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
        written = {id(parameter) for parameter in self._written(self.parts.parameters)}
        if not written:
            return []
        return [name for name, p in self.module.named_parameters() if id(p) in written]

    def written_buffers(self) -> list[torch.Tensor]:
        """The originals of the buffers that a replica has written since :meth:`refresh`."""
        return self._written(self.parts.buffers)

    def override(self, module: nn.Module, name: str, values: Sequence[Any]) -> None:
        """Give the clones of ``module`` an attribute of their own until the next refresh.

        Args:
            module: A module of the original.
            name: The attribute's name; it is not carried back by :meth:`commit`.
            values: One value per replica.
        """
        for counterparts, value in zip(self._counterparts, values, strict=True):
            counterparts[id(module)].__dict__[name] = value
        self._installed[id(module)][name] = values[0]

    def name_of(self, module: nn.Module) -> str:
        """The qualified name of a module of the original."""
        names: dict[int, str] = {id(part): name for name, part in self.module.named_modules()}
        return names[id(module)]

    def commit(self) -> None:
        """Assign to the originals what replica 0 has assigned to itself.

        See Note [Clones follow the original].
        """
        forward = self._counterparts[0]
        everything = (*self.parts.parameters, *self.parts.buffers, *self.parts.modules)
        back = {id(forward[id(part)]): part for part in everything}
        for module in self.parts.modules:
            _take_back(module, self._installed[id(module)], forward, back)

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


def _as_parameter(alias: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, nn.Parameter):
        # What torch looks at in `isinstance(tensor, nn.Parameter)` for tensors that are not leaves.
        alias._is_param = True
    for name, attribute in vars(value).items():
        setattr(alias, name, attribute)
    return alias


def _refuse_scripted(root: nn.Module) -> NoReturn:
    scripted = [
        f"{name or 'the module itself'!r} ({type(module).__name__})"
        for name, module in root.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    raise TypeError(
        f"cannot replicate the scripted modules {', '.join(scripted)}: they hold their parameters "
        "where a clone cannot give them others; wrap the module before it is scripted"
    )


def _blank(module: nn.Module) -> nn.Module:
    clone: nn.Module = module.__new__(type(module))
    return clone


def _fill(module: nn.Module, references: list[str], counterparts: dict[int, Any]) -> dict[str, Any]:
    """Give a clone the attributes of its original; returns those that are not the original's."""
    attributes = module.__dict__.copy()
    for registry in _REGISTRIES:
        attributes[registry] = {
            name: None if part is None else counterparts[id(part)]
            for name, part in attributes[registry].items()
        }
    installed: dict[str, Any] = {"_is_replica": True, "zero_grad": _refuse_zero_grad}
    for name in references:
        installed[name] = remap(attributes[name], counterparts)
    attributes.update(installed)
    # Not through the class: its own __setattr__ may expect attributes that are not there yet.
    object.__setattr__(counterparts[id(module)], "__dict__", attributes)
    return installed


def _refuse_zero_grad(set_to_none: bool = True) -> NoReturn:
    raise RuntimeError(
        "zero_grad() was called in the forward of a replica, whose parameters have no gradients "
        "of their own; call it on the wrapped module or the optimizer, outside of forward"
    )


def _take_back(
    module: nn.Module,
    installed: dict[str, Any],
    forward: dict[int, Any],
    back: dict[int, Any],
) -> None:
    """Carry assignments of the forward from the clone of replica 0 to its original."""
    attributes, assigned = module.__dict__, forward[id(module)].__dict__
    for name, value in assigned.items():
        if name in _REGISTRIES or value is installed.get(name, attributes.get(name, _MISSING)):
            continue
        attributes[name] = remap(value, back)
    for registry in _REGISTRIES:
        for name, part in assigned[registry].items():
            current = attributes[registry].get(name)
            if part is not (None if current is None else forward.get(id(current))):
                attributes[registry][name] = back.get(id(part), part)


_MISSING = object()
