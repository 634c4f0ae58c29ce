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

Torch itself goes on from the wrapper to the child ``module``. It puts names and versions under
``module.`` there, which a hook of the wrapper takes away. Where it loads, it has to find them under
``module.``, and puts such names into its report. So the names get the prefix for the time of the
call, and the report gets the others back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dataparallel import torch_internals

_PREFIX = "module."


class _Loading(NamedTuple):
    """What a wrapper has renamed for a load that torch makes."""

    #: The path of the wrapper, with a dot behind it.
    prefix: str
    #: The names that came, by those that torch finds.
    renamed: Mapping[str, str]
    versions: MutableMapping[str, Any] | None
    #: The versions that were under names with the prefix, None where there was none.
    before: Mapping[str, Any]
    #: The messages of errors.
    errors: list[str]


class NamesOfModule(nn.Module):
    """The part of a wrapper that is about names. See Note [Names with a prefix]."""

    module: Any
    _loading: _Loading | None = None

    def _give_names_back(self) -> None:
        """Have states, and reports of what was loaded, in the names of the module; called once."""
        hooks: Any = self
        hooks.register_state_dict_post_hook(NamesOfModule._finish_state)
        hooks.register_load_state_dict_post_hook(NamesOfModule._finish_loading)

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

    def _finish_state(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Take the prefix away from the names that torch has just given."""
        inner = prefix + _PREFIX
        for table in (state, torch_internals.state_versions(state) or {}):
            found = {name: table.pop(name) for name in list(table) if f"{name}.".startswith(inner)}
            table.update((_without(inner, prefix, name), value) for name, value in found.items())

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
        return super().load_state_dict(state_dict, strict, assign)

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
        # Torch goes on to the child "module".
        names = [name[len(prefix) :] for name in state_dict if name.startswith(prefix)]
        prefixed = _is_prefixed(self, names)
        bare = [name for name in names if not (prefixed and name.startswith(_PREFIX))]
        values = {name: state_dict.pop(prefix + name) for name in bare}
        renamed = {}
        for name, value in values.items():
            new = prefix + _PREFIX + name
            if new in state_dict:
                error_msgs.append(
                    f"the state has both {prefix + name!r} and {new!r}, which are the same tensor "
                    "of the module; leave one of them out"
                )
            else:
                renamed[new] = prefix + name
                state_dict[new] = value
        versions = None if prefixed else torch_internals.versions_being_loaded()
        before = {} if versions is None else _prefix_versions(versions, prefix)
        self._loading = _Loading(prefix, renamed, versions, before, error_msgs)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _finish_loading(self, incompatible: Any) -> None:
        """Give the report of a load the names that came, and the versions their places."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        path, inner = loading.prefix, loading.prefix + _PREFIX
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        missing[:] = [_without(inner, path, name) for name in missing]
        unexpected[:] = [loading.renamed.get(name, name) for name in unexpected]
        loading.errors[:] = [text.replace(f" {inner}", f" {path}", 1) for text in loading.errors]
        for name, version in loading.before.items():
            assert loading.versions is not None
            if version is None:
                del loading.versions[name]
            else:
                loading.versions[name] = version


def _without(inner: str, prefix: str, name: str) -> str:
    """A name with ``inner``, where it begins so, replaced by ``prefix``; both end with a dot."""
    dotted = f"{name}."
    return f"{prefix}{dotted[len(inner) :]}"[:-1] if dotted.startswith(inner) else name


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
