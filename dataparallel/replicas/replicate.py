"""Clone a module onto device slots, with gradient edges back to the original."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.devices import DeviceLike, parse_devices
from dataparallel.errors import listed
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.clones import check_placement as check_placement

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_log = logging.getLogger("dataparallel")


def replicate(
    network: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Clone a module onto several device slots.

    The clones keep the structure: what the module shares with itself is shared within each clone,
    and each has ``parameters()``, ``state_dict()`` and the rest of its own. Clones on the device of
    ``network`` share the memory of its parameters; the first of them has its buffers, too.

    Example::

        replicas = replicate(net, ["cuda:0", "cuda:1"])
        (replicas[0](x0).sum() + replicas[1](x1).sum().to("cuda:0")).backward()
        net.weight.grad   # the sum over both replicas

    Args:
        network: The module; its parameters and buffers are on ``devices[0]``.
        devices: One device per replica: ints, strings or ``torch.device``; repeats are allowed.
        detach: Leave out the gradient edges. Default: gradients of the clones' parameters are
            summed, in replica order, into ``network``.

    Returns:
        One clone per device.

    Raises:
        TypeError: A submodule cannot be cloned (a ScriptModule).
        ValueError: Parameters or buffers are elsewhere, or not initialized yet.
    """
    if not devices:
        return []
    slots = parse_devices(devices)
    check_placement(network, slots[0])
    clones = ModuleClones(network, slots).refresh(len(slots), detach=detach)
    return cast("list[ModuleT]", clones)


def is_spread(module: nn.Module) -> bool:
    """Whether the parameters and buffers of a module are on several devices."""
    return len({tensor.device for tensor in (*module.parameters(), *module.buffers())}) > 1


def place(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move a module to its first device: from the CPU, and where it is the only one from anywhere.

    Parameters stay the objects that they are, so an optimizer made before goes on with them. What
    somebody has put on another accelerator is left there, for :func:`check_placement` to refuse.
    """
    there = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    first = devices[0]
    if not there - {first} or (len(devices) > 1 and there != {torch.device("cpu")}):
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    # Between types of devices that are strange to each other torch makes new parameters, unless it
    # is told to swap what is in them: an optimizer would go on with those that nobody uses.
    keeps = torch_internals.takes_memory_of(torch.empty(0), torch.empty(0, device=first))
    torch.__future__.set_swap_module_params_on_conversion(before or not keeps)
    try:
        module.to(first)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    _log.info(
        "the module was on %s and is on %s now, the first of its devices",
        listed(sorted(map(str, there))),
        first,
    )
