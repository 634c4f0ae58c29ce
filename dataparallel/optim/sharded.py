"""An optimizer whose state is spread over the devices of the replicas.

The parts it is made of: Note [Parts of an optimizer], Note [Stand-ins].

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

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.errors import locate
from dataparallel.optim.part import carry_back, check_divisible, view_of
from dataparallel.optim.shard import OptimizerShard
from dataparallel.threads import generators
from dataparallel.threads.context import ThreadContext
from dataparallel.threads.workers import WorkerPools
from dataparallel.torch_internals import SUPPORTS_SCALING


def plan_shards(sizes: Sequence[int], num_shards: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign things to shards so that the shards are about equally full.

    Example::

        plan_shards([5, 3, 3, 1], 2)   # [0, 1, 1, 0]

    Args:
        sizes: A size for each thing, in any unit.
        num_shards: How many shards there are, at least 1.
        loads: What each shard has already. Default: nothing.

    Returns:
        The index of a shard for each thing. The largest comes first, each goes to the shard that
        has least (of several the first), so the result depends on nothing but the arguments.
        Source: Graham, "Bounds on multiprocessing timing anomalies", 1969 (LPT).
    """
    filled = list(loads) or [0] * num_shards
    places = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = min(range(num_shards), key=filled.__getitem__)
        filled[places[index]] += sizes[index]
    return places


