"""The names of a wrapper's parameters, buffers and state: those of the module that it wraps.

Note [Names with a prefix]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Our wrappers give the state of their module under the module's own names. Torch's wrappers put
``module.`` before each, and states of both are loaded. A name that begins with ``module.`` may be
either, since a module may have a child of that name. So each wrapper decides for all names that
come to it at once: it takes them as they are, or takes one ``module.`` away where that gives more
names that the module's state has. In the names below it other wrappers may decide either way, so
names are counted after their decisions. As many both ways: then the names stay as they are, unless
all begin with ``module.`` and none of the module's own does.

Where the wrapper is a part of another module, torch itself goes on to the child ``module``. It has
to find names and versions of states under ``module.`` there, and puts such names into its report.
So the names get the prefix for the time of the call, and the report gets the others back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dataparallel import torch_internals

_PREFIX = "module."


class _Loading(NamedTuple):
    """What a wrapper has renamed for a load that torch makes.

    Attributes:
        prefix: The path of the wrapper, with a dot behind it.
        renamed: The names that came, by those that torch finds.
        versions: The versions of states, or None.
        before: The versions that were under names with the prefix, None where there was none.
    """

    prefix: str
    renamed: Mapping[str, str]
    versions: MutableMapping[str, Any] | None
    before: Mapping[str, Any]


class NamesOfModule(nn.Module):
    """The part of a wrapper that is about names. See Note [Names with a prefix]."""

    module: Any
    _loading: _Loading | None = None

    def _give_names_back(self) -> None:
        """Have reports of what was loaded in the names of the module; called once."""
        register: Any = self.register_load_state_dict_post_hook
        register(_finish_loading)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters under the module's own names."""
        module: nn.Module = self.module
        return module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers under the module's own names."""
        module: nn.Module = self.module
        return module.named_buffers(prefix, recurse, remove_duplicate)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter that has a name in ``named_parameters()``, or in torch's wrapper."""
        try:
            found: nn.Parameter = self.module.get_parameter(target)
        except AttributeError:
            return super().get_parameter(target)
        return found

    def get_buffer(self, target: str) -> Tensor:
        """The buffer that has a name in ``named_buffers()``, or in torch's wrapper."""
        try:
            found: Tensor = self.module.get_buffer(target)
        except AttributeError:
            return super().get_buffer(target)
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, without a ``module.`` prefix."""
        return torch_internals.with_state_hooks(self, self.module.state_dict, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module's state, whose names may have a ``module.`` prefix or none.

        Example::

            model.load_state_dict(torch.load("model.pt"))      # of this wrapper, torch's, or bare

        Args:
            state_dict: The state. Names that the module's state has are taken as they are, those
                of a module with a child ``module``, too.
            strict: Whether names that are missing or not expected are an error. Default: True.
            assign: Whether the tensors themselves become the module's. Default: False.

        Returns:
            The missing names, as in ``state_dict()`` of this wrapper, and those not expected.

        Raises:
            RuntimeError: Names or shapes differ; or a name came with the prefix and without.
        """
        if torch_internals.has_load_hooks(self, besides=_finish_loading):
            return super().load_state_dict(state_dict, strict, assign)
        if _is_prefixed(self, list(state_dict)):
            state_dict = _without_prefix(state_dict)
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # What a part of a bigger module is loaded by; torch goes on to the child "module".
        names = [name[len(prefix) :] for name in state_dict if name.startswith(prefix)]
        prefixed = _is_prefixed(self, names)
        bare = [name for name in names if not (prefixed and name.startswith(_PREFIX))]
        values = {name: state_dict.pop(prefix + name) for name in bare}
        renamed = {}
        for name, value in values.items():
            new = prefix + _PREFIX + name
            if new in state_dict:
                error_msgs.append(_twice(prefix + name, new))
            else:
                renamed[new] = prefix + name
                state_dict[new] = value
        versions = None if prefixed else torch_internals.versions_being_loaded()
        before = {} if versions is None else _prefix_versions(versions, prefix)
        self._loading = _Loading(prefix, renamed, versions, before)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def _finish_loading(wrapper: NamesOfModule, incompatible: Any) -> None:
    """Give the report of a load the names that came, and the versions their places."""
    loading, wrapper._loading = wrapper._loading, None
    if loading is None:
        return
    inner = loading.prefix + _PREFIX
    missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
    missing[:] = [
        loading.prefix + name[len(inner) :] if name.startswith(inner) else name for name in missing
    ]
    unexpected[:] = [loading.renamed.get(name, name) for name in unexpected]
    if loading.versions is not None:
        for name, version in loading.before.items():
            if version is None:
                del loading.versions[name]
            else:
                loading.versions[name] = version


def _is_prefixed(wrapper: NamesOfModule, names: Sequence[str]) -> bool:
    """Whether ``module.`` is to be taken away from the names that have it."""
    stripped = _stripped(names)
    if not stripped:
        return False
    module = wrapper.module
    as_they_are, without = _num_known(module, names), _num_known(module, stripped)
    if as_they_are != without:
        return without > as_they_are
    own = any(name.startswith(_PREFIX) for name in module.state_dict(keep_vars=True))
    return len(stripped) == len(names) and not own


def _num_known(module: nn.Module, names: Sequence[str]) -> int:
    """How many of the names are taken by a module, whose wrappers decide on those below them."""
    if not names:
        return 0
    if isinstance(module, NamesOfModule):
        return max(_num_known(module.module, n) for n in (names, _stripped(names)))
    count, left = 0, list(names)
    for path, wrapper in _wrappers(module, ""):
        below = [name[len(path) :] for name in left if name.startswith(path)]
        left = [name for name in left if not name.startswith(path)]
        count += _num_known(wrapper, below)
    own = set(module.state_dict(keep_vars=True))
    return count + sum(name in own for name in left)


def _wrappers(module: nn.Module, path: str) -> Iterator[tuple[str, NamesOfModule]]:
    """The outermost wrappers below a module, each with its path and a dot."""
    for name, child in module.named_children():
        if isinstance(child, NamesOfModule):
            yield f"{path}{name}.", child
        else:
            yield from _wrappers(child, f"{path}{name}.")


def _stripped(names: Sequence[str]) -> list[str]:
    return [name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)]


def _without_prefix(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state without ``module.`` before its names, and before those of the versions."""
    stripped: OrderedDict[str, Any] = OrderedDict()
    for name, value in state_dict.items():
        own = name.removeprefix(_PREFIX)
        if own in stripped or (own == name and _PREFIX + name in state_dict):
            raise RuntimeError(_twice(own, _PREFIX + own))
        stripped[own] = value
    versions = torch_internals.state_versions(state_dict)
    if versions is not None:
        # Torch keeps the version of each module's state there, under the module's name.
        own_versions = {
            f"{name}.".removeprefix(_PREFIX)[:-1]: version
            for name, version in versions.items()
            if name
        }
        torch_internals.set_state_versions(stripped, own_versions)
    return stripped


def _prefix_versions(versions: MutableMapping[str, Any], prefix: str) -> dict[str, Any]:
    """Let torch find the versions of a wrapper's module; returns what was there before."""
    found = {}
    for name, version in versions.items():
        if name == prefix[:-1]:
            found[f"{prefix}module"] = version
        elif name.startswith(prefix):
            found[f"{prefix}{_PREFIX}{name[len(prefix) :]}"] = version
    before = {name: versions.get(name) for name in found}
    versions.update(found)
    return before


def _twice(name: str, prefixed: str) -> str:
    return (
        f"the state has both {name!r} and {prefixed!r}, which are the same tensor of the module; "
        "leave one of them out"
    )
