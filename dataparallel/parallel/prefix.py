"""The names in the state of a wrapper: those of the module that it wraps.

Note [Names with a prefix]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Our wrappers give the state of their module under the module's own names. Torch's wrappers put
``module.`` before each, and states of both are loaded. A name that begins with ``module.`` may be
either, since a module may have a child of that name. So each wrapper decides for all names that
come to it at once, by which reading more of them are known. As many both ways: then they have the
prefix if all of them begin with it and no name of the module does.

Torch itself goes on from the wrapper to the child ``module``, and has to find names and versions
under ``module.`` there. They are put there for the time of a load; hooks then give states and
reports the module's own names.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any, NamedTuple

from torch import nn

from dataparallel import torch_internals

_PREFIX = "module."


class _Loading(NamedTuple):
    """What one load of a wrapper has found; ``versions`` are put back as they were ``before``."""

    path: str
    is_prefixed: bool
    errors: list[str]
    versions: MutableMapping[str, Any]
    before: dict[str, Any]


class StateNames:
    """Renames what a wrapper saves and loads. See Note [Names with a prefix]."""

    def __init__(self, wrapper: nn.Module) -> None:
        self._loading: _Loading | None = None
        hooks: Any = wrapper
        hooks.register_state_dict_post_hook(_finish_state)
        hooks.register_load_state_dict_post_hook(self._loaded)

    def load(self, module: nn.Module, state: dict[str, Any], path: str, errors: list[str]) -> None:
        """Let torch find under the child ``module`` what it is about to load."""
        names = [name[len(path) :] for name in state if name.startswith(path)]
        is_prefixed = _is_prefixed(module, names)
        versions = torch_internals.versions_being_loaded() or {}
        self._loading = _Loading(path, is_prefixed, errors, versions, dict(versions))
        if is_prefixed:
            return
        inner = path + _PREFIX
        state.update([(inner + name, state.pop(path + name)) for name in names])
        for name, version in self._loading.before.items():
            if name == path[:-1]:
                versions[inner[:-1]] = version
            elif name.startswith(path):
                versions[inner + name[len(path) :]] = version

    def _loaded(self, wrapper: Any, incompatible: Any) -> None:
        """Give the report of a load the names that came, and the versions their places."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        path, inner = loading.path, loading.path + _PREFIX
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        missing[:] = [_without(inner, path, name) for name in missing]
        if not loading.is_prefixed:
            unexpected[:] = [_without(inner, path, name) for name in unexpected]
            loading.errors[:] = [e.replace(f" {inner}", f" {path}", 1) for e in loading.errors]
        loading.versions.clear()
        loading.versions.update(loading.before)


def _finish_state(wrapper: Any, state: dict[str, Any], path: str, _: Any) -> None:
    """Take the prefix away from the names that torch has just given."""
    inner = path + _PREFIX
    for table in (state, torch_internals.state_versions(state) or {}):
        found = {name: table.pop(name) for name in list(table) if f"{name}.".startswith(inner)}
        table.update((_without(inner, path, name), value) for name, value in found.items())


def _without(inner: str, path: str, name: str) -> str:
    """A name with ``inner``, where it begins so, replaced by ``path``; both end with a dot."""
    dotted = f"{name}."
    return f"{path}{dotted[len(inner) :]}"[:-1] if dotted.startswith(inner) else name


def _is_prefixed(module: nn.Module, names: Collection[str]) -> bool:
    """Whether names that a wrapper of the module is to load have the prefix."""
    stripped = [name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)]
    if not stripped:
        return False
    known = _known(module)
    as_they_are, without = (
        len({known[n] for n in some if n in known}) for some in (names, stripped)
    )
    if as_they_are != without:
        return without > as_they_are
    own = any(name.startswith(_PREFIX) for name in known.values())
    return len(stripped) == len(names) and not own


def _known(module: nn.Module) -> dict[str, str]:
    """From each name under which a load finds a tensor to the tensor's name in the state."""
    if isinstance(vars(module).get("_names"), StateNames):
        inner: Any = module.module
        known = _known(inner)
        return {f"{_PREFIX}{name}": own for name, own in known.items()} | known
    known = {name: name for name in module.state_dict(keep_vars=True)}
    for path, child in module.named_children():
        below = _known(child).items()
        known = {f"{path}.{name}": f"{path}.{own}" for name, own in below} | known
    return known