class ShardedOptimizer(Optimizer):
    """An optimizer that keeps the state of each parameter on one of the model's devices.

    The state of AdamW is twice as large as the parameters. With n devices each one holds about an
    n-th of it, and devices other than the parameters' own also hold a copy of as many parameters.
    ``step()`` steps all shards at the same time. Results are those of the wrapped class, bit for
    bit if the devices are of one type. Checkpoints are those of the plain optimizer, for any number
    of devices. Schedulers, ``torch.amp.GradScaler``, gradient clipping, hooks and closures work as
    usual.

    The class must update each parameter from that parameter alone, as all of ``torch.optim`` except
    LBFGS do. A parameter that is frozen when you add it keeps its state on its own device.

    If a shard fails, ``step()`` raises the original exception with the shard's index and device.
    Every other shard has then finished its step. Parameters of the failed shard on other devices
    are unchanged. Parameters on its own device, and the state of both, are what the wrapped class
    leaves after a failed step.

    Example::

        model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer_class: What steps: ``torch.optim.AdamW`` or another subclass of
            ``torch.optim.Optimizer``.
        model: A wrapper; its ``device_ids`` are the devices of the shards. CPU slots have a shard
            and a thread each, an accelerator has one shard however often it is named.
        params: What the wrapped class takes as its first argument: parameters, named parameters,
            or dicts, one per group. Default: ``model.parameters()``.
        arguments: Keyword arguments of the wrapped class.

    Attributes:
        optimizer_class: The wrapped class.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class, or ``model`` no wrapper.
        ValueError: The class cannot be stepped in parts (LBFGS), ``differentiable=True`` is asked
            for, or the wrapped class refuses an argument.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        model: nn.Module,
        *,
        params: ParamsT | None = None,
        **arguments: Any,
    ) -> None:
        check_divisible(optimizer_class)
        self.optimizer_class = optimizer_class
        self._arguments = arguments
        self._devices = _shard_devices(model)
        self._pools = WorkerPools()
        self._place: dict[Tensor, int] = {}
        self._shards: list[OptimizerShard] = []
        self._refuse_differentiable(arguments)
        # Without defaults: those are known once the class has seen the groups.
        super().__init__(model.parameters() if params is None else params, {})
        self._refuse_differentiable(*self.param_groups)
        self._follow()
        first = self._shards[0].part.optimizer
        self.defaults = first.defaults
        for group, made in zip(self.param_groups, first.param_groups, strict=True):
            for name, value in made.items():
                group.setdefault(name, value)
        for shard in self._busy():
            shard.part.give(self)
        self._copy_scaling()

    def _copy_scaling(self) -> None:
        # GradScaler asks for it: the fused kernels unscale by themselves.
        if getattr(self._shards[0].part.optimizer, SUPPORTS_SCALING, False):
            setattr(self, SUPPORTS_SCALING, True)

    def _refuse_differentiable(self, *options: Mapping[str, Any]) -> None:
        if any(each.get("differentiable") for each in options):
            raise ValueError(
                "differentiable=True needs one graph through the whole step, and a sharded step "
                f"works on copies; use {self.optimizer_class.__name__} itself"
            )

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
            BaseException: What a shard raised, with "in shard i on device d" added.
            RuntimeError: The wrapped class turned out to couple the parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        busy = self._busy()
        for shard in busy:
            shard.part.take(self)
        try:
            self._run(busy)
        finally:
            for shard in busy:
                shard.part.give(self)
        carry_back([shard.part for shard in busy], self)
        return loss

    def _busy(self) -> list[OptimizerShard]:
        return [shard for shard in self._shards if shard.stand_ins]

    def _run(self, shards: Sequence[OptimizerShard]) -> None:
        devices = [shard.device for shard in shards]
        labels = [f"in shard {shard.index} on device {shard.device}" for shard in shards]
        # The streams of all devices are carried, those of the parameters among them.
        context = ThreadContext.capture([*devices, *self._devices])
        if len(shards) < 2 or not context.portable:
            errors = [_error_of(shard, label) for shard, label in zip(shards, labels, strict=True)]
            try:
                for error in filter(None, errors):
                    raise error
            finally:
                # The traceback holds this frame, which would hold the errors.
                errors.clear()
            return
        generators.separate_device_generators(devices)
        draws = generators.ReplicaGenerators(devices)
        tasks = [
            functools.partial(context.run, i, functools.partial(_run_in_thread, shard, draws, i))
            for i, shard in enumerate(shards)
        ]
        count = torch.get_num_threads()
        threads = [share or count for share in _devices.intra_op_shares(devices)]
        with self._pools.borrow() as workers:
            workers.run(tasks, labels, threads=threads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; they are assigned to the shards as well."""
        if not self._shards:
            super().add_param_group(param_group)
            return
        self._refuse_differentiable(param_group)
        super().add_param_group(param_group)
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of the wrapped class; each tensor is on its shard's device."""
        for hook in torch_internals.state_dict_pre_hooks(self).values():
            hook(self)
        packed: dict[str, Any] = self._view().state_dict()
        for change in torch_internals.state_dict_post_hooks(self).values():
            changed = change(self, packed)
            packed = packed if changed is None else changed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped class, saved by it or by a sharded optimizer.

        Args:
            state_dict: From ``state_dict()``; its tensors are copied to the devices of the shards
                to which their parameters belong.

        Raises:
            ValueError: Its groups are not like those of this optimizer.
        """
        state_dict = state_dict.copy()
        for change in torch_internals.load_state_dict_pre_hooks(self).values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        view = self._view()
        view.load_state_dict(state_dict)
        originals = {stand_in: p for s in self._shards for p, stand_in in s.stand_ins.items()}
        self.param_groups = [
            {**loaded, "params": group["params"]}
            for loaded, group in zip(view.param_groups, self.param_groups, strict=True)
        ]
        self.state = defaultdict(dict, {originals.get(k, k): v for k, v in view.state.items()})
        for hook in torch_internals.load_state_dict_post_hooks(self).values():
            hook(self)

    def _view(self) -> Optimizer:
        """An optimizer of the wrapped class over the stand-ins, to save and load the state."""
        self._follow()
        current = [p for group in self.param_groups for p in group["params"]]
        stand_ins = {p: self._shards[self._place[p]].stand_ins[p] for p in current}
        groups = [
            {**group, "params": [stand_ins[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        # In the order of the parameters, which is not that in which shards give their state.
        state = {s: self.state[p] for p, s in stand_ins.items() if p in self.state}
        state.update({k: v for k, v in self.state.items() if k not in stand_ins})
        return view_of(self._shards[0].part.optimizer, groups, state)

    # --- shards --------------------------------------------------------------------------------

    def device_of(self, parameter: Tensor) -> torch.device:
        """The device on which the state of a parameter is, or will be.

        Example::

            optimizer.device_of(net.weight)     # device(type='cuda', index=1)

        Args:
            parameter: One of the parameters in ``param_groups``.

        Raises:
            ValueError: The parameter is in no group of this optimizer.
        """
        self._follow()
        if parameter not in self._place:
            raise ValueError(
                f"this optimizer has {len(self._place)} parameters, and the tensor of shape "
                f"{tuple(parameter.shape)} is not one of them; add it with add_param_group"
            )
        return self._devices[self._place[parameter]]

    def close(self) -> None:
        """End the threads of the shards; the next step starts new ones."""
        self._pools.close()

    def _follow(self) -> None:
        """Let the shards have the parameters that the groups have now; users may change them."""
        current = {p: None for group in self.param_groups for p in group["params"]}
        same = bool(self._shards) and current.keys() == self._place.keys()
        if same and all(shard.is_placed() for shard in self._shards):
            return
        known = {p: place for p, place in self._place.items() if p in current}
        self._place = {**known, **self._plan([p for p in current if p not in known], known)}
        shards = self._shards or [OptimizerShard(i, d) for i, d in enumerate(self._devices)]
        for shard in shards:
            mine = [p for p in current if self._place[p] == shard.index]
            # The first has an optimizer in any case, which tells the defaults.
            if mine or shard.stand_ins or shard.index == 0:
                shard.own(mine, self, self.optimizer_class, self._arguments)
        self._shards = shards

    def _plan(self, new: Sequence[Tensor], known: Mapping[Tensor, int]) -> dict[Tensor, int]:
        loads = [0] * len(self._devices)
        for p, place in known.items():
            loads[place] += p.nbytes if p.requires_grad else 0
        trained = [p for p in new if p.requires_grad]
        places = plan_shards([p.nbytes for p in trained], len(loads), loads)
        homes: dict[torch.device, int] = {}
        for index, device in enumerate(self._devices):
            homes.setdefault(device, index)
        # Frozen parameters have no state, and copies of them would be of no use.
        frozen = {p: homes.get(p.device, 0) for p in new if not p.requires_grad}
        return {**dict(zip(trained, places, strict=True)), **frozen}

    # --- life ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "optimizer_class": self.optimizer_class,
            "_arguments": self._arguments,
            "_devices": self._devices,
            "_place": self._place,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shards = []
        self._pools = WorkerPools()
        super().__setstate__(state)
        self._follow()
        self._copy_scaling()

    def __repr__(self) -> str:
        shards = ", ".join(f"{len(s.stand_ins)} on {s.device}" for s in self._shards)
        return f"{super().__repr__()}\n{self.optimizer_class.__name__}, parameters: {shards}"


def _run_in_thread(
    shard: OptimizerShard, draws: generators.ReplicaGenerators, position: int
) -> None:
    with draws.use(position):
        shard.step()


def _error_of(shard: OptimizerShard, label: str) -> Exception | None:
    """Step in this thread; the others step too when one fails, as they do in threads."""
    try:
        with _devices.use_device(shard.device):
            shard.step()
    except Exception as error:
        locate(error, label)
        return error
    return None


def _shard_devices(model: nn.Module) -> tuple[torch.device, ...]:
    """One device per shard: each CPU slot, and each accelerator once."""
    if not isinstance(model, nn.Module) or not hasattr(model, "device_ids"):
        raise TypeError(
            "model is a wrapper with device_ids, such as dataparallel.DataParallel(net), but got "
            f"{type(model).__name__}; the plain optimizer is right for a module on one device"
        )
    ids: Any = model.device_ids
    if not ids:
        # A module that is itself spread over devices has no list of them.
        ids = list(dict.fromkeys(p.device for p in model.parameters()))
    slots: list[torch.device] = []
    for device in _devices.parse_devices(ids):
        if device not in slots or not _devices.is_accelerator(device):
            slots.append(device)
    return tuple(slots)
