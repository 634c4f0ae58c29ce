"""Originals that are on all devices of a wrapper: where each one is, and how it comes there.

Note [Spread originals]
~~~~~~~~~~~~~~~~~~~~~~~
A gradient edge ends where the original is. So with originals on all devices, no single device has
all gradients and the whole state of an optimizer. The owner of a parameter is the device on which
its original is. The replica there shares the memory of the original, as replica 0 does with
originals at home, and the other replicas have copies. So every device has all values in any case,
and a parameter that is not trained stays on the first one: to move it would save nothing.

Parameters move in place. They stay the same objects, with ``.grad``, and an optimizer steps each of
them where it is. Its state follows before its next step. A view or an average that was made before
keeps the old memory.

Parameters whose memory overlaps move together. Those of a class that holds other tensors stay.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import torch_internals
from dataparallel.devices import is_accelerator, is_capturing
from dataparallel.errors import listed
from dataparallel.graph.originals import IN_GRAD

_log = logging.getLogger("dataparallel")

# Small parameters that follow each other have one owner, up to this part of an owner's share.
_PARTS_PER_OWNER = 16

# Moves so far. Each module that was moved has the number of those before it left the CPU, or -1 if
# it never did, and the ids of its parameters. They count only while it lives, since a later module
# may have the same, and torch cannot swap what is in a parameter with a weak reference.
_num_moves = 0
_moved = weakref.WeakKeyDictionary[nn.Module, tuple[int, list[int]]]()
_moving = threading.Lock()
# Per optimizer the number of moves that it has followed, and the devices of its parameters.
_known = weakref.WeakKeyDictionary[Optimizer, tuple[int, set[torch.device]]]()


# --- owners --------------------------------------------------------------------------------------


def owners_of(
    parameters: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[torch.device]:
    """Return the owner of each parameter, so that all devices have about as many bytes.

    Large ones come first, from the largest on; small ones go together with their neighbors. The
    owners depend on sizes and the number of devices alone, so that all processes find the same.
    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969 (LPT).
    """
    places = list(dict.fromkeys(devices))
    units = _units(parameters)
    sizes = [sum(parameters[i].nbytes for i in unit) for unit in units]
    limit = sum(sizes) // (_PARTS_PER_OWNER * len(places))
    filled = [0] * len(places)
    chosen: list[int] = [0] * len(parameters)

    def give(unit: Sequence[int], size: int, place: int) -> None:
        filled[place] += size
        for i in unit:
            chosen[i] = place

    large = [number for number, size in enumerate(sizes) if size > limit]
    for number in sorted(large, key=lambda number: -sizes[number]):
        give(units[number], sizes[number], filled.index(min(filled)))
    place, taken = 0, limit + 1
    for unit, size in zip(units, sizes, strict=True):
        if size <= limit:
            if taken + size > limit:
                place, taken = filled.index(min(filled)), 0
            give(unit, size, place)
            taken += size
    return [places[place] for place in chosen]


def _units(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of parameters, those together whose memory overlaps."""

    def span(i: int) -> tuple[int, int, int]:
        one = parameters[i]
        storage = one.untyped_storage().data_ptr()
        last = sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        begin = one.data_ptr()
        return storage, begin, begin + (last + 1) * one.element_size() * bool(one.numel())

    units: list[list[int]] = []
    end = (0, 0)
    for i in sorted(range(len(parameters)), key=span):
        storage, begin, stop = span(i)
        if units and storage == end[0] and begin < end[1]:
            units[-1].append(i)
        else:
            units.append([i])
        end = storage, max(stop, end[1] if storage == end[0] else 0)
    return sorted(map(sorted, units))


def may_move(parameter: torch.Tensor) -> bool:
    """True if a parameter may have another owner than the first device."""
    plain = type(parameter.detach()) is torch.Tensor and parameter.layout == torch.strided
    return plain and parameter.requires_grad and not parameter.is_quantized


# --- moves ---------------------------------------------------------------------------------------


def was_spread(module: nn.Module) -> bool:
    """True if a wrapper has spread the parameters of this module, or of the one it is a copy of."""
    return refuse_alone in torch_internals.forward_pre_hooks(module).values()


def is_of_user(hook: Any) -> bool:
    """True if a hook of a module is not one that refuses calls of a module that is spread."""
    return hook is not refuse_alone


def spread(
    module: nn.Module, parameters: Sequence[nn.Parameter], devices: Sequence[torch.device]
) -> None:
    """Move each of the parameters to its owner, in place, and all others to the first device."""
    chosen = [parameter for parameter in parameters if may_move(parameter)]
    kept = set(map(id, chosen))
    rest = [parameter for parameter in module.parameters() if id(parameter) not in kept]
    owners = owners_of(chosen, [device for device in devices if device.type == devices[0].type])
    moved = lay_out(module, [*chosen, *rest], [*owners, *[devices[0]] * len(rest)])
    if moved:
        places = Counter[str]()
        for parameter in chosen:
            places[str(parameter.device)] += parameter.nbytes
        shares = [f"{place} {size / 2**20:.1f} MiB" for place, size in sorted(places.items())]
        _log.info("%d parameters were moved to their owners: %s", moved, listed(shares))


def lay_out(
    module: nn.Module, parameters: Sequence[torch.Tensor], targets: Sequence[torch.device]
) -> int:
    """Move all parameters of a module in place, and refuse calls of it; returns how many moved."""
    note_move(module)
    moved = move(parameters, targets)
    if len(set(targets)) > 1 and not was_spread(module):
        module.register_forward_pre_hook(refuse_alone, prepend=True)
    return moved


