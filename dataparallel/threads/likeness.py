"""What the calls of replicas have in common, as far as compiled code depends on it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Likeness:
    """Describes calls in two parts: of what kind everything is, and sizes of these kinds.

    Example::

        likeness = Likeness()
        likeness.add_settings(devices)
        likeness.add(functools.partial(replica, x))
        likeness.kinds, likeness.sizes

    Attributes:
        kinds: What compiled code is made for: types, dtypes, modes and settings.
        sizes: Sizes and numbers, which compiled code may take as they come.
    """

    def __init__(self) -> None:
        self.kinds: list[Any] = []
        self.sizes: list[Any] = []

    def add(self, value: Any) -> None:
        """Describe a call (a ``functools.partial``), or an argument."""
        if isinstance(value, functools.partial):
            self.add(value.func)
            self.add(value.args)
            self.add(value.keywords)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self.kinds.append(type(value))
            self.kinds.extend([part.training for part in modules_of(value)])
        elif isinstance(value, dict):
            self.kinds.extend((type(value), *map(str, value)))
            for item in value.values():
                self.add(item)
        elif isinstance(value, (list, tuple)):
            self.kinds.extend((type(value), len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, (bool, str, type(None), torch.dtype, torch.device)):
            self.kinds.append(value)
        else:
            self.kinds.append(type(value))
            if isinstance(value, (int, float)):
                self.sizes.append(value)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        strided = tensor.layout is torch.strided
        self.kinds.extend((type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad))
        self.kinds.append(strided and tensor.is_contiguous())
        # Code that takes any size does not take 0 and 1.
        self.kinds.append(tuple(min(size, 2) for size in tensor.shape))
        self.sizes.extend(tensor.shape)

    def add_settings(self, devices: Iterable[torch.device]) -> None:
        """Describe what the calling thread has set.

        Args:
            devices: The devices of the replicas.
        """
        self.kinds += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        self.kinds += [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
        for device_type in sorted({device.type for device in devices} | {"cpu"}):
            if torch.is_autocast_enabled(device_type):
                self.kinds += [device_type, torch.get_autocast_dtype(device_type)]


def modules_of(root: nn.Module) -> list[nn.Module]:
    """All modules of a tree; quicker than ``root.modules()``."""
    found, seen = [root], {id(root)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found
