"""The names in the state of a wrapper, with and without the prefix of torch's wrappers.

Our wrappers give the state of their module under the module's own names. Torch's wrappers put
``module.`` before each, and states of both are loaded. A name that begins with ``module.`` may be
either, since a module may have a child of that name. So each wrapper decides for all names that
come to it at once, by which reading more of them are known. As many both ways: then they have the
prefix if all of them begin with it and no name of the module does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from dataparallel import torch_internals

# The prefix of torch's wrappers for the names of their module.
_PREFIX = "module."


def finish_state(_: nn.Module, state: dict[str, Any], path: str, __: Any) -> None:
    """Take the prefix away from the names that torch has just given to the state of a wrapper."""
    inner = path + _PREFIX
    for table in (state, torch_internals.state_versions(state) or {}):
        found = {name: table.pop(name) for name in list(table) if f"{name}.".startswith(inner)}
        # The version of the module itself has no name below it.
        below = _below(inner, found).items()
        table.update((path + name if name else path[:-1], value) for name, value in below)


def load_state(
    module: nn.Module,
    wrapper: type[nn.Module],
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load the part of a state below ``prefix`` into the module of a ``wrapper`` of that class."""
    names = [name for name in state_dict if name.startswith(prefix)]
    is_prefixed = _is_prefixed(module, wrapper, [name[len(prefix) :] for name in names])
    inner = prefix + _PREFIX if is_prefixed else prefix
    state = OrderedDict(_below(inner, state_dict))
    versions = torch_internals.versions_being_loaded()
    torch_internals.set_state_versions(state, _below(inner, versions or {}))
    assign = metadata.get("assign_to_params_buffers", False)
    try:
        # The load of the module's own class is for those who call it themselves.
        found = nn.Module.load_state_dict(module, state, False, assign)
    except RuntimeError as error:
        errors.append(str(error).replace("mismatch for ", f"mismatch for {prefix}"))
    else:
        missing += [prefix + name for name in found.missing_keys]
        unexpected += [inner + name for name in found.unexpected_keys]
    unexpected += [name for name in names if not name.startswith(inner)]


def _below(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with a path, without it; the path becomes ``""``."""
    start = len(path)
    return {f"{n}."[start:-1]: v for n, v in table.items() if f"{n}.".startswith(path)}


def _is_prefixed(module: nn.Module, wrapper: type[nn.Module], names: Collection[str]) -> bool:
    """True if names that a wrapper of the module is to load have the prefix."""
    stripped = [name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)]
    if not stripped:
        return False
    known = _known(module, wrapper)
    as_they_are, without = (
        len({known[n] for n in some if n in known}) for some in (names, stripped)
    )
    if as_they_are != without:
        return without > as_they_are
    own = any(name.startswith(_PREFIX) for name in known.values())
    return len(stripped) == len(names) and not own


def _known(module: nn.Module, wrapper: type[nn.Module]) -> dict[str, str]:
    """From each name under which a load finds a tensor to the tensor's name in the state."""
    if isinstance(module, wrapper):
        inside: Any = module.module
        known = _known(inside, wrapper)
        return {f"{_PREFIX}{name}": own for name, own in known.items()} | known
    known = {name: name for name in module.state_dict(keep_vars=True)}
    for path, child in module.named_children():
        below = _known(child, wrapper).items()
        known = {f"{path}.{name}": f"{path}.{own}" for name, own in below} | known
    return known