def gather(module: nn.Module, device: torch.device) -> None:
    """Move all parameters of a module to one device, in place."""
    parameters = list(module.parameters())
    if parameters and not torch_internals.takes_memory_of(
        parameters[0], torch.empty(0, device=device)
    ):
        raise ValueError(
            f"parameters on {parameters[0].device} cannot be moved to {device} in place; name "
            "another device of the wrapper, or move a copy: copy.deepcopy(model.module).to(...)"
        )
    note_move(module)
    move(parameters, [device] * len(parameters))


def end(module: nn.Module, device: torch.device) -> None:
    """Move all parameters of a module to one device, for good."""
    gather(module, device)
    hooks = torch_internals.forward_pre_hooks(module)
    for key in [key for key, hook in hooks.items() if hook is refuse_alone]:
        del hooks[key]


def num_moves() -> int:
    """Return the number of moves so far."""
    return _num_moves


def note_move(module: nn.Module) -> None:
    """Note that parameters of a module are about to move; the states of optimizers will follow."""
    global _num_moves
    parameters = list(module.parameters())
    on_host = not all(is_accelerator(parameter.device) for parameter in parameters)
    with _moving:
        if not _num_moves:
            register_optimizer_step_pre_hook(_before_step)
        left = _num_moves if on_host else _moved.get(module, (-1, ()))[0]
        _moved[module] = left, list(map(id, parameters))
        _num_moves += 1


def move(parameters: Sequence[torch.Tensor], targets: Sequence[torch.device]) -> int:
    """Move parameters in place, with their gradients; return how many had to move."""
    global _num_moves
    pairs = list(zip(parameters, targets, strict=True))
    due = {i for i, (parameter, target) in enumerate(pairs) if parameter.device != target}
    with _moving:
        _num_moves += 1
    for unit in _units(parameters) if due else ():
        members, target = [parameters[i] for i in unit], targets[unit[0]]
        if due.isdisjoint(unit):
            continue
        # Memory that was made in inference mode is for parameters that were.
        with torch.inference_mode(members[0].is_inference()), torch.no_grad():
            for parameter, value in zip(members, _brought(members, target), strict=True):
                (grad,) = IN_GRAD.swap([parameter], [None])
                parameter.data = value
                if grad is not None:
                    IN_GRAD.write(parameter, grad.to(target))
    return len(due)


def _brought(unit: Sequence[torch.Tensor], target: torch.device) -> Iterator[torch.Tensor]:
    """Yield the values of a unit on another device; those that overlap still do."""
    if len(unit) == 1:
        yield torch.empty_like(unit[0], device=target).copy_(unit[0])
        return
    first = unit[0]
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    whole.set_(first.untyped_storage())
    memory = whole.to(target).untyped_storage()
    for one in unit:
        value = torch.empty(0, dtype=one.dtype, device=target)
        yield value.set_(memory, one.storage_offset(), one.shape, one.stride())


def refuse_alone(module: nn.Module, _: Any) -> None:
    """Raise a RuntimeError if a module is called by itself whose parameters are spread."""
    if getattr(module, torch_internals.REPLICA_MARK, False):
        return
    places = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(places) > 1:
        raise RuntimeError(
            f"the parameters of this module are spread over {listed(places)}, as "
            "DistributedDataParallel(originals='spread') has them, so it cannot run by itself. "
            "Call the wrapper, or bring them to one device before: model.gather_originals(), alone "
            "or as a context"
        )


# --- optimizers ----------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Let the state of an optimizer be where its parameters are."""
    if hasattr(optimizer, "device_of"):
        return  # Such as ShardedOptimizer: it chose the devices of its state.
    followed, devices = _known.get(optimizer, (0, set()))
    # Another thread may move parameters meanwhile.
    now = _num_moves
    if followed != now:
        members = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        with _moving:
            left = {key: number for number, ids in sorted(_moved.values()) for key in ids}
        moved = [(p, group) for p, group in members if id(p) in left]
        devices = {p.device for p, _ in members} if moved else set()
        if len(devices) > 1 and isinstance(optimizer, LBFGS):
            raise RuntimeError(
                "LBFGS puts all parameters into one vector, and they are spread over several "
                "devices; use an optimizer that treats each parameter by itself, such as AdamW, or "
                "originals='home'"
            )
        for parameter, group in moved:
            if state := optimizer.state.get(parameter):
                # Counts are there, as torch has them, and what somebody keeps there on purpose.
                counts = not (group.get("capturable") or group.get("fused"))
                rest = left[id(parameter)] < followed
                state.update({k: _follow(v, parameter, counts, rest) for k, v in state.items()})
        _known[optimizer] = now, devices
    if len(devices) > 1 and any(map(is_capturing, devices)):
        raise RuntimeError(
            "a graph of one device cannot record the step of an optimizer whose parameters are "
            "spread over several devices; step outside of the graph, or use originals='home'"
        )


def _follow(value: Any, parameter: torch.Tensor, counts_stay: bool, values_stay: bool) -> Any:
    """Return a part of a state where the parameter is, but for what is to stay on the CPU."""
    if isinstance(value, torch.Tensor):
        stays = values_stay if value.dim() else counts_stay
        here = stays and not is_accelerator(value.device)
        return value if here else value.to(parameter.device)
    if isinstance(value, dict):
        return {k: _follow(x, parameter, counts_stay, values_stay) for k, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_follow(x, parameter, counts_stay, values_stay) for x in value)
    return value
