"""An optimizer whose state is spread over the devices of the replicas.

A shard on the device of its parameters steps the parameters themselves. A shard on another device
brings the values there, next to the state, together with the gradients, steps these copies, writes
the new values to the parameters and lets the copies go. So whoever changes parameters between steps
need not tell anybody, and between steps the other devices hold nothing but state.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
2020, stage 1; there each process steps its share, here each device of one process.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dataparallel import comm, torch_internals
from dataparallel import devices as _devices
from dataparallel.graph.functions import plan_buckets
from dataparallel.graph.originals import IN_GRAD
from dataparallel.optim.in_backward import DividedOptimizer
from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.workers import WorkerPools


class ShardedOptimizer(DividedOptimizer):
    """An optimizer that keeps the state of each parameter on one of the model's devices.

    The state of AdamW is twice as large as the parameters. With n devices each one holds about an
    n-th of it. ``step()`` brings the values and gradients of each shard to its device, steps all
    shards at the same time, and brings the new values back. Results are those of the wrapped class,
    bit for bit if the devices are of one type. Checkpoints are those of the plain optimizer, for
    any number of devices. Schedulers, ``torch.amp.GradScaler``, gradient clipping, hooks and
    closures work as usual.

    If a shard fails, ``step()`` raises the original exception with the shard's device. Every other
    shard has then finished its step. Parameters of the failed shard on other devices are unchanged.

    Example::

        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer_class: What steps: a class of ``torch.optim`` except LBFGS, or one derived from
            it, that updates each parameter from that parameter alone and keeps nothing else.
        model: A wrapper; its ``device_ids`` are the devices of the shards. CPU slots have a shard
            and a thread each, an accelerator has one shard however often it is named.
        params: What the wrapped class takes as its first argument: parameters, named parameters,
            or dicts, one per group. Default: ``model.parameters()``.
        arguments: Keyword arguments of the wrapped class.

    Attributes:
        optimizer_class: The wrapped class.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class.
        ValueError: The class is not known to be divisible (LBFGS, one that is not derived from
            torch's), or it refuses an argument; at the first step, if ``differentiable=True``.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        model: nn.Module,
        *,
        params: ParamsT | None = None,
        **arguments: Any,
    ) -> None:
        self._devices = _shard_devices(model)
        # The index of the shard that each parameter belongs to.
        self._place: dict[Tensor, int] = {}
        self._pools = WorkerPools()
        given = model.parameters() if params is None else params
        super().__init__(optimizer_class, given, **arguments)
        self._follow()
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
            What ``closure`` returned, else None.

        Raises:
            BaseException: What a shard raised, with "in replica i on device d" added, which counts
                the shards.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        groups = self._group_numbers()
        shards: list[list[Tensor]] = [[] for _ in self._devices]
        for p in groups:
            if p.grad is not None:
                shards[self._place[p]].append(p)
        tasks = [
            functools.partial(self._step_shard, members, groups, device)
            for members, device in zip(shards, self._devices, strict=True)
        ]
        apply_replicas(tasks, self._devices, self._pools)
        return loss

    def _step_shard(
        self, members: Sequence[Tensor], groups: Mapping[Tensor, int], device: torch.device
    ) -> None:
        """Step parameters that have a gradient on the device of their shard."""
        if not members:
            return
        away: dict[torch.device, list[Tensor]] = {}
        for p in members:
            if p.device != device:
                away.setdefault(p.device, []).append(p)
        stand_ins = {p: p for p in members}
        for originals in away.values():
            stand_ins.update(zip(originals, _brought(originals, device), strict=True))
        self._step_part(stand_ins, groups, device, hooks=False)
        for originals in away.values():
            _write([stand_ins[p] for p in originals], originals)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped class, saved by it or by an optimizer like this one.

        The class itself loads it, so hooks for it get an optimizer of that class.

        Args:
            state_dict: From ``state_dict()``; its tensors are copied to the devices of the shards.

        Raises:
            ValueError: Its groups are not like those of this optimizer.
        """
        self._follow()
        # Of parameters it looks at the number, the dtype and the device only.
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
        """The device on which the state of a parameter is, or will be.

        Example::

            optimizer.device_of(net.weight)     # device(type='cuda', index=1)

        Args:
            parameter: One of the parameters in ``param_groups``.

        Raises:
            KeyError: The parameter is in no group of this optimizer.
        """
        self._follow()
        return self._devices[self._place[parameter]]

    def close(self) -> None:
        """End the threads of the shards; the next step starts new ones."""
        self._pools.close()

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


def _shard_devices(model: nn.Module) -> tuple[torch.device, ...]:
    """One device per shard: each CPU slot, and each accelerator once."""
    ids: Any = model.device_ids
    if not ids:
        # A module that is itself spread over devices has no list of them.
        ids = list(dict.fromkeys(p.device for p in model.parameters()))
    slots: list[torch.device] = []
    for device in _devices.parse_devices(ids):
        if device not in slots or not _devices.is_accelerator(device):
            slots.append(device)
    return tuple(slots)


def _brought(originals: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of parameters of one device on another one, with their gradients."""
    grads = [p.grad for p in originals if p.grad is not None]
    # A copy that was made in inference mode could never be stepped outside of it.
    with torch.inference_mode(False):
        (brought,) = comm.broadcast_coalesced([*originals, *grads], [device])
    copies = brought[: len(originals)]
    for copy, grad in zip(copies, brought[len(originals) :], strict=True):
        IN_GRAD.write(copy, grad)
    return copies


def _write(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Write values to tensors of another device, a few at a time, so that little is alive twice."""
    for bucket in plan_buckets(sources):
        written = [targets[i] for i in bucket]
        sent = comm.broadcast_coalesced([sources[i] for i in bucket], [written[0].device])[0]
        torch_internals.foreach_copy_(written, sent)
