"""The prefix that torch's wrappers put before the names of a module's state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from dataparallel import torch_internals


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The state under the names that ``module`` has, which have no ``module.`` before them."""
    prefix = "module."
    if "module" in module._modules or not all(name.startswith(prefix) for name in state_dict):
        return state_dict
    stripped = OrderedDict((name[len(prefix) :], value) for name, value in state_dict.items())
    versions = torch_internals.state_versions(state_dict)
    if versions is not None:
        # torch keeps the version of each module's state there, under the module's name.
        own = {name[len(prefix) :]: version for name, version in versions.items() if name}
        torch_internals.set_state_versions(stripped, own)
    return stripped
