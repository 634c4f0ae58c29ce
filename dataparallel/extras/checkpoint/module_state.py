"""What a checkpoint holds of a module: parameters, buffers and extra state, by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dataparallel import torch_internals
from dataparallel.extras.checkpoint.object_state import void
from dataparallel.extras.checkpoint.tensor_forms import name_of_dtype


def bare(module: nn.Module) -> nn.Module:
    """The module within a wrapper, so that a state has the names of the module itself."""
    while True:
        inner = torch_internals.original_module(module)
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class ModuleState:
    """Saves and loads a module.

    Args:
        name: What the module is called in messages and in names of tensors.
        module: Bare, or in a wrapper of this package or of torch.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = bare(module)

    def save(self) -> dict[str, Any]:
        """The state, as a value that a checkpoint can hold."""
        state = self._module.state_dict()
        versions = torch_internals.state_versions(state) or {}
        return {
            "state": dict(state),
            "versions": {k: dict(v) for k, v in versions.items() if isinstance(v, Mapping)},
        }

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        if not (
            isinstance(saved, dict)
            and isinstance(saved.get("state"), dict)
            and all(isinstance(key, str) for key in saved["state"])
            and isinstance(saved.get("versions"), dict)
            and all(map(_is_version, saved["versions"].values()))
        ):
            return [f"{self.name}: the checkpoint has no state of a module there"]
        theirs, ours = saved["state"], self._module.state_dict()
        found = []
        if strict:
            found += [f"{self.name}.{k} is in the module only" for k in ours if k not in theirs]
            found += [f"{self.name}.{k} is in the checkpoint only" for k in theirs if k not in ours]
        for key in ours:
            if key in theirs:
                why = difference(theirs[key], ours[key], strict)
                found += [f"{self.name}.{key} {why}"] if why else []
        return found

    def load(self, saved: Any, strict: bool) -> None:
        """Write a state to the module."""
        state: OrderedDict[str, Any] = OrderedDict(saved["state"])
        torch_internals.set_state_versions(state, OrderedDict(saved["versions"]))
        self._module.load_state_dict(state, strict=strict)

    def remember(self) -> Callable[[], None]:
        """What gives the module the state back that it has now."""
        state = self._module.state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor) and not is_lazy(value):
                # In host memory, since an accelerator may have no room for them.
                state[key] = value.detach().to("cpu", copy=True)
        return lambda: void(self._module.load_state_dict(state, strict=False))


def _is_version(saved: Any) -> bool:
    return isinstance(saved, dict) and isinstance(saved.get("version"), int | None)


def difference(saved: Any, own: Any, strict: bool) -> str | None:
    """How a tensor of a checkpoint differs in form from the one that is to take its values."""
    if not isinstance(own, Tensor) or is_lazy(own):
        return None
    if own.is_meta:
        return "is on the device 'meta' here and takes no values; call to_empty(device=...) before"
    if not isinstance(saved, Tensor):
        return f"is a {type(saved).__name__} in the checkpoint, but a tensor here"
    if saved.shape != own.shape:
        return f"has the shape {tuple(saved.shape)} in the checkpoint, but {tuple(own.shape)} here"
    if strict and saved.dtype != own.dtype:
        theirs, ours = name_of_dtype(saved.dtype), name_of_dtype(own.dtype)
        return f"is {theirs} in the checkpoint, but {ours} here (strict=False converts)"
    if saved.is_complex() and not own.is_complex():
        return "is complex in the checkpoint, but real here"
    return None


def names_of(module: nn.Module | None) -> dict[int, str]:
    """The name of each parameter, by its identity."""
    if module is None:
        return {}
    return {id(p): name for name, p in bare(module).named_parameters(remove_duplicate=False)}


def devices_of(module: nn.Module | None) -> list[torch.device]:
    """The devices of a wrapper's replicas, or those of a module's parameters."""
    if module is None:
        return []
    ids = getattr(module, "device_ids", None)
    if ids and all(isinstance(device, torch.device) for device in ids):
        return list(ids)
    return list(dict.fromkeys(p.device for p in module.parameters() if not p.is_meta))
