"""What of a module is left to each process: neither reduced nor sent."""

from __future__ import annotations

from torch import nn

from dataparallel.torch_internals import IGNORED_NAMES


def ignored_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers that each process keeps to itself.

    They are those that torch's ``_set_params_and_buffers_to_ignore_for_model`` has left in the
    module, with or without the dot that torch's recipe puts before names of the module itself.
    What has several names is left out if all of them were given.
    """
    given = {name.removeprefix(".") for name in getattr(module, IGNORED_NAMES, ())}
    if not given:
        return given
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {name for each in names.values() if given.issuperset(each) for name in each}
