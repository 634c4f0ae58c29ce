"""An optimizer whose state is spread over the devices of the replicas.

A shard on the device of its parameters steps the parameters themselves. A shard on another device
brings the values there, next to the state, together with the gradients. It steps these copies,
writes the new values to the parameters and lets the copies go. So whoever changes parameters
between steps need not tell anybody, and between steps the other devices hold nothing but state.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
2020, stage 1. There each process steps its share, here each device of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

import dataparallel.comm as comm
from dataparallel import torch_internals
from dataparallel.comm.bucket_plan import fill
from dataparallel.devices import parse_devices
from dataparallel.graph.originals import IN_GRAD
from dataparallel.optim.in_backward import DividedOptimizer


class ShardedOptimizer(DividedOptimizer):
    """An optimizer that keeps the state of each parameter on one of the model's devices.

    The state of AdamW is twice as large as the parameters. With n devices each one holds about an
    n-th of it. ``step()`` brings the values and gradients of each shard to its device, and steps
    the shards, on accelerators at the same time. Then it brings the new values back. Results are
    those of the wrapped class, bit for bit if the devices are of one type. Checkpoints are those of
    the plain optimizer, for any number of devices. Schedulers, ``torch.amp.GradScaler``, gradient
    clipping, hooks and closures work as usual.

    Example::

        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer_class: A class of ``torch.optim`` except LBFGS, or one derived from it. It updates
            each parameter from that parameter alone and keeps nothing else.
        model: A wrapper; each of its devices has a shard.
        params: The first argument of the wrapped class: parameters, named parameters, or dicts, one
            per group. Default: ``model.parameters()``.
        arguments: Keyword arguments of the wrapped class. A tensor among them is on the CPU.

    Attributes:
        optimizer_class: The wrapped class.

    Raises:
        ValueError: The class is not known to be divisible (LBFGS, one that is not derived from
            torch's), or it refuses an argument.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        model: nn.Module,
        *,
        params: ParamsT | None = None,
        **arguments: Any,
    ) -> None:
        # A module that is itself spread over devices has no list of them.
        ids: Any = model.device_ids or [p.device for p in model.parameters()]
        self._devices = tuple(dict.fromkeys(parse_devices(ids)))
        # The index of the shard that each parameter belongs to.
        self._place: dict[Tensor, int] = {}
        given = model.parameters() if params is None else params
        super().__init__(optimizer_class, given, **arguments)
        if self.state:
            # Some classes make it at once, where the parameters are.
            self.load_state_dict(self.state_dict())

    # --- what an optimizer does ----------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: Evaluates the model once more and returns the loss; called once, before
                anything is updated.

        Returns:
            The result of ``closure``, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        shards: list[list[Tensor]] = [[] for _ in self._devices]
        for p, place in self._place.items():
            if p.grad is not None:
                shards[place].append(p)
        stepped: list[dict[Tensor, Tensor]] = []
        try:
            for members, device in zip(shards, self._devices, strict=True):
                if members:
                    stand_ins = _brought(members, device)
                    self._step_part(stand_ins)
                    stepped.append(stand_ins)
        finally:
            # Write when all have begun, since a device that gets values waits for them.
            for stand_ins in stepped:
                _write(stand_ins)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped class, saved by it or by an optimizer like this one.

        The class itself loads it, so hooks for it get an optimizer of that class.

        Args:
            state_dict: From ``state_dict()``; its tensors are copied to the devices of the shards.

        Raises:
            ValueError: Its groups are not like those of this optimizer.
        """
        self._follow()
        # It looks only at the number, the dtype and the device of parameters.
        places = {
            p: torch.empty(0, dtype=p.dtype, device=self._devices[place])
            for p, place in self._place.items()
        }
        groups = [{**g, "params": [places[p] for p in g["params"]]} for g in self.param_groups]
        loaded = self._part(groups, {})
        loaded.load_state_dict(state_dict)
        self.param_groups = [
            {**new, "params": old["params"]}
            for new, old in zip(loaded.param_groups, self.param_groups, strict=True)
        ]
        originals = {place: p for p, place in places.items()}
        state = {originals.get(key, key): value for key, value in loaded.state.items()}
        self.state = defaultdict(dict, state)

    # --- shards --------------------------------------------------------------------------------

    def device_of(self, parameter: Tensor) -> torch.device:
        """Return the device on which the state of a parameter is, or will be.

        Example::

            optimizer.device_of(net.weight)     # device(type='cuda', index=1)

        Args:
            parameter: One of the parameters in ``param_groups``.

        Raises:
            KeyError: The parameter is in no group of this optimizer.
        """
        self._follow()
        return self._devices[self._place[parameter]]

    def _follow(self) -> None:
        """Give the parameters that the groups have now to shards, so that these are equally full.

        The largest comes first, each goes to the shard that has least. Source: Graham, "Bounds on
        multiprocessing timing anomalies", 1969 (LPT).
        """
        current = self._group_numbers()
        self._place = {p: place for p, place in self._place.items() if p in current}
        # Frozen parameters have no state.
        size = {p: p.nbytes if p.requires_grad else 0 for p in current}
        filled = [0] * len(self._devices)
        for p, place in self._place.items():
            filled[place] += size[p]
        for p in sorted([p for p in current if p not in self._place], key=lambda p: -size[p]):
            place = min(range(len(filled)), key=filled.__getitem__)
            filled[place] += size[p]
            self._place[p] = place


def _brought(members: Sequence[Tensor], device: torch.device) -> dict[Tensor, Tensor]:
    """Parameters of a shard, each with itself or with a copy on the device, with its gradient."""
    stand_ins = {p: p for p in members}
    away: dict[torch.device, list[Tensor]] = {}
    for p in members:
        if p.device != device:
            away.setdefault(p.device, []).append(p)
    for originals in away.values():
        grads = [p.grad for p in originals if p.grad is not None]
        (brought,) = comm.broadcast_coalesced([*originals, *grads], [device])
        copies = brought[: len(originals)]
        stand_ins.update(zip(originals, copies, strict=True))
        for copy, grad in zip(copies, brought[len(originals) :], strict=True):
            IN_GRAD.write(copy, grad)
    return stand_ins


def _write(stand_ins: dict[Tensor, Tensor]) -> None:
    """Write values to parameters of other devices, a few at a time: little is alive twice."""
    moved = [(p, stand_in) for p, stand_in in stand_ins.items() if stand_in is not p]
    for bucket, _ in fill(enumerate([p for p, _ in moved])):
        originals, sources = zip(*[moved[i] for i in bucket], strict=True)
        (sent,) = comm.broadcast_coalesced(sources, [originals[0].device])
        torch_internals.foreach_copy_(originals, sent)
